"""The room for bodies: never more than there is, and all of it is given back."""

from __future__ import annotations

import pytest
from headrace.core.errors import Overloaded
from headrace.core.limits import BodyMemory, ClientLimits, Limits
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
