"""The examples of Triton's python_backend and models in our own form, served over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support import decoupled_models, python_models
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.triton_clients import infer, inputs_of
from tests.support.waiting import until

A = np.arange(4, dtype=np.float32)
B = np.ones(4, dtype=np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("python") / "repository"
    add_python_model(repository, "add_sub", python_models.ADD_SUB, python_models.ADD_SUB_CONFIG)
    add_python_model(repository, "auto_batch", python_models.AUTO_COMPLETE_BATCH)
    add_python_model(repository, "auto_nobatch", python_models.AUTO_COMPLETE_NOBATCH, 'backend: "python"')
    add_python_model(repository, "errors", python_models.ERRORS, python_models.ERRORS_CONFIG)
    add_python_model(repository, "facts", python_models.INSTANCE_KIND, python_models.INSTANCE_KIND_CONFIG)
    add_python_model(repository, "function", python_models.OWN_FUNCTION)
    add_python_model(repository, "words", python_models.OWN_CLASS, python_models.OWN_CLASS_CONFIG)
    add_python_model(repository, "decoupled", python_models.DECOUPLED, 'backend: "python"')
    add_python_model(repository, "square", decoupled_models.SQUARE, decoupled_models.SQUARE_CONFIG)
    add_python_model(repository, "sum_once", decoupled_models.SUM_ONCE, decoupled_models.SUM_CONFIG)
    add_python_model(repository, "sum_twice", decoupled_models.SUM_TWICE, decoupled_models.SUM_CONFIG)
    add_python_model(repository, "codes", python_models.CODES, python_models.CODES_CONFIG)
    add_python_model(repository, "repeat", decoupled_models.REPEAT, decoupled_models.REPEAT_CONFIG)
    add_python_model(repository, "nothing", "x = 1\n")
    add_python_model(repository, "metrics", python_models.CUSTOM_METRICS, python_models.CUSTOM_METRICS_CONFIG)
    with serving(repository, repository.parent, "--profile-s", "0") as running:
        yield running


@pytest.mark.parametrize(("model", "rows"), [("add_sub", 0), ("auto_nobatch", 0), ("auto_batch", 1), ("auto_batch", 3)])
def test_add_sub(server: Server, client: triton_http.InferenceServerClient, model: str, rows: int) -> None:
    a, b = (np.broadcast_to(array, (rows, 4)).copy() if rows else array for array in (A, B))
    with triton_grpc.InferenceServerClient(server.grpc_address) as over_grpc:
        for connected in (client, over_grpc):
            result = infer(connected, model, {"INPUT0": a, "INPUT1": b})
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def test_auto_complete_config_completes_what_the_file_leaves_out(client: triton_http.InferenceServerClient) -> None:
    config = client.get_model_config("auto_batch")
    assert (config["backend"], config["max_batch_size"]) == ("python", 4)
    assert "dynamic_batching" in config
    assert [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in config["input"]] == [
        ("INPUT0", "TYPE_FP32", [4]),
        ("INPUT1", "TYPE_FP32", [4]),
    ]
    config = client.get_model_config("auto_nobatch")
    assert config["max_batch_size"] == 0
    assert "dynamic_batching" not in config
    assert [tensor["name"] for tensor in config["output"]] == ["OUTPUT0", "OUTPUT1"]


def test_each_request_of_a_batch_has_its_own_error(server: Server) -> None:
    def outcome(number: int) -> str:
        with triton_http.InferenceServerClient(server.address) as client:  # not shared between threads
            try:
                result = infer(client, "errors", {"CODE": np.array([[number]], np.int32)})
            except InferenceServerException as error:
                return f"{error.status()} {error.message()}"
            return f"ok {result.as_numpy('ECHO')[0, 0]}"

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(outcome, [-1, 2, -1, 3, 4, 5, 6, -1]))
    codes = {2: 404, 3: 400, 4: 503, 5: 400, 6: 409}
    assert outcomes == [
        f"{codes[number]} error number {number}" if number >= 0 else "ok -1" for number in (-1, 2, -1, 3, 4, 5, 6, -1)
    ]
    assert [outcome(number) for number in (0, 1)] == ["500 error number 0", "500 error number 1"]


def test_a_model_reads_its_instance_and_its_request(client: triton_http.InferenceServerClient) -> None:
    result = infer(client, "facts", {"X": np.zeros(1, np.float32)}, request_id="r7", parameters={"who": "me", "n": 3})
    facts = [text.decode() for text in result.as_numpy("FACTS")]
    assert facts[:4] == ["CPU", "0", "facts", "1"]
    assert Path(facts[4]).name == "facts"
    assert facts[5] == f"{facts[4]}/1"
    assert facts[6] == "r7"
    assert json.loads(facts[7]) == {"who": "me", "n": 3}
    assert facts[8] == "FACTS"


def test_a_function_in_our_own_form_is_served_from_its_annotations(client: triton_http.InferenceServerClient) -> None:
    config = client.get_model_config("function")
    assert config["max_batch_size"] == 16
    assert [(tensor["name"], tensor["dims"]) for tensor in config["output"]] == [("sum", [4]), ("rows", [1])]
    result = infer(client, "function", {"a": np.stack([A, A]), "b": np.stack([B, A])})
    np.testing.assert_array_equal(result.as_numpy("sum"), [A + B, A + A])
    assert result.as_numpy("rows").tolist() == [[2], [2]]


def test_a_class_in_our_own_form_is_served(client: triton_http.InferenceServerClient) -> None:
    result = infer(client, "words", {"text": np.array([["ab"], ["ä"]], dtype=object)})
    assert [text.decode() for text in result.as_numpy("upper").reshape(-1)] == ["ABwords", "Äwords"]


def test_a_model_that_cannot_be_served_has_a_reason(client: triton_http.InferenceServerClient) -> None:
    (row,) = [row for row in client.get_model_repository_index() if row["name"] == "nothing"]
    assert row["state"] == "UNAVAILABLE"
    assert "has no model" in row["reason"]
    assert "model.py" in row["reason"]


def test_code_may_make_its_model_decoupled(server: Server, client: triton_http.InferenceServerClient) -> None:
    assert client.get_model_config("decoupled")["model_transaction_policy"] == {"decoupled": True}
    status, _, body = server.request(
        "POST",
        "/v2/models/decoupled/infer",
        b'{"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [3]}]}',
    )
    assert status == 400
    assert b"decoupled: it returns any number of responses, the request takes exactly one" in body
    status, _, body = server.request("POST", "/v2/models/decoupled/generate_stream", b'{"IN": 3}')
    assert status == 200
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    assert [event["OUT"] for event in events] == [3, 3, 3]


def test_square_and_repeat_over_streams(server: Server) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in (4, 0, 2):
            tensor = triton_grpc.InferInput("IN", [1], "INT32").set_data_from_numpy(np.array([number], np.int32))
            client.async_stream_infer("square", [tensor], request_id=str(number), enable_empty_final_response=True)
        arrays = {
            "IN": np.array([5, 0, 7], np.int32),
            "DELAY": np.zeros(3, np.uint32),
            "WAIT": np.zeros(1, np.uint32),
        }
        inputs = inputs_of(triton_grpc, arrays)
        client.async_stream_infer("repeat", inputs, request_id="repeat", enable_empty_final_response=True)
        values: dict[str, list[int]] = {"4": [], "0": [], "2": [], "repeat": []}
        waiting = set(values)
        while waiting:
            result = answers.get(timeout=60)
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                waiting.remove(response.id)
                assert not response.outputs
            else:
                values[response.id] += result.as_numpy("OUT").tolist()
        client.stop_stream()
    assert values == {"4": [4] * 4, "0": [], "2": [2, 2], "repeat": [5, 0, 7]}


def test_a_stream_of_many_responses_arrives_whole(server: Server) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        tensor = triton_grpc.InferInput("IN", [1], "INT32").set_data_from_numpy(np.array([3000], np.int32))
        client.async_stream_infer("square", [tensor], enable_empty_final_response=True)
        for _ in range(3000):
            assert answers.get(timeout=60).as_numpy("OUT").tolist() == [3000]
        assert answers.get(timeout=60).get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()


@pytest.mark.parametrize(("model", "times"), [("sum_once", 1), ("sum_twice", 2)])
def test_a_model_sums_the_responses_of_a_decoupled_one(
    client: triton_http.InferenceServerClient, model: str, times: int
) -> None:
    for number in (4, 2, 0, 1):
        result = infer(client, model, {"IN": np.array([number], np.int32)})
        assert result.as_numpy("SUM").tolist() == [times * number * number]


def test_integers_that_do_not_fit_the_configured_datatype_are_refused(
    client: triton_http.InferenceServerClient,
) -> None:
    with pytest.raises(InferenceServerException, match=r"SUM.*INT64.*INT32"):
        infer(client, "sum_once", {"IN": np.array([50_000], np.int32)})


def test_codes_of_errors_reach_the_caller(client: triton_http.InferenceServerClient) -> None:
    for code in range(1, 8):
        result = infer(client, "codes", {"CODE": np.array([[code]], np.int32)})
        assert result.as_numpy("RECEIVED").tolist() == [code]


def test_custom_metrics_are_on_the_metrics_page(server: Server, client: triton_http.InferenceServerClient) -> None:
    for number in range(1, 4):
        value = infer(client, "metrics", {"X": np.array([number], np.float32)}).as_numpy("Y")
        assert value.tolist() == [number + number]
    expected = [
        "# TYPE example_requests counter",
        'example_requests{model="metrics",model_name="metrics"} 3.0',
        'example_latest{model="metrics"} 3.0',
        'example_sizes_bucket{le="1.0",model="metrics"} 1.0',
        'example_sizes_bucket{le="+Inf",model="metrics"} 3.0',
        'example_sizes_sum{model="metrics"} 6.0',
    ]

    def shown() -> bool:
        lines = server.request("GET", "/metrics")[2].decode().splitlines()
        return all(line in lines for line in expected)

    until(shown)
