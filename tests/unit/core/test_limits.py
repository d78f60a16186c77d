"""The room for bodies: never more than there is, and all of it is given back."""

from __future__ import annotations

import pytest
from headrace.core import limits as limits_module
from headrace.core.clock import NS_PER_S
from headrace.core.errors import Overloaded
from headrace.core.limits import (
    GIVE_WAY_NS,
    SMALL_BODY_BYTES,
    SMALL_BODY_RESERVE,
    BodyMemory,
    BodyReservation,
    ClientLimits,
    ConnectionReserve,
    Limits,
    UnreadResponses,
)
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 100
STEPS = st.tuples(st.integers(0, 4), st.sampled_from(["grow", "shrink", "end"]), st.integers(0, 60))


@given(st.lists(STEPS, max_size=60))
def test_reserved_bytes_are_the_sum_of_all_bodies(steps: list[tuple[int, str, int]]) -> None:
    """Against a plain count: five requests by two protocols, in any order."""
    limits = Limits(max_body_bytes=10, max_total_body_bytes=LIMIT)
    bodies = BodyMemory(limits)
    client_limits = ClientLimits(limits, "http", bodies), ClientLimits(limits, "grpc", bodies)
    held = [client_limits[index % 2].reserve() for index in range(5)]
    expected, ended, refused = [0] * 5, [False] * 5, 0
    for index, step, size in steps:
        if step == "end":
            held[index].end()
            expected[index], ended[index] = 0, True
        elif step == "shrink":
            size = min(size, expected[index])
            held[index].shrink(size)
            expected[index] -= size
        elif not ended[index] and sum(expected) + size > LIMIT:
            refused += 1
            with pytest.raises(Overloaded):
                held[index].grow(size)
        else:
            held[index].grow(size)
            expected[index] += 0 if ended[index] else size
        assert bodies.reserved_bytes == sum(expected) <= LIMIT
    assert sum(client_limits.hits["max_total_body_bytes"] for client_limits in client_limits) == refused
    for one in held:
        one.end()
    assert bodies.reserved_bytes == 0


def test_a_check_reserves_nothing() -> None:
    client_limits = ClientLimits(Limits(max_body_bytes=10, max_total_body_bytes=LIMIT))
    held = client_limits.reserve()
    held.check(LIMIT)
    with pytest.raises(Overloaded, match="100 bytes together"):
        held.check(LIMIT + 1)
    assert (client_limits.bodies.reserved_bytes, client_limits.hits["max_total_body_bytes"]) == (0, 1)


def test_one_body_may_be_as_large_as_it_may_be() -> None:
    client_limits = ClientLimits(Limits(max_body_bytes=1000, max_total_body_bytes=LIMIT))
    client_limits.reserve().grow(1000)
    with pytest.raises(Overloaded):
        client_limits.reserve().grow(1)


# --- Small bodies, slow bodies, unread responses ---------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Monotonic nanoseconds of the reservations, in a list of one."""
    now = [NS_PER_S]
    monkeypatch.setattr(limits_module, "monotonic_ns", lambda: now[0])
    return now


def large_limits() -> ClientLimits:
    return ClientLimits(Limits(max_body_bytes=4 * MIB, max_total_body_bytes=16 * MIB))


