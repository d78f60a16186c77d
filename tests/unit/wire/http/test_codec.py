"""Bodies of inference requests and answers: golden bytes, and what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import BY_NAME, Array, Datatype, ModelSpec, TensorSpec
from headrace.wire.http.codec import IMAGE_BODY, ModelCodec, RequestTemplate
from headrace.wire.requests import tensor_codec

LABELS = ("cat", "dog")


def model(*, batch: int = 8, optional: bool = False, name: str = "m") -> ModelSpec:
    """A: INT32 (-1, 2), B: FP32 (-1, -1), perhaps optional -> S: FP32 (-1, 3) with two labels, T: BYTES (-1, 1)."""
    first = (-1,) if batch else ()
    inputs = [
        TensorSpec("A", BY_NAME["INT32"], (*first, 2)),
        TensorSpec("B", BY_NAME["FP32"], (*first, -1), optional=optional),
    ]
    outputs = [
        TensorSpec("S", BY_NAME["FP32"], (*first, 3), labels=LABELS),
        TensorSpec("T", BY_NAME["BYTES"], (*first, 1)),
    ]
    return ModelSpec(name, "3", "test", {t.name: t for t in inputs}, {t.name: t for t in outputs}, batch)


def codec(**options: Any) -> ModelCodec:
    return ModelCodec(model(**options))


def answer() -> InferResponse:
    text = np.empty((2, 1), dtype=object)
    text[:, 0] = [b"yes", "né".encode()]
    scores: Array = np.array([[0.25, 0.5, 0.125], [1, -1, 2]], dtype="<f4")
    return InferResponse({"S": scores, "T": text})


A = {"name": "A", "datatype": "INT32", "shape": [2, 2], "data": [1, 2, 3, 4]}
B = {"name": "B", "datatype": "FP32", "shape": [2, 1], "data": [[0.5], [1.5]]}
BINARY_A = {"name": "A", "datatype": "INT32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
BINARY_B = {"name": "B", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}}
A_WIRE = bytes.fromhex("01000000 02000000 03000000 04000000")
B_WIRE = bytes.fromhex("0000003f 0000c03f")


def body(header: object, *tensors: bytes) -> tuple[bytes, int | None]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"".join((text, *tensors)), len(text) if tensors else None


def decode(header: object, *tensors: bytes, of: ModelCodec | None = None) -> tuple[InferRequest, RequestTemplate]:
    content, size = body(header, *tensors)
    return (of or codec()).decode(content, size, 1_000)


def request(**changes: Any) -> dict[str, Any]:
    return {"inputs": [A, B], **changes}


def without(tensor: Mapping[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**tensor, **changes}.items() if name not in names}


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        (request(), ()),
        ({"inputs": [BINARY_A, BINARY_B]}, (A_WIRE, B_WIRE)),
        ({"inputs": [BINARY_B, BINARY_A]}, (B_WIRE, A_WIRE)),
        ({"inputs": [BINARY_A, B]}, (A_WIRE,)),
        ({"inputs": [A, BINARY_B]}, (B_WIRE,)),
    ],
    ids=["json", "binary", "binary, other order", "A binary, B json", "A json, B binary"],
)
def test_the_same_tensors_in_every_form(header: object, tensors: tuple[bytes, ...]) -> None:
    decoded, _ = decode(header, *tensors)
    assert decoded.inputs["A"].tolist() == [[1, 2], [3, 4]]
    assert decoded.inputs["A"].dtype == "<i4"
    assert decoded.inputs["B"].tolist() == [[0.5], [1.5]]
    assert decoded.inputs["B"].dtype == "<f4"
    assert decoded.rows == 2
    assert decoded.received_ns == 1_000


def test_attributes_of_a_decoded_request() -> None:
    parameters = {"priority": 2, "timeout": 7, "headrace_deadline_us": 5, "my own": "x"}
    decoded, _ = decode(request(id="no 7", parameters=parameters))
    assert (decoded.id, decoded.priority) == ("no 7", 2)
    assert (decoded.deadline_ns, decoded.queue_timeout_ns) == (1_000 + 5_000, 7_000)
    plain, _ = decode(request())
    assert (plain.id, plain.priority, plain.deadline_ns, plain.queue_timeout_ns) == ("", 0, 0, 0)


def test_nan_and_infinities_in_every_spelling_of_rapidjson() -> None:
    b = b'{"name": "B", "datatype": "FP32", "shape": [1, 6], "data": [NaN, -NaN, Inf, -Inf, Infinity, -Infinity]}'
    a = b'{"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}'
    header = b'{"id": "say \\"Inf\\" or -NaN", "parameters": {"x": Inf}, "inputs": [' + a + b", " + b + b"]}"
    decoded, plan = decode(header)
    np.testing.assert_array_equal(decoded.inputs["B"], [[np.nan, np.nan, np.inf, -np.inf, np.inf, -np.inf]])
    assert plan.request_id == 'say "Inf" or -NaN'


def test_nan_is_refused_for_integers() -> None:
    with pytest.raises(BadRequest, match="input 'A' is INT32: data must be integers"):
        decode(b'{"inputs": [{"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [1, NaN]}]}')


def test_triton_s_timeout_is_no_deadline() -> None:
    decoded, _ = decode(request(parameters={"timeout": 5}))
    assert (decoded.deadline_ns, decoded.queue_timeout_ns) == (0, 5_000)


@pytest.mark.parametrize("duration", [0, -1, 2**63, 10**30])
def test_a_timeout_that_is_none(duration: int) -> None:
    decoded, _ = decode(request(parameters={"timeout": duration, "headrace_deadline_us": duration}))
    assert (decoded.deadline_ns, decoded.queue_timeout_ns) == (0, 0)


def test_repeated_headers_are_parsed_once_and_their_data_each_time() -> None:
    one = codec()
    content = {"inputs": [BINARY_A, BINARY_B]}
    first, first_plan = decode(content, A_WIRE, B_WIRE, of=one)
    second, second_plan = decode(content, A_WIRE[::-1], B_WIRE, of=one)
    assert second_plan is first_plan
    assert first.inputs["A"].tolist() == [[1, 2], [3, 4]]
    assert second.inputs["A"].tolist() == np.frombuffer(A_WIRE[::-1], "<i4").reshape(2, 2).tolist()


def test_headers_with_data_or_an_id_are_never_remembered() -> None:
    one = codec()
    changed = {**A, "data": [9, 9, 9, 9]}
    assert decode(request(), of=one)[1] is not decode(request(), of=one)[1]
    assert decode({"inputs": [changed, B]}, of=one)[0].inputs["A"].tolist() == [[9, 9], [9, 9]]
    for number in range(1_000):
        decode({"inputs": [BINARY_A, BINARY_B], "id": str(number)}, A_WIRE, B_WIRE, of=one)
    assert len(one._templates) == 0


def test_few_headers_are_remembered() -> None:
    one = codec()
    for columns in range(1, 1_000):
        wide = without(BINARY_B, shape=[2, columns], parameters={"binary_data_size": 8 * columns})
        decode({"inputs": [BINARY_A, wide]}, A_WIRE, B_WIRE * columns, of=one)
    assert 0 < len(one._templates) <= 256


def test_requests_of_one_shape_share_a_key_and_others_do_not() -> None:
    def key(columns: int, rows: int = 2) -> object:
        a = without(A, shape=[rows, 2], data=[0] * 2 * rows)
        return decode({"inputs": [a, without(B, shape=[rows, columns], data=[0] * rows * columns)]})[0].shape_key

    assert key(3) == key(3, rows=5)
    assert key(3) != key(4)
    assert hash(key(3)) == hash(key(3))


def test_an_optional_input_may_be_left_out_and_such_requests_queue_apart() -> None:
    one = codec(optional=True)
    alone, _ = decode({"inputs": [A]}, of=one)
    both, _ = decode({"inputs": [A, B]}, of=one)
    assert set(alone.inputs) == {"A"}
    assert alone.shape_key != both.shape_key


GOLDEN_ANSWERS: list[tuple[str, dict[str, Any], bytes | None, bytes]] = [
    (
        "json",
        {},
        None,
        '{"model_name":"m","model_version":"3","outputs":['
        '{"name":"S","datatype":"FP32","shape":[2,3],"data":[0.25,0.5,0.125,1.0,-1.0,2.0]},'
        '{"name":"T","datatype":"BYTES","shape":[2,1],"data":["yes","né"]}]}'.encode(),
    ),
    (
        "an id comes back, one output",
        {"id": "x\"'é", "outputs": [{"name": "T"}]},
        None,
        '{"id":"x\\"\'é","model_name":"m","model_version":"3","outputs":['
        '{"name":"T","datatype":"BYTES","shape":[2,1],"data":["yes","né"]}]}'.encode(),
    ),
    (
        "binary for all",
        {"parameters": {"binary_data_output": True}},
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"S","datatype":"FP32","shape":[2,3],"parameters":{"binary_data_size":24}},'
        b'{"name":"T","datatype":"BYTES","shape":[2,1],"parameters":{"binary_data_size":14}}]}',
        bytes.fromhex("0000803e 0000003f 0000003e 0000803f 000080bf 00000040 03000000 796573 03000000 6ec3a9"),
    ),
    (
        "one binary, one not, in the requested order",
        {"outputs": [{"name": "T"}, {"name": "S", "parameters": {"binary_data": True}}]},
        b'{"model_name":"m","model_version":"3","outputs":['
        + '{"name":"T","datatype":"BYTES","shape":[2,1],"data":["yes","né"]},'.encode()
        + b'{"name":"S","datatype":"FP32","shape":[2,3],"parameters":{"binary_data_size":24}}]}',
        bytes.fromhex("0000803e 0000003f 0000003e 0000803f 000080bf 00000040"),
    ),
    (
        "binary for all but one",
        {
            "outputs": [{"name": "S", "parameters": {"binary_data": False}}, {"name": "T"}],
            "parameters": {"binary_data_output": True},
        },
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"S","datatype":"FP32","shape":[2,3],"data":[0.25,0.5,0.125,1.0,-1.0,2.0]},'
        b'{"name":"T","datatype":"BYTES","shape":[2,1],"parameters":{"binary_data_size":14}}]}',
        bytes.fromhex("03000000 796573 03000000 6ec3a9"),
    ),
    (
        "classes",
        {"outputs": [{"name": "S", "parameters": {"classification": 2}}]},
        None,
        b'{"model_name":"m","model_version":"3","outputs":[{"name":"S","datatype":"BYTES","shape":[2,2],'
        b'"data":["0.500000:1:dog","0.250000:0:cat","2.000000:2","1.000000:0:cat"]}]}',
    ),
    (
        "more classes than there are, binary",
        {"outputs": [{"name": "S", "parameters": {"classification": 99, "binary_data": True}}]},
        b'{"model_name":"m","model_version":"3","outputs":[{"name":"S","datatype":"BYTES","shape":[2,3],'
        b'"parameters":{"binary_data_size":101}}]}',
        b"\x0e\0\0\x000.500000:1:dog\x0e\0\0\x000.250000:0:cat\x0a\0\0\x000.125000:2"
        b"\x0a\0\0\x002.000000:2\x0e\0\0\x001.000000:0:cat\x0f\0\0\x00-1.000000:1:dog",
    ),
]


def test_every_output_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the first response of its shapes and sizes, whose header is not cached."""
    served = codec()
    _, template = decode(request(parameters={"binary_data_output": True}), of=served)
    converted: list[str] = []
    to_binary = tensor_codec.to_binary

    def count(array: Array, datatype: Datatype) -> object:
        converted.append(datatype.name)
        return to_binary(array, datatype)

    monkeypatch.setattr(tensor_codec, "to_binary", count)
    first, second = (b"".join(served.encode(answer(), template)[1]) for _ in range(2))
    assert first == second
    assert converted == 2 * ["FP32", "BYTES"]


