"""Model files that crash or hang when they are loaded or first run: the helper process ends, the server and its models do not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support import models
from tests.support.processes import children
from tests.support.serving import Server, run_headrace, serving, start
from tests.support.waiting import until

REASON = "model.onnx ends its process when it is loaded and first run: killed by SIGSEGV"
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()


def crashing() -> onnx.ModelProto:
    """ONNX Runtime 1.31 and 1.32 write the two outputs that are left out."""
    values = {name: np.ones(4, np.float32) for name in "SBMV"}
    node = helper.make_node("BatchNormalization", ["X", *values], ["Y", "", ""], training_mode=1)
    kind = (TensorProto.FLOAT, ("batch", 4))
    model = onnx_model([node], {"X": kind}, {"Y": kind}, values)
    model.opset_import[0].version = 15
    return model


def nested_functions(levels: int = 40) -> onnx.ModelProto:
    """Each function calls the one before twice: 2 ** levels nodes in some 2 kB."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]

    def call(name: str, source: str, target: str) -> onnx.NodeProto:
        return helper.make_node(name, [source], [target], domain="f")

    functions = [helper.make_function("f", "F0", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], opsets)]
    for level in range(1, levels):
        nodes = [call(f"F{level - 1}", "a", "c"), call(f"F{level - 1}", "c", "b")]
        functions.append(helper.make_function("f", f"F{level}", ["a"], ["b"], nodes, opsets))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "XY")
    graph = helper.make_graph([call(f"F{levels - 1}", "X", "Y")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)


def endless_einsum() -> onnx.ModelProto:
    """Inference of the shape of an equation with several ellipses does not end."""
    node = helper.make_node("Einsum", ["X"], ["Y"], equation="..." * 3000 + "->...")
    return onnx_model([node], {"X": (TensorProto.FLOAT, ("N",))}, {"Y": (TensorProto.FLOAT, ("N",))})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_model(tmp_path / "repository", "neighbour", models.affine(seed=1))
    return tmp_path / "repository"


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with the records of the models `neighbour` and `other`: a trial takes a second of a processor."""
    folder = tmp_path_factory.mktemp("tried")
    models.add_model(folder / "models", "neighbour", models.affine(seed=1))
    models.add_model(folder / "models", "other", models.affine(seed=3))
    result = run_headrace("validate", folder / "models", "--state-dir", folder / "state")
    assert result.returncode == 0, result.stdout
    return folder / "state"


@pytest.fixture
def tried_before(tried: Path, tmp_path: Path) -> None:
    """`neighbour` and `other` count as tried in the state folder of the test."""
    shutil.copytree(tried, tmp_path / "state")


@contextmanager
def answering(server: Server) -> Iterator[list[object]]:
    """The neighbour answers right before, during and after the body; yields the answers, by the time they came."""
    expected = infer(server)
    answers: list[object] = []
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(0.01):  # the processor is for the helper
            answers.append(infer(server))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()
    assert infer(server) == expected
    assert answers == [expected] * len(answers)


def infer(server: Server) -> object:
    status, _, body = server.request("POST", "/v2/models/neighbour/infer", BODY)
    assert status == 200, body
    return json.loads(body)["outputs"]


def load(server: Server, name: str) -> tuple[int, str]:
    status, _, body = server.request("POST", f"/v2/repository/models/{name}/load", b"{}", timeout_s=120)
    return status, body.decode()


def state(server: Server, name: str) -> tuple[str, str]:
    rows = json.loads(server.request("POST", "/v2/repository/index")[2])
    (row,) = [row for row in rows if row["name"] == name]
    return row["state"], row["reason"]


def options(tmp_path: Path, limit_s: float = 100) -> list[str]:
    return ["--state-dir", str(tmp_path / "state"), "--trial-limit-s", str(limit_s)]


def test_a_crash_at_the_start_makes_one_model_unavailable(repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "bad", crashing())
    with serving(repository, tmp_path, *options(tmp_path)) as server, answering(server):
        assert state(server, "bad")[0] == "UNAVAILABLE"
        assert REASON in state(server, "bad")[1]
        assert state(server, "neighbour") == ("READY", "")
        until(lambda: not children(server.process.pid))
    # The second start reads the outcomes: a helper would be killed at its limit, and be named in the log.
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "state" / "tried").iterdir()}
    assert len(records) == 2
    with serving(repository, tmp_path, *options(tmp_path, 0.001)) as server:
        assert REASON in state(server, "bad")[1]
        assert state(server, "neighbour") == ("READY", "")
        infer(server)
    assert records == {path: path.stat().st_mtime_ns for path in (tmp_path / "state" / "tried").iterdir()}


@pytest.mark.usefixtures("tried_before")
def test_a_crash_on_a_load_request_does_not_disturb_the_neighbour(repository: Path, tmp_path: Path) -> None:
    explicit = ["--model-control", "explicit", "--load-model", "neighbour"]
    with serving(repository, tmp_path, *options(tmp_path), *explicit) as server:
        models.add_model(repository, "bad", crashing())
        models.add_model(repository, "good", models.affine(seed=3))
        with answering(server) as answers:
            status, body = load(server, "bad")
            assert status == 400
            assert REASON in body
            assert load(server, "good")[0] == 200
            assert answers
        assert state(server, "bad")[0] == "UNAVAILABLE"
        until(lambda: not children(server.process.pid))


@pytest.mark.usefixtures("tried_before")
def test_a_crash_by_polling_does_not_disturb_the_neighbour(repository: Path, tmp_path: Path) -> None:
    poll = ["--model-control", "poll", "--poll-interval-s", "0.05"]
    with serving(repository, tmp_path, *options(tmp_path), *poll) as server, answering(server):
        models.add_model(repository, "bad", crashing())
        until(lambda: "bad" in server.text and state(server, "bad")[0] == "UNAVAILABLE")
        assert REASON in state(server, "bad")[1]


def test_a_model_of_a_memory_budget_is_tried_with_its_first_request(repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "bad", crashing())
    budget = ["--host-memory-budget", "1GiB"]
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}]}).encode()
    with serving(repository, tmp_path, *options(tmp_path), *budget) as server:
        assert not (tmp_path / "state" / "tried").exists()
        with answering(server):
            status, _, answer = server.request("POST", "/v2/models/bad/infer", body, timeout_s=120)
            assert status >= 400
            assert b"SIGSEGV" in answer


def test_a_model_that_validate_has_run_counts_as_tried(repository: Path, tmp_path: Path) -> None:
    result = run_headrace("validate", repository, "--state-dir", tmp_path / "state")
    assert result.returncode == 0, result.stdout
    assert len(list((tmp_path / "state" / "tried").iterdir())) == 1
    with serving(repository, tmp_path, *options(tmp_path, 0.001)) as server:  # a trial would exceed its limit
        infer(server)


@pytest.mark.parametrize("off", [["--trial-limit-s", "0"], ["--state-dir", ""]], ids=["by option", "no state folder"])
def test_without_trials_the_server_loads_the_file_itself(off: list[str], repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "bad", crashing())
    server = start(repository, tmp_path / "log", *options(tmp_path), *off)
    assert server.wait() in (-signal.SIGSEGV, 128 + signal.SIGSEGV)
    assert ("no state folder remembers" in server.text) == (off[0] == "--state-dir")


@pytest.mark.usefixtures("tried_before")
def test_a_load_that_does_not_end_is_killed_at_its_limit(repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "bad", nested_functions())
    models.add_model(repository, "other", models.affine(seed=3))
    explicit = ["--model-control", "explicit", "--load-model", "neighbour"]
    with serving(repository, tmp_path, *options(tmp_path, 3), *explicit) as server, answering(server) as answers:
        status, body = load(server, "bad")
        assert status == 400
        assert "was not loaded within 3 s in a helper process" in body
        assert len(answers) > 1
        assert load(server, "other")[0] == 200
        assert load(server, "bad")[0] == 400  # by its record
        until(lambda: not children(server.process.pid))


@pytest.mark.usefixtures("tried_before")
def test_a_model_whose_helper_the_kernel_kills_is_loaded_by_the_server(repository: Path, tmp_path: Path) -> None:
    """The kernel sends SIGKILL where memory is short: that says nothing about the file."""
    warmup = 'value { data_type: TYPE_INT64 dims: 1 input_data_file: "steps" }'
    config = f'model_warmup {{ name: "long" inputs {{ key: "STEPS" {warmup} }} }}'
    folder = models.add_model(repository, "long", models.busy(), config=config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "steps").write_bytes(np.int64(80_000).tobytes())  # two seconds or more
    explicit = ["--model-control", "explicit", "--load-model", "neighbour"]
    with serving(repository, tmp_path, *options(tmp_path), *explicit) as server, ThreadPoolExecutor(1) as thread:
        with answering(server):
            loaded = thread.submit(load, server, "long")
            until(lambda: (found := children(server.process.pid)) and _uses_processor(found[0]))
            (killed,) = children(server.process.pid)
            os.kill(killed, signal.SIGKILL)
            assert loaded.result(60)[0] == 200
        assert state(server, "long") == ("READY", "")
        line = "model long runs for the first time in the server itself: its helper process was killed by SIGKILL"
        assert f"{line}: is there enough memory?" in server.text
        assert len(list((tmp_path / "state" / "tried").iterdir())) == 2, "the next start tries it again"
        until(lambda: not children(server.process.pid))


@pytest.mark.usefixtures("tried_before")
def test_shapes_whose_inference_does_not_end_are_not_inferred(repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "ellipses", endless_einsum())
    with serving(repository, tmp_path, *options(tmp_path)) as server, answering(server):
        assert state(server, "ellipses")[0] == "READY"


@pytest.mark.parametrize(
    ("datatype", "power"), [("FP32", 28), ("FP32", 31), ("UINT8", 28), ("BF16", 27), ("FP64", 25), ("INT64", 29)]
)
def test_measurements_at_load_take_a_gibibyte_at_most(datatype: str, power: int, tmp_path: Path) -> None:
    models.add_model(tmp_path, "large", models.identity(datatype, (1 << power,)))
    models.add_model(tmp_path, "neighbour", models.affine(seed=1))
    with serving(tmp_path, tmp_path) as server:
        assert state(server, "large") == ("READY", "")
        infer(server)
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak_bytes = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) << 10
        assert peak_bytes < 1284 << 20  # with 154 MiB of the server itself: a fork has 16 MiB less than an interpreter


@pytest.mark.usefixtures("tried_before")
def test_a_load_that_does_not_end_does_not_delay_the_stop(repository: Path, tmp_path: Path) -> None:
    models.add_model(repository, "neverending", nested_functions())
    server = start(repository, tmp_path / "log", *options(tmp_path, 600))
    until(lambda: (found := children(server.process.pid)) and _uses_processor(found[0]))
    server.stop(5.0)


def _uses_processor(pid: int) -> bool:
    """True once the helper loads the model: it has imported its libraries."""
    return "onnxruntime_pybind11_state" in Path(f"/proc/{pid}/maps").read_text()
