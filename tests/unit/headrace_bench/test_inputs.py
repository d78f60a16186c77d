"""Inputs of prepared requests: random, from .npz files, from pictures; and their bytes over both protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from headrace.core.errors import BadRequest, ModelFailed
from headrace.core.tensor import BY_NAME, DATATYPES, bf16_values
from headrace_bench import wire
from headrace_bench.answers import (
    AnswerCheck,
    decode_grpc,
    decode_http,
    equal_outputs,
    join_bytes,
    split_bytes,
)
from headrace_bench.inputs import InputOptions, InputSpec, Request, make_requests, random_array
from headrace_bench.pool import Answer
from headrace_bench.target import parse_url
from PIL import Image
from tritonclient.grpc import service_pb2


def metadata(*inputs: tuple[str, str, list[int]]) -> dict[str, Any]:
    tensors = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in inputs]
    return {"name": "m", "inputs": tensors, "outputs": []}


def requests(*inputs: tuple[str, str, list[int]], **options: Any) -> tuple[list[Request], int]:
    return make_requests(metadata(*inputs), {}, InputOptions(**options))


@pytest.mark.parametrize("datatype", DATATYPES, ids=lambda each: each.name)
def test_random_values_fit_every_datatype(datatype: Any) -> None:
    random = np.random.default_rng(0)
    array = random_array(datatype, (50, 4), random)
    assert array.shape == (50, 4)
    assert array.dtype == datatype.dtype
    if datatype.name == "BYTES":
        assert all(len(text) == 16 for text in array.ravel())
    elif datatype.name == "BF16":
        assert 0 <= bf16_values(array).min() < bf16_values(array).max() <= 1
    else:
        assert len(np.unique(array)) > 1
        assert np.isfinite(array.astype(np.float64)).all()


def test_requests_differ_and_the_seed_repeats_them() -> None:
    first, rows = requests(("x", "FP32", [-1, 3]), distinct=4, batch=2)
    assert rows == 2
    assert [each[0].shape for each in first] == [(2, 3)] * 4
    assert len({each[0].raw for each in first}) == 4
    assert requests(("x", "FP32", [-1, 3]), distinct=4, batch=2)[0] == first
    assert requests(("x", "FP32", [-1, 3]), distinct=4, batch=2, seed=1)[0] != first


def test_ranges_bound_random_values() -> None:
    (request,), _ = requests(("ids", "INT64", [-1, 100]), distinct=1, ranges={"ids": (7, 9)})
    assert set(np.frombuffer(request[0].raw, np.int64)) == {7, 8, 9}


@pytest.mark.parametrize(
    ("shape", "given", "batch", "expected"),
    [
        ([-1, 3, -1], (5, 3, 7), 0, (5, 3, 7)),
        ([-1, 3, -1], (3, 7), 0, (1, 3, 7)),
        ([-1, 3, -1], (3, 7), 4, (4, 3, 7)),
        ([-1, 3, -1], (4, 3, 7), 4, (4, 3, 7)),
        ([3, -1], (3, 7), 0, (3, 7)),
    ],
)
def test_shapes_are_given_with_or_without_rows(shape: list[int], given: Any, batch: int, expected: Any) -> None:
    (request,), _ = requests(("x", "UINT8", shape), distinct=1, shapes={"x": given}, batch=batch)
    assert request[0].shape == expected


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ([-1, -1], {}, r"leaves open: give them with --shape x:1,N"),
        ([-1, 3], {"shapes": {"x": (1, 4)}}, r"does not fit the model's shape \[-1, 3\]: give as many"),
        ([-1, 3], {"shapes": {"x": (2, 3)}, "batch": 3}, r"has 2 rows and --batch 3: give the rows"),
        ([4, 3], {"batch": 2}, r"no free batch dimension; leave --batch out"),
        ([-1, 3], {"shapes": {"y": (2, 3)}}, r"--shape names 'y': the model has the inputs x; name one"),
        ([-1, 3], {"ranges": {"x": (-1, 3)}}, r"outside UINT8: use numbers from 0 to 255"),
    ],
)
def test_wrong_shapes_are_refused(shape: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        requests(("x", "UINT8", shape), **options)


def test_wrong_metadata_are_refused() -> None:
    for document in ({"inputs": [{"name": "x"}]}, {"inputs": [{"name": "x", "datatype": "FP7", "shape": []}]}):
        with pytest.raises(ModelFailed, match="check that the URL"):
            make_requests(document, {}, InputOptions())


def test_inputs_are_described_for_servers_whose_metadata_name_none(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"name no inputs of the model: describe each with --input"):
        requests()
    spec = InputSpec("x", BY_NAME["INT8"], (-1, 3))
    (request,), rows = requests(described=[spec], batch=2, distinct=1)
    assert (request[0].name, request[0].shape, rows) == ("x", (2, 3), 2)
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), y=np.array(["a", "b", "c", "d"]))
    (first, second), rows = requests(npz=tmp_path / "a.npz", batch=2)
    assert [(each.name, each.datatype.name, each.shape) for each in second] == [
        ("x", "FP32", (2, 2)),
        ("y", "BYTES", (2,)),
    ]
    assert split_bytes(first[1].raw) == [b"a", b"b"]
    assert rows == 2


def test_npz_files_are_cut_into_rows(tmp_path: Path) -> None:
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    np.savez(tmp_path / "a.npz", x=rows)
    whole, count = requests(("x", "FP32", [-1, 2]), npz=tmp_path / "a.npz")
    assert (len(whole), count, whole[0][0].raw) == (1, 7, rows.tobytes())
    cut, count = requests(("x", "FP32", [-1, 2]), npz=tmp_path / "a.npz", batch=3)
    assert ([each[0].raw for each in cut], count) == ([rows[:3].tobytes(), rows[3:6].tobytes()], 3)


@pytest.mark.parametrize(
    ("arrays", "batch", "message"),
    [
        ({"y": np.zeros((1, 2), np.float32)}, 0, "holds the array 'y'"),
        ({"x": np.zeros((1, 2))}, 0, r"type float64, the model's input is FP32: convert"),
        ({"x": np.zeros((1, 3), np.float32)}, 0, r"shape \[1, 3\], the model's input \[-1, 2\]: reshape"),
        ({"x": np.zeros((1, 2), np.float32)}, 3, r"its arrays have \[1\] rows; leave --batch out"),
    ],
)
def test_wrong_npz_files_are_refused(arrays: dict[str, Any], batch: int, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BadRequest, match=message):
        requests(("x", "FP32", [-1, 2]), npz=tmp_path / "a.npz", batch=batch)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(3):
        Image.new("RGB", (8, 6), (number * 40, 10, 20)).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_pictures_become_pixels(pictures: Path) -> None:
    last, rows = requests(("x", "UINT8", [-1, 4, 5, 3]), pictures=pictures, batch=2)
    assert (len(last), rows, last[0][0].shape) == (1, 2, (2, 4, 5, 3))
    pixels = np.frombuffer(last[0][0].raw, np.uint8).reshape(2, 4, 5, 3)
    assert pixels[1, 0, 0].tolist() == [40, 10, 20]
    first, _ = requests(("x", "UINT8", [-1, 3, 4, 5]), pictures=pictures)
    assert np.frombuffer(first[1][0].raw, np.uint8).reshape(1, 3, 4, 5)[0, :, 0, 0].tolist() == [40, 10, 20]
    unbatched, _ = requests(("x", "UINT8", [4, 5, 3]), pictures=pictures)
    assert [each[0].shape for each in unbatched] == [(4, 5, 3)] * 3
    few, _ = requests(("x", "UINT8", [-1, 4, 5, 3]), pictures=pictures, batch=4)
    assert [each[0].shape for each in few] == [(4, 4, 5, 3)]


def test_pictures_become_files(pictures: Path) -> None:
    sent, rows = requests(("x", "BYTES", [-1, 1]), pictures=pictures)
    assert rows == 1
    assert [split_bytes(each[0].raw) for each in sent] == [[(pictures / f"{n}.png").read_bytes()] for n in range(3)]
    assert sent[0][0].shape == (1, 1)
    plain, _ = requests(("x", "BYTES", [1]), pictures=pictures)
    assert plain[0][0].shape == (1,)


def test_wrong_pictures_are_refused(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(BadRequest, match=r"holds no picture: name a folder"):
        requests(("x", "UINT8", [-1, 4, 5, 3]), pictures=tmp_path_factory.mktemp("empty"))
    with pytest.raises(BadRequest, match=r"pictures fill \[height, width, 3\]"):
        requests(("x", "UINT8", [-1, 7]), pictures=pictures)
    with pytest.raises(BadRequest, match=r"has no preprocessing for pictures"):
        make_requests(
            {**metadata(("x", "FP32", [-1, 3, 4, 4])), "outputs": [{"name": "y"}]}, {}, InputOptions(pictures=pictures)
        )
    (pictures / "3.png").write_bytes(b"no picture")
    with pytest.raises(BadRequest, match=r"3\.png: is no readable picture"):
        requests(("x", "UINT8", [-1, 4, 5, 3]), pictures=pictures)


# --- Bytes -------------------------------------------------------------------------------------------------------------

URL = parse_url("http://127.0.0.1:9/prefix")


def sample() -> Request:
    return requests(("a", "FP32", [-1, 2]), ("b", "BYTES", [-1, 1]), distinct=1)[0][0]


def split_http(data: bytes) -> tuple[bytes, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    return line.encode(), dict(field.split(": ", 1) for field in fields), body


def test_http_requests_have_tensors_behind_their_header() -> None:
    request = sample()
    line, fields, body = split_http(wire.http_request(URL, "a/b", "3", request, {"x-client": "me"}))
    assert line == b"POST /prefix/v2/models/a%2Fb/versions/3/infer HTTP/1.1"
    assert fields["Host"] == "127.0.0.1:9"
    assert fields["x-client"] == "me"
    assert int(fields["Content-Length"]) == len(body)
    head = int(fields["Inference-Header-Content-Length"])
    assert body[head:] == request[0].raw + request[1].raw
    document = orjson.loads(body[:head])
    assert [each["parameters"]["binary_data_size"] for each in document["inputs"]] == [8, 20]
    assert document["parameters"] == {"binary_data_output": True}


def test_json_requests_have_lists() -> None:
    request = sample()
    _, fields, body = split_http(wire.http_request(URL, "m", "", request, {}, as_json=True))
    assert "Inference-Header-Content-Length" not in fields
    first, second = orjson.loads(body)["inputs"]
    assert np.array(first["data"], np.float32).tobytes() == request[0].raw
    assert [text.encode() for text in second["data"]] == split_bytes(request[1].raw)
    (bf16,) = requests(("a", "BF16", [-1, 2]), distinct=1)[0]
    with pytest.raises(BadRequest, match="BF16"):
        wire.http_request(URL, "m", "", bf16, {}, as_json=True)


def test_shared_memory_requests_name_their_ranges() -> None:
    places = {"a": wire.Placement("region", 0), "b": wire.Placement("region", 64)}
    _, _, body = split_http(wire.http_request(URL, "m", "", sample(), {}, placements=places))
    assert orjson.loads(body)["inputs"][1]["parameters"] == {
        "shared_memory_region": "region",
        "shared_memory_offset": 64,
        "shared_memory_byte_size": 20,
    }
    message = service_pb2.ModelInferRequest.FromString(wire.grpc_message("m", "", sample(), places))
    assert message.inputs[1].parameters["shared_memory_offset"].int64_param == 64
    assert not message.raw_input_contents


def test_grpc_messages() -> None:
    request = sample()
    message = service_pb2.ModelInferRequest.FromString(wire.grpc_message("m", "3", request))
    assert (message.model_name, message.model_version) == ("m", "3")
    assert [(each.name, each.datatype, list(each.shape)) for each in message.inputs] == [
        ("a", "FP32", [1, 2]),
        ("b", "BYTES", [1, 1]),
    ]
    assert list(message.raw_input_contents) == [each.raw for each in request]


def test_headers_are_checked() -> None:
    assert wire.parse_headers(["x-a: b: c", "Y:1"]) == {"x-a": "b: c", "Y": "1"}
    for text in ("no colon", ": x", "a b: c", "x: a\r\nb: c"):
        with pytest.raises(BadRequest, match="write 'NAME: VALUE'"):
            wire.parse_headers([text])


# --- Answers -----------------------------------------------------------------------------------------------------------


def http_answer(values: list[float], *, binary: bool = True, extra: int = 0) -> Answer:
    output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": [len(values)]}
    if not binary:
        return Answer(orjson.dumps({"id": extra, "outputs": [{**output, "data": values}]}))
    raw = np.array(values, np.float32).tobytes()
    head = orjson.dumps({"id": extra, "outputs": [{**output, "parameters": {"binary_data_size": len(raw)}}]})
    return Answer(head + raw, len(head))


def grpc_answer(values: list[float], request_id: str = "") -> Answer:
    message = service_pb2.ModelInferResponse(id=request_id)
    message.outputs.add(name="y", datatype="FP32", shape=[len(values)])
    message.raw_output_contents.append(np.array(values, np.float32).tobytes())
    return Answer(message.SerializeToString())


@pytest.mark.parametrize("protocol", ["http", "json", "grpc"])
def test_answers_are_compared_by_value_where_their_bytes_differ(protocol: str) -> None:
    def answer(values: list[float], number: int = 0) -> Answer:
        if protocol == "grpc":
            return grpc_answer(values, str(number))
        return http_answer(values, binary=protocol == "http", extra=number)

    check = AnswerCheck("grpc" if protocol == "grpc" else "http", [answer([1.0, 2.0]), answer([5.0])])
    assert check.matches(0, answer([1.0, 2.0]))
    assert check.matches(0, answer([1.0, 2.0], 7))
    assert check.matches(0, answer([1.0, 2.001]))
    assert not check.matches(0, answer([1.0, 2.1]))
    assert not check.matches(0, answer([1.0]))
    assert not check.matches(1, answer([1.0, 2.0]))
    assert not check.matches(0, Answer(b"nonsense", 3))


def test_bytes_tensors() -> None:
    assert split_bytes(join_bytes([b"", b"abc"])) == [b"", b"abc"]
    with pytest.raises(ValueError, match="behind the tensor"):
        split_bytes(b"\x05\0\0\0abc")
    with pytest.raises(ValueError, match="2 elements"):
        decode_http(Answer(http_answer([1.0, 2.0]).body.replace(b"[2]", b"[3]"), http_answer([1.0, 2.0]).json_bytes))
    assert decode_grpc(grpc_answer([1.0]))["y"].tolist() == [1.0]
    same = {"y": np.array([b"a"], object)}
    assert equal_outputs(same, same)
    assert not equal_outputs(same, {"y": np.array([b"b"], object)})
    assert not equal_outputs(same, {})
    assert BY_NAME["BYTES"].size_bytes == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h", ("http", "h", 8000, False, "")),
        ("https://[::1]:9/a/", ("http", "::1", 9, True, "/a")),
        ("grpc://h", ("grpc", "h", 8001, False, "")),
        ("grpcs://h:1", ("grpc", "h", 1, True, "")),
    ],
)
def test_urls(text: str, expected: tuple[Any, ...]) -> None:
    url = parse_url(text)
    assert (url.protocol, url.host, url.port, url.is_tls, url.prefix) == expected


@pytest.mark.parametrize("text", ["h:8000", "ftp://h", "http://", "http://h:x", "grpc://h/path"])
def test_wrong_urls_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"write http://HOST:8000 or grpc://HOST:8001"):
        parse_url(text)
