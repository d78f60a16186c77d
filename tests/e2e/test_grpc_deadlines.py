"""Deadlines, cancellation and the drain reach the request in the queue, as the metrics show."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.grpc_requests import STEPS_PER_S, depth, fail_count, gate_request, gauge, message, steps, tensor
from tests.support.models import add_model, busy, row_sums
from tests.support.python_models import Gate
from tests.support.serving import HOST, Server, accepts, look_quick, serving, start
from tests.support.waiting import until

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def steps_tensor(count: int) -> triton.InferInput:
    return triton.InferInput("STEPS", [1], "INT64").set_data_from_numpy(np.array([count], np.int64))


@pytest.fixture(scope="module")
def channel(gated: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(gated.grpc_address) as opened:
        yield opened


def executions(server: Server, channel: grpc.Channel) -> int:
    """Counts of `gate` without running cancelled requests; reading them takes an execution of its own."""
    channel.unary_unary(INFER)(gate_request())
    with triton.InferenceServerClient(server.grpc_address) as client:
        (stats,) = client.get_inference_statistics("gate").model_stats
        return int(stats.execution_count)


def hold(server: Server, channel: grpc.Channel, model: str, request: bytes) -> grpc.Future:
    """A request that occupies the only instance of a model."""
    before = gauge(server, "headrace_in_flight", model)
    call = channel.unary_unary(INFER).future(request)
    until(lambda: gauge(server, "headrace_in_flight", model) == before + 1)
    return call


def test_a_deadline_removes_the_request_from_the_queue(gated: Server, gate: Gate, channel: grpc.Channel) -> None:
    before = executions(gated, channel)
    gate.close()
    first = hold(gated, channel, "gate", gate_request())
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(gate_request(), timeout=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: depth(gated, "gate") == 0)
    gate.open()
    first.result(60)
    until(lambda: gauge(gated, "headrace_in_flight", "gate") == 0)
    assert executions(gated, channel) - before == 2


def test_the_deadline_of_the_request_itself(grpc_server: Server, grpc_client: triton.InferenceServerClient) -> None:
    steps_per_s = look_quick(grpc_server)
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        grpc_client.infer("busy", [steps_tensor(2 * steps_per_s)], parameters={"headrace_deadline_us": 500_000})
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_cancelling_removes_the_request_from_the_queue(gated: Server, gate: Gate, channel: grpc.Channel) -> None:
    before, failed = executions(gated, channel), fail_count(gated, "gate")
    gate.close()
    first = hold(gated, channel, "gate", gate_request())
    errors: list[Any] = []
    with triton.InferenceServerClient(gated.grpc_address) as client:
        call = client.async_infer(
            "gate", [tensor("IN", np.ones(1, np.int64), "INT64")], lambda result, error: errors.append(error)
        )
        until(lambda: depth(gated, "gate") == 1)
        call.cancel()
        until(lambda: depth(gated, "gate") == 0)
        gate.open()
        first.result(60)
        until(lambda: gauge(gated, "headrace_in_flight", "gate") == 0)
        assert executions(gated, channel) - before == 2
        assert fail_count(gated, "gate") - failed == 1
        until(lambda: errors)
    assert "cancelled" in str(errors[0]).lower()


def test_a_broken_connection_cancels_its_requests(gated: Server, gate: Gate, channel: grpc.Channel) -> None:
    gate.close()
    first = hold(gated, channel, "gate", gate_request())
    private = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(gated.grpc_address, options=private) as other:
        calls = [other.unary_unary(INFER).future(gate_request()) for _ in range(3)]
        until(lambda: depth(gated, "gate") == 3)
    until(lambda: depth(gated, "gate") == 0)
    assert [call.code() for call in calls] == [grpc.StatusCode.CANCELLED] * 3
    gate.open()
    first.result(60)
    until(lambda: gauge(gated, "headrace_in_flight", "gate") == 0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    add_model(tmp_path / "models", "busy", busy())
    add_model(tmp_path / "models", "row_sums", row_sums())
    return tmp_path / "models"


def test_the_drain_answers_running_requests_and_ends_open_streams(small: Path, tmp_path: Path) -> None:
    gate = Gate(small)
    with serving(small, tmp_path, "--drain-timeout-s", "90") as server:
        ended: list[Any] = []
        with grpc.insecure_channel(server.grpc_address) as channel:
            hold_open = threading.Event()

            def messages() -> Any:
                yield message("row_sums", "s", np.ones((1, 2), np.float32))
                hold_open.wait(90)

            stream = channel.stream_stream(STREAM)(messages())
            assert pb.ModelStreamInferResponse.FromString(next(stream)).infer_response.id == "s"
            stream.add_callback(lambda: ended.append(stream.code()))
            gate.close()
            running = hold(server, channel, "gate", gate_request())
            queued = channel.unary_unary(INFER).future(gate_request("q"))
            until(lambda: depth(server, "gate") == 1)
            began = time.monotonic()
            server.signal()
            until(lambda: not accepts(server.port))
            gate.open()
            assert pb.ModelInferResponse.FromString(running.result(60)).outputs
            assert pb.ModelInferResponse.FromString(queued.result(60)).id == "q"
            assert server.wait() == 0
            hold_open.set()
            assert time.monotonic() - began < 80
            until(lambda: ended)
            assert ended == [grpc.StatusCode.UNAVAILABLE]


def test_requests_still_open_after_the_drain(small: Path, tmp_path: Path) -> None:
    with serving(small, tmp_path, "--drain-timeout-s", "1") as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            running = hold(server, channel, "busy", steps("", 60 * STEPS_PER_S))
            queued = channel.unary_unary(INFER).future(steps("q", 1))
            until(lambda: depth(server, "busy") == 1)
            server.signal()
            for call in (running, queued):
                with pytest.raises(grpc.RpcError) as caught:
                    call.result(60)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.process.kill()  # its instance still computes; how it ends then is the process's test
        server.process.wait()
        server.process.returncode = 0


def test_a_port_in_use_is_reported(small: Path, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as occupied:
        port = occupied.getsockname()[1]
        server = start(small, tmp_path / "log", "--grpc-port", str(port))
        assert server.wait() == 1
        assert "in use" in server.text
        assert str(port) in server.text
        assert "Traceback" not in server.text
