"""Hostile gRPC messages: whatever comes, the codec gives a request or raises `HeadraceError`, and never anything else."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse
from headrace.core.tensor import Array, ModelSpec
from headrace.wire.grpc.codec import GrpcCodec, scan
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from tests.support.echo_tensors import FLAT_SPEC, NAMES, SPEC, check_decoded, good_inputs, some_output
from tests.support.examples import examples

FIELDS = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1) | st.integers(0, 2),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bytes_contents": st.binary(max_size=3),
}


def feed(message: bytes, spec: ModelSpec = SPEC) -> None:
    """Decode twice (the second time may come from what was remembered), and answer if it was a request."""
    codec = GrpcCodec(spec)
    try:
        first, plan = codec.decode(message, scan(message), 1)
    except HeadraceError as error:
        assert str(error)
        with pytest.raises(type(error)):
            codec.decode(message, scan(message), 1)
        return
    event("a request")
    pb.ModelInferRequest.FromString(message)  # what we take, protobuf takes
    second, _ = codec.decode(message, scan(message), 1)
    check_decoded(spec, first, second)
    try:
        parts = codec.encode(InferResponse({name: some_output(name, spec) for name in NAMES}), plan, first.id)
    except HeadraceError as error:
        assert "classification" in str(error)
        return
    answer = pb.ModelInferResponse.FromString(b"".join(parts))
    assert [output.name for output in answer.outputs] == [requested.spec.name for requested in plan.outputs]
    assert answer.id == first.id


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, pb.InferParameter]:
    names = st.sampled_from(
        [
            "priority",
            "timeout",
            "headrace_deadline_us",
            "headrace_unordered",
            "classification",
            "binary_data",
            "sequence_id",
            "triton_x",
            "x",
            "shared_memory_region",
            "shared_memory_byte_size",
            "shared_memory_offset",
            "shared_memory_",
        ]
    )
    values = (
        st.builds(pb.InferParameter, int64_param=st.integers(-3, 20) | st.sampled_from([2**63 - 1, -(2**63)]))
        | st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1))
        | st.builds(pb.InferParameter, bool_param=st.booleans())
        | st.builds(pb.InferParameter, string_param=st.text(max_size=3))
        | st.builds(pb.InferParameter, double_param=st.floats())
        | st.builds(pb.InferParameter)
    )
    return draw(st.dictionaries(names, values, max_size=2))


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Messages that are mostly right, so that their one fault is reached."""
    message = pb.ModelInferRequest(model_name="echo", id=draw(st.text(max_size=4)))
    sizes = st.integers(1, 2) | st.sampled_from([0, -1, 2**31, 2**62, 2**63 - 1])
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        shape = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2) | st.lists(sizes, max_size=3))
        datatype = draw(st.just(name) | st.sampled_from(NAMES))
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if draw(st.booleans()):
            message.raw_input_contents.append(draw(st.binary(max_size=16)))
        elif draw(st.booleans()):
            field = draw(st.sampled_from(sorted(FIELDS)))
            getattr(tensor.contents, field).extend(draw(st.lists(FIELDS[field], max_size=4)))
        if draw(st.integers(0, 5)) == 0:
            _put(tensor.parameters, draw(parameters()))
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
        _put(message.outputs.add(name=name).parameters, draw(parameters()))
    if draw(st.booleans()):
        _put(message.parameters, draw(parameters()))
    return message


def _put(into: Any, values: dict[str, pb.InferParameter]) -> None:
    for name, value in values.items():
        into[name].CopyFrom(value)


@given(st.binary(max_size=200))
def test_any_bytes(message: bytes) -> None:
    feed(message)


@settings(max_examples=examples(300))
@given(messages(), st.sampled_from([SPEC, FLAT_SPEC]))
def test_anything_that_looks_like_a_request(message: pb.ModelInferRequest, spec: ModelSpec) -> None:
    feed(message.SerializeToString(), spec)


@given(messages())
def test_the_parser_matches_protobuf(message: pb.ModelInferRequest) -> None:
    wire = message.SerializeToString()
    envelope = scan(wire)
    assert (envelope.model_name, envelope.model_version, envelope.id) == ("echo", "", message.id)
    assert [wire[start : start + size] for start, size in envelope.spans] == list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    message.ClearField("id")
    assert pb.ModelInferRequest.FromString(envelope.header) == message


@given(st.binary(max_size=60))
def test_the_parser_refuses_everything_that_protobuf_refuses(wire: bytes) -> None:
    try:
        envelope = scan(wire)
        message = pb.ModelInferRequest.FromString(envelope.header)
    except (HeadraceError, DecodeError):
        return
    event("a message")
    whole = pb.ModelInferRequest.FromString(wire)
    assert (whole.model_name, whole.model_version, whole.id) == (
        envelope.model_name,
        envelope.model_version,
        envelope.id,
    )
    assert len(whole.raw_input_contents) == len(envelope.spans)
    assert not message.raw_input_contents


def wire_of(inputs: dict[str, Array], request_id: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name="echo", id=request_id)
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=name, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if name == "BYTES" else array.tobytes()
        message.raw_input_contents.append(raw)
    wire: bytes = message.SerializeToString()
    return wire


@given(good_inputs(), st.text(max_size=300))
def test_every_datatype_round_trips(inputs: dict[str, Array], request_id: str) -> None:
    wire = wire_of(inputs, request_id)
    codec = GrpcCodec(SPEC)
    request, plan = codec.decode(wire, scan(wire), 0)
    assert request.inputs.keys() == inputs.keys()
    for name, array in inputs.items():
        came = request.inputs[name]
        assert came.shape == array.shape
        assert came.tolist() == array.tolist() if name == "BYTES" else came.tobytes() == array.tobytes()
    rest = {name: some_output(name, SPEC) for name in NAMES if name not in inputs}
    answer = pb.ModelInferResponse.FromString(
        b"".join(codec.encode(InferResponse({**rest, **request.inputs}), plan, request_id))
    )
    assert answer.id == request_id
    result = InferResult(answer)
    for name, array in inputs.items():
        if name == "BYTES":
            assert result.as_numpy(name).tolist() == array.tolist()
        else:
            assert answer.raw_output_contents[NAMES.index(name)] == array.tobytes()
        assert list(result.get_output(name).shape) == list(array.shape)


@given(good_inputs(), st.data())
def test_a_request_with_some_bytes_changed(inputs: dict[str, Array], data: st.DataObject) -> None:
    message = bytearray(wire_of(inputs, "id"))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    feed(bytes(message))


@given(good_inputs(), st.integers(1, 8))
def test_a_request_cut_short_is_refused(inputs: dict[str, Array], count: int) -> None:
    message = wire_of(inputs)[:-count]
    with pytest.raises(HeadraceError):
        GrpcCodec(SPEC).decode(message, scan(message), 0)


def test_the_declared_number_of_elements_is_checked() -> None:
    for name in NAMES:
        message = pb.ModelInferRequest(raw_input_contents=[bytes(16)])
        message.inputs.add(name=name, datatype=name, shape=[1 << 30, 1 << 31])
        wire = message.SerializeToString()
        with pytest.raises(HeadraceError, match=f"'{name}'"):
            GrpcCodec(SPEC).decode(wire, scan(wire), 0)
