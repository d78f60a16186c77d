"""Measures a plan when its first instance on a GPU opens: buckets that batches are padded to, and the way they are
launched.

Times are microseconds for each of several batches queued in a row: the cost of a batch while the GPU is busy,
including the host's part. The minimum of a few rounds counts: other load makes a run longer, nothing makes it
shorter.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from time import perf_counter_ns

from headrace.core.clock import NS_PER_US
from headrace.runtimes.tensorrt.contexts import BatchViews, DeviceResources, InstancePlacement
from headrace.runtimes.tensorrt.plan import BucketTiming, TensorRtPlan, TuningResult, buckets, choose_profile

# A bucket pays for its graphs and contexts if its batches are this much faster than in the next larger one. Running a
# batch unpadded, without a graph, must be faster by as much.
_BUCKET_SPEEDUP = 0.95
# One graph for a whole batch gives up the overlap of copies and compute; up to this slowdown its latency is worth it.
_MAX_SLOWDOWN = 1.05
# Beyond that slowdown, one graph is only for batches with nothing to overlap, if it makes them this much faster; and
# the maximum number of timed runs of such a batch.
_MIN_SPEEDUP = 0.97
_LATENCY_RUNS = 9
# Of one measurement: batches queued at once, rounds, and the limit of its duration for slow batches.
_BATCHES_QUEUED = 8
_ROUNDS = 4
_MAX_MEASURING_US = 20_000.0


def useful_buckets(timings: Mapping[int, BucketTiming]) -> tuple[int, ...]:
    """Return the measured numbers of rows to keep: the largest, the smallest, and those faster than the next above them."""
    rows = sorted(timings, reverse=True)
    buckets_used = rows[:1]
    for number in rows[1:]:
        if number == rows[-1] or timings[number].replay_us < _BUCKET_SPEEDUP * timings[buckets_used[-1]].replay_us:
            buckets_used.append(number)
    return tuple(sorted(buckets_used))


def exact_rows(buckets: tuple[int, ...], timings: Mapping[int, BucketTiming]) -> frozenset[int]:
    """Return numbers of rows between buckets that are faster unpadded, without a graph; by interpolation."""
    exact = set[int]()
    for low, high in pairwise(buckets):
        low_us, high_us = timings[low].plain_us, timings[high].plain_us
        for rows in range(low + 1, high):
            plain_us = low_us + (high_us - low_us) * (rows - low) / (high - low)
            if plain_us < _BUCKET_SPEEDUP * timings[high].replay_us:
                exact.add(rows)
    return frozenset(exact)


def costs_little_more(whole_us: float, staged_us: float) -> bool:
    """Return True if a batch in one graph costs the GPU hardly more than one in three streams."""
    return whole_us <= _MAX_SLOWDOWN * staged_us


def is_faster(whole_us: float, staged_us: float) -> bool:
    """Return True if a batch that runs alone is noticeably faster in one graph than in three streams."""
    return whole_us < _MIN_SPEEDUP * staged_us


def latency_us(launch_batch_graph: Callable[[], None]) -> float:
    """Measure the latency in microseconds of a batch that runs alone on the GPU: the median of a few runs, of fewer if
    one is slow.

    Args:
        launch_batch_graph: queues the batch and waits for it; its first call may have to set up the measurement.
    """
    launch_batch_graph()
    times_us = [_elapsed_us(launch_batch_graph, _no_wait, 1)]
    count = int(max(1, min(_LATENCY_RUNS, _MAX_MEASURING_US // max(times_us[0], 0.001))))
    times_us += [_elapsed_us(launch_batch_graph, _no_wait, 1) for _ in range(count - 1)]
    return sorted(times_us)[len(times_us) // 2]


def measured_us(queue: Callable[[], None], wait: Callable[[], None]) -> float:
    """Measure the microseconds for each batch.

    Args:
        queue: queues one batch; its first call may have to set up the measurement.
        wait: waits for all queued batches.
    """
    queue()
    wait()
    one_us = _elapsed_us(queue, wait, 1)
    count = int(max(1, min(_BATCHES_QUEUED, _MAX_MEASURING_US / _ROUNDS // max(one_us, 0.001))))
    rounds = int(max(1, min(_ROUNDS, _MAX_MEASURING_US // max(one_us * count, 0.001))))
    return min(one_us, *[_elapsed_us(queue, wait, count) for _ in range(rounds)])


def describe_timings(timings: Mapping[int, BucketTiming], buckets: Collection[int]) -> str:
    """Timings as text for the log; numbers of rows that are no buckets are in brackets."""
    return ", ".join(
        f"{rows} rows {timing.replay_us:.0f} us (plain {timing.plain_us:.0f})"
        if rows in buckets
        else f"[{rows} rows {timing.replay_us:.0f} us]"
        for rows, timing in sorted(timings.items())
    )


def _no_wait() -> None:
    pass


def _elapsed_us(queue: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    start_ns = perf_counter_ns()
    for _ in range(count):
        queue()
    wait()
    return (perf_counter_ns() - start_ns) / NS_PER_US / count


logger = logging.getLogger("headrace.tensorrt")


def tune(resources: DeviceResources, plan: TensorRtPlan, placement: InstancePlacement) -> TuningResult:
    """Measure once for all instances on a GPU how batches of a plan are run best; other instances wait.

    Results are remembered for the life of the process: a model that is loaded again, or another model of the same
    plan, runs the same way and needs the same memory, whatever else the GPU does at the time.

    Args:
        resources: open, with the device current.
        plan: of the instance; its batches have no free dimension except their rows.
        placement: of the instance.

    Raises:
        DeviceError: the GPU has no memory left, or has failed.
    """
    with plan.tuning_lock:
        if plan.tuning_result is None:
            plan.tuning_result = _tune(resources, plan, placement) if placement.graphs else resources.tuning_result
        return plan.tuning_result


def _tune(resources: DeviceResources, plan: TensorRtPlan, placement: InstancePlacement) -> TuningResult:
    tuning_result = plan.find_tuning_result(resources.tuning_key)
    if tuning_result is None:
        tuning_result = Tuner(resources, plan, placement).choose()
        if resources.graphs:
            plan.save_tuning_result(resources.tuning_key, tuning_result)
    return tuning_result


class Tuner:
    """Measures in the first slot of an instance's resources, and leaves the contexts of the chosen buckets there.

    Args:
        resources, plan, placement: as for `tune`.
    """

    def __init__(self, resources: DeviceResources, plan: TensorRtPlan, placement: InstancePlacement) -> None:
        self._resources = resources
        self._plan = plan
        self._placement = placement
        self._slot = resources.slots[0]

    def choose(self) -> TuningResult:
        """Choose the buckets, and how their batches are launched, by measurement.

        Raises:
            DeviceError: the GPU has no memory left, or has failed.
        """
        resources, timings = self._resources, self._timings()
        if self._placement.max_rows and not timings:
            return resources.tuning_result
        buckets_used = useful_buckets(timings)
        for rows in timings.keys() - set(buckets_used):
            resources.drop_context(self._slot, rows)
        # With several profiles, new shapes may need another profile, and switching halts the stream.
        exact = exact_rows(buckets_used, timings) if len(self._plan.profiles) == 1 else frozenset[int]()
        if not exact:
            resources.drop_shared_context(self._slot)
        one_graph, one_graph_when_idle = self._one_graph_buckets(buckets_used or (0,))
        tuning_result = TuningResult(buckets_used, one_graph, timings, exact, one_graph_when_idle)
        text = "%s: %s; one graph a batch for %s rows, and for %s where it is alone; %d numbers of rows run as they are"
        logger.debug(
            text,
            self._plan.name,
            describe_timings(timings, buckets_used),
            sorted(one_graph),
            sorted(one_graph_when_idle),
            len(exact),
        )
        return tuning_result

    def _timings(self) -> dict[int, BucketTiming]:
        """Time all candidate buckets with their contexts, the largest first, so that the GPU's clocks are up for the
        small ones.

        Empty if CUDA graphs are not available.
        """
        resources, timings = self._resources, dict[int, BucketTiming]()
        max_rows = self._placement.max_rows
        for rows in reversed(buckets(self._plan.profiles, max_rows, fine=True) if max_rows else ()):
            context = resources.new_context(self._slot, rows)
            if not resources.graphs:
                return {}
            replay_us = measured_us(partial(context.enqueue, resources.computing), resources.computing.synchronize)
            timings[rows] = BucketTiming(
                replay_us, measured_us(self._run_without_graph(rows), resources.computing.synchronize)
            )
        return timings

    def _run_without_graph(self, rows: int) -> Callable[[], None]:
        """Return a function that runs batches of `rows` and of one row less in turn, so that the context changes its
        shapes each time.

        It waits each time, as while serving: a context gets other shapes only while it does not run.
        """
        resources, context = self._resources, self._resources.shared_context(self._slot)
        shapes = [resources.by_name(resources.shapes_of(number)) for number in (rows, rows - 1) if number]
        turns = itertools.cycle(
            [by_name for by_name in shapes if choose_profile(self._plan.profiles, by_name) is not None]
        )

        def run() -> None:
            context.set_shapes(next(turns), resources.computing)
            context.enqueue(resources.computing)
            resources.computing.synchronize()

        return run

    def _one_graph_buckets(self, buckets_used: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the smallest buckets as long as one graph is as good as three streams, and those where it is so only
        when idle.
        """
        max_rows = self._placement.one_graph_rows
        if max_rows is not None:
            return frozenset(rows for rows in buckets_used if max(rows, 1) <= max_rows), frozenset()
        one_graph, one_graph_when_idle = set[int](), set[int]()
        for rows in buckets_used:
            is_fair, is_faster = self._compare_one_graph(rows, not one_graph_when_idle)
            if is_fair:
                one_graph.add(rows)
            elif is_faster:
                one_graph_when_idle.add(rows)
            else:
                break
        return frozenset(one_graph), frozenset(one_graph_when_idle)

    def _compare_one_graph(self, rows: int, compare_overlapped: bool) -> tuple[bool, bool]:
        """Compare a batch in one graph with one in three streams; its graphs are kept if one of the results is True.

        Args:
            rows: of a bucket.
            compare_overlapped: also compare while other batches are in flight.

        Returns:
            True if one graph costs hardly more while batches overlap; True if it is faster alone, measured only
            otherwise.
        """
        resources, slot = self._resources, self._slot
        context = resources.find_context(slot, resources.shapes_of(rows)) or resources.new_context(slot, rows)
        views = BatchViews(
            {name: slot.inputs[name].view(shape) for name, shape in context.inputs.items()},
            {name: slot.outputs[name].view(shape) for name, shape in context.outputs.items()},
            rows or 1,
        )
        queue = partial(resources.launch, slot, context, views, ())

        def launch_batch_graph() -> None:
            queue()
            slot.finished.wait()

        staged_us = measured_us(queue, resources.synchronize) if compare_overlapped else 0.0
        alone_us = latency_us(launch_batch_graph)
        if resources.try_capture_batch_graph(context):
            if compare_overlapped and costs_little_more(measured_us(queue, resources.synchronize), staged_us):
                return True, False
            if is_faster(latency_us(launch_batch_graph), alone_us):
                return False, True
        context.drop_batch_graphs()
        return False, False
