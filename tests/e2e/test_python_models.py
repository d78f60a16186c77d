"""Python models behind a real server: batches over HTTP and gRPC, instances, errors of single requests, deaths, reloads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.waiting import until

CONFIG = """
backend: "python"
max_batch_size: 16
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}, {{ name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }}, {{ name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
"""
# The first value of INPUT0 decides: 1000 kills the process, 1003 raises what is no Exception, 1004
# and 1005 fork a process that returns or raises, 1006 returns a row too many, 1007
# more than the machine's memory. OUTPUT1 has the size of the batch.
CODE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            if a[0, 0] == 1000:
                os.kill(os.getpid(), 9)
            if a[0, 0] == 1003:
                raise KeyboardInterrupt
            if a[0, 0] in (1004, 1005):
                forked = os.fork()
                if not forked and a[0, 0] == 1005:
                    raise ValueError("of the forked process")
                a = a * (os.waitpid(forked, 0)[1] >> 8 if forked else 0)
            if a[0, 0] == 1007:
                huge = np.broadcast_to(np.float32(0), (1, 1 << 44))
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(n, huge) for n in ("OUTPUT0", "OUTPUT1")]))
                continue
            if a[0, 0] == 1006:
                a = b = np.zeros((2, 4), np.float32)
            outputs = [
                pb_utils.Tensor("OUTPUT0", a + b),
                pb_utils.Tensor("OUTPUT1", np.full_like(a, len(requests))),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
RESHAPED = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } } ]
dynamic_batching { max_queue_delay_microseconds: 100000 }
"""
RESHAPED_CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        assert all(array.shape[1:] == (2, 2) for array in arrays)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", a.transpose(0, 2, 1))]) for a in arrays]
"""
# Counts its requests in the parameters of their responses.
ANNOTATED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    count = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.count += 1
            x = request.inputs()[0]
            given = {"first": float(x.as_numpy()[0, 0]) + 0.5, "tag": "\u00e9", "ok": True, "count": self.count}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())], parameters=given))
        return responses
"""
ANNOTATED_CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] {reshape} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] {reshape} }} ]
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
response_cache {{ enable: true }}
"""
# Returns the parameters of the response of a call, in the order of their names.
CALLER = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            answer = pb_utils.InferenceRequest(model_name="annotated", inputs=request.inputs()).exec()
            given = json.loads(answer.parameters())
            responses.append(pb_utils.InferenceResponse(answer.output_tensors(), parameters={"called": json.dumps(given)}))
        return responses
"""


def add_model(repository: Path, name: str, code: str, config: str) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models") / "repository"
    add_model(repository, "batched", CODE, CONFIG.format(count=1, delay_us=100_000))
    add_model(repository, "plain", CODE, CONFIG.format(count=2, delay_us=0))
    add_model(repository, "neighbour", CODE, CONFIG.format(count=1, delay_us=0))
    add_model(repository, "reshaped", RESHAPED_CODE, RESHAPED)
    with serving(repository, repository.parent, "--model-control-mode", "explicit", "--load-model", "*") as running:
        yield running


def infer(server: Server, model: str, value: float, rows: int = 1, **fields: Any) -> tuple[int, dict[str, Any]]:
    a = [[value, 1, 2, 3]] * rows
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [rows, 4], "data": data}
        for name, data in (("INPUT0", a), ("INPUT1", [[1] * 4] * rows))
    ]
    body = json.dumps({"inputs": inputs, **fields}).encode()
    status, _headers, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, json.loads(answer)


def outputs(answer: dict[str, Any]) -> dict[str, list[float]]:
    return {tensor["name"]: tensor["data"] for tensor in answer["outputs"]}


def test_requests_share_a_batch_and_get_their_own_rows(server: Server) -> None:
    def is_a_batch_shared() -> bool:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda value: infer(server, "batched", value, rows=1 + value % 2), range(6)))
        sizes = set()
        for value, (status, answer) in enumerate(answers):
            assert status == 200
            rows = 1 + value % 2
            assert outputs(answer)["OUTPUT0"] == [value + 1, 2, 3, 4] * rows
            sizes.add(outputs(answer)["OUTPUT1"][0])
        return max(sizes) > 1

    until(is_a_batch_shared)  # where others have the processors, each may come too late for the batch of the one before


def test_inputs_and_outputs_may_be_reshaped(server: Server) -> None:
    def ask(value: int) -> list[float]:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value, 1, 2, 3]}
        status, _headers, answer = server.request(
            "POST", "/v2/models/reshaped/infer", json.dumps({"inputs": [tensor]}).encode()
        )
        assert status == 200, answer
        (output,) = json.loads(answer)["outputs"]
        assert output["shape"] == [1, 4]
        data: list[float] = output["data"]
        return data

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [[value, 2, 1, 3] for value in range(4)]


