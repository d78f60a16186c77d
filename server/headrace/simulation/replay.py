"""A trace replayed against models: arrivals go into the data plane's own handles, whose instances are virtual.

Everything that decides is the server's code: `ModelHandle.infer` (levels, deadlines, limits, splitting), `Scheduler` and its
queue, `decide`, `Pace`, `Completion`. What is simulated is time, the devices, and when an instance's thread looks at the queue.

Virtual time, and an event loop that lives in it: what is due is called in order, and nothing is waited for.

What stands for an instance and its device: the steps of `headrace.scheduling.pipeline` as events in virtual time.
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
from headrace.scheduling.admission import UnderWay
from headrace.scheduling.batching import WaitUntil
from headrace.scheduling.executor import Answers
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.pipeline import Pace
from headrace.scheduling.policy import HandlePolicy
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Batch, Scheduler
from headrace.simulation.batch_times import Profile, Variation
from headrace.simulation.traces import Trace


class Timer:
    """Stands for `asyncio.TimerHandle`."""

    __slots__ = ("_arguments", "_callback")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        """Call it off."""
        self._callback = None
        self._arguments = ()

    def fire(self) -> None:
        """Its time has come."""
        if self._callback is not None:
            self._callback(*self._arguments)


class VirtualLoop:
    """The event loop of a simulation: as much of asyncio's as the data plane uses, and the clock.

    Nothing waits, and no other thread calls. What is due at the same time is called in the order in which it was asked for.

    Attributes:
        now_ns: virtual nanoseconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> int:
        """`headrace.core.clock.Clock`."""
        return self.now_ns

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.now_ns / NS_PER_S

    def at(self, time_ns: int, callback: Callable[[], object]) -> None:
        """Call back at a time that has not passed."""
        heapq.heappush(self._due, (time_ns, next(self._order), callback))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back after so many seconds."""
        timer = Timer(callback, args)
        self.at(self.now_ns + round(delay * NS_PER_S), timer.fire)
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back before anything else happens."""
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def advance(self, until_ns: int) -> None:
        """Call all that is due up to and including `until_ns`, which is the time from then on."""
        due, ready = self._due, self._ready
        self.settle()
        while due and due[0][0] <= until_ns:
            self.now_ns, _, callback = heapq.heappop(due)
            callback()
            if ready:
                self.settle()
        self.now_ns = until_ns

    def finish(self) -> None:
        """Call all that is due, and what that leads to, until there is nothing more."""
        while self._ready or self._due:
            self.settle()
            if self._due:
                self.advance(self._due[0][0])

    def settle(self) -> None:
        """Call what `call_soon` has been given."""
        ready = self._ready
        while ready:
            callback, arguments = ready.popleft()
            callback(*arguments)


_NO_OUTPUTS: dict[str, Array] = {}


