"""The shared page: whole records between two processes, rejections equal to admission control, writes at a bounded rate."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from headrace.core.clock import NS_PER_MS as MS
from headrace.core.clock import NS_PER_S
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import Overloaded, WouldMiss
from headrace.core.request import InferRequest, ModelLoad
from headrace.inference.scheduling.admission import AdmissionController, AdmissionForecast, InFlightWork
from headrace.inference.scheduling.batching import CostModel
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits
from headrace.inference.scheduling.queue import FAR_NS, Entry
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.version_handle import OverloadFigures
from headrace.observability.counters import Recorder
from headrace.server.front_ends.counter_array import CounterArray, FailureTotals, VersionFailures, version_key
from headrace.server.front_ends.shared_page import PageState, PageWriter, SharedPage, VersionRecord, version_record
from headrace.wire.requests.load_report import ServerFigures
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.waiting import until_async

NOW = 1000 * MS
LOAD = ModelLoad(3, 4, 5, 6, 1, 7 * MS, 8 * MS, 9.5, 10, ())


def record(value: int = 0, **figures: int) -> VersionRecord:
    """A record whose figures are all equal, but for those that are given."""
    return VersionRecord(*[value] * len(VersionRecord._fields))._replace(rows_hz=float(value), **figures)


WRITING = """
import sys
from headrace.server.front_ends.shared_page import SharedPage, VersionRecord
page = SharedPage(int(sys.argv[1]))
key = page.epoch << 40 | 7
value = 0
sys.stdout.write("x")
sys.stdout.flush()
while True:
    value += 1
    figures = [value] * len(VersionRecord._fields)
    figures[7] = float(value)
    page.write(5, key, VersionRecord(*figures), True)
