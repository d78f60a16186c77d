"""Measures a plan on its GPU when the first of its instances there is opened: see `tensorrt_tuning` for what follows from it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial

from headrace.backends.tensorrt.dock import Dock, Placement, Views
from headrace.backends.tensorrt.plan import Plan, buckets, choose_profile
from headrace.backends.tensorrt.tuning import (
    Choice,
    Timing,
    exact_rows,
    fair,
    faster,
    latency_us,
    measured_us,
    told,
    worthwhile,
)

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
