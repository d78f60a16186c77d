"""CPU time of one admission and one decision while 10,000 requests wait."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from dataclasses import dataclass, replace
from typing import cast
from unittest.mock import patch

import numpy as np
from headrace.backends.base import Execution
from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.completion import Mailbox
from headrace.core.errors import WouldMiss
from headrace.core.quota import Quota
from headrace.core.request import BatchTimes, InferRequest
from headrace.core.tensor import ModelSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.admission import InFlightWork
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits, RateLimits, Sharing
from headrace.scheduling.queue import Entry, Queue, ShapeQueue
from headrace.scheduling.scheduler import Batch
from headrace.simulation.replay import VirtualLoop

from loadtest.bench.results import CaseResult, Comparison, at_most
from loadtest.bench.spread import Spread
from loadtest.slo.parts import Plan

WAITING = 10_000
_ROWS = 32
# Requests admitted, and batches decided on, between two readings of the clock.
_STEPS = 128
_OBJECTIVE_NS = 60_000 * NS_PER_MS
_CLIENTS = 50
_BATCH_NS = 520 * NS_PER_US


@dataclass(frozen=True, slots=True)
class Case:
    """The waiting requests.

    Attributes:
        policy: how requests are treated.
        spread_ns: deadlines of their own are drawn within it; 0: none has one.
        clients: number of clients, in turn.
        levels: number of priority levels, in turn.
    """

    policy: HandlePolicy
    spread_ns: int = 0
    clients: int = 1
    levels: int = 1


_LIMITS = QueueLimits(max_count=1 << 20)
_PROMISED = HandlePolicy(BatchPolicy(_ROWS, objective_ns=_OBJECTIVE_NS), _LIMITS)
_LEVELS = replace(_PROMISED, levels=3, default_level=2, aging_ns=100 * NS_PER_MS)
_QUOTAS = RateLimits(default=Quota(1e9, 1 << 20))
CASES = {
    "nothing promised": Case(HandlePolicy(BatchPolicy(_ROWS), _LIMITS)),
    "one objective": Case(_PROMISED),
    "deadlines in any order": Case(_PROMISED, spread_ns=_OBJECTIVE_NS // 2),
    "three levels that age": Case(_LEVELS, levels=3),
    "fifty clients that share": Case(replace(_PROMISED, sharing=Sharing(), rate_limits=_QUOTAS), clients=_CLIENTS),
    "all of it": Case(
        replace(_LEVELS, sharing=Sharing(), rate_limits=_QUOTAS),
        spread_ns=_OBJECTIVE_NS // 2,
        clients=_CLIENTS,
        levels=3,
    ),
}


class _NoModel:
    """A model that never runs."""

    def execution(self, index: int) -> Execution:
        raise AssertionError("it is never started")

    def close(self) -> None:
        pass


class Deep:
    """A handle in virtual time with a deep queue, whose instances are never started."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.loop = VirtualLoop()
        mailbox = Mailbox(cast("asyncio.AbstractEventLoop", self.loop))
        spec = ModelSpec("deep", "1", "none", {}, {}, _ROWS)
        self.handle = ModelHandle(spec, case.policy, _NoModel(), mailbox, Recorder(False), clock=self.loop.clock)
        sizes = [1 << power for power in range(_ROWS.bit_length())]
        self.handle.latency_table.seed({rows: [_BATCH_NS - (_ROWS - rows) * 10 * NS_PER_US] for rows in sizes})
        self.handle._admission.in_flight_work = lambda: [InFlightWork(self.loop.now_ns, [(self.loop.now_ns, _ROWS)])]
        self._random = np.random.default_rng(1)
        self._sent_count = 0

    def requests(self, count: int) -> list[InferRequest]:
        """As they would have been decoded."""
        case, now_ns = self._case, self.loop.now_ns
        apart = self._random.integers(0, max(case.spread_ns, 1), count).tolist()
        found = []
        for late_ns in apart:
            self._sent_count += 1
            found.append(
                InferRequest(
                    inputs={},
                    rows=1,
                    shape_key=None,
                    received_ns=now_ns,
                    priority=self._sent_count % case.levels + 1 if case.levels > 1 else 0,
                    deadline_ns=now_ns + _OBJECTIVE_NS // 2 + late_ns if case.spread_ns else 0,
                    client=f"c{self._sent_count % case.clients}" if case.clients > 1 else "",
                )
            )
        return found

    def admit(self, count: int) -> int:
        """Queue so many; nanoseconds of this thread."""
        requests, infer = self.requests(count), self.handle.infer
        begun_ns = time.thread_time_ns()
        for request in requests:
            infer(request)
        return time.thread_time_ns() - begun_ns

    def refuse(self, count: int) -> int:
        """Send requests with deadlines before the end of the running batch; return nanoseconds of this thread."""
        requests, infer, refused = self.requests(count), self.handle.infer, 0
        for request in requests:
            request.deadline_ns = self.loop.now_ns + NS_PER_US
        begun_ns = time.thread_time_ns()
        for request in requests:
            try:
                infer(request)
            except WouldMiss:
                refused += 1
        took_ns = time.thread_time_ns() - begun_ns
        if refused != count:
            raise RuntimeError(f"only {refused} of {count} requests were refused")
        return took_ns

    def decide(self, batches: int) -> tuple[int, int]:
        """Have so many batches decided on and taken out; nanoseconds of this thread for each of the two."""
        poll, now_ns = self.handle._scheduler.poll, self.loop.now_ns
        taking_ns = 0

        def take(queue: Queue, lane: ShapeQueue, count: int) -> list[Entry]:
            nonlocal taking_ns
            began_ns = time.thread_time_ns()
            entries = _take(queue, lane, count)
            taking_ns += time.thread_time_ns() - began_ns
            return entries

        with patch.object(Queue, "take", take):
            begun_ns = time.thread_time_ns()
            taken = [poll(now_ns) for _ in range(batches)]
            took_ns = time.thread_time_ns() - begun_ns
        for batch in taken:
            if not isinstance(batch, Batch):
                raise RuntimeError(f"{batch} instead of a batch, with {self.handle.depth} waiting")
            times = BatchTimes(now_ns, now_ns, now_ns + _BATCH_NS, now_ns + _BATCH_NS)
            self.handle._batch_results.settle(batch, times, [{}] * len(batch.entries), _BATCH_NS)
        self.loop.advance(now_ns + batches * _BATCH_NS)
        return took_ns - taking_ns, taking_ns


