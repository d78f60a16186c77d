"""Timing of candidates: CUDA graphs of many launches, in rounds that interleave the candidates.

A round queues the graphs of all candidates one after the other, with events between them, and waits once: the GPU is never idle
between two of them, and a drift of the clocks meets all alike. The order rotates from round to round. The first graph of a round
is queued once more before, untimed, so that the start of the queue is in no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from headrace.runtimes.cuda.driver import CudaGraph, CudaStream, TimingEvent

# Duration of a candidate in a round; a launch that takes longer is a round of its own.
ROUND_US = 1000.0
_MAX_LAUNCHES = 256
_TRIAL_LAUNCHES = 4
# A first trial that takes longer than this needs no second one: its start is a small part of it.
_LONG_TRIAL_US = 2000.0
# Samples after which a candidate may leave the rounds: of one that could be the fastest, and of the others.
_MIN_ROUNDS, _MIN_SLOW_ROUNDS = 5, 3
_RIVAL = 1.1
# Half the distance of the quartiles over the median with which a candidate leaves the rounds.
_SMALL_SPREAD = 0.01


class RecordedLaunches(Protocol):
    """Recorded launches."""

    def launch(self) -> None:
        """Queue the launches once more."""

    def close(self) -> None:
        """Destroy the recording; its work must be done."""


class Candidate(Protocol):
    """A prepared convolution that can be run on the layer's operands and timed.

    Attributes:
        name: name of the algorithm, or "cudnn", "tensorrt".
        variant: tile sizes, kernel or another description.
        workspace_bytes: scratch memory on the GPU; None if unknown.
        half_sums: the kernel accumulates in float16.
    """

    name: str
    variant: str
    workspace_bytes: int | None
    half_sums: bool

    def run(self) -> int:
        """Run once on the first set of activations, wait, and return the address of the output (n, out_h, out_w, k)."""

    def capture(self, launches: int) -> RecordedLaunches:
        """Record launches that rotate over the sets of activations."""

    def close(self) -> None:
        """Free all memory; all work must be done."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one launch over rounds, in microseconds.

    Attributes:
        median_us, min_us, max_us, low_us, high_us: over the rounds; low and high are the quartiles.
        rounds: number of rounds.
        launches: launches of each round, whose mean is one sample.
    """

    median_us: float
    min_us: float
    max_us: float
    low_us: float
    high_us: float
    rounds: int
    launches: int


def summarize(samples_us: Sequence[float], launches: int) -> Timing:
    """Return the statistics of the rounds' samples."""
    low, middle, high = np.percentile(np.array(samples_us), (25, 50, 75))
    return Timing(float(middle), min(samples_us), max(samples_us), float(low), float(high), len(samples_us), launches)


def capture_launches(stream: CudaStream, launch: Callable[[int], None], launches: int, sets: int) -> CudaGraph:
    """Record launches on a stream; `launch` queues one on a set of activations."""

    def enqueue() -> None:
        for number in range(launches):
            launch(number % sets)

    return CudaGraph(stream, enqueue)


def timed_us(stream: CudaStream, work: Callable[[], None]) -> float:
    """Return the time between two events of a stream, before and after some work."""
    first, last = TimingEvent(), TimingEvent()
    first.record(stream)
    work()
    last.record(stream)
    stream.synchronize()
    return last.us_since(first)


def trial_us(stream: CudaStream, candidate: Candidate) -> float:
    """Return a first estimate of a launch's time; the candidate must have run before."""
    replay = candidate.capture(_TRIAL_LAUNCHES)
    try:
        time_us = 0.0
        for _ in range(2):
            time_us = timed_us(stream, replay.launch)
            if time_us > _LONG_TRIAL_US:
                break
        return time_us / _TRIAL_LAUNCHES
    finally:
        replay.close()


def is_settled(samples_us: Sequence[float], fastest_us: float, rounds: int) -> bool:
    """Return whether a candidate needs no other sample.

    Args:
        samples_us: its samples so far.
        fastest_us: shortest median of all candidates so far.
        rounds: samples of a candidate at most.
    """
    if len(samples_us) >= rounds:
        return True
    low, middle, high = np.percentile(np.array(samples_us), (25, 50, 75))
    least = _MIN_ROUNDS if middle <= _RIVAL * fastest_us else _MIN_SLOW_ROUNDS
    return bool(len(samples_us) >= least and high - low <= 2 * _SMALL_SPREAD * middle)


def time_rounds(
    stream: CudaStream, candidates: Sequence[Candidate], estimates_us: Sequence[float], rounds: int
) -> list[Timing]:
    """Time candidates that have run before, in interleaved rounds.

    A candidate whose samples hardly differ leaves the rounds before the others: after three, or after five if it is among the
    fastest. `Timing.rounds` has the number.

    Args:
        stream: stream of all candidates; the device must be current.
        candidates: what is compared.
        estimates_us: estimate of each by `trial_us`.
        rounds: samples of each at most.
    """
    counts, replays = [], []
    try:
        for candidate, estimate_us in zip(candidates, estimates_us, strict=True):
            count = math.ceil(ROUND_US / estimate_us) if estimate_us > 0 else _MAX_LAUNCHES
            counts.append(min(max(count, 1), _MAX_LAUNCHES))
            replays.append(candidate.capture(counts[-1]))
        samples: list[list[float]] = [[] for _ in candidates]
        events = [TimingEvent() for _ in range(len(candidates) + 1)]
        active = list(range(len(replays)))
        number = 0
        while active:
            order = [active[(number + index) % len(active)] for index in range(len(active))]
            replays[order[0]].launch()
            events[0].record(stream)
            for position, index in enumerate(order):
                replays[index].launch()
                events[position + 1].record(stream)
            stream.synchronize()
            for position, index in enumerate(order):
                samples[index].append(events[position + 1].us_since(events[position]) / counts[index])
            fastest_us = min(float(np.median(sample)) for sample in samples)
            active = [index for index in active if not is_settled(samples[index], fastest_us, rounds)]
            number += 1
    finally:
        stream.synchronize()
        for replay in replays:
            replay.close()
    return [summarize(sample, count) for sample, count in zip(samples, counts, strict=True)]
