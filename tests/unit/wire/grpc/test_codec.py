"""Messages of gRPC inference that come in: golden bytes, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from headrace.core.errors import BadRequest
from headrace.wire.grpc import codec as codec_module
from headrace.wire.grpc.codec import scan
from tritonclient.grpc import service_pb2 as pb

from tests.support.grpc_messages import A, B, codec, decode, request, tensor


def changed(**fields: Any) -> pb.ModelInferRequest:
    """The request of the client with one field of its input B changed."""
    message = request()
    for name, value in fields.items():
        if name == "shape":
            message.inputs[1].shape[:] = value
        else:
            setattr(message.inputs[1], name, value)
    return message


def request_with(**parameters: pb.InferParameter) -> pb.ModelInferRequest:
    """The client's request with parameters that the client itself would not send so."""
    message = request()
    for name, parameter in parameters.items():
        message.parameters[name].CopyFrom(parameter)
    return message


def test_a_golden_request() -> None:
    wire = bytes.fromhex(
        "0a016d 120133 1a026964"  # model_name m, model_version 3, id "id"
        "2a0e 0a0141 1205494e543332 1a020202"  # inputs: A INT32 [2, 2]
        "2a0d 0a0142 120446503332 1a020201"  # inputs: B FP32 [2, 1]
        "3a10 01000000 02000000 03000000 04000000"
        "3a08 0000003f 0000c03f"
    )
    message = pb.ModelInferRequest.FromString(wire)
    message.model_version = ""
    assert message == request(request_id="id")  # the bytes are what Triton's client says
    envelope = scan(wire)
    assert (envelope.model_name, envelope.model_version, envelope.id) == ("m", "3", "id")
    assert envelope.header == wire[:6] + wire[10:41]
    assert envelope.spans == [(43, 16), (61, 8)]
    decoded, _ = codec().decode(wire, envelope, 1_000)
    assert decoded.inputs["A"].tolist() == [[1, 2], [3, 4]]
    assert decoded.inputs["B"].tolist() == [[0.5], [1.5]]
    assert (decoded.inputs["A"].dtype, decoded.inputs["B"].dtype) == ("<i4", "<f4")
    assert (decoded.rows, decoded.received_ns, decoded.id, decoded.size_bytes) == (2, 1_000, "id", len(wire))


def test_a_message_of_the_size_of_an_earlier_one_is_read_by_its_own_bytes() -> None:
    first, second = request().SerializeToString(), request().SerializeToString()
    assert scan(second) is scan(first)  # compared, not read
    for position in range(len(first)):  # every byte counts: of names, tags and sizes, but not of tensors
        other = bytearray(first)
        other[position] ^= 1
        answers = []
        for message in (bytes(other), bytes(other)):
            try:
                envelope = scan(message)
                answers.append((envelope.model_name, envelope.header, envelope.spans))
            except BadRequest as error:
                answers.append(str(error))
            codec_module._repeated.clear()
        assert answers[0] == answers[1], position
        scan(first)


def test_a_repeated_message_has_its_own_tensors_and_sizes() -> None:
    read, first = codec(), request()
    second, moved = request(), request()
    second.raw_input_contents[0] = np.array([5, 6, 7, 8], "<i4").tobytes()
    contents = first.raw_input_contents
    moved.raw_input_contents[0], moved.raw_input_contents[1] = contents[0] + contents[1][:4], contents[1][4:]
    for message, expected in ((first, [[1, 2], [3, 4]]), (second, [[5, 6], [7, 8]])) * 2:
        wire = message.SerializeToString()
        assert decode(wire, read)[0].inputs["A"].tolist() == expected
    for _ in range(3):  # as many bytes in all
        with pytest.raises(BadRequest, match="20 bytes"):
            decode(moved.SerializeToString(), read)


def test_tensors_are_views_of_the_message() -> None:
    wire = request().SerializeToString()
    decoded, _ = decode(wire)
    whole = np.frombuffer(wire, np.uint8)
    assert np.shares_memory(decoded.inputs["A"], whole)
    assert np.shares_memory(decoded.inputs["B"], whole)


