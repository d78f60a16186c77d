"""The bench's own side of the protocol over gRPC: ModelInfer messages written and read by the published wire types."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from loadtest.protocol import DATATYPES, NAMES, Array
from loadtest.servers import HOST

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
PREFIX_BYTES = 5


def infer_message(model: str, inputs: Mapping[str, Array]) -> bytes:
    """A serialized ModelInferRequest with raw contents, as tritonclient sends it."""
    tensors = [
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=NAMES[array.dtype], shape=array.shape)
        for name, array in inputs.items()
    ]
    contents = [np.ascontiguousarray(array).tobytes() for array in inputs.values()]
    request = service_pb2.ModelInferRequest(model_name=model, inputs=tensors, raw_input_contents=contents)
    return bytes(request.SerializeToString())


def shared_memory_message(model: str, inputs: Mapping[str, Array], region: str, offset: int) -> bytes:
    """A serialized ModelInferRequest whose only input lies in a region of shared memory."""
    ((name, array),) = inputs.items()
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = array.nbytes
    tensor.parameters["shared_memory_offset"].int64_param = offset
    return bytes(request.SerializeToString())


def framed(message: bytes) -> bytes:
    """A message behind its length prefix (gRPC over HTTP/2, "Length-Prefixed-Message"), not compressed."""
    return struct.pack(">BI", 0, len(message)) + message


def decode_answer(message: bytes) -> dict[str, Array]:
    """The tensors of a serialized ModelInferResponse with raw contents, by name.

    Raises:
        ValueError: contents and outputs do not belong together.
    """
    response = service_pb2.ModelInferResponse.FromString(message)
    outputs: dict[str, Array] = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        outputs[output.name] = np.frombuffer(content, dtype=DATATYPES[output.datatype]).reshape(output.shape)
    return outputs


def call(port: int, method: str, message: bytes, timeout_s: float = 30.0) -> bytes:
    """One unary call on a fresh channel, by grpcio: the answer's message as it came over the wire.

    Raises:
        grpc.RpcError: any status but OK.
    """
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        return ask(message, timeout=timeout_s)
