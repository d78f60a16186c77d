"""The client's side of the Open Inference Protocol V2, kept apart from the server's codec so that the one can check the other.

It has only the datatypes that the demo models use.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import BY_NAME

Array = npt.NDArray[Any]

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {name: BY_NAME[name].dtype for name in ("FP32", "FP64", "INT32", "INT64", "UINT8")}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}


class Refused(RuntimeError):
    """A control-plane path was answered with an error."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One POST: the path, the body and the headers that belong to the body."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def wire_bytes(request: HttpRequest, port: int) -> bytes:
    """A request as it goes over a connection."""
    headers = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(request.body)), **request.headers}
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + request.body


def binary_request(model: str, inputs: Mapping[str, Array]) -> HttpRequest:
    """An infer request whose tensors travel as raw bytes behind the JSON header, as those of the answer shall."""
    described, blobs = [], []
    for name, array in inputs.items():
        blob = np.ascontiguousarray(array).tobytes()
        described.append(_described(name, array) | {"parameters": {"binary_data_size": len(blob)}})
        blobs.append(blob)
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return HttpRequest(_infer_path(model), header + b"".join(blobs), headers)


def json_request(model: str, inputs: Mapping[str, Array]) -> HttpRequest:
    """An infer request with flat JSON tensors."""
    described = [_described(name, array) | {"data": array.ravel().tolist()} for name, array in inputs.items()]
    body = json.dumps({"inputs": described}).encode()
    return HttpRequest(_infer_path(model), body, {"Content-Type": "application/json"})


def shared_memory_request(model: str, inputs: Mapping[str, Array], region: str, offset: int = 0) -> HttpRequest:
    """An infer request whose only input lies in a region of shared memory, and whose answer is binary."""
    ((name, array),) = inputs.items()
    parameters: dict[str, str | int] = {"shared_memory_region": region, "shared_memory_byte_size": array.nbytes}
    if offset:
        parameters["shared_memory_offset"] = offset
    described = _described(name, array) | {"parameters": parameters}
    body = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    return HttpRequest(_infer_path(model), body, {"Content-Type": "application/json"})


def decode_answer(headers: Mapping[str, str], body: bytes) -> dict[str, Array]:
    """The output tensors of an infer answer, by name.

    Args:
        headers: the answer's headers; their names are compared without regard to case.
        body: JSON alone, or JSON followed by raw tensors.

    Raises:
        ValueError: the body is shorter or longer than its header says.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    header_bytes = int(lowered.get(HEADER_LENGTH.lower(), len(body)))
    outputs: dict[str, Array] = {}
    offset = header_bytes
    for output in json.loads(body[:header_bytes])["outputs"]:
        dtype, shape = DATATYPES[output["datatype"]], output["shape"]
        size_bytes = output.get("parameters", {}).get("binary_data_size")
        if size_bytes is None:
            outputs[output["name"]] = np.asarray(output["data"], dtype=dtype).reshape(shape)
            continue
        outputs[output["name"]] = np.frombuffer(body[offset : offset + size_bytes], dtype=dtype).reshape(shape)
        offset += size_bytes
    if offset != len(body):
        raise ValueError(f"the answer has {len(body)} bytes, its header describes {offset}")
    return outputs


def send(host: str, port: int, request: HttpRequest, timeout_s: float = 30.0) -> tuple[int, dict[str, str], bytes]:
    """POST once on a fresh connection: status, headers, body; GET a request without a body."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        method = "POST" if request.body else "GET"
        connection.request(method, request.path, request.body or None, dict(request.headers))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def send_json(host: str, port: int, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of a control-plane path: GET without a body, POST with one; None if it is empty.

    Raises:
        Refused: the status is not 200.
    """
    status, _, text = send(host, port, HttpRequest(path, b"" if body is None else json.dumps(body).encode()))
    if status != 200:
        raise Refused(f"{path} was answered with {status}: {text[:300]!r}")
    return json.loads(text) if text else None


def _described(name: str, array: Array) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype]}


def _infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"
