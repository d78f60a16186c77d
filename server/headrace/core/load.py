"""How busy a model version is, for load balancers and for people."""

from __future__ import annotations

from typing import NamedTuple


class LevelLoad(NamedTuple):
    """One priority level.

    Attributes:
        level: from 1, the most urgent.
        depth: requests that wait (parts, of those larger than a batch).
        rows: rows that wait.
        wait_ns: how long a request of one row that came now would wait until it is run; 0 if nothing is known.
    """

    level: int
    depth: int
    rows: int
    wait_ns: int


class Load(NamedTuple):
    """A version at one moment.

    Attributes:
        depth: requests that wait.
        rows: rows that wait.
        in_flight: requests that are somewhere between their arrival and their answer.
        running_rows: rows that instances have taken and not answered.
        instances: how many live.
        wait_ns: how long a request of one row and of the default level that came now would wait until it is run.
        drain_ns: how long what waits and runs would take if nothing came.
        rows_hz: rows a second that all instances can do, by the profile, at the batch size that the objective allows; 0: unknown.
        late: answers since loading that came after they were due.
        levels: each priority level by itself, the most urgent first; empty if it was not asked for.
    """

    depth: int
    rows: int
    in_flight: int
    running_rows: int
    instances: int
    wait_ns: int
    drain_ns: int
    rows_hz: float
    late: int
    levels: tuple[LevelLoad, ...]
