"""`headrace.ray` on a real Ray cluster of two nodes on this machine: answers, calls, drain, a killed replica, scaling.

Needs Ray, which the test environment does not install: `make test-ray` installs it and runs this file.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loadtest.protocol import HttpRequest, binary_request, decode_answer, json_request
from tests.support.models import add_model, affine
from tests.support.processes import words
from tests.support.serving import HOST, ROOT, free_port, serving
from tests.support.waiting import until

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it and runs this file")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")

from headrace.ray import deployment  # noqa: E402

pytestmark = pytest.mark.slow

SLEEPER = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        time.sleep(float(max(array[:, 0].max() for array in rows)))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array * 2)]) for array in rows]
"""
SLEEPER_CONFIG = """
backend: "python"
max_batch_size: 4
dynamic_batching { default_queue_policy { max_queue_size: 1000 } }
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""
# Replicas keep no latency tables and measure briefly: nothing stays behind.
BRIEF: dict[str, Any] = {"state_dir": "", "profile_s": 0.01}
CALLERS = 8


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    add_model(folder, "affine", affine(), config="max_batch_size: 8\ndynamic_batching {}\n")
    (folder / "sleeper" / "1").mkdir(parents=True)
    (folder / "sleeper" / "1" / "model.py").write_text(SLEEPER)
    (folder / "sleeper" / "config.pbtxt").write_text(SLEEPER_CONFIG)
    return folder


@pytest.fixture(scope="module")
def session(repository: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(repository / "affine" / "1" / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes with a folder, a token and an HTTP port of their own; at the end none of their processes is left."""
    # Sockets lie in the folder: their paths have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "server"), str(ROOT)]))
        patch.delenv("RAY_ADDRESS", raising=False)
        from ray.cluster_utils import Cluster

        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, "temp_dir": folder}
        )
        try:
            nodes.add_node(num_cpus=3, temp_dir=folder)
            ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
            port = free_port()
            serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
            yield RayCluster(nodes.address, port)
            serve.shutdown()
            end_router_thread()
        finally:
            ray.shutdown()
            nodes.shutdown()
    until(lambda: not processes_with(folder))
    shutil.rmtree(folder)


def end_router_thread() -> None:
    """End the event loop of Ray Serve's handles in this process.

    `serve.shutdown` leaves it running. If it calls Ray while `ray.shutdown` destroys the core worker, the process crashes.
    """
    from ray.serve._private.router import SingletonThreadRouter

    loop = SingletonThreadRouter._asyncio_loop
    if loop is not None:
        loop.call_soon_threadsafe(loop.stop)
        until(lambda: not loop.is_running())


@pytest.fixture(autouse=True)
def no_application_left(cluster: RayCluster) -> Iterator[None]:
    yield
    for name in serve.status().applications:
        serve.delete(name)


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        address: of its head node.
        port: of Ray Serve's HTTP proxy.
    """

    address: str
    port: int

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """One HTTP request: status, headers (names in lower case) and body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, request: HttpRequest) -> Any:
        """POST a request; see `send`."""
        return self.send("POST", request.path, request.body, request.headers)


@dataclass
class Load:
    """Callers that send one HTTP request after the other, until `stop`, and repeat each failed one until it is answered.

    Attributes:
        answers: number of requests with status 200.
        failures: status and body of requests that failed.
        wrong: answers with wrong values.
        unanswered: requests that were sent and have neither failed nor been answered.
    """

    cluster: RayCluster
    request: Callable[[int], tuple[HttpRequest, np.ndarray]]
    pause_s: float = 0.0
    answers: int = 0
    unanswered: int = 0
    failures: list[tuple[int, bytes]] = field(default_factory=list)
    wrong: list[np.ndarray] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, callers: int) -> Load:
        self._threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(callers)]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request has neither an answer nor an error"
        assert self.unanswered == 0
        assert not self.wrong

    def _call(self, number: int) -> None:
        while not self._stopping.is_set():
            number += len(self._threads)
            request, expected = self.request(number)
            while True:
                with self._lock:
                    self.unanswered += 1
                status, headers, body = self._post(request)
                with self._lock:
                    self.unanswered -= 1
                    if status == 200:
                        self.answers += 1
                        output = decode_answer(headers, body)["Y"]
                        if not np.allclose(output, expected, rtol=1e-5, atol=1e-6):
                            self.wrong.append(output)
                        break
                    self.failures.append((status, body))
            self._stopping.wait(self.pause_s)

    def _post(self, request: HttpRequest) -> Any:
        try:
            return self.cluster.post(request)
        except (OSError, http.client.HTTPException) as error:
            return 0, {}, repr(error).encode()


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line has a text."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [number for number in numbers if number != os.getpid() and any(text in word for word in words(number))]


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)


