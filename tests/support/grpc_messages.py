"""A model's inference messages as Triton's client sends them, and what the codec makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import BY_NAME, Array, ModelSpec, TensorSpec
from headrace.wire.grpc.codec import GrpcCodec, scan
from headrace.wire.requests.request_template import RequestTemplate
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc._utils import _get_inference_request

LABELS = ("cat", "dog")


def model(*, batch: int = 8, optional: bool = False) -> ModelSpec:
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
    return ModelSpec("m", "3", "test", {t.name: t for t in inputs}, {t.name: t for t in outputs}, batch)


def codec(**options: Any) -> GrpcCodec:
    return GrpcCodec(model(**options))


def answer() -> InferResponse:
    text = np.empty((2, 1), dtype=object)
    text[:, 0] = [b"yes", "né".encode()]
    scores: Array = np.array([[0.25, 0.5, 0.125], [1, -1, 2]], dtype="<f4")
    return InferResponse({"S": scores, "T": text})


A = np.array([[1, 2], [3, 4]], "<i4")
B = np.array([[0.5], [1.5]], "<f4")


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    created = triton.InferInput(name, list(array.shape), {"i": "INT32", "f": "FP32"}[array.dtype.kind])
    return created.set_data_from_numpy(array)


def request(
    inputs: Sequence[triton.InferInput] | None = None,
    outputs: Sequence[triton.InferRequestedOutput] | None = None,
    request_id: str = "",
    **more: Any,
) -> pb.ModelInferRequest:
    """Return a request as Triton's client sends it."""
    options = {
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
        "priority": 0,
        "timeout": None,
        "parameters": None,
    } | more
    tensors = [tensor("A", A), tensor("B", B)] if inputs is None else inputs
    created: pb.ModelInferRequest = _get_inference_request("m", tensors, "", request_id, outputs, **options)
    return created


def decode(
    message: pb.ModelInferRequest | bytes, of: GrpcCodec | None = None, deadline_ns: int = 0
) -> tuple[InferRequest, RequestTemplate]:
    content = message if isinstance(message, bytes) else message.SerializeToString()
    return (of or codec()).decode(content, scan(content), 1_000, deadline_ns)
