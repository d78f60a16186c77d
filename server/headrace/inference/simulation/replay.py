"""Replays a trace against models: requests enter the server's model handles, whose instances are simulated.

All decisions are the server's code: `ModelHandle.compute` (levels, deadlines, limits, splitting), `Scheduler` and its queue,
`decide`, `LaunchPacing`, `Completion`. Time, devices and the pulls of instance threads are simulated.

`VirtualInstance` performs the steps of `headrace.inference.scheduling.overlapped_runner` as events of a loop in virtual time.
`LatencyProfile` has the durations of these steps by rows. Pipelines run through the server's `PipelineHandle`;
`headrace.inference.simulation.pipelines` has their graphs.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from headrace.core.clock import NS_PER_US
from headrace.core.completion import Completion, LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import BatchTimes, InferRequest
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.scheduling.admission import InFlightWork
from headrace.inference.scheduling.batch_results import BatchResults
from headrace.inference.scheduling.batching import WaitUntil
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.inference.simulation.pipelines import (
    PipelineOutcome,
    SimulatedMembers,
    SimulatedPipeline,
    simulated_specs,
    tensors,
)
from headrace.inference.simulation.traces import Trace
from headrace.inference.simulation.virtual_time import VirtualLoop
from headrace.observability.counters import BatchRecord, Recorder
from headrace.runtimes.base import Execution, LoadedModel

# Durations of batches

# Factors drawn at a time: one call for each would cost more than simulating the batch.
_BLOCK = 4096
_LINE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:\+\s*(\d+(?:\.\d+)?)\s*\*?\s*n\s*)?")


@dataclass(frozen=True, slots=True)
class StepLatency:
    """Duration of one step of a batch, by its rows.

    Between two known sizes the time is interpolated; with padding it is that of the next larger size. Above the largest size it
    grows linearly with the mean slope of the points. Below the smallest size it is constant.

    Attributes:
        points: (rows, nanoseconds) pairs, rows ascending and at least 1.
        row_ns: nanoseconds of each row above the largest size; None for the mean slope of the points.
        padded: True if batches are padded to the next size.
    """

    points: tuple[tuple[int, float], ...] = ((1, 0.0),)
    row_ns: float | None = None
    padded: bool = False

    @classmethod
    def line(cls, batch_us: float, row_us: float = 0.0) -> StepLatency:
        """Return the latency `batch_us + row_us * rows`, in microseconds."""
        return cls(((1, (batch_us + row_us) * NS_PER_US),), row_us * NS_PER_US)

    def table(self, max_rows: int) -> tuple[int, ...]:
        """Return whole nanoseconds by rows, from 0 to `max_rows`."""
        return _table(self, max_rows)


@lru_cache(256)  # thousands of models share a few profiles
def _table(latency: StepLatency, max_rows: int) -> tuple[int, ...]:
    rows, times = np.array([n for n, _ in latency.points]), np.array([ns for _, ns in latency.points])
    sizes = np.arange(max_rows + 1)
    match = np.interp(sizes, rows, times)
    if latency.padded:
        match = times[np.minimum(np.searchsorted(rows, sizes), len(rows) - 1)]
    spread = rows[-1] - rows[0]
    row_ns = latency.row_ns
    if row_ns is None:
        row_ns = (times[-1] - times[0]) / spread if spread else 0.0
    match = match + np.maximum(sizes - rows[-1], 0) * row_ns
    return tuple(round(ns) for ns in match.tolist())


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Durations of the steps of a batch, and their variation.

    Attributes:
        compute: compute on the device, which runs one batch after the other.
        fill: copying inputs into the batch, on the instance's thread before the launch.
        copy_in: host-to-device copy, concurrent with the compute of other batches.
        copy_out: device-to-host copy, concurrent with the compute of other batches.
        variation: coefficient of variation of the compute time (gamma distributed): 0 for constant, 1 for exponential.
    """

    compute: StepLatency
    fill: StepLatency = field(default_factory=StepLatency)
    copy_in: StepLatency = field(default_factory=StepLatency)
    copy_out: StepLatency = field(default_factory=StepLatency)
    variation: float = 0.0


