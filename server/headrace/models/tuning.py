"""Measures a model with different numbers of instances and batch sizes, and recommends a change that exceeds the spread.

Every pair of settings is run several times, in two passes over all pairs: a machine that becomes slower meanwhile shows up as
spread. A change is recommended only if the slowest run of the new setting is faster than the fastest run of the present one.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from headrace_reports.command_line import plural

from headrace.config.auto_complete import instances_on_each_gpu
from headrace.config.documents import refuse
from headrace.config.files import read_config_file
from headrace.config.model_config import InstanceGroup, ModelConfig
from headrace.config.model_folder import ModelFolder, served_versions
from headrace.config.serving_plan import GPU_RUNTIMES
from headrace.config.tensor_config import ModelInput
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Array, Datatype, fits_shape
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.accounted_model import free_bytes
from headrace.models.loader import Loader
from headrace.models.version_policies import handle_policy
from headrace.models.warmup import MAX_RANDOM_BYTES, feeds, make_warmups, sizes, unmeasurable
from headrace.python.environments import Environments


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """Inputs for batches of any number of rows.

    Attributes:
        origin: description of their source, e.g. "random values".
        arrays: by input name, (rows, *dims) with at least one row, or dims if the model has no batch dimension.
        batched: the model has a batch dimension.
    """

    origin: str
    arrays: Mapping[str, Array]
    batched: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all inputs. BYTES elements count as references."""
        return sum(array.nbytes // (len(array) if self.batched else 1) for array in self.arrays.values())

    def batch(self, rows: int) -> dict[str, Array]:
        """Return arrays of `rows` rows; rows repeat from the first if there are fewer. Without a batch dimension: the arrays."""
        if not self.batched:
            return dict(self.arrays)
        return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in self.arrays.items()}


def tuning_inputs(folder: ModelFolder, file: Path | None = None) -> TuningInputs:
    """Choose the inputs of a model: those of `file`, else its first complete `model_warmup`, else random values.

    Args:
        folder: the model's folder, configuration complete.
        file: an .npz with one array for each input.

    Raises:
        ConfigError: the file does not fit the model, or there are no inputs and none can be generated.
    """
    config, batched = folder.config, folder.config.max_batch_size > 0
    required = [tensor for tensor in config.served_input if not tensor.optional]
    if file is not None:
        return TuningInputs(f"of {file}", _from_file(file, config.served_input, batched), batched)
    for warmup in make_warmups(config, folder.path):
        if all(tensor.name in warmup.inputs for tensor in required):
            return TuningInputs(f"of model_warmup {warmup.name!r}", warmup.inputs, batched)
    problem = unmeasurable(config)
    if problem:
        cure = "write --input FILE.npz with an array for each input, or model_warmup in the configuration"
        raise refuse(folder.name, None, f"no random inputs can be generated: {problem}", cure)
    return TuningInputs("random values", feeds(config)(1), batched)


def _from_file(file: Path, tensors: tuple[ModelInput, ...], batched: bool) -> dict[str, Array]:
    cure = "write it with numpy.savez(file, input_name=array)"
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise refuse(str(file), None, "has one array without a name, not one for each input", cure)
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise refuse(str(file), None, f"cannot be read: {error.strerror or error}", "name an .npz file") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise refuse(str(file), None, f"is not an .npz of plain arrays ({error})", cure) from None
    names = ", ".join(tensor.name for tensor in tensors)
    unknown = sorted(arrays.keys() - {tensor.name for tensor in tensors})
    if unknown:
        raise refuse(
            str(file), None, f"has the array {unknown[0]!r}, the model has the inputs {names}", "rename or remove it"
        )
    absent = [tensor.name for tensor in tensors if tensor.name not in arrays and not tensor.optional]
    if absent:
        raise refuse(str(file), None, f"has no array for the input {absent[0]!r}", f"add one; the model needs {names}")
    return {
        tensor.name: _check_array(file, arrays[tensor.name], tensor, batched)
        for tensor in tensors
        if tensor.name in arrays
    }


