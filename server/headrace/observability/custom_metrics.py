"""Custom metrics of Python models: values by family and labels, as the models' processes report them."""

from __future__ import annotations

import logging
import math
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from headrace.observability import metrics_table as table

logger = logging.getLogger("headrace.python")

# Series of one model; further ones are dropped and logged once.
MAX_SERIES = 1000
MAX_FAMILIES = 100
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,127}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}")
_RESERVED = ("headrace_", "nv_", "process_", "python_")
_KINDS = ("counter", "gauge", "histogram")
_MAX_TEXT = 1024

Labels = tuple[tuple[str, str], ...]


class _Family:
    """One family of one model."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text
        self.bounds: tuple[float, ...] = ()
        self.values: dict[Labels, float] = {}
        self.counts: dict[Labels, list[int]] = {}


class CustomMetrics(table.ScrapeCollector):
    """Holds the custom metrics of all models and renders them. Thread-safe.

    Counters and histograms of all instances of a model are added up; a gauge has the value that was set last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all attributes
        self._models: dict[str, dict[str, _Family]] = {}
        self._problems: set[tuple[str, str]] = set()

    def report(self, model: str, message: dict[str, Any]) -> None:
        """Record a report of a model's process; wrong parts are logged once and dropped.

        Args:
            model: name of the model.
            message: "families": lists of name, kind (or "buckets") and text; "changes": lists of operation ("add", "set",
                "observe"), name, labels, and value or values.
        """
        with self._lock:
            families = self._models.setdefault(model, {})
            try:
                for name, kind, text in message["families"]:
                    self._declare(model, families, str(name), str(kind), str(text)[:_MAX_TEXT])
                for operation, name, labels, value in message["changes"]:
                    family = families.get(str(name))
                    problem = _label_problem(labels)
                    if problem:
                        self._complain(model, f"the custom metric '{str(name)[:128]}' is dropped: {problem}")
                    elif family is not None:
                        self._change(model, families, family, str(operation), _labels(labels), value)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._complain(model, f"a report of custom metrics cannot be read ({error})")

    def forget(self, model: str) -> None:
        """Drop the metrics of a model that is unloaded."""
        with self._lock:
            self._models.pop(model, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with the label `model` unless the code sets one."""
        with self._lock:
            rows = [
                (name, model, family.kind, family.text, family.bounds, dict(family.values), dict(family.counts))
                for model, families in self._models.items()
                for name, family in families.items()
            ]
        done: dict[str, Metric] = {}
        shown: set[tuple[str, Labels]] = set()
        for name, model, kind, text, bounds, values, counts in sorted(rows, key=lambda row: row[0]):
            metric = done.get(name)
            if metric is None:
                # "unknown" is shown as a counter whose name has no suffix: custom metrics have the names that the code sets.
                metric = done[name] = Metric(name, text, "unknown" if kind == "counter" else kind)
            elif metric.type != ("unknown" if kind == "counter" else kind):
                self._complain(model, f"the custom metric '{name}' has another kind in another model")
                continue
            for labels, value in values.items():
                with_model = {"model": model, **dict(labels)}
                series = name, tuple(sorted(with_model.items()))
                if series in shown:  # Prometheus refuses a page with two of them
                    self._complain(
                        model, f"a series of the custom metric '{name}' is hidden: another has the same labels"
                    )
                    continue
                shown.add(series)
                _add(metric, with_model, bounds, value, counts.get(labels))
        yield from done.values()

    def _declare(self, model: str, families: dict[str, _Family], name: str, kind: str, text: str) -> None:
        family = families.get(name)
        if kind == "buckets":
            if family is not None and not family.bounds:
                family.bounds = tuple(float(bound) for bound in text.split(",") if bound)
            return
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            self._complain(model, f"a custom metric cannot have the name {name[:128]!r}: use another prefix")
        elif kind not in _KINDS:
            self._complain(model, f"the custom metric '{name}' has the unknown kind {kind[:40]!r}")
        elif family is not None and family.kind != kind:
            self._complain(model, f"the custom metric '{name}' is a {family.kind}, not a {kind}")
        elif family is None and len(families) >= MAX_FAMILIES:
            self._complain(model, f"there are more than {MAX_FAMILIES} custom metrics")
        elif family is None:
            families[name] = _Family(kind, text)

    def _change(
        self, model: str, families: dict[str, _Family], family: _Family, operation: str, labels: Labels, value: Any
    ) -> None:
        series = family.values
        if labels not in series:
            if sum(len(other.values) for other in families.values()) >= MAX_SERIES:
                self._complain(model, f"there are more than {MAX_SERIES} series of custom metrics")
                return
            series[labels] = 0.0
        if operation == "observe":
            counts = family.counts.setdefault(labels, [0] * (len(family.bounds) + 1))
            for observed in value:
                counts[bisect_left(family.bounds, float(observed))] += 1
                series[labels] += float(observed)
        elif math.isfinite(float(value)):
            is_increment = operation == "add" and (family.kind != "counter" or value >= 0)
            if is_increment:
                series[labels] += float(value)
            elif operation == "set" and family.kind == "gauge":
                series[labels] = float(value)

    def _complain(self, model: str, text: str) -> None:
        if len(self._problems) < MAX_SERIES and (model, text) not in self._problems:
            self._problems.add((model, text))
            logger.warning("model %s: %s", model, text)


def _label_problem(labels: dict[str, str]) -> str:
    """Return the reason why labels cannot be shown; "" without one."""
    wrong = next((name for name in labels if not _LABEL.fullmatch(name)), None)
    return "" if wrong is None else f"a label cannot have the name {wrong[:128]!r}"


def _labels(labels: dict[str, str]) -> Labels:
    """Return labels sorted by name."""
    return tuple(sorted((name, str(value)[:_MAX_TEXT]) for name, value in labels.items()))


def _add(
    metric: Metric, labels: dict[str, str], bounds: tuple[float, ...], value: float, counts: list[int] | None
) -> None:
    if metric.type != "histogram":
        metric.add_sample(metric.name, labels, value)
    elif counts is not None:
        total = 0
        for bound, count in zip((*map(repr, bounds), "+Inf"), counts, strict=True):
            total += count
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
        metric.add_sample(f"{metric.name}_count", labels, total)
        metric.add_sample(f"{metric.name}_sum", labels, value)
