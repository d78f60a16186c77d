"""Custom metrics of Python models: sums, limits, names."""

from __future__ import annotations

import pytest
from headrace.observability import custom_metrics
from headrace.observability.custom_metrics import CustomMetrics


def lines(metrics: CustomMetrics) -> list[str]:
    return [f"{s.name}{dict(s.labels)} {s.value:g}" for metric in metrics.collect() for s in metric.samples]


def report(metrics: CustomMetrics, *changes: object, families: object = (), model: str = "m") -> None:
    metrics.report(model, {"families": list(families), "changes": list(changes)})  # type: ignore[call-overload]


def test_counters_of_all_instances_are_added_up_and_gauges_are_replaced() -> None:
    metrics = CustomMetrics()
    families = [["done", "counter", "Done."], ["load", "gauge", "Load."]]
    for value in (2, 3):
        report(
            metrics,
            ["add", "done", {"kind": "a"}, value],
            ["set", "load", {}, value],
            ["add", "load", {}, 0.5],
            families=families,
        )
    assert lines(metrics) == ["done{'model': 'm', 'kind': 'a'} 5", "load{'model': 'm'} 3.5"]


def test_histograms_are_cumulative() -> None:
    metrics = CustomMetrics()
    families = [["size", "histogram", "Size."], ["size", "buckets", "1.0,2.0"]]
    report(metrics, ["observe", "size", {}, [0.5, 1.0, 1.5, 9.0]], families=families)
    assert lines(metrics) == [
        "size_bucket{'model': 'm', 'le': '1.0'} 2",
        "size_bucket{'model': 'm', 'le': '2.0'} 3",
        "size_bucket{'model': 'm', 'le': '+Inf'} 4",
        "size_count{'model': 'm'} 4",
        "size_sum{'model': 'm'} 12",
    ]


@pytest.mark.parametrize("name", ["headrace_requests", "nv_x", "process_x", "a b", "", "1a", 'a"} 1\nfoo'])
def test_names_of_the_server_are_not_for_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = CustomMetrics()
    for _ in range(2):
        report(metrics, ["add", name, {}, 1], families=[[name, "counter", "X."]])
    assert lines(metrics) == []
    assert len(caplog.records) == 1


def test_the_code_may_set_the_label_model(caplog: pytest.LogCaptureFixture) -> None:
    """As the example of Triton's Python backend does; equal series of two models are shown once."""
    metrics = CustomMetrics()
    families = [["x", "counter", "X."]]
    report(
        metrics, ["add", "x", {"model": "own", "version": "1"}, 2], ["add", "x", {"version": "1"}, 3], families=families
    )
    assert lines(metrics) == ["x{'model': 'own', 'version': '1'} 2", "x{'model': 'm', 'version': '1'} 3"]
    report(metrics, ["add", "x", {"model": "m", "version": "1"}, 5], families=families, model="other")
    assert lines(metrics) == ["x{'model': 'own', 'version': '1'} 2", "x{'model': 'm', 'version': '1'} 3"]
    assert "same labels" in caplog.text


def test_a_wrong_label_drops_no_other_metric(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CustomMetrics()
    report(metrics, ["add", "x", {"a b": "c"}, 1], ["add", "x", {}, 2], families=[["x", "counter", "X."]])
    assert lines(metrics) == ["x{'model': 'm'} 2"]
    assert "'a b'" in caplog.text


@pytest.mark.parametrize("labels", [{"a b": "c"}, {"__name__": "x"}, ["a"], 3])
def test_wrong_labels_are_dropped(labels: object) -> None:
    metrics = CustomMetrics()
    report(metrics, ["add", "x", labels, 1], families=[["x", "counter", "X."]])
    assert lines(metrics) == []


@pytest.mark.parametrize("message", [{}, {"families": 3}, {"families": [], "changes": [[1]]}, {"families": [[1, 2]]}])
def test_wrong_reports_are_dropped(message: dict[str, object]) -> None:
    metrics = CustomMetrics()
    metrics.report("m", message)
    assert lines(metrics) == []


def test_a_counter_does_not_fall_and_is_not_set() -> None:
    metrics = CustomMetrics()
    report(metrics, ["add", "x", {}, 3], ["add", "x", {}, -2], ["set", "x", {}, 1], families=[["x", "counter", "X."]])
    assert lines(metrics) == ["x{'model': 'm'} 3"]


def test_series_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_metrics, "MAX_SERIES", 3)
    metrics = CustomMetrics()
    changes = [["add", "x", {"n": str(number)}, 1] for number in range(9)]
    report(metrics, *changes, families=[["x", "counter", "X."]])
    assert len(lines(metrics)) == 3


def test_kinds_that_differ_between_models_are_not_mixed() -> None:
    metrics = CustomMetrics()
    report(metrics, ["add", "x", {}, 1], families=[["x", "counter", "X."]])
    report(metrics, ["set", "x", {}, 1], families=[["x", "gauge", "X."]], model="n")
    assert lines(metrics) == ["x{'model': 'm'} 1"]


def test_metrics_of_an_unloaded_model_are_dropped() -> None:
    metrics = CustomMetrics()
    report(metrics, ["add", "x", {}, 1], families=[["x", "counter", "X."]])
    metrics.forget("m")
    assert lines(metrics) == []