_take = Queue.take


def measure(case: Case, stretches: int = 100) -> tuple[float, ...]:
    """Microseconds of an admission, a refusal, a decision, and of taking a batch out of the queue; the median of many."""
    deep = Deep(case)
    deep.admit(WAITING)
    gc.collect()
    batches = _STEPS // _ROWS
    spent: list[tuple[float, ...]] = []
    for _ in range(stretches):
        decided_ns, taken_ns = deep.decide(batches)
        missing = WAITING - deep.handle.depth
        admitted_ns, refused_ns = deep.admit(missing), deep.refuse(_STEPS)
        if deep.handle.depth != WAITING:
            raise RuntimeError(f"{deep.handle.depth} wait instead of {WAITING}")
        spent.append((admitted_ns / missing, refused_ns / _STEPS, decided_ns / batches, taken_ns / batches))
    return tuple(statistics.median(each) / NS_PER_US for each in zip(*spent, strict=True))


_MEASURED = (
    ("admission", at_most(10.0)),
    ("refusal", at_most(10.0)),
    ("decision", at_most(10.0)),
    ("taking a batch out", None),
)


def run(plan: Plan) -> CaseResult:
    """Microseconds of each, with 10,000 waiting before and after."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in CASES}
    for _ in range(plan.rounds):
        for name, case in CASES.items():
            found[name].append(measure(case))
    compared = [
        Comparison(f"{what}, {name}", "us", Spread.of([each[which] for each in rounds]), target)
        for name, rounds in found.items()
        for which, (what, target) in enumerate(_MEASURED)
    ]
    notes = (
        f"processor time of the thread, the median of 100 stretches of about {_STEPS} admissions and refusals and "
        f"{_STEPS // _ROWS} decisions",
        "admission: ModelHandle.infer from beginning to end (entry, completion, quota, prediction, queue, alarm)",
        "refusal: the same for a request that cannot be in time, to the error that its caller gets",
        f"decision: Scheduler.poll but for Queue.take, which takes the batch (of up to {_ROWS}) out",
    )
    title = f"admission and decision while {WAITING:,} requests wait"
    return CaseResult("queue", title, (), compared, notes)
