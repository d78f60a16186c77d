"""A trace replayed against models: arrivals go into the data plane's own handles, whose instances are virtual.

Everything that decides is the server's code: `ModelHandle.infer` (levels, deadlines, limits, splitting), `Scheduler` and its
queue, `decide`, `Pace`, `Completion`. What is simulated is time, the devices, and when an instance's thread looks at the queue.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np

from headrace.backends.base import Execution
from headrace.core.completion import Completion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import BatchTimes
from headrace.core.tensor import ModelSpec
from headrace.observability.recorder import Recorder
from headrace.scheduling.batching import WaitUntil
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.pace import Pace
from headrace.scheduling.policy import HandlePolicy
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.selection import Batch
from headrace.simulation.instances import Device, Times, VirtualInstance
from headrace.simulation.profiles import Profile, Variation
from headrace.simulation.traces import Trace
from headrace.simulation.virtual_time import VirtualLoop

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
