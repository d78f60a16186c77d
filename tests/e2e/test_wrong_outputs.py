"""Models with a wrong number of output rows: right responses without a configuration, errors with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from loadtest.onnx_models import onnx_model
from tests.support.models import add_model, affine
from tests.support.serving import Server, serving
from tests.support.triton_clients import ask

FP32, INT64 = TensorProto.FLOAT, TensorProto.INT64
BATCHES = "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 20000 }\n"
SPLIT = 'parameters { key: "headrace.oversize" value { string_value: "split" } }\n'

Array = np.ndarray[Any, Any]


def detector(first: str) -> onnx.ModelProto:
    """Y INT64 (detections, 2): row and column of all that is not zero in X FP32 (rows, 4)."""
    nodes = [
        helper.make_node("NonZero", ["X"], ["found"]),
        helper.make_node("Transpose", ["found"], ["Y"], perm=[1, 0]),
    ]
    return onnx_model(nodes, {"X": (FP32, ("N", 4))}, {"Y": (INT64, (first, 2))})


def running_sum(rows: str = "N") -> onnx.ModelProto:
    """Y = sum of all rows of X FP32 (rows, 4) up to this one: as many rows as came, and none from itself alone."""
    node = helper.make_node("CumSum", ["X", "axis"], ["Y"])
    return onnx_model([node], {"X": (FP32, (rows, 4))}, {"Y": (FP32, (rows, 4))}, {"axis": np.array(0)})


def narrow() -> onnx.ModelProto:
    """Y FP32 (rows, 2), declared as (rows, 4)."""
    nodes = [helper.make_node("Compress", ["X", "mask"], ["Y"], axis=1)]
    mask = {"mask": np.array([True, True, False, False])}
    return onnx_model(nodes, {"X": (FP32, ("N", 4))}, {"Y": (FP32, ("N", 4))}, mask)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("wrong")
    repository = folder / "models"
    add_model(repository, "detector", detector("num_dets"))
    add_model(repository, "detector_of_rows", detector("N"))
    add_model(repository, "detector_batched", detector("N"), config=BATCHES + SPLIT)
    add_model(repository, "detector_of_four", detector("N"), config="max_batch_size: 4\n")
    add_model(repository, "running_sum", running_sum())
    add_model(repository, "running_sum_of_four", running_sum(), config="max_batch_size: 4\n")
    add_model(repository, "running_sum_batched", running_sum(), config=BATCHES)
    add_model(repository, "narrow", narrow(), config="max_batch_size: 4\n")
    add_model(repository, "affine", affine(4))
    options = ("--model-control", "explicit", "--load-model", "*")
    with serving(repository, folder, *options) as running:
        yield running


def send(server: Server, protocol: str, model: str, x: Array) -> Array:
    return ask(server, protocol, model, {"X": x})["Y"]


PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])
STATUS = {"http": "500", "grpc": "StatusCode.INTERNAL"}


def batch_size(server: Server, model: str) -> tuple[int, bool]:
    with triton_http.InferenceServerClient(server.address) as client:
        config = client.get_model_config(model)
        return config["max_batch_size"], "dynamic_batching" in config


def load_again(server: Server, model: str) -> None:
    with triton_http.InferenceServerClient(server.address) as client:
        client.unload_model(model)  # without it, a model whose files have not changed is not loaded again
        client.load_model(model)


@PROTOCOLS
@pytest.mark.parametrize("model", ["detector", "detector_of_rows", "running_sum"])
def test_without_a_configuration_every_request_runs_alone(server: Server, protocol: str, model: str) -> None:
    """The request of issue 15: 6 rows, with three callers at once: one runs, and two may always wait."""
    assert batch_size(server, model) == (0, False)
    requests = [np.eye(rows, 4, k=shift, dtype=np.float32) for rows in (6, 1, 3, 2) for shift in (0, 1)]
    expected = [x.cumsum(0) if model == "running_sum" else np.transpose(np.nonzero(x)) for x in requests]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda x: send(server, protocol, model, x), requests * 5))
    for answer, right in zip(answers, expected * 5, strict=True):
        assert np.array_equal(answer, right)


def test_a_model_with_independent_rows_is_batched(server: Server) -> None:
    assert batch_size(server, "affine") == (4, True)


@PROTOCOLS
def test_a_wrong_number_of_rows_is_an_error_of_the_model(server: Server, protocol: str) -> None:
    load_again(server, "detector_batched")
    one_each = np.eye(6, 4, dtype=np.float32) + np.eye(6, 4, k=-4, dtype=np.float32)
    # Each row has one detection: the rows are right, and the request is split.
    assert send(server, protocol, "detector_batched", one_each[:4]).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert len(send(server, protocol, "detector_batched", one_each)) == 6
    with pytest.raises(InferenceServerException) as caught:
        send(server, protocol, "detector_batched", np.ones((3, 4), np.float32))
    assert caught.value.status() == STATUS[protocol]
    text = caught.value.message()
    assert "model 'detector_batched' returned output 'Y' with the shape [12, 2] for 3 rows, expected [3, 2]" in text
    assert "The model is at fault, not the request" in text
    assert "max_batch_size: 0" in text
    # From here on nothing is merged or split.
    with pytest.raises(InferenceServerException, match="no longer split") as caught:
        send(server, protocol, "detector_batched", one_each)
    assert caught.value.status() == STATUS[protocol]
    with ThreadPoolExecutor(3) as pool:
        answers = list(
            pool.map(lambda row: send(server, protocol, "detector_batched", one_each[row : row + 1]).tolist(), range(4))
        )
    assert answers == [[[0, column]] for column in range(4)]
    load_again(server, "detector_batched")
    assert len(send(server, protocol, "detector_batched", one_each)) == 6


@PROTOCOLS
def test_other_dims_than_declared_are_an_error_of_the_model(server: Server, protocol: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        send(server, protocol, "narrow", np.ones((3, 4), np.float32))
    assert caught.value.status() == STATUS[protocol]
    assert (
        "returned output 'Y' with the shape [3, 2] for 3 rows, its configuration declares [3, 4]"
        in caught.value.message()
    )


@PROTOCOLS
@pytest.mark.parametrize("model", ["running_sum_of_four", "detector_of_four"])
def test_a_batch_size_alone_neither_merges_nor_splits_rows_that_depend_on_one_another(
    server: Server, protocol: str, model: str
) -> None:
    assert batch_size(server, model) == (4, False)
    x = np.eye(4, dtype=np.float32)
    expected = x.cumsum(0) if model == "running_sum_of_four" else np.transpose(np.nonzero(x))
    assert np.array_equal(send(server, protocol, model, x), expected)
    with pytest.raises(InferenceServerException, match="accepts at most 4: send fewer rows"):
        send(server, protocol, model, np.ones((5, 4), np.float32))


def test_batches_of_rows_that_depend_on_one_another_raise_a_warning(server: Server) -> None:
    text = " ".join(server.text.split())
    assert "the rows of a batch depend on one another, so each request runs alone (see proof)" in text
    assert "each request runs alone and whole: influence: output 'Y'" in text
    assert batch_size(server, "running_sum_batched") == (4, True)
