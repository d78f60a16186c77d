"""The stages of a batch with and without overlap: preprocess, copy, run, postprocess.

    preprocess    a thread writes the inputs to pinned memory: pixels of 8 bits normalised, for other models a copy
    copy          inputs to the GPU, outputs back
    run           TensorRT
    postprocess   a thread reads the outputs: the five classes with the highest probability, for other models the sums

Without overlap one thread does all of it, and waits after each stage. With overlap there are three batch slots, a thread for each
of preprocess, launch and postprocess, and a stream for each of inputs, execution and outputs, ordered by events.

Stages of the GPU are timed by CUDA events, those of the host by its clock. Both are brought to one axis by an event on an idle
stream: its time on the host is known to some 10 us, the time that waiting for it takes.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from headrace.runtimes.cuda.devices import Nvml
from headrace.runtimes.cuda.driver import CompletionEvent, CudaStream, TimingEvent, current
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array
from headrace_engines.targets.tensorrt.pipelined import BatchSlot, PipelinedPlan

from headrace_lab.gpu_load import GpuLoad, LoadSampler

STAGES = ("preprocess", "copy", "run", "postprocess")
SLOTS = 3
# Batches in the timeline, after those that fill the pipeline.
SHOWN = 8
_SKIPPED = 6
_CLASSES = 5
_PIXEL_THREADS = 16


class TensorStage:
    """Work of the host on a batch: inputs are copied, outputs are reduced.

    Args:
        batch: inputs by name.
    """

    def __init__(self, batch: Mapping[str, Array]) -> None:
        self._batch = dict(batch)

    def preprocess(self, inputs: Mapping[str, Array]) -> None:
        """Copy the inputs to arrays in pinned memory, by input name."""
        for name, target in inputs.items():
            np.copyto(target, self._batch[name].view(target.dtype), casting="same_kind")

    def postprocess(self, outputs: Mapping[str, Array]) -> Array:
        """Return the classes of the first output with an axis of them, else the sums of its rows."""
        for array in outputs.values():
            if array.dtype.kind == "f" and array.ndim == 2 and array.shape[1] > 1:
                return top_classes(array)
        first = next(iter(outputs.values()))
        return np.asarray(first.reshape(len(first) if first.ndim else 1, -1).sum(axis=1, dtype=np.float64))


class PixelStage(TensorStage):
    """Pixels of 8 bits, [rows, height, width, channels], are normalised to one input, by up to 16 threads.

    Args:
        batch: inputs by name; the picture is recovered from them.
        name: name of the input of pictures.
        mean, std: normalisation of each channel, for pixels 0..255.
        channels_first: the input is [rows, channels, height, width].
    """

    def __init__(self, batch: Mapping[str, Array], name: str, mean: Array, std: Array, *, channels_first: bool) -> None:
        super().__init__({other: array for other, array in batch.items() if other != name})
        self._name, self._mean, self._std = name, mean.astype(np.float32), std.astype(np.float32)
        self._channels_first = channels_first
        rows = batch[name].astype(np.float32)
        rows = rows.transpose(0, 2, 3, 1) if channels_first else rows
        self._pixels = np.ascontiguousarray(np.clip(np.rint(rows * self._std + self._mean), 0, 255).astype(np.uint8))
        count = min(len(self._pixels), len(os.sched_getaffinity(0)), _PIXEL_THREADS)
        edges = np.linspace(0, len(self._pixels), count + 1).astype(int)
        self._parts = [slice(first, last) for first, last in itertools.pairwise(edges.tolist())]
        self._threads = ThreadPoolExecutor(count, "pixels")

    def preprocess(self, inputs: Mapping[str, Array]) -> None:
        """Normalise the pixels into the input, some rows in each thread, and copy the others."""
        super().preprocess({name: array for name, array in inputs.items() if name != self._name})
        target = inputs[self._name]
        target = target.transpose(0, 2, 3, 1) if self._channels_first else target

        def normalise(part: slice) -> None:
            for pixels, values in zip(self._pixels[part], target[part], strict=True):
                # One plane at a time stays in the cache.
                for channel, (mean, std) in enumerate(zip(self._mean, self._std, strict=True)):
                    plane = values[..., channel]
                    np.subtract(pixels[..., channel], mean, out=plane, dtype=np.float32)
                    np.divide(plane, std, out=plane)

        list(self._threads.map(normalise, self._parts))


def top_classes(scores: Array) -> Array:
    """Return the classes with the highest scores of each row, the best first, INT64 [rows, classes]."""
    count = min(_CLASSES, scores.shape[1])
    best = np.argpartition(scores, -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    return np.asarray(np.take_along_axis(best, order, axis=1))


@dataclass(frozen=True, slots=True)
class StageInterval:
    """One stage of one batch.

    Attributes:
        stage: one of `STAGES`.
        batch: number of the batch.
        start_us, end_us: since the begin of the measurement.
    """

    stage: str
    batch: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """Measurement of one mode.

    Attributes:
        overlapped: True for the pipeline.
        rows: rows of a batch.
        batches: completed batches.
        seconds: duration.
        intervals: stages of some batches in the middle, by batch.
        load: state of the GPU.
        stage_us: median time of each stage; "copy" is the sum of both directions.
    """

    overlapped: bool
    rows: int
    batches: int
    seconds: float
    intervals: tuple[StageInterval, ...]
    load: GpuLoad
    stage_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        """Throughput."""
        return self.rows * self.batches / self.seconds

    @property
    def energy_each_j(self) -> float | None:
        """Energy of one row in joules; None if it is not known."""
        return self.load.energy_each_j(self.rows * self.batches)

    @property
    def run_share(self) -> float:
        """Share of the time in which the GPU runs the model."""
        return min(self.stage_us.get("run", 0.0) * self.batches / (self.seconds * 1e6), 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        derived = {"rows_per_s": self.rows_per_s, "energy_each_j": self.energy_each_j, "run_share": self.run_share}
        return asdict(self) | derived


class _Clock:
    """One time axis for the host and the GPU.

    Args:
        stream: an idle stream.
    """

    def __init__(self, stream: CudaStream) -> None:
        self.base = TimingEvent()
        self.base.record(stream)
        stream.synchronize()
        self._base_ns = time.perf_counter_ns()

    def host_us(self) -> float:
        """Return the present time."""
        return (time.perf_counter_ns() - self._base_ns) / 1e3


class _Batch:
    """Events and times of one slot; reused for every batch in it."""

    def __init__(self, slot: BatchSlot) -> None:
        self.slot = slot
        self.number = 0
        self.host: dict[str, tuple[float, float]] = {}
        names = ("copy_start", "copy_end", "run_start", "run_end", "back_start", "back_end")
        self.events = {name: TimingEvent() for name in names}
        self.copied, self.ran, self.completed = CompletionEvent(), CompletionEvent(), CompletionEvent()

    def intervals(self, clock: _Clock) -> list[StageInterval]:
        """Return the stages of the present batch, which is complete."""
        at = {name: event.us_since(clock.base) for name, event in self.events.items()}
        return [
            StageInterval("preprocess", self.number, *self.host["preprocess"]),
            StageInterval("copy", self.number, at["copy_start"], at["copy_end"]),
            StageInterval("run", self.number, at["run_start"], at["run_end"]),
            StageInterval("copy", self.number, at["back_start"], at["back_end"]),
            StageInterval("postprocess", self.number, *self.host["postprocess"]),
        ]


class OverlapLab:
    """Runs batches through the stages.

    Args:
        plan: the engine.
        batch: inputs of a batch by name.
        stage: work of the host.
        gpu: number of the GPU.
        nvml: reader of the GPU's state.
    """

    def __init__(
        self, plan: PipelinedPlan, batch: Mapping[str, Array], stage: TensorStage, gpu: int, nvml: Nvml
    ) -> None:
        self._plan, self._stage, self._gpu, self._nvml = plan, stage, gpu, nvml
        self._rows = len(next(iter(batch.values())))
        with current(gpu):
            self._batches = [_Batch(slot) for slot in plan.open_slots(batch, SLOTS)]
            self._streams = [CudaStream() for _ in range(3)]
        self._expected: Array | None = None

    def measure(self, seconds: float, *, overlapped: bool) -> OverlapResult:
        """Run batches for a duration.

        Raises:
            BuildError: the engine fails, or a batch has another result than the first one.
        """
        run = self._run_overlapped if overlapped else self._run_sequential
        with current(self._gpu), LoadSampler(self._gpu, self._nvml) as sampler:
            clock = _Clock(self._streams[0])
            intervals: list[StageInterval] = []
            sampler.restart()
            started_us = clock.host_us()
            count = run(clock, started_us + seconds * 1e6, intervals)
            elapsed_s = (clock.host_us() - started_us) / 1e6
        return OverlapResult(
            overlapped, self._rows, count, elapsed_s, _middle(intervals), sampler.load, _medians(intervals)
        )

    def close(self) -> None:
        """Drop the streams and events; close the engine after it."""
        with current(self._gpu):
            self._batches.clear()
            self._streams.clear()

    def _run_sequential(self, clock: _Clock, until_us: float, intervals: list[StageInterval]) -> int:
        stream, batch = self._streams[0], self._batches[0]
        number = 0
        while number < _SKIPPED + SHOWN or clock.host_us() < until_us:
            batch.number = number
            self._preprocess(batch, clock)
            for name in ("copy", "run", "back"):
                self._queue(batch, name, stream)
                stream.synchronize()
            self._postprocess(batch, clock)
            intervals += batch.intervals(clock)
            number += 1
        return number

    def _queue(self, batch: _Batch, name: str, stream: CudaStream) -> None:
        """Queue one stage of the GPU between its events."""
        plan = self._plan
        batch.events[f"{name}_start"].record(stream)
        {"copy": plan.queue_inputs, "run": plan.queue_run, "back": plan.queue_outputs}[name](batch.slot, stream)
        batch.events[f"{name}_end"].record(stream)

    def _run_overlapped(self, clock: _Clock, until_us: float, intervals: list[StageInterval]) -> int:
        pipeline = _Pipeline(self._batches, self._gpu)

        def preprocess(batch: _Batch, number: int) -> bool:
            if number >= _SKIPPED + SHOWN and clock.host_us() >= until_us:
                return False
            batch.number = number
            self._preprocess(batch, clock)
            return True

        def finish(batch: _Batch) -> None:
            batch.completed.wait()
            self._postprocess(batch, clock)
            intervals.extend(batch.intervals(clock))

        return pipeline.run(preprocess, self._launch, finish)

    def _launch(self, batch: _Batch) -> None:
        """Queue copies and execution of a batch, ordered by events."""
        inputs, execution, outputs = self._streams
        self._queue(batch, "copy", inputs)
        batch.copied.record(inputs)
        batch.copied.block(execution)
        self._queue(batch, "run", execution)
        batch.ran.record(execution)
        batch.ran.block(outputs)
        self._queue(batch, "back", outputs)
        batch.completed.record(outputs)

    def _preprocess(self, batch: _Batch, clock: _Clock) -> None:
        started_us = clock.host_us()
        self._stage.preprocess({name: tensor.pinned for name, tensor in batch.slot.inputs.items()})
        batch.host["preprocess"] = started_us, clock.host_us()

    def _postprocess(self, batch: _Batch, clock: _Clock) -> None:
        started_us = clock.host_us()
        result = self._stage.postprocess({name: tensor.pinned for name, tensor in batch.slot.outputs.items()})
        batch.host["postprocess"] = started_us, clock.host_us()
        self._expected = result if self._expected is None else self._expected
        if not np.allclose(result, self._expected):
            cure = "overlapping batches write to the same memory: report it"
            raise BuildError(f"batch {batch.number} has another result than the first one: {cure}")


class _Pipeline:
    """Three threads that hand batches on: preprocess, launch (the caller's thread) and finish."""

    def __init__(self, batches: Sequence[_Batch], gpu: int) -> None:
        self._gpu = gpu
        self._free: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        for batch in batches:
            self._free.put(batch)

    def run(
        self,
        preprocess: Callable[[_Batch, int], bool],
        launch: Callable[[_Batch], None],
        finish: Callable[[_Batch], None],
    ) -> int:
        """Run batches until `preprocess` returns False; return their number."""
        first = threading.Thread(target=self._guarded, args=(self._prepare, preprocess), name="preprocess")
        last = threading.Thread(target=self._guarded, args=(self._finish, finish), name="postprocess")
        first.start()
        last.start()
        count = 0
        try:
            while (batch := self._ready.get()) is not None and self._error is None:
                launch(batch)
                self._launched.put(batch)
                count += 1
        except BaseException as error:
            self._error = self._error or error
        self._launched.put(None)
        last.join()
        # Ends a thread that still waits for a batch after an error.
        self._free.put(None)
        first.join()
        if self._error is not None:
            raise self._error
        return count

    def _guarded(self, work: Callable[[Any], None], step: Any) -> None:
        try:
            with current(self._gpu):
                work(step)
        except BaseException as error:
            self._error = self._error or error
            self._ready.put(None)

    def _prepare(self, preprocess: Callable[[_Batch, int], bool]) -> None:
        number = 0
        while True:
            batch = self._free.get()
            if batch is None or self._error is not None or not preprocess(batch, number):
                self._ready.put(None)
                return
            self._ready.put(batch)
            number += 1

    def _finish(self, finish: Callable[[_Batch], None]) -> None:
        while (batch := self._launched.get()) is not None:
            finish(batch)
            self._free.put(batch)


def _middle(intervals: Sequence[StageInterval]) -> tuple[StageInterval, ...]:
    """Return the stages of the batches of the timeline; times begin with the first of them."""
    shown = [one for one in intervals if _SKIPPED <= one.batch < _SKIPPED + SHOWN]
    start = min((one.start_us for one in shown), default=0.0)
    return tuple(
        StageInterval(one.stage, one.batch - _SKIPPED, one.start_us - start, one.end_us - start) for one in shown
    )


def _medians(intervals: Sequence[StageInterval]) -> dict[str, float]:
    sums: dict[tuple[str, int], float] = {}
    for one in intervals:
        if one.batch >= _SKIPPED:
            key = one.stage, one.batch
            sums[key] = sums.get(key, 0.0) + one.end_us - one.start_us
    return {stage: float(np.median([us for (name, _), us in sums.items() if name == stage])) for stage in STAGES}
