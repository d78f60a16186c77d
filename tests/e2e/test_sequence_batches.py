"""Batches of sequences, and requests by shared memory, through ensembles and from other models.

The cases are those that the tests of Triton's sequence batchers check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.models import add_pipeline, ensemble_config
from tests.support.python_models import add_python_model
from tests.support.sequence_models import add_accumulator
from tests.support.serving import Server, serving
from tests.support.triton_clients import infer, inputs_of
from tests.support.waiting import until

KEY = f"/sequence_batches_{os.getpid()}"
# VALUE is the value and the flags of a request of sequence 7 of the model "sums".
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            call = pb_utils.InferenceRequest(
                model_name="sums",
                requested_output_names=["OUTPUT"],
                inputs=[pb_utils.Tensor("INPUT", value[:1].reshape(1, 1))],
                correlation_id=7,
                flags=int(value[1]),
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            responses.append(pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "OUTPUT")]))
        return responses
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1, 1 ] } ]
"""
START, END = 1, 2


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches") / "repository"
    add_accumulator(folder, "sums")
    add_accumulator(folder, "four")
    add_accumulator(folder, "four_direct", strategy="direct { }")
    add_python_model(folder, "caller", CALLER, CALLER_CONFIG)
    number = {"x": ("TYPE_INT32", (1,))}, {"sum": ("TYPE_INT32", (1,))}
    add_pipeline(
        folder, "ensemble", ensemble_config([("sums", {"INPUT": "x"}, {"OUTPUT": "sum"})], *number, "max_batch_size: 4")
    )
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository, repository.parent, "--allow-client-shm") as running:
        yield running


def tensors(value: int, padding: int = 0, kind: Any = triton) -> list[Any]:
    arrays: dict[str, np.ndarray] = {"INPUT": np.array([[value]], np.int32)}
    if padding:
        arrays["PADDING"] = np.zeros((1, padding), np.uint8)
    return inputs_of(kind, arrays)


def batch_sizes(server: Server, model: str) -> dict[int, int]:
    (stats,) = json.loads(server.request("GET", f"/v2/models/{model}/stats")[2])["model_stats"]
    return {size["batch_size"]: size["compute_infer"]["count"] for size in stats["batch_stats"]}


@pytest.mark.parametrize("model", ["four", "four_direct"])
@pytest.mark.parametrize(("paddings", "sizes"), [((3, 3, 3, 3), [4]), ((3, 4, 3, 4), [2, 2])])
def test_requests_of_equal_shape_share_a_batch(
    server: Server,
    repository: Path,
    model: str,
    paddings: tuple[int, ...],
    sizes: list[int],
) -> None:
    go = repository / model / "1" / "go"
    go.unlink(missing_ok=True)
    before = batch_sizes(server, model)
    answers: SimpleQueue[tuple[str, int]] = SimpleQueue()

    def receive(result: Any, error: Any) -> None:
        answers.put((result.get_response().id, int(result.as_numpy("OUTPUT")[0, 0])) if result else (str(error), 0))

    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        # The first request keeps the instance busy until the others are queued.
        client.async_infer(model, tensors(1003, 0, triton_grpc), receive, sequence_id=1, sequence_start=True)
        until(lambda: load(server, model)["running_rows"] == 1)
        for number, size in enumerate(paddings, 1):
            client.async_infer(
                model,
                tensors(10 + number, size, triton_grpc),
                receive,
                request_id=str(number),
                sequence_id=number,
                sequence_start=number > 1,
                sequence_end=True,
            )
        until(lambda: load(server, model)["queue_depth"] == 4)
        go.touch()
        received = dict(answers.get(timeout=60) for _ in range(5))
    assert received == {"": 1003, "1": 1003 + 11, "2": 12, "3": 13, "4": 14}
    expected = {1: 1} | {size: sizes.count(size) for size in sizes}
    until(lambda: sum(batch_sizes(server, model).values()) == sum({**before}.values()) + 1 + len(sizes))
    after = batch_sizes(server, model)
    assert {size: count for size in after if (count := after[size] - before.get(size, 0))} == expected


def load(server: Server, model: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(server.request("GET", f"/v2/models/{model}/load")[2])
    return document


def test_a_step_of_an_ensemble_gets_the_sequence_of_the_request(client: triton.InferenceServerClient) -> None:
    sums = []
    for step, sequence_id in ((0, 21), (0, 22), (1, 21), (2, 21), (2, 22)):
        flags = {"sequence_start": step == 0, "sequence_end": step == 2}
        x = np.array([[sequence_id]], np.int32)
        result = infer(client, "ensemble", {"x": x}, sequence_id=sequence_id, **flags)
        sums.append(int(result.as_numpy("sum")[0, 0]))
    assert sums == [21, 22, 42, 63, 44]
    with pytest.raises(InferenceServerException, match="START flag"):
        client.infer("sums", tensors(1), sequence_id=21)


def test_a_python_model_calls_a_model_with_sequences(client: triton.InferenceServerClient) -> None:
    def call(value: int, flags: int) -> int:
        arrays = {"VALUE": np.array([value, flags], np.int32)}
        return int(infer(client, "caller", arrays).as_numpy("OUTPUT")[0, 0])

    assert [call(5, START), call(6, 0), call(7, END), call(8, START | END)] == [5, 11, 18, 8]
    with pytest.raises(InferenceServerException, match="START flag"):
        call(1, 0)


def test_inputs_in_shared_memory(client: triton.InferenceServerClient) -> None:
    region = shared_memory.create_shared_memory_region("values", KEY, 4)
    try:
        client.register_system_shared_memory("values", KEY, 4)
        sums = []
        for step in range(3):
            shared_memory.set_shared_memory_region(region, [np.array([100 + step], np.int32)])
            tensor = triton.InferInput("INPUT", (1, 1), "INT32")
            tensor.set_shared_memory("values", 4)
            result = client.infer("sums", [tensor], sequence_id=31, sequence_start=step == 0, sequence_end=step == 2)
            sums.append(int(result.as_numpy("OUTPUT")[0, 0]))
        assert sums == [100, 201, 303]
        client.unregister_system_shared_memory("values")
    finally:
        shared_memory.destroy_shared_memory_region(region)