@dataclass(slots=True)
class Device:
    """Copies in, computes and copies out: one batch at a time each, in the order of launch.

    Attributes:
        copied_in_ns, computed_ns, copied_out_ns: when each will be free.
        busy_ns: how long it has computed.
    """

    copied_in_ns: int = 0
    computed_ns: int = 0
    copied_out_ns: int = 0
    busy_ns: int = 0

    def run(self, now_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> int:
        """Take a batch that is launched now; when it will be done."""
        self.copied_in_ns = max(now_ns, self.copied_in_ns) + copy_in_ns
        self.computed_ns = max(self.copied_in_ns, self.computed_ns) + compute_ns
        self.copied_out_ns = max(self.computed_ns, self.copied_out_ns) + copy_out_ns
        self.busy_ns += compute_ns
        return self.copied_out_ns


class Times:
    """A profile as tables of whole nanoseconds by rows, with what varies.

    Args:
        profile: what batches take.
        max_rows: rows in the largest batch.
        variation: of the compute time.
    """

    def __init__(self, profile: Profile, max_rows: int, variation: Variation) -> None:
        self.fill = profile.fill.table(max_rows)
        self.copy_in = profile.copy_in.table(max_rows)
        self.compute = profile.compute.table(max_rows)
        self.copy_out = profile.copy_out.table(max_rows)
        self.varied = variation.apply

    def on_device_ns(self, rows: int) -> int:
        """What a batch that is alone keeps a device busy, on average."""
        return self.copy_in[rows] + self.compute[rows] + self.copy_out[rows]


@dataclass(slots=True, eq=False)
class _Run:
    """A batch on its way."""

    entries: list[Entry]
    batch: Batch
    rows: int
    assembled_ns: int = 0


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """An instance that takes time and no processor.

    As in a `Pipeline`: the thread pulls while fewer than `depth` flights are open, held back by `pace`; it fills and launches one
    after the other; flights land in the order of launch. With a depth of 1 it is a `SerialRunner`.

    Attributes:
        loop: virtual time.
        device: where it computes; instances may share one.
        times: what batches take.
        answers: settles what has landed.
        pull: has the instances look at the queue.
        waiting_rows: rows in the queue.
        depth: flights that may be open.
        pace: when to pull while flights are open; None: at once.
        asks: the thread is in `Scheduler.next_batch`: a batch would be taken.
        open: flights that are launched, or about to be.
    """

    loop: VirtualLoop
    device: Device
    times: Times
    answers: Answers
    pull: Callable[[], None]
    waiting_rows: Callable[[], int]
    depth: int = 1
    pace: Pace | None = None
    asks: bool = True
    open: int = 0
    _filling: _Run | None = None
    _flying: deque[_Run] = field(default_factory=deque)
    _holds: int = 0  # counts waits of the thread, so that an alarm knows whether its own is over
    _last_ns: int = 0

    @property
    def begins_ns(self) -> int:
        """When a batch that is taken now would begin to be computed, 0 if at once."""
        return self.pace.free_ns if self.pace is not None and self.open else 0

    def fly(self, batch: Batch) -> None:
        """The thread has pulled a batch: fill, and launch."""
        rows = 0
        for entry in batch.entries:
            rows += entry.rows
        run = _Run(batch.entries, batch, rows)
        self.answers.begin(self)
        self.open += 1
        fill_ns = self.times.fill[rows]
        if fill_ns:
            self.asks, self._filling = False, run
            self.loop.at(self.loop.now_ns + fill_ns, self._filled)
        else:
            self._launch(run)

    def under_way(self) -> UnderWay:
        """What it has pulled and not answered."""
        runs = [*self._flying, self._filling] if self._filling else self._flying
        return UnderWay(self._last_ns, [(run.batch.taken_ns, run.rows) for run in runs])

    def _filled(self) -> None:
        run, self._filling = self._filling, None
        assert run is not None, "it is filled once"
        self._launch(run)
        if self.asks:
            self.pull()

    def _launch(self, run: _Run) -> None:
        times, rows = self.times, run.rows
        run.assembled_ns = now_ns = self.loop.now_ns
        compute_ns = times.varied(times.compute[rows])
        done_ns = self.device.run(now_ns, times.copy_in[rows], compute_ns, times.copy_out[rows])
        if self.pace is not None:
            self.pace.launched(rows, run.batch.taken_ns, now_ns)
        self._flying.append(run)
        self.loop.at(done_ns, self._land)
        self._look()

    def _land(self) -> None:
        run = self._flying.popleft()
        now_ns, batch = self.loop.now_ns, run.batch
        times = BatchTimes(batch.taken_ns, run.assembled_ns, now_ns, now_ns)
        busy_ns = now_ns - max(batch.taken_ns, self._last_ns)
        self._last_ns = now_ns
        self.answers.settle(run.entries, batch.reason, times, [_NO_OUTPUTS] * len(run.entries), busy_ns)
        self.open -= 1
        if not self.open:
            self.answers.at_work.discard(self)
        if self.pace is not None:
            self.pace.landed(now_ns)
        if not self.asks and self._filling is None:
            self._look()
            if self.asks:
                self.pull()

    def _look(self) -> None:
        """The thread decides whether to ask for the next batch: now, later, or once a flight has landed."""
        self._holds += 1
        self.asks = False
        if self.open >= self.depth:
            return
        if self.pace is not None and self.open:
            pull_ns = self.pace.pull_ns(self.waiting_rows())
            if pull_ns > self.loop.now_ns:
                holds = self._holds
                self.loop.at(pull_ns, lambda: self._held_long_enough(holds))
                return
        self.asks = True

    def _held_long_enough(self, holds: int) -> None:
        if holds == self._holds:
            self.asks = True
            self.pull()


ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model and where it runs.

    Attributes:
        policy: how requests are treated.
        profile: what batches take.
        depth: flights that an instance may have open; 1: one batch after the other.
        devices: number of the device of each instance; empty: a device of its own for each.
    """

    policy: HandlePolicy
    profile: Profile
    depth: int = 1
    devices: tuple[int, ...] = ()


@dataclass
class Batches:
    """Those of one model, in the order in which they were done.

    Attributes:
        taken_ns, rows: of each.
        reasons: how many were closed for which reason.
    """

    taken_ns: array[int] = field(default_factory=partial(array, "q"))
    rows: array[int] = field(default_factory=partial(array, "q"))
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Replay:
    """What became of a trace.

    Attributes:
        trace: what was asked.
        latency_ns: of each request, from its arrival to its answer, whatever that was.
        outcomes: of each: ANSWERED, or the reason of the error.
        batches: by model.
        busy_ns: by device, how long it has computed.
        end_ns: when the last request was answered.
    """

    trace: Trace
    latency_ns: list[int]
    outcomes: list[str]
    batches: list[Batches]
    busy_ns: list[int] = field(default_factory=list)
    end_ns: int = 0


class Tally(Recorder):
    """Counts batches for a simulation's report instead of Prometheus."""

    def __init__(self, batches: Batches) -> None:
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
        """A batch was run and answered; see `Recorder`."""
        self.took(batch_rows, reason, times)

    def took(self, batch_rows: int, reason: str, times: BatchTimes) -> None:
        """The part of it that counts here."""
        batches = self._batches
        batches.taken_ns.append(times.taken_ns)
        batches.rows.append(batch_rows)
        batches.reasons[reason] += 1


class _NoModel:
    """A model that nobody runs."""

    def execution(self, index: int) -> Execution:
        raise AssertionError("a simulated handle is never started")

    def close(self) -> None:
        pass


class _Handle(ModelHandle):
    """A handle that is never started: its instances are virtual."""

    def instances(
        self, model: SimulatedModel, loop: VirtualLoop, devices: Sequence[Device], variation: Variation
    ) -> _Instances:
        """Virtual ones, on these devices, and the profile as a server has it once it is loaded."""
        policy = self.policy
        batch = policy.batch
        self._scheduler.set_instances(policy.instances)
        times = Times(model.profile, batch.max_rows, variation)
        most = batch.max_rows
        sizes = {most, *batch.preferred_rows, *(1 << power for power in range(most.bit_length()))}
        self.profile.seed(
            {rows: [times.on_device_ns(rows)] for rows in sizes if rows <= most}
        )  # as a server does at load
        instances = _Instances(loop, self._scheduler)
        paced = model.depth > 1 and batch.merge
        for device in devices:
            instances.members.append(
                VirtualInstance(
                    loop,
                    device,
                    times,
                    self._answers,
                    instances.pull,
                    lambda: self._scheduler.waiting_rows,
                    model.depth,
                    Pace(min(batch.preferred_rows, default=batch.max_rows)) if paced else None,
                )
            )
        self._outlook.under_way = lambda: [instance.under_way() for instance in instances.members]
        return instances


class _Instances:
    """Those of one model, and the alarm for the time until which they wait."""

    def __init__(self, loop: VirtualLoop, scheduler: Scheduler) -> None:
        self.members: list[VirtualInstance] = []
        self._loop = loop
        self._scheduler = scheduler
        self._alarm_ns = 0  # when the queue will be looked at; 0: nobody waits for a time

    def pull(self) -> None:
        """Each that asks takes what it can, those with the fewest flights first."""
        members, scheduler, now_ns = self.members, self._scheduler, self._loop.now_ns
        if not scheduler.depth:
            return
        for instance in members if len(members) == 1 else sorted(members, key=lambda each: each.open):
            while instance.asks and scheduler.depth:
                answer = scheduler.poll(now_ns, instance.begins_ns)
                if type(answer) is Batch:
                    instance.fly(answer)
                elif isinstance(answer, WaitUntil):
                    self._look_at(answer.time_ns)
                    return
                else:
                    return

    def _look_at(self, time_ns: int) -> None:
        if not self._alarm_ns or time_ns < self._alarm_ns:
            self._alarm_ns = time_ns
            self._loop.at(time_ns, partial(self._ring, time_ns))

    def _ring(self, time_ns: int) -> None:
        if time_ns == self._alarm_ns:
            self._alarm_ns = 0
            self.pull()


def replay(trace: Trace, models: Sequence[SimulatedModel], seed: int = 0) -> Replay:
    """Replay a trace.

    Args:
        trace: what is asked, of models by their number.
        models: by their number.
        seed: of what varies in the models' times; what is asked is the trace's.
    """
    return _Simulation(trace, models, seed).run()


class _Simulation:
    def __init__(self, trace: Trace, models: Sequence[SimulatedModel], seed: int) -> None:
        self._loop = loop = VirtualLoop()
        shared: dict[int, Device] = {}
        self._devices: list[Device] = []
        self._result = Replay(trace, [0] * len(trace), [""] * len(trace), [])
        self._handles: list[_Handle] = []
        self._instances: list[_Instances] = []
        mailbox = Mailbox(cast("asyncio.AbstractEventLoop", loop))
        generators = np.random.default_rng(seed).spawn(len(models))
        for name, model, generator in zip(trace.names, models, generators, strict=True):
            batches = Batches()
            spec = ModelSpec(name, "1", "simulated", {}, {}, model.policy.batch.max_rows)
            handle = _Handle(spec, model.policy, _NoModel(), mailbox, Tally(batches), clock=loop.clock)
            devices = [shared.setdefault(number, Device()) for number in model.devices]
            if not devices:
                devices = [Device() for _ in range(model.policy.instances)]
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
