"""How long each size of batch takes, measured once a version's instances are open and before it serves."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.backends.base import Execution, ExecutionLost, LoadedModel
from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.model_config import ModelConfig
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Array
from headrace.repository.profile_store import NOTHING_KEPT, Kept
from headrace.repository.together import Together
from headrace.repository.warmup import one_row
from headrace.scheduling.latency_table import Profile

logger = logging.getLogger("headrace.profile")

Feed = Callable[[int], dict[str, Array]]
"""Makes inputs of so many rows."""

# Each size is run so often at most; the first time counts only if there is no other.
_ROUNDS = 4
_ROUNDS_TOGETHER = 3
# Inputs larger than this are not made up.
MAX_INPUT_BYTES = 1 << 28
# How much of the time is for one instance alone, where there are several.
_ALONE = 0.5
# Times that were kept are believed if one row takes so many times as long at the most, or so many times less long.
_BELIEVED = 2.0
# An instance that is open waits for the others no longer than this many times the limit, to measure together.
_PATIENCE = 4


class Measuring:
    """Fills a profile that is empty; called by each instance on its own thread with its own execution, once it is warm.

    The last of them measures while the others wait: nothing of the model runs beside it. Then 2, 4, 8 ... and all of them run at
    the same time. A model whose backend has measured itself is not run. What the model raises on inputs that are made up is
    no reason not to serve it.

    Args:
        config: of the model, complete.
        model: what is loaded.
        instances: how many will call.
        profile: where the times go.
        limit_ns: no run is begun that would probably end later than that.
        clock: monotonic nanoseconds.
        kept: what an earlier process knew; believed if the model is about as fast at its loading as it was then.

    Attributes:
        idle_ns: how long the smallest batch took before the version served; 0: not known.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: LoadedModel,
        instances: int,
        profile: Profile,
        limit_ns: int,
        clock: Clock = monotonic_ns,
        kept: Kept = NOTHING_KEPT,
    ) -> None:
        self._config = config
        self._model = model
        self._instances = self._awaited = instances
        self._profile = profile
        self._limit_ns = limit_ns
        self._clock = clock
        self._kept = kept
        self.idle_ns = 0
        self._problem = unmeasurable(config)
        self._stages: Sequence[Together] | None = None  # once the last instance has come
        self._patient = instances - 1  # others that still wait for it
        self._arrivals = threading.Condition()  # guards _awaited, _stages and _patient

    def __call__(self, execution: Execution) -> None:
        """Measure, if the profile is empty.

        Raises:
            ExecutionLost: nothing can be run any more.
        """
        with self._arrivals:
            self._awaited -= 1
            seat = self._awaited  # 0 for the last
        if seat < 0 or self._profile.known():  # started anew, or brought back from parking
            return
        told = backend_buckets(self._model)  # complete once the last instance is open
        if self._problem or told or not self._limit_ns:
            if seat == 0:
                self._without_running(told)
        elif seat:
            self._wait_and_join(execution, seat)
        else:
            self._lead(execution)

    def _without_running(self, told: Mapping[int, float]) -> None:
        if told:
            with self._arrivals:
                self._stages = ()  # some may wait that came before there was a table
                self._arrivals.notify_all()
            self._profile.buckets = tuple(sorted(told))
            table_ns = bucket_times(told)
            self._compare(table_ns[min(table_ns)])
            self._profile.seed({rows: [time_ns] for rows, time_ns in table_ns.items()})
            return
        if self._problem and self._limit_ns:
            logger.info("model %s is not measured before it serves: %s", self._config.name, self._problem)
        self._compare(0)

    def _wait_and_join(self, execution: Execution, seat: int) -> None:
        """Of an instance that was not the last: do what that says."""
        with self._arrivals:
            patience_s = _PATIENCE * self._limit_ns / NS_PER_S
            if not self._arrivals.wait_for(lambda: self._stages is not None, patience_s):
                self._patient -= 1
                return
            stages = self._stages or ()
        self._together(execution, self._instances - seat, stages)

    def _lead(self, execution: Execution) -> None:
        """Of the last instance to come: alone first, then with the others."""
        begun_ns, several = self._clock(), self._instances > 1
        end_ns = begun_ns + self._limit_ns
        stages: list[Together] = []
        try:
            feed = feeds(self._config)
            if self._kept.times_ns:
                self._compare(self._idle(execution, feed, end_ns))
                if self._profile.known():
                    return
            alone_ns = int(self._limit_ns * _ALONE) if several else self._limit_ns
            self._alone(execution, feed, begun_ns + alone_ns)
            if several and self._profile.known():
                stages = self._plan(feed, end_ns)
        finally:
            with self._arrivals:
                # One that waits no more would be missed.
                self._stages = stages = stages if self._patient == self._instances - 1 else []
                self._arrivals.notify_all()
        self._together(execution, 0, stages)
        told = ", ".join(
            f"{known.rows} rows {known.median_ns // NS_PER_US} us ({known.instances} at work)"
            for known in self._profile.known()
        )
        took_ms = (self._clock() - begun_ns) // NS_PER_MS
        logger.debug("model %s took %d ms to measure: %s", self._config.name, took_ms, told)

    def _together(self, execution: Execution, arrival: int, stages: Sequence[Together]) -> None:
        """With the others.

        Args:
            execution: of the calling instance.
            arrival: which of the others it is, from 1 on; 0: the last, which tells the profile.
            stages: all that is to be run.
        """
        try:
            for stage in stages:
                if arrival < stage.instances:
                    self._run(partial(stage.take_part, execution))
                if not arrival:
                    self._profile.seed(_warm(stage.found_ns, stage.instances), stage.instances)
        except BaseException:  # nobody may wait for this instance
            for stage in stages:
                stage.abort()
            raise

    def _alone(self, execution: Execution, feed: Feed, end_ns: int) -> None:
        """Run all sizes several times, as far as time goes."""
        found: dict[int, list[int]] = {}

        def run() -> None:
            a_row_ns = 0.0
            for _ in range(_ROUNDS):
                for rows in sizes(self._config):
                    times_ns = found.setdefault(rows, [])
                    expected_ns = times_ns[-1] if times_ns else a_row_ns * rows
                    if self._clock() + expected_ns > end_ns:
                        return
                    times_ns.append(self._timed(execution, feed(rows)))
                    a_row_ns = times_ns[-1] / rows

        self._run(run)
        self._profile.seed(_warm(found, 1))
        self.idle_ns = self._profile.estimate_ns(min(sizes(self._config)), 1)

    def _plan(self, feed: Feed, end_ns: int) -> list[Together]:
        """With 2, 4, 8 ... and all instances, the time that is left shared between them."""
        counts = sorted({self._instances, *(1 << power for power in range(1, self._instances.bit_length()))})
        share_ns = max(end_ns - self._clock(), 0) // len(counts)
        known = [each.rows for each in self._profile.known()]
        stages = []
        for place, count in enumerate(counts):
            stop_ns = end_ns - share_ns * (len(counts) - 1 - place)

            def in_time(rows: int, count: int = count, stop_ns: int = stop_ns) -> bool:
                return self._clock() + self._profile.estimate_ns(rows, count) <= stop_ns

            stages.append(Together(count, known * _ROUNDS_TOGETHER, feed, in_time, self._clock))
        return stages

    def _run(self, run: Callable[[], None]) -> None:
        """Made-up values may make no sense to the model."""
        try:
            run()
        except ExecutionLost:
            raise
        except Exception as error:
            name, what = self._config.name, type(error).__name__
            logger.info("model %s is not measured further: it failed on made-up inputs (%s)", name, what)

    def _timed(self, execution: Execution, inputs: dict[str, Array]) -> int:
        begun_ns = self._clock()
        execution.run(inputs)
        return self._clock() - begun_ns

    def _idle(self, execution: Execution, feed: Feed, end_ns: int) -> int:
        """How long the smallest size takes now; 0 if the model fails on it."""
        times_ns: list[int] = []
        rows = min(sizes(self._config))

        def run() -> None:
            while len(times_ns) < _ROUNDS and (not times_ns or self._clock() < end_ns):
                times_ns.append(self._timed(execution, feed(rows)))

        self._run(run)
        warm_ns = sorted(times_ns[1:] or times_ns)
        return warm_ns[len(warm_ns) // 2] if warm_ns else 0

    def _compare(self, idle_ns: int) -> None:
        """Believe what was kept, if the smallest size takes about as long as it did then; or if neither is known."""
        then_ns, self.idle_ns = self._kept.idle_ns, idle_ns
        if then_ns / _BELIEVED <= idle_ns <= then_ns * _BELIEVED:
            for instances, times_ns in sorted(self._kept.times_ns.items()):
                self._profile.seed(times_ns, instances, "stored")
            if self._profile.known():
                self.idle_ns = then_ns  # else it could drift away step by step


def sizes(config: ModelConfig) -> list[int]:
    """Numbers of rows that are measured: powers of two, the preferred ones and the most, as far as inputs are not too large."""
    most = max(config.max_batch_size, 1)
    row_bytes = sum(
        math.prod(tensor.dims) * BY_CONFIG_NAME[tensor.data_type].size_bytes for tensor in config.served_input
    )
    wanted = {most, *(1 << power for power in range(most.bit_length()))}
    if config.dynamic_batching is not None:
        wanted.update(config.dynamic_batching.preferred_batch_size)
    return sorted(rows for rows in wanted if rows <= most and rows * row_bytes <= MAX_INPUT_BYTES)


def unmeasurable(config: ModelConfig) -> str:
    """Why there are no inputs to be made up for a model; "" if there are."""
    for tensor in config.served_input:
        if BY_CONFIG_NAME[tensor.data_type] is BYTES:
            return f"input {tensor.name} is text"
        if any(size < 0 for size in tensor.dims):
            return f"input {tensor.name} has free dimensions"
    return "" if sizes(config) else f"a row has more than {MAX_INPUT_BYTES} bytes"


def backend_buckets(model: LoadedModel) -> Mapping[int, float]:
    """By the rows of its buckets the microseconds that the backend itself has measured; empty if it has none.

    The model, or what stands behind it as its `inner`, tells by `profile`.
    """
    inner: Any = model
    while inner is not None and not hasattr(inner, "profile"):
        inner = getattr(inner, "inner", None)
    found: Mapping[int, float] = {} if inner is None else inner.profile
    return found


def bucket_times(buckets: Mapping[int, float]) -> dict[int, int]:
    """By rows the nanoseconds of batches that are padded to buckets: of a bucket from the first of its rows on.

    Args:
        buckets: microseconds by their rows.
    """
    table: dict[int, int] = {}
    before = 0
    for rows, time_us in sorted(buckets.items()):
        table[min(before + 1, rows)] = table[rows] = int(time_us * NS_PER_US)
        before = rows
    return table


def _warm(found_ns: Mapping[int, list[int]], instances: int) -> dict[int, list[int]]:
    """Without the first time of each size and instance, if there are others."""
    return {rows: times_ns[instances:] or times_ns for rows, times_ns in found_ns.items()}


def feeds(config: ModelConfig) -> Feed:
    """What makes inputs for a model that is not `unmeasurable`: one row made up at random, as often as wanted."""
    rows_of = {tensor.name: one_row(tensor) for tensor in config.served_input}

    def feed(rows: int) -> dict[str, Array]:
        if not config.max_batch_size:
            return {name: row[0] for name, row in rows_of.items()}
        return {name: row.repeat(rows, axis=0) for name, row in rows_of.items()}

    return feed