def test_small_bodies_have_a_reserve() -> None:
    client_limits = large_limits()
    large = [client_limits.reserve() for _ in range(5)]
    for each in large[:3]:
        each.grow(4 * MIB)
    with pytest.raises(Overloaded):
        large[3].grow(4 * MIB)
    large[3].grow(3 * MIB)
    with pytest.raises(Overloaded):
        large[4].grow(SMALL_BODY_BYTES + 1)
    small = [client_limits.reserve() for _ in range(16 * MIB // SMALL_BODY_RESERVE // SMALL_BODY_BYTES)]
    for each in small:
        each.grow(SMALL_BODY_BYTES)
    assert client_limits.bodies.reserved_bytes == 16 * MIB
    with pytest.raises(Overloaded):
        client_limits.reserve().grow(1)
    for each in (*large, *small):
        each.end()
    assert client_limits.bodies.reserved_bytes == 0


class Upload:
    """A body that arrives in parts."""

    def __init__(self, client_limits: ClientLimits) -> None:
        self.reservation, self.received_bytes, self.gave_way = client_limits.reserve(), 0, False

    def receive(self, size_bytes: int) -> None:
        self.reservation.grow(size_bytes)
        self.received_bytes += size_bytes

    def give_way(self) -> bool:
        self.gave_way = True
        self.reservation.end()
        return True

    def observe(self, now_ns: int) -> bool:
        return self.reservation.observe(self.received_bytes, now_ns, self.give_way)


def test_the_slowest_body_gives_way_while_memory_is_full(clock: list[int]) -> None:
    client_limits = large_limits()
    uploads = [Upload(client_limits) for _ in range(4)]
    for each in uploads:
        each.receive(3 * MIB)
    while clock[0] < NS_PER_S + GIVE_WAY_NS:
        for each in uploads:
            assert not each.observe(clock[0])
        with pytest.raises(Overloaded):
            client_limits.reserve().check(4 * MIB)
        clock[0] += NS_PER_S
        uploads[0].receive(50_000)
        uploads[2].receive(500)
        uploads[3].receive(500)
    for each in uploads:
        each.observe(clock[0])
    newcomer = client_limits.reserve()
    newcomer.grow(4 * MIB)
    assert [each.gave_way for each in uploads] == [False, True, False, False]
    assert client_limits.bodies.reserved_bytes == sum(each.reservation.held_bytes for each in uploads) + 4 * MIB
    uploads[2].reservation.pause()  # complete: it is no longer observed
    assert not client_limits.bodies.make_room(4 * MIB, clock[0], newcomer)
    assert [each.gave_way for each in uploads] == [False, True, False, False], "less than needed: none gives way"
    client_limits.reserve().check(2 * MIB)
    assert [each.gave_way for each in uploads] == [False, True, False, True]


def test_a_slow_body_is_refused_after_a_time() -> None:
    client_limits, now_ns = large_limits(), NS_PER_S
    upload = Upload(client_limits)
    slow_since_ns = now_ns
    while not upload.observe(now_ns):
        upload.receive(100)
        now_ns += NS_PER_S
        assert now_ns < 60 * NS_PER_S
    assert now_ns - slow_since_ns == client_limits.limits.slow_body_s * NS_PER_S
    upload.receive(client_limits.limits.min_body_bytes_per_s)
    assert not upload.observe(now_ns + NS_PER_S), "it has become faster"
    upload.reservation.end()
    assert not upload.observe(now_ns + 99 * NS_PER_S)
    assert not client_limits.bodies.rates


def test_a_minimum_of_0_disables_it() -> None:
    client_limits = ClientLimits(Limits(min_body_bytes_per_s=0))
    upload = Upload(client_limits)
    assert not any(upload.observe(second * NS_PER_S) for second in range(1, 100))


def test_unread_responses_make_new_requests_fail(clock: list[int]) -> None:
    client_limits = large_limits()
    unread = UnreadResponses(client_limits)
    assert not unread.admits(99 * MIB), "larger than the bound"
    unread.update(14 * MIB)
    assert (client_limits.bodies.unread_bytes, client_limits.bodies.reserved_bytes) == (14 * MIB, 0)
    with pytest.raises(Overloaded, match="have not read"):
        client_limits.reserve().grow(2 * MIB)
    client_limits.reserve().grow(SMALL_BODY_BYTES)
    other = UnreadResponses(client_limits)
    assert other.admits(1 * MIB)
    assert not other.admits(2 * MIB)
    assert client_limits.hits["max_total_body_bytes"] == 3
    unread.update(0)
    assert client_limits.bodies.unread_bytes == 0


def test_the_client_that_reads_slowest_gives_way(clock: list[int]) -> None:
    client_limits = large_limits()
    reader, stalled, upload = UnreadResponses(client_limits), UnreadResponses(client_limits), Upload(client_limits)
    closed: list[UnreadResponses] = []

    def closing(unread: UnreadResponses) -> bool:
        closed.append(unread)
        unread.update(0)
        return True

    reader.update(8 * MIB)
    stalled.update(6 * MIB)
    upload.receive(1 * MIB)
    for _ in range(4):
        reader.observe(clock[0], lambda: closing(reader))
        stalled.observe(clock[0], lambda: closing(stalled))
        upload.observe(clock[0])
        clock[0] += NS_PER_S
        reader.update(reader.held_bytes - 10_000)
    newcomer = UnreadResponses(client_limits)
    assert newcomer.admits(5 * MIB), "after another one"
    assert (closed, upload.gave_way) == ([stalled], False), "bodies do not give way to responses"
    newcomer.update(5 * MIB)
    body: BodyReservation = client_limits.reserve()
    body.grow(1 * MIB)
    assert (closed, upload.gave_way) == ([stalled], False), "it fits"
    body.grow(1 * MIB)
    assert upload.gave_way, "responses and bodies give way to bodies"


class OneConnection:
    """A connection whose rank the test sets: None while it is busy."""

    def __init__(self, rank: tuple[bool, float] | None) -> None:
        self.rank, self.closed = rank, False

    def idle_rank(self) -> tuple[bool, float] | None:
        return self.rank

    def close_idle(self) -> None:
        self.closed = True

    def refuse_connection(self, with_response: bool) -> None:
        self.closed = True


def test_a_new_connection_is_searched_for_although_the_last_search_found_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that found only busy connections is not repeated at once, unless other connections took their places."""
    monkeypatch.setattr(limits_module, "monotonic_ns", lambda: NS_PER_S)
    client_limits = ClientLimits(Limits(max_connections=2), "http")
    reserve, busy = ConnectionReserve(client_limits), [OneConnection(None), OneConnection(None)]
    for connection in busy:
        assert client_limits.enter()
        reserve.add(connection)
    over = [OneConnection(None) for _ in range(3)]
    for connection in over:
        assert not client_limits.enter()
        reserve.add_over(connection)
    assert not reserve.admit(over[0])
    busy[0].rank = True, 1.0
    assert not reserve.admit(over[1]), "the search is too recent"
    client_limits.leave()
    reserve.discard(over[1])
    assert not reserve.admit(over[2]), "a refused connection changes nothing"
    for connection in busy:
        client_limits.leave()
        reserve.discard(connection)
    assert reserve.admit(over[0]), "two places are free"
    over[0].rank = True, 2.0
    last = OneConnection(None)
    assert not client_limits.enter()
    reserve.add_over(last)
    assert reserve.admit(last)
    assert over[0].closed
