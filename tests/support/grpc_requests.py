"""gRPC requests of end-to-end tests: messages, streams, what the metrics say of them, and waiting for it."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.support.serving import Server

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
STEPS_PER_S = 5_000  # of `busy`, at the least


def tensor(name: str, array: np.ndarray, datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def message(model: str, request_id: str, array: np.ndarray, datatype: str = "FP32", name: str = "X") -> bytes:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


def steps(request_id: str, count: int) -> bytes:
    return message("busy", request_id, np.array([count], np.int64), "INT64", "STEPS")


def gate_request(request_id: str = "", model: str = "gate") -> bytes:
    """A request for a `tests.support.python_models.Gate`."""
    return message(model, request_id, np.ones(1, np.int64), "INT64", "IN")


def fail_count(server: Server, model: str) -> int:
    with triton.InferenceServerClient(server.grpc_address) as client:
        (stats,) = client.get_inference_statistics(model).model_stats
        return int(stats.inference_stats.fail.count)


class Collector:
    """The callback of Triton's client."""

    def __init__(self) -> None:
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self.answers.put((result, error))

    def take(self, count: int) -> list[tuple[Any, Any]]:
        return [self.answers.get(timeout=20) for _ in range(count)]


def gauge(server: Server, name: str, model: str) -> float:
    _, _, page = server.request("GET", "/metrics")
    prefix = f'{name}{{model="{model}"'
    return sum(float(line.split()[-1]) for line in page.decode().splitlines() if line.startswith(prefix))


def depth(server: Server, model: str) -> float:
    return gauge(server, "headrace_queue_depth", model)
