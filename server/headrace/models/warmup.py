"""Prepares the instances of a version before it serves: runs warm-up requests, then measures the latency table.

Warm-up requests are `model_warmup` of the configuration. The fields are those of Triton's published message
`ModelWarmup`. A data file has the values of one row, which is repeated for every row of the batch; here it may also
have all rows (`headrace.models.data_files`).

Latency tables are stored in the state folder across restarts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.config.documents import open_regular_file
from headrace.config.files import remove_oldest, write_durably
from headrace.config.machine import Machine, onnxruntime_machine, usable_cores
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import FOLDER, MAX_INPUT_BYTES, feed_dims
from headrace.config.ragged_rules import is_ragged
from headrace.config.sequence_config import state_tensors
from headrace.config.serving_plan import CUDA_RUNTIME, PYTHON_RUNTIMES
from headrace.config.tensor_config import ModelInput, WarmupInput, row_bytes_of
from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.tensor import BF16, BY_CONFIG_NAME, BYTES, Array, Datatype
from headrace.inference.scheduling.assembly import BatchLayout, Staging
from headrace.inference.scheduling.latency_table import LatencyTable, MeasuredTimes
from headrace.models.data_files import read_values, zeros
from headrace.runtimes.base import Execution, ExecutionLost, LoadedModel

logger = logging.getLogger("headrace.warmup")


@dataclass(frozen=True, slots=True)
class Warmup:
    """One warm-up request.

    Attributes:
        name: name for the log.
        inputs: arrays by input name.
        count: number of runs.
    """

    name: str
    inputs: dict[str, Array]
    count: int


@dataclass(frozen=True, slots=True)
class WarmupRunner:
    """Runs warm-ups; called by each instance on its own thread with its own execution.

    Attributes:
        model: name of the model, for the log.
        warmups: requests to run.
        on_done: called with the execution afterwards.
    """

    model: str
    warmups: list[Warmup]
    on_done: Callable[[Execution], None] = lambda _execution: None

    def __call__(self, execution: Execution) -> None:
        """Run all warm-ups; an error of the execution is raised and fails the load."""
        for warmup in self.warmups:
            logger.debug("model %s runs the warm-up request %s", self.model, warmup.name)
            for _ in range(warmup.count):
                execution.run(dict(warmup.inputs))
        self.on_done(execution)


def make_warmups(config: ModelConfig, folder: Path) -> list[Warmup]:
    """Create the warm-up requests with their data.

    Args:
        config: complete configuration.
        folder: the model's folder.

    Raises:
        ConfigError: a data file cannot be read, or has changed since `warmup_problems` checked it.
    """
    tensors = {tensor.name: tensor for tensor in config.served_input}
    warmups: list[Warmup] = []
    for index, warmup in enumerate(config.model_warmup):
        rows = warmup.batch_size if config.max_batch_size else 0
        inputs = {name: _data(feed, tensors[name], rows, folder) for name, feed in warmup.inputs.items()}
        warmups.append(Warmup(warmup.name or str(index), inputs, max(warmup.count, 1)))
    return warmups


def arrange_warmups(warmups: list[Warmup], layout: BatchLayout | None) -> list[Warmup]:
    """Return the warm-up requests as the model receives them: ragged inputs joined, computed inputs added."""
    if layout is None:
        return warmups
    return [replace(warmup, inputs=layout.arrange([warmup.inputs]).stack(Staging(1))) for warmup in warmups]


def _data(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path) -> Array:
    """Return the array of one input: (rows, *dims), or dims if `rows` is 0, which means no batch dimension."""
    kind = BY_CONFIG_NAME[tensor.data_type]
    dims = feed_dims(feed, tensor)
    shape = (rows, *dims) if rows else dims
    if feed.input_data_file:
        return read_values(folder / FOLDER / feed.input_data_file, kind, shape, dims)
    return random_values(kind, shape, np.random.default_rng()) if feed.random_data else zeros(kind, shape)


def random_values(
    kind: Datatype,
    shape: tuple[int, ...],
    random: np.random.Generator,
    style: str = "uniform",
    limits: tuple[float, float] | None = None,
) -> Array:
    """Return random values: whole numbers 0 and 1, so that an index stays within its table, or text of 0 and 1.

    Args:
        kind: datatype.
        shape: shape of the result.
        random: source of the values.
        style: floats in [0, 1) ("uniform"), around 0 ("normal", for which UINT8 is 0 to 255), or a hundred times that ("large").
        limits: smallest and largest value of numbers; None for the above.
    """
    values: Array
    if kind is BYTES:
        values = np.empty(shape, dtype=object)
        values.reshape(-1)[:] = [b"%d" % bit for bit in random.integers(0, 2, math.prod(shape)).tolist()]
        return values
    if kind is not BF16 and kind.dtype.kind != "f":
        low, high = (0, 255 if style == "normal" and kind.name == "UINT8" else 1) if limits is None else limits
        return random.integers(int(low), int(high) + 1, shape, np.uint8 if limits is None else np.int64).astype(
            kind.dtype
        )
    if style == "uniform" or (limits is not None and kind is not BF16):
        values = random.random(shape, np.float32)
    else:
        values = random.standard_normal(shape, np.float32) * np.float32(100 if style == "large" else 1)
    if kind is BF16:  # the upper half of a single-precision number
        words = values.view(np.uint32)
        return np.right_shift(words, 16, out=words).astype(np.uint16)
    if limits is not None:
        values = limits[0] + (limits[1] - limits[0]) * values
    return values.astype(kind.dtype)


_FORMAT = 1
_MAX_FILES = 512
_MAX_BYTES = 4 << 20
_MAX_TIME_NS = 3600 * 10**9
# Stored times for each number of rows: enough for a 95th percentile.
_TIMES = 32
# Configuration fields that change the compute time of a batch, besides the model's file.
CONFIG_FIELDS = {
    "max_batch_size", "cpu_max_batch_size", "backend", "instance_group", "parameters", "optimization", "input", "output",
    "preprocess", "postprocess", "isolation",
}  # fmt: skip


def _count(key: str) -> int:
    """Parse a key; pydantic alone would accept "+1" and "1_0"."""
    if not (key.isascii() and key.isdecimal()):
        raise ValueError("is not a decimal number")
    return int(key)


_Count = Annotated[int, BeforeValidator(_count), Field(ge=1, lt=10**9)]
_TimeNs = Annotated[int, Field(ge=1, le=_MAX_TIME_NS)]


class StoredLatencies(NamedTuple):
    """Stored compute times of a version.

    Attributes:
        times_ns: compute times in nanoseconds, by instances and rows.
        idle_ns: compute time in nanoseconds of its smallest batch before it served; 0 if unknown.
    """

    times_ns: Mapping[int, MeasuredTimes]
    idle_ns: int


NO_LATENCIES = StoredLatencies({}, 0)


class _StoredDocument(BaseModel):
    """Content of a file."""

    model_config = ConfigDict(strict=True)

    format: Annotated[int, Field(ge=_FORMAT, le=_FORMAT)]
    idle_ns: Annotated[int, Field(ge=0, le=_MAX_TIME_NS)]
    times_ns: dict[_Count, dict[_Count, Annotated[list[_TimeNs], Field(min_length=1)]]]


class LatencyStore:
    """Latency tables in a folder, which is created by the first write. Thread-safe.

    Args:
        folder: path; "~" is expanded.

    Attributes:
        folder: absolute path.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(RuntimeError):  # no such user: the first write fails and is logged
            folder = folder.expanduser()
        self.folder = folder.absolute()
        self._warned = False

    def file_for(self, config: ModelConfig, digest: str, runtime: str, instances: int) -> LatencyFile:
        """Return the stored latency table of a version, keyed by everything that decides its compute times.

        Args:
            config: complete configuration of the model.
            digest: SHA-256 of the loaded file, in hex.
            runtime: name of the backend, e.g. "onnxruntime".
            instances: number of instances.

        Raises:
            Unsupported: the machine cannot be identified.
        """
        machine = machine_of(runtime)
        parts = {
            "format": _FORMAT,
            "digest": digest,
            "runtime": runtime,
            "instances": instances,
            "machine": str(machine),
            "cores": usable_cores(),
            "config": config.model_dump(mode="json", exclude_defaults=True, include=CONFIG_FIELDS),
        }
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return LatencyFile(self, self.folder / f"{key}.json", config.name, str(machine))

    def warn_once(self, error: OSError) -> None:
        """Log the first failed write."""
        if not self._warned:
            self._warned = True
            cure = "name a writable folder with --state-dir, or write --state-dir '' to store nothing"
            logger.warning("latency tables cannot be written to %s: %s (%s)", self.folder, error.strerror, cure)


