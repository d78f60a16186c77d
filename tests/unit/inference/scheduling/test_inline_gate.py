"""A lone request of a fast model runs on the event loop; everything else goes to an instance's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import DeadlineExceeded, HeadraceError, ModelFailed, Unavailable
from headrace.core.limits import BodyMemory, ClientLimits, Limits
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.inference.scheduling.batching import CloseReason, Take, WaitUntil, decide
from headrace.inference.scheduling.inline_gate import (
    INLINE_DEVICE_BOUND_NS,
    INLINE_MAX_PAUSE_NS,
    INLINE_PAUSE,
    INLINE_QUIET_NS,
)
from headrace.inference.scheduling.latency_table import TAIL, LatencyTable
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits, Sharing
from headrace.inference.scheduling.queue import Entry, QueueOrder, ShapeQueue
from headrace.inference.scheduling.selector import BatchSelector
from headrace.observability.counters import Recorder
from headrace.runtimes.isolated.backend import IsolatedExecution
from headrace.runtimes.onnxruntime import OnnxRuntimeExecution
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_overlapped import DIES, LOST, RAISES, FakeOverlapped
from tests.support.fakes import DEATH, POISON, SPEC, FakeModel, InstanceKilledError, infer_request
from tests.support.sleepers import sleepers
from tests.support.waiting import until, until_async

BOUND_NS = 200 * NS_PER_US


class Ticks:
    """A clock under the test's control; each look takes `step_ns`."""

    def __init__(self) -> None:
        self.now_ns = NS_PER_S
        self.step_ns = 10

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


class Quick(FakeModel):
    """May run on any thread; remembers on which it did, and takes `run_ns` of the clock."""

    any_thread = True

    def __init__(self, clock: Ticks, run_ns: int = 20 * NS_PER_US) -> None:
        super().__init__()
        self.clock = clock
        self.run_ns = run_ns
        self.threads: list[threading.Thread] = []
        self.during: Callable[[], object] = lambda: None

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.threads.append(threading.current_thread())
        self.clock.now_ns += self.run_ns
        self.during()
        return super().run(inputs)

    @property
    def inline(self) -> list[bool]:
        """Of each run: was it on the event loop?"""
        return [thread is threading.main_thread() for thread in self.threads]


class QuickGpu(FakeOverlapped):
    """An overlapped model that any thread may launch and finish."""

    any_thread = True

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth, prompt=True)

    @property
    def inline(self) -> list[bool]:
        """Of each batch: did the event loop finish it?"""
        return [thread is threading.main_thread() for thread in self.finishers]


class Stage:
    """A served model, measured as fast at one row."""

    def __init__(self, model: FakeModel | FakeOverlapped, clock: Ticks, measured_ns: int, **policy: Any) -> None:
        self.model: Any = model
        self.clock = clock
        self.bodies = BodyMemory(Limits())
        self.recorder = Recorder(clock=clock)
        bound_ns = policy.pop("inline_bound_ns", BOUND_NS)
        mailbox = policy.pop("mailbox", None) or Mailbox(asyncio.get_running_loop())
        chosen = HandlePolicy(batch=policy.pop("batch", BatchPolicy(8)), inline_bound_ns=bound_ns, **policy)
        self.deaths: list[int] = []
        self.handle = ModelHandle(
            SPEC,
            chosen,
            model,
            mailbox,
            self.recorder,
            self.deaths.append,
            clock,
            bodies=self.bodies,
        )
        self.handle.start()
        if measured_ns:
            self.handle.latency_table.seed({1: [measured_ns] * 20})

    async def asleep(self, instances: int = 1) -> None:
        """Wait until the instances sleep, and the requests of before are long ago."""
        await until_async(lambda: len(sleepers(self.handle)) >= instances)
        self.clock.now_ns += INLINE_QUIET_NS
        await asyncio.sleep(0)

    def request(self, value: float, rows: int = 1, **more: Any) -> InferRequest:
        return infer_request(value, rows, received_ns=self.clock.now_ns, **more)

    def infer(self, value: float, rows: int = 1, **more: Any) -> LoopCompletion:
        return self.handle.infer(self.request(value, rows, **more))

    async def one(self, value: float, rows: int = 1, **more: Any) -> list[list[float]]:
        """One request, as a front end sends it."""
        assert self.handle.lease()
        try:
            response = await self.infer(value, rows, **more)
        finally:
            self.handle.release()
        result: list[list[float]] = response.outputs["y"].tolist()
        return result

    async def alone(self, value: float, rows: int = 1, **more: Any) -> bool:
        """One request, right; True if it ran on the event loop."""
        await self.asleep(self.handle.policy.instances)
        assert await self.one(value, rows, **more) == [[2 * value] * 2] * rows
        return bool(self.model.inline[-1])

    async def soon_alone(self, value: float) -> bool:
        """`alone`, once the finisher of an instance has passed its last batch on, which it answers before."""
        for _ in range(100):
            if await self.alone(value):
                return True
        return False