"""


def test_records_are_whole_while_another_process_writes() -> None:
    page = SharedPage.create(epoch=3)
    words = [sys.executable, "-c", WRITING, str(page.fd)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[page.fd])
    assert process.stdout is not None
    try:
        process.stdout.read(1)
        values, reads = set[int](), 0
        while len(values) < 1000 or reads < 20_000:
            found = page.read(5, 7)
            reads += 1
            if found is not None:
                assert len(set(found)) == 1, f"parts of two records: {found}"
                values.add(found.depth)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert page.slot(7) == 5


def test_a_record_that_its_writer_never_ended_is_not_read() -> None:
    page = SharedPage.create(epoch=1)
    page.write(0, version_key(1, 4), record(2), True)
    assert page.read(0, 4) == record(2)
    sequence = 32 + 2  # of the first record
    page._cells[sequence] += 1
    assert page.read(0, 4) is None
    page._cells[sequence] += 1
    assert page.read(0, 4) is None, "the checksum is that of another write"
    page.write(0, version_key(1, 4), record(3), True)
    assert page.read(0, 4) == record(3)


def test_versions_are_found_by_number_and_epoch() -> None:
    page = SharedPage.create(epoch=1)
    page.write(2, version_key(1, 4), record(2), False)
    reader = SharedPage(os.dup(page.fd))
    assert (reader.epoch, reader.slot(4), reader.slot(5)) == (1, 2, -1)
    assert reader.load(2, 4).depth == 2
    assert reader.load(2, 5) == reader.load(-1, 4) == ModelLoad(0, 0, 0, 0, 0, 0, 0, 0.0, 0, ())
    page.clear(2)
    assert (reader.slot(4), reader.read(2, 4)) == (-1, None)


class Model:
    """A model whose batches of up to 8 rows take 10 ms each, promised in 50 ms; or without a promise, with a longest wait."""

    def __init__(
        self, waiting: int, running: list[int], margin_ms: int = 0, objective_ms: int = 50, max_wait_ms: int = 0
    ) -> None:
        self.objective_ns = objective_ms * MS
        latency_table = LatencyTable()
        latency_table.seed({rows: [10 * MS] for rows in (1, 2, 4, 8)})
        policy = BatchPolicy(8, objective_ns=self.objective_ns)
        self.limits = QueueLimits(max_count=40, max_size_bytes=4000)
        works = [InFlightWork(0, [(NOW - ms * MS, 8)]) for ms in running] or [InFlightWork(NOW - 1, ())]
        cost_model = CostModel(latency_table, policy)
        self.admission = AdmissionController(cost_model, policy, lambda: works, max_wait_ns=max_wait_ms * MS)
        self.scheduler = Scheduler(policy, self.limits, clock=lambda: NOW, admission=self.admission)
        if objective_ms:
            self.admission.admit(self.scheduler, [self.entry()], NOW)
        kind = self.objective_ns.bit_length()
        self.admission._margins._ns[kind] = margin_ms * MS
        for _ in range(waiting):
            self.scheduler.enqueue([self.entry()])

    def entry(self) -> Entry:
        request = InferRequest(inputs={}, rows=1, shape_key=None, received_ns=NOW, size_bytes=100)
        return Entry(request, ThreadCompletion(), 0, NOW, self.objective_ns)

    def record(self) -> VersionRecord:
        scheduler, limits = self.scheduler, self.limits
        load = LOAD._replace(depth=scheduler.depth, drain_ns=self.admission.drain_ns(self.scheduler, NOW))
        forecast = self.admission.forecast(self.scheduler, NOW)
        figures = OverloadFigures(
            forecast,
            scheduler.depth,
            scheduler.size_bytes,
            limits.max_count,
            limits.max_size_bytes,
            self.objective_ns,
            self.admission.forecast_wait(self.scheduler, NOW),
        )
        return version_record(load, figures, NOW)

    def admit(self) -> Exception | None:
        try:
            entry = self.entry()
            if self.objective_ns:
                self.admission.admit(self.scheduler, [entry], NOW)
            elif self.admission.max_wait_ns:
                self.admission.check_wait(self.scheduler, [entry], NOW)
            self.scheduler.enqueue([entry])
        except (WouldMiss, Overloaded) as error:
            return error
        return None


@given(
    waiting=st.integers(0, 40),
    running=st.lists(st.integers(0, 12), max_size=3),
    margin_ms=st.integers(0, 60),
    objective_ms=st.sampled_from([8, 50, 200]),
)
@example(waiting=0, running=[10], margin_ms=41, objective_ms=50)  # drained at this moment
@settings(max_examples=examples(200), deadline=None)
def test_rejections_equal_those_of_the_engine_process(
    waiting: int, running: list[int], margin_ms: int, objective_ms: int
) -> None:
    model = Model(waiting, running, margin_ms, objective_ms)
    rejection = model.record().rejection(NOW)
    error = model.admit()
    if isinstance(error, WouldMiss) and objective_ms < 10:
        error = None  # one request a second of those is tried, so the engine process decides
    assert (type(rejection), str(rejection)) == (type(error), str(error))
    if isinstance(rejection, WouldMiss | Overloaded) and isinstance(error, WouldMiss | Overloaded):
        assert rejection.retry_after_s == error.retry_after_s


@given(waiting=st.integers(0, 40), running=st.lists(st.integers(0, 12), max_size=3), max_wait_ms=st.integers(0, 60))
@settings(max_examples=examples(200), deadline=None)
def test_waits_that_are_too_long_are_rejected_as_in_the_engine_process(
    waiting: int, running: list[int], max_wait_ms: int
) -> None:
    model = Model(waiting, running, objective_ms=0, max_wait_ms=max_wait_ms)
    figures = model.record()
    rejection, error = figures.rejection(NOW), model.admit()
    assert (type(rejection), str(rejection)) == (type(error), str(error))
    if waiting < 40:
        assert figures.rejection(NOW, has_deadline=True) is None, "its deadline may be later"
    if rejection is not None:
        later_ns = max(figures.wait_until_ns, NOW)
        assert waiting == 40 or figures.rejection(later_ns) is None
        assert "queue is full" in str(rejection)


def test_a_full_queue_rejects_without_a_forecast() -> None:
    model = Model(40, [])
    full = model.record()._replace(start_ns=0)
    error = full.rejection(NOW)
    assert isinstance(error, Overloaded)
    assert str(error) == (
        "the queue is full: 40 requests of 4000 bytes wait, 40 requests of 4000 bytes are allowed: retry later"
    )
    assert full._replace(depth=39, size_bytes=3900).rejection(NOW) is None
    assert full._replace(max_count=0).rejection(NOW) is None, "the engine process decides"


def test_old_figures_reject_nothing() -> None:
    figures = record(0, written_ns=NOW, start_ns=NOW + 70 * MS, done_ns=NOW + 80 * MS, objective_ns=50 * MS)
    figures = figures._replace(max_wait_ns=FAR_NS, retry_after_ns=3 * NS_PER_S)
    error = figures.rejection(NOW)
    assert isinstance(error, WouldMiss)
    assert str(error) == (
        "request rejected by admission control: predicted to complete in 80 ms, due in 50 ms; retry later, or allow a longer "
        "deadline"
    )
    assert error.retry_after_s == 3
    assert figures.rejection(NOW + 30 * MS) is None, "it would complete in time by now"
    late = figures._replace(done_ns=NOW + 10 * NS_PER_S)
    assert late.rejection(NOW + NS_PER_S) is not None
    assert late.rejection(NOW + NS_PER_S + 1) is None
    standing = figures._replace(done_ns=NOW, max_wait_ns=20 * MS)
    assert "arrive faster than the model serves them (predicted" in str(standing.rejection(NOW))


class Handle:
    """A version with figures that the test sets."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.recorder = Recorder()
        self.in_flight = self.depth = 0
        self.wait_ns = LOAD.wait_ns
        self.figures: OverloadFigures | None = None
        self.loads = 0
        self.learned: list[tuple[int, int]] = []

    def load(self, by_level: bool = True) -> ModelLoad:
        assert not by_level
        self.loads += 1
        return LOAD._replace(depth=self.depth, running_rows=0, in_flight=self.in_flight, wait_ns=self.wait_ns)

    def overload(self, _now_ns: int) -> OverloadFigures | None:
        return self.figures

    def learn_rejections(self, count: int, kind: int) -> None:
        self.learned.append((count, kind))


