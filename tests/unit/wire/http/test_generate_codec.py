"""The JSON of the generate extension: fields to tensors and parameters, outputs to fields, and errors that name the remedy."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from headrace.core.errors import BadRequest, TooLarge
from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import InferResponse
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.wire.http.generate_codec import GenerateCodec
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

DATATYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "UINT64": TensorProto.UINT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}


def model(inputs: dict[str, tuple[str, tuple[int, ...]]], max_batch_size: int = 8) -> ModelSpec:
    """A model that returns its inputs: input `x` is output `x_out`."""
    specs = {name: TensorSpec(name, BY_NAME[datatype], shape) for name, (datatype, shape) in inputs.items()}
    outputs = {f"{name}_out": TensorSpec(f"{name}_out", spec.datatype, spec.shape) for name, spec in specs.items()}
    return ModelSpec("echo", "3", "test", specs, outputs, max_batch_size)


def read(spec: ModelSpec, document: object, limits: Limits | None = None) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Inputs, parameters and id of a request."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    template, inputs, request_id = GenerateCodec(spec, ClientLimits(limits or Limits())).read(body, None)
    return inputs, dict(template.parameters), request_id


TEXT = model({"PROMPT": ("BYTES", (-1, 1)), "STREAM": ("BOOL", (-1, 1))})


def test_fields_become_inputs_parameters_and_the_id() -> None:
    inputs, parameters, request_id = read(
        TEXT,
        {"PROMPT": "h\u00e9", "id": "42", "seed": 7, "parameters": {"STREAM": True, "temperature": 0.5, "stop": "x"}},
    )
    assert inputs["PROMPT"].tolist() == [["h\u00e9".encode()]]
    assert inputs["STREAM"].tolist() == [[True]]
    assert parameters == {"seed": 7, "temperature": 0.5, "stop": "x"}
    assert request_id == "42"


def test_inputs_come_before_the_reserved_fields() -> None:
    inputs, parameters, request_id = read(
        model({"id": ("BYTES", (1,)), "parameters": ("INT32", (-1,))}, 0), {"id": "a", "parameters": [1, 2]}
    )
    assert (inputs["id"].tolist(), inputs["parameters"].tolist()) == ([b"a"], [1, 2])
    assert (parameters, request_id) == ({}, "")


@pytest.mark.parametrize(
    ("shape", "batch", "value", "expected"),
    [
        ((-1, 1), 8, 5, (1, 1)),
        ((-1, 1), 8, [5], (1, 1)),
        ((-1, 1), 8, [5, 6, 7], (3, 1)),
        ((-1, -1), 8, [5, 6, 7], (1, 3)),
        ((-1, 4), 8, [1, 2, 3, 4], (1, 4)),
        ((-1, 4), 8, list(range(8)), (2, 4)),
        ((-1, 4), 8, [[1, 2, 3, 4], [5, 6, 7, 8]], (2, 4)),
        ((-1, -1, 2), 8, [1, 2, 3, 4], (1, 2, 2)),
        ((-1, 2, -1), 8, [1, 2, 3, 4], (1, 2, 2)),
        ((-1, -1, -1), 8, [[1, 2, 3], [4, 5, 6]], (1, 2, 3)),
        ((1,), 0, 5, (1,)),
        ((-1,), 0, [], (0,)),
        ((-1,), 0, [5, 6], (2,)),
        ((), 0, 5, ()),
        ((2, 2), 0, [[1, 2], [3, 4]], (2, 2)),
        ((2, 2), 0, [1, 2, 3, 4], (2, 2)),
    ],
)
def test_the_shape_follows_from_the_value(
    shape: tuple[int, ...], batch: int, value: object, expected: tuple[int, ...]
) -> None:
    inputs, _, _ = read(model({"x": ("INT32", shape)}, batch), {"x": value})
    assert inputs["x"].shape == expected
    assert inputs["x"].reshape(-1).tolist() == np.asarray(value).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("inputs", "document", "text"),
    [
        ({"x": ("INT32", (-1, 4))}, {"x": [1, 2, 3]}, "input 'x' has shape [-1, 4], 3 values came: send a multiple of 4 values"),
        ({"x": ("INT32", (-1, 4))}, {"x": 1}, "1 values came: send a multiple of 4 values"),
        ({"x": ("INT32", (-1, 4))}, {"x": [[[1, 2, 3, 4]]]}, "nested 3 deep: nest it 2 deep, or send a flat array"),
        ({"x": ("INT32", (-1, 4))}, {"x": [[1, 2, 3]]}, "has shape [1, 3], expected [-1, 4]"),
        ({"x": ("INT32", (-1, -1))}, {"x": [[1, 2], [3]]}, "rows differ in length or depth"),
        ({"x": ("INT32", (-1, 1))}, {"x": "1"}, "input 'x' is INT32: data must be integers, not a string"),
        ({"x": ("INT32", (-1, 1))}, {"x": 1.5}, "data must be integers, not a number with a fraction"),
        ({"x": ("INT32", (-1, 1))}, {"x": True}, "data must be integers, not true or false"),
        ({"x": ("INT32", (-1, 1))}, {"x": None}, "data must be integers, not null"),
        ({"x": ("INT32", (-1, 1))}, {"x": {"a": 1}}, "data must be integers, not an object"),
        ({"x": ("INT8", (-1, 1))}, {"x": 128}, "data must be from -128 to 127, 128 is not"),
        ({"x": ("BYTES", (-1, 1))}, {"x": 5}, "input 'x' is BYTES: data must be strings, not a number"),
        ({"x": ("BYTES", (-1, 1))}, {}, "model 'echo' needs the inputs ['x'], which are missing"),
        ({"x": ("BYTES", (-1, 1))}, {"x": []}, "the first dimension is the batch, it must be at least 1"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "parameters": {"x": "b"}}, "input 'x' occurs twice: send it once"),
        ({"x": ("BYTES", (-1, 1))}, b'{"x": "a", "x": "b"}', "the JSON has the key 'x' twice in one object"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "t": 1, "parameters": {"t": 2}}, "parameter 't' is a field of the request and of"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "t": [1]}, "field 't' is an array: model 'echo' has no such input"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "t": None}, "field 't' is null"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "parameters": {"t": {}}}, "field 't' is an object"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "parameters": 3}, "the field 'parameters' is a number: it must be an object"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "id": 3}, "the field 'id' is a number: the id of a request is a string"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "headrace_x": 3}, "parameter 'headrace_x' is reserved for the server"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "n": 2**64}, "integers have 64 bits: send a smaller one"),
        ({"x": ("BYTES", (-1, 1))}, b'{"x": "a", "n": NaN}', "parameters are finite numbers"),
        ({"x": ("BYTES", (-1, 1))}, {"x": "a", "timeout": "1"}, "parameter 'timeout' must be a whole number, not str"),
        ({"x": ("BYTES", (-1, 1))}, b"[1]", "the request is an array: a generate request is a JSON object"),
        ({"x": ("BYTES", (-1, 1))}, b"", "the request is not valid JSON"),
        ({"x": ("BYTES", (-1, 1))}, b'{"x": "\\ud800"}', "the request is not valid JSON"),
        ({"x": ("FP32", (-1, 1))}, {"x": 1e300}, "data must be from"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_with_its_remedy(
    inputs: dict[str, tuple[str, tuple[int, ...]]], document: object, text: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        read(model(inputs), document)
    assert text in str(raised.value)


def test_limits_of_json_hold() -> None:
    with pytest.raises(TooLarge, match="--max-json-bytes"):
        read(TEXT, {"PROMPT": "a" * 2000, "STREAM": True}, Limits(max_json_bytes=1000))
    with pytest.raises(BadRequest, match="keys"):
        read(TEXT, {str(number): 1 for number in range(200)}, Limits(max_json_keys=100))
    with pytest.raises(BadRequest, match="nested"):
        read(TEXT, b'{"PROMPT": ' + b"[" * 200 + b"]" * 200 + b"}", Limits(max_json_depth=100))
    with pytest.raises(BadRequest, match="besides strings"):
        read(model({"x": ("INT32", (-1, -1))}), {"x": [123456] * 100_000})


def test_a_long_text_is_read() -> None:
    prompt = "lorem " * 500_000
    inputs, _, _ = read(TEXT, {"PROMPT": prompt, "STREAM": False})
    assert inputs["PROMPT"].tolist() == [[prompt.encode()]]


def test_outputs_become_values_and_arrays() -> None:
    spec = model({"t": ("BYTES", (-1, 1)), "f": ("FP32", (-1, -1)), "e": ("INT32", (-1, -1))})
    codec = GenerateCodec(spec)
    template, _, _ = codec.read(b'{"t": "a", "f": 1, "e": 1}', None)
    outputs: dict[str, Any] = {
        "t_out": np.array([["\u00fc\n".encode()]], object),
        "f_out": np.array([[0.1, np.nan], [np.inf, -2]], np.float32),
        "e_out": np.empty((1, 0), np.int32),
    }
    text = codec.encode(InferResponse(outputs, parameters={"sum": 3, "t_out": "x"}), template, "9")
    assert b"\n" not in text  # one line: the data of an event
    assert b'"f_out":[0.1,NaN,Infinity,-2.0]' in text
    document = json.loads(text)
    assert (document["model_name"], document["model_version"], document["id"]) == ("echo", "3", "9")
    assert (document["t_out"], document["e_out"], document["sum"]) == ("\u00fc\n", [], 3)
    assert json.loads(codec.encode(InferResponse({"e_out": np.array([[4]])}), template)) == {
        "model_name": "echo", "model_version": "3", "e_out": 4,
    }  # fmt: skip


def test_bytes_that_are_no_text_are_refused() -> None:
    codec = GenerateCodec(model({"t": ("BYTES", (-1, 1))}))
    template, _, _ = codec.read(b'{"t": "a"}', None)
    with pytest.raises(BadRequest, match=r"'t_out' is not UTF-8 text.*send the request to /infer"):
        codec.encode(InferResponse({"t_out": np.array([[b"\xff"]], object)}), template)


@cache
def _identity(datatype: str, rank: int) -> onnxruntime.InferenceSession:
    """A model of ONNX Runtime that returns its input `x` as `x_out`."""
    dims = [f"d{axis}" for axis in range(rank)]
    tensors = [helper.make_tensor_value_info(name, DATATYPES[datatype], dims) for name in ("x", "x_out")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["x_out"])], "echo", tensors[:1], tensors[1:])
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8).SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def _elements(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BYTES":
        return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
    if datatype == "BOOL":
        return st.booleans()
    dtype = BY_NAME[datatype].dtype
    if dtype.kind == "f":
        width: Any = dtype.itemsize * 8
        return st.floats(width=width)
    info = np.iinfo(dtype)  # type: ignore[type-var]
    return st.integers(int(info.min), int(info.max))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], int, Any]:
    """A datatype, a spec's shape, whether it has a batch dimension, and a tensor that fits."""
    datatype = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    batch = draw(st.sampled_from([0, 8]))
    expected = [-1 if (axis == 0 and batch) or draw(st.booleans()) else size for axis, size in enumerate(shape)]
    count = int(np.prod(shape))
    values = draw(st.lists(_elements(datatype), min_size=count, max_size=count))
    tensor = np.empty(count, object)
    tensor[:] = values
    return datatype, tuple(expected), batch, tensor.reshape(shape)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_tensor_comes_back_from_the_runtime_as_it_was_sent(case: tuple[str, tuple[int, ...], int, Any]) -> None:
    """JSON -> codec -> ONNX Runtime -> codec -> JSON: nested as the tensor, the result has every element."""
    datatype, expected, batch, tensor = case
    codec = GenerateCodec(model({"x": (datatype, expected)}, batch))
    body = json.dumps({"x": tensor.tolist()}).encode()  # writes NaN and Infinity as the codec reads them
    template, inputs, _ = codec.read(body, None)
    assert inputs["x"].shape == tensor.shape
    fed = inputs["x"]
    if datatype == "BYTES":
        fed = np.array([item.decode() for item in fed.reshape(-1)], object).reshape(fed.shape)
    (result,) = _identity(datatype, fed.ndim).run(None, {"x": fed})
    if datatype == "BYTES":
        flat = np.empty(result.size, object)
        flat[:] = [item.encode() for item in result.reshape(-1)]
        result = flat.reshape(result.shape)
    answer = json.loads(codec.encode(InferResponse({"x_out": result}), template))["x_out"]
    sent = tensor.reshape(-1).tolist()
    returned = [answer] if tensor.size == 1 else answer
    assert len(returned) == len(sent)
    for a, b in zip(sent, returned, strict=True):
        assert type(b) is (float if datatype.startswith("FP") else type(a))
        assert a == b or (a != a and b != b) or (datatype == "FP16" or datatype == "FP32")  # shortest decimals below
    if datatype in ("FP16", "FP32"):
        dtype = BY_NAME[datatype].dtype
        np.testing.assert_array_equal(np.array(sent, dtype), np.array(returned, dtype))