@asynccontextmanager
async def staged(measured_ns: int = 20 * NS_PER_US, model: Any = Quick, **policy: Any) -> AsyncIterator[Stage]:
    """A stage, whose model is closed after the block."""
    clock = Ticks()
    stage = Stage(model(clock) if model is Quick else model(), clock, measured_ns, **policy)
    yield stage
    assert await asyncio.to_thread(stage.handle.close, 60)


async def test_a_lone_request_of_a_fast_model_runs_on_the_event_loop() -> None:
    async with staged() as stage:
        await stage.asleep()
        sleeper = sleepers(stage.handle)[0]
        for value in range(50):
            assert await stage.alone(value)
            assert sleepers(stage.handle) == [sleeper], "no thread was woken"
    totals = stage.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions, totals.inline_runs, totals.inline_disabled) == (
        50,
        50,
        50,
        50,
        0,
    )
    assert totals.reasons == {"idle": 50}
    assert totals.phases["compute"].count == totals.phases["queue"].count == totals.phases["total"].count == 50
    assert stage.handle.latency_table.entries()[0].observations == 50


async def test_an_inline_run_is_complete_when_infer_returns() -> None:
    async with staged() as stage:
        await stage.asleep()
        completion = stage.infer(3)
        assert completion.is_settled
        called: list[int] = []
        completion.then(lambda: called.append(1))
        await asyncio.sleep(0)
        assert called == [1], "a callback that comes late is called by the loop"
        assert (await completion).batch_rows == 1


@given(
    st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.sampled_from([1.0, 5.0, POISON])), min_size=1, max_size=20)
)
def test_inline_and_queued_requests_are_answered_and_counted_alike(script: list[tuple[int, bool, float]]) -> None:
    """Requests by rows, whether a deadline is set, and value, one after the other."""
    outcomes = []
    for bound_ns in (BOUND_NS, 0):

        async def scenario(bound_ns: int, seen: list[object]) -> Stage:
            async with staged(inline_bound_ns=bound_ns) as stage:
                for rows in range(1, 9):
                    stage.handle.latency_table.seed({rows: [20 * NS_PER_US] * 20})
                for rows, has_deadline, value in script:
                    await stage.asleep()
                    deadline_ns = stage.clock.now_ns + NS_PER_S * 60 if has_deadline else 0
                    try:
                        response = await stage.infer(value, rows, deadline_ns=deadline_ns)
                        outputs = response.outputs["y"]
                        seen.append((outputs.tobytes(), outputs.shape, response.batch_rows, response.closed))
                    except HeadraceError as error:
                        seen.append(type(error))
                return stage

        seen: list[object] = []
        stage = asyncio.run(scenario(bound_ns, seen))
        totals = stage.recorder.totals()
        sizes = {rows: size.count for rows, size in totals.sizes.items()}
        counts = (totals.requests, totals.rows, totals.executions, dict(totals.reasons), sizes, totals.shape_changes)
        row = [(entry.rows, entry.observations) for entry in stage.handle.latency_table.entries()]
        outcomes.append((seen, counts, row, {phase: each.count for phase, each in totals.phases.items()}))
        assert totals.inline_runs == (len(script) if bound_ns else 0)
    assert outcomes[0] == outcomes[1]