@pytest.mark.parametrize(
    ("says", "header", "tensors"), [case[1:] for case in GOLDEN_ANSWERS], ids=[c[0] for c in GOLDEN_ANSWERS]
)
def test_golden_answers(says: dict[str, Any], header: bytes | None, tensors: bytes) -> None:
    one = codec()
    _, plan = decode(request(**says), of=one)
    size, parts = one.encode(answer(), plan)
    content = b"".join(parts)
    assert content == (header or b"") + tensors
    assert size == (None if header is None else len(header))


def test_a_model_without_a_batch_dimension() -> None:
    one = codec(batch=0)
    a = without(A, shape=[2], data=[1, 2])
    decoded, plan = decode({"inputs": [a, without(B, shape=[4], data=[0] * 4)]}, of=one)
    assert decoded.rows == 1
    _, plan = decode(
        {
            "inputs": [a, without(B, shape=[4], data=[0] * 4)],
            "outputs": [{"name": "S", "parameters": {"classification": 1}}],
        },
        of=one,
    )
    _, parts = one.encode(InferResponse({"S": np.array([1, 3, 2], "<f4"), "T": np.empty(1, object)}), plan)
    assert json.loads(parts[0])["outputs"] == [
        {"name": "S", "datatype": "BYTES", "shape": [1], "data": ["3.000000:1:dog"]}
    ]


