"""The same calls to both gRPC engines have the same outcome: messages, status, texts, trailers; unary, streams, compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.e2e.conftest import MAX_BODY_BYTES
from tests.support.serving import Server

SERVICE = "/inference.GRPCInferenceService/"
X = np.arange(16, dtype="<f4").reshape(1, 16)


def message(model: str = "affine", content: bytes = X.tobytes(), **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=[1, 16])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[content], **more)


def with_parameter(name: str, value: int) -> pb.ModelInferRequest:
    request = message()
    request.parameters[name].int64_param = value
    return request


UNARY: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "right": ("ModelInfer", message(id="7").SerializeToString(), {}),
    "gzip": ("ModelInfer", message(id="g").SerializeToString(), {"compression": grpc.Compression.Gzip}),
    "deflate": ("ModelInfer", message(id="d").SerializeToString(), {"compression": grpc.Compression.Deflate}),
    "metadata": ("ModelInfer", message().SerializeToString(), {"metadata": (("x-custom", "1"), ("x-bin", b"\0\xff"))}),
    "no model": ("ModelInfer", message("absent").SerializeToString(), {}),
    "an unloadable model": ("ModelInfer", message("broken_file").SerializeToString(), {}),
    "a short tensor": ("ModelInfer", message(content=b"1234").SerializeToString(), {}),
    "no protobuf": ("ModelInfer", b"\xff\xff\xff", {}),
    "an empty message": ("ModelInfer", b"", {}),
    "too large": ("ModelInfer", b"\0" * (MAX_BODY_BYTES + 1), {}),
    "a wrong parameter": ("ModelInfer", with_parameter("sequence_id", 5).SerializeToString(), {}),
    "an unknown method": ("ModelDream", b"", {}),
    "live": ("ServerLive", b"", {}),
    "metadata of a model": ("ModelMetadata", pb.ModelMetadataRequest(name="affine").SerializeToString(), {}),
    "configuration": ("ModelConfig", pb.ModelConfigRequest(name="affine").SerializeToString(), {}),
    "no configuration": ("ModelConfig", pb.ModelConfigRequest(name="absent").SerializeToString(), {}),
    "no region": ("SystemSharedMemoryUnregister", b"\x0a\x05hello", {}),
}
STREAMS: dict[str, tuple[list[bytes], dict[str, Any]]] = {
    "right": ([message(id=f"{number}").SerializeToString() for number in range(20)], {}),
    "gzip": (
        [message(id=f"{number}").SerializeToString() for number in range(5)],
        {"compression": grpc.Compression.Gzip},
    ),
    "errors between": (
        [
            message(id="a").SerializeToString(),
            message("absent", id="b").SerializeToString(),
            message(content=b"1", id="c").SerializeToString(),
            message(id="d").SerializeToString(),
        ],
        {},
    ),
    "no protobuf": ([b"\xff\xff"], {}),
    "empty": ([], {}),
    "too large": ([b"\0" * (MAX_BODY_BYTES + 1)], {}),
}
# grpcio's own words where the engine itself, not the service, refuses.
OTHER_TEXTS = {"an unknown method", "too large"}
# A load report has figures of the moment.
CHANGING = {"endpoint-load-metrics-bin"}


def outcome(call: Callable[[], Any], read: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Answer, status, text, names of initial metadata and trailers of one call."""
    answer: Any = None
    try:
        running = call()
        answer = read(running)
        status: Any = running
    except grpc.RpcError as error:
        status = error
    trailers = {(name, value) for name, value in status.trailing_metadata() or () if name not in CHANGING}
    return answer, status.code(), status.details(), trailers


@pytest.fixture(scope="module")
def channels(grpcio_server: Server, fast_server: Server) -> Iterator[list[grpc.Channel]]:
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    opened = [grpc.insecure_channel(server.grpc_address, options=unbounded) for server in (grpcio_server, fast_server)]
    yield opened
    for channel in opened:
        channel.close()


@pytest.mark.parametrize("name", UNARY)
def test_unary_calls(channels: list[grpc.Channel], name: str) -> None:
    method, content, options = UNARY[name]

    def one(channel: grpc.Channel) -> tuple[Any, ...]:
        call: Any = channel.unary_unary(SERVICE + method)
        return outcome(lambda: call.with_call(content, timeout=30, **options)[1], lambda _: None)

    def answer(channel: grpc.Channel) -> bytes | None:
        try:
            return bytes(channel.unary_unary(SERVICE + method)(content, timeout=30, **options))
        except grpc.RpcError:
            return None

    theirs, ours = (one(channel) for channel in channels)
    if name in OTHER_TEXTS:
        assert ours[1] == theirs[1]
        assert ours[2]
        return
    assert ours == theirs
    assert answer(channels[1]) == answer(channels[0])


@pytest.mark.parametrize("name", STREAMS)
def test_streams(channels: list[grpc.Channel], name: str) -> None:
    messages, options = STREAMS[name]

    def one(channel: grpc.Channel) -> tuple[Any, ...]:
        call: Any = channel.stream_stream(SERVICE + "ModelStreamInfer")
        return outcome(lambda: call(iter(messages), timeout=30, **options), lambda running: sorted(running))

    theirs, ours = (one(channel) for channel in channels)
    if name in OTHER_TEXTS:
        assert ours[1] == theirs[1]
        return
    assert ours == theirs
    if name in ("right", "gzip"):
        assert len(ours[0]) == len(messages)
