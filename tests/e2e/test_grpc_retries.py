"""Retries of gRPC clients after refusals: a real client with a retry policy follows `grpc-retry-pushback-ms`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.grpc_requests import INFER, fail_count, message
from tests.support.models import add_model, affine
from tests.support.python_models import NAPPING, NAPPING_CONFIG, add_python_model
from tests.support.serving import Server, serving

PUSHBACK = "grpc-retry-pushback-ms"
X = np.ones((1, 16), np.float32)
# A quota that is full again after 5 s, 20 s and 100 s.
QUOTAS = {"brisk": 0.2, "slow": 0.05, "slowest": 0.01}


@pytest.fixture(scope="module", params=["one process", "front ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("retries")
    for name, requests_per_s in QUOTAS.items():
        limits = f"rate_limits: {{default: {{requests_per_s: {requests_per_s}, burst: 1}}}}\n"
        add_model(folder / "repository", name, affine(), files={"config.yaml": limits})
    add_python_model(folder / "repository", "napping", NAPPING, NAPPING_CONFIG)
    options = ("--front-ends", "1") if request.param == "front ends" else ()
    with serving(folder / "repository", folder, *options) as running:
        yield running


def retrying(server: Server, backoff_s: float) -> grpc.Channel:
    """A channel that tries a call up to five times, with pauses of its own of about `backoff_s`."""
    policy = {
        "maxAttempts": 5,
        "initialBackoff": f"{backoff_s:.3f}s",
        "maxBackoff": f"{backoff_s:.3f}s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    return grpc.insecure_channel(server.grpc_address, [("grpc.service_config", config)])


def refused(call: Any, model: str, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(message(model, "", X), **options)
    return caught.value


def test_a_call_over_its_quota_is_sent_again_when_the_quota_allows_it(server: Server) -> None:
    """The client's own pause would end after the deadline of the call."""
    with retrying(server, 120) as channel:
        call = channel.unary_unary(INFER)
        for _ in range(2):
            call(message("brisk", "", X), timeout=50)
    assert fail_count(server, "brisk") >= 1


def test_a_call_to_a_full_queue_is_sent_again_when_the_queue_is_shorter(server: Server) -> None:
    with retrying(server, 120) as channel:
        call = channel.unary_unary(INFER)
        running = [call.future(message("napping", "", X), timeout=50) for _ in range(3)]
        for each in running:
            each.result(60)
    assert fail_count(server, "napping") >= 1


def test_a_call_is_not_sent_again_if_the_pause_is_longer_than_a_minute(server: Server) -> None:
    with retrying(server, 0.001) as channel:
        call = channel.unary_unary(INFER)
        call(message("slowest", "", X))
        error = refused(call, "slowest")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(error.trailing_metadata())
    assert (trailers[PUSHBACK], 60 < int(trailers["retry-after"]) <= 100) == ("-1", True)
    assert fail_count(server, "slowest") == 1


def test_a_call_is_not_sent_again_if_its_deadline_is_before_the_retry(server: Server) -> None:
    """Without -1 the client would wait until its deadline, for nothing."""
    with retrying(server, 0.001) as channel:
        call = channel.unary_unary(INFER)
        call(message("slow", "", X))
        error = refused(call, "slow", timeout=8)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())[PUSHBACK] == "-1"
    assert fail_count(server, "slow") == 1