def running_replicas() -> int:
    states = serve.status().applications["default"].deployments["headrace"].replica_states
    return int(states.get("RUNNING", 0))


def affine_requests(session: onnxruntime.InferenceSession) -> Callable[[int], tuple[HttpRequest, np.ndarray]]:
    """Requests of 1 to 3 rows, each different, and what ONNX Runtime computes for them."""
    questions = [rows(1 + seed % 3, seed) for seed in range(32)]
    answers = [session.run(None, {"X": question})[0] for question in questions]
    requests = [binary_request("affine", {"X": question}) for question in questions]
    return lambda number: (requests[number % 32], answers[number % 32])


def sleeper_requests(delay_s: float) -> Callable[[int], tuple[HttpRequest, np.ndarray]]:
    def request(number: int) -> tuple[HttpRequest, np.ndarray]:
        question = np.array([[delay_s, number % 1000]], np.float32)
        return binary_request("sleeper", {"X": question}), question * 2

    return request


def test_http_through_the_proxy_answers_as_the_server_does(
    cluster: RayCluster, repository: Path, tmp_path: Path
) -> None:
    serve.run(deployment(repository, models=["affine"], **BRIEF).bind(), route_prefix="/vision")
    binary = binary_request("affine", {"X": rows(3)})
    text = json_request("affine", {"X": rows(2)})
    timing = {**text.headers, "headrace-timing": "1"}
    sent: list[tuple[str, str, bytes | None, Mapping[str, str]]] = [
        ("POST", binary.path, binary.body, binary.headers),
        ("POST", text.path, text.body, text.headers),
        ("POST", text.path, text.body, {**text.headers, "accept-encoding": "gzip"}),
        ("POST", text.path, b"{", text.headers),
        ("POST", text.path, text.body.replace(b'"X"', b'"Z"'), text.headers),
        ("POST", binary.path, binary.body[:-4], binary.headers),
        ("POST", text.path.replace("affine", "absent"), text.body, text.headers),
        ("POST", text.path.replace("/infer", "/versions/9/infer"), text.body, text.headers),
        ("GET", text.path, None, {}),
        ("GET", "/v2/models/affine", None, {}),
        ("GET", "/v2/models/affine/ready", None, {}),
        ("GET", "/v2/health/ready", None, {}),
        ("GET", "/v2/absent", None, {}),
    ]
    # The values of these differ from one answer to the next; Ray's proxy adds or removes the others.
    varying = ("headrace-queue-depth", "headrace-predicted-wait-us")
    hop = ("date", "server", "connection", "keep-alive", "x-request-id", "transfer-encoding")
    with serving(repository, tmp_path, "--model-control", "explicit", "--load-model", "affine") as server:
        for method, path, body, headers in sent:
            ours = cluster.send(method, f"/vision{path}", body, headers)
            theirs = server.request(method, path, body, headers)
            assert ours[0] == theirs[0], (path, ours, theirs)
            assert ours[2] == theirs[2], path
            kept = [
                {name: "" if name in varying else value for name, value in each[1].items() if name not in hop}
                for each in (ours, theirs)
            ]
            assert kept[0] == kept[1], path
        status, answered, _ = cluster.send("POST", f"/vision{text.path}", text.body, timing)
        assert status == 200
        assert "headrace-timing" in answered
    # A server without keys on a network refuses changes of its models.
    status, _, body = cluster.send("POST", "/vision/v2/repository/models/affine/unload", b"{}", text.headers)
    assert status == 403
    assert b"embedded" in body


def test_other_deployments_call_models_with_arrays(
    cluster: RayCluster, session: onnxruntime.InferenceSession, repository: Path
) -> None:
    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Caller:
        def __init__(self, models: Any) -> None:
            self._models = models

        async def sums(self, batch: Any) -> Any:
            outputs = await self._models.infer.remote("affine", {"X": batch}, outputs=["Y"])
            return outputs["Y"].sum(axis=1)

    models = deployment(repository, models=["affine"], ray_actor_options={"num_cpus": 0.5}, **BRIEF)
    caller = serve.run(Caller.bind(models.bind()))
    batch = rows(5)
    expected = session.run(None, {"X": batch})[0]
    np.testing.assert_allclose(caller.sums.remote(batch).result(), expected.sum(axis=1), rtol=1e-5)
    handle = serve.get_deployment_handle("headrace", "default")
    responses = [handle.infer.remote("affine", {"X": batch[: 1 + index % 3]}) for index in range(64)]
    for index, response in enumerate(responses):
        np.testing.assert_allclose(response.result()["Y"], expected[: 1 + index % 3], rtol=1e-5)
    import headrace

    with pytest.raises(headrace.NotFound, match="unknown model: 'absent'"):
        handle.infer.remote("absent", {"X": batch}).result()
    with pytest.raises(headrace.BadRequest, match="has dtype float64, expected float32"):
        handle.infer.remote("affine", {"X": batch.astype(np.float64)}).result()