async def test_concurrent_requests_form_batches() -> None:
    async with staged() as stage:
        await stage.asleep()
        results = await asyncio.gather(*[stage.one(value) for value in range(64)])
        assert results == [[[2 * value] * 2] for value in range(64)]
        assert stage.model.inline.count(True) == 1, "the first one, before the others were there"
        assert max(map(len, stage.model.batches)) == 8
        assert len(stage.model.batches) <= 12
        # ... and while they come in numbers, none runs alone: each finds another one between its lease and release.
        before = len(stage.model.threads)
        for _ in range(10):
            await asyncio.gather(*[stage.one(value) for value in range(16)])
        assert not any(stage.model.inline[before:])
        assert await stage.alone(1), "alone again"


async def test_a_caller_that_never_waits_does_not_block_the_event_loop() -> None:
    async with staged() as stage:
        await stage.asleep()
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for value in range(100):
            assert await stage.one(value) == [[2 * value] * 2]
        counting.cancel()
        assert turns >= 50
        assert all(stage.model.inline), "the second of one turn runs in the next, on the loop as well"


async def test_not_while_other_requests_are_received() -> None:
    async with staged() as stage:
        limits = ClientLimits(bodies=stage.bodies)
        own, other = limits.reserve(), limits.reserve()
        own.grow(64)
        assert await stage.alone(1)
        other.grow(10)  # the first bytes of a body
        assert not await stage.alone(2)
        other.shrink(10)
        assert stage.bodies.requests == 1
        assert await stage.alone(3)
        other.grow(5)
        other.end()
        own.end()
        assert (stage.bodies.requests, stage.bodies.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("measured_ns", [0, BOUND_NS + 1], ids=["not measured", "too slow"])
async def test_slow_or_unmeasured_models_do_not_run_inline(measured_ns: int) -> None:
    async with staged(measured_ns) as stage:
        stage.model.run_ns = measured_ns or 1000
        for value in range(10):
            assert not await stage.alone(value)
        if not measured_ns:
            assert not await stage.alone(1, rows=2), "each number of rows is measured by itself"


async def test_models_measured_by_requests_run_inline_afterwards() -> None:
    async with staged(measured_ns=0) as stage:
        assert [await stage.alone(value) for value in range(20)] == [False] * 16 + [True] * 4


@pytest.mark.parametrize(
    "model",
    [FakeModel, FakeOverlapped, lambda: FakeOverlapped(prompt=True)],
    ids=["its own thread", "overlapped", "prompt"],
)
async def test_never_other_backends(model: Callable[[], Any]) -> None:
    """Isolated and Python models do not say that any thread may run them; GPU models overlap batches."""

    async with staged(model=model) as stage:
        for value in range(30):
            await until_async(lambda: sleepers(stage.handle))
            stage.clock.now_ns += INLINE_QUIET_NS
            assert await stage.one(value) == [[2 * value] * 2]
    assert stage.recorder.totals().inline_runs == 0
    assert stage.recorder.totals().requests == 30


async def test_a_lone_request_of_a_gpu_is_launched_and_finished_by_the_event_loop() -> None:
    async with staged(model=QuickGpu) as stage:
        await stage.asleep()
        sleeper = sleepers(stage.handle)[0]
        for value in range(50):
            assert await stage.alone(value)
            assert sleepers(stage.handle) == [sleeper], "no thread was woken"
        assert not await stage.alone(1, rows=2), "each number of rows is measured by itself"
        assert await stage.soon_alone(2)
    totals = stage.recorder.totals()
    assert totals.requests == totals.executions == totals.phases["compute"].count == totals.phases["total"].count >= 52
    assert totals.inline_runs == stage.model.inline.count(True) >= 51
    assert stage.model.violations == []


@pytest.mark.parametrize(("excess_ns", "is_inline"), [(0, True), (1, False)])
async def test_gpus_have_a_bound_of_their_own(excess_ns: int, is_inline: bool) -> None:
    async with staged(INLINE_DEVICE_BOUND_NS + excess_ns, QuickGpu) as stage:
        assert await stage.alone(1) is is_inline


async def test_the_event_loop_waits_for_no_gpu_while_another_model_has_requests() -> None:
    async with staged(model=QuickGpu) as stage:
        assert await stage.alone(1)
        other = Stage(Quick(stage.clock), stage.clock, 20 * NS_PER_US, mailbox=stage.handle._mailbox)
        await other.asleep()
        assert await other.one(2) == [[4, 4]], "which begins the time of several models"
        await stage.asleep()
        stage.clock.now_ns -= INLINE_QUIET_NS
        assert await stage.one(3) == [[6, 6]]
        assert not stage.model.inline[-1]
        stage.clock.now_ns += INLINE_QUIET_NS
        assert await stage.soon_alone(4), "alone again"
        assert await asyncio.to_thread(other.handle.close, 60)


async def test_many_requests_of_a_gpu_form_batches() -> None:
    async with staged(model=QuickGpu) as stage:
        await stage.asleep()
        for _ in range(20):
            results = await asyncio.gather(*[stage.one(value) for value in range(64)])
            assert results == [[[2 * value] * 2] for value in range(64)]
        assert max(map(len, stage.model.batches)) == 8
        assert stage.model.inline.count(True) <= 1, "the first one, before the others were there"
        assert await stage.soon_alone(1), "alone again"
    assert stage.model.violations == []


@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
async def test_a_failure_of_a_gpu_on_the_event_loop_is_the_request_s(call: str) -> None:
    async with staged(model=QuickGpu) as stage:
        assert await stage.alone(1)
        await stage.asleep()
        with pytest.raises(ModelFailed):
            await stage.one(RAISES[call])
        assert await stage.soon_alone(2)
    assert stage.model.violations == []


@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
@pytest.mark.parametrize("values", [DIES, LOST], ids=["killed", "lost"])
async def test_an_instance_ends_that_fails_on_the_event_loop(call: str, values: dict[str, float]) -> None:
    async with staged(model=QuickGpu) as stage:
        assert await stage.alone(1)
        await stage.asleep()
        with pytest.raises(ModelFailed, match="the instance that ran the request died"):
            await stage.one(values[call])
        await until_async(lambda: stage.deaths)
        if values is LOST:
            with pytest.raises(Unavailable):
                await stage.one(2)


async def test_a_deadline_that_passes_while_the_event_loop_waits_for_a_gpu() -> None:
    async with staged(model=QuickGpu) as stage:
        await stage.asleep()
        limit_ns = 2 * INLINE_DEVICE_BOUND_NS

        def pass_time() -> None:
            stage.clock.now_ns += limit_ns

        stage.model.during_fill = pass_time
        with pytest.raises(DeadlineExceeded):
            await stage.one(1, deadline_ns=stage.clock.now_ns + limit_ns)
        assert stage.model.inline == [True]


def test_only_onnx_runtime_allows_runs_on_any_thread() -> None:
    assert OnnxRuntimeExecution.any_thread
    assert not IsolatedExecution.any_thread


async def test_a_batching_delay_is_respected() -> None:
    async with staged(batch=BatchPolicy(2, (), 3600 * NS_PER_S)) as stage:
        await stage.asleep()
        first = stage.infer(1)
        assert not first.is_settled
        await asyncio.sleep(0.01)
        assert not first.is_settled, "it waits for others"
        second = stage.infer(2)
        assert (await first).batch_rows == (await second).batch_rows == 2
    assert stage.recorder.totals().inline_runs == 0


@given(
    st.integers(1, 12),
    st.builds(
        BatchPolicy,
        st.integers(1, 12),
        st.lists(st.integers(1, 12), max_size=3).map(lambda sizes: tuple(sorted(set(sizes)))),
        st.sampled_from([0, 1000]),
        st.booleans(),
    ),
)
def test_the_shorter_decision_is_that_of_the_queue(rows: int, policy: BatchPolicy) -> None:
    rows = min(rows, policy.max_rows)
    policy = BatchPolicy(
        policy.max_rows,
        tuple(size for size in policy.preferred_rows if size <= policy.max_rows),
        policy.max_delay_ns,
        policy.merge,
    )
    shape_queue = ShapeQueue(timed=True)
    request = InferRequest(inputs={"x": np.zeros((rows, 2), np.float32)}, rows=rows, shape_key=None, received_ns=5)
    shape_queue.push(entry := Entry(request, LoopCompletion.__new__(LoopCompletion), 0, 10))
    decision = decide(shape_queue, 10, policy)
    expected: CloseReason | None = None
    if not isinstance(decision, WaitUntil):
        assert isinstance(decision, Take)
        assert decision.count == 1
        expected = decision.reason
    batch = BatchSelector(policy, QueueLimits(), 1, QueueOrder(), lambda: 1.0).batch_of_one(entry)
    assert (batch and batch.reason) is expected
    assert batch is None or (batch.entries, batch.taken_ns) == ([entry], 10)


async def test_shares_of_clients_are_counted() -> None:
    async with staged(sharing=Sharing({"a": 2.0})) as stage:
        for value in range(5):
            assert await stage.alone(value, client="a"), "by the queue, and on the loop"


async def test_a_model_that_becomes_slow_returns_to_its_thread() -> None:
    """It is fast for 1,000 runs, takes 5 ms once, and is fast again: the pause is 200 times as long, 1 s."""

    async with staged() as stage:
        model, gate = stage.model, stage.handle._inline_gate
        for value in range(1000):
            await stage.asleep()
            await stage.one(value)
        assert model.inline == [True] * 1000
        model.run_ns = 5 * NS_PER_MS
        assert await stage.alone(1), "the one that shows it"
        assert stage.recorder.totals().inline_disabled == 1
        slow_ns = stage.clock.now_ns
        model.run_ns = 20 * NS_PER_US
        pause_ns = INLINE_PAUSE * 5 * NS_PER_MS
        while stage.clock.now_ns + 2 * INLINE_QUIET_NS < slow_ns + pause_ns:
            stage.clock.now_ns += NS_PER_S // 100
            if stage.clock.now_ns < slow_ns + pause_ns - INLINE_QUIET_NS:
                assert not await stage.alone(2), "off for 1 s, fast as it is"
        assert slow_ns + pause_ns <= gate._enabled_ns < slow_ns + pause_ns + NS_PER_MS
        stage.clock.now_ns = gate._enabled_ns
        assert await stage.alone(3), "and on again"
        assert stage.recorder.totals().inline_disabled == 1


@pytest.mark.parametrize(("run_ms", "pause_s"), [(5, 1.0), (50, 10.0), (5000, 60.0)])
async def test_a_slow_run_on_an_instance_disables_them(run_ms: int, pause_s: float) -> None:
    """As of a model whose loops depend on the values of the request."""

    async with staged() as stage:
        for value in range(100):
            assert await stage.alone(value)
        stage.model.run_ns = run_ms * NS_PER_MS
        stage.handle._inline_gate.quiet_ns = stage.clock.now_ns + INLINE_MAX_PAUSE_NS
        assert not await stage.alone(2), "on its instance"
        stage.handle._inline_gate.quiet_ns = 0
        stage.model.run_ns = 20 * NS_PER_US
        assert not await stage.alone(3)
        enabled_ns = stage.handle._inline_gate._enabled_ns
        since_ns = enabled_ns - stage.clock.now_ns
        assert pause_s * NS_PER_S - NS_PER_S / 10 < since_ns < pause_s * NS_PER_S + NS_PER_MS
        stage.clock.now_ns = enabled_ns
        assert await stage.alone(4)
        assert stage.recorder.totals().inline_disabled == 0


async def test_a_model_that_stays_slow_never_runs_inline_again() -> None:
    async with staged() as stage:
        for value in range(100):
            assert await stage.alone(value)
        stage.model.run_ns = 5 * NS_PER_MS
        assert await stage.alone(1)
        tries = []
        for value in range(10):
            stage.clock.now_ns += INLINE_MAX_PAUSE_NS
            tries.append(await stage.alone(value))
        assert tries == [True] * 6 + [False] * 4, "seven of the last 127 runs exceed the bound"
        assert stage.recorder.totals().inline_disabled == 7


def test_the_percentile_is_that_of_the_last_times() -> None:
    table = LatencyTable(BOUND_NS)
    assert not table.is_fast(1)
    table.seed({1: [1000] * 32})
    assert table.is_fast(1)
    assert not table.is_fast(2)
    table.observe(1, BOUND_NS + 1)
    assert table.is_fast(1), "1 of 33"
    table.observe(1, BOUND_NS + 1)
    assert not table.is_fast(1), "2 of 34"
    for _ in range(6):
        table.observe(1, BOUND_NS)
    assert table.is_fast(1), "2 of 40"
    rng = np.random.default_rng(0)
    times = [1000] * 32 + [BOUND_NS + 1] * 2 + [BOUND_NS] * 6
    expecteds = set()
    for _ in range(2000):
        times.append(int(rng.choice([1000, BOUND_NS + 1], p=[0.951, 0.049])))
        table.observe(1, times[-1])
        expected = bool(np.quantile(times[-TAIL:], 0.95, method="inverted_cdf") <= BOUND_NS)
        expecteds.add(expected)
        assert table.is_fast(1) == expected
    assert expecteds == {True, False}
    table.observe(1, 10 * BOUND_NS, instances=2)
    assert table.is_fast(1) == expected, "beside other instances it says nothing about a lone request"


async def test_an_error_of_the_model_is_the_request_s_alone() -> None:
    async with staged() as stage:
        assert await stage.alone(1)
        await stage.asleep()
        with pytest.raises(ModelFailed):
            await stage.one(POISON)
        assert stage.model.inline[-1]
        assert await stage.alone(2)
        assert stage.handle.alive == 1
    totals = stage.recorder.totals()
    assert (totals.executions, totals.requests, totals.inline_runs) == (3, 2, 3)


async def test_a_fatal_error_inline_ends_the_instance_and_fails_the_request() -> None:
    async with staged() as stage:
        assert await stage.alone(1)
        await stage.asleep()
        with pytest.raises(ModelFailed, match="died"):
            await stage.one(DEATH)
        assert stage.model.inline[-1]
        assert stage.deaths == [0]
        with pytest.raises(Unavailable):
            stage.handle.infer(stage.request(2))
    assert issubclass(InstanceKilledError, BaseException)


@pytest.mark.parametrize("end", ["close", "evict"])
async def test_the_end_waits_for_a_run_on_the_loop(end: str) -> None:
    async with staged() as stage:
        assert await stage.alone(1)
        await stage.asleep()
        ending: list[threading.Thread] = []
        done: list[bool] = []

        def begin_end() -> None:
            stage.model.during = lambda: None
            thread = threading.Thread(target=lambda: done.append(getattr(stage.handle, end)(10)))
            thread.start()
            ending.append(thread)
            until(lambda: stage.handle._scheduler._closed or stage.handle._scheduler._paused)
            assert not stage.model.closed

        stage.model.during = begin_end
        completion = stage.infer(2)
        assert completion.is_settled
        assert (await completion).outputs["y"].tolist() == [[4, 4]]
        await asyncio.to_thread(ending[0].join)
        assert done == [True]
        assert stage.model.closed


async def test_reloads_under_lone_requests_lose_none() -> None:
    """As the registry does: new requests go to the new version, and the old one is closed on a thread of its own."""

    async with staged() as stage:
        serving, closings, models = stage, [], [stage.model]
        answered = 0

        async def client() -> None:
            nonlocal answered
            while len(closings) < 20:
                stage.clock.now_ns += INLINE_QUIET_NS
                assert await serving.one(answered) == [[2 * answered] * 2]
                answered += 1
                await asyncio.sleep(0)

        pending = asyncio.create_task(client())
        while len(closings) < 20:
            goal = answered + 5
            await until_async(lambda goal=goal: answered >= goal)
            before, serving = serving, Stage(Quick(stage.clock), stage.clock, 20 * NS_PER_US)
            models.append(serving.model)
            closings.append(asyncio.create_task(asyncio.to_thread(before.handle.close, 60)))
        await pending
        assert all(await asyncio.gather(*closings))
        assert await asyncio.to_thread(serving.handle.close, 60)
        assert all(model.closed for model in models)
        assert sum(len(model.threads) for model in models) == answered, "each ran once"
        assert any(any(model.inline) for model in models)


async def test_a_deadline_that_passes_during_the_run_is_exceeded() -> None:
    async with staged() as stage:
        await stage.asleep()
        stage.model.run_ns = 5 * NS_PER_MS
        with pytest.raises(DeadlineExceeded, match="passed after"):
            await stage.one(1, deadline_ns=stage.clock.now_ns + 4 * NS_PER_MS)
        assert stage.model.inline == [True]
        assert stage.recorder.totals().requests == 0
        assert stage.recorder.totals().executions == 1


async def test_a_deadline_within_the_bound_uses_the_thread() -> None:
    async with staged(inline_bound_ns=10 * NS_PER_S) as stage:
        stage.model.run_ns = 1
        await stage.asleep()
        await stage.one(1, deadline_ns=stage.clock.now_ns + 10 * NS_PER_S - 1000)
        assert stage.model.inline == [False]


async def test_a_request_during_a_run_of_another_thread_is_not_lost() -> None:
    """The instance's thread serves what was queued while its place was taken."""

    async with staged() as stage:
        await stage.asleep()
        results: list[object] = []

        def from_another_thread() -> None:
            stage.model.during = lambda: None
            thread = threading.Thread(
                target=lambda: results.append(stage.handle.infer_blocking(stage.request(7)).outputs["y"].tolist())
            )
            thread.start()
            until(lambda: stage.handle.depth)

        stage.model.during = from_another_thread
        assert await stage.one(1) == [[2, 2]]
        await until_async(lambda: results)
        assert results == [[[14, 14]]]
        assert stage.model.inline == [True, False]


async def test_a_thread_that_waits_runs_its_own_request() -> None:
    async with staged(measured_ns=0) as stage:
        await stage.asleep()
        response = stage.handle.infer_blocking(stage.request(3))
        assert response.outputs["y"].tolist() == [[6, 6]]
        assert stage.model.inline == [True], "this one, whatever was measured"
    assert stage.recorder.totals().inline_runs == 0, "the event loop did nothing"


async def test_a_blocking_request_with_a_deadline_never_runs_as_if_on_the_loop() -> None:
    async with staged() as stage:
        await stage.asleep()
        deadline_ns = stage.clock.now_ns + 60 * NS_PER_S
        response = await asyncio.to_thread(stage.handle.infer_blocking, stage.request(3, deadline_ns=deadline_ns))
        assert response.outputs["y"].tolist() == [[6, 6]]
        assert stage.model.threads[0].name == "fake/1#0"