def test_fields_may_have_any_order_and_unknown_ones_are_skipped() -> None:
    message = request(request_id="7", priority=3)
    alone = [
        pb.ModelInferRequest(**{name: getattr(message, name)}).SerializeToString()
        for name in ("raw_input_contents", "id", "parameters", "inputs", "model_version", "model_name")
    ]
    strangers = [
        bytes.fromhex("4801"),  # field 9, varint
        bytes.fromhex("80010a"),  # field 16, varint
        bytes.fromhex("51") + bytes(8),  # field 10, 64 bits
        bytes.fromhex("5d") + bytes(4),  # field 11, 32 bits
        bytes.fromhex("8201 03 616263"),  # field 16, three bytes
        bytes.fromhex("48 ffffffffffffffffff01"),  # field 9, the largest varint
    ]
    wire = b"".join(part for pair in zip(strangers, alone, strict=True) for part in pair)
    decoded, plan = decode(wire)
    assert decoded.inputs["A"].tolist() == A.tolist()
    assert decoded.inputs["B"].tolist() == B.tolist()
    assert (decoded.id, plan.priority) == ("7", 3)
    assert scan(wire).model_name == "m"


def test_the_last_of_repeated_single_fields_counts_as_in_protobuf() -> None:
    wire = (
        pb.ModelInferRequest(model_name="x", id="1").SerializeToString() + request(request_id="2").SerializeToString()
    )
    envelope = scan(wire)
    assert (envelope.model_name, envelope.id) == ("m", "2")
    assert pb.ModelInferRequest.FromString(wire).id == "2"


def test_attributes_of_a_decoded_request() -> None:
    parameters = {"my own": "x", "f": 1.5, "headrace_deadline_us": 5, "headrace_unordered": True}
    decoded, plan = decode(request(request_id="no 7", priority=2, timeout=7, parameters=parameters))
    assert (decoded.id, decoded.priority, plan.unordered) == ("no 7", 2, True)
    assert (decoded.deadline_ns, decoded.queue_timeout_ns) == (1_000 + 5_000, 7_000)
    plain, plan = decode(request())
    assert (plain.id, plain.priority, plain.deadline_ns, plain.queue_timeout_ns) == ("", 0, 0, 0)
    assert not plan.unordered


@pytest.mark.parametrize(
    ("deadline_us", "transport_ns", "expected_ns"),
    [(0, 0, 0), (0, 9_000, 9_000), (5, 0, 6_000), (5, 9_000, 6_000), (5, 2_000, 2_000), (-1, 9_000, 9_000)],
)
def test_the_earlier_deadline_counts(deadline_us: int, transport_ns: int, expected_ns: int) -> None:
    """Triton's `timeout` is none: it is shorter than all of them."""
    wire_request = request(timeout=1, parameters={"headrace_deadline_us": deadline_us})
    decoded, _ = decode(wire_request, deadline_ns=transport_ns)
    assert (decoded.deadline_ns, decoded.queue_timeout_ns) == (expected_ns, 1_000)


def test_repeated_headers_are_parsed_once_for_any_id() -> None:
    one = codec()
    _, first = decode(request(request_id="1"), of=one)
    other = [tensor("A", A[::-1].copy()), tensor("B", B)]
    decoded, second = decode(request(other, request_id="2"), of=one)
    assert second is first
    assert decoded.id == "2"
    assert decoded.inputs["A"].tolist() == [[3, 4], [1, 2]]


def test_few_headers_are_remembered_and_none_with_contents() -> None:
    one = codec()
    decode(typed("B", "fp32_contents", [1, 2]), of=one)
    assert len(one._templates) == 0
    for columns in range(1, 1_000):
        decode(request([tensor("A", A), tensor("B", np.zeros((2, columns), np.float32))]), of=one)
    assert 0 < len(one._templates) <= 256


