"""Loads over real sockets while a load of another model waits: no load or unload waits for it, and the index is exact."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.models import add_pipeline, ensemble_config
from tests.support.processes import children
from tests.support.serving import Server, serving
from tests.support.waiting import until

CONFIG = """
backend: "python"
input { name: "x", data_type: TYPE_FP32, dims: [ 1 ] }
output { name: "y", data_type: TYPE_FP32, dims: [ 1 ] }
"""
# `initialize` waits for a file, and reports each of its calls in another one.
CODE = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

FOLDER = Path(__file__).parents[3]

class TritonPythonModel:
    def initialize(self, args):
        with (FOLDER / "begun").open("a") as stream:
            stream.write("x")
        while not (FOLDER / "go").exists():
            time.sleep(0.01)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
NUMBERS = {"x": ("TYPE_FP32", (1,))}, {"z": ("TYPE_FP32", (1,))}


class Repository:
    """A server with the model `slow`, whose load waits for `go`, and calls in the background."""

    def __init__(self, folder: Path, server: Server, threads: ThreadPoolExecutor) -> None:
        self.folder, self.server, self._threads = folder, server, threads

    def call(self, action: str, name: str) -> int:
        return self.server.request("POST", f"/v2/repository/models/{name}/{action}", timeout_s=60)[0]

    def start(self, action: str, name: str) -> Future[int]:
        return self._threads.submit(self.call, action, name)

    @property
    def begun(self) -> int:
        """Number of calls of `initialize`."""
        file = self.folder / "begun"
        return len(file.read_text()) if file.exists() else 0

    def go(self) -> None:
        (self.folder / "go").touch()

    def index(self) -> dict[str, tuple[str, str]]:
        rows = json.loads(self.server.request("POST", "/v2/repository/index")[2])
        assert len(rows) == len({row["name"] for row in rows}), rows
        return {row["name"]: (row["state"], row["reason"]) for row in rows}


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Repository]:
    repository = folder / "repository"
    (repository / "slow" / "1").mkdir(parents=True)
    (repository / "slow" / "config.pbtxt").write_text(CONFIG)
    (repository / "slow" / "1" / "model.py").write_text(CODE)
    for seed, name in enumerate(("quick", "third")):
        models.add_model(repository, name, models.affine(seed=seed))
    steps = [("slow", {"x": "x"}, {"y": "y"}), ("slow", {"x": "y"}, {"y": "z"})]
    add_pipeline(repository, "pair", ensemble_config(steps, *NUMBERS, ""))
    control = ["--model-control", "explicit", "--load-model", "third", *options]
    with ThreadPoolExecutor(8) as threads, serving(repository, folder, *control) as server:
        yield Repository(folder, server, threads)


def test_loads_and_unloads_of_other_models_do_not_wait_for_a_load(tmp_path: Path) -> None:
    with running(tmp_path) as repository:
        slow = repository.start("load", "slow")
        until(lambda: repository.begun == 1)
        assert repository.call("load", "quick") == 200
        assert repository.call("unload", "third") == 200
        until(lambda: repository.index()["third"][1] == "unloaded")
        assert {name: state for name, (state, _) in repository.index().items()} == {
            "slow": "LOADING",
            "quick": "READY",
            "third": "UNAVAILABLE",
            "pair": "UNAVAILABLE",
        }
        assert repository.server.request("GET", "/v2/health/ready")[0] == 200
        assert repository.server.request("GET", "/v2/models/slow/ready")[0] == 503
        second, pair = repository.start("load", "slow"), repository.start("load", "pair")
        assert not slow.done()
        repository.go()
        assert [each.result(60) for each in (slow, second, pair)] == [200] * 3
        assert repository.begun == 1, "the second load has found the model loaded"
        states = repository.index()
        assert states["slow"] == states["pair"] == ("READY", "")


def test_a_load_that_hangs_leaves_its_place_and_ends_with_an_unload(tmp_path: Path) -> None:
    with running(tmp_path, "--model-load-thread-count", "1") as repository:
        slow = repository.start("load", "slow")
        until(lambda: repository.begun == 1)
        assert repository.call("load", "quick") == 200
        second = repository.start("load", "slow")
        assert repository.call("unload", "slow") == 200
        assert slow.result(60) == 409
        until(lambda: second.done() or repository.begun == 2)  # it may have come after the unload
        assert repository.call("unload", "slow") == 200
        assert second.result(60) == 409
        assert repository.index()["slow"] == ("UNAVAILABLE", "unloaded")
        until(lambda: not children(repository.server.process.pid))
        repository.go()
        assert repository.call("load", "slow") == 200
        assert repository.index()["slow"] == ("READY", "")


def test_the_load_that_an_unload_has_ended_is_aborted_over_grpc(tmp_path: Path) -> None:
    with running(tmp_path) as repository, grpc.InferenceServerClient(repository.server.grpc_address) as client:
        ended: Future[str] = Future()

        def load() -> None:
            try:
                client.load_model("slow")
                ended.set_result("OK")
            except InferenceServerException as error:
                ended.set_result(error.status())

        thread = threading.Thread(target=load)
        thread.start()
        until(lambda: repository.begun == 1)
        assert repository.call("unload", "slow") == 200
        thread.join(60)
        assert ended.result(60) == "StatusCode.ABORTED"


def test_a_server_that_stops_within_a_load_ends_soon_and_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as repository:
        slow = repository.start("load", "slow")
        until(lambda: repository.begun == 1)
        (process,) = children(repository.server.process.pid)
        began = time.monotonic()
        repository.server.stop()
        assert time.monotonic() - began < 15
        until(lambda: not Path(f"/proc/{process}").exists())
        assert slow.exception(10) is not None or slow.result() == 503
