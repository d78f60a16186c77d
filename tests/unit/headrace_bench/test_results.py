"""Figures of a run from its outcomes, the server's statistics, and the comparison of two runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace_bench.compare import compare, relative_change
from headrace_bench.processes import Outcomes
from headrace_bench.results import histogram, merge_repeats, statistics_between, student_95, summarize


def outcomes(rows: list[tuple[float, float, float, str]]) -> Outcomes:
    """Outcomes of (due, sent, done, status) in seconds from 100."""
    statuses = ["", *sorted({row[3] for row in rows} - {""})]
    times = np.array([row[:3] for row in rows]) + 100.0
    codes = np.array([statuses.index(row[3]) for row in rows], np.uint16)
    examples = {status: f"text of {status}" for status in statuses[1:]}
    return Outcomes(100.0, 110.0, times[:, 0], times[:, 1], times[:, 2], codes, statuses, examples, [0.5], 1.0, 2)


def summary(
    rows: list[tuple[float, float, float, str]], *, is_open: bool = True, slo: float | None = 50.0
) -> dict[str, Any]:
    return summarize(outcomes(rows), 101.0, 111.0, is_open=is_open, slo_ms=slo, rows=2)


def test_figures_count_requests_that_were_due_in_the_measured_time() -> None:
    rows = [(0.5, 0.5, 1.5, "")]  # due in the warm-up: its answer counts for the throughput
    rows += [(1.0 + n, 1.0 + n, 1.0 + n + 0.010, "") for n in range(8)]  # 10 ms each
    rows += [(9.5, 9.9, 9.6, ""), (10.0, 10.0, 12.0, "")]  # sent late; answered after the end
    rows += [(10.5, 10.5, 10.6, "503"), (10.6, 10.6, 10.7, "503"), (10.7, 10.7, 10.8, "timeout")]
    rows += [(11.0, 11.0, 11.1, "")]  # due after the end
    figures = summary(rows)
    assert figures["requests"] == 13
    assert figures["succeeded"] == 10
    assert figures["errors"] == {"503": 2, "timeout": 1}
    assert figures["error_texts"]["503"] == "text of 503"
    assert figures["throughput_per_s"] == pytest.approx(1.0)
    assert figures["rows_per_s"] == pytest.approx(2.0)
    assert figures["latency_ms"]["p50"] == pytest.approx(10.0)
    assert figures["latency_ms"]["max"] == pytest.approx(2000.0)
    assert figures["goodput_per_s"] == pytest.approx(0.8)
    assert figures["in_time"] == pytest.approx(8 / 13)
    assert figures["sent_late"] == 1
    assert sum(figures["histogram"]["counts"]) == 10
    assert "sent_late" not in summary(rows, is_open=False, slo=None)
    assert "goodput_per_s" not in summary(rows, slo=None)


def test_a_run_without_an_answer_has_no_latencies() -> None:
    figures = summary([(2.0, 2.0, 3.0, "503")])
    assert figures["latency_ms"] == {}
    assert figures["throughput_per_s"] == 0
    assert figures["goodput_per_s"] == 0
    assert figures["histogram"] == {"bounds_ms": [], "counts": []}


def test_every_latency_is_in_the_histogram() -> None:
    values = np.array([0.0, 1e-9, 0.5, 1.0, 1.0, 1e3, 1e9])
    counted = histogram(values)
    assert sum(counted["counts"]) == len(values)
    assert len(counted["bounds_ms"]) == len(counted["counts"]) + 1
    assert counted["bounds_ms"] == sorted(counted["bounds_ms"])
    low, high = next(
        (a, b)
        for a, b, n in zip(counted["bounds_ms"], counted["bounds_ms"][1:], counted["counts"], strict=False)
        if n == 2 and a > 0.1
    )
    assert low <= 1.0 < high


def statistics(requests: int, batches: dict[int, int], queue_ns: int, *, text: bool = False) -> dict[str, Any]:
    def number(value: int) -> Any:
        return str(value) if text else value

    rows = sum(size * count for size, count in batches.items())
    phase = {"count": number(requests), "ns": number(queue_ns)}
    return {
        "inference_count": number(rows),
        "execution_count": number(sum(batches.values())),
        "inference_stats": {"success": phase, "queue": phase},
        "batch_stats": [
            {"batch_size": number(size), "compute_infer": {"count": number(n)}} for size, n in batches.items()
        ],
    }


@pytest.mark.parametrize("text", [False, True], ids=["http", "grpc"])
def test_batches_and_phases_are_those_between_two_reads(text: bool) -> None:
    before = statistics(10, {1: 10}, 10_000, text=text)
    after = statistics(30, {1: 12, 9: 2}, 110_000, text=text)
    result = statistics_between(before, after)
    assert result == {
        "requests": 20,
        "mean_batch": pytest.approx(5.0),
        "batch_sizes": {"1": 2, "9": 2},
        "phases_us": {"queue": pytest.approx(5.0), "total": pytest.approx(5.0)},
    }
    assert statistics_between(None, after) is None
    assert statistics_between(after, after) is None


def document(throughputs: list[float], p50: list[float], **fields: Any) -> dict[str, Any]:
    points = [
        {
            "label": "concurrency 8",
            "requests": 100,
            "errors": {},
            "throughput_per_s": float(np.mean(throughputs)),
            "latency_ms": {"p50": float(np.mean(p50))},
            "slices": {"throughput_per_s": throughputs, "p50": p50},
        }
    ]
    return {"model": "m", "protocol": "http", "points": points, **fields}


def verdicts(comparison: dict[str, Any]) -> dict[str, str]:
    return {row["figure"]: row["verdict"] for row in comparison["rows"]}


def test_a_change_beyond_the_interval_is_a_difference() -> None:
    first = document([100.0, 101.0, 99.0, 100.0], [1.0, 1.1, 0.9, 1.0])
    second = document([120.0, 121.0, 119.0, 120.0], [1.2, 1.4, 1.0, 0.8])
    comparison = compare(first, second, ["a", "b"])
    assert verdicts(comparison) == {"requests/s": "better", "p50": "no difference"}
    assert verdicts(compare(second, first, ["b", "a"]))["requests/s"] == "worse"
    row = comparison["rows"][0]
    assert row["change_percent"] == pytest.approx(20.0)
    # Welch: t(6) = 2.447, both samples have the standard error sqrt(2/3/4).
    assert row["margin_percent"] == pytest.approx(2.447 * np.sqrt(2 * (2 / 3) / 4), rel=1e-3)


def test_repeats_are_the_sample_where_both_runs_have_three() -> None:
    first, second = document([100.0] * 4, [1.0] * 4), document([120.0] * 4, [1.0] * 4)
    for run, values in ((first, [90.0, 100.0, 130.0]), (second, [100.0, 120.0, 140.0])):
        run["points"][0]["repeats"] = {"throughput_per_s": values, "p50": [1.0, 1.0, 1.0]}
    assert verdicts(compare(first, second, ["a", "b"]))["requests/s"] == "no difference"
    del first["points"][0]["repeats"]
    assert verdicts(compare(first, second, ["a", "b"]))["requests/s"] == "better"


def test_runs_without_a_common_load_are_refused_and_conditions_are_named() -> None:
    first, second = document([1.0, 2.0], [1.0, 1.0]), document([1.0, 2.0], [1.0, 1.0], model="n")
    assert compare(first, second, ["a", "b"])["differences"] == ["model: m and n"]
    second["points"][0]["label"] = "concurrency 9"
    with pytest.raises(BadRequest, match=r"no load in common: a has concurrency 8, b has concurrency 9: run both"):
        compare(first, second, ["a", "b"])


def test_errors_are_compared_as_shares() -> None:
    first, second = document([1.0, 1.0], [1.0, 1.0]), document([1.0, 1.0], [1.0, 1.0])
    second["points"][0]["errors"] = {"503": 5}
    row = compare(first, second, ["a", "b"])["rows"][-1]
    assert (row["figure"], row["second"], row["verdict"]) == ("errors", 5.0, "worse")


def test_small_samples_have_no_interval() -> None:
    assert relative_change(0.0, 1.0, [1.0, 2.0], [1.0, 2.0]) == (None, None)
    assert relative_change(1.0, 2.0, [1.0], [1.0, 2.0]) == (pytest.approx(100.0), None)
    assert relative_change(1.0, 2.0, [1.0, 1.0], [2.0, 2.0]) == (pytest.approx(100.0), 0.0)
    assert (student_95(1), student_95(30), student_95(31)) == (12.706, 2.042, 1.96)


def test_of_several_runs_the_median_is_reported() -> None:
    runs: list[dict[str, Any]] = [
        {"throughput_per_s": rate, "latency_ms": dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "p99.9"), rate)}
        for rate in (3.0, 1.0, 2.0)
    ]
    for number, run in enumerate(runs):
        run |= {
            "requests": 10,
            "succeeded": 9,
            "errors": {"503": number, f"50{number}": 1},
            "error_texts": {"503": str(number)},
        }
    merged = merge_repeats(runs)
    assert (merged["requests"], merged["succeeded"]) == (30, 27)
    assert merged["errors"] == {"503": 3, "500": 1, "501": 1, "502": 1}
    assert merged["error_texts"] == {"503": "0"}
    assert merged["throughput_per_s"] == 2.0
    assert merged["repeats"]["throughput_per_s"] == [3.0, 1.0, 2.0]
    assert merged["repeats"]["p99.9"] == [3.0, 1.0, 2.0]
    assert "repeats" not in merge_repeats(runs[:1])
