"""ModelStreamInfer on a server with front ends: answers and errors are those of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.support import models
from tests.support.grpc_requests import INFER, STREAM, Collector, message, tensor
from tests.support.serving import Server, serving
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")
pb: Any = service_pb2
X = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server with front ends, and one without; `spare` is loaded by tests."""
    repository = tmp_path_factory.mktemp("streams") / "repository"
    for name in ("row_sums", "spare"):
        models.add_model(repository, name, models.row_sums())
    models.add_model(repository, "affine", models.affine())
    options = ("--model-control", "explicit")
    options += ("--load-model", "row_sums", "--load-model", "affine")
    many, one = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("one")
    with (
        serving(repository, many, *options, "--front-ends", "2") as first,
        serving(repository, one, *options, "--front-ends", "0") as second,
    ):
        yield [first, second]


def streamed(server: Server, messages: list[bytes], metadata: Any = ()) -> list[Any]:
    """Responses to messages on one stream, and the error that ended it, None for none."""
    answers: list[Any] = []
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.stream_stream(STREAM)(iter(messages), timeout=60, metadata=metadata)
        try:
            answers.extend(pb.ModelStreamInferResponse.FromString(answer) for answer in call)
        except grpc.RpcError as error:
            return [*answers, (error.code(), error.details(), sorted(key for key, _ in error.trailing_metadata()))]
    return [*answers, None]


def unordered(request: bytes) -> bytes:
    parsed = pb.ModelInferRequest.FromString(request)
    parsed.parameters["headrace_unordered"].bool_param = True
    return bytes(parsed.SerializeToString())


MESSAGES = {
    "served": [message("row_sums", str(n), X) for n in range(40)],
    "unknown models between served ones": [
        message("row_sums" if n % 3 else "nothing", str(n), X, name="X") for n in range(40)
    ],
    "unloaded": [message("spare", "a", X), message("row_sums", "b", X)],
    "wrong shape": [message("affine", "a", X), message("row_sums", "b", X)],
    "no message": [b"\xff no message", message("row_sums", "b", X)],
    "no model": [message("", "a", X)],
    "large": [message("row_sums", "a", np.ones((1, 200_000), np.float32)), message("row_sums", "b", X)],
    "large and unknown": [message("nothing", "a", np.ones((1, 600_000), np.float32)), message("row_sums", "b", X)],
    "nothing": [],
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("ends_stream", [False, True], ids=["errors in the stream", "errors end it"])
def test_answers_and_errors_equal_those_of_one_process(servers: list[Server], name: str, ends_stream: bool) -> None:
    metadata = (("triton_grpc_error", "true"),) if ends_stream else ()
    many, one = (streamed(server, MESSAGES[name], metadata) for server in servers)
    assert many == one
    assert ends_stream or [each.infer_response.id for each in many[:-1] if each is not None] or name == "nothing"


def test_unordered_requests_of_unknown_models_delay_no_other(servers: list[Server]) -> None:
    sent = [unordered(message("nothing" if n % 2 else "row_sums", str(n), X)) for n in range(20)]
    many, one = (streamed(server, sent) for server in servers)
    assert many.pop() is None
    assert one.pop() is None
    assert {each.infer_response.id: each.error_message for each in many} == {
        each.infer_response.id: each.error_message for each in one
    }


def test_a_model_that_is_loaded_while_the_stream_is_open_answers(servers: list[Server]) -> None:
    """Before, its requests are refused by the engine; then they are served, on the same stream."""
    server = servers[0]
    collect = Collector()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(collect)
        client.async_stream_infer("spare", [tensor("X", X)], request_id="0")
        ((_, error),) = collect.take(1)
        assert "spare" in str(error)
        client.load_model("spare")
        client.async_stream_infer("spare", [tensor("X", X)], request_id="1")
        ((result, error),) = collect.take(1)
        assert error is None
        assert result.as_numpy("SUM").tolist() == [[6.0]]
        client.unload_model("spare")
        client.async_stream_infer("spare", [tensor("X", X)], request_id="2")
        ((_, error),) = collect.take(1)
        assert "spare" in str(error)
        client.stop_stream()


def failures(server: Server, protocol: str = "grpc") -> float:
    text = server.request("GET", "/metrics")[2].decode()
    lines = [line for line in text.splitlines() if line.startswith(f'headrace_errors_total{{protocol="{protocol}"')]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_errors_are_counted_once(servers: list[Server]) -> None:
    for server in servers:
        before = failures(server)
        sent = [message("nothing", "", X), message("affine", "", X), b"\xff", message("row_sums", "", X)]
        assert len(streamed(server, sent)) == 5
        until(lambda server=server, before=before: failures(server) == before + 3)


def test_a_cancelled_stream_leaves_the_server_usable(servers: list[Server]) -> None:
    server = servers[0]
    with grpc.insecure_channel(server.grpc_address) as channel:
        for _ in range(3):
            call = channel.stream_stream(STREAM)(iter(MESSAGES["unknown models between served ones"]), timeout=60)
            next(call)
            call.cancel()
        answer = channel.unary_unary(INFER)(message("row_sums", "", X), timeout=60)
        assert pb.ModelInferResponse.FromString(answer).raw_output_contents
    assert streamed(server, MESSAGES["served"])[-1] is None
    assert "Traceback" not in server.text