def test_a_model_that_cannot_be_served_fails_the_deployment(cluster: RayCluster, repository: Path) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        serve.run(deployment(repository, models=["absent"], **BRIEF).bind())
    assert "the model repository has no folder of this name" in str(serve.status().applications["default"])


def test_a_deleted_replica_completes_its_grpc_calls(cluster: RayCluster, repository: Path) -> None:
    handle = serve.run(deployment(repository, models=["sleeper"], **BRIEF).bind())
    (replica,) = handle.broadcast("describe").results()
    client = triton_grpc.InferenceServerClient(replica["grpc_address"])
    # Far longer than the look at the load takes through Ray's proxy on busy cores.
    question = np.array([[8.0, 7.0]], np.float32)
    tensor = triton_grpc.InferInput("X", [1, 2], "FP32").set_data_from_numpy(question)
    with ThreadPoolExecutor(1) as pool, client:
        answer = pool.submit(client.infer, "sleeper", [tensor])
        until(lambda: json.loads(cluster.send("GET", "/v2/models/sleeper/load")[2])["in_flight"], before=answer)
        serve.delete("default")
        np.testing.assert_array_equal(answer.result(60).as_numpy("Y"), question * 2)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            client.infer("sleeper", [tensor])


def test_a_killed_replica_loses_only_what_it_ran(
    cluster: RayCluster, repository: Path, session: onnxruntime.InferenceSession
) -> None:
    models = deployment(repository, models=["affine"], min_replicas=2, health_check_period_s=1, **BRIEF)
    handle = serve.run(models.bind())
    first = {replica["pid"]: replica["node_id"] for replica in handle.broadcast("describe").results()}
    assert len(set(first.values())) == 2  # one on each node
    load = Load(cluster, affine_requests(session)).start(CALLERS)
    until(lambda: load.answers >= 50)
    killed = next(iter(first))
    os.kill(killed, signal.SIGKILL)
    until(lambda: running_replicas() == 2 and killed not in pids(handle), timeout_s=120)
    answered = load.answers
    until(lambda: load.answers >= answered + 50)
    load.stop()
    # Each caller has one request in flight: all others were answered by the other replica.
    assert len(load.failures) <= CALLERS, load.failures
    assert {status for status, _ in load.failures} <= {500, 503}


def pids(handle: Any) -> set[int]:
    """Return the process ids of the replicas; empty while one of them does not respond."""
    try:
        return {replica["pid"] for replica in handle.broadcast("describe").results(timeout_s=30)}
    except (ray.exceptions.RayError, TimeoutError):
        return set()


@pytest.mark.filterwarnings(
    "ignore:The `metrics_interval_s` field:DeprecationWarning"
)  # its successor: all deployments
def test_replicas_follow_the_load_up_and_down_and_nothing_is_lost(cluster: RayCluster, repository: Path) -> None:
    quick = {
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2,
    }
    models = deployment(
        repository,
        models=["sleeper"],
        min_replicas=1,
        max_replicas=3,
        target_utilization=0.3,  # where the callers and Ray have too little of the cores to keep replicas busy
        autoscaling_config=quick,
        **BRIEF,
    )
    serve.run(models.bind())
    assert running_replicas() == 1
    heavy = Load(cluster, sleeper_requests(0.2)).start(24)
    until(lambda: running_replicas() == 3 or heavy.failures, timeout_s=120)
    assert not heavy.failures
    answered = heavy.answers
    until(lambda: heavy.answers >= answered + 24)
    light = Load(cluster, sleeper_requests(0.001), pause_s=0.2).start(1)
    heavy.stop()
    until(lambda: running_replicas() == 1, timeout_s=120)
    light.stop()
    assert heavy.answers >= 48
    assert light.answers > 1
    assert not heavy.failures + light.failures


def test_the_example_of_the_page_runs(cluster: RayCluster) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "ray.md").read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks).replace("8000", str(cluster.port))
    assert "headrace.ray.deployment" in program
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    assert "{'output': (2, 16)}" in finished.stdout
    assert "True" in finished.stdout
