"""Runs the batches of a loaded model with random inputs, and compares their rows with those of the row alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import MAX_INPUT_BYTES, ModelFolder
from headrace.config.onnx_model import table_sizes
from headrace.config.serving_plan import GPU_RUNTIMES, ServingPlan
from headrace.config.tensor_config import ModelInput, ModelOutput, row_bytes_of, scores_output
from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Array
from headrace.inference.pipelines.execution import steps_of
from headrace.inference.scheduling.assembly import Staging
from headrace.inference.scheduling.batch_proof import (
    BatchTests,
    BatchVerdict,
    Fault,
    ProofError,
    ProofInterrupted,
    Row,
    RunBatch,
    run_rows,
)
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.inference.scheduling.proven_sizes import size_at
from headrace.inference.scheduling.row_sampler import RowSample
from headrace.inference.scheduling.sequences.state import HostStates, run_new_sequences
from headrace.models.accounted_model import AccountedModel, served_execution
from headrace.models.sequence_policy import sequence_policy, state_tensors
from headrace.models.warmup import Warmup, make_warmups, random_values
from headrace.runtimes.base import Execution, ExecutionLost
from headrace.runtimes.overlapped import OverlappedExecution, is_overlapped

logger = logging.getLogger("headrace.proof")

_ROWS = 4
# Sizes of free dimensions, until the model runs.
_FREE = (16, 64, 224)
# Up to this largest batch of ONNX Runtime each size is tested.
_EACH_SIZE = 8
# Smallest bound by precision, as a share of an output's range. GPUs compute FP32 with TF32, which has the fraction of FP16.
BOUNDS = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}
LARGEST_BOUND = 1e-2
NOT_TESTED = BatchVerdict()
_TOO_SHORT = (
    "the load was too short to prove other batches: they are proven while the model is idle, or by `headrace validate`"
)
_LEFT = "no tested size changes an answer, others run untested, and are tested while the model is idle"


def untestable(config: ModelConfig) -> str:
    """Return the reason why rows of a model are too large for random inputs; "" if they are not."""
    size_bytes = _ROWS * row_bytes_of((*config.served_input, *config.served_output))
    return "" if size_bytes <= MAX_INPUT_BYTES else f"{_ROWS} rows have {size_bytes} bytes"


def smallest_bound(plan: ServingPlan) -> float:
    """Return the smallest bound of an output, as a share of its range; a plan without a stamp may have any precision."""
    on_gpu = plan.runtime in GPU_RUNTIMES
    precision = plan.stamp.precision if plan.stamp is not None else "unknown" if plan.runtime == "tensorrt" else "fp32"
    return BOUNDS.get("tf32" if on_gpu and precision == "fp32" else precision, LARGEST_BOUND)


class ProofRun:
    """One proof of the batch sizes of a loaded model.

    Args:
        folder: folder of the model.
        version_number: the version that is loaded.
        plan: serving plan of the version.
        model: the loaded model; its executions run the batches.
        layout: joins the rows of a batch of a ragged model; None for any other.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        folder: ModelFolder,
        version_number: int,
        plan: ServingPlan,
        model: AccountedModel,
        layout: RaggedLayout | None,
        clock: Clock,
    ) -> None:
        self._folder, self._config, self._plan, self._model = folder, folder.config, plan, model
        self._source = folder.source_file(version_number)
        self._sequences = sequence_policy(folder.config, 1)
        self._states = () if self._sequences is None else self._sequences.states  # without those that stay on a GPU
        tensors: list[ModelInput | ModelOutput] = [*folder.config.served_input, *folder.config.served_output]
        self._datatypes = {tensor.name: BY_CONFIG_NAME[tensor.data_type] for tensor in tensors}
        if self._sequences is not None:
            self._datatypes |= {control.name: control.datatype for control in self._sequences.controls}
            self._datatypes |= {
                name: each.datatype for each in self._states for name in (each.input_name, each.output_name)
            }
        tables: dict[str, int] = {}
        with suppress(ConfigError):  # a plan without its ONNX file
            tables = table_sizes(self._source, self._source.name)
        self._classes = _classes(folder.config)
        self._ranges = {name: (0.0, rows - 1.0) for name, rows in tables.items()}
        self._ranges |= _ranges(make_warmups(folder.config, folder.path))
        self._clock, self._layout, self._end_ns = clock, layout, clock()
        self._find_rows = model.run_rows if layout is None else int  # from the rows of a batch to those that run
        self._is_busy: Callable[[], bool] = lambda: False
        # Every second batch has its tensors in the memory of a GPU before and after its run: of a size the first or the second.
        self._stays = self._first_stays = False
        self._pinned: dict[str, Array] = {}  # memory of such batches
        self._floor = smallest_bound(plan)
        self._references: list[BatchTests] | None = None
        self._others: list[Execution] = []  # on GPUs after the first, at a load
        self._kept: list[BatchTests] | None = None  # of an idle model, which has little time at once

    def run(self, limit_ns: int, earlier: BatchVerdict | None) -> tuple[BatchVerdict, bool]:
        """Return the verdict, and True if all sizes were tested within the limit."""
        devices, executions = self._model.devices or (0,), list[Execution]()
        for index in map(devices.index, dict.fromkeys(devices)):  # the first instance on each GPU
            with suppress(HeadraceError):  # the instance reports it
                executions.append(self._model.execution(index))
        if not executions:
            return NOT_TESTED, False
        self._others = executions[1:]
        try:
            return self.run_on(executions[0], limit_ns, earlier)
        finally:
            self._kept, self._others = None, []  # may have fewer rows
            for execution in executions:
                execution.close()

    def run_on(
        self,
        execution: Execution,
        limit_ns: int,
        earlier: BatchVerdict | None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> tuple[BatchVerdict, bool]:
        """Do as `run` on an open execution, until `is_busy` returns True before one of the batches."""
        begun_ns = self._clock()
        self._end_ns, self._is_busy = begun_ns + limit_ns, is_busy
        try:
            return self._run(execution, self._end_ns, earlier)
        except ProofInterrupted:
            return earlier or NOT_TESTED, False
        except ExecutionLost as error:
            return BatchVerdict(alone=True, reason=f"the model ended while it was being proven: {error}"), True
        finally:
            self._references = None  # as large as the model
            self._pinned.clear()
            took_ms = (self._clock() - begun_ns) // NS_PER_MS  # without the start of the execution
            logger.debug("model %s ran tests of its batches for %d ms", self._config.name, took_ms)

    def _run(self, execution: Execution, end_ns: int, earlier: BatchVerdict | None) -> tuple[BatchVerdict, bool]:
        if execution.slot_states is not None:
            self._states = ()
        try:
            tests = self._all_tests(execution)
        except ProofError as error:
            return BatchVerdict(reason=f"random inputs prove nothing: {error}"), True
        find_rows = self._find_rows
        sizes = self._sizes(find_rows)
        if self._layout is not None:
            sizes = [size for size in sizes if self._fits(tests[0], size)]
        verified = [] if earlier is None else [size for size in earlier.verified if size in sizes]
        faults = {} if earlier is None else dict(earlier.faults)
        is_complete = True
        for size in sizes:
            if size in verified or size in faults:
                continue
            estimate_ns = sum(each.estimate_ns(size) for each in tests) * (1 + len(self._others))
            if self._clock() + estimate_ns > end_ns:
                is_complete = False
                continue
            try:
                results = (self._check(each, tests, size, find_rows(size)) for each in (execution, *self._others))
                fault, is_model = next((result for result in results if result[0] is not None), (None, False))
            except ProofInterrupted:
                is_complete = False
                break
            if fault is None:
                verified.append(size)
                continue
            faults[size] = str(fault)
            if is_model:
                return BatchVerdict((1,), faults, alone=True, reason=str(fault)), True
        return self._verdict(sizes, sorted(verified), faults, find_rows, is_complete), is_complete

    def check_sample(
        self,
        execution: Execution,
        sample: RowSample,
        verdict: BatchVerdict,
        is_complete: bool,
        is_busy: Callable[[], bool],
    ) -> BatchVerdict | None:
        """Run a row of a batch again alone; return the verdict without its batch size if the outputs differ, else None.

        Raises:
            ProofInterrupted: a request came.
            ProofError: random inputs prove nothing, so that there is no bound.
        """
        self._end_ns, self._is_busy = self._clock() + NS_PER_S, is_busy
        tests = self._all_tests(execution)[0]
        size, row = size_at(sample.place, sample.size, self._model.verdict.allowed), sample.row
        is_model, outputs = True, sample.outputs
        fault = tests.compare(row, outputs, size, sample.place, None)
        if fault is not None and sample.is_shared:
            outputs = self.run_again(execution, sample, size)
            fault = tests.compare(row, outputs, size, sample.place, None)
        is_engine = self._plan.runtime != "onnxruntime" and self._layout is None
        if fault is not None and is_engine and (references := self._reference_tests()):
            reference, self._references = references[0].run, None  # as large as the model
            fault = tests.compare(row, outputs, size, sample.place, reference)
            is_model = fault is not None and references[0].check(size) is not None
        if fault is None:
            return None
        faults = {**verdict.faults, size: str(fault)}
        if is_model:
            return BatchVerdict((1,), faults, alone=True, reason=str(fault))
        find_rows = self._find_rows
        sizes = sorted({*self._sizes(find_rows), *faults})
        verified = [each for each in verdict.verified if each != size and each > 1]
        return self._verdict(sizes, verified, faults, find_rows, is_complete)

    def run_again(self, execution: Execution, sample: RowSample, size: int) -> Row:
        """Run `size` rows of the batch of a sample, with its row; return the outputs of that."""
        batch, first = sample.batch(), sample.place - sample.place % size
        indices = [(first + index) % sample.size for index in range(size)]
        rows = [{name: values[index : index + 1] for name, values in batch.items()} for index in indices]
        self._stays = not sample.is_shared  # the next batch is of the other kind
        return self.run_batch(execution)(rows)[sample.place - first]

    def _sizes(self, find_rows: Callable[[int], int]) -> list[int]:
        is_padded = self._plan.runtime == "tensorrt" and self._layout is None
        return candidates(self._model.max_rows, self._preferred(), find_rows, is_padded)

    def _verdict(
        self,
        sizes: list[int],
        verified: list[int],
        faults: Mapping[int, str],
        find_rows: Callable[[int], int],
        is_complete: bool,
    ) -> BatchVerdict:
        """Return the verdict for a model that keeps rows apart, some of whose sizes are not proven."""
        proven = (1, *verified)
        if is_complete and not faults:
            return BatchVerdict(proven)
        if self._plan.runtime == "tensorrt" and self._layout is None and not faults:
            return BatchVerdict(proven, reason=_LEFT)
        reason = "; ".join(faults.values()) or _TOO_SHORT
        if self._layout is not None or not verified:  # joined rows cannot be cut
            is_alone = self._layout is not None or not faults
            return BatchVerdict(proven, faults, is_alone, () if is_alone else (1,), reason)
        max_rows = self._model.max_rows
        if self._plan.runtime == "tensorrt":
            allowed = allowed_rows(max_rows, [size for size in sizes if size not in verified], find_rows)
        else:
            allowed = list(proven if faults else range(1, verified[-1] + 1))
        if len(allowed) == max_rows:  # the largest is proven, some between are left
            return BatchVerdict(proven)
        return BatchVerdict(proven, faults, allowed=tuple(allowed), reason=reason)

    def _fits(self, tests: BatchTests, size: int) -> bool:
        """Return True if an engine supports the joined rows of a batch of the tests."""
        assert self._layout is not None
        self._layout.ranges = self._model.shape_ranges
        entries: Any = [SimpleNamespace(inputs=row) for row in tests.largest(size)]
        return len(self._layout.divide(entries).groups) == 1

    def _check(
        self, execution: Execution, tests: list[BatchTests], size: int, padded: int
    ) -> tuple[Fault | None, bool]:
        """Return the fault of a size, and True if the model itself is at fault, or must be taken to be."""
        run = self.run_batch(execution)

        def fill_padding(nan: Sequence[Row]) -> None:
            self._first_stays = not self._first_stays
            for _ in range(execution.depth if padded > size else 0):
                try:
                    run([*nan] * padded)
                except ExecutionLost:
                    raise
                except Exception as error:
                    logger.debug("model %s refuses NaN: %s", self._config.name, error)
            self._stays = self._first_stays

        for index, each in enumerate(tests):
            each.run = run
            fault = each.check(size, fill_padding)
            if fault is None:
                continue
            if self._plan.runtime == "onnxruntime" or self._layout is not None:
                return fault, True
            references = self._reference_tests()
            if references is None:
                return fault, True
            each.refer(references[index].run)
            fault = each.check(size, fill_padding)
            if fault is not None:
                of_model = references[index].check(size)
                return fault, of_model is not None
        return None, False

    def _all_tests(self, execution: Execution) -> list[BatchTests]:
        """Return the tests of each profile; raises ProofError."""
        if self._kept is None:
            self._kept = [self._tests(execution, dims) for dims in self._dims()]
        for each in self._kept:
            each.run = self.run_batch(execution)
        return self._kept

    def _reference_tests(self) -> list[BatchTests] | None:
        """Return the tests of the model's ONNX file on the CPU; None without one, or if it does not run there."""
        if self._references is None and self._source.is_file():
            from headrace.runtimes.onnxruntime import OnnxRuntimeBackend

            with suppress(HeadraceError, ProofError):
                execution = OnnxRuntimeBackend().load(self._source, 1, {}).execution(0)
                served = served_execution(execution, self._config, steps_of(self._config, self._folder.labels))
                self._references = [self._tests(served, dims) for dims in self._dims()]
        return self._references

    def _dims(self) -> list[Mapping[str, Sequence[int]]]:
        """Return the smallest shapes of each profile of an engine by input; an empty mapping for other models."""
        ranges = self._model.shape_ranges
        if not ranges or self._layout is not None:
            return [{}]
        shapes = [{name: low[1:] for name, (low, _high) in profile.items()} for profile in ranges]
        return [each for index, each in enumerate(shapes) if each not in shapes[:index]]

    def _tests(self, execution: Execution, dims: Mapping[str, Sequence[int]]) -> BatchTests:
        """Return tests with rows on which the model returns finite, different outputs.

        Raises:
            ProofError: no rows do.
        """
        run = self.run_batch(execution)
        problem, equal = "", None
        for rows in self._row_sets(dims):
            try:
                depth = execution.depth
                tests = BatchTests(
                    run, rows, self._datatypes, self._floor, self._classes, depth, self._clock, self._end_ns
                )
            except ExecutionLost:
                raise
            except Exception as error:
                kind = "" if isinstance(error, ProofError) else f"{type(error).__name__}: "
                problem = problem or f"{kind}{error}"
                continue
            if tests.is_telling:
                return tests
            equal = equal or tests
        if equal is None:
            raise ProofError(problem)
        return equal

    def _row_sets(self, dims: Mapping[str, Sequence[int]]) -> Iterator[list[Row]]:
        has_free = any(size < 0 for tensor in self._config.served_input for size in tensor.dims)
        for free in _FREE if has_free else _FREE[:1]:
            for style in ("normal", "uniform", "large"):
                random = np.random.default_rng(0)
                joined = self._layout is not None
                yield [self._row(random, style, free >> index * joined, dims) for index in range(_ROWS)]

    def _row(
        self, random: np.random.Generator, style: str, free: int, dims: Mapping[str, Sequence[int]]
    ) -> dict[str, Array]:
        row = {}
        for tensor in self._config.served_input:
            own = dims.get(tensor.name, ())
            lows = own if len(own) == len(tensor.dims) else (0,) * len(tensor.dims)
            shape = [size if size >= 0 else max(low, 0) or free for size, low in zip(tensor.dims, lows, strict=True)]
            datatype = BY_CONFIG_NAME[tensor.data_type]
            row[tensor.name] = random_values(datatype, (1, *shape), random, style, self._ranges.get(tensor.name))
        return row if self._sequences is None else row | self._sequence_row(self._sequences, random, style)

    def _sequence_row(self, sequences: SequencePolicy, random: np.random.Generator, style: str) -> dict[str, Array]:
        """Return control tensors and states of a sequence that has begun or begins."""
        row = {}
        for control in sequences.controls:
            value: object = control.true if control.kind == "READY" or random.integers(2) else control.false
            if control.kind == "CORRID":
                number = int(random.integers(1, 100))
                value = str(number).encode() if control.datatype is BYTES else number
            row[control.name] = np.array([[value]], control.datatype.dtype)
        for state in self._states:
            row[state.input_name] = random_values(state.datatype, (1, *state.initial.shape), random, style)
        return row

    def run_batch(self, execution: Execution) -> RunBatch:
        """Return a function that runs rows as one batch of an execution, joined if the model is ragged.

        Every second batch of several rows is run as between the steps of a pipeline, if the model's GPU can.
        """
        layout = self._layout
        served = [tensor.name for tensor in self._config.served_output]
        can_stay = self._model.resident_devices and layout is None and self._sequences is None

        def run(inputs: dict[str, Array]) -> dict[str, Array]:
            if self._is_busy():
                raise ProofInterrupted
            if not can_stay or len(next(iter(inputs.values()))) < 2 or not is_overlapped(execution):
                return execution.run(inputs)
            self._stays = not self._stays
            return self._run_resident(execution, inputs, served) if self._stays else execution.run(inputs)

        outputs = list(dict.fromkeys([*served, *(state.output_name for state in self._states)]))
        states = execution.slot_states
        if states is None and self._sequences is not None and self._states != self._sequences.states:
            # The reference of an engine that keeps the states.
            tensors = state_tensors(self._config, self._folder.path)
            states = HostStates(tensors, self._model.max_rows, True, self._config.name)
        if states is not None:
            return run_rows(partial(run_new_sequences, run, states), outputs)
        if layout is None:
            return run_rows(run, outputs)

        def run_joined(rows: Sequence[Row]) -> Sequence[Row]:
            arrangement = layout.arrange(rows)
            # Missing rows are found as a difference.
            return arrangement.split(run(arrangement.stack(Staging(len(rows)))), lambda _outputs, _rows: None)

        return run_joined

    def _run_resident(
        self, execution: OverlappedExecution, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Run a batch whose inputs the GPU fetches, and whose outputs stay in its memory."""
        from headrace.runtimes.cuda.memory import pinned_empty, pinned_rows

        rows = len(next(iter(inputs.values())))
        batch = execution.begin(inputs, rows)
        try:
            for name, values in inputs.items():
                if batch.device is None or values.dtype.hasobject:
                    np.copyto(batch.inputs[name], values)
                    continue
                memory = self._pinned.get(name, values[:0])
                if len(memory) < rows or memory.shape[1:] != values.shape[1:]:
                    self._pinned[name] = memory = pinned_empty(values.shape, values.dtype, batch.device)
                np.copyto(memory[:rows], values)
                batch.resident_inputs.append((name, 0, pinned_rows(memory[:rows], batch.device)))
        except BaseException:
            execution.discard(batch)
            raise
        batch.resident_outputs = frozenset(outputs)
        execution.launch(batch)
        return {name: np.asarray(values) for name, values in execution.finish(batch).items()}

    def _preferred(self) -> Sequence[int]:
        batching = self._config.dynamic_batching
        return () if batching is None else batching.preferred_batch_size


def candidates(max_rows: int, preferred: Sequence[int], find_rows: Callable[[int], int], is_padded: bool) -> list[int]:
    """Return the batch sizes to test, the most important first.

    Args:
        max_rows: largest batch.
        preferred: preferred batch sizes.
        find_rows: returns the number of rows that run for a batch.
        is_padded: True for an engine, whose batches are padded: the emptiest batch of each bucket is tested, too.
    """
    powers = [1 << power for power in range(1, max_rows.bit_length())]
    if is_padded:
        groups: dict[int, list[int]] = {}
        for rows in range(1, max_rows + 1):
            groups.setdefault(find_rows(rows), []).append(rows)
        others = [group[-1] for group in groups.values()] + [group[0] for group in groups.values()]
    else:
        others = [*powers, *range(1, min(max_rows, _EACH_SIZE) + 1)]
    ordered = dict.fromkeys([2, 3, max_rows, *preferred, *others])
    return [size for size in ordered if 1 < size <= max_rows]


def allowed_rows(max_rows: int, unproven: Sequence[int], find_rows: Callable[[int], int]) -> list[int]:
    """Return the numbers of rows that an engine may run: one, and those of buckets of which each tested size is proven.

    Args:
        max_rows: largest batch.
        unproven: tested sizes that are not proven, and those for which there was no time.
        find_rows: returns the number of rows that run for a batch.
    """
    wrong = {find_rows(size) for size in unproven}
    return [rows for rows in range(1, max_rows + 1) if rows == 1 or find_rows(rows) not in wrong]


def _classes(config: ModelConfig) -> dict[str, str]:
    """Return the outputs whose classes are compared, as for `BatchTests`: those with a label file or `postprocess`."""
    index, ranking = scores_output(config.postprocess, config.output), config.postprocess
    floats = [tensor for tensor in config.served_output if tensor.data_type.startswith(("TYPE_FP", "TYPE_BF"))]
    classes = {tensor.name: tensor.name for tensor in floats if tensor.label_filename}
    if ranking is None or index is None:
        return classes
    if not ranking.top_k:
        return classes | {config.output[index].name: config.output[index].name}
    return classes | dict.fromkeys((ranking.classes, ranking.labels), ranking.scores)


def _ranges(warmups: Sequence[Warmup]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value of each input of the warm-up requests, if they differ."""
    ranges = {}
    for warmup in warmups:
        for name, values in warmup.inputs.items():
            if values.dtype.kind in "fiu" and values.size and values.min() < values.max():
                ranges[name] = float(values.min()), float(values.max())
    return ranges