@dataclass(frozen=True, slots=True)
class LatencyFile:
    """The stored latency table of one version.

    Attributes:
        store: the folder.
        path: the file; its name is the key of the version.
        name: name of the model; for readers of the folder only.
        machine: description of the machine; for readers of the folder only.
    """

    store: LatencyStore
    path: Path
    name: str
    machine: str

    def read(self) -> StoredLatencies:
        """Read the table; `NO_LATENCIES` if there is none or it is invalid."""
        try:
            with open_regular_file(self.path) as stream:
                content = stream.read(_MAX_BYTES + 1)
            with suppress(OSError):  # marks it as recently used
                os.utime(self.path)
            stored = _StoredDocument.model_validate_json(content if len(content) <= _MAX_BYTES else b"")
            return StoredLatencies(stored.times_ns, stored.idle_ns)
        except FileNotFoundError:
            return NO_LATENCIES
        except (OSError, ValidationError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            logger.info("the stored latency table %s is not used: %s", self.path.name, problem)
            return NO_LATENCIES

    def write(self, latency_table: LatencyTable, idle_ns: int) -> None:
        """Write a table, unless it is empty; a write error is logged once.

        Args:
            latency_table: the table.
            idle_ns: see `StoredLatencies`.
        """
        times_ns = {instances: table for instances, table in latency_table.times(_TIMES).items() if table}
        if not times_ns:
            return
        head = {"format": _FORMAT, "model": self.name, "machine": self.machine}
        document = {**head, "idle_ns": idle_ns, "times_ns": times_ns}
        try:
            self.store.folder.mkdir(parents=True, exist_ok=True)
            write_durably(self.path, json.dumps(document, separators=(",", ":")).encode())
            remove_oldest(self.store.folder, _MAX_FILES)
        except OSError as error:
            self.store.warn_once(error)


def machine_of(runtime: str) -> Machine:
    """Describe this machine for a backend; raises Unsupported if it cannot be identified."""
    if runtime == "tensorrt":
        from headrace.models.gpu_backend import tensorrt_machine

        return tensorrt_machine()
    if runtime == CUDA_RUNTIME:
        from headrace.models.gpu_backend import cuda_machine

        return cuda_machine()
    return onnxruntime_machine()


_ABANDONED_S = 30.0  # instances stop waiting for another one whose batch takes longer


@dataclass(eq=False, repr=False)
class ConcurrentRuns:
    """Runs batches of one size on several instances at once, each on its own thread, one size after the other.

    Attributes:
        instances: number of instances.
        sizes: rows of the batches, in order.
        feed: creates inputs of a number of rows.
        in_time: returns whether a batch of a number of rows may still start.
        clock: monotonic nanoseconds.
        times_ns: compute times of all instances, by rows.
    """

    instances: int
    sizes: InitVar[Iterable[int]]
    feed: Callable[[int], dict[str, Array]]
    in_time: Callable[[int], bool]
    clock: Clock

    def __post_init__(self, sizes: Iterable[int]) -> None:
        self.times_ns: dict[int, list[int]] = {}
        self._sizes = iter(sizes)
        self._rows = 0  # rows of the next batch; 0 ends the run
        self._size_chosen = threading.Barrier(self.instances, self._choose, _ABANDONED_S)
        self._inputs_ready = threading.Barrier(self.instances, timeout=_ABANDONED_S)

    def run(self, execution: Execution) -> None:
        """Run all sizes on one instance, beside the others; returns early if another instance fails.

        Raises:
            Exception: raised by this instance's execution; the other instances stop.
        """
        try:
            while True:
                self._size_chosen.wait()
                rows = self._rows
                if not rows:
                    return
                inputs = self.feed(rows)
                self._inputs_ready.wait()
                begun_ns = self.clock()
                execution.run(inputs)
                # Thread-safe without a lock: setdefault and append are atomic in the interpreter.
                self.times_ns.setdefault(rows, []).append(self.clock() - begun_ns)
        except threading.BrokenBarrierError:
            return
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop all instances after their current batch."""
        self._size_chosen.abort()
        self._inputs_ready.abort()

    def _choose(self) -> None:
        """Select the next size; called by one instance while the others wait at the barrier."""
        rows = next(self._sizes, 0)
        self._rows = rows if rows and self.in_time(rows) else 0


Feed = Callable[[int], dict[str, Array]]
"""Creates inputs of a number of rows."""

# Maximum runs of each size; the first run counts only if it is the only one.
_ROUNDS = 4
_ROUNDS_TOGETHER = 3
# Larger random inputs are not generated.
MAX_RANDOM_BYTES = 1 << 28
# Share of the time for one instance alone, if there are several.
_ALONE_SHARE = 0.5
# Stored times are accepted if the smallest batch takes between 1/2 and 2 times its stored time.
_ACCEPTED_RATIO = 2.0
# Maximum wait of an instance for the others, as a multiple of the time limit, to measure together.
_ARRIVAL_TIMEOUT_FACTOR = 4


@dataclass(eq=False, repr=False)
class LatencyMeasurement:
    """Fills an empty latency table; called by each instance on its own thread with its own execution, after the warm-up.

    The last instance measures alone while the others wait. Then 2, 4, 8 ... and all instances run at the same time. A
    model whose backend has measured itself is not run. An error of the model on random inputs does not prevent serving.

    Attributes:
        config: complete configuration of the model.
        model: the loaded model.
        instances: number of instances that call.
        latency_table: latency table to fill.
        limit_ns: time limit in nanoseconds; no run starts that would probably end later.
        clock: monotonic nanoseconds.
        stored: times of an earlier process; accepted if the model is about as fast on load as it was then.
        idle_ns: compute time in nanoseconds of the smallest batch before the version served; 0 if unknown.
    """

    config: ModelConfig
    model: LoadedModel
    instances: int
    latency_table: LatencyTable
    limit_ns: int
    clock: Clock = monotonic_ns
    stored: StoredLatencies = NO_LATENCIES

    def __post_init__(self) -> None:
        self._remaining = self.instances
        self.idle_ns = 0
        self._problem = unmeasurable(self.config)
        self._stages: Sequence[ConcurrentRuns] | None = None  # set when the last instance has arrived
        self._joinable = self.instances - 1  # other instances that still wait
        self._condition = threading.Condition()  # guards _awaited, _stages and _patient

    def __call__(self, execution: Execution) -> None:
        """Measure, if the table is empty.

        Args:
            execution: execution of the calling instance.

        Raises:
            ExecutionLost: nothing can be run any more.
        """
        with self._condition:
            self._remaining -= 1
            position = self._remaining  # 0 for the last instance
        if position < 0 or self.latency_table.entries():  # restarted, or loaded again after an eviction
            return
        # Compute times that the backend has measured itself; complete once the last instance is open.
        buckets_us = self.model.buckets_us()
        if self._problem or buckets_us or not self.limit_ns:
            if position == 0:
                self._skip_runs(buckets_us)
        elif position:
            self._measure_with_others(execution, position)
        else:
            self._measure_all(execution)

    def _skip_runs(self, buckets_us: Mapping[int, float]) -> None:
        if buckets_us:
            with self._condition:
                self._stages = ()  # earlier instances may wait
                self._condition.notify_all()
            self.latency_table.buckets = tuple(sorted(buckets_us))
            table_ns = bucket_times(buckets_us)
            self._accept_stored(table_ns[min(table_ns)])
            self.latency_table.seed({rows: [time_ns] for rows, time_ns in table_ns.items()})
            return
        if self._problem and self.limit_ns:
            logger.info("model %s is not measured before it serves: %s", self.config.name, self._problem)
        self._accept_stored(0)

    def _measure_with_others(self, execution: Execution, position: int) -> None:
        """Wait until the last instance has measured alone, then take part in its stages."""
        with self._condition:
            timeout_s = _ARRIVAL_TIMEOUT_FACTOR * self.limit_ns / NS_PER_S
            if not self._condition.wait_for(lambda: self._stages is not None, timeout_s):
                self._joinable -= 1
                return
            stages = self._stages or ()
        self._run_stages(execution, self.instances - position, stages)

    def _measure_all(self, execution: Execution) -> None:
        """Measure on the last instance: alone first, then together with the others."""
        begun_ns, several = self.clock(), self.instances > 1
        end_ns = begun_ns + self.limit_ns
        stages: list[ConcurrentRuns] = []
        try:
            feed = feeds(self.config)
            if self.stored.times_ns:
                self._accept_stored(self._measure_idle(execution, feed, end_ns))
                if self.latency_table.entries():
                    return
            alone_ns = int(self.limit_ns * _ALONE_SHARE) if several else self.limit_ns
            self._measure_alone(execution, feed, begun_ns + alone_ns)
            if several and self.latency_table.entries():
                stages = self._plan_stages(feed, end_ns)
        finally:
            with self._condition:
                # An instance that has stopped waiting cannot take part, so no stage can run.
                self._stages = stages = stages if self._joinable == self.instances - 1 else []
                self._condition.notify_all()
        self._run_stages(execution, 0, stages)
        medians = ", ".join(
            f"{entry.rows} rows {entry.median_ns // NS_PER_US} us ({entry.instances} busy)"
            for entry in self.latency_table.entries()
        )
        took_ms = (self.clock() - begun_ns) // NS_PER_MS
        logger.debug("model %s took %d ms to measure: %s", self.config.name, took_ms, medians)

    def _run_stages(self, execution: Execution, arrival: int, stages: Sequence[ConcurrentRuns]) -> None:
        """Run the stages together with the other instances.

        Args:
            execution: execution of the calling instance.
            arrival: index of the calling instance from 1 on; 0 for the last one, which fills the table.
            stages: all stages, in order.
        """
        try:
            for stage in stages:
                if arrival < stage.instances:
                    self._run(partial(stage.run, execution))
                if not arrival:
                    self.latency_table.seed(_warm(stage.times_ns, stage.instances), stage.instances)
        except BaseException:  # no other instance may wait for this one
            for stage in stages:
                stage.abort()
            raise

    def _measure_alone(self, execution: Execution, feed: Feed, end_ns: int) -> None:
        """Run all sizes several times on one instance, until the time limit."""
        times_by_rows: dict[int, list[int]] = {}

        def run() -> None:
            row_ns = 0.0
            for _ in range(_ROUNDS):
                for rows in sizes(self.config):
                    times_ns = times_by_rows.setdefault(rows, [])
                    expected_ns = times_ns[-1] if times_ns else row_ns * rows
                    if self.clock() + expected_ns > end_ns:
                        return
                    times_ns.append(self._timed(execution, feed(rows)))
                    row_ns = times_ns[-1] / rows

        self._run(run)
        self.latency_table.seed(_warm(times_by_rows, 1))
        self.idle_ns = self.latency_table.estimate_ns(min(sizes(self.config)), 1)

    def _plan_stages(self, feed: Feed, end_ns: int) -> list[ConcurrentRuns]:
        """Return the stages with 2, 4, 8 ... and all instances; the remaining time is shared between them."""
        counts = sorted({self.instances, *(1 << power for power in range(1, self.instances.bit_length()))})
        share_ns = max(end_ns - self.clock(), 0) // len(counts)
        row_counts = [entry.rows for entry in self.latency_table.entries()]
        stages = []
        for index, count in enumerate(counts):
            stop_ns = end_ns - share_ns * (len(counts) - 1 - index)

            def in_time(rows: int, count: int = count, stop_ns: int = stop_ns) -> bool:
                return self.clock() + self.latency_table.estimate_ns(rows, count) <= stop_ns

            stages.append(ConcurrentRuns(count, row_counts * _ROUNDS_TOGETHER, feed, in_time, self.clock))
        return stages

    def _run(self, run: Callable[[], None]) -> None:
        """Call `run`; an error on random inputs is logged and ends it."""
        try:
            run()
        except ExecutionLost:
            raise
        except Exception as error:
            name, error_name = self.config.name, type(error).__name__
            logger.info("model %s is not measured further: it failed on random inputs (%s)", name, error_name)

    def _timed(self, execution: Execution, inputs: dict[str, Array]) -> int:
        begun_ns = self.clock()
        execution.run(inputs)
        return self.clock() - begun_ns

    def _measure_idle(self, execution: Execution, feed: Feed, end_ns: int) -> int:
        """Measure the smallest size; returns its median in nanoseconds, 0 if the model fails on it."""
        times_ns: list[int] = []
        rows = min(sizes(self.config))

        def run() -> None:
            while len(times_ns) < _ROUNDS and (not times_ns or self.clock() < end_ns):
                times_ns.append(self._timed(execution, feed(rows)))

        self._run(run)
        warm_ns = sorted(times_ns[1:] or times_ns)
        return warm_ns[len(warm_ns) // 2] if warm_ns else 0

    def _accept_stored(self, idle_ns: int) -> None:
        """Use the stored times if the smallest size takes about as long as it did then, or if neither time is known."""
        then_ns, self.idle_ns = self.stored.idle_ns, idle_ns
        if then_ns / _ACCEPTED_RATIO <= idle_ns <= then_ns * _ACCEPTED_RATIO:
            for instances, times_ns in sorted(self.stored.times_ns.items()):
                self.latency_table.seed(times_ns, instances, "stored")
            if self.latency_table.entries():
                self.idle_ns = then_ns  # a new value at each start could drift


def sizes(config: ModelConfig) -> list[int]:
    """Return the batch sizes to measure: powers of two, preferred sizes and the maximum.

    Inputs have up to `MAX_RANDOM_BYTES`; with the outputs, and the row that is repeated, up to `MAX_INPUT_BYTES`.
    """
    max_rows, states = max(config.max_batch_size, 1), state_tensors(config.sequence_batching)[0]
    row_bytes, output_bytes = row_bytes_of((*config.served_input, *states)), row_bytes_of(config.served_output)
    max_bytes = MAX_INPUT_BYTES - row_bytes
    row_counts = {max_rows, *(1 << power for power in range(max_rows.bit_length()))}
    if config.dynamic_batching is not None:
        row_counts.update(config.dynamic_batching.preferred_batch_size)
    fitting = (rows for rows in row_counts if rows <= max_rows and rows * row_bytes <= MAX_RANDOM_BYTES)
    return sorted(rows for rows in fitting if rows * (row_bytes + output_bytes) <= max_bytes)


def unmeasurable(config: ModelConfig) -> str:
    """Return the reason why a model is not run on random inputs; "" if it is."""
    if config.backend in PYTHON_RUNTIMES:
        return "its Python code may have side effects, so its times are those of its requests"
    if is_ragged(config):
        return "its requests are joined, so its times are those of its requests"
    for tensor in config.served_input:
        if BY_CONFIG_NAME[tensor.data_type] is BYTES:
            return f"input {tensor.name} is text"
        if any(size < 0 for size in tensor.dims):
            return f"input {tensor.name} has free dimensions"
    input_bytes, output_bytes = row_bytes_of(config.served_input), row_bytes_of(config.served_output)
    return "" if sizes(config) else f"a row has {input_bytes} bytes of inputs and {output_bytes} bytes of outputs"


def bucket_times(buckets: Mapping[int, float]) -> dict[int, int]:
    """Return compute times in nanoseconds by rows, for batches that are padded to buckets.

    Args:
        buckets: compute time in microseconds by rows of the bucket.
    """
    table: dict[int, int] = {}
    before = 0
    for rows, time_us in sorted(buckets.items()):
        table[min(before + 1, rows)] = table[rows] = int(time_us * NS_PER_US)
        before = rows
    return table


def _warm(times_ns: Mapping[int, list[int]], instances: int) -> dict[int, list[int]]:
    """Drop the first time of each size and instance, if there are others."""
    return {rows: times_ns[instances:] or times_ns for rows, times_ns in times_ns.items()}


def feeds(config: ModelConfig) -> Feed:
    """Return a function that creates random inputs for a model that is not `unmeasurable`: one random row, repeated."""
    random = np.random.default_rng()
    rows_of = {
        tensor.name: random_values(BY_CONFIG_NAME[tensor.data_type], (1, *tensor.dims), random)
        for tensor in config.served_input
    }

    def feed(rows: int) -> dict[str, Array]:
        if not config.max_batch_size:
            return {name: row[0] for name, row in rows_of.items()}
        return {name: row.repeat(rows, axis=0) for name, row in rows_of.items()}

    return feed
