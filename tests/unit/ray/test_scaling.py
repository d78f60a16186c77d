"""The autoscaling policy, and `headrace.ray` without Ray."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import headrace.ray
import pytest
from headrace.ray.scaling import UTILIZATION, UtilizationPolicy, load_metrics
from headrace.server.embedding import ServerLoad


@pytest.mark.parametrize(
    ("loads", "target_utilization", "replicas"),
    [
        ([0.7], 0.7, 1),
        ([1.4], 0.7, 2),
        ([0.9, 0.9, 0.3], 0.7, 3),
        ([0.1, 0.0, 0.0], 0.7, 1 / 7),
        ([2.0, 2.0], 0.5, 8),
    ],
)
def test_the_policy_spreads_the_recorded_load(loads: list[float], target_utilization: float, replicas: float) -> None:
    recorded = {UTILIZATION: {f"replica-{number}": load for number, load in enumerate(loads)}}
    context = SimpleNamespace(aggregated_metrics=recorded, target_num_replicas=9)
    desired, state = UtilizationPolicy(target_utilization)(context)
    assert desired == pytest.approx(replicas)
    assert state == {}


@pytest.mark.parametrize("recorded", [None, {}, {UTILIZATION: {}}, {"another": {"replica": 3.0}}])
def test_the_policy_changes_nothing_before_a_replica_records(recorded: dict[str, dict[str, float]] | None) -> None:
    context = SimpleNamespace(aggregated_metrics=recorded, target_num_replicas=2)
    assert UtilizationPolicy()(context) == (2, {})


@pytest.mark.parametrize("target_utilization", [0.0, -1.0, float("nan")])
def test_a_target_utilization_must_be_above_zero(target_utilization: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        UtilizationPolicy(target_utilization)


def test_replicas_record_utilization_and_requests_in_flight() -> None:
    assert load_metrics(ServerLoad(utilization=1.5, in_flight=40)) == {
        "headrace_utilization": 1.5,
        "headrace_in_flight": 40.0,
    }


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    with pytest.raises(ImportError, match=r"needs Ray Serve.*pip install '\.\[ray\]' in a checkout"):
        _ = headrace.ray.deployment


def test_importing_the_package_imports_no_ray() -> None:
    program = "import sys, headrace.ray, headrace.ray.scaling; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'deployments'"):
        _ = headrace.ray.deployments
    assert {"deployment", "UtilizationPolicy"} <= set(dir(headrace.ray))
    assert headrace.ray.UtilizationPolicy is UtilizationPolicy
