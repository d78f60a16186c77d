"""A served model gets its engine from the real builder while clients send requests without a pause."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from tests.support.fake_builder import publish
from tests.support.models import add_model, affine
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, infer
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FEATURES, CLASSES = 512, 512  # INT8 is faster from about here on: a slower engine would not serve
CONFIG = """
max_batch_size: 8
dynamic_batching: {}
optimization:
  precision: int8
  calibration: {data: calibration.npz, method: minmax}
  accuracy: {min_top1_agreement: 0.5, min_cosine: 0.9}
build_on_load: true
"""
ROWS = np.random.default_rng(1).standard_normal((256, FEATURES)).astype(np.float32)
Rows = npt.NDArray[np.float32]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def write_model(repository: Path) -> Path:
    folder = repository / "m"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(affine(FEATURES, CLASSES), folder / "1" / "model.onnx")
    np.savez(folder / "calibration.npz", X=ROWS)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def answers_of(file: Path) -> Rows:
    """Outputs of a model file for all rows, computed in this process."""
    outputs: Rows = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"X": ROWS})[0]
    return outputs


def index(server: Server) -> tuple[str, str]:
    (row,) = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    return row["state"], row["reason"]


class Clients:
    """HTTP and gRPC clients that send single rows without a pause.

    Attributes:
        answers: (number of the row, answer), in the order of their arrival.
        errors: of requests that failed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self.answers: list[tuple[int, Rows]] = []
        self.errors: list[str] = []

    @contextmanager
    def sending(self) -> Iterator[Clients]:
        threads = [threading.Thread(target=self._send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _send(self, number: int) -> None:
        client = connect(self._server, "grpc" if number == 0 else "http")
        while not self._stop.is_set():
            row = len(self.answers) % len(ROWS)
            try:
                answer = infer(client, "m", {"X": ROWS[row : row + 1]})
                self.answers.append((row, answer.as_numpy("Y")[0]))
            except Exception as error:
                self.errors.append(repr(error))
        client.close()

    def from_engine(self, model: Rows, engine: Rows) -> list[bool]:
        """Whether each answer is the engine's (True) or the model's; it must be one of the two."""
        gains = []
        for row, answer in self.answers:
            misses = [float(np.abs(answer - entry[row]).max()) for entry in (model, engine)]
            assert min(misses) < 1e-3
            gains.append(misses[1] < misses[0])
        return gains


def engine_file(folder: Path) -> Path:
    (build,) = json.loads((folder / "1" / "build.json").read_text())["builds"]
    return folder / "1" / str(build["artefact"])


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_the_engine_takes_over_under_load(repository: Path, tmp_path: Path, mode: str) -> None:
    folder = write_model(repository)
    options = ["--model-control", mode, *(["--poll-interval-s", "0.2"] if mode == "poll" else [])]
    with serving(repository, tmp_path, *options, env={"HOME": str(tmp_path)}) as server:
        clients = Clients(server)
        with clients.sending():
            until(lambda: index(server) == ("READY", ""))
            swapped = len(clients.answers)
            until(lambda: len(clients.answers) > swapped + 200)
            if mode == "poll":
                # The watcher acts on what the builder has put there before it acts on later changes.
                add_model(repository, "later", affine())
                until(lambda: server.request("GET", "/v2/models/later/ready")[0] == 200)
        assert clients.errors == []
        by_engine = clients.from_engine(answers_of(folder / "1" / "model.onnx"), answers_of(engine_file(folder)))
        assert not by_engine[0]
        assert all(by_engine[swapped + 4 :]), (
            "after the swap the engine answers, and the four requests under way before"
        )
        metadata = json.loads(server.request("GET", "/v2/models/m")[2])
        assert metadata["parameters"]["engine.file"] == engine_file(folder).name
        assert metadata["parameters"]["engine.precision"] == "int8"
        with connect(server, "grpc") as grpc:
            assert grpc.get_model_metadata("m").name == "m"
        assert "building ONNX Runtime INT8" in server.text
        assert server.text.count("runs the engine") == 1
        assert "has changed during the load" not in server.text
    with serving(repository, tmp_path, "--model-control", mode, env={"HOME": str(tmp_path)}) as server:
        assert "runs the engine" in server.text, "the next start takes it at once"
        assert "building ONNX Runtime INT8" not in server.text


def test_a_failed_build_is_reported_and_a_forced_engine_is_marked(repository: Path, tmp_path: Path) -> None:
    folder = write_model(repository)
    (folder / "calibration.npz").unlink()
    options = ["--model-control", "explicit", "--load-model", "*"]
    with serving(repository, tmp_path, *options, env={"HOME": str(tmp_path)}) as server:
        until(lambda: "building it failed" in index(server)[1])
        state, reason = index(server)
        assert state == "READY"
        assert "calibration" in reason.partition("building it failed")[2]
        assert str(tmp_path) not in reason
        publish(folder, 1, affine(FEATURES, CLASSES, 5).SerializeToString(), forced=True, refusal=["cosine 0.1 is low"])
        assert server.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200
        assert index(server) == ("READY", "the int8 engine is below its accuracy bar: cosine 0.1 is low")
        parameters = json.loads(server.request("GET", "/v2/models/m")[2])["parameters"]
        assert parameters["engine.below_accuracy_bar"] is True
        assert parameters["engine.refusal"] == "cosine 0.1 is low"
        assert "below its accuracy bar" in server.text


def test_stopping_the_server_stops_its_builder(repository: Path, tmp_path: Path) -> None:
    folder = write_model(repository)
    with serving(repository, tmp_path, env={"HOME": str(tmp_path)}) as server:
        children = Path(f"/proc/{server.process.pid}/task")
        builders: list[int] = []

        def is_built() -> bool:
            for task in children.glob("*/children"):
                builders.extend(map(int, task.read_text().split()))
            return bool(builders) or (folder / "1" / "build.json").exists()

        until(is_built)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in builders), timeout_s=10)
    left = {path.name for path in (folder / "1").iterdir()} - {"model.onnx", "build.json"}
    stamped = {engine_file(folder).name} if (folder / "1" / "build.json").exists() else set()
    assert left == stamped, "nothing half-written"