def typed(name: str, field: str, values: Sequence[Any], **fields: Any) -> pb.ModelInferRequest:
    """A and B in typed contents, one of them as given."""
    message = pb.ModelInferRequest(model_name="m")
    for each, kind, default, array in (("A", "INT32", "int_contents", A), ("B", "FP32", "fp32_contents", B)):
        entry = message.inputs.add(name=each, datatype=kind, shape=array.shape)
        if each == name:
            getattr(entry.contents, field).extend(values)
            for key, value in fields.items():
                getattr(entry.contents, key).extend(value)
        else:
            getattr(entry.contents, default).extend(array.reshape(-1).tolist())
    return message


def test_typed_and_raw_contents_are_not_mixed() -> None:
    message = typed("A", "int_contents", [1, 2, 3, 4])
    message.raw_input_contents.append(A.tobytes())
    with pytest.raises(BadRequest, match="input 'A' has contents, but raw_input_contents came too"):
        decode(message)
    message = typed("A", "int_contents", [1, 2, 3, 4])
    message.inputs[1].ClearField("contents")
    with pytest.raises(
        BadRequest, match="0 raw_input_contents came, expected 1: one for each input that has no contents"
    ):
        decode(message)


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_another_number_of_raw_contents(count: int) -> None:
    message = request()
    del message.raw_input_contents[:]
    message.raw_input_contents.extend([A.tobytes()] * count)
    one = codec()
    for _ in range(2):  # read, and remembered
        with pytest.raises(BadRequest, match=f"{count} raw_input_contents came, expected 2"):
            decode(message, of=one)


REFUSED: list[tuple[pb.ModelInferRequest, str]] = [
    (request([]), r"model 'm' needs the inputs \['A', 'B'\]"),
    (request([tensor("A", A)]), r"model 'm' needs the inputs \['B'\]"),
    (request([tensor("A", A), tensor("A", A)]), "input 'A' occurs twice: send it once"),
    (changed(name="C"), r"model 'm' has no input 'C'; its inputs are \['A', 'B'\]"),
    (changed(datatype="FP64"), "input 'B' has datatype 'FP64', expected FP32"),
    (changed(datatype="x" * 10**6), "input 'B' has datatype 'x+', expected FP32"),
    (changed(shape=[2]), r"input 'B' of model 'm' has shape \[2\], expected \[-1, -1\]"),
    (changed(shape=[0, 1]), "the first dimension is the batch, it must be at least 1"),
    (changed(shape=[2, 0]), r"8 bytes came for shape \[2, 0\] of FP32, expected 0"),
    (changed(shape=[2, 0, 1]), r"expected \[-1, -1\]"),
    (changed(shape=[2, -1]), "every dimension must be at least 0"),
    (changed(shape=[2, 2**62]), "more elements than any memory holds"),
    (changed(shape=[2, 2]), r"input 'B': 8 bytes came for shape \[2, 2\] of FP32, expected 16"),
    (changed(shape=[1, 2]), r"number of rows .* \{'A': 2, 'B': 1\}"),
    (request(outputs=[triton.InferRequestedOutput("U")]), r"model 'm' has no output 'U'; its outputs are \['S', 'T'\]"),
    (request(outputs=[triton.InferRequestedOutput("S", class_count=-1)]), "classification must be at least 1"),
    (request_with(priority=pb.InferParameter(string_param="high")), "'priority' must be a whole number, not str"),
    (request_with(timeout=pb.InferParameter(double_param=1.5)), "'timeout' must be a whole number, not float"),
    (request_with(timeout=pb.InferParameter(bool_param=False)), "'timeout' must be a whole number, not bool"),
    (request(parameters={"headrace.x": 1}), "'headrace.x' is reserved"),
    (request_with(triton_x=pb.InferParameter(bool_param=True)), "'triton_x' is reserved"),
    (request_with(p=pb.InferParameter()), "parameter 'p' has no value"),
    (request(parameters={str(n): n for n in range(2_000)}), "2000 parameters came, at most 1024 are allowed"),
    (
        request_with(shared_memory_region=pb.InferParameter(string_param="r")),
        "belongs to an input or an output, not to the request",
    ),
    (typed("B", "fp32_contents", []), r"0 elements came in fp32_contents for shape \[2, 1\], expected 2"),
    (typed("B", "fp32_contents", [1, 2, 3]), r"3 elements came in fp32_contents for shape \[2, 1\], expected 2"),
    (typed("B", "fp32_contents", [1, 2], int_contents=[1]), "its contents go into fp32_contents, not int_contents"),
]


