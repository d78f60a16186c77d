"""Load reports of the whole server (ORCA) in headers and trailers, with one process and with front ends."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from tritonclient.grpc import service_pb2

from tests.support.grpc_requests import STEPS_PER_S, STREAM, message, steps
from tests.support.load_balancing import add_timed_model
from tests.support.models import add_model, affine, busy
from tests.support.orca import TRAILER, call_report, call_trailers, orca_message
from tests.support.serving import Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_REPORTS = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
FORMAT = "endpoint-load-metrics-format"
X = np.ones((1, 16), np.float32)
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X[0].tolist()}]}).encode()
SERVERS = {"one process": (), "front ends": ("--front-ends", "2")}


@pytest.mark.parametrize("options", SERVERS.values(), ids=SERVERS.keys())
def test_every_response_has_a_report(options: Sequence[str], tmp_path: Path) -> None:
    """One server for all checks: most of the time is its start."""
    add_model(tmp_path / "repository", "affine", affine())
    add_model(tmp_path / "repository", "busy", busy())
    with serving(tmp_path / "repository", tmp_path, "--orca", "always", *options) as server:
        check_responses_over_http(server)
        check_another_format(server)
        check_errors(server)
        check_calls(server)
        status, report = call_report(server, STREAM, [message("affine", "", X)] * 3)
        assert (status, report is not None) == ("0", True)
        check_gauges(server)
        check_report_streams(server)
        channel = grpc.insecure_channel(server.grpc_address)
        waiting = report_stream(channel, 3600)
        next(waiting)
    with channel, pytest.raises(grpc.RpcError) as caught:  # the server has stopped
        next(waiting)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def http_report(server: Server, body: bytes = BODY, **headers: str) -> tuple[int, str]:
    """Status and report of one request for `affine`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, received, _ = server.request("POST", "/v2/models/affine/infer", body, named)
    return status, received.get("endpoint-load-metrics", "")


def fields(text: str) -> dict[str, float]:
    """Fields of a report as text."""
    kind, _, rest = text.partition(" ")
    assert kind == "TEXT", text
    pairs = (part.split("=") for part in rest.split(", "))
    return {name: float(value) for name, value in pairs}


def check_responses_over_http(server: Server) -> None:
    def rates() -> dict[str, float]:
        status, text = http_report(server)
        assert status == 200
        return fields(text)

    # Rows count when their batch is recorded, after its requests.
    until(lambda: (found := rates()).get("rps_fractional", 0) > 0 and found["application_utilization"] > 0)
    found = rates()
    assert {"named_metrics.queue_depth", "named_metrics.in_flight", "eps"} <= found.keys()


def check_another_format(server: Server) -> None:
    status, text = http_report(server, endpoint_load_metrics_format="json")
    kind, _, content = text.partition(" ")
    assert (status, kind) == (200, "JSON")
    assert json.loads(content)["named_metrics"]["queue_depth"] == 0
    assert http_report(server, endpoint_load_metrics_format="other")[1].startswith("TEXT ")


