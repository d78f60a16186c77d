"""Arguments of `headrace.ray.deployment`; needs Ray, but no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray installs it and runs this file")

import headrace.ray


def test_options_of_ray_have_defaults_for_batching_and_drain() -> None:
    made = headrace.ray.deployment("models", drain_timeout_s=7.0)
    assert (made.name, made.num_replicas, made.max_ongoing_requests) == ("headrace", 1, 1000)
    assert made._deployment_config.graceful_shutdown_timeout_s == 17.0
    other = headrace.ray.deployment("models", name="vision", max_ongoing_requests=5, min_replicas=3)
    assert (other.name, other.num_replicas, other.max_ongoing_requests) == ("vision", 3, 5)


def test_more_replicas_at_most_than_at_least_scale_by_the_load() -> None:
    made = headrace.ray.deployment(
        "models", min_replicas=1, max_replicas=4, target_utilization=0.5, autoscaling_config={"upscale_delay_s": 3}
    )
    config = made._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s) == (1, 4, 3)
    assert config.policy.policy_function == "headrace.ray.scaling:UtilizationPolicy"
    assert config.policy.policy_kwargs == {"target_utilization": 0.5}


def test_paths_are_absolute_and_urls_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    urls = ("s3://bucket/models", "gs://bucket", "az://account/container", "hf://organisation/name@main/folder")
    made = headrace.ray.deployment("models", Path("other"), "~/third", "/fourth", *urls)
    paths = (str(tmp_path / "models"), str(tmp_path / "other"), "/home/somebody/third", "/fourth")
    assert made.func_or_class.options.repositories == (*paths, *urls)


@pytest.mark.parametrize(
    ("repositories", "options", "message"),
    [
        ((), {}, "no repository is given"),
        (("s4://bucket/models",), {}, "'s4://' is not a store"),
        (("s3:/bucket/models",), {}, "write two slashes"),
        (("models",), {"num_replicas": 2}, "write min_replicas"),
        (("models",), {"min_replicas": 2, "max_replicas": 1}, "at least min_replicas"),
        (("models",), {"min_replicas": 0}, "at least 1"),
        (("models",), {"max_replicas": 2, "target_utilization": 0}, "target_utilization is 0, it must be above 0"),
        (("models",), {"autoscaling_config": {"upscale_delay_s": 1}}, "needs max_replicas above min_replicas"),
    ],
)
def test_invalid_arguments_raise_here_and_not_in_the_cluster(
    repositories: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        headrace.ray.deployment(*repositories, **options)
