"""Replays a trace against models: requests enter the server's model handles, whose instances are simulated.

All decisions are the server's code: `ModelHandle.infer` (levels, deadlines, limits, splitting), `Scheduler` and its queue,
`decide`, `LaunchPacing`, `Completion`. Time, devices and the pulls of instance threads are simulated.

`VirtualLoop` is an event loop in virtual time: it runs due callbacks in order and never waits. `VirtualInstance` performs the
steps of `headrace.scheduling.pipeline` as events of that loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from headrace.backends.base import Execution
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Completion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import BatchTimes
from headrace.core.tensor import Array, ModelSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.admission import InFlightWork
from headrace.scheduling.batching import WaitUntil
from headrace.scheduling.executor import BatchResults
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.pipeline import LaunchPacing
from headrace.scheduling.policy import HandlePolicy
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Batch, Scheduler
from headrace.simulation.batch_times import LatencyProfile, Variation
from headrace.simulation.traces import Trace


class Timer:
    """Cancellable callback, in place of `asyncio.TimerHandle`."""

    __slots__ = ("_arguments", "_callback")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        """Cancel the callback."""
        self._callback = None
        self._arguments = ()

    def fire(self) -> None:
        """Run the callback if it is not cancelled."""
        if self._callback is not None:
            self._callback(*self._arguments)


class VirtualLoop:
    """Event loop and clock of a simulation, with the methods of asyncio's loop that the data plane uses.

    It never waits, and only one thread may call. Callbacks due at the same time run in the order of scheduling.

    Attributes:
        now_ns: virtual nanoseconds since the start of the simulation.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> int:
        """Return `now_ns`; see `headrace.core.clock.Clock`."""
        return self.now_ns

    def time(self) -> float:
        """Return seconds since the start of the simulation."""
        return self.now_ns / NS_PER_S

    def at(self, time_ns: int, callback: Callable[[], object]) -> None:
        """Schedule a callback at a time that has not passed."""
        heapq.heappush(self._due, (time_ns, next(self._order), callback))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Schedule a callback after `delay` seconds."""
        timer = Timer(callback, args)
        self.at(self.now_ns + round(delay * NS_PER_S), timer.fire)
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a callback before every other event."""
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def advance(self, until_ns: int) -> None:
        """Run the callbacks due up to and including `until_ns`, and set the time to it."""
        due, ready = self._due, self._ready
        self.settle()
        while due and due[0][0] <= until_ns:
            self.now_ns, _, callback = heapq.heappop(due)
            callback()
            if ready:
                self.settle()
        self.now_ns = until_ns

    def finish(self) -> None:
        """Run callbacks, and those that they schedule, until none is left."""
        while self._ready or self._due:
            self.settle()
            if self._due:
                self.advance(self._due[0][0])

    def settle(self) -> None:
        """Run the callbacks of `call_soon`."""
        ready = self._ready
        while ready:
            callback, arguments = ready.popleft()
            callback(*arguments)


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
class _PendingBatch:
    """A batch that was pulled and is not settled."""

    entries: list[Entry]
    batch: Batch
    rows: int
    assembled_ns: int = 0


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """Simulated instance: it uses virtual time and no processor.

    It follows `Pipeline`: the thread pulls while fewer than `depth` batches are in flight, delayed by `pacing`. It fills and
    launches one batch after the other, and batches finish in the order of launch. With a depth of 1 it behaves as a
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
    is_pulling: bool = True
    open: int = 0
    _filling: _PendingBatch | None = None
    _in_flight: deque[_PendingBatch] = field(default_factory=deque)
    _waits: int = 0  # number of waits of the thread; identifies the wait that a timer belongs to
    _last_ns: int = 0

    @property
    def begins_ns(self) -> int:
        """Time at which the compute of a batch that is pulled now would start; 0 for at once."""
        return self.pacing.free_ns if self.pacing is not None and self.open else 0

    def start(self, batch: Batch) -> None:
        """Fill and launch a batch that was pulled."""
        rows = 0
        for entry in batch.entries:
            rows += entry.rows
        run = _PendingBatch(batch.entries, batch, rows)
        self.batch_results.begin(self)
        self.open += 1
        fill_ns = self.times.fill[rows]
        if fill_ns:
            self.is_pulling, self._filling = False, run
            self.loop.at(self.loop.now_ns + fill_ns, self._filled)
        else:
            self._launch(run)

    def in_flight_work(self) -> InFlightWork:
        """Return the batches that were pulled and are not settled."""
        runs = [*self._in_flight, self._filling] if self._filling else self._in_flight
        return InFlightWork(self._last_ns, [(run.batch.taken_ns, run.rows) for run in runs])

    def _filled(self) -> None:
        run, self._filling = self._filling, None
        assert run is not None, "a batch is filled once"
        self._launch(run)
        if self.is_pulling:
            self.pull()

    def _launch(self, run: _PendingBatch) -> None:
        times, rows = self.times, run.rows
        run.assembled_ns = now_ns = self.loop.now_ns
        compute_ns = times.vary(times.compute[rows])
        done_ns = self.device.run(now_ns, times.copy_in[rows], compute_ns, times.copy_out[rows])
        if self.pacing is not None:
            self.pacing.launched(rows, run.batch.taken_ns, now_ns)
        self._in_flight.append(run)
        self.loop.at(done_ns, self._finish)
        self._decide_pull()

    def _finish(self) -> None:
        run = self._in_flight.popleft()
        now_ns, batch = self.loop.now_ns, run.batch
        times = BatchTimes(batch.taken_ns, run.assembled_ns, now_ns, now_ns)
        busy_ns = now_ns - max(batch.taken_ns, self._last_ns)
        self._last_ns = now_ns
        self.batch_results.settle(run.entries, batch.reason, times, [_NO_OUTPUTS] * len(run.entries), busy_ns)
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
    """

    trace: Trace
    latency_ns: list[int]
    outcomes: list[str]
    batches: list[BatchHistory]
    busy_ns: list[int] = field(default_factory=list)
    end_ns: int = 0