def _check_array(file: Path, array: Array, tensor: ModelInput, batched: bool) -> Array:
    """Return the array with text as bytes, contiguous.

    Raises:
        ConfigError: its datatype or shape is not the input's.
    """
    kind = BY_CONFIG_NAME[tensor.data_type]
    if kind is BYTES and array.dtype.kind in "US":
        values = np.empty(array.shape, dtype=object)
        values.reshape(-1)[:] = [
            text if isinstance(text, bytes) else text.encode() for text in array.reshape(-1).tolist()
        ]
        array = values
    elif kind is BYTES or array.dtype != kind.dtype:
        message = f"array {tensor.name!r} has the type {array.dtype}, the input takes {_type_name(kind)}"
        raise refuse(str(file), None, message, _cast(kind))
    sizes = array.shape[1:] if batched else array.shape
    if not fits_shape(sizes, tensor.dims) or (batched and not len(array)):
        expected = [*(["rows"] if batched else []), *tensor.dims]
        shown = f"[{', '.join(map(str, expected))}]"
        message = f"array {tensor.name!r} has the shape {list(array.shape)}, the input takes {shown}"
        raise refuse(str(file), None, message, "reshape it")
    if array.nbytes > MAX_RANDOM_BYTES:
        message = f"array {tensor.name!r} has {array.nbytes} bytes, at most {MAX_RANDOM_BYTES} are allowed"
        raise refuse(str(file), None, message, "write fewer rows")
    return np.ascontiguousarray(array)


def _type_name(kind: Datatype) -> str:
    return "text" if kind is BYTES else f"{kind.name} ({kind.dtype})"


def _cast(kind: Datatype) -> str:
    return "write an array of text" if kind is BYTES else f"write array.astype('{kind.dtype}')"