def test_null_in_place_of_parameters_is_none() -> None:
    outputs = [{"name": "S", "parameters": None}]
    decoded, template = decode(request(inputs=[{**A, "parameters": None}, {**B, "parameters": None}], outputs=outputs))
    assert decoded.inputs["A"].tolist() == [[1, 2], [3, 4]]
    assert [output.spec.name for output in template.outputs] == ["S"]


def test_the_first_form_of_an_output_that_is_requested_twice_counts() -> None:
    outputs = [{"name": "S", "parameters": {"classification": 2}}, {"name": "T"}, {"name": "S"}]
    _, template = decode(request(outputs=outputs))
    assert [(output.spec.name, output.classes) for output in template.outputs] == [("S", 2), ("T", 0)]


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("inputs", [1, 900, 5_000])
def test_a_model_of_many_inputs_and_outputs_allows_as_many_keys(inputs: int, is_binary: bool) -> None:
    spec = ModelSpec("m", "1", "test", *(
        {f"{kind}{index}": TensorSpec(f"{kind}{index}", BY_NAME["INT32"], (1,)) for index in range(inputs)}
        for kind in ("in", "out")
    ), 0)  # fmt: skip
    data: dict[str, Any] = (
        {"parameters": {"binary_data_size": 4}} if is_binary else {"data": [7], "parameters": {"x": 1}}
    )
    tensors = [{"name": name, "datatype": "INT32", "shape": [1], **data} for name in spec.inputs]
    requested = [{"name": name, "parameters": {"binary_data": True, "classification": 0}} for name in spec.outputs]
    header = {"inputs": tensors, "outputs": requested, "parameters": {f"p{index}": index for index in range(1_000)}}
    decoded, template = decode(header, *([b"\7\0\0\0"] * inputs if is_binary else []), of=ModelCodec(spec))
    assert len(template.outputs) == inputs
    assert all(array.tolist() == [7] for array in decoded.inputs.values())