async def test_records_are_written_while_requests_are_in_flight_and_not_when_idle() -> None:
    page, handle = SharedPage.create(1), Handle(4)
    writer = PageWriter(page, asyncio.get_running_loop())
    writer.add(handle)
    assert (page.load(page.slot(4), 4).in_flight, handle.loads) == (0, 1)
    handle.in_flight = 2
    for _ in range(1000):
        writer.touch(handle)
    assert handle.loads == 1, "touches write nothing by themselves"
    await until_async(lambda: page.load(0, 4).in_flight == 2)
    await until_async(lambda: handle.loads >= 5)  # figures change with the time
    handle.in_flight = 0
    await until_async(lambda: writer._timer is None)
    assert page.load(0, 4).in_flight == 0
    count = handle.loads
    await asyncio.sleep(0.03)
    assert handle.loads == count, "no polling"
    writer.close()


async def test_the_load_of_the_server_is_written_at_intervals_and_is_unknown_once_it_is_old() -> None:
    page, handle = SharedPage.create(1), Handle(4)
    now_ns, measured = NOW, list[int]()

    def figures(at_ns: int) -> ServerFigures:
        measured.append(at_ns)
        return ServerFigures(0.5 + len(measured), 10.25, 0.125)

    writer = PageWriter(page, asyncio.get_running_loop(), (), lambda: now_ns, figures)
    state = PageState(page, CounterArray.create())
    writer.add(handle)
    assert state.server_figures(NOW) is None
    for _ in range(3):  # within 50 ms of each other
        writer.answered(handle, 1)
        now_ns += 20 * MS
    assert (len(measured), state.server_figures(now_ns)) == (1, ServerFigures(1.5, 10.25, 0.125))
    writer.answered(handle, 1)
    assert state.server_figures(now_ns) == ServerFigures(2.5, 10.25, 0.125)
    assert state.server_figures(now_ns + 1_001 * MS) is None
    writer.close()


async def test_a_due_record_is_written_before_the_answer() -> None:
    page, handle = SharedPage.create(1), Handle(4)
    now_ns = NOW
    writer = PageWriter(page, asyncio.get_running_loop(), clock=lambda: now_ns)
    writer.add(handle)
    handle.in_flight = 1
    writer.touch(handle)
    assert page.load(0, 4).in_flight == 0
    writer.answered(handle, 1)
    assert page.load(0, 4).in_flight == 1
    for _ in range(1000):  # at one time
        handle.in_flight += 1
        writer.answered(handle, 1)
    assert (page.load(0, 4).in_flight, handle.loads) == (1, 2)
    now_ns += MS
    writer.answered(handle, 1)
    assert (page.load(0, 4).in_flight, handle.loads) == (1001, 3)
    handle.depth, handle.in_flight = 2, 3
    now_ns += MS
    writer.answered(handle, 1)
    handle.depth = 0
    writer.answered(handle, 2)
    assert page.load(0, 4).depth == 2
    writer.answered(handle, 3)
    assert page.load(0, 4).depth == 0, "a request is not in the queue when it is answered"
    handle.depth, handle.in_flight = 2, 40
    now_ns += MS
    writer.answered(handle, 20)
    handle.depth, handle.in_flight, loads = 0, 20, handle.loads
    writer.answered(handle, 20)
    assert handle.loads == loads, "after many answers it is written when it is due"
    now_ns += MS
    writer.answered(handle, 20)
    assert page.load(0, 4).depth == 0
    writer.close()


@pytest.mark.parametrize(("cost_ns", "interval_ns"), [(10_000, MS), (60_000, 3 * MS), (50 * MS, 10 * MS)])
async def test_writes_that_take_long_are_further_apart(cost_ns: int, interval_ns: int) -> None:
    page, handle = SharedPage.create(1), Handle(4)
    now_ns = NOW

    def load(by_level: bool = True) -> ModelLoad:
        nonlocal now_ns
        now_ns += cost_ns
        return Handle.load(handle, by_level)

    writer = PageWriter(page, asyncio.get_running_loop(), clock=lambda: now_ns)
    writer.add(handle)
    handle.load = load  # type: ignore[method-assign]
    handle.in_flight = handle.depth = 1
    begun_ns = now_ns
    writer.answered(handle, 1)
    assert handle.loads == 2
    now_ns = begun_ns + interval_ns - 1
    writer.answered(handle, 0)
    assert handle.loads == 2
    now_ns += 1
    writer.answered(handle, 0)
    assert handle.loads == 3
    writer.close()