# Callers for each instance: while one batch runs, the next one waits.
_CALLERS = 2
# A setting with this share of the best throughput counts as equal to it; the one with the shorter batches is chosen.
_EQUAL_SHARE = 0.97
_CLOSE_S = 30.0
# The search for a batch size ends after this many doublings without a gain, or at a batch that takes this long.
_DOUBLINGS = 3
_LONGEST_BATCH_NS = 2 * NS_PER_S
# Up to this maximum every batch size is measured; above it, the search decides.
_FEW_ROWS = 16
# A batch may take this share of the free memory.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """Measurements of one pair of instances and rows.

    Attributes:
        instances: number of instances.
        rows: rows of each batch.
        runs_hz: rows a second of all instances together, one number for each run.
        median_ns: median compute time of a batch in nanoseconds, all instances busy.
        p95_ns: 95th percentile of the same.
    """

    instances: int
    rows: int
    runs_hz: tuple[float, ...]
    median_ns: int
    p95_ns: int

    @property
    def rows_hz(self) -> float:
        """Median of the runs."""
        return median(self.runs_hz)

    @property
    def low_hz(self) -> float:
        """Slowest run."""
        return min(self.runs_hz)

    @property
    def high_hz(self) -> float:
        """Fastest run."""
        return max(self.runs_hz)

    def meets(self, slo_ns: int) -> bool:
        """Return True if responses meet a latency objective in nanoseconds; 0 is no objective.

        A request that arrives just after a batch has started waits until one of n instances is free, and for its own
        batch. With n instances that start in turn, that is (n + 1) / n of a batch's time.
        """
        return not slo_ns or self.p95_ns * (self.instances + 1) <= slo_ns * self.instances


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommendation on changing the configuration.

    Attributes:
        change: True if the best setting exceeds the present one by more than the spread.
        reason: the reason for or against the change.
    """

    change: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """All measurements of a model.

    Attributes:
        points: in the order of instances and rows.
        current: the setting of the configuration; None if it was not measured.
        best: the best setting; None if none meets the objective.
        advice: recommendation on it.
        inputs: description of the inputs.
        runtime: runtime and file that ran the model.
        limit: reason why no larger batch was measured.
    """

    points: Sequence[MeasuredSetting]
    current: MeasuredSetting | None
    best: MeasuredSetting | None
    advice: Advice
    inputs: str
    runtime: str
    limit: str


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a sweep.

    Attributes:
        counts: numbers of instances; that of the configuration is added.
        seconds: length of one run in seconds.
        repeats: runs of each pair.
        slo_ns: latency objective in nanoseconds; 0 for none.
        max_rows: largest batch to try; None for the configuration's, or for a search if it has none.
        input_file: an .npz with inputs.
    """

    counts: Sequence[int]
    seconds: float = 0.2
    repeats: int = 5
    slo_ns: int = 0
    max_rows: int | None = None
    input_file: Path | None = None


Report = Callable[[int, int, str], object]
"""Called with the number of completed runs, the number of all runs, and the last measurement as text."""


def sweep(folder: ModelFolder, options: Options, report: Report = lambda _runs_done, _total, _text: None) -> Sweep:
    """Run a model with each number of instances on batches of each size.

    Args:
        folder: the model's folder; its latest version is run.
        options: options of the sweep.
        report: called after each run.

    Raises:
        ConfigError: the model cannot be loaded, fails on the inputs, or has no inputs.
    """
    return _Sweeper(folder, options, report).run()


class _Sweeper:
    """One sweep of one model."""

    def __init__(self, folder: ModelFolder, options: Options, report: Report) -> None:
        self._folder = folder
        self._options = options
        self._report = report
        self._version = served_versions(folder.config, folder.versions)[-1]
        self._inputs = tuning_inputs(folder, options.input_file)
        with closing(asyncio.new_event_loop()) as loop:  # it never runs
            self._plan = Loader(Mailbox(loop)).plan(folder, self._version)
        self._automatic = "max_batch_size" not in read_config_file(folder.path).document.data
        if self._plan.is_pending:
            cure = f"build it first: headrace build {folder.name}"
            raise refuse(folder.name, None, "has no engine for this machine's GPU yet", cure)
        on_gpu = self._plan.runtime in GPU_RUNTIMES
        batch = handle_policy(folder.config, on_gpu).batch
        self._current = (_count(folder.config, on_gpu), batch.max_rows if batch.merge else 1)
        self._counts = sorted({*options.counts, self._current[0]})
        self._runs_done, self._total = 0, 0

    def run(self) -> Sweep:
        row_counts, limit = self._row_counts()
        runs: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
        passes = [number for number in (-(-self._options.repeats // 2), self._options.repeats // 2) if number]
        self._total = self._runs_done + self._options.repeats * len(self._counts) * len(row_counts)
        for number, rounds in enumerate(passes):
            for count in reversed(self._counts) if number else self._counts:
                with self._load(count, max(row_counts)) as handle:
                    for rows in row_counts * rounds:
                        runs.setdefault((count, rows), []).append(self._measure(handle, count, rows))
        points = [_point(*pair, runs[pair]) for pair in sorted(runs)]
        current = next((point for point in points if (point.instances, point.rows) == self._current), None)
        best = choose(points, self._options.slo_ns)
        return Sweep(
            points=points,
            current=current,
            best=best,
            advice=advise(current, best, self._options.slo_ns),
            inputs=self._inputs.origin,
            runtime=f"{self._plan.runtime}, {self._plan.file.name}",
            limit=limit,
        )

    def _row_counts(self) -> tuple[list[int], str]:
        """Return the batch sizes to measure, and the reason why there is no larger one."""
        config, configured = self._folder.config, self._folder.config.max_batch_size
        if not configured:
            return [1], "the model has no batch dimension"
        fitting = max(1, MAX_RANDOM_BYTES // max(self._inputs.row_bytes, 1))
        if self._plan.runtime == "tensorrt" or self._plan.artefact is not None:
            return sizes(config), f"{self._plan.file.name} takes batches of up to {configured}"
        if self._options.max_rows is not None:
            max_rows, limit = self._options.max_rows, f"--max-batch-size is {self._options.max_rows}"
        elif self._automatic:
            max_rows, limit = fitting, ""
        else:
            max_rows, limit = (
                configured,
                f"max_batch_size is {configured} in the configuration; --max-batch-size N looks further",
            )
            if configured <= _FEW_ROWS:
                return sizes(config), limit
        if max_rows >= fitting:
            max_rows, limit = fitting, f"inputs of {fitting} rows fill {MAX_RANDOM_BYTES} bytes"
        return self._explore(max_rows, limit)

    def _explore(self, max_rows: int, limit: str) -> tuple[list[int], str]:
        """Measure 1, 2, 4 ... rows while throughput grows, and memory and time allow; returns sizes and limit."""
        rows, best_hz, best_rows, stale = 1, 0.0, 1, 0
        count, before = self._current[0], _peak_bytes()
        tried = []
        with self._load(count, max_rows) as handle:
            while rows <= max_rows:
                try:
                    # Other work on the machine makes a run slower, never faster: the better of two runs counts.
                    rows_hz, _, p95_ns = max(self._measure(handle, count, rows) for _ in range(2))
                except (HeadraceError, MemoryError) as error:
                    if rows == 1:
                        raise
                    limit = f"a batch of {rows} rows fails: {error}"
                    break
                tried.append(rows)
                stale = 0 if rows_hz * _EQUAL_SHARE > best_hz else stale + 1
                if rows_hz > best_hz:
                    best_hz, best_rows = rows_hz, rows
                growth_bytes, before = _peak_bytes() - before, _peak_bytes()
                point = MeasuredSetting(count, rows, (rows_hz,), p95_ns, p95_ns)
                end = search_end(point, stale, growth_bytes, self._options.slo_ns)
                if end:
                    limit = end
                    break
                rows = min(rows * 2, max_rows) if rows < max_rows else max_rows + 1
        sizes_ = {size for size in tried if size <= max(2 * best_rows, 1 << _DOUBLINGS)}
        return sorted(sizes_ | {self._current[1]} & set(range(1, max_rows + 1))), limit

    def _measure(self, handle: ModelHandle, count: int, rows: int) -> tuple[float, int, int]:
        try:
            run = _measure(handle, self._inputs, rows, self._options.seconds)
        except ConfigError:
            raise
        except HeadraceError as error:
            cure = "try the inputs of a real request: --input FILE.npz"
            message = f"the model fails on a batch of {rows} rows ({self._inputs.origin}): {error}"
            raise refuse(self._folder.name, None, message, cure) from error
        self._runs_done += 1
        text = f"{plural(count, 'instance')}, {plural(rows, 'row')}: {run[0]:,.0f} rows/s"
        self._report(self._runs_done, max(self._total, self._runs_done), text)
        return run

    @contextmanager
    def _load(self, count: int, max_rows: int) -> Iterator[ModelHandle]:
        """Load the version with `count` instances, each request of up to `max_rows` rows a batch of its own."""
        config = self._folder.config
        group = config.instance_group[0] if config.instance_group else InstanceGroup()
        update: dict[str, object] = {"instance_group": (group.model_copy(update={"count": count}),)}
        update |= {"dynamic_batching": None, "rate_limits": None, "max_queue_wait_microseconds": 0}
        if config.max_batch_size:
            update |= {"max_batch_size": max_rows, "cpu_max_batch_size": None}
        folder = replace(self._folder, config=config.model_copy(update=update))
        with closing(asyncio.new_event_loop()) as loop:  # it never runs: callers wait on their own threads
            handle = Loader(Mailbox(loop), histograms=False, interpreters=Environments(None)).load(
                folder, self._version, self._plan
            )
            try:
                yield handle
            finally:
                handle.close(_CLOSE_S)


def choose(points: Sequence[MeasuredSetting], slo_ns: int = 0) -> MeasuredSetting | None:
    """Return the setting with the shortest batches of those with (nearly) the best throughput; None if all miss the objective.

    Args:
        points: measured settings.
        slo_ns: latency objective in nanoseconds; 0 for none.
    """
    fit = [point for point in points if point.meets(slo_ns)]
    best_hz = max((point.rows_hz for point in fit), default=0.0)
    good = [point for point in fit if point.rows_hz >= _EQUAL_SHARE * best_hz]
    return min(good, key=lambda point: (point.p95_ns, point.instances), default=None)


def advise(current: MeasuredSetting | None, best: MeasuredSetting | None, slo_ns: int = 0) -> Advice:
    """Compare the best setting with that of the configuration.

    Args:
        current: setting of the configuration; None if it was not measured.
        best: result of `choose`.
        slo_ns: latency objective in nanoseconds; 0 for none.
    """
    if best is None:
        return Advice(
            False, "no setting meets the objective: build a faster engine (`headrace build`), or raise the objective"
        )
    if current is None:
        return Advice(False, "the setting of the configuration was not measured: there is no comparison")
    if (current.instances, current.rows) == (best.instances, best.rows):
        return Advice(False, "the configuration has the best setting")
    times = f"{best.rows_hz / current.rows_hz:.2f} times the configuration's {current.instances} x {current.rows} rows"
    if not current.meets(slo_ns):
        return Advice(True, f"{times}, which miss the objective")
    if best.low_hz <= current.high_hz:
        spread = f"the configuration's runs reach {current.high_hz:,.0f}, the best setting's begin at {best.low_hz:,.0f} rows/s"
        return Advice(False, f"{times}, within the spread: {spread}")
    if best.rows_hz * _EQUAL_SHARE <= current.rows_hz:
        return Advice(False, f"{times}: not worth a change")
    return Advice(True, f"{times}, beyond the spread of the runs")


def default_counts(config: ModelConfig, cores: int) -> list[int]:
    """Return 1, 2, 4 ... instances up to the number of cores (at most 16), and the configuration's number."""
    return sorted({_count(config, False), *(1 << power for power in range(min(cores, 16).bit_length()))})


