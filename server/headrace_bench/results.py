"""Figures of a run: percentiles, throughput, goodput, errors, histogram, and slices of time for error bars. All JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_bench.loads import Floats
from headrace_bench.processes import Outcomes

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
# Parts of a run whose figures vary independently enough for a confidence interval (the method of batch means).
SLICES = 10
# Ratio of two neighbouring bounds of the histogram.
_STEP = 2 ** (1 / 8)
# A request that is sent later than this after its due time waited in the client, for a connection or for the processor.
_LATE_S = 0.001
_DAY_MS = 86_400_000.0

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student_95(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t, for at least one degree of freedom; 1.96 beyond 30."""
    return _STUDENT_95[max(1, int(freedom)) - 1] if freedom < 31 else 1.96


def percentile_name(percent: float) -> str:
    """Return the name of a percentile, e.g. "p99" or "p99.9"."""
    return f"p{percent:g}"


def summarize(
    outcomes: Outcomes, first_s: float, last_s: float, *, is_open: bool, slo_ms: float | None, rows: int
) -> dict[str, Any]:
    """Compute the figures of a run.

    Latencies are those of requests that were due from `first_s` to `last_s` and succeeded. The throughput counts the answers that
    came in that time.

    Args:
        outcomes: of every request.
        first_s: end of the warm-up on the monotonic clock.
        last_s: end of the measurement.
        is_open: True for an open loop, whose requests have due times.
        slo_ms: bound of a latency that counts as goodput; None for none.
        rows: rows of a request.

    Returns:
        JSON object with times in ms and rates in 1/s.
    """
    seconds = max(last_s - first_s, 1e-9)
    is_ok = outcomes.codes == 0
    is_due = (outcomes.due_s >= first_s) & (outcomes.due_s < last_s)
    is_done = (outcomes.done_s >= first_s) & (outcomes.done_s < last_s) & is_ok
    latencies_ms = (outcomes.done_s - outcomes.due_s) * 1e3
    good = latencies_ms[is_due & is_ok]
    errors = np.bincount(outcomes.codes[is_due & ~is_ok], minlength=len(outcomes.statuses))
    by_status = {status: int(count) for status, count in zip(outcomes.statuses, errors, strict=False) if count}
    figures: dict[str, Any] = {
        "seconds": seconds,
        "requests": int(is_due.sum()),
        "succeeded": len(good),
        "errors": by_status,
        "error_texts": {status: outcomes.examples.get(status, "") for status in by_status},
        "throughput_per_s": float(is_done.sum() / seconds),
        "rows_per_s": float(is_done.sum() * rows / seconds),
        "latency_ms": latency_figures(good),
        "histogram": histogram(good),
        "client_busy": [round(share, 3) for share in outcomes.busy],
        "client_cpu_us_per_request": outcomes.cpu_s / max(1, len(outcomes.codes)) * 1e6,
        "connections_opened": outcomes.opened,
    }
    if is_open:
        lag_s = (outcomes.sent_s - outcomes.due_s)[is_due]
        figures["sent_late"] = int((lag_s > _LATE_S).sum())
        figures["send_lag_ms"] = latency_figures(lag_s * 1e3)
    if slo_ms is not None:
        in_time = int((good <= slo_ms).sum())
        figures["slo_ms"] = slo_ms
        figures["in_time"] = in_time / max(1, int(is_due.sum()))
        figures["goodput_per_s"] = in_time / seconds
    figures["slices"] = _slices(outcomes, first_s, last_s, is_ok, latencies_ms, slo_ms)
    return figures


