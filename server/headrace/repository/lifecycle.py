"""The states of a model version and every legal step between them."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a version is; `word` is how the repository index says it."""

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
    """It was unloaded, or never loaded because nobody asked for it."""

    @property
    def word(self) -> str:
        """The word of Triton's repository index, which has none for a model that is not loaded but the reason."""
        return State.UNAVAILABLE.value if self is State.UNLOADED else self.value


TRANSITIONS: dict[State, frozenset[State]] = {
    State.UNKNOWN: frozenset({State.LOADING, State.UNAVAILABLE, State.UNLOADED}),
    # UNLOADED: nothing of it served yet, since it waited for its engine.
    State.LOADING: frozenset({State.READY, State.UNAVAILABLE, State.UNLOADED}),
    # A version that is replaced stays READY: there is no moment in which it does not serve.
    State.READY: frozenset({State.UNLOADING, State.UNAVAILABLE}),
    # READY: one of its instances that had died is back.
    State.UNAVAILABLE: frozenset({State.LOADING, State.UNLOADING, State.READY}),
    # LOADING: wanted again while the requests of before are still being answered.
    State.UNLOADING: frozenset({State.UNLOADED, State.UNAVAILABLE, State.LOADING}),
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
