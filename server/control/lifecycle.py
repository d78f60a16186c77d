"""The states of a model version and every legal step between them."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a version is; the value is the word of Triton's repository index."""

    UNKNOWN = "UNKNOWN"
    """Found in the repository, not looked at yet."""
    LOADING = "LOADING"
    """Its files are being read, its instances started."""
    READY = "READY"
    """It serves."""
    UNAVAILABLE = "UNAVAILABLE"
    """It cannot serve; the reason is kept (a broken model, or all its instances died)."""
    UNLOADING = "UNLOADING"
    """It takes no new requests and finishes what it has."""
    UNLOADED = "UNLOADED"
    """It was unloaded."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.UNKNOWN: frozenset({State.LOADING, State.UNAVAILABLE}),
    State.LOADING: frozenset({State.READY, State.UNAVAILABLE}),
    State.READY: frozenset({State.UNLOADING, State.UNAVAILABLE}),
    State.UNAVAILABLE: frozenset({State.LOADING, State.UNLOADING}),
    State.UNLOADING: frozenset({State.UNLOADED, State.UNAVAILABLE}),
    State.UNLOADED: frozenset({State.LOADING}),
}


def step(current: State, following: State) -> State:
    """The following state, if the step is legal.

    Raises:
        ValueError: it is not; a fault of ours.
    """
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a version cannot go from {current.name} to {following.name}")
    return following