def parse_profile(text: str) -> LatencyProfile:
    """Parse a latency profile of the command line.

    Args:
        text: `450+20n` (microseconds: 450 for a batch and 20 for each row), or the name of a JSON file, see `profile_of`.

    Raises:
        ValueError: the text or the file is no profile.
        OSError: the file cannot be read.
    """
    if _LINE.fullmatch(text):
        return LatencyProfile(_latency(text, text))
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(
            f"'{text}' is not a latency profile: use microseconds such as 450+20n, or the name of a .json file"
        )
    try:
        return profile_of(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None


def profile_of(document: object) -> LatencyProfile:
    """Read a latency profile from a JSON document.

    Args:
        document: one of three forms. `{"1": 500, "8": 900}` has microseconds by rows. `{"compute": ..., "fill": ...,
            "copy_in": ..., "copy_out": ..., "padded": true, "variation": 0.1}` has such a table or a text such as "450+20n" for
            each step; only `compute` is required. The third form is the response of a server at `/v2/models/{m}/profile`.

    Raises:
        ValueError: the document has none of these forms.
    """
    if not isinstance(document, Mapping):
        raise ValueError(
            f'a profile is a JSON object such as {{"1": 500, "8": 900}} (microseconds by rows), not {document!r:.40}'
        )
    if isinstance(measured := document.get("profile"), list):
        return LatencyProfile(_latency(_medians(measured), "the profile"))
    if "compute" not in document:
        return LatencyProfile(_latency(document, "the profile"))
    keys = {"compute", "fill", "copy_in", "copy_out", "padded", "variation"}
    if unknown := sorted(set(document) - keys):
        raise ValueError(f"unknown key '{unknown[0]}' in the profile: use {', '.join(sorted(keys))}")
    padded, variation = document.get("padded", False), document.get("variation", 0.0)
    if not isinstance(padded, bool):
        raise ValueError(f"padded is {padded!r:.40}: use true or false")
    if not _is_time(variation):
        raise ValueError(f"variation is {variation!r:.40}: use a number of at least 0")
    steps = {
        name: _latency(document[name], name, padded and name == "compute")
        for name in ("compute", "fill", "copy_in", "copy_out")
        if name in document
    }
    return LatencyProfile(**steps, variation=float(variation))


def _medians(measured: Sequence[object]) -> dict[str, object]:
    """Return microseconds by rows from a server's latency table."""
    for line in measured:
        if not isinstance(line, Mapping) or not {"rows", "median_us"} <= set(line):
            raise ValueError(f"an entry of the profile is {line!r:.40}: use objects with rows and median_us")
    return {str(line["rows"]): line["median_us"] for line in measured if isinstance(line, Mapping)}


def _latency(value: object, where: str, padded: bool = False) -> StepLatency:
    if isinstance(value, str):
        match = _LINE.fullmatch(value)
        if match is None:
            raise ValueError(f"{where}: '{value}' is not a time: use microseconds such as 450+20n")
        return StepLatency.line(float(match[1]), float(match[2] or 0))
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{where} is {value!r:.40}: use microseconds by rows, {{"1": 500, "8": 900}}, or "450+20n"')
    points: list[tuple[int, float]] = []
    for rows, time_us in value.items():
        if not (isinstance(rows, str) and rows.isdecimal() and int(rows) >= 1):
            raise ValueError(f"{where}: '{rows}' is not a number of rows: use whole numbers from 1")
        if not _is_time(time_us):
            raise ValueError(f"{where}: {time_us!r} for {rows} rows is not a time: use microseconds, at least 0")
        points.append((int(rows), float(time_us) * NS_PER_US))
    return StepLatency(tuple(sorted(points)), padded=padded)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


class Variation:
    """Random factors of mean 1 for compute times.

    Args:
        coefficient: standard deviation of the factors; 0 for constant times.
        generator: source of randomness.
    """

    def __init__(self, coefficient: float, generator: np.random.Generator) -> None:
        self._shape = 1 / coefficient**2 if coefficient else 0.0
        self._generator = generator
        self._factors: list[float] = []

    def apply(self, time_ns: int) -> int:
        """Return the time of one batch, drawn from a distribution of mean `time_ns`."""
        if not self._shape:
            return time_ns
        if not self._factors:
            self._factors = self._generator.gamma(self._shape, 1 / self._shape, _BLOCK).tolist()
        return int(time_ns * self._factors.pop())


# Simulated devices and instances

_NO_OUTPUTS: dict[str, Array] = {}


@dataclass(slots=True)
class VirtualDevice:
    """Simulated device with three engines (copy in, compute, copy out), each with one batch at a time in the order of launch.

    Attributes:
        copied_in_ns: time at which the copy-in engine becomes idle.
        computed_ns: time at which the compute engine becomes idle.
        copied_out_ns: time at which the copy-out engine becomes idle.
        busy_ns: total compute time.
    """

    copied_in_ns: int = 0
    computed_ns: int = 0
    copied_out_ns: int = 0
    busy_ns: int = 0

    def run(self, now_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> int:
        """Launch a batch; return the time of its completion."""
        self.copied_in_ns = max(now_ns, self.copied_in_ns) + copy_in_ns
        self.computed_ns = max(self.copied_in_ns, self.computed_ns) + compute_ns
        self.copied_out_ns = max(self.computed_ns, self.copied_out_ns) + copy_out_ns
        self.busy_ns += compute_ns
        return self.copied_out_ns


class StepTimes:
    """Tables of a latency profile: whole nanoseconds by rows, and the variation of the compute time.

    Args:
        profile: the latency profile.
        max_rows: rows of the largest batch.
        variation: draws the compute times.
    """

    def __init__(self, profile: LatencyProfile, max_rows: int, variation: Variation) -> None:
        self.fill = profile.fill.table(max_rows)
        self.copy_in = profile.copy_in.table(max_rows)
        self.compute = profile.compute.table(max_rows)
        self.copy_out = profile.copy_out.table(max_rows)
        self.vary = variation.apply

    def on_device_ns(self, rows: int) -> int:
        """Return the mean device time of a batch that runs alone."""
        return self.copy_in[rows] + self.compute[rows] + self.copy_out[rows]


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """Simulated instance: it uses virtual time and no processor.

    It follows `OverlappedRunner`: the thread pulls while fewer than `depth` batches are in flight, delayed by `pacing`. It fills
    and launches one batch after the other, and batches finish in the order of launch. With a depth of 1 it behaves as a
    `SerialRunner`.

    Attributes:
        loop: event loop in virtual time.
        device: simulated device; instances may share one.
        times: durations of batches.
        batch_results: settles the requests of finished batches.
        pull: makes all instances of the model pull from the queue.
        waiting_rows: returns the queued rows.
        depth: most batches in flight.
        pacing: delays pulls while batches are in flight; None pulls at once.
        output_names: outputs of a model that a pipeline calls; () for any other.
        is_pulling: True while the thread is in `Scheduler.next_batch`, ready for a batch.
        open: batches that are being filled or in flight.
    """

    loop: VirtualLoop
    device: VirtualDevice
    times: StepTimes
    batch_results: BatchResults
    pull: Callable[[], None]
    waiting_rows: Callable[[], int]
    depth: int = 1
    pacing: LaunchPacing | None = None
    output_names: tuple[str, ...] = ()
    is_pulling: bool = True
    open: int = 0
    _filling: Batch | None = None
    _in_flight: deque[Batch] = field(default_factory=deque)
    _waits: int = 0  # number of waits of the thread; identifies the wait that a timer belongs to
    _last_ns: int = 0

    @property
    def begins_ns(self) -> int:
        """Time at which the compute of a batch that is pulled now would start; 0 for at once."""
        return self.pacing.free_ns if self.pacing is not None and self.open else 0

    def start(self, batch: Batch) -> None:
        """Fill and launch a batch that was pulled."""
        self.batch_results.begin(self)
        self.open += 1
        fill_ns = self.times.fill[batch.rows]
        if fill_ns:
            self.is_pulling, self._filling = False, batch
            self.loop.at(self.loop.now_ns + fill_ns, self._filled)
        else:
            self._launch(batch)

    @property
    def in_flight_work(self) -> InFlightWork:
        """Return the batches that were pulled and are not settled."""
        batches = [*self._in_flight, self._filling] if self._filling else self._in_flight
        return InFlightWork(self._last_ns, [(batch.taken_ns, batch.rows) for batch in batches])

    def _filled(self) -> None:
        batch, self._filling = self._filling, None
        assert batch is not None, "a batch is filled once"
        self._launch(batch)
        if self.is_pulling:
            self.pull()

    def _launch(self, batch: Batch) -> None:
        times, rows = self.times, batch.rows
        batch.assembled_ns = now_ns = self.loop.now_ns
        compute_ns = times.vary(times.compute[rows])
        done_ns = self.device.run(now_ns, times.copy_in[rows], compute_ns, times.copy_out[rows])
        if self.pacing is not None:
            self.pacing.launched(rows, batch.taken_ns, now_ns)
        self._in_flight.append(batch)
        self.loop.at(done_ns, self._finish)
        self._decide_pull()

    def _finish(self) -> None:
        batch, now_ns = self._in_flight.popleft(), self.loop.now_ns
        times = BatchTimes(batch.taken_ns, batch.assembled_ns, now_ns, now_ns)
        busy_ns = now_ns - max(batch.taken_ns, self._last_ns)
        self._last_ns = now_ns
        names, entries = self.output_names, batch.entries
        outputs = [tensors(names, entry.rows) for entry in entries] if names else [_NO_OUTPUTS] * len(entries)
        self.batch_results.settle(batch, times, outputs, busy_ns)
        self.open -= 1
        if not self.open:
            self.batch_results.busy_runners.discard(self)
        if self.pacing is not None:
            self.pacing.completed(now_ns)
        if not self.is_pulling and self._filling is None:
            self._decide_pull()
            if self.is_pulling:
                self.pull()

    def _decide_pull(self) -> None:
        """Decide when the thread pulls the next batch: now, at a time, or once a batch has finished."""
        self._waits += 1
        self.is_pulling = False
        if self.open >= self.depth:
            return
        if self.pacing is not None and self.open:
            pull_ns = self.pacing.pull_ns(self.waiting_rows())
            if pull_ns > self.loop.now_ns:
                waits = self._waits
                self.loop.at(pull_ns, lambda: self._end_wait(waits))
                return
        self.is_pulling = True

    def _end_wait(self, waits: int) -> None:
        if waits == self._waits:
            self.is_pulling = True
            self.pull()


ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model of the simulation and its devices.

    Attributes:
        policy: policy of the model.
        profile: durations of its batches.
        depth: most batches in flight of an instance; 1 runs one batch after the other.
        devices: index of the device of each instance; empty gives each instance a separate device.
    """

    policy: HandlePolicy
    profile: LatencyProfile
    depth: int = 1
    devices: tuple[int, ...] = ()


@dataclass
class BatchHistory:
    """Batches of one model, in the order of completion.

    Attributes:
        taken_ns: close time of each batch.
        rows: rows of each batch.
        reasons: number of batches by close reason.
    """

    taken_ns: array[int] = field(default_factory=partial(array, "q"))
    rows: array[int] = field(default_factory=partial(array, "q"))
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Replay:
    """Outcome of a trace.

    Attributes:
        trace: the trace.
        latency_ns: time from arrival to response or error of each request.
        outcomes: ANSWERED or the reason of the error, for each request.
        batches: batches of each model.
        busy_ns: total compute time of each device.
        end_ns: time of the last response or error.
        pipelines: figures of the pipelines by name.
    """

    trace: Trace
    latency_ns: list[int]
    outcomes: list[str]
    batches: list[BatchHistory]
    busy_ns: list[int] = field(default_factory=list)
    end_ns: int = 0
    pipelines: dict[str, PipelineOutcome] = field(default_factory=dict)


class BatchRecorder(Recorder):
    """Counts batches for a simulation's report instead of Prometheus."""

    def __init__(self, batches: BatchHistory) -> None:
        super().__init__(histograms=False)
        self._batches = batches

    def record_batch(self, batch: BatchRecord) -> None:
        """Record a batch; see `Recorder`."""
        batches = self._batches
        batches.taken_ns.append(batch.times.taken_ns)
        batches.rows.append(batch.batch_rows)
        batches.reasons[batch.reason] += 1


class _NoModel(LoadedModel):
    """Placeholder for a loaded model; its executions are simulated."""

    def execution(self, index: int) -> Execution:
        raise AssertionError("a simulated handle is never started")


class _Handle(ModelHandle):
    """A handle whose instances are simulated; it is never started.

    Args:
        name: name of the model.
        model: policy and durations.
        loop: event loop in virtual time.
        mailbox: mailbox of the loop.
        devices: the device of each instance.
        generator: source of the variation of compute times.
        spec: tensors of a model that a pipeline calls; None for a model with direct callers only.
    """

    def __init__(
        self,
        name: str,
        model: SimulatedModel,
        loop: VirtualLoop,
        mailbox: Mailbox,
        devices: Sequence[VirtualDevice],
        generator: np.random.Generator,
        spec: ModelSpec | None = None,
    ) -> None:
        batch = model.policy.batch
        self.batches = BatchHistory()
        output_names = () if spec is None else tuple(spec.outputs)
        spec = spec or ModelSpec(name, "1", "simulated", {}, {}, batch.max_rows)
        super().__init__(spec, model.policy, _NoModel(), mailbox, BatchRecorder(self.batches), clock=loop.clock)
        if output_names:  # the pipeline does not pull
            self.infer = self._infer_and_pull
        self._loop = loop
        self._alarm_ns = 0  # time of the next poll; 0 for none
        self._scheduler.set_instances(model.policy.instances)
        times = StepTimes(model.profile, batch.max_rows, Variation(model.profile.variation, generator))
        # Seed the latency table as a server does at load.
        sizes = {batch.max_rows, *batch.preferred_rows, *(1 << power for power in range(batch.max_rows.bit_length()))}
        self.latency_table.seed({rows: [times.on_device_ns(rows)] for rows in sizes if rows <= batch.max_rows})
        full_rows = min(batch.preferred_rows, default=batch.max_rows) if model.depth > 1 and batch.merge else 0
        # Admission control reads the running batches of this list.
        self.instances = cast(list[VirtualInstance], self._instance_group.instances)
        self.instances += [
            VirtualInstance(
                loop,
                device,
                times,
                self._batch_results,
                self.pull,
                lambda: self._scheduler.waiting_rows,
                model.depth,
                LaunchPacing(full_rows) if full_rows else None,
                output_names,
            )
            for device in devices
        ]

    def _infer_and_pull(self, request: InferRequest) -> LoopCompletion:
        completion = self.compute(request)
        self._loop.call_soon(self.pull)
        return completion

    def pull(self) -> None:
        """Poll for each instance that pulls, those with the fewest batches in flight first."""
        instances, scheduler, now_ns = self.instances, self._scheduler, self._loop.now_ns
        if not scheduler.depth:
            return
        for instance in instances if len(instances) == 1 else sorted(instances, key=lambda each: each.open):
            while instance.is_pulling and scheduler.depth:
                answer = scheduler.poll(now_ns, instance.begins_ns)
                if type(answer) is Batch:
                    instance.start(answer)
                elif isinstance(answer, WaitUntil):
                    self._set_alarm(answer.time_ns)
                    return
                else:
                    return

    def _set_alarm(self, time_ns: int) -> None:
        if not self._alarm_ns or time_ns < self._alarm_ns:
            self._alarm_ns = time_ns
            self._loop.at(time_ns, partial(self._on_alarm, time_ns))

    def _on_alarm(self, time_ns: int) -> None:
        if time_ns == self._alarm_ns:
            self._alarm_ns = 0
            self.pull()


def replay(
    trace: Trace, models: Sequence[SimulatedModel], seed: int = 0, pipelines: Sequence[SimulatedPipeline] = ()
) -> Replay:
    """Replay a trace against simulated models.

    Args:
        trace: requests with the index of their model.
        models: the models, in the order of `trace.names`.
        seed: seed of the variation of compute times.
        pipelines: pipelines that call the models; their names follow those of the models in `trace.names`.
    """
    loop = VirtualLoop()
    mailbox = Mailbox(cast("asyncio.AbstractEventLoop", loop), loop.clock)
    shared: dict[int, VirtualDevice] = {}
    devices: list[VirtualDevice] = []
    handles: list[_Handle] = []
    generators = np.random.default_rng(seed).spawn(len(models))
    names = trace.names[: len(models)]
    largest = {name: model.policy.batch.max_rows for name, model in zip(names, models, strict=True)}
    specs = simulated_specs(pipelines, largest)
    for name, model, generator in zip(names, models, generators, strict=True):
        used = [shared.setdefault(number, VirtualDevice()) for number in model.devices]
        if not used:
            used = [VirtualDevice() for _ in range(model.policy.instances)]
            devices += used
        handles.append(_Handle(name, model, loop, mailbox, used, generator, specs.get(name)))
    devices += shared.values()
    chains = _pipeline_handles(pipelines, specs, handles, mailbox, loop)
    batches = [*(handle.batches for handle in handles), *(BatchHistory() for _ in chains)]
    result = Replay(trace, [0] * len(trace), [""] * len(trace), batches)

    def settled(number: int, arrived_ns: int, completion: Completion) -> None:
        outcome = completion.outcome
        result.latency_ns[number] = loop.now_ns - arrived_ns
        result.outcomes[number] = outcome.reason if isinstance(outcome, HeadraceError) else ANSWERED

    for number, (time_ns, index, request) in enumerate(trace.requests()):
        loop.advance(time_ns)
        chain = chains[index - len(handles)] if index >= len(handles) else None
        if chain is not None:
            request.inputs = tensors(chain.graph.inputs, request.rows)
        try:
            completion = (chain or handles[index]).infer(request)
        except HeadraceError as error:
            result.outcomes[number] = error.reason
        else:
            completion.then(partial(settled, number, time_ns, completion))
        loop.settle()
        if chain is None:
            handles[index].pull()
    loop.finish()
    result.busy_ns = [device.busy_ns for device in devices]
    result.end_ns = loop.now_ns
    for chain in chains:
        wasted = chain.recorder.totals().wasted_ns / max(sum(result.busy_ns), 1)
        result.pipelines[chain.spec.name] = PipelineOutcome(chain.graph, chain.steps(), wasted)
    return result


def _pipeline_handles(
    pipelines: Sequence[SimulatedPipeline],
    specs: Mapping[str, ModelSpec],
    handles: Sequence[_Handle],
    mailbox: Mailbox,
    loop: VirtualLoop,
) -> list[PipelineHandle]:
    by_name: dict[str, VersionHandle] = {handle.spec.name: handle for handle in handles}
    members = SimulatedMembers(by_name)
    chains: list[PipelineHandle] = []
    for pipeline in pipelines:
        spec, recorder = specs[pipeline.graph.name], Recorder(False, loop.clock)
        chain = PipelineHandle(spec, pipeline.graph, members, pipeline.policy, mailbox, recorder, clock=loop.clock)
        chains.append(chain)
        by_name[spec.name] = chain
    return chains