def check_errors(server: Server) -> None:
    """Failures of the server count as errors, those of the client do not."""

    def errors() -> float:
        for _ in range(2):
            assert http_report(server, b"{")[0] == 400
        status, text = http_report(server)
        assert status == 200
        return fields(text).get("eps", 1)

    until(lambda: errors() == 0)  # also after the failures of earlier tests
    late = (("x-request-timeout-ms", "1"),)
    status, report = call_report(server, INFER, [steps("", STEPS_PER_S // 10)], metadata=late)
    assert status in ("4", "14")  # DEADLINE_EXCEEDED, UNAVAILABLE
    assert report is not None
    until(lambda: fields(http_report(server)[1]).get("eps", 0) > 0)


def check_calls(server: Server) -> None:
    content = message("affine", "", X)
    until(lambda: call_report(server, INFER, [content])[1].rps_fractional > 0)
    status, report = call_report(server, INFER, [content])
    assert (status, report.application_utilization > 0) == ("0", True)
    assert report.named_metrics.keys() >= {"queue_depth", "in_flight", "predicted_wait_us"}
    status, report = call_report(server, INFER, [message("affine", "", np.ones((1, 3), np.float32))])
    assert (status, report is not None) == ("3", True)
    text = call_trailers(server, INFER, [content])[TRAILER]
    assert len(text) % 4 == 0, "padded: older releases of Envoy refuse base64 without padding"


def check_gauges(server: Server) -> None:
    status, _, content = server.request("GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in content.decode().splitlines() if not line.startswith("#"))
    assert status == 200
    assert float(lines["headrace_server_queue_depth"]) == 0
    assert float(lines["headrace_server_in_flight"]) >= 0
    assert float(lines["headrace_server_predicted_wait_seconds"]) >= 0
    assert float(lines["headrace_server_utilization_ratio"]) > 0


def report_stream(channel: grpc.Channel, interval_s: float) -> Any:
    """A stream of reports; the request is an OrcaLoadReportRequest with a Duration."""
    duration = duration_pb2.Duration(seconds=int(interval_s)).SerializeToString()
    request = b"\x0a" + bytes([len(duration)]) + duration
    return channel.unary_stream(STREAM_REPORTS, None, orca_message().FromString)(request, timeout=100)


def check_report_streams(server: Server) -> None:
    """Reports at once and in each interval, which is at least a second; cancellation; an invalid request."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        stream = report_stream(channel, 0)
        started_s = time.monotonic()
        reports = [next(stream) for _ in range(3)]
        assert time.monotonic() - started_s >= 1.9, "two intervals"
        assert reports[0].application_utilization >= 0
        assert not reports[0].named_metrics
        stream.cancel()
        assert stream.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(STREAM_REPORTS)(b"\xff", timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("option", ["on-request", "never"])
def test_without_always(option: str, tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "affine", affine())
    content, metadata = message("affine", "", X), ((FORMAT, "text"),)
    options = ("--orca", option)
    with serving(tmp_path / "repository", tmp_path, *options) as server:
        for path in (INFER, STREAM):
            assert call_report(server, path, [content]) == ("0", None)
            status, report = call_report(server, path, [content], metadata=metadata)
            assert (status, report is not None) == ("0", option == "on-request")
        with grpc.insecure_channel(server.grpc_address) as channel:
            if option == "never":
                with pytest.raises(grpc.RpcError) as caught:
                    next(report_stream(channel, 1))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            else:
                assert next(report_stream(channel, 1)).application_utilization >= 0
        assert http_report(server) == (200, "")
        code, text = http_report(server, endpoint_load_metrics_format="text")
        assert (code, bool(text)) == (200, option == "on-request")
        if text:
            assert {"rps_fractional", "eps", "application_utilization"} <= fields(text).keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_out_of_band", [False, True], ids=["trailers", "streams"])
def test_a_grpc_client_that_weighs_sends_less_to_the_slow_server(is_out_of_band: bool, tmp_path: Path) -> None:
    """The policy `weighted_round_robin` of gRPC's own client, before two servers."""
    policy: dict[str, object] = {"blackoutPeriod": "0.5s", "weightUpdatePeriod": "0.2s"}
    if is_out_of_band:
        policy |= {"enableOobLoadReport": True, "oobReportingPeriod": "1s"}
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    orca = "on-request" if is_out_of_band else "always"  # no report in responses
    for name, compute_ms in {"fast": 50, "slow": 250}.items():
        add_timed_model(tmp_path / name / "repository", compute_ms)
    with (
        serving(tmp_path / "fast" / "repository", tmp_path / "fast", "--orca", orca) as first,
        serving(tmp_path / "slow" / "repository", tmp_path / "slow", "--orca", orca) as second,
    ):
        servers = (first, second)
        target = "ipv4:" + ",".join(server.grpc_address for server in servers)
        content = message("timed", "", np.ones((1, 1), np.float32))

        def counts() -> list[int]:
            return [_requests(server) for server in servers]

        with grpc.insecure_channel(target, options=[("grpc.service_config", config)]) as channel:
            call = channel.unary_unary(INFER)

            def shares() -> tuple[int, int]:
                before = counts()
                for future in [call.future(content, timeout=60) for _ in range(24)]:
                    future.result()
                fast, slow = (after - earlier for after, earlier in zip(counts(), before, strict=True))
                return fast, slow

            until(lambda: (found := shares())[0] >= 2 * found[1] > 0)


def _requests(server: Server) -> int:
    _, _, content = server.request("GET", "/v2/models/timed/stats")
    (stats,) = json.loads(content)["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])
