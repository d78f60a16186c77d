"""`is_ready` of Python models over HTTP and gRPC: its result, its failures, and its time limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from headrace.core.completion import PROBE_LIMIT_S

from tests.support.models import add_pipeline, ensemble_config
from tests.support.serving import Server, serving
from tests.support.waiting import until

CONFIG = """
backend: "python"
input { name: "x", data_type: TYPE_FP32, dims: [ 1 ] }
output { name: "y", data_type: TYPE_FP32, dims: [ 1 ] }
"""
CODE = """
import asyncio, sys, time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(float(x[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]))
        return responses

    READY
"""
FORMS = {
    "yes": "def is_ready(self): return True",
    "no": "def is_ready(self): return False",
    "coroutine": "async def is_ready(self): await asyncio.sleep(0); return True",
    "other_name": "def is_model_ready(self): return False",
    "raises": "def is_ready(self): raise RuntimeError('the secret of the database')",
    "exits": "def is_ready(self): sys.exit(3)",
    "wrong": "def is_ready(self): return 'yes'",
    "slow": "def is_ready(self): time.sleep(20); return True",
    "absent": "",
    "follows_yes": "def is_ready(self): return pb_utils.is_model_ready('yes')",
    "follows_no": "def is_ready(self): return pb_utils.is_model_ready('no')",
    "left": "def is_ready(self): return pb_utils.is_model_ready('right')",
    "right": "async def is_ready(self): return pb_utils.is_model_ready('left')",
    "itself": "def is_ready(self): return pb_utils.is_model_ready('itself')",
    "by_file": "def is_ready(self): print('checked', flush=True); return Path(__file__).with_name('ready').exists()",
}
READY = {"yes", "coroutine", "absent", "follows_yes"}
WAITING = {"left", "right", "itself"}

ASKING_CONFIG = """
backend: "python"
input { name: "names", data_type: TYPE_STRING, dims: [ -1 ] }
output { name: "ready", data_type: TYPE_BOOL, dims: [ -1 ] }
"""
ASKING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            names = pb_utils.get_input_tensor_by_name(request, "names").as_numpy()
            ready = np.array([pb_utils.is_model_ready(name.decode()) for name in names])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ready", ready)]))
        return responses

    def is_ready(self):
        return pb_utils.is_model_ready("yes")
"""


def add_model(repository: Path, name: str, instances: int = 1) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    groups = f"instance_group {{ count: {instances} kind: KIND_CPU }}"
    (repository / name / "config.pbtxt").write_text(CONFIG + groups)
    (folder / "model.py").write_text(CODE.replace("READY", FORMS[name]))
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readiness") / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    for name in FORMS:
        add_model(repository, name, instances=2 if name == "by_file" else 1)
    (repository / "asking" / "1").mkdir(parents=True)
    (repository / "asking" / "config.pbtxt").write_text(ASKING_CONFIG)
    (repository / "asking" / "1" / "model.py").write_text(ASKING)
    numbers = {"x": ("TYPE_FP32", (1,))}, {"z": ("TYPE_FP32", (1,))}
    steps = [("yes", {"x": "x"}, {"y": "y"}), ("by_file", {"x": "y"}, {"y": "z"})]
    add_pipeline(repository, "chain", ensemble_config(steps, *numbers, ""))
    with serving(repository, repository.parent) as started:
        yield started


def http_ready(server: Server, name: str) -> bool:
    status, _, content = server.request("GET", f"/v2/models/{name}/ready")
    assert status in (200, 503), content
    return status == 200


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("slow", "by_file")])
def test_both_protocols_answer_what_the_code_says(server: Server, name: str) -> None:
    assert http_ready(server, name) == (name in READY)
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        assert client.is_model_ready(name) == (name in READY)


def test_a_model_that_is_not_ready_still_serves(server: Server) -> None:
    assert not http_ready(server, "no")
    assert infer(server, "no", 0) == 200
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_an_exception_is_in_the_log_and_not_in_the_answer(server: Server) -> None:
    status, _, content = server.request("GET", "/v2/models/raises/ready")
    assert status == 503
    assert b"secret" not in content
    assert b"is_ready returned false, failed or did not return" in content
    until(lambda: "RuntimeError: the secret of the database" in server.text)
    assert not http_ready(server, "wrong")
    until(lambda: "TypeError: is_ready returned str, not a bool" in server.text)