def test_a_death_fails_its_request_and_nothing_else(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(infer, server, "neighbour", 7) for _ in range(40)]
        status, answer = infer(server, "plain", 1000)
        assert status == 500
        assert "died while it ran the request" in answer["error"]
        assert "SIGKILL" in answer["error"]
        assert [other.result()[0] for other in others] == [200] * 40
    assert infer(server, "plain", 7)[0] == 200  # by the other instance, or the next process
    metrics = server.request("GET", "/metrics")[2].decode()
    assert re.search(r'headrace_failures_total\{model="plain",reason="process_died",version="1"\} 1', metrics)
    until(lambda: server.text.count("plain#") and "has a new process" in server.text)


def test_an_exception_of_any_class_leaves_the_process_running(server: Server) -> None:
    deaths = server.text.count("neighbour#0 has died")
    for _ in range(3):
        status, answer = infer(server, "neighbour", 1003)
        assert status == 500
        assert "reference" in answer["error"]
    assert infer(server, "neighbour", 1)[0] == 200
    assert server.text.count("neighbour#0 has died") == deaths


@pytest.mark.parametrize("value", [1004, 1005])
def test_a_forked_process_answers_no_batch(server: Server, value: int) -> None:
    """The answer is that of the process that has forked, and later requests have one process and their own answers."""
    for _ in range(3):
        status, answer = infer(server, "neighbour", value)
        assert status == 200
        assert outputs(answer)["OUTPUT0"][0] == value + 1  # the forked process has ended with status 1
        assert outputs(infer(server, "neighbour", 3)[1])["OUTPUT0"][0] == 4
    assert "does not follow the protocol" not in server.text
    until(lambda: "the model's code has forked" in server.text)


def test_an_output_beyond_the_memory_of_the_machine_fails_its_request(server: Server) -> None:
    deaths = server.text.count("neighbour#0 has died")
    status, answer = infer(server, "neighbour", 1007)
    assert status == 500
    assert "reference" in answer["error"]
    until(lambda: "the machine has" in server.text)
    assert infer(server, "neighbour", 1)[0] == 200
    assert server.text.count("neighbour#0 has died") == deaths


def test_a_row_too_many_fails_its_request_and_keeps_batching(server: Server) -> None:
    status, answer = infer(server, "batched", 1006)
    assert status == 500
    assert "the shape [2, 4] for 1 rows" in answer["error"]
    assert "correct its code" in answer["error"]
    assert "run alone" not in answer["error"]
    test_requests_share_a_batch_and_get_their_own_rows(server)


def test_parameters_of_responses_reach_clients_and_callers(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shape = "reshape { shape: [ 2, 2 ] }"
    add_model(repository, "annotated", ANNOTATED, ANNOTATED_CONFIG.format(delay_us=100_000, reshape=""))
    add_model(
        repository,
        "reshaped",
        ANNOTATED.replace("[0, 0]", "[0, 0, 0]"),
        ANNOTATED_CONFIG.format(delay_us=0, reshape=shape),
    )
    add_model(repository, "caller", CALLER, ANNOTATED_CONFIG.format(delay_us=0, reshape=""))

    def given(model: str, value: float) -> dict[str, Any]:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}]}
        status, _headers, answer = running.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
        assert status == 200
        document = json.loads(answer)
        assert document["outputs"][0]["data"] == [value] * 4
        parameters: dict[str, Any] = document["parameters"]
        return parameters

    with serving(repository, tmp_path, "--cache-config", "local,size=1000000") as running:
        with ThreadPoolExecutor(3) as pool:  # one batch
            answers = list(pool.map(lambda value: given("annotated", value), (0.0, 1.0, 2.0)))
        assert [answer["first"] for answer in answers] == [0.5, 1.5, 2.5]
        assert {answer["count"] for answer in answers} == {1, 2, 3}
        assert all((answer["tag"], answer["ok"]) == ("é", True) for answer in answers)
        assert given("annotated", 1.0)["count"] == 4  # a response with parameters is not cached
        assert given("reshaped", 7.0)["first"] == 7.5
        assert json.loads(given("caller", 5.0)["called"]) == {"first": 5.5, "tag": "é", "ok": True, "count": 5}
        tensor = triton_grpc.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), 3, np.float32))
        with triton_grpc.InferenceServerClient(running.grpc_address) as client:
            parameters = client.infer("annotated", [tensor]).get_response().parameters
        assert parameters["first"].double_param == 3.5
        assert parameters["tag"].string_param == "é"
        assert parameters["ok"].bool_param
        assert parameters["count"].int64_param == 6


