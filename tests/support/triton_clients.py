"""Requests of Triton's Python clients, over either protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import np_to_triton_dtype

from tests.support.serving import Server

Client = triton_http.InferenceServerClient | triton_grpc.InferenceServerClient


def connect(server: Server, protocol: str, **options: Any) -> Any:
    """A client over "http" or "grpc"."""
    if protocol == "grpc":
        return triton_grpc.InferenceServerClient(server.grpc_address, **options)
    return triton_http.InferenceServerClient(server.address, **options)


def module_of(client: Any) -> Any:
    """The module of a client, whose classes its requests are made of."""
    return triton_grpc if isinstance(client, triton_grpc.InferenceServerClient) else triton_http


def inputs_of(module: Any, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    return [
        module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]


def infer(client: Any, model: str, arrays: Mapping[str, np.ndarray], **options: Any) -> Any:
    return client.infer(model, inputs_of(module_of(client), arrays), **options)


def ask(server: Server, protocol: str, model: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Send a request on a connection of its own, and return its outputs by name."""
    with connect(server, protocol) as client:
        result = infer(client, model, arrays)
        response = result.get_response()
        outputs = response["outputs"] if protocol == "http" else response.outputs
        names = [output["name"] if protocol == "http" else output.name for output in outputs]
        return {name: result.as_numpy(name) for name in names}
