"""Rounds: a candidate whose samples hardly differ leaves before the others."""

from __future__ import annotations

from typing import Any

import pytest
from headrace_lab import measure
from headrace_lab.measure import is_settled, time_rounds, trial_us


@pytest.mark.parametrize(
    ("samples", "fastest", "expected"),
    [
        ([20.0, 20.0], 10, False),
        ([20.0, 20.0, 20.0], 10, True),
        ([20.0, 22.0, 24.0], 10, False),
        ([10.0, 10.0, 10.0], 10, False),
        ([10.0, 10.0, 10.0, 10.0], 10, False),
        ([10.0, 10.0, 10.0, 10.0, 10.0], 10, True),
        ([10.5, 10.5, 10.5, 10.5], 10, False),
        ([10.0, 10.0, 10.0, 10.0, 15.0], 10, True),
        ([10.0, 11.0, 10.0, 11.0, 10.0, 11.0], 10, False),
        ([10.0, 11.0, 10.0, 11.0, 10.0, 11.0, 10.0], 10, True),
    ],
)
def test_small_spreads_need_few_samples(samples: list[float], fastest: float, expected: bool) -> None:
    assert is_settled(samples, fastest, 7) is expected


class Timed:
    """A candidate whose launches have given times; the fake clock of `Events` advances by them."""

    name, variant, workspace_bytes, half_sums = "timed", "", 0, False

    def __init__(self, clock: list[float], *times_us: float) -> None:
        self.clock, self.times_us, self.rounds = clock, times_us, 0

    def capture(self, launches: int) -> Any:
        return _Replay(self, launches)


class _Replay:
    def __init__(self, candidate: Timed, launches: int) -> None:
        self.candidate, self.launches = candidate, launches

    def launch(self) -> None:
        one = self.candidate
        one.clock[0] += self.launches * one.times_us[one.rounds % len(one.times_us)]
        one.rounds += 1

    def close(self) -> None:
        """Nothing is recorded."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]

    class Event:
        def record(self, stream: Any) -> None:
            self.time_us = now[0]

        def us_since(self, other: Event) -> float:
            return float(self.time_us - other.time_us)

    monkeypatch.setattr(measure, "TimingEvent", Event)
    return now


class Stream:
    """A stream without work."""

    def synchronize(self) -> None:
        """Nothing is queued."""


def timed(rounds: int, *candidates: Timed) -> list[measure.Timing]:
    stream: Any = Stream()
    return time_rounds(stream, candidates, [100.0] * len(candidates), rounds)  # type: ignore[arg-type]


def test_slow_and_steady_candidates_leave_the_rounds_first(clock: list[float]) -> None:
    noisy, steady, slow = Timed(clock, 10, 12, 11), Timed(clock, 10), Timed(clock, 50)
    results = timed(9, noisy, steady, slow)
    assert [result.rounds for result in results] == [9, 5, 3]
    assert [result.median_us for result in results] == [11, 10, 50]
    assert results[0].max_us == 12


def test_no_candidate_has_more_rounds_than_requested(clock: list[float]) -> None:
    results = timed(2, Timed(clock, 10, 20), Timed(clock, 30))
    assert [result.rounds for result in results] == [2, 2]


def test_a_long_trial_is_not_repeated(clock: list[float]) -> None:
    short, long = Timed(clock, 10), Timed(clock, 5000)
    stream: Any = Stream()
    assert trial_us(stream, short) == 10  # type: ignore[arg-type]
    assert trial_us(stream, long) == 5000  # type: ignore[arg-type]
    assert (short.rounds, long.rounds) == (2, 1)
