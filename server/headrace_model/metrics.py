"""Custom metrics of a Python model: `pb_utils.MetricFamily` and `pb_utils.Metric`.

Changes are collected and sent to the server at most every 100 ms, so that a metric costs a dict update on the path of a request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Tuple

from headrace_model.protocol import text

PAUSE_S = 0.1

_Key = Tuple[str, Tuple[Tuple[str, str], ...]]


class MetricReporter:
    """Collects changes of metrics, and sends them from a thread of its own, which the first change starts. Thread-safe.

    Attributes:
        send: sends a message to the server.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self.send = send
        self._lock = threading.Lock()
        self._families: list[list[Any]] = []
        self._added: dict[_Key, float] = {}
        self._set: dict[_Key, float] = {}
        self._observed: dict[_Key, list[float]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def declare(self, name: str, kind: str, description: str) -> None:
        """Report a family, before any value of it."""
        with self._lock:
            self._families.append([name, kind, description])
        self._begin()

    def add(self, key: _Key, delta: float) -> None:
        """Report an increment."""
        with self._lock:
            if key in self._set:
                self._set[key] += delta
            else:
                self._added[key] = self._added.get(key, 0.0) + delta
        self._begin()

    def set(self, key: _Key, value: float) -> None:
        """Report a value."""
        with self._lock:
            self._added.pop(key, None)
            self._set[key] = value
        self._begin()

    def observe(self, key: _Key, value: float) -> None:
        """Report an observation of a histogram."""
        with self._lock:
            self._observed.setdefault(key, []).append(value)
        self._begin()

    def flush(self) -> None:
        """Send what is collected."""
        with self._lock:
            families, self._families = self._families, []
            added, self._added = self._added, {}
            written, self._set = self._set, {}
            observed, self._observed = self._observed, {}
        changes: list[list[Any]] = [["add", name, dict(labels), value] for (name, labels), value in added.items()]
        changes += [["set", name, dict(labels), value] for (name, labels), value in written.items()]
        changes += [["observe", name, dict(labels), values] for (name, labels), values in observed.items()]
        if families or changes:
            self.send({"metric": {"families": families, "changes": changes}})

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="custom metrics", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._wake.wait()
            pause.wait(PAUSE_S)
            self._wake.clear()
            self.flush()


class MetricFamily:
    """A family of metrics, as Prometheus shows it.

    Args:
        name: name of the family.
        description: its help text.
        kind: COUNTER, GAUGE or HISTOGRAM.
    """

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise ValueError(f"kind is MetricFamily.COUNTER, GAUGE or HISTOGRAM, not {kind!r}")
        self.name, self.kind = str(text(name)), kind
        self._metrics: dict[tuple[tuple[str, str], ...], Metric] = {}
        _reporter().declare(self.name, kind, str(text(description)))

    def Metric(  # noqa: N802 - the name is Triton's
        self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric of a set of labels.

        Args:
            labels: labels by name.
            buckets: upper bounds of a histogram, ascending.
        """
        key = tuple(sorted((str(text(name)), str(text(value))) for name, value in (labels or {}).items()))
        if key not in self._metrics:
            self._metrics[key] = Metric(self, key, buckets)
        return self._metrics[key]


class Metric:
    """One metric of a family. Its value is that of this instance; the server adds up the counters of all instances.

    Args:
        family: the family.
        labels: names and values, sorted.
        buckets: upper bounds of a histogram.
    """

    def __init__(
        self, family: MetricFamily, labels: tuple[tuple[str, str], ...], buckets: Sequence[float] | None = None
    ) -> None:
        if (family.kind == MetricFamily.HISTOGRAM) != (buckets is not None):
            raise ValueError("buckets are for histograms, which need them")
        self._key: _Key = (family.name, labels)
        self._kind = family.kind
        self._value = 0.0
        if buckets is not None:
            bounds = [float(bound) for bound in buckets]
            if bounds != sorted(set(bounds)):
                raise ValueError(f"buckets are ascending numbers, not {list(buckets)!r}")
            _reporter().declare(family.name, "buckets", ",".join(map(repr, bounds)))
        elif family.kind == MetricFamily.COUNTER:
            _reporter().add(self._key, 0.0)

    def increment(self, value: float) -> None:
        """Add a value; for counters and gauges.

        Raises:
            ValueError: it is negative for a counter, or no number.
        """
        self._require("increment", MetricFamily.COUNTER, MetricFamily.GAUGE)
        value = _finite(value)
        if value < 0 and self._kind == MetricFamily.COUNTER:
            raise ValueError(f"a counter only grows: increment({value!r})")
        self._value += value
        _reporter().add(self._key, value)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        self._require("set", MetricFamily.GAUGE)
        self._value = _finite(value)
        _reporter().set(self._key, self._value)

    def observe(self, value: float) -> None:
        """Record a value in a histogram."""
        self._require("observe", MetricFamily.HISTOGRAM)
        _reporter().observe(self._key, _finite(value))

    def value(self) -> float:
        """Return the value in this instance; for counters and gauges."""
        self._require("value", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return self._value

    def _require(self, method: str, *kinds: str) -> None:
        if self._kind not in kinds:
            raise ValueError(f"{method} is not for a {self._kind}")


def _finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the value of a metric is a finite number, not {value!r}")
    return number


_PROCESS_REPORTER = MetricReporter(lambda _message: None)


def _reporter() -> MetricReporter:
    return _PROCESS_REPORTER


def reporter_for(send: Callable[[dict[str, Any]], None]) -> MetricReporter:
    """Return the reporter of this process, after setting its connection.

    Args:
        send: sends a message to the server.
    """
    _PROCESS_REPORTER.send = send
    return _PROCESS_REPORTER
