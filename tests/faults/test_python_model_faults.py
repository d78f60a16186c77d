"""Faults of Python models: processes killed, stopped and hanging under load (S31 in docs/security.md)."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.support.models import add_model, row_sums
from tests.support.processes import stop
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving, start
from tests.support.waiting import until

CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
dynamic_batching {{ }}
parameters {{ key: "headrace.execution_timeout_s" value {{ string_value: "{limit_s}" }} }}
"""
CODE = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        with open(os.path.join(args["model_repository"], "pids"), "a") as file:
            file.write("%d\\n" % os.getpid())

    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        for array in arrays:
            if array[0, 0] == 1000:
                time.sleep(3600)
        if arrays[0][0, 0] == 2000:
            arrays = [np.zeros((int(arrays[0][0, 1]), 2), np.float32)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, count, limit_s in (("victim", 2, 60.0), ("neighbour", 1, 60.0), ("hanging", 1, 0.5)):
        folder = tmp_path / "repository" / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG.format(count=count, limit_s=limit_s))
        (folder / "1" / "model.py").write_text(CODE)
    return tmp_path / "repository"


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(repository, tmp_path) as running:
        yield running


def infer(server: Server, model: str, value: int) -> tuple[int, str]:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 1]}]}
    status, _headers, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
    if status == 200:
        assert json.loads(answer)["outputs"][0]["data"] == [2 * value, 2]
        return status, ""
    return status, json.loads(answer)["error"]


def pids(repository: Path, model: str) -> list[int]:
    """Processes of a model that are alive."""
    numbers = [int(line) for line in (repository / model / "pids").read_text().split()]
    return [number for number in numbers if Path(f"/proc/{number}").exists()]


def test_processes_killed_at_any_moment_cost_only_their_batches(server: Server, repository: Path) -> None:
    answers: Counter[tuple[str, int]] = Counter()
    texts: set[str] = set()
    stop = threading.Event()

    def call(model: str) -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 900
            status, text = infer(server, model, value)
            answers[model, status] += 1
            if status != 200:
                texts.add(text)

    callers = [threading.Thread(target=call, args=(model,)) for model in ("victim", "victim", "victim", "neighbour")]
    for caller in callers:
        caller.start()
    choice = random.Random(5)
    for _ in range(4):
        time.sleep(0.3 + choice.random() / 2)
        alive = pids(repository, "victim")
        if alive:
            os.kill(choice.choice(alive), signal.SIGKILL)
    until(lambda: answers["victim", 200] > 20)
    stop.set()
    for caller in callers:
        caller.join()
    assert answers["neighbour", 200]
    assert {status for model, status in answers if model == "neighbour"} == {200}
    assert {status for model, status in answers if model == "victim"} <= {200, 500, 503}
    assert all("process of model 'victim'" in text for text in texts), texts
    until(lambda: len(pids(repository, "victim")) == 2)
    until(lambda: infer(server, "victim", 1)[0] == 200)


def test_a_hang_ends_after_its_limit_with_the_stacks_in_the_log(server: Server) -> None:
    started = time.monotonic()
    status, text = infer(server, "hanging", 1000)
    assert (status, "it did not answer within 0.5 s" in text) == (500, True)
    assert time.monotonic() - started < 20
    assert infer(server, "neighbour", 3)[0] == 200
    until(lambda: infer(server, "hanging", 3)[0] == 200)
    assert "in execute" in server.text


def test_a_stopped_process_is_replaced_and_its_batch_sent_to_the_next(server: Server, repository: Path) -> None:
    (pid,) = pids(repository, "hanging")
    stop(pid)
    assert infer(server, "hanging", 1)[0] == 200  # the stopped process had not begun it
    assert pid not in pids(repository, "hanging")


def slots_mib(server: Server, model: str) -> float:
    """Memory of the slots that the server has for the processes of a model, in MiB."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    seen: dict[int, int] = {}
    for link in folder.iterdir():
        with suppress(FileNotFoundError):
            if f"memfd:headrace {model}#" in os.readlink(link):
                status = link.stat()
                seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values()) / 2**20


def test_the_memory_of_a_dead_process_is_free_at_once(server: Server, repository: Path) -> None:
    """A process that is killed for lack of memory leaves its output, which has used the memory up, to the server."""
    rows = 4 << 20
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [2000, rows]}]}
    for _ in range(3):
        status, _headers, answer = server.request("POST", "/v2/models/neighbour/infer", json.dumps(body).encode())
        assert status == 500
        assert "for 1 rows" in json.loads(answer)["error"]
        assert slots_mib(server, "neighbour") >= 32
        (pid,) = pids(repository, "neighbour")
        os.kill(pid, signal.SIGKILL)
        until(lambda killed=pid: killed not in pids(repository, "neighbour"))  # type: ignore[misc]
        until(lambda: slots_mib(server, "neighbour") < 1)
        assert infer(server, "neighbour", 3)[0] == 200


def test_no_process_outlives_a_server_that_is_killed(repository: Path, tmp_path: Path) -> None:
    server = start(repository, tmp_path / "killed.log")
    server.wait_until_ready()
    alive = [pid for model in ("victim", "neighbour", "hanging") for pid in pids(repository, model)]
    assert len(alive) == 4
    server.signal(signal.SIGKILL)
    server.process.wait()
    until(lambda: not any(pids(repository, model) for model in ("victim", "neighbour", "hanging")))


CALLER = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        call = lambda each: pb_utils.InferenceRequest(
            model_name="row_sums", requested_output_names=["SUM"], inputs=[pb_utils.Tensor("X", each)]
        )
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        await asyncio.gather(*(call(array[:, :4]).async_exec() for array in inputs for _ in range(100)))
        sums = [(await call(array).async_exec()).output_tensors()[0].as_numpy() for array in inputs]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", each)]) for each in sums]
"""


def shared_memory(server: Server) -> tuple[int, int]:
    """Number and bytes of the memory files that the server shares with processes of models."""
    files = []
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            if "memfd:headrace" in os.readlink(path):
                files.append(path.stat())
    return len(files), sum(file.st_blocks * 512 for file in files)


def test_shared_memory_returns_when_a_model_is_idle(tmp_path: Path) -> None:
    """That of a large batch, and of a hundred calls to another model at once."""
    repository = tmp_path / "models"
    add_model(repository, "row_sums", row_sums(), config="max_batch_size: 8")
    tensors = (
        'input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }] output [{ name: "SUM" data_type: TYPE_FP32 dims: [1] }]'
    )
    add_python_model(repository, "caller", CALLER, f'backend: "python"\nmax_batch_size: 8\n{tensors}')
    values = 16 << 20
    with (
        serving(repository, tmp_path) as server,
        triton_http.InferenceServerClient(server.address, network_timeout=60, connection_timeout=60) as client,
    ):

        def infer(count: int) -> float:
            tensor = triton_http.InferInput("X", [1, count], "FP32").set_data_from_numpy(
                np.ones((1, count), np.float32)
            )
            return float(client.infer("caller", [tensor]).as_numpy("SUM")[0, 0])

        assert infer(8) == 8
        until(lambda: shared_memory(server)[0] <= 2)
        before = shared_memory(server)
        for _ in range(2):
            assert infer(values) == values
            until(lambda: shared_memory(server)[0] <= before[0] and shared_memory(server)[1] < (1 << 20))
        assert infer(8) == 8
