"""Bottlenecks of a model, from a real server under a real load."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support import models
from tests.support.serving import Server, run_headrace, serving
from tests.support.waiting import on_threads


def explanation(server: Server, model: str, path: str = "") -> Any:
    status, headers, content = server.request("GET", f"/v2/models/{model}{path}/explain")
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(content)


def explanation_after(server: Server, model: str, batches: int) -> Any:
    """Once so many have been counted, which is a moment after they were answered."""
    deadline = time.monotonic() + 20
    while sum((report := explanation(server, model))["numbers"]["closed"].values()) < batches:
        assert time.monotonic() < deadline, report
    return report


def send_requests(server: Server, times: int) -> None:
    with triton.InferenceServerClient(server.address) as client:
        array = np.zeros((1, 16), np.float32)
        for _ in range(times):
            client.infer("affine", [triton.InferInput("X", [1, 16], "FP32").set_data_from_numpy(array)])


def test_a_delay_too_long_for_the_arrivals_is_reported_with_its_cure(tmp_path: Path) -> None:
    config = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 20000 }\n"
    models.add_model(tmp_path / "repository", "affine", models.affine(), config=config)
    with serving(tmp_path / "repository", tmp_path) as server:
        before = explanation(server, "affine")
        assert (before["limit"], before["numbers"]["requests_per_s"]) == ("idle", 0)
        send_requests(server, 20)
        report = explanation_after(server, "affine", 20)
        assert (report["name"], report["version"], report["limit"]) == ("affine", "1", "delay_too_long")
        assert "for others to share a batch, and a batch then holds 1.0" in report["summary"]
        assert report["findings"][0]["setting"] == "dynamic_batching.max_queue_delay_microseconds"
        assert report["numbers"]["queue_us"] > 15_000
        assert report["numbers"]["closed"] == {"delay": 20}
        printed = run_headrace("explain", "affine", "--url", server.url).stdout
        assert "delay_too_long" in printed
        on_threads(lambda times: send_requests(server, times), [30] * 4)
        assert explanation(server, "affine")["numbers"]["requests_per_batch"] > 1


def test_a_version_can_be_requested(server: Server) -> None:
    assert explanation(server, "versioned")["version"] == "20"
    assert explanation(server, "versioned", "/versions/3")["version"] == "3"


@pytest.mark.parametrize("path", ["/v2/models/nobody/explain", "/v2/models/versioned/versions/4/explain"])
def test_unknown_models_are_not_explained(server: Server, path: str) -> None:
    status, _, content = server.request("GET", path)
    assert status == 404
    assert "not found" in json.loads(content)["error"]


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_closed_loop_on_full_cores_is_reported_as_a_full_processor(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine(), config="max_batch_size: 8\n")
    others = [multiprocessing.get_context("spawn").Process(target=spin, args=(60,)) for _ in range(os.cpu_count() or 1)]
    with serving(tmp_path / "repository", tmp_path) as server:
        try:
            for each in others:
                each.start()
            deadline = time.monotonic() + 60
            while "the processor is full" not in (report := explanation(server, "affine"))["summary"]:
                assert time.monotonic() < deadline, report
                on_threads(lambda times: send_requests(server, times), [50] * 4)
        finally:
            for each in others:
                each.kill()
                each.join()
        assert "bursts" not in str(report)
        assert not [each for each in report["findings"] if each["setting"] == "instance_group"]
        assert report["numbers"]["server_cores"] < report["numbers"]["cores"]