REFUSED: list[tuple[object, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"{'inputs': []}", "not valid JSON: .*double quotes"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"inputs":[]} {}', "not valid JSON"),
    (b'{"inputs": [NaN]}', r"not an inference request: Expected `object`, got `float`"),
    (b'{"inputs": [], "x": NAN}', "not valid JSON"),
    (b'{"inputs": [], "x": NaN, "y": 1e999}', "not valid JSON: the number 1e999 is beyond FP64"),
    (b'{"inputs": [], "x": NaN, "x": 1}', "the key 'x' twice"),
    (b'{"inputs": [], "x": NaN, "y": "\\ud800"}', "not valid JSON"),
    (b'{"inputs": [], "x": Infinite}', "not valid JSON"),
    (b'{"id": "\\ud800", "inputs": []}', "not valid JSON"),
    (b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested 100001 deep, at most 64"),
    (b'{"inputs":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested 100001 deep"),
    ([], "not an inference request: Expected `object`"),
    ({}, "missing required field `inputs`"),
    (request(id=7), r"`\$.id`"),
    (request(inputs={}), r"`\$.inputs`"),
    (request(inputs=[A, without(B, "shape")]), r"missing required field `shape` - at `\$.inputs"),
    (
        request(inputs=[A, without(B, "datatype")]),
        "missing required field `datatype`.*: write datatype in small letters",
    ),
    (request(inputs=[A, without(B, shape=[2.0, 1])]), r"Expected `int`, got `float` - at `\$.inputs"),
    (request(inputs=[A, without(B, shape="2")]), r"at `\$.inputs"),
    (request(inputs=[A, without(B, parameters=[])]), r"parameters`"),
    (request(inputs=[]), r"model 'm' needs the inputs \['A', 'B'\]"),
    (request(inputs=[A]), r"model 'm' needs the inputs \['B'\]"),
    (request(inputs=[A, A, B]), "input 'A' occurs twice: send it once"),
    (request(inputs=[A, without(B, name="C")]), r"model 'm' has no input 'C'; its inputs are \['A', 'B'\]"),
    (request(inputs=[without(A, datatype="INT64"), B]), "input 'A' has datatype 'INT64', expected INT32"),
    (request(inputs=[without(A, datatype="x" * 10**6), B]), "input 'A' has datatype 'x+', expected INT32"),
    (request(inputs=[A, without(B, shape=[1, 2], data=[1, 2])]), r"number of rows .* \{'A': 2, 'B': 1\}"),
    (request(inputs=[A, without(B, "data")]), "input 'B' has neither data nor the parameter binary_data_size"),
    (request(inputs=[A, {**B, "parameters": {"binary_data_size": 8}}]), "input 'B' has both data and"),
    (request(inputs=[A, without(BINARY_B, parameters={"binary_data_size": -1})]), "input 'B': binary_data_size is -1"),
    (request(inputs=[A, without(BINARY_B, parameters={"binary_data_size": 8.0})]), "must be a whole number, not float"),
    (request(inputs=[A, without(BINARY_B, parameters={"binary_data_size": True})]), "must be a whole number, not bool"),
    (request(inputs=[A, BINARY_B]), "input 'B': binary_data_size is 8, but only 0 bytes are left"),
    (request(outputs=[{"name": "U"}]), r"model 'm' has no output 'U'; its outputs are \['S', 'T'\]"),
    (request(outputs=[{"name": "S"}] * 100_000), "the JSON has 1000[0-9]+ keys, at most 4128"),
    (request(outputs=[{}]), "missing required field `name`"),
    (request(outputs=[{"name": "S", "parameters": {"classification": -1}}]), "classification must be at least 1"),
    (
        request(outputs=[{"name": "S", "parameters": {"classification": "3"}}]),
        "'classification' must be a whole number",
    ),
    (
        request(outputs=[{"name": "S", "parameters": {"binary_data": 1}}]),
        "'binary_data' must be true or false, not int",
    ),
    (request(parameters={"binary_data_output": "yes"}), "'binary_data_output' must be true or false, not str"),
    (request(parameters={"priority": 1.5}), "'priority' must be a whole number, not float"),
    (request(parameters={"timeout": "1s"}), "'timeout' must be a whole number, not str"),
    (request(parameters={"timeout": None}), "'timeout' must be text, a number, true or false, not null: leave it out"),
    (request(parameters={"mine": [1]}), "'mine' must be text, a number, true or false, not an array"),
    (request(parameters={"mine": {"a": 1}}), "'mine' must be text, a number, true or false, not an object: .* as text"),
    (request(parameters={"headrace_deadline_us": 1.5}), "'headrace_deadline_us' must be a whole number, not float"),
    (request(parameters={"headrace_unordered": 1}), "'headrace_unordered' must be true or false, not int"),
    (request(parameters={"headrace_deadline": 5}), "'headrace_deadline' is reserved"),
    (request(parameters={"triton_enable_empty_final_response": True}), "'triton_enable.* is reserved"),
    (request(parameters={"headrace.x": 1}), "'headrace.x' is reserved"),
]


@pytest.mark.parametrize(("header", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_requests_that_are_refused(header: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode(header)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("sequence_id", [0, 5, "five"])
def test_sequence_parameters_are_ignored(sequence_id: int | str) -> None:
    """As in Triton on a model without sequences."""
    parameters = {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": False}
    assert decode(request(parameters=parameters))[0].rows == decode(request())[0].rows


def test_the_header_must_fit_in_the_body() -> None:
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length is 99, the body has only 5 bytes"):
        codec().decode(b"12345", 99, 0)


def test_extra_bytes_behind_the_tensors_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"3 bytes are left over .* add up to 24, 27 bytes came"):
        decode({"inputs": [BINARY_A, BINARY_B]}, A_WIRE, B_WIRE, b"abc")


def test_a_cut_of_header_is_not_read_as_another() -> None:
    content, _ = body(request())
    with pytest.raises(BadRequest, match="not valid JSON"):
        codec().decode(content, len(content) - 1, 0)


def test_cached_response_headers_work_for_responses_with_an_id() -> None:
    encoder = codec()
    header = {"inputs": [BINARY_A, BINARY_B], "parameters": {"binary_data_output": True}}
    _, template = decode(header, A_WIRE, B_WIRE, of=encoder)
    for _ in range(2):
        size, parts = encoder.encode(answer(), template)
        named_size, named = encoder.encode(answer(), template, "r")
        assert b"".join(named).replace(b'"id":"r",', b"", 1) == b"".join(parts)
        assert size == len(parts[0]) == named_size - len(b'"id":"r",')


def image_model(shape: tuple[int, ...], batch: int = 0, datatype: str = "BYTES", optional: bool = False) -> ModelSpec:
    inputs = [TensorSpec("image", BY_NAME[datatype], shape)]
    if optional:
        inputs.append(TensorSpec("threshold", BY_NAME["FP32"], shape, optional=True))
    outputs = [TensorSpec("S", BY_NAME["FP32"], (3,))]
    return ModelSpec("m", "3", "test", {t.name: t for t in inputs}, {t.name: t for t in outputs}, batch)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (image_model((1,)), (1,)),
        (image_model((-1,)), (1,)),
        (image_model(()), ()),
        (image_model((-1, 1), batch=8), (1, 1)),
        (image_model((1,), optional=True), (1,)),
    ],
)
def test_an_image_body_is_one_text_and_its_answer_is_json(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    data, of = b"\xff\xd8\xff{}" + bytes(range(256)) * 1000, ModelCodec(spec)
    decoded, template = of.decode(bytearray(data), IMAGE_BODY, 1_000)  # type: ignore[arg-type]
    assert decoded.inputs["image"].shape == shape
    assert decoded.inputs["image"].reshape(-1).tolist() == [data]
    assert (decoded.rows, decoded.size_bytes) == (1, len(data))
    size, parts = of.encode(InferResponse({"S": np.zeros(3, np.float32)}), template)
    assert size is None
    assert json.loads(b"".join(parts))["outputs"][0]["data"] == [0, 0, 0]
    # Another file of the same length is not mistaken for the first.
    other, _ = of.decode(bytes(len(data)), IMAGE_BODY, 1_000)
    assert other.inputs["image"].reshape(-1).tolist() == [bytes(len(data))]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (model(), r"the data of one input, model 'm' has \['A', 'B'\]"),
        (
            image_model((3, 224, 224), datatype="FP32"),
            r"input 'image' is FP32, shape \[3, 224, 224\]: send its tensors",
        ),
        (image_model((2,)), r"input 'image' is BYTES, shape \[2\]"),
    ],
)
def test_an_image_body_is_refused_by_other_models(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        ModelCodec(spec).decode(b"\xff\xd8\xff", IMAGE_BODY, 1_000)
