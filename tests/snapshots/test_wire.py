"""Bytes that clients get: answers of each protocol to fixed requests, over sockets, compared with what is stored.

Numbers that depend on time, load or the machine are masked; everything else is compared byte by byte. The models compute with
small whole numbers, whose sums are exact on every processor.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import hpack
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from tests.snapshots.comparison import compare
from tests.support import models
from tests.support.serving import HOST, Server, serving

LABELLED = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 5 }
output { name: "SCORES" data_type: TYPE_FP32 dims: 5 label_filename: "labels.txt" }
output { name: "BEST" data_type: TYPE_INT64 dims: 1 }
"""
SERVICE = "/inference.GRPCInferenceService/"
# Numbers in headers, parameters and JSON; why a batch was closed, which depends on the model's measured latency.
MASKS = (
    (rb"((?:application_utilization|rps_fractional|eps)[=\":]{1,2})[\d.e-]+", rb"\1#"),
    (rb"((?:headrace-queue-depth|headrace-predicted-wait-us|headrace_queue_depth|[a-z_]+_us)[^\w#]{1,4})\d+", rb"\1#"),
    (rb'((?:[a-z]+_us|_depth)": ?\{"int64Param": ?)"\d+"', rb'\1"#"'),
    (rb"(;dur=)[\d.]+", rb"\1#"),
    (rb"413 Request Entity Too Large", rb"413 Content Too Large"),  # before Python 3.13
    (rb'(batch_closed(?:=|":"|": ?\{"stringParam": ?")|desc="\d+ rows, )[a-z]+', rb"\1#"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("wire")
    repository = folder / "repository"
    models.add_model(repository, "row_sums", models.row_sums())
    models.add_model(repository, "sum_difference", models.sum_difference())
    models.add_model(repository, "text", models.identity("BYTES"))
    models.add_model(repository, "flags", models.identity("BOOL"))
    models.add_model(repository, "halves", models.identity("FP16"))
    models.add_model(repository, "unbatched", models.unbatched())
    models.add_model(repository, "table_lookup", models.table_lookup())
    models.add_model(repository, "scores", models.scores(), config=LABELLED, files={"labels.txt": "apple\nbanana\n"})
    models.add_model(repository, "broken", b"this is no ONNX file")
    with serving(repository, folder, "--max-body-bytes", "100000") as running:
        yield running


def masked(data: bytes) -> bytes:
    """Without what depends on time, load and the machine; nor the length of what has been masked."""
    for pattern, put in MASKS:
        data = re.sub(pattern, put, data)
    if b"#" in data.partition(b"\r\n\r\n")[2]:
        data = re.sub(rb"(content-length: )\d+", rb"\1#", data)
    return data


def shown(data: bytes) -> str:
    """Bytes as text: printable ASCII as it is, everything else escaped."""
    return data.decode("latin-1").encode("unicode_escape").decode().replace("\\n", "\\n\n  ").removesuffix("\n  ")


# --- HTTP/1.1 ----------------------------------------------------------------------------------------------------------


def http(path: str, body: bytes | None = None, *headers: str, method: str = "") -> bytes:
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def infer(model: str, document: Any, *headers: str) -> bytes:
    return http(f"/v2/models/{model}/infer", json.dumps(document).encode(), *headers)


def tensor(
    name: str, datatype: str, shape: Sequence[int], data: object = None, **parameters: object
) -> dict[str, object]:
    created: dict[str, object] = {"name": name, "datatype": datatype, "shape": list(shape)}
    if data is not None:
        created["data"] = data
    if parameters:
        created["parameters"] = parameters
    return created


def binary(model: str, document: Any, content: bytes, *headers: str) -> bytes:
    head = json.dumps(document).encode()
    size = f"Inference-Header-Content-Length: {len(head)}"
    return http(f"/v2/models/{model}/infer", head + content, size, *headers)


ROWS = tensor("X", "FP32", [2, 3], [1, 2, 3, 4, 5, 6])
SCORES = tensor("X", "FP32", [1, 5], [1, 5, 4, 2, 3])
FLOATS = np.arange(6, dtype="<f4").tobytes()
TEXT = b"".join(len(word).to_bytes(4, "little") + word for word in (b"one", "zwölf".encode(), b""))

HTTP: dict[str, bytes] = {
    "JSON": infer("row_sums", {"inputs": [ROWS]}),
    "JSON with an id and one output": infer(
        "row_sums", {"id": "the id", "inputs": [ROWS], "outputs": [{"name": "SUM"}]}
    ),
    "JSON of a version": http("/v2/models/row_sums/versions/1/infer", json.dumps({"inputs": [ROWS]}).encode()),
    "two inputs of two types": infer(
        "sum_difference",
        {"inputs": [tensor("A", "INT32", [1, 4], [1, 2, 3, 4]), tensor("B", "FP32", [1, 4], [[0.5, 1, -2, 1e30]])]},
    ),
    "text as JSON": infer("text", {"inputs": [tensor("X", "BYTES", [1, 2], ["one", "zwölf"])]}),
    "boolean values as JSON": infer("flags", {"inputs": [tensor("X", "BOOL", [1, 2], [True, False])]}),
    "halves, which JSON cannot carry": infer("halves", {"inputs": [tensor("X", "FP16", [1, 1], [1])]}),
    "without a batch dimension": infer("unbatched", {"inputs": [tensor("X", "FP32", [2, 3], [0, 1, 2, 3, 4, 5])]}),
    "not finite numbers": binary(
        "row_sums",
        {"inputs": [tensor("X", "FP32", [1, 3], binary_data_size=12)], "outputs": [{"name": "DOUBLE"}]},
        np.array([np.nan, np.inf, -np.inf], "<f4").tobytes(),
    ),
    "binary": binary(
        "row_sums",
        {"parameters": {"binary_data_output": True}, "inputs": [tensor("X", "FP32", [2, 3], binary_data_size=24)]},
        FLOATS,
    ),
    "binary in, one output binary": binary(
        "row_sums",
        {
            "inputs": [tensor("X", "FP32", [2, 3], binary_data_size=24)],
            "outputs": [{"name": "SUM", "parameters": {"binary_data": True}}, {"name": "DOUBLE"}],
        },
        FLOATS,
    ),
    "binary halves": binary(
        "halves",
        {
            "parameters": {"binary_data_output": True},
            "inputs": [tensor("X", "FP16", [1, 2], binary_data_size=4)],
        },
        np.array([1, -2], "<f2").tobytes(),
    ),
    "binary text": binary(
        "text",
        {
            "parameters": {"binary_data_output": True},
            "inputs": [tensor("X", "BYTES", [3, 1], binary_data_size=len(TEXT))],
        },
        TEXT,
    ),
    "classes": infer(
        "scores", {"inputs": [SCORES], "outputs": [{"name": "SCORES", "parameters": {"classification": 3}}]}
    ),
    "timing": infer("row_sums", {"inputs": [ROWS], "outputs": [{"name": "SUM"}]}, "headrace-timing: 1"),
    "load as text": infer("row_sums", {"inputs": [ROWS]}, "endpoint-load-metrics-format: text"),
    "load as JSON": infer("row_sums", {"inputs": [ROWS]}, "endpoint-load-metrics-format: json"),
    "compressed": infer("row_sums", {"inputs": [ROWS]}, "Accept-Encoding: gzip"),
    "no JSON": http("/v2/models/row_sums/infer", b"{"),
    "no inputs": infer("row_sums", {"inputs": []}),
    "no such model": infer("nowhere", {"inputs": [ROWS]}),
    "no such version": http("/v2/models/row_sums/versions/7/infer", json.dumps({"inputs": [ROWS]}).encode()),
    "a model that could not be loaded": infer("broken", {"inputs": [ROWS]}),
    "an unknown input": infer("row_sums", {"inputs": [ROWS, tensor("Z", "FP32", [1], [1])]}),
    "an unknown output": infer("row_sums", {"inputs": [ROWS], "outputs": [{"name": "Z"}]}),
    "the wrong type": infer("row_sums", {"inputs": [tensor("X", "INT32", [1, 2], [1, 2])]}),
    "the wrong shape": infer("sum_difference", {"inputs": [tensor("A", "INT32", [1, 3], [1, 2, 3])]}),
    "too few numbers": infer("row_sums", {"inputs": [tensor("X", "FP32", [2, 3], [1])]}),
    "too few bytes": binary("row_sums", {"inputs": [tensor("X", "FP32", [2, 3], binary_data_size=24)]}, FLOATS[:8]),
    "shared memory that is not registered": infer(
        "row_sums", {"inputs": [tensor("X", "FP32", [1, 1], shared_memory_region="r", shared_memory_byte_size=4)]}
    ),
    "a deadline that is none": infer("row_sums", {"inputs": [ROWS]}, "x-request-timeout-ms: soon"),
    "a model that fails": infer("table_lookup", {"inputs": [tensor("X", "INT64", [1, 1], [100])]}),
    "too large": http("/v2/models/row_sums/infer", b" " * 100_001),
    "a method that is not served": http("/v2/models/row_sums/infer", method="GET"),
    "no such path": http("/v2/nothing"),
    "loading where it is not allowed": http("/v2/repository/models/row_sums/load", b"{}"),
    "live": http("/v2/health/live"),
    "ready": http("/v2/health/ready"),
    "model ready": http("/v2/models/row_sums/ready"),
    "broken model ready": http("/v2/models/broken/ready"),
    "server metadata": http("/v2"),
    "model metadata": http("/v2/models/scores"),
    "model configuration": http("/v2/models/scores/config"),
    "index": http("/v2/repository/index", b"{}"),
    "models": http("/v2/models"),
    "log settings": http("/v2/logging"),
    "trace settings": http("/v2/trace/setting"),
    "system shared memory": http("/v2/systemsharedmemory/status"),
    "CUDA shared memory": http("/v2/cudasharedmemory/status"),
}
# Only the keys of these are compared: almost every value is a measurement.
DOCUMENTS = [
    "/v2/models/row_sums/stats",
    "/v2/models/row_sums/load",
    "/v2/models/row_sums/profile",
    "/v2/models/row_sums/explain",
    "/v2/status",
]
# Objects whose keys are measurements too.
COUNTERS = ("sizes", "latency", "batches", "failures", "closed")


def read_http(connection: socket.socket) -> bytes:
    """One answer whose length is in its headers."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16) or pytest.fail(f"the server closed the connection after {data!r}")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)\r\n", data)
    assert length is not None, data
    size = data.index(b"\r\n\r\n") + 4 + int(length[1])
    while len(data) < size:
        data += connection.recv(1 << 16) or pytest.fail(f"the server closed the connection after {data!r}")
    assert len(data) == size
    return data


def keys(value: object, at: str = "") -> Iterator[str]:
    """The form of a JSON document: the path of each value, and its type."""
    if isinstance(value, dict) and at.rpartition(".")[2] in COUNTERS:
        yield f"{at}: counters"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from keys(item, f"{at}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from keys(item, f"{at}[]")
    elif at.endswith(".serving"):
        yield f"{at}: null"
    else:
        kind = type(value)
        yield f"{at}: {'number' if kind in (int, float) else kind.__name__}"


def test_http(server: Server) -> None:
    texts = []
    for name, request in HTTP.items():
        with socket.create_connection((HOST, server.port), timeout=30) as connection:
            connection.sendall(request)
            texts.append(f"# {name}\n  {shown(masked(read_http(connection)))}\n")
    compare("http.txt", "\n".join(texts))


def test_keys_of_json_documents(server: Server) -> None:
    for _ in range(3):
        assert server.request("POST", "/v2/models/row_sums/infer", json.dumps({"inputs": [ROWS]}).encode())[0] == 200
    lines: list[str] = []
    for path in DOCUMENTS:
        status, _, content = server.request("GET", path)
        assert status == 200, (path, content)
        lines += [f"# {path}", *dict.fromkeys(keys(json.loads(content))), ""]
    compare("json_keys.txt", "\n".join(lines))


# --- gRPC --------------------------------------------------------------------------------------------------------------


def request(model: str, *inputs: tuple[str, str, Sequence[int], bytes], **more: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, **more)
    for name, datatype, shape, content in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)
    return message


def contents(model: str, name: str, datatype: str, shape: Sequence[int], **values: object) -> pb.ModelInferRequest:
    """Values in fields of their own instead of raw bytes."""
    message = pb.ModelInferRequest(model_name=model)
    created = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, items in values.items():
        getattr(created.contents, field).extend(items)
    return message


def with_output(message: pb.ModelInferRequest, output: str, **parameters: int | bool | str) -> pb.ModelInferRequest:
    created = message.outputs.add(name=output)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(created.parameters[name], kind, value)
    return message


X = ("X", "FP32", (2, 3), FLOATS)
Case = tuple[str, Message, dict[str, str]]
GRPC: dict[str, Case] = {
    "raw": ("ModelInfer", request("row_sums", X), {}),
    "raw, an id, one output": ("ModelInfer", with_output(request("row_sums", X, id="the id"), "SUM"), {}),
    "of a version": ("ModelInfer", request("row_sums", X, model_version="1"), {}),
    "two inputs of two types": (
        "ModelInfer",
        request(
            "sum_difference",
            ("A", "INT32", (1, 4), np.arange(4, dtype="<i4").tobytes()),
            ("B", "FP32", (1, 4), np.array([0.5, 1, -2, 1e30], "<f4").tobytes()),
        ),
        {},
    ),
    "contents": ("ModelInfer", contents("row_sums", "X", "FP32", (1, 2), fp32_contents=[1, 2]), {}),
    "contents that are text": (
        "ModelInfer",
        contents("text", "X", "BYTES", (1, 2), bytes_contents=[b"one", b"two"]),
        {},
    ),
    "text that is not UTF-8": (
        "ModelInfer",
        contents("text", "X", "BYTES", (1, 2), bytes_contents=[b"one", b"\xff"]),
        {},
    ),
    "raw text": ("ModelInfer", request("text", ("X", "BYTES", (3, 1), TEXT)), {}),
    "classes": (
        "ModelInfer",
        with_output(
            request("scores", ("X", "FP32", (1, 5), np.array([1, 5, 4, 2, 3], "<f4").tobytes())),
            "SCORES",
            classification=3,
        ),
        {},
    ),
    "timing": ("ModelInfer", with_output(request("row_sums", X), "SUM"), {"headrace-timing": "1"}),
    "load": ("ModelInfer", with_output(request("row_sums", X), "SUM"), {"endpoint-load-metrics-format": "text"}),
    "no inputs": ("ModelInfer", pb.ModelInferRequest(model_name="row_sums"), {}),
    "no such model": ("ModelInfer", request("nowhere", X), {}),
    "no such version": ("ModelInfer", request("row_sums", X, model_version="7"), {}),
    "a model that could not be loaded": ("ModelInfer", request("broken", X), {}),
    "an unknown input": ("ModelInfer", request("row_sums", X, ("Z", "FP32", (1,), FLOATS[:4])), {}),
    "an unknown output": ("ModelInfer", with_output(request("row_sums", X), "Z"), {}),
    "the wrong type": ("ModelInfer", request("row_sums", ("X", "INT32", (2, 3), FLOATS)), {}),
    "too few bytes": ("ModelInfer", request("row_sums", ("X", "FP32", (2, 3), FLOATS[:8])), {}),
    "a deadline that is none": ("ModelInfer", request("row_sums", X), {"x-request-timeout-ms": "soon"}),
    "a model that fails": (
        "ModelInfer",
        request("table_lookup", ("X", "INT64", (1, 1), np.array([100], "<i8").tobytes())),
        {},
    ),
    "live": ("ServerLive", pb.ServerLiveRequest(), {}),
    "ready": ("ServerReady", pb.ServerReadyRequest(), {}),
    "model ready": ("ModelReady", pb.ModelReadyRequest(name="row_sums"), {}),
    "broken model ready": ("ModelReady", pb.ModelReadyRequest(name="broken"), {}),
    "server metadata": ("ServerMetadata", pb.ServerMetadataRequest(), {}),
    "model metadata": ("ModelMetadata", pb.ModelMetadataRequest(name="scores"), {}),
    "model configuration": ("ModelConfig", pb.ModelConfigRequest(name="scores"), {}),
    "configuration of no model": ("ModelConfig", pb.ModelConfigRequest(name="nowhere"), {}),
    "index": ("RepositoryIndex", pb.RepositoryIndexRequest(), {}),
    "loading where it is not allowed": (
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="row_sums"),
        {},
    ),
    "system shared memory": ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), {}),
    "log settings": ("LogSettings", pb.LogSettingsRequest(), {}),
    "a method that is not served": ("Nothing", pb.ServerLiveRequest(), {}),
}


def lines_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str]:
    pairs = [(name, value if isinstance(value, bytes) else value.encode()) for name, value in metadata or ()]
    return [shown(masked(name.encode() + b": " + value)) for name, value in pairs]


def described(method: str, content: bytes) -> list[str]:
    """A message as it is on the wire, and as JSON to read a difference by.

    Maps have no order on the wire, and parameters may be measurements: of such messages the JSON alone is compared.
    """
    name = method.removesuffix("Infer") + "InferResponse" if method.endswith("Infer") else f"{method}Response"
    message = json_format.MessageToDict(getattr(pb, name).FromString(content))
    text = json.dumps(message, sort_keys=True, ensure_ascii=False)
    hidden = re.search(r'"(parameters|settings)": \{', text) is not None
    return [masked(text.encode()).decode()] if hidden else [f"{shown(content)}", text]


def call(channel: grpc.Channel, method: str, message: Message, metadata: dict[str, str]) -> str:
    run = channel.unary_unary(SERVICE + method, request_serializer=None, response_deserializer=None)
    lines: list[str] = []
    done: Any
    try:
        content, done = run.with_call(message.SerializeToString(), metadata=tuple(metadata.items()), timeout=30)
        lines += described(method, content)
    except grpc.RpcError as error:
        done = error
    code = done.code().name
    first = [f"initial {line}" for line in lines_of(done.initial_metadata())]
    last = [f"trailing {line}" for line in lines_of(done.trailing_metadata())]
    details = shown(masked((done.details() or "").encode()))
    return "\n".join(f"  {line}" for line in [*first, *lines, f"{code} {details}".strip(), *last])


def test_grpc(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        texts = [f"# {name}\n{call(channel, *case)}\n" for name, case in GRPC.items()]
    compare("grpc.txt", "\n".join(texts))


def test_grpc_stream(server: Server) -> None:
    """Answers, and an error as a message of the stream."""
    messages = [request("row_sums", X, id="1"), request("nowhere", X, id="2"), request("row_sums", X, id="3")]
    lines: list[str] = []
    with grpc.insecure_channel(server.grpc_address) as channel:
        run = channel.stream_stream(SERVICE + "ModelStreamInfer", request_serializer=None, response_deserializer=None)
        stream = run(iter([message.SerializeToString() for message in messages]), timeout=30)
        for content in stream:
            lines += described("ModelStreamInfer", content)
        lines += [f"{stream.code().name} {stream.details()}".strip()]
        lines += [f"trailing {line}" for line in lines_of(stream.trailing_metadata())]
    compare("grpc_stream.txt", "\n".join(lines))


# --- HTTP/2 ------------------------------------------------------------------------------------------------------------

KINDS = ("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY", "WINDOW_UPDATE")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: str, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([KINDS.index(kind), flags]) + stream.to_bytes(4, "big") + payload


def opened(encoder: hpack.Encoder, stream: int, path: str, message: bytes, *fields: tuple[str, str]) -> bytes:
    """The frames of one unary call."""
    head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
    more = [("content-type", "application/grpc"), ("te", "trailers"), *fields]
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return frame("HEADERS", END_HEADERS, stream, encoder.encode(head + more)) + frame("DATA", END_STREAM, stream, data)


def read_frames(
    connection: socket.socket, done: Callable[[str, int, int], bool]
) -> Iterator[tuple[str, int, int, bytes]]:
    """Frames, up to the one that `done` takes for the last, by its kind, flags and stream."""
    file = connection.makefile("rb")
    while True:
        head = file.read(9)
        assert len(head) == 9, "the server closed the connection"
        kind, flags, stream = KINDS[head[3]], head[4], int.from_bytes(head[5:], "big")
        yield kind, flags, stream, file.read(int.from_bytes(head[:3], "big"))
        if done(kind, flags, stream):
            return


def exchange(port: int, first: bytes, done: Callable[[str, int, int], bool]) -> str:
    """Send bytes on a new connection; the frames that come, grouped by stream, of which each has its own order."""
    decoder = hpack.Decoder()
    streams: dict[int, list[str]] = {}
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(PREFACE + frame("SETTINGS", 0, 0) + first)
        for kind, flags, stream, payload in read_frames(connection, done):
            if kind == "HEADERS":
                fields = decoder.decode(payload, raw=True)
                text = "; ".join(shown(masked(name + b": " + value)) for name, value in fields)
                # Blocks without a measurement are compared by their bytes too.
                text += "" if "#" in text or "REFERENCE" in text else f" ({payload.hex()})"
            else:
                text = payload.hex() if kind != "DATA" else shown(payload)
            streams.setdefault(stream, []).append(f"  {stream} {kind} flags={flags} {text}".rstrip())
    return "\n".join(line for stream in sorted(streams) for line in streams[stream])


def test_frames_of_grpc(server: Server) -> None:
    encoder = hpack.Encoder()
    infers = [request("row_sums", X, id="1"), request("row_sums", X, id="2"), request("nowhere", X)]
    texts = []

    def ended(kind: str, flags: int, stream: int) -> bool:
        return kind in ("HEADERS", "DATA") and bool(flags & END_STREAM)

    for name, message in zip(("an answer", "another answer", "an error"), infers, strict=True):
        call = opened(hpack.Encoder(), 1, SERVICE + "ModelInfer", message.SerializeToString())
        texts.append(f"# {name}\n{exchange(server.grpc_port, call, ended)}\n")
    call = opened(encoder, 1, SERVICE + "ServerLive", b"") + frame("PING", 0, 0, b"12345678")
    both = {("PING", 0): False, ("HEADERS", 1): False}

    def pinged(kind: str, flags: int, stream: int) -> bool:
        if (kind, stream) in both and (kind == "PING" or ended(kind, flags, stream)):
            both[kind, stream] = True
        return all(both.values())

    texts.append(f"# a short call and a PING\n{exchange(server.grpc_port, call, pinged)}\n")
    for name, data in {
        "a frame on stream 2": frame("DATA", 0, 2, b"x"),
        "a PING of the wrong size": frame("PING", 0, 0, b"1234"),
        "a window that overflows": frame("WINDOW_UPDATE", 0, 0, (2**31 - 1).to_bytes(4, "big")),
        "settings of the wrong size": frame("SETTINGS", 0, 0, b"12345"),
    }.items():
        text = exchange(server.grpc_port, data, lambda kind, flags, stream: kind == "GOAWAY")
        texts.append(f"# {name}\n{text}\n")
    compare("http2.txt", "\n".join(texts))
