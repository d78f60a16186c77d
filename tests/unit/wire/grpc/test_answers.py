"""Messages of gRPC inference that go out: golden bytes, and what Triton's client makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton
from headrace.core.request import InferResponse
from headrace.core.tensor import FP32, ModelSpec, TensorSpec
from headrace.wire.grpc.codec import GrpcCodec
from tritonclient.grpc import service_pb2 as pb

from tests.support.grpc_messages import answer, codec, decode, request

S_WIRE = bytes.fromhex("0000803e 0000003f 0000003e 0000803f 000080bf 00000040")
T_WIRE = bytes.fromhex("03000000 796573 03000000 6ec3a9")


def test_a_golden_answer() -> None:
    one = codec()
    _, plan = decode(request(), of=one)
    wire = b"".join(one.encode(answer(), plan, "no 7"))
    assert wire == (
        bytes.fromhex(
            "0a016d 120133"  # model_name m, model_version 3
            "2a0d 0a0153 120446503332 1a020203"  # outputs: S FP32 [2, 3]
            "2a0e 0a0154 12054259544553 1a020201"  # outputs: T BYTES [2, 1]
            "1a04 6e6f2037"  # id
        )
        + (b"\x32\x18" + S_WIRE + b"\x32\x0e" + T_WIRE)
    )


def echo() -> GrpcCodec:
    """FP32 X (-1, -1) -> Y of the same shape."""
    x, y = (TensorSpec(name, FP32, (-1, -1)) for name in "XY")
    return GrpcCodec(ModelSpec("m", "1", "test", {"X": x}, {"Y": y}, 8))


def respond(*names: str, request_id: str = "", classes: int = 0, of: GrpcCodec | None = None) -> pb.ModelInferResponse:
    one = of or codec()
    requested = [triton.InferRequestedOutput(name, class_count=classes if name == "S" else 0) for name in names]
    _, plan = decode(request(outputs=requested), of=one)
    message: pb.ModelInferResponse = pb.ModelInferResponse.FromString(b"".join(one.encode(answer(), plan, request_id)))
    return message


@pytest.mark.parametrize("names", [(), ("S",), ("T",), ("T", "S")])
def test_tritons_client_reads_the_answer(names: tuple[str, ...]) -> None:
    message = respond(*names, request_id="né")
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "né")
    assert [output.name for output in message.outputs] == list(names or ("S", "T"))
    result = triton.InferResult(message)
    for name in names or ("S", "T"):
        assert result.as_numpy(name).tolist() == answer().outputs[name].tolist()


def test_classes() -> None:
    one = codec()
    for _ in range(2):
        result = triton.InferResult(respond("T", "S", classes=2, of=one))
        assert result.as_numpy("S").tolist() == [
            [b"0.500000:1:dog", b"0.250000:0:cat"],
            [b"2.000000:2", b"1.000000:0:cat"],
        ]
        # The same output as it is: what was remembered of the other does not show.
        assert triton.InferResult(respond("S", of=one)).as_numpy("S").shape == (2, 3)


def test_answers_of_changing_shapes() -> None:
    one = codec()
    _, plan = decode(request(), of=one)
    for rows in (*range(1, 1_100), 1, 2):
        scores = np.arange(rows * 3, dtype="<f4").reshape(rows, 3)
        text = np.full((rows, 1), b"x" * 50, object)
        wire = b"".join(one.encode(InferResponse({"S": scores, "T": text}), plan, ""))
        result = triton.InferResult(pb.ModelInferResponse.FromString(wire))
        assert result.as_numpy("S").shape == (rows, 3)
        assert result.as_numpy("T").tolist() == text.tolist()
    assert 0 < len(one._descriptions) <= 1024


def test_large_tensors_are_not_copied() -> None:
    one = echo()
    values = np.random.default_rng(0).standard_normal((1, 150_528)).astype("<f4")
    decoded, plan = decode(
        pb.ModelInferRequest(
            inputs=[pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=values.shape)],
            raw_input_contents=[values.tobytes()],
        ),
        of=one,
    )
    assert decoded.inputs["X"].tobytes() == values.tobytes()
    parts = one.encode(InferResponse({"Y": values}), plan, "")
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), values) for part in parts if len(part) > 100)