@pytest.mark.parametrize(("message", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_requests_that_are_refused(message: pb.ModelInferRequest, words: str) -> None:
    one = codec()
    for _ in range(2):
        with pytest.raises(BadRequest, match=words) as caught:
            decode(message, of=one)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("sequence_id", [5, "five"])
def test_sequence_parameters_are_ignored(sequence_id: int | str) -> None:
    """As in Triton on a model without sequences."""
    decoded, _ = decode(request(sequence_id=sequence_id, sequence_start=True, sequence_end=True))
    assert decoded.rows == decode(request())[0].rows


NO_MESSAGE: list[tuple[str, str]] = [
    ("0a", "ends in the middle of a field"),
    ("0a02 6d", "ends in the middle of a field"),
    ("3a01", "ends in the middle of a field"),
    ("8201 01", "ends in the middle of a field"),
    ("3a80", "ends in the middle of a field"),
    ("3aff7f 00", "ends in the middle of a field"),
    ("3affffffff0f 00", "ends in the middle of a field"),
    ("48", "ends in the middle of a field"),
    ("48 80", "ends in the middle of a field"),
    ("51 00", "ends in the middle of a field"),
    ("8201 05 00", "ends in the middle of a field"),
    ("08 01", "field 1 is there with wire type 0"),
    ("3d 00000000", "field 7 is there with wire type 5"),
    ("2b 2c", "field 5 is there with wire type 3"),
    ("ba00 00", "field 7 is there with wire type 2, or its tag is longer than it needs to be"),
    ("8a808000 01 6d", "field 1 is there"),
    ("02 00", "field 0 is there"),
    ("00 00", "field 0 is there"),
    ("4b 4c", "field 9 has wire type 3"),
    ("4f 00", "field 9 has wire type 7"),
    ("3a 808080808000", "a number has more than 5 bytes"),
    ("ffffffffff7f 00", "a number has more than 5 bytes"),
    ("48 ffffffffffffffffffff01", "a number has more than 10 bytes"),
    ("0a 01 ff", "must be UTF-8 text"),
    ("1a 02 c328", "must be UTF-8 text"),
]


@pytest.mark.parametrize(("wire", "words"), NO_MESSAGE)
def test_bytes_that_are_no_message(wire: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        scan(bytes.fromhex(wire))


def test_fields_that_do_not_parse() -> None:
    wire = bytes.fromhex("2a 03 0a 05 41")  # an input whose name ends beyond it
    with pytest.raises(BadRequest, match="its fields do not parse"):
        decode(wire)


@pytest.mark.parametrize("field", ["3a00", "2a00", "2200", "1a00"])
def test_the_number_of_fields_is_bounded(field: str) -> None:
    assert scan(bytes.fromhex(field) * 4096)
    with pytest.raises(BadRequest, match="more than 4096 fields"):
        scan(bytes.fromhex(field) * 4097)


def test_a_model_without_a_batch_dimension() -> None:
    one = codec(batch=0)
    message = request([tensor("A", A[0]), tensor("B", np.zeros(4, np.float32))])
    decoded, _ = decode(message, of=one)
    assert decoded.rows == 1


def test_an_optional_input_may_be_left_out_and_such_requests_queue_apart() -> None:
    one = codec(optional=True)
    alone, _ = decode(request([tensor("A", A)]), of=one)
    both, _ = decode(request(), of=one)
    assert set(alone.inputs) == {"A"}
    assert alone.shape_key != both.shape_key
