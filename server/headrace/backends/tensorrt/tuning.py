"""What is measured of a plan when it is loaded, and what follows: the buckets that batches are padded to, and how they fly.

Times are microseconds a batch, of several queued one behind the other: what a batch costs while the GPU is kept busy, the host's
part included. The least of a few is taken: what else goes on makes it longer, nothing makes it shorter.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from time import perf_counter_ns

from headrace.backends.tensorrt.api import Choice, Timing
from headrace.backends.tensorrt.contexts import Dock, Placement, Views
from headrace.backends.tensorrt.plan import Plan, buckets, choose_profile
from headrace.core.clock import NS_PER_US

# Measures a plan on its GPU when the first of its instances there is opened: see `tensorrt_tuning` for what follows from it.


# A bucket is worth its graphs and contexts if batches are this much faster than in the next larger one; running a batch as it is,
# without a graph, must be faster by as much.
_WORTH = 0.95
# One graph for a whole flight gives up the overlap of copies with computing; up to this much is a fair price for its latency.
_FAIR = 1.05
# Where that price is too high, one graph is for flights that have nothing to overlap with, as long as it makes them that much
# faster; and how often such a flight is timed at the most.
_FASTER = 0.97
_FLIGHTS = 9
# Of one measurement: batches queued at once, rounds, and how long all of it may take if a batch is slow.
_AT_ONCE = 8
_ROUNDS = 4
_ENOUGH_US = 20_000.0


def worthwhile(timings: Mapping[int, Timing]) -> tuple[int, ...]:
    """Of the numbers of rows measured those to keep: the largest, the smallest, and what is faster than the next above it."""
    rows = sorted(timings, reverse=True)
    kept = rows[:1]
    for number in rows[1:]:
        if number == rows[-1] or timings[number].replay_us < _WORTH * timings[kept[-1]].replay_us:
            kept.append(number)
    return tuple(sorted(kept))


def exact_rows(buckets: tuple[int, ...], timings: Mapping[int, Timing]) -> frozenset[int]:
    """Numbers of rows between buckets that are faster as they are, without a graph, than padded; by interpolation."""
    found = set[int]()
    for low, high in pairwise(buckets):
        begin, end = timings[low].plain_us, timings[high].plain_us
        for rows in range(low + 1, high):
            plain_us = begin + (end - begin) * (rows - low) / (high - low)
            if plain_us < _WORTH * timings[high].replay_us:
                found.add(rows)
    return frozenset(found)


def fair(whole_us: float, staged_us: float) -> bool:
    """True if a flight in one graph costs the GPU hardly more than one in three streams."""
    return whole_us <= _FAIR * staged_us


def faster(whole_us: float, staged_us: float) -> bool:
    """True if a flight with nothing else in the air is noticeably sooner back in one graph than through three streams."""
    return whole_us < _FASTER * staged_us


def latency_us(fly: Callable[[], None]) -> float:
    """Microseconds of a flight that has the GPU for itself: the median of a few, of fewer where one takes long.

    Args:
        fly: queues it and waits for it; may have to set up what is measured when it is first called.
    """
    fly()
    found = [_elapsed_us(fly, _nothing, 1)]
    count = int(max(1, min(_FLIGHTS, _ENOUGH_US // max(found[0], 0.001))))
    found += [_elapsed_us(fly, _nothing, 1) for _ in range(count - 1)]
    return sorted(found)[len(found) // 2]


def measured_us(queue: Callable[[], None], wait: Callable[[], None]) -> float:
    """Microseconds a batch.

    Args:
        queue: queues one; may have to set up what is measured when it is first called.
        wait: waits for all that was queued.
    """
    queue()
    wait()
    one_us = _elapsed_us(queue, wait, 1)
    count = int(max(1, min(_AT_ONCE, _ENOUGH_US / _ROUNDS // max(one_us, 0.001))))
    rounds = int(max(1, min(_ROUNDS, _ENOUGH_US // max(one_us * count, 0.001))))
    return min(one_us, *[_elapsed_us(queue, wait, count) for _ in range(rounds)])


def told(timings: Mapping[int, Timing], buckets: Collection[int]) -> str:
    """The table for people; what is no bucket stands in brackets."""
    return ", ".join(
        f"{rows} rows {timing.replay_us:.0f} us (plain {timing.plain_us:.0f})"
        if rows in buckets
        else f"[{rows} rows {timing.replay_us:.0f} us]"
        for rows, timing in sorted(timings.items())
    )


def _nothing() -> None:
    pass


def _elapsed_us(queue: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    begun_ns = perf_counter_ns()
    for _ in range(count):
        queue()
    wait()
    return (perf_counter_ns() - begun_ns) / NS_PER_US / count


logger = logging.getLogger("headrace.tensorrt")


def tuned(dock: Dock, plan: Plan, placement: Placement) -> Choice:
    """How batches of a plan are best run, measured once for all instances on a GPU, which wait for it.

    What was measured is remembered for the life of the process: a model that comes back, and another one of the same plan, are
    run the same way and take the same memory, whatever else the GPU does meanwhile.

    Args:
        dock: open, with the device current.
        plan: of the instance; its batches have no other free dimension than their rows.
        placement: likewise.

    Raises:
        DeviceError: the GPU has no memory left, or has failed.
    """
    with plan.tuning:
        if plan.choice is None:
            plan.choice = _found(dock, plan, placement) if placement.graphs else dock.choice
        return plan.choice


def _found(dock: Dock, plan: Plan, placement: Placement) -> Choice:
    choice = plan.recall(dock.way)
    if choice is None:
        choice = Tuner(dock, plan, placement).choose()
        if dock.graphs:
            plan.remember(dock.way, choice)
    return choice


class Tuner:
    """Works in the first berth of a dock, and leaves there the lanes of the buckets it chooses.

    Args:
        dock, plan, placement: as for `tuned`.
    """

    def __init__(self, dock: Dock, plan: Plan, placement: Placement) -> None:
        self._dock = dock
        self._plan = plan
        self._placement = placement
        self._berth = dock.berths[0]

    def choose(self) -> Choice:
        """Measure which buckets pay and how flights are best queued.

        Raises:
            DeviceError: the GPU has no memory left, or has failed.
        """
        dock, timings = self._dock, self._timings()
        if self._placement.max_rows and not timings:
            return dock.choice
        kept = worthwhile(timings)
        for rows in timings.keys() - set(kept):
            dock.drop_lane(self._berth, rows)
        # With several profiles a context that changes its shapes may have to change its profile, which halts the stream.
        exact = exact_rows(kept, timings) if len(self._plan.profiles) == 1 else frozenset[int]()
        if not exact:
            dock.drop_shared_lane(self._berth)
        whole, lone = self._flights(kept or (0,))
        choice = Choice(kept, whole, timings, exact, lone)
        text = (
            "%s: %s; one graph a flight for %s rows, and for %s where it is alone; %d numbers of rows run as they are"
        )
        logger.debug(text, self._plan.name, told(timings, kept), sorted(whole), sorted(lone), len(exact))
        return choice

    def _timings(self) -> dict[int, Timing]:
        """Of all buckets that come into question, with their lanes; the largest first, so that the GPU is awake for the small.

        Empty if graphs cannot be had.
        """
        dock, timings = self._dock, dict[int, Timing]()
        most = self._placement.max_rows
        for rows in reversed(buckets(self._plan.profiles, most, fine=True) if most else ()):
            lane = dock.new_lane(self._berth, rows)
            if not dock.graphs:
                return {}
            replay_us = measured_us(partial(lane.enqueue, dock.computing), dock.computing.synchronize)
            timings[rows] = Timing(replay_us, measured_us(self._plainly(rows), dock.computing.synchronize))
        return timings

    def _plainly(self, rows: int) -> Callable[[], None]:
        """Runs a batch of `rows` and, in turn with it, of one less: each time the context changes its shapes.

        It is waited for each time, as while serving: a context is given other shapes only when it is at rest.
        """
        dock, lane = self._dock, self._dock.shared_lane(self._berth)
        shapes = [dock.named(dock.shapes_of(number)) for number in (rows, rows - 1) if number]
        turns = itertools.cycle([named for named in shapes if choose_profile(self._plan.profiles, named) is not None])

        def run() -> None:
            lane.set_shapes(next(turns), dock.computing)
            lane.enqueue(dock.computing)
            dock.computing.synchronize()

        return run

    def _flights(self, kept: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
        """The smallest buckets, as far as a flight in one graph is as good as one in three streams; and where it is so alone."""
        most = self._placement.one_graph_rows
        if most is not None:
            return frozenset(rows for rows in kept if max(rows, 1) <= most), frozenset()
        whole, lone = set[int](), set[int]()
        for rows in kept:
            is_fair, is_faster = self._in_one_graph(rows, not lone)
            if is_fair:
                whole.add(rows)
            elif is_faster:
                lone.add(rows)
            else:
                break
        return frozenset(whole), frozenset(lone)

    def _in_one_graph(self, rows: int, among_others: bool) -> tuple[bool, bool]:
        """Hold a flight in one graph against one in three streams; its graphs stay if one of the answers is True.

        Args:
            rows: of a bucket.
            among_others: find out about many, too.

        Returns:
            True if it costs hardly more where there are others; True if it is faster alone, asked only if not.
        """
        dock, berth = self._dock, self._berth
        lane = dock.ready(berth, dock.shapes_of(rows)) or dock.new_lane(berth, rows)
        views = Views(
            {name: berth.inputs[name].view(shape) for name, shape in lane.inputs.items()},
            {name: berth.outputs[name].view(shape) for name, shape in lane.outputs.items()},
            rows or 1,
        )
        queue = partial(dock.launch, berth, lane, views, ())

        def fly() -> None:
            queue()
            berth.landing.wait()

        staged_us = measured_us(queue, dock.synchronize) if among_others else 0.0
        alone_us = latency_us(fly)
        if dock.captured_flight(lane):
            if among_others and fair(measured_us(queue, dock.synchronize), staged_us):
                return True, False
            if faster(latency_us(fly), alone_us):
                return False, True
        lane.drop_flight()
        return False, False
