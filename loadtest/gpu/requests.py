"""The clients' requests: pictures in the body, or a word where in shared memory they lie."""

from __future__ import annotations

import json
import math

from tritonclient.grpc import service_pb2

from loadtest.gpu.regions import Region
from loadtest.gpu.subject import INPUT
from loadtest.grpc_protocol import infer_message
from loadtest.protocol import NAMES, Array, HttpRequest, binary_request


def http_request(model: str, pixels: Array, number: int, region: Region | None) -> HttpRequest:
    """An infer request over HTTP.

    Args:
        model: its name.
        pixels: uint8 (requests, rows, side, side, 3).
        number: which of the requests.
        region: that holds all of `pixels`; None sends them.
    """
    tensor = pixels[number]
    if region is None:
        return binary_request(model, {INPUT: tensor})
    described = {
        "name": INPUT,
        "shape": list(tensor.shape),
        "datatype": NAMES[tensor.dtype],
        "parameters": _place(tensor, number, region),
    }
    body = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    return HttpRequest(f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})


def grpc_message(model: str, pixels: Array, number: int, region: Region | None) -> bytes:
    """The same as a serialized ModelInferRequest."""
    tensor = pixels[number]
    if region is None:
        return infer_message(model, {INPUT: tensor})
    described = service_pb2.ModelInferRequest.InferInputTensor(
        name=INPUT, datatype=NAMES[tensor.dtype], shape=tensor.shape
    )
    for name, value in _place(tensor, number, region).items():
        if isinstance(value, str):
            described.parameters[name].string_param = value
        else:
            described.parameters[name].int64_param = value
    return bytes(service_pb2.ModelInferRequest(model_name=model, inputs=[described]).SerializeToString())


def _place(tensor: Array, number: int, region: Region) -> dict[str, str | int]:
    size_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    return {
        "shared_memory_region": region.name,
        "shared_memory_byte_size": size_bytes,
        "shared_memory_offset": number * size_bytes,
    }
