"""Counters in shared memory: sums over processes, limits of the whole server, and processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import Overloaded
from headrace.core.limits import BodyReservation, ClientLimits, Limits, UnreadResponses
from headrace.observability.counters import Recorder
from headrace.observability.labelled_counter import LabelledCounter
from headrace.server.front_ends.counter_array import (
    PROTOCOLS,
    REASONS,
    CounterArray,
    CounterArrays,
    FailureTotals,
    VersionFailures,
    map_memory,
    version_key,
)
from headrace.wire.requests.load_report import ENDED, FAILED
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.waiting import on_threads

MIB = 1 << 20
FRONT_ENDS = 3


@pytest.fixture
def arrays() -> list[CounterArray]:
    return [CounterArray.create() for _ in range(FRONT_ENDS + 1)]


def test_body_memory_is_limited_for_all_processes_together(arrays: list[CounterArray]) -> None:
    limits = Limits(max_total_body_bytes=64 * MIB, max_body_bytes=16 * MIB)
    views = [CounterArrays(arrays, number) for number in range(1, FRONT_ENDS + 1)]
    clients = [view.client_limits(limits, "http", view.body_memory(limits)) for view in views]
    bodies = [each.reserve() for each in clients]
    bodies[0].grow(30 * MIB)
    bodies[1].grow(25 * MIB)
    with pytest.raises(Overloaded, match="max_total_body_bytes \\(67108864 bytes together\\)"):
        bodies[2].grow(6 * MIB)
    bodies[2].grow(4 * MIB)
    assert clients[0].bodies.totals() == (59 * MIB, 0)
    bodies[0].end()
    bodies[2].grow(20 * MIB)


def reserve_all(client_limits: ClientLimits) -> None:
    while True:
        client_limits.reserve().grow(MIB)


def test_processes_exceed_the_limit_of_bodies_by_their_shares_only(arrays: list[CounterArray]) -> None:
    limits = Limits(max_total_body_bytes=64 * MIB, max_body_bytes=16 * MIB)
    views = [CounterArrays(arrays, number) for number in range(1, FRONT_ENDS + 1)]
    clients = [view.client_limits(limits, "http", view.body_memory(limits)) for view in views]
    for each in (*clients, *clients):
        with pytest.raises(Overloaded):
            reserve_all(each)
    assert 60 * MIB <= sum(clients[0].bodies.totals()) <= (64 + 4) * MIB


def test_unread_responses_are_limited_for_all_processes_together(arrays: list[CounterArray]) -> None:
    limits = Limits(max_total_body_bytes=64 * MIB, max_body_bytes=16 * MIB)
    views = [CounterArrays(arrays, number) for number in (1, 2)]
    first, second = (view.body_memory(limits) for view in views)
    clients = [view.client_limits(limits, "http", bodies) for view, bodies in zip(views, (first, second), strict=True)]
    first.cells[first.UNREAD] = 50 * MIB
    assert clients[1].bodies.totals() == (0, 50 * MIB)
    with pytest.raises(Overloaded):
        clients[1].reserve().grow(20 * MIB)


def test_slow_clients_of_all_processes_give_way_to_a_refused_request(arrays: list[CounterArray]) -> None:
    """Two processes hold slow responses and a third one a slow body: as many end as the request of a fourth one needs."""
    limits = Limits(max_total_body_bytes=64 * MIB, max_body_bytes=32 * MIB)
    views = [CounterArrays(arrays, number) for number in range(FRONT_ENDS + 1)]
    memories = [view.body_memory(limits) for view in views]
    clients = [view.client_limits(limits, "http", each) for view, each in zip(views, memories, strict=True)]
    responses = [UnreadResponses(each) for each in clients[:2]]
    for each in responses:
        each.update(16 * MIB)
    body = clients[2].reserve()
    body.grow(16 * MIB)

    def observe(now_ns: int) -> None:
        for each in responses:
            each.observe(now_ns, partial(_released, each))
        body.observe(0, now_ns, partial(_released, body))

    def give_way(now_ns: int) -> list[int]:
        for each in memories:
            each.give_way_to_all(now_ns)
        return [each.held_bytes // MIB for each in (*responses, body)]

    now_ns = monotonic_ns()
    for ago in (6, 4, 2, 0):
        observe(now_ns - ago * NS_PER_S)
    assert give_way(now_ns) == [16, 16, 16], "no request was refused"
    with pytest.raises(Overloaded):
        clients[3].reserve().grow(32 * MIB)  # 20 MiB are missing
    assert give_way(now_ns + 6 * NS_PER_S) == [16, 16, 16], "it has been refused too long ago"
    assert give_way(now_ns + NS_PER_S) == [0, 0, 16]
    clients[3].reserve().grow(32 * MIB)
    assert not UnreadResponses(clients[3]).admits(61 * MIB)
    assert give_way(now_ns + NS_PER_S) == [0, 0, 16], "bodies do not give way to responses"


def _released(holder: UnreadResponses | BodyReservation) -> bool:
    if isinstance(holder, UnreadResponses):
        holder.update(0)
    else:
        holder.end()
    return True


def test_slow_clients_that_hold_too_little_go_on(arrays: list[CounterArray]) -> None:
    limits = Limits(max_total_body_bytes=64 * MIB, max_body_bytes=32 * MIB)
    views = [CounterArrays(arrays, number) for number in (1, 2)]
    first, second = [view.client_limits(limits, "http", view.body_memory(limits)) for view in views]
    steady, slow = UnreadResponses(first), UnreadResponses(first)
    steady.update(50 * MIB)
    slow.update(1 * MIB)
    now_ns = monotonic_ns()
    for ago in (6, 4, 2, 0):
        slow.observe(now_ns - ago * NS_PER_S, partial(_released, slow))
    with pytest.raises(Overloaded):
        second.reserve().grow(32 * MIB)  # 23 MiB are missing
    first.bodies.give_way_to_all(now_ns + NS_PER_S)
    assert slow.held_bytes == 1 * MIB


def test_errors_of_all_processes_are_summed(arrays: list[CounterArray]) -> None:
    counters = [LabelledCounter("protocol", "reason") for _ in arrays]
    labels = [(protocol, reason) for protocol in PROTOCOLS[:2] for reason in REASONS]
    counters[0].declare("http", "declared")
    counters[0].count("http", "not_found", by=2)
    for number, (array, counter) in enumerate(zip(arrays, counters, strict=True)):
        counter.share(array.errors, labels, CounterArrays(arrays, number).errors)
    counters[0].count("http", "not_found")
    counters[2].count("http", "not_found")
    counters[3].count("grpc", "overloaded", by=4)
    counters[0].count("http", "of the engine")
    expected = {("http", "declared"): 0, ("http", "of the engine"): 1}
    shared = {("http", "not_found"): 4, ("grpc", "overloaded"): 4}
    assert dict(counters[0].items()) == expected | shared
    assert dict(counters[1].items()) == shared


def test_every_error_has_a_counter() -> None:
    import headrace.server.app  # noqa: F401  # imports the packages of the server
    from headrace.core.errors import HeadraceError

    def reasons(kind: type[HeadraceError]) -> set[str]:
        # Errors of GPUs happen in the engine process, which counts them itself.
        is_counted = kind.__module__.startswith("headrace.") and not kind.__module__.startswith(
            "headrace.runtimes.cuda."
        )
        own = {kind.reason} if is_counted else set[str]()
        return own.union(*[reasons(each) for each in kind.__subclasses__()])

    assert reasons(HeadraceError) <= set(REASONS)


def test_requests_are_summed_over_all_processes(arrays: list[CounterArray]) -> None:
    views = [CounterArrays(arrays, number) for number in range(3)]
    summed = views[0].summed_requests()
    for number, view in enumerate(views):
        for _ in range(number + 1):
            view.own.requests[ENDED] += 1
        view.own.requests[FAILED] += number
    assert (summed[ENDED], summed[FAILED]) == (6, 3)


def test_a_restarted_process_counts_on(arrays: list[CounterArray]) -> None:
    limits, array = Limits(), arrays[1]
    for _ in range(2):
        array.begin(os.getpid())
        view = CounterArrays(arrays, 1)
        http = view.client_limits(limits, "http", view.body_memory(limits))
        http.enter()
        http.hit("max_streams")
        http.reserve().grow(10)
        lag = view.loop_lag()
        lag._histogram.observe([1000])
        lag._cells[0] = lag._histogram.sum_ns
        array.end(5)
    assert (array.starts, array.pid, array.ended_cpu_ns) == (2, 0, 10)
    http = CounterArrays(arrays, 0).summed_limits(limits)[0]
    assert (http.connections, http.hits["max_streams"], http.bodies.reserved_bytes) == (0, 2, 0)
    histogram = CounterArrays(arrays, 0).histogram()
    assert (histogram.count, histogram.sum_ns) == (2, 2000)


def test_failures_reach_the_recorder_once(arrays: list[CounterArray]) -> None:
    recorder = Recorder()
    recorder.collect_failures = FailureTotals(arrays, 3, version_key(2, 7)).collect
    recorder.failure("overloaded", 5)
    for number in (1, 2):
        failures = VersionFailures(arrays[number], 2)
        assert failures.count(3, 7, "overloaded", 10)
        assert failures.count(3, 7, "would_miss", 20)
    assert not VersionFailures(arrays[1], 2).count(-1, 7, "overloaded", 10)
    assert not VersionFailures(arrays[1], 2).count(3, 7, "unheard", 10)
    for _ in range(2):
        totals = recorder.totals()
        assert (totals.failures, totals.failure_ns) == ({"overloaded": 3, "would_miss": 2}, 65)
    VersionFailures(arrays[1], 2).count(3, 7, "overloaded", 10)
    assert recorder.request_counts() == (0, 6)
    # After a restart of the engine process the same slot and number mean another version.
    VersionFailures(arrays[1], 3).count(3, 7, "overloaded", 10)
    assert FailureTotals(arrays, 3, version_key(3, 7)).collect() == [("overloaded", 1, 10)]


COUNTING = """
import sys
from headrace.server.front_ends.counter_array import CounterArray, CounterArrays, VersionFailures
from headrace.core.limits import Limits
arrays = [CounterArray(int(fd)) for fd in sys.argv[1:]]
arrays[1].begin(1)
view = CounterArrays(arrays, 1)
http = view.client_limits(Limits(), "http", view.body_memory(Limits()))
failures = VersionFailures(arrays[1], 1)
http.enter()
http.reserve().grow(1000)
while True:
    http.hit("max_streams")
    failures.count(0, 1, "overloaded", 3)
    sys.stdout.write("x")
    sys.stdout.flush()
