"""The room for bodies: never more than there is, and all of it is given back."""

from __future__ import annotations

import pytest
from headrace.core.errors import Overloaded
from headrace.core.limits import Bodies, Door, Limits
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 100
STEPS = st.tuples(st.integers(0, 4), st.sampled_from(["grow", "shrink", "end"]), st.integers(0, 60))


@given(st.lists(STEPS, max_size=60))
def test_what_bodies_hold_is_the_sum_of_each(steps: list[tuple[int, str, int]]) -> None:
    """Against a plain count: five requests by two protocols, in any order."""
    limits = Limits(max_body_bytes=10, max_total_body_bytes=LIMIT)
    bodies = Bodies(limits)
    doors = Door(limits, "http", bodies), Door(limits, "grpc", bodies)
    held = [doors[index % 2].hold() for index in range(5)]
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
        assert bodies.held_bytes == sum(expected) <= LIMIT
    assert sum(door.hits["max_total_body_bytes"] for door in doors) == refused
    for one in held:
        one.end()
    assert bodies.held_bytes == 0


def test_room_is_asked_for_without_being_taken() -> None:
    door = Door(Limits(max_body_bytes=10, max_total_body_bytes=LIMIT))
    held = door.hold()
    held.check(LIMIT)
    with pytest.raises(Overloaded, match="100 bytes together"):
        held.check(LIMIT + 1)
    assert (door.bodies.held_bytes, door.hits["max_total_body_bytes"]) == (0, 1)


def test_one_body_may_be_as_large_as_it_may_be() -> None:
    door = Door(Limits(max_body_bytes=1000, max_total_body_bytes=LIMIT))
    door.hold().grow(1000)
    with pytest.raises(Overloaded):
        door.hold().grow(1)