async def test_a_lone_answer_does_not_wait_for_the_record() -> None:
    page, handle = SharedPage.create(1), Handle(4)
    handle.wait_ns = 0
    now_ns = NOW
    writer = PageWriter(page, asyncio.get_running_loop(), clock=lambda: now_ns)
    writer.add(handle)
    handle.in_flight = 1
    writer.touch(handle)
    now_ns += 2 * MS
    writer.answered(handle, 1)
    assert (page.load(0, 4).in_flight, handle.loads) == (0, 1)
    await until_async(lambda: page.load(0, 4).in_flight == 1)
    handle.in_flight = 5
    writes = []
    for depth, wait_ns in ((3, 0), (0, 2), (0, 0), (0, 0)):  # a queue, one by the record, a wait by the record, neither
        handle.depth, handle.wait_ns = depth, wait_ns
        count, now_ns = handle.loads, now_ns + 2 * MS
        writer.answered(handle, 1)
        writes.append(handle.loads - count)
    assert writes == [1, 1, 1, 0]
    writer.close()


async def test_slots_are_used_again_and_failures_are_counted_first() -> None:
    array = CounterArray.create()
    page = SharedPage.create(1)
    writer = PageWriter(page, asyncio.get_running_loop(), [array])
    first, second = Handle(4), Handle(5)
    writer.add(first)
    writer.add(first)
    VersionFailures(array, 1).count(page.slot(4), 4, "overloaded", 9)
    writer.remove(first)
    assert (first.recorder.request_counts(), page.slot(4)) == ((0, 1), -1)
    writer.add(second)
    assert page.slot(5) == 0
    assert second.recorder.request_counts() == (0, 0)


async def test_margins_learn_from_rejections_in_front_ends() -> None:
    array = CounterArray.create()
    page, handle = SharedPage.create(1), Handle(4)
    now_ns = NOW
    writer = PageWriter(page, asyncio.get_running_loop(), [array], lambda: now_ns)
    forecast = AdmissionForecast(NOW + 30 * MS, NOW + 60 * MS, 20 * MS, 6, FAR_NS)  # in time, but for its margin
    handle.figures = OverloadFigures(forecast, 0, 0, 100, 100, 50 * MS)
    writer.add(handle)
    assert isinstance(page.rejection(0, 4, clock=lambda: now_ns), WouldMiss)
    for _ in range(3):
        VersionFailures(array, 1).count(0, 4, "would_miss", 1)
    writer.touch(handle)
    await until_async(lambda: handle.learned)
    assert handle.learned == [(3, 6)]
    handle.figures = None
    writer.touch(handle)
    now_ns += NS_PER_S
    await until_async(lambda: page.rejection(0, 4, clock=lambda: now_ns) is None)
    writer.close()


@pytest.mark.parametrize("rejects", [True, False])
def test_pages_that_reject_nothing_are_not_read(rejects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SharedPage.create(1)
    full = record(0, written_ns=NOW, depth=4, max_count=4)
    page.write(0, version_key(1, 4), full, rejects)
    reads, times = [], []
    monkeypatch.setattr(page, "read", lambda slot, serial: reads.append((slot, serial)) or full)
    error = page.rejection(0, 4, clock=lambda: times.append(NOW) or NOW)
    assert (error is not None, reads, times) == (rejects, [(0, 4)] * rejects, [NOW] * rejects)
    assert page.rejection(-1, 4) is None


def test_a_front_end_reads_and_counts_by_version() -> None:
    page, array = SharedPage.create(1), CounterArray.create()
    state = PageState(SharedPage(page.fd), array)
    state.check_load(4, 0)  # has no slot yet
    assert (state.load(4).depth, state.count_failure(4, "overloaded", 5)) == (0, False)
    page.write(3, version_key(1, 4), record(0, written_ns=time.monotonic_ns(), depth=4, max_count=4), True)
    assert state.load(4).depth == 4
    with pytest.raises(Overloaded, match="the queue is full: 4 requests"):
        state.check_load(4, 0)
    assert state.count_failure(4, "overloaded", 5)
    assert FailureTotals([array], 3, version_key(1, 4)).collect() == [("overloaded", 1, 5)]
    page.clear(3)
    assert not state.count_failure(4, "overloaded", 5), "the slot may be that of another version soon"