def latency_figures(latencies_ms: Floats) -> dict[str, float]:
    """Return mean, smallest, largest and percentiles of latencies; empty without any."""
    if not len(latencies_ms):
        return {}
    values = np.percentile(latencies_ms, PERCENTILES)
    named = {percentile_name(percent): float(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    ends = {"min": float(latencies_ms.min()), **named, "max": float(latencies_ms.max())}
    return {"mean": float(latencies_ms.mean()), **ends}


def histogram(latencies_ms: Floats) -> dict[str, list[float]]:
    """Count latencies between bounds that grow by 9 % each.

    Returns:
        `bounds_ms` has n + 1 ascending bounds, `counts` n counts.
    """
    if not len(latencies_ms):
        return {"bounds_ms": [], "counts": []}
    low = max(float(latencies_ms.min()), 1e-3)
    high = min(max(float(latencies_ms.max()), low), _DAY_MS)
    first, last = math.floor(math.log(low, _STEP)), math.floor(math.log(high, _STEP)) + 1
    bounds = _STEP ** np.arange(first, last + 1, dtype=np.float64)
    counts, _ = np.histogram(np.clip(latencies_ms, bounds[0], bounds[-1]), bounds)
    return {"bounds_ms": bounds.tolist(), "counts": counts.tolist()}


def _slices(
    outcomes: Outcomes,
    first_s: float,
    last_s: float,
    is_ok: npt.NDArray[np.bool_],
    latencies_ms: Floats,
    slo_ms: float | None,
) -> dict[str, list[float]]:
    """Return the figures of each tenth of the time; slices without an answer have no latency."""
    edges = np.linspace(first_s, last_s, SLICES + 1)
    width_s = max((last_s - first_s) / SLICES, 1e-9)
    done, _ = np.histogram(outcomes.done_s[is_ok], edges)
    result: dict[str, list[float]] = {"throughput_per_s": (done / width_s).tolist(), "mean": []}
    for percent in PERCENTILES[:4]:
        result[percentile_name(percent)] = []
    due_s, values = outcomes.due_s[is_ok], latencies_ms[is_ok]
    places = np.searchsorted(edges, due_s, side="right") - 1
    goodput = []
    for number in range(SLICES):
        part = values[places == number]
        if slo_ms is not None:
            goodput.append(float((part <= slo_ms).sum() / width_s))
        if len(part):
            result["mean"].append(float(part.mean()))
            for percent, value in zip(PERCENTILES[:4], np.percentile(part, PERCENTILES[:4]), strict=True):
                result[percentile_name(percent)].append(float(value))
    if slo_ms is not None:
        result["goodput_per_s"] = goodput
    return result


def merge_repeats(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Choose the run with the median throughput of several runs of one load.

    Args:
        points: results of `summarize` for the same load, at least one.

    Returns:
        The run with the median throughput. Its counts of requests and errors are those of all runs: no error is lost. With
        several runs its `repeats` has the figures of each for error bars.
    """
    order = sorted(range(len(points)), key=lambda number: points[number]["throughput_per_s"])
    median = dict(points[order[len(points) // 2]])
    if len(points) > 1:
        names = [name for name in ("throughput_per_s", "goodput_per_s") if name in median]
        repeats: dict[str, list[float]] = {name: [point[name] for point in points] for name in names}
        for name in ("mean", *(percentile_name(percent) for percent in PERCENTILES)):
            repeats[name] = [point["latency_ms"][name] for point in points if point["latency_ms"]]
        median["repeats"] = repeats
        for name in ("requests", "succeeded", "sent_late"):
            if name in median:
                median[name] = sum(point[name] for point in points)
        statuses = dict.fromkeys(status for point in points for status in point["errors"])
        median["errors"] = {status: sum(point["errors"].get(status, 0) for point in points) for status in statuses}
        median["error_texts"] = {
            status: text for point in reversed(points) for status, text in point["error_texts"].items()
        }
    return median


def statistics_between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Compute the server's batches and phases between two reads of the statistics extension.

    Args:
        before, after: statistics of the model's version; None from a server without the extension. Numbers may be text.

    Returns:
        `requests`, `mean_batch`, `batch_sizes` (executions by rows), `phases_us` (mean time of a request in each phase); None
        without statistics or without requests in between.
    """
    if before is None or after is None:
        return None
    rows = _difference(before, after, "inference_count")
    executions = _difference(before, after, "execution_count")
    earlier, later = before.get("inference_stats") or {}, after.get("inference_stats") or {}
    requests = _difference(earlier.get("success") or {}, later.get("success") or {}, "count")
    if requests <= 0:
        return None
    phases = {}
    for name in ("queue", "compute_input", "compute_infer", "compute_output", "success", "cache_hit", "fail"):
        first, last = earlier.get(name) or {}, later.get(name) or {}
        count = _difference(first, last, "count")
        if count > 0:
            phases["total" if name == "success" else name] = _difference(first, last, "ns") / count / 1e3
    sizes = {_number(each, "batch_size"): each for each in before.get("batch_stats") or ()}
    batches = {}
    for each in after.get("batch_stats") or ():
        size = _number(each, "batch_size")
        old = sizes.get(size) or {}
        count = _difference(old.get("compute_infer") or {}, each.get("compute_infer") or {}, "count")
        if count > 0:
            batches[str(size)] = count
    return {
        "requests": requests,
        "mean_batch": rows / executions if executions > 0 else None,
        "batch_sizes": batches,
        "phases_us": phases,
    }


def _number(document: Mapping[str, Any], name: str) -> int:
    return int(document.get(name) or 0)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> int:
    return _number(after, name) - _number(before, name)
