"""A model is reloaded, broken and unloaded under clients that never pause; no request may notice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.models import add_model, affine
from tests.support.python_models import GATE_BODY, Gate
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, infer
from tests.support.waiting import until

pytestmark = pytest.mark.slow

RELOADS = 20
FEATURES, CLASSES = 16_384, 64  # 4 MB of weights: a version that is not given back shows
SEEDS = (1, 2)


def model(seed: int) -> onnx.ModelProto:
    return affine(FEATURES, CLASSES, seed)


WEIGHTS = {seed: [onnx.numpy_helper.to_array(t) for t in model(seed).graph.initializer] for seed in SEEDS}


def put(repository: Path, content: bytes) -> None:
    """Rename a new file over the old one, as a careful deployment does."""
    staged = repository.parent / "staged.onnx"
    staged.write_bytes(content)
    staged.rename(repository / "m" / "1" / "model.onnx")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("reload") / "repository")


@pytest.fixture(scope="module")
def server(gate: Gate) -> Iterator[Server]:
    repository = gate.repository
    add_model(repository, "m", model(1), config="max_batch_size: 8\ninstance_group { count: 2 }\ndynamic_batching { }")
    options = ["--model-control", "explicit", "--load-model", "m", "--load-model", "gate"]
    with serving(repository, repository.parent, *options) as running:
        yield running


@pytest.fixture
def repository(server: Server) -> Path:
    return server.log.parent / "repository"


def seed_of(x: np.ndarray, y: np.ndarray) -> int:
    """Which of the models has answered; 0 is none of them."""
    for seed, (weights, bias) in WEIGHTS.items():
        if np.allclose(y, np.maximum(x @ weights + bias, 0), rtol=1e-3, atol=1e-2):
            return seed
    return 0


class Hammer:
    """Client threads that send requests without pause.

    Attributes:
        answers: how many answers each seed has given; 0 counts wrong ones.
        errors: of requests that failed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answers = dict.fromkeys((0, *SEEDS), 0)
        self.errors: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Hammer]:
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
        rng = np.random.default_rng(number)
        client = connect(self._server, "grpc" if number == 0 else "http")
        while not self._stop.is_set():
            x = rng.standard_normal((1 + number % 2, FEATURES)).astype(np.float32)
            try:
                seed = seed_of(x, infer(client, "m", {"X": x}).as_numpy("Y"))
            except InferenceServerException as error:
                self.errors.append(str(error))
                continue
            with self._lock:
                self.answers[seed] += 1
        client.close()


def resources(server: Server) -> tuple[int, int]:
    """Threads, and resident memory in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["Threads"]), int(fields["VmRSS"].split()[0]) * 1024


def settled_threads(server: Server, expected: int) -> int:
    """Return the number of threads once old versions have ended."""
    deadline = time.monotonic() + 10
    while (threads := resources(server)[0]) > expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return threads


def state(server: Server, name: str) -> tuple[str, str]:
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    return next((row["state"], row["reason"]) for row in rows if row["name"] == name)


def test_no_request_notices_that_its_model_is_reloaded(server: Server, repository: Path) -> None:
    control = connect(server, "http")
    x = np.random.default_rng(99).standard_normal((1, FEATURES)).astype(np.float32)
    with Hammer(server).running() as hammer:
        for reload in range(RELOADS):
            seed = SEEDS[(reload + 1) % 2]
            put(repository, model(seed).SerializeToString())
            control.load_model("m")
            assert seed_of(x, infer(control, "m", {"X": x}).as_numpy("Y")) == seed, (
                "the load has returned: the new weights serve"
            )
            if reload == RELOADS // 4:
                threads, memory = resources(server)
        ended_threads, ended_memory = settled_threads(server, threads), resources(server)[1]
    assert hammer.errors == []
    assert hammer.answers[0] == 0, "an answer of neither model"
    assert all(hammer.answers[seed] > RELOADS for seed in SEEDS), hammer.answers
    assert ended_threads <= threads
    assert ended_memory - memory < 32 << 20, "fourteen versions of 4 MB weigh 56 MB"
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_a_failed_reload_is_reported_to_its_caller_only(server: Server, repository: Path) -> None:
    good = (repository / "m" / "1" / "model.onnx").read_bytes()
    with Hammer(server).running() as hammer:
        for broken in (b"no model", good[: len(good) // 2], b""):
            put(repository, broken)
            for protocol in ("http", "grpc"):
                with pytest.raises(InferenceServerException, match=r"model\.onnx") as refused:
                    connect(server, protocol).load_model("m")
                assert str(repository) not in str(refused.value)
                assert server.request("GET", "/v2/health/ready")[0] == 200
                now, reason = state(server, "m")
                assert now == "READY"
                assert "the last load failed" in reason
        put(repository, good)
        connect(server, "http").load_model("m")
    assert hammer.errors == []
    assert hammer.answers[0] == 0
    assert state(server, "m") == ("READY", "")


def test_unloading_answers_requests_in_flight_and_refuses_new_ones(server: Server, gate: Gate) -> None:
    answers: list[tuple[int, bytes]] = []
    gate.close()

    def send() -> None:
        status, _, answer = server.request("POST", "/v2/models/gate/infer", GATE_BODY, timeout_s=60)
        answers.append((status, answer))

    def executing() -> bool:
        _, _, page = server.request("GET", "/metrics")
        return b'headrace_in_flight{model="gate",version="1"} 2.0' in page

    pending = [threading.Thread(target=send) for _ in range(2)]  # one runs, one waits in the queue
    for thread in pending:
        thread.start()
    until(executing)
    assert server.request("POST", "/v2/repository/models/gate/unload", b"{}")[0] == 200
    assert state(server, "gate") == ("UNLOADING", "")
    status, _, answer = server.request("POST", "/v2/models/gate/infer", GATE_BODY)
    assert status == 503
    assert "is not loaded" in json.loads(answer)["error"]
    with pytest.raises(InferenceServerException, match="is not loaded"):
        connect(server, "grpc").get_model_metadata("gate")
    assert answers == [], "the unload did not wait for them"
    gate.open()
    for thread in pending:
        thread.join()
    assert [status for status, _ in answers] == [200, 200]
    until(lambda: state(server, "gate") == ("UNAVAILABLE", "unloaded"))
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_loads_and_unloads_race_with_requests(server: Server, repository: Path) -> None:
    """Attack 19: one winner at a time; a request gets its answer or 503, nothing else, and a load 409 if an unload ended it."""
    del repository
    statuses: dict[str, set[int]] = {"infer": set(), "load": set(), "unload": set()}
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, FEATURES], "data": [0.0] * FEATURES}
    body = json.dumps({"inputs": [tensor]}).encode()
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            statuses["infer"].add(server.request("POST", "/v2/models/m/infer", body)[0])

    def control(verb: str) -> None:
        for _ in range(8):
            statuses[verb].add(server.request("POST", f"/v2/repository/models/m/{verb}", b"{}")[0])

    pending = [threading.Thread(target=send) for _ in range(2)]
    controlling = [threading.Thread(target=control, args=(verb,)) for verb in ("load", "unload", "load", "unload")]
    for thread in (*pending, *controlling):
        thread.start()
    for thread in controlling:
        thread.join()
    stop.set()
    for thread in pending:
        thread.join()
    assert statuses["infer"] <= {200, 503}
    assert statuses["load"] <= {200, 409}
    assert statuses["unload"] == {200}
    assert server.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200
    assert server.request("POST", "/v2/models/m/infer", body)[0] == 200