def ask_in_model(server: Server, *names: str) -> list[bool]:
    """Return the results of `pb_utils.is_model_ready` in `execute` of a model."""
    body = {"inputs": [{"name": "names", "datatype": "BYTES", "shape": [len(names)], "data": names}]}
    status, _, content = server.request("POST", "/v2/models/asking/infer", json.dumps(body).encode())
    assert status == 200, content
    result: list[bool] = json.loads(content)["outputs"][0]["data"]
    return result


def test_a_model_gets_the_answer_of_the_readiness_route(server: Server) -> None:
    names = [name for name in FORMS if name not in ("slow", "by_file")]
    assert ask_in_model(server, *names, "chain", "missing", "asking") == [
        *(name in READY for name in names), http_ready(server, "chain"), False, True,
    ]  # fmt: skip


def test_models_that_wait_for_each_other_are_refused_at_once(server: Server) -> None:
    time.sleep(0.2)  # no answer is fresh
    for name in sorted(WAITING):
        began = time.monotonic()
        assert not http_ready(server, name)
        assert time.monotonic() - began < PROBE_LIMIT_S
    assert "is_ready of model" in server.text
    assert infer(server, "left", 0) == 200


def test_a_call_for_a_model_that_hangs_returns_after_the_limit_and_blocks_no_other(server: Server) -> None:
    answers: list[list[bool]] = []
    asking = threading.Thread(target=lambda: answers.append(ask_in_model(server, "slow")))
    asking.start()
    time.sleep(0.3)
    assert http_ready(server, "yes")
    assert is_in_flight(server, "asking")
    asking.join()
    assert answers == [[False]]


def test_a_pipeline_is_ready_once_the_code_of_its_models_says_so(server: Server, repository: Path) -> None:
    assert not http_ready(server, "by_file")
    assert not http_ready(server, "chain")
    (repository / "by_file" / "1" / "ready").touch()
    until(lambda: http_ready(server, "by_file") and http_ready(server, "chain"))


def test_callers_share_an_answer(server: Server) -> None:
    time.sleep(0.2)
    before = server.text.count("checked")
    began = time.monotonic()
    for _ in range(40):
        http_ready(server, "by_file")
    lasted_s = time.monotonic() - began
    # Two instances, each checked at most once in 100 ms.
    assert server.text.count("checked") - before <= 2 * (lasted_s / 0.1 + 2)


def is_in_flight(server: Server, name: str) -> bool:
    """True while a model has a request in flight."""
    return b'headrace_in_flight{model="%s",version="1"} 1' % name.encode() in server.request("GET", "/metrics")[2]


def infer(server: Server, name: str, seconds: float) -> int:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [seconds]}]}
    return server.request("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())[0]


def test_a_long_batch_does_not_delay_the_answer(server: Server) -> None:
    statuses: list[int] = []
    running = threading.Thread(target=lambda: statuses.append(infer(server, "yes", 3)))
    running.start()
    until(lambda: is_in_flight(server, "yes"))
    assert http_ready(server, "yes")
    assert is_in_flight(server, "yes")
    running.join()
    assert statuses == [200]


@pytest.mark.timing
def test_an_is_ready_that_does_not_return_is_a_no_after_its_limit_and_blocks_nothing(server: Server) -> None:
    answers: list[tuple[bool, float]] = []

    def ask() -> None:
        began = time.monotonic()
        answers.append((http_ready(server, "slow"), time.monotonic() - began))

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    time.sleep(0.3)
    began = time.monotonic()
    assert server.request("GET", "/v2/health/live")[0] == 200
    assert infer(server, "slow", 0) == 200
    assert time.monotonic() - began < 2
    for caller in callers:
        caller.join()
    assert [is_ready for is_ready, _ in answers] == [False] * 3
    assert max(seconds for _, seconds in answers) < 8
    # The check is still open: later callers do not wait again.
    ask()
    assert answers[-1][0] is False
    assert answers[-1][1] < 2
