"""Attacks by what a request says: JSON, shapes, lengths, repeated parts, reserved words (lines 4 to 7 and 15)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import Attacked, grpc_request, http_body, x_json

pb: Any = service_pb2
DEEP = 100_000
MILLION = 1_000_000


# --- 4: JSON -------------------------------------------------------------------------------------------------------------


def nested(start: str) -> bytes:
    end = "]" if start == "[" else "}"
    inner = start if start == "[" else '{"a":'
    return (inner * DEEP + ("" if start == "[" else "1") + end * DEEP).encode()


GOOD = http_body()[1:-1]  # without the braces around it
JSON: dict[str, tuple[bytes, str]] = {
    "arrays nested 100,000 deep": (b'{"a":' + nested("[") + b"}", "nested 100001 deep"),
    "objects nested 100,000 deep": (b'{"a":' + nested("{") + b"}", "keys"),
    "nested just too deep": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested 65 deep, at most 64"),
    "nested deep in data": (
        b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,16],"data":' + nested("[") + b"}]}",
        "nested 100003 deep",
    ),
    "nested and never closed": (b'{"a":' + b"[" * MILLION, "nested 1000001 deep"),
    "brackets in a string, then nested": (b'{"a":"]]]]\\"]]]]","b":' + nested("[") + b"}", "nested 100001 deep"),
    "a million keys": (
        b"{" + b",".join(b'"k%d":1' % key for key in range(MILLION)) + b"}",
        "1000000 keys, at most 4112",
    ),
    "a million parameters": (
        b"{" + GOOD + b',"parameters":{' + b",".join(b'"k%d":1' % key for key in range(MILLION)) + b"}}",
        "keys, at most 4112",
    ),
    "a dimension NaN": (http_body(x_json(shape=[float("nan"), 16])), "Expected `int`, got `float`"),
    "a timeout Infinity": (b"{" + GOOD + b',"parameters":{"timeout":Infinity}}', "must be a whole number"),
    "NaN, then a number beyond every float": (
        http_body(x_json(data=[7] * 16)).replace(b"7,", b"NaN, 1e999,", 1),
        "1e999 is beyond FP64",
    ),
    "NaN, and a key twice": (b"{" + GOOD + b',"x":NaN,"x":2}', "'x' twice"),
    "a number beyond every float": (
        http_body(x_json(data=[7] * 16)).replace(b"7", b"1e999"),
        "out of range|not valid JSON",
    ),
    "an integer of a million digits": (
        http_body(x_json(data=[7] * 16)).replace(b"7", b"9" * MILLION, 1),
        "out of range|not valid JSON|must be from",
    ),
    "an integer of 400 digits": (http_body(x_json(data=[10**400] * 16)), "must be from|out of range"),
    "a dimension of a million digits": (
        http_body(x_json(shape=[7, 16])).replace(b"[7", b"[" + b"9" * MILLION),
        "out of range",
    ),
    "inputs twice": (b"{" + GOOD + b"," + GOOD + b"}", "'inputs' twice"),
    "inputs twice, once escaped": (
        b"{" + GOOD + b"," + GOOD.replace(b'"inputs"', b'"\\u0069nputs"') + b"}",
        "'inputs' twice",
    ),
    "a name twice": (http_body().replace(b'"name"', b'"name": "Z", "name"'), "'name' twice"),
    "data twice": (http_body().replace(b'"data"', b'"data": [], "data"'), "'data' twice"),
    "a parameter twice": (b"{" + GOOD + b',"parameters":{"priority":1,"priority":2}}', "'priority' twice"),
    "an unknown key twice": (b"{" + GOOD + b',"x":1,"x":2}', "'x' twice"),
    "a key twice deep in an unknown one": (b"{" + GOOD + b',"x":[{"y":{"z":1,"z":2}}]}', "'z' twice"),
    "twice, hidden by colons in strings": (b"{" + GOOD + b',"id":"a:b","id":"c"}', "'id' twice"),
    "half of a surrogate pair": (http_body(id="\ud800"), "not valid JSON"),
}


@pytest.mark.parametrize("case", JSON)
def test_json(attacked: Attacked, case: str) -> None:
    body, words = JSON[case]
    status, text = attacked.infer(body)
    assert status == 400, (status, text)
    assert any(word in text for word in words.split("|")), text
    assert len(text) < 400
    attacked.still_serves()


def test_expensive_json_leaks_nothing(attacked: Attacked) -> None:
    bodies = [JSON[case][0] for case in ("arrays nested 100,000 deep", "a million keys", "a million parameters")]
    with attacked.flat_memory(160 << 20):  # each is read whole, 12 MB, and looked at in pieces
        for _ in range(10):
            for body in bodies:
                assert attacked.infer(body)[0] in (400, 413)


def test_the_limits_on_json_are_counted(attacked: Attacked) -> None:
    with attacked.reaches("max_json_depth"), attacked.reaches("max_json_keys"):
        attacked.infer(JSON["arrays nested 100,000 deep"][0])
        attacked.infer(JSON["a million keys"][0])


@pytest.mark.parametrize("unknown", [{"x": 1}, {"x": {"y": [{"z": 1}, {"z": 2}]}}, {"id": "a:b:c"}, {"parameters": {}}])
def test_valid_requests_that_look_like_attacks(attacked: Attacked, unknown: dict[str, object]) -> None:
    assert attacked.infer(http_body(**unknown)) == (200, "")


def test_json_as_deep_as_it_may_be(attacked: Attacked) -> None:
    assert attacked.infer(b"{" + GOOD + b',"x":' + b"[" * 63 + b"]" * 63 + b"}") == (200, "")


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/logging", "/v2/repository/models/affine/load"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b"{" + b",".join(b'"k%d":1' % key for key in range(6_000)) + b"}",
        b'{"ready":true,"ready":false}',
        b'{"log_info":true,"log_info":false}',
        b'{"ready":NaN}',
    ],
    ids=["deep", "many keys", "twice", "twice too", "NaN"],
)
def test_json_of_the_control_plane(attacked: Attacked, path: str, body: bytes) -> None:
    status, text = attacked.post(path, body)
    assert status == 400, text
    attacked.still_serves()


def test_a_configuration_nested_in_a_message(attacked: Attacked) -> None:
    """gRPC has no JSON but this: a configuration as text in a load request."""
    for text in ("[" * DEEP, '{"a":' * DEEP, '{"max_batch_size": NaN}'):
        request = pb.RepositoryModelLoadRequest(model_name="affine")
        request.parameters["config"].string_param = text
        code, message = attacked.call(request, "RepositoryModelLoad")
        assert code == "INVALID_ARGUMENT", message
    attacked.still_serves()


def test_protobuf_nested_deep_and_with_many_parameters(attacked: Attacked) -> None:
    groups = b"\x0b" * DEEP + b"\x0c" * DEEP  # of field 1, which is no group
    assert attacked.call(groups)[0] == "INVALID_ARGUMENT"
    assert attacked.call(groups, "ModelConfig")[0] == "INVALID_ARGUMENT"
    request = grpc_request()
    for number in range(DEEP):
        request.parameters[f"k{number}"].int64_param = 1
    code, text = attacked.call(request)
    assert (code, "4096 fields" in text or "1024" in text) == ("INVALID_ARGUMENT", True)
    attacked.still_serves()


# --- 5: shapes -----------------------------------------------------------------------------------------------------------

SHAPES: list[list[int]] = [
    [2**32, 2**32],
    [2**62, 4],
    [2**63 - 1, 2**63 - 1],
    [-1, 16],
    [1, -16],
    [-(2**63), 1],
    [0, 16],
    [1, 0],
    [1, 17],
    [2, 16],
    [1, 2**40],
    [],
    [16],
    [1] * 100_000,
]


def shown(shape: list[int]) -> str:
    return str(shape)[:40]


@pytest.mark.parametrize("shape", SHAPES, ids=shown)
@pytest.mark.parametrize("model", ["affine", "row_sums", "identity_bytes"])
def test_shapes_over_http(attacked: Attacked, shape: list[int], model: str) -> None:
    datatype = "BYTES" if model == "identity_bytes" else "FP32"
    with attacked.flat_memory():
        entry = {"name": "X", "datatype": datatype, "shape": shape}
        status, text = attacked.infer(
            http_body({**entry, "data": ["x"] * 16 if datatype == "BYTES" else [0.5] * 16}), model
        )
        assert status == 400, text
        header = http_body({**entry, "parameters": {"binary_data_size": 64}})
        length = str(len(header))
        status, text = attacked.infer(header + bytes(64), model, Inference_Header_Content_Length=length)
        assert status == 400, text
        assert len(text) < 400


@pytest.mark.parametrize("shape", SHAPES, ids=shown)
@pytest.mark.parametrize("model", ["affine", "row_sums", "identity_bytes"])
def test_shapes_over_grpc(attacked: Attacked, shape: list[int], model: str) -> None:
    with attacked.flat_memory():
        for typed in (False, True):
            request = pb.ModelInferRequest(model_name=model)
            datatype = "BYTES" if model == "identity_bytes" else "FP32"
            tensor = request.inputs.add(name="X", datatype=datatype, shape=shape)
            if not typed:
                request.raw_input_contents.append(bytes(64))
            elif datatype == "BYTES":
                tensor.contents.bytes_contents.extend([b"x"] * 16)
            else:
                tensor.contents.fp32_contents.extend([0.5] * 16)
            code, text = attacked.call(request)
            assert code == "INVALID_ARGUMENT", text


@pytest.mark.parametrize("size", [-1, 0, 63, 65, 2**31, 2**63 - 1, 2**63, 2**100])
def test_declared_sizes_that_the_shape_does_not_have(attacked: Attacked, size: int) -> None:
    header = http_body({"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": size}})
    with attacked.flat_memory():
        status, _ = attacked.infer(header + bytes(64), Inference_Header_Content_Length=str(len(header)))
    assert status == 400


@pytest.mark.parametrize("lengths", [[2**32 - 1], [60, 2**31], [0] * 3, [61]])
def test_texts_with_wrong_length_prefixes(attacked: Attacked, lengths: list[int]) -> None:
    raw = b"".join(length.to_bytes(4, "little") for length in lengths).ljust(64, b"x")
    header = http_body({"name": "X", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": 64}})
    request = pb.ModelInferRequest(model_name="identity_bytes", raw_input_contents=[raw])
    request.inputs.add(name="X", datatype="BYTES", shape=[1, 2])
    with attacked.flat_memory():
        length = str(len(header))
        assert attacked.infer(header + raw, "identity_bytes", Inference_Header_Content_Length=length)[0] == 400
        assert attacked.call(request)[0] == "INVALID_ARGUMENT"


# --- 6: Inference-Header-Content-Length ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "+5",
        "0x10",
        "1e3",
        "5.0",
        "five",
        "",
        " ",
        "99999999999999999999999",
        str(2**63),
        str(2**31),
        "1_0",
        "\u0661",
    ],
)
def test_header_lengths_that_are_none(attacked: Attacked, value: str) -> None:
    status, text = attacked.infer(
        http_body() + bytes(64), Inference_Header_Content_Length=value.encode().decode("latin-1")
    )
    assert status == 400, text
    attacked.still_serves()


def test_two_header_lengths(attacked: Attacked) -> None:
    """A proxy in front may have used the other header."""
    body = http_body()
    head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    lengths = f"Inference-Header-Content-Length: {len(body)}\r\nInference-Header-Content-Length: 5\r\n\r\n"
    with attacked.connect() as wire:
        wire.pour([(head + lengths).encode() + body])
        assert wire.answer()[0] == 400


# --- 7: outputs and inputs that are repeated -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 1_000, 100_000])
@pytest.mark.parametrize("distinct", [False, True], ids=["the same", "distinct"])
def test_very_many_outputs(attacked: Attacked, count: int, distinct: bool) -> None:
    names = [f"Y{number}" if distinct and number else "Y" for number in range(count)]
    request = grpc_request()
    for name in names:
        request.outputs.add(name=name)
    with attacked.flat_memory(96 << 20):
        status, text = attacked.infer(http_body(outputs=[{"name": name} for name in names]))
        # As in Triton, an output that is requested again is returned once.
        is_refused = distinct or count > 1_000
        assert (status, len(text) < 400) == (400 if is_refused else 200, True)
        code, text = attacked.call(request)
        assert (code, len(text) < 400) == ("INVALID_ARGUMENT" if is_refused else "OK", True)


@pytest.mark.parametrize("count", [2, 100_000])
def test_the_same_input_many_times(attacked: Attacked, count: int) -> None:
    request = grpc_request()
    request.ClearField("raw_input_contents")
    for _ in range(count - 1):
        request.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    with attacked.flat_memory(96 << 20):
        assert attacked.infer(http_body(*[x_json(data=[])] * count))[0] in (400, 413)
        assert attacked.call(request)[0] == "INVALID_ARGUMENT"
        request.raw_input_contents.extend([b""] * count)
        assert attacked.call(request)[0] == "INVALID_ARGUMENT"


# --- 15: reserved parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["triton_final_response", "triton_", "headrace.trace", "headrace_client", "headrace."])
@pytest.mark.parametrize("where", ["request", "input", "output"])
def test_reserved_parameters(attacked: Attacked, name: str, where: str) -> None:
    given = {"parameters": {name: True}}
    bodies = {
        "request": http_body(**given),
        "input": http_body(x_json(**given)),
        "output": http_body(outputs=[{"name": "Y", **given}]),
    }
    status, text = attacked.infer(bodies[where])
    assert (status, "is reserved" in text) == (400, True), text
    request = grpc_request()
    holder = {"request": request, "input": request.inputs[0], "output": request.outputs.add(name="Y")}[where]
    holder.parameters[name].bool_param = True
    code, text = attacked.call(request)
    assert (code, "is reserved" in text) == ("INVALID_ARGUMENT", True), text


def test_reserved_parameters_in_a_load_request(attacked: Attacked) -> None:
    body = json.dumps({"parameters": {"headrace.path": "/etc"}}).encode()
    assert attacked.post("/v2/repository/models/affine/load", body)[0] == 400
    request = pb.RepositoryModelLoadRequest(model_name="affine")
    request.parameters["headrace.path"].string_param = "/etc"
    assert attacked.call(request, "RepositoryModelLoad")[0] == "INVALID_ARGUMENT"