class BatchRecorder(Recorder):
    """Counts batches for a simulation's report instead of Prometheus."""

    def __init__(self, batches: BatchHistory) -> None:
        super().__init__(histograms=False)
        self._batches = batches

    def batch(
        self,
        rows: int,
        batch_rows: int,
        reason: str,
        times: BatchTimes,
        queue_ns: list[int],
        total_ns: list[int],
        busy_ns: int = 0,
        shape: object = None,
    ) -> None:
        """Record a batch; see `Recorder`."""
        batches = self._batches
        batches.taken_ns.append(times.taken_ns)
        batches.rows.append(batch_rows)
        batches.reasons[reason] += 1


class _NoModel:
    """Placeholder for a loaded model; its executions are simulated."""

    def execution(self, index: int) -> Execution:
        raise AssertionError("a simulated handle is never started")

    def close(self) -> None:
        pass


class _Handle(ModelHandle):
    """A handle whose instances are simulated; it is never started."""

    def instances(
        self, model: SimulatedModel, loop: VirtualLoop, devices: Sequence[VirtualDevice], variation: Variation
    ) -> _Instances:
        """Create the simulated instances, one for each device, and fill the latency table as a server does at load."""
        policy = self.policy
        batch = policy.batch
        self._scheduler.set_instances(policy.instances)
        times = StepTimes(model.profile, batch.max_rows, variation)
        most = batch.max_rows
        sizes = {most, *batch.preferred_rows, *(1 << power for power in range(most.bit_length()))}
        self.profile.seed({rows: [times.on_device_ns(rows)] for rows in sizes if rows <= most})
        instances = _Instances(loop, self._scheduler)
        paced = model.depth > 1 and batch.merge
        for device in devices:
            instances.members.append(
                VirtualInstance(
                    loop,
                    device,
                    times,
                    self._batch_results,
                    instances.pull,
                    lambda: self._scheduler.waiting_rows,
                    model.depth,
                    LaunchPacing(min(batch.preferred_rows, default=batch.max_rows)) if paced else None,
                )
            )
        self._admission.in_flight_work = lambda: [instance.in_flight_work() for instance in instances.members]
        return instances


class _Instances:
    """The instances of one model, and the timer for the time until which they wait."""

    def __init__(self, loop: VirtualLoop, scheduler: Scheduler) -> None:
        self.members: list[VirtualInstance] = []
        self._loop = loop
        self._scheduler = scheduler
        self._alarm_ns = 0  # time of the next poll; 0 for none

    def pull(self) -> None:
        """Poll for each instance that pulls, those with the fewest batches in flight first."""
        members, scheduler, now_ns = self.members, self._scheduler, self._loop.now_ns
        if not scheduler.depth:
            return
        for instance in members if len(members) == 1 else sorted(members, key=lambda each: each.open):
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


def replay(trace: Trace, models: Sequence[SimulatedModel], seed: int = 0) -> Replay:
    """Replay a trace against simulated models.

    Args:
        trace: requests with the index of their model.
        models: the models, in the order of `trace.names`.
        seed: seed of the variation of compute times.
    """
    return _Simulation(trace, models, seed).run()


class _Simulation:
    def __init__(self, trace: Trace, models: Sequence[SimulatedModel], seed: int) -> None:
        self._loop = loop = VirtualLoop()
        shared: dict[int, VirtualDevice] = {}
        self._devices: list[VirtualDevice] = []
        self._result = Replay(trace, [0] * len(trace), [""] * len(trace), [])
        self._handles: list[_Handle] = []
        self._instances: list[_Instances] = []
        mailbox = Mailbox(cast("asyncio.AbstractEventLoop", loop))
        generators = np.random.default_rng(seed).spawn(len(models))
        for name, model, generator in zip(trace.names, models, generators, strict=True):
            batches = BatchHistory()
            spec = ModelSpec(name, "1", "simulated", {}, {}, model.policy.batch.max_rows)
            handle = _Handle(spec, model.policy, _NoModel(), mailbox, BatchRecorder(batches), clock=loop.clock)
            devices = [shared.setdefault(number, VirtualDevice()) for number in model.devices]
            if not devices:
                devices = [VirtualDevice() for _ in range(model.policy.instances)]
                self._devices += devices
            variation = Variation(model.profile.variation, generator)
            self._instances.append(handle.instances(model, loop, devices, variation))
            self._handles.append(handle)
            self._result.batches.append(batches)
        self._devices += shared.values()

    def run(self) -> Replay:
        trace, loop, result = self._result.trace, self._loop, self._result
        handles, instances = self._handles, self._instances
        for number, (time_ns, model, request) in enumerate(trace.requests()):
            loop.advance(time_ns)
            try:
                completion = handles[model].infer(request)
            except HeadraceError as error:
                result.outcomes[number] = error.reason
            else:
                completion.then(partial(self._settled, number, time_ns, completion))
            loop.settle()
            instances[model].pull()
        loop.finish()
        result.busy_ns = [device.busy_ns for device in self._devices]
        result.end_ns = loop.now_ns
        return result

    def _settled(self, number: int, arrived_ns: int, completion: Completion) -> None:
        result, outcome = self._result, completion.outcome
        now_ns = self._loop.now_ns
        result.latency_ns[number] = now_ns - arrived_ns
        if isinstance(outcome, HeadraceError):
            result.outcomes[number] = outcome.reason
        else:
            result.outcomes[number] = ANSWERED