def test_a_model_that_is_loaded_may_not_wait_for_another_load(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "m", CODE, CONFIG.format(count=1, delay_us=0))
    code = 'class TritonPythonModel:\n    def initialize(self, args):\n        pb_utils.load_model("m")\n'
    code = CODE.replace("class TritonPythonModel:\n", code)
    add_model(repository, "caller", code, CONFIG.format(count=1, delay_us=0))
    with serving(repository, tmp_path, "--model-control-mode", "explicit", "--load-model", "caller") as running:
        for _ in range(2):
            status, _headers, answer = running.request("POST", "/v2/repository/models/caller/load", b"{}")
            assert status == 400
            assert "model 'caller' is being loaded itself" in json.loads(answer)["error"]
        assert running.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200


def test_a_changed_file_is_loaded_once(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    folder = add_model(repository, "m", CODE, CONFIG.format(count=1, delay_us=0))
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "1")
    with serving(repository, tmp_path, *options, env={"PYTHONDONTWRITEBYTECODE": ""}) as running:
        assert outputs(infer(running, "m", 1)[1])["OUTPUT0"][0] == 2
        (folder / "1" / "model.py").write_text(CODE.replace("a + b", "a * 10"))
        until(lambda: outputs(infer(running, "m", 1)[1])["OUTPUT0"][0] == 10)
        # What Python writes beside model.py is no change: the watcher would act on it before it acts on a later one.
        add_model(repository, "later", CODE, CONFIG.format(count=1, delay_us=0))
        until(lambda: infer(running, "later", 1)[0] == 200)
        assert running.text.count("model m runs on Python") == 2


# No input, and a class beside the model that looks like one in the other form. The elements of WHAT are the output.
TEXTS = """
import atexit
import numpy as np
import triton_python_backend_utils as pb_utils

atexit.register(lambda: open({path!r}, "w").close())

class Helper:
    def predict(self, batch): ...

def texts():
    array = np.empty(4, object)
    array[:] = {elements}
    return array

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(b"OUT", texts())]) for _ in requests]
"""
OWN_TEXTS = (
    TEXTS.partition("class Helper")[0]
    + TEXTS[TEXTS.index("def texts") : TEXTS.index("class Triton")]
    + "class Model:\n    def predict(self, batch): return {{'OUT': texts()}}\n"
)
TEXTS_CONFIG = 'backend: "python" output [ {{ name: "OUT" data_type: TYPE_STRING dims: [ 4 ] }} ] {more}'


def test_models_of_texts_without_inputs(tmp_path: Path) -> None:
    """Text, numbers and None are encoded as in Triton, an element that is none of these is named; `atexit` is run."""

    def infer(running: Server, name: str) -> tuple[int, Any]:
        status, _headers, answer = running.request("POST", f"/v2/models/{name}/infer", b'{"inputs": []}')
        return status, json.loads(answer)

    repository = tmp_path / "repository"
    for name, code, elements in (
        ("triton", TEXTS, "[np.str_('ü'), 1.5, None, b'b']"),
        ("own", OWN_TEXTS, "[np.str_('ü'), 1.5, None, b'b']"),
        ("wrong", TEXTS, "['a', 'b', [1], 'd']"),
        ("wrong_own", OWN_TEXTS, "['a', 'b', '\\ud800', 'd']"),
    ):
        config = TEXTS_CONFIG.format(more="")
        add_python_model(repository, name, code.format(path=str(tmp_path / name), elements=elements), config)
    batched = TEXTS_CONFIG.format(more="max_batch_size: 4 dynamic_batching { }").replace("dims: [ 4 ]", "dims: [ 1 ]")
    code = TEXTS.format(path=str(tmp_path / "batched"), elements="[1, 2, 3, 4]").replace(
        "texts())", "texts()[:1, None])"
    )
    add_python_model(repository, "batched", code, batched)
    with serving(repository, tmp_path, "--profile-s", "0") as running:
        for name in ("triton", "own"):
            status, response = infer(running, name)
            assert (status, response["outputs"][0]["data"]) == (200, ["ü", "1.5", "None", "b"]), response
        status, response = infer(running, "batched")
        assert (status, response["outputs"][0]["data"]) == (200, ["1"]), response
        for name, words in (
            ("wrong", "list, cannot be encoded"),
            ("wrong_own", "str, cannot be encoded: .*surrogates"),
        ):
            status, response = infer(running, name)
            assert status == 500
            assert re.search(f"element 2 of output 'OUT', {words}", response["error"]), response
    assert all((tmp_path / name).exists() for name in ("triton", "own", "wrong", "batched"))