"""


def test_counts_of_a_killed_process_are_exact(arrays: list[CounterArray]) -> None:
    for array in arrays:
        os.set_inheritable(array.fd, True)
    words = [sys.executable, "-c", COUNTING, *[str(array.fd) for array in arrays]]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[array.fd for array in arrays])
    assert process.stdout is not None
    received = len(process.stdout.read(1000))
    process.send_signal(signal.SIGKILL)
    received += len(process.stdout.read())
    process.wait()
    process.stdout.close()
    limits = CounterArrays(arrays, 0).summed_limits(Limits())[0]
    assert limits.connections == 1
    assert limits.bodies.reserved_bytes == 1000
    arrays[1].end(0)
    assert (limits.connections, limits.bodies.reserved_bytes) == (0, 0)
    hits = limits.hits["max_streams"]
    assert received <= hits <= received + 1, "the process counts before it writes"
    ((reason, count, time_ns),) = FailureTotals(arrays, 0, version_key(1, 1)).collect()
    assert reason == "overloaded"
    assert received <= count <= hits
    assert time_ns in (3 * count, 3 * count + 3)


def test_memory_of_another_size_is_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(ValueError, match=f"descriptor {fd} is no sealed memory of 8192 bytes"):
        map_memory(fd, 8192)
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="sealed"):
        map_memory(fd, 8192)
    os.close(fd)


class Server(RuleBasedStateMachine):
    """Front ends that count, end and are replaced, beside a model with plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = [CounterArray.create() for _ in range(3)]
        self.limits = Limits(max_connections=4)
        self.running: dict[int, int] = {}  # connections by number of the front end
        self.views = {number: CounterArrays(self.arrays, number) for number in range(3)}
        self.http = {
            number: view.client_limits(self.limits, "http", view.body_memory(self.limits))
            for number, view in self.views.items()
        }
        self.recorder = Recorder()
        self.recorder.collect_failures = FailureTotals(self.arrays, 5, version_key(1, 9)).collect
        self.hits = self.failures = self.reserved = 0
        self.held: dict[int, int] = {}
        self.last: tuple[int, int] = (0, 0)

    numbers = st.integers(1, 2)

    @rule(number=numbers)
    def start(self, number: int) -> None:
        if number not in self.running:
            self.running[number] = self.held[number] = 0
            self.arrays[number].begin(number)

    @precondition(lambda self: self.running)
    @rule(number=numbers)
    def end(self, number: int) -> None:
        if number in self.running:
            del self.running[number], self.held[number]
            self.arrays[number].end(1)

    @rule(number=numbers)
    def connect(self, number: int) -> None:
        if number in self.running:
            self.running[number] += 1
            admitted = self.http[number].enter()
            assert admitted == (sum(self.running.values()) <= 4)
            self.hits += not admitted

    @rule(number=numbers)
    def disconnect(self, number: int) -> None:
        if self.running.get(number):
            self.running[number] -= 1
            self.http[number].leave()

    @rule(number=numbers, size=st.integers(1, 1000))
    def reserve(self, number: int, size: int) -> None:
        if number in self.running:
            self.http[number].reserve().grow(size)
            self.held[number] += size

    @rule(number=numbers, reason=st.sampled_from(["overloaded", "would_miss"]))
    def fail(self, number: int, reason: str) -> None:
        if number in self.running:
            VersionFailures(self.arrays[number], 1).count(5, 9, reason, 1)
            self.failures += 1

    @invariant()
    def sums_are_exact(self) -> None:
        summed = self.views[0].summed_limits(self.limits)[0]
        assert summed.connections in (sum(self.running.values()), None)
        assert summed.bodies.reserved_bytes == sum(self.held.values())
        totals = (summed.hits["max_connections"], self.recorder.request_counts()[1])
        assert totals == (self.hits, self.failures)
        assert totals >= self.last, "totals never fall"
        self.last = totals


Server.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
TestServer = Server.TestCase


def test_concurrent_threads_share_one_counter() -> None:
    array = CounterArray.create()
    counter = LabelledCounter("protocol", "reason")
    counter.share(array.errors, [("http", "overloaded")])

    def count(_: int) -> None:
        for _ in range(5000):
            counter.count("http", "overloaded")

    on_threads(count, range(4))
    assert list(counter.items()) == [(("http", "overloaded"), 20_000)]
