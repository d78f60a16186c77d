"""Prepared requests as bytes: HTTP/1.1 requests and ModelInferRequest messages, with tensors in the body or in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from headrace.core.errors import BadRequest
from headrace.core.tensor import BF16, BYTES
from headrace.server.commands.connection import model_path
from headrace.wire.http2.frames import HeaderField, encode

from headrace_bench.answers import split_bytes
from headrace_bench.inputs import Request, RequestTensor
from headrace_bench.target import ServerUrl

MODEL_INFER = b"/inference.GRPCInferenceService/ModelInfer"


class Placement(NamedTuple):
    """A tensor in shared memory.

    Attributes:
        region: name of the registered region.
        offset: of the tensor in the region, in bytes.
    """

    region: str
    offset: int


# Shared memory of the tensors of a request, by input name; empty if they are in the body.
Placements = Mapping[str, Placement]


def http_request(
    url: ServerUrl,
    model: str,
    version: str,
    request: Request,
    headers: Mapping[str, str],
    *,
    as_json: bool = False,
    placements: Placements | None = None,
) -> bytes:
    """Encode an HTTP/1.1 request.

    Args:
        url: address of the server.
        model: name of the model.
        version: version of the model; "" lets the server choose.
        request: its inputs.
        headers: further headers.
        as_json: tensors as JSON lists, in the response too, for servers without the binary extension.
        placements: tensors in shared memory.

    Raises:
        BadRequest: JSON cannot express a tensor.
    """
    described, blobs = [], []
    for tensor in request:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype.name}
        if placements:
            place = placements[tensor.name]
            entry["parameters"] = {
                "shared_memory_region": place.region,
                "shared_memory_offset": place.offset,
                "shared_memory_byte_size": len(tensor.raw),
            }
        elif as_json:
            entry["data"] = _json_elements(tensor)
        else:
            entry["parameters"] = {"binary_data_size": len(tensor.raw)}
            blobs.append(tensor.raw)
        described.append(entry)
    document: dict[str, Any] = {"inputs": described}
    if not as_json:
        document["parameters"] = {"binary_data_output": True}
    head = orjson.dumps(document)
    body = b"".join([head, *blobs])
    fields = {"Host": url.authority, "Content-Length": str(len(body))}
    if blobs:
        fields |= {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    else:
        fields["Content-Type"] = "application/json"
    lines = [f"POST {url.prefix}{model_path(model, version)}/infer HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**fields, **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _json_elements(tensor: RequestTensor) -> list[Any]:
    if tensor.datatype is BF16:
        raise BadRequest(f"the input '{tensor.name}' is BF16, which JSON cannot express: leave --body json out")
    if tensor.datatype is BYTES:
        try:
            return [element.decode() for element in split_bytes(tensor.raw)]
        except UnicodeDecodeError:
            raise BadRequest(
                f"the input '{tensor.name}' holds bytes that are no UTF-8 text, which JSON cannot express: leave --body json out"
            ) from None
    elements: list[Any] = np.frombuffer(tensor.raw, tensor.datatype.dtype).tolist()
    assert len(elements) == math.prod(tensor.shape)
    return elements


def grpc_message(model: str, version: str, request: Request, placements: Placements | None = None) -> bytes:
    """Encode a ModelInferRequest; see `http_request`."""
    from tritonclient.grpc import service_pb2  # takes 0.3 s to import

    message = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for tensor in request:
        entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype.name, shape=tensor.shape)
        if placements:
            place = placements[tensor.name]
            entry.parameters["shared_memory_region"].string_param = place.region
            entry.parameters["shared_memory_offset"].int64_param = place.offset
            entry.parameters["shared_memory_byte_size"].int64_param = len(tensor.raw)
        else:
            message.raw_input_contents.append(tensor.raw)
    return bytes(message.SerializeToString())


def grpc_headers(url: ServerUrl, headers: Mapping[str, str]) -> bytes:
    """Encode the header block of a call of ModelInfer; names of further headers are sent in lower case."""
    fields: list[HeaderField] = [
        (b":method", b"POST"),
        (b":scheme", b"https" if url.is_tls else b"http"),
        (b":path", MODEL_INFER),
        (b":authority", url.authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"headrace-bench"),
    ]
    fields += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    return encode(fields)


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Parse `NAME: VALUE` of --header.

    Raises:
        BadRequest: a text is no header.
    """
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        name, value = name.strip(), value.strip()
        is_name = bool(name) and name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        if not colon or not is_name or any(letter in value for letter in "\r\n\0") or not value.isascii():
            raise BadRequest(f"--header {text[:80]!r} is no header: write 'NAME: VALUE' in ASCII")
        headers[name] = value
    return headers
