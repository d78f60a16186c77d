"""How long each size of batch takes, measured once a version's instances are open and before it serves."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from server.backends.base import Execution, ExecutionLost, LoadedModel
from server.control.warmup import one_row
from server.core.clock import NS_PER_MS, NS_PER_US, Clock, monotonic_ns
from server.core.model_config import ModelConfig
from server.core.tensor import BY_CONFIG_NAME, BYTES, Array
from server.dataplane.profile import Profile

logger = logging.getLogger("headrace.profile")

# Each size is run so often at most; the first time counts only if there is no other.
_ROUNDS = 4
# Inputs larger than this are not made up.
_MOST_BYTES = 1 << 28


class Measuring:
    """Fills a profile that is empty; called by each instance on its own thread with its own execution, once it is warm.

    The last of them measures: then nothing of the model runs beside it. A model whose backend has measured itself is not run.
    What the model raises on inputs that are made up is no reason not to serve it.

    Args:
        config: of the model, complete.
        model: what is loaded.
        instances: how many will call.
        profile: where the times go.
        limit_ns: no run is begun that would probably end later than that.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: LoadedModel,
        instances: int,
        profile: Profile,
        limit_ns: int,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._config = config
        self._model = model
        self._awaited = instances
        self._profile = profile
        self._limit_ns = limit_ns
        self._clock = clock
        self._lock = threading.Lock()  # guards _awaited

    def __call__(self, execution: Execution) -> None:
        """Measure, if this is the last instance.

        Raises:
            ExecutionLost: nothing can be run any more.
        """
        with self._lock:
            self._awaited -= 1
            last = self._awaited == 0
        if not last or self._profile.known():
            return
        told = backend_table(self._model)
        if told:
            self._profile.buckets = tuple(sorted(backend_buckets(self._model)))
            self._profile.seed({rows: [time_ns] for rows, time_ns in told.items()})
        elif self._limit_ns:
            self._measure(execution)

    def _measure(self, execution: Execution) -> None:
        name, begun_ns = self._config.name, self._clock()
        problem = unmeasurable(self._config)
        if problem:
            logger.info("model %s is not measured before it serves: %s", name, problem)
            return
        found: dict[int, list[int]] = {}
        try:
            self._rounds(execution, found, begun_ns + self._limit_ns)
        except ExecutionLost:
            raise
        except Exception as error:  # made-up values may make no sense to the model
            logger.info(
                "model %s is not measured further: it failed on made-up inputs (%s)", name, type(error).__name__
            )
        self._profile.seed({rows: times_ns[1:] or times_ns for rows, times_ns in found.items()})
        told = ", ".join(f"{known.rows} rows {known.median_ns // NS_PER_US} us" for known in self._profile.known())
        logger.debug("model %s took %d ms to measure: %s", name, (self._clock() - begun_ns) // NS_PER_MS, told)

    def _rounds(self, execution: Execution, found: dict[int, list[int]], end_ns: int) -> None:
        """Run all sizes several times, as far as time goes."""
        feed = _feeds(self._config)
        a_row_ns = 0.0
        for _ in range(_ROUNDS):
            for rows in sizes(self._config):
                times_ns = found.setdefault(rows, [])
                expected_ns = times_ns[-1] if times_ns else a_row_ns * rows
                if self._clock() + expected_ns > end_ns:
                    return
                inputs = feed(rows)
                begun_ns = self._clock()
                execution.run(inputs)
                times_ns.append(self._clock() - begun_ns)
                a_row_ns = times_ns[-1] / rows


def sizes(config: ModelConfig) -> list[int]:
    """Numbers of rows that are measured: powers of two, the preferred ones and the most, as far as inputs are not too large."""
    most = max(config.max_batch_size, 1)
    row_bytes = sum(
        math.prod(tensor.dims) * BY_CONFIG_NAME[tensor.data_type].size_bytes for tensor in config.served_input
    )
    wanted = {most, *(1 << power for power in range(most.bit_length()))}
    if config.dynamic_batching is not None:
        wanted.update(config.dynamic_batching.preferred_batch_size)
    return sorted(rows for rows in wanted if rows <= most and rows * row_bytes <= _MOST_BYTES)


def unmeasurable(config: ModelConfig) -> str:
    """Why there are no inputs to be made up for a model; "" if there are."""
    for tensor in config.served_input:
        if BY_CONFIG_NAME[tensor.data_type] is BYTES:
            return f"input {tensor.name} is text"
        if any(size < 0 for size in tensor.dims):
            return f"input {tensor.name} has free dimensions"
    return "" if sizes(config) else f"a row has more than {_MOST_BYTES} bytes"


def backend_buckets(model: LoadedModel) -> Mapping[int, float]:
    """By the rows of its buckets the microseconds that the backend itself has measured; empty if it has none.

    The model, or what stands behind it as its `inner`, tells by `profile`.
    """
    inner: Any = model
    while inner is not None and not hasattr(inner, "profile"):
        inner = getattr(inner, "inner", None)
    found: Mapping[int, float] = {} if inner is None else inner.profile
    return found


def backend_table(model: LoadedModel) -> Mapping[int, int]:
    """By rows the nanoseconds that the backend itself has measured, of a bucket from the first of its rows on; empty if none."""
    table: dict[int, int] = {}
    before = 0
    for rows, time_us in sorted(backend_buckets(model).items()):
        table[min(before + 1, rows)] = table[rows] = int(time_us * NS_PER_US)
        before = rows
    return table


def _feeds(config: ModelConfig) -> Callable[[int], dict[str, Array]]:
    rows_of = {tensor.name: one_row(tensor) for tensor in config.served_input}

    def feed(rows: int) -> dict[str, Array]:
        if not config.max_batch_size:
            return {name: row[0] for name, row in rows_of.items()}
        return {name: row.repeat(rows, axis=0) for name, row in rows_of.items()}

    return feed