def _count(config: ModelConfig, on_gpu: bool) -> int:
    """Return the number of instances in the configuration; on GPUs, for each GPU."""
    if on_gpu and all(group.is_default for group in config.instance_group):
        return instances_on_each_gpu(config)
    return sum(group.count for group in config.instance_group) or 1


def _point(instances: int, rows: int, runs: Sequence[tuple[float, int, int]]) -> MeasuredSetting:
    hz, medians_ns, p95s_ns = zip(*runs, strict=True)
    return MeasuredSetting(instances, rows, tuple(hz), round(median(medians_ns)), round(median(p95s_ns)))


def search_end(point: MeasuredSetting, stale: int, growth_bytes: int, slo_ns: int) -> str:
    """Return the reason to end the search for a batch size; "" to continue.

    Args:
        point: the latest measurement.
        stale: larger batches in a row that have not increased throughput.
        growth_bytes: memory that the latest doubling has taken.
        slo_ns: objective in nanoseconds; 0 for none.
    """
    if stale >= _DOUBLINGS:
        return "more rows do not increase throughput"
    if not point.meets(slo_ns):
        return f"batches of {point.rows} rows miss the objective"
    if point.p95_ns > _LONGEST_BATCH_NS:
        return f"a batch of {point.rows} rows takes {point.p95_ns / NS_PER_S:.1f} s"
    available_bytes = free_bytes()
    if available_bytes is not None and 2 * growth_bytes > _MEMORY_SHARE * available_bytes:
        return f"a batch of {2 * point.rows} rows would take half of the free memory"
    return ""


def _measure(handle: ModelHandle, inputs: TuningInputs, rows: int, seconds: float) -> tuple[float, int, int]:
    """Run batches for `seconds`; returns rows a second of all instances, and median and 95th percentile of the compute time in
    nanoseconds.
    """
    batch, stop = inputs.batch(rows), threading.Event()
    instances = handle.alive

    def infer() -> None:
        handle.infer_blocking(InferRequest(inputs=batch, rows=rows, shape_key=None, received_ns=monotonic_ns()))

    def call(_caller: int) -> int:
        batches = 0
        while not stop.is_set():
            infer()
            batches += 1
        return batches

    for _ in range(instances):
        infer()
    with ThreadPoolExecutor(instances * _CALLERS) as callers:
        begun_ns = monotonic_ns()
        try:
            futures = [callers.submit(call, number) for number in range(instances * _CALLERS)]
            stop.wait(seconds)
        finally:
            stop.set()
        batches = sum(future.result() for future in futures)
        elapsed_s = (monotonic_ns() - begun_ns) / NS_PER_S
    table = handle.latency_table
    return batches * rows / elapsed_s, table.estimate_ns(rows, instances), table.promise_ns(rows, instances)


def _peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
