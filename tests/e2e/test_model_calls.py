"""Calls of Python models to other models (BLS): blocking, asyncio, errors, chains, deadlines, load and unload."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
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
from tests.support import decoupled_models, python_models
from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.decoupled_models import HEAD
from tests.support.models import add_model
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, infer
from tests.support.waiting import until


def add_sub() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, FP32 of any length."""
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    tensors = dict.fromkeys(("INPUT0", "INPUT1"), (TensorProto.FLOAT, ("n",)))
    return onnx_model(nodes, tensors, dict.fromkeys(("OUTPUT0", "OUTPUT1"), (TensorProto.FLOAT, ("n",))))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("calls") / "repository"
    unbounded = {"config.yaml": "max_batch_size: 0\nmax_queue_wait_microseconds: 0\n"}
    add_model(repository, "onnx", add_sub(), files=unbounded)
    add_model(repository, "later", add_sub(), files={"config.yaml": "max_batch_size: 0\n"})
    add_python_model(repository, "python", python_models.ADD_SUB, python_models.ADD_SUB_CONFIG)
    add_python_model(repository, "sleeper", python_models.SLEEPER, python_models.SLEEPER_CONFIG)
    add_python_model(repository, "bls_sync", python_models.BLS_SYNC, python_models.BLS_CONFIG)
    add_python_model(repository, "bls_async", python_models.BLS_ASYNC, python_models.BLS_CONFIG + UNBOUNDED_WAITS)
    add_python_model(repository, "control", python_models.BLS_CONTROL, python_models.BLS_CONTROL_CONFIG)
    names = ("onnx", "python", "sleeper", "bls_sync", "bls_async", "control")
    options = [
        "--model-control",
        "explicit",
        "--profile-s",
        "0",
        *(w for name in names for w in ("--load-model", name)),
    ]
    with serving(repository, repository.parent, *options) as running:
        yield running


A, B = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)


def arrays_of(model: str, a: np.ndarray = A, b: np.ndarray = B) -> dict[str, np.ndarray]:
    return {"MODEL": np.array([model], dtype=object), "INPUT0": a, "INPUT1": b}


def call(server: Server, caller: str, model: str, a: np.ndarray, b: np.ndarray, request_id: str = "") -> np.ndarray:
    """Return OUTPUT0 and OUTPUT1 of `model`, called by `caller`; the id is the call's timeout in microseconds."""
    with triton_http.InferenceServerClient(server.address, network_timeout=120) as client:
        result = infer(client, caller, arrays_of(model, a, b), request_id=request_id)
        return np.stack([result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")])


@pytest.mark.parametrize("caller", ["bls_sync", "bls_async"])
@pytest.mark.parametrize("model", ["onnx", "python"])
def test_a_model_calls_another(server: Server, caller: str, model: str) -> None:
    np.testing.assert_array_equal(call(server, caller, model, A, B), [A + B, A - B])


@pytest.mark.parametrize("caller", ["bls_sync", "bls_async"])
def test_calls_with_megabytes_and_one_after_the_other(server: Server, caller: str) -> None:
    for size in (1_000_000, 10, 2_000_000):
        a, b = np.arange(size, dtype=np.float32), np.ones(size, np.float32)
        np.testing.assert_array_equal(call(server, caller, "onnx", a, b), [a + b, a - b])


def test_many_callers_get_their_own_results(server: Server) -> None:
    def one(number: int) -> None:
        a = np.full(4, number, np.float32)
        np.testing.assert_array_equal(call(server, "bls_async", "onnx", a, B), [a + B, a - B])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(40)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("missing", "404.*missing"),
        ("sleeper/", "400|404"),
        (
            "bls_sync",
            "400.*calls itself .bls_sync/1 -> bls_sync/1. and has no other instance: raise instance_group.count",
        ),
        ("control", "400.*has no input 'INPUT0'"),
    ],
)
def test_a_failed_call_is_an_error_of_its_response(server: Server, model: str, words: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        call(server, "bls_sync", model, A, B)
    assert re.search(words, f"{raised.value.status()} {raised.value.message()}"), raised.value
    np.testing.assert_array_equal(call(server, "bls_sync", "onnx", A, B), [A + B, A - B])


@pytest.mark.timing
def test_a_call_ends_at_its_own_timeout(server: Server) -> None:
    begun = time.monotonic()
    with pytest.raises(InferenceServerException, match="deadline"):
        call(server, "bls_sync", "sleeper", np.full(1, 3, np.float32), B[:1], request_id="200000")
    assert time.monotonic() - begun < 2.5


def test_loading_and_unloading(server: Server) -> None:
    with triton_http.InferenceServerClient(server.address) as client:
        tensor = triton_http.InferInput("NAME", [1], "BYTES").set_data_from_numpy(np.array(["later"], dtype=object))
        assert client.infer("control", [tensor]).as_numpy("STATES").tolist() == [False, True, False]
        tensor.set_data_from_numpy(np.array(["missing"], dtype=object))
        with pytest.raises(InferenceServerException, match="no model repository has a folder 'missing'"):
            client.infer("control", [tensor])


def test_a_caller_that_is_killed_during_a_call_is_replaced(server: Server) -> None:
    children = f"/proc/{server.process.pid}/task"

    def pids() -> set[int]:
        found: set[int] = set()
        for task in os.listdir(children):
            with open(f"{children}/{task}/children") as stream:
                found |= set(map(int, stream.read().split()))
        return found

    failures: list[str] = []

    def fail() -> None:
        try:
            call(server, "bls_sync", "sleeper", np.full(1, 1.5, np.float32), B[:1])
        except InferenceServerException as error:
            failures.append(str(error.message()))

    caller = threading.Thread(target=fail)
    caller.start()
    until(lambda: b'headrace_in_flight{model="sleeper",version="1"} 1' in server.request("GET", "/metrics")[2])
    for pid in pids():
        with open(f"/proc/{pid}/maps") as stream:
            if "headrace calls of bls_sync" in stream.read():
                os.kill(pid, signal.SIGKILL)
    caller.join()
    (failure,) = failures
    assert "died while it ran the request" in failure
    assert "killed by SIGKILL" in failure

    def answers() -> bool:
        return bool((call(server, "bls_sync", "onnx", A, B) == [A + B, A - B]).all())

    until(answers)


# Cancellation, deadlines, clients, cycles and many calls

ENSEMBLE = """
platform: "ensemble"
input [ { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "relay_a" model_version: -1
  input_map { key: "MODEL" value: "MODEL" }
  input_map { key: "INPUT0" value: "INPUT0" } input_map { key: "INPUT1" value: "INPUT1" }
  output_map { key: "OUTPUT0" value: "OUTPUT0" } output_map { key: "OUTPUT1" value: "OUTPUT1" } } ] }
"""
LIMITED = "max_batch_size: 0\nrate_limits: {clients: {slow: {requests_per_s: 0.001, burst: 1}}}\n"


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("relays") / "repository"
    add_model(repository, "onnx", add_sub(), files={"config.yaml": "max_batch_size: 0\n"})
    add_model(repository, "limited", add_sub(), files={"config.yaml": LIMITED})
    for name in ("relay_a", "relay_b"):
        add_python_model(repository, name, python_models.BLS_RELAY, python_models.BLS_CONFIG)
    add_python_model(repository, "waiter", python_models.WAITER, python_models.SLEEPER_CONFIG)
    add_python_model(repository, "impatient", python_models.BLS_IMPATIENT, python_models.BLS_CONFIG)
    add_python_model(repository, "many", python_models.BLS_MANY, python_models.BLS_CONFIG)
    add_python_model(repository, "instance_kind", python_models.INSTANCE_KIND, python_models.INSTANCE_KIND_CONFIG)
    add_python_model(repository, "options", python_models.BLS_OPTIONS, python_models.INSTANCE_KIND_CONFIG)
    (repository / "loop" / "1").mkdir(parents=True)
    (repository / "loop" / "config.pbtxt").write_text(ENSEMBLE)
    with serving(repository, repository.parent, "--profile-s", "0", "--client-header", "X-Client") as running:
        yield running


def relay(server: Server, model: str, path: str, delay: str = "", **headers: str) -> np.ndarray:
    """Return the outputs of `model`, which calls the models of `path` one inside the other."""
    with triton_http.InferenceServerClient(server.address, network_timeout=60) as client:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        result = infer(client, model, arrays_of(path), request_id=delay, headers=names)
        return np.stack([result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")])


def cancelled_waits(server: Server) -> list[float]:
    return [float(seconds) for seconds in re.findall(r"waiter: cancelled after ([0-9.]+) s", server.text)]


def test_the_deadline_of_a_request_ends_its_calls(relays: Server) -> None:
    before = len(cancelled_waits(relays))
    with pytest.raises(InferenceServerException, match="deadline"):
        relay(relays, "relay_a", "relay_b,waiter", X_Request_Timeout_Ms="400")
    until(lambda: len(cancelled_waits(relays)) > before)
    assert cancelled_waits(relays)[-1] < 5
    np.testing.assert_array_equal(relay(relays, "relay_a", "relay_b,onnx"), [A + B, A - B])


def test_a_disconnected_client_cancels_the_calls_of_its_request(relays: Server) -> None:
    before = len(cancelled_waits(relays))
    with connect(relays, "http", network_timeout=0.5) as client, pytest.raises(Exception, match="timed out"):
        infer(client, "relay_a", arrays_of("relay_b,waiter"))
    until(lambda: len(cancelled_waits(relays)) > before)
    assert cancelled_waits(relays)[-1] < 5
    np.testing.assert_array_equal(relay(relays, "relay_a", "relay_b,onnx"), [A + B, A - B])


def test_a_call_that_the_model_gives_up_is_cancelled(relays: Server) -> None:
    before = len(cancelled_waits(relays))
    np.testing.assert_array_equal(relay(relays, "impatient", "waiter"), [A, B])
    until(lambda: len(cancelled_waits(relays)) > before)
    assert cancelled_waits(relays)[-1] < 5
    np.testing.assert_array_equal(relay(relays, "impatient", "onnx"), [A, B])


def test_calls_count_for_the_quota_of_the_requests_client(relays: Server) -> None:
    relay(relays, "relay_a", "relay_b,limited", X_Client="slow")
    with pytest.raises(InferenceServerException, match="quota") as raised:
        relay(relays, "relay_a", "relay_b,limited", X_Client="slow")
    assert raised.value.status() == "503"
    np.testing.assert_array_equal(relay(relays, "relay_a", "relay_b,limited", X_Client="other"), [A + B, A - B])


def test_a_model_that_calls_itself_through_others_is_refused(relays: Server) -> None:
    for path, words in (
        ("relay_b,relay_a,onnx", "relay_a/1 -> relay_b/1 -> relay_a/1"),
        ("loop,onnx", "relay_a/1 -> loop/1 -> relay_a/1"),
    ):
        with pytest.raises(InferenceServerException, match=f"calls itself .{words}.") as raised:
            relay(relays, "relay_a", path)
        assert raised.value.status() == "400"


def test_models_whose_instances_wait_for_each_other_do_not_hang(relays: Server) -> None:
    """Each of two requests holds the only instance that the other one needs."""
    begun = time.monotonic()

    def run(model: str, other: str) -> str:
        try:
            relay(relays, model, f"{other},onnx", delay="0.7")
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"
        return ""

    def run_both() -> list[str]:
        with ThreadPoolExecutor(2) as threads:
            return sorted(threads.map(run, ("relay_a", "relay_b"), ("relay_b", "relay_a")))

    while not (outcomes := run_both())[1]:
        begun = time.monotonic()  # one ended before the other began
    assert outcomes[0] == ""
    assert re.match(r"503 models wait for each other \((relay_[ab]/1)( -> relay_[ab]/1)? -> \1\)", outcomes[1]), (
        outcomes
    )
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("threads", [0, 3])
def test_many_calls_in_flight(relays: Server, threads: int) -> None:
    """More calls than a process may have, whose results are kept; some of them block threads beside the event loop."""
    a, b = np.full(1, 700, np.float32), np.full(1, threads, np.float32)
    with triton_http.InferenceServerClient(relays.address, network_timeout=60) as client:
        result = infer(client, "many", arrays_of("onnx", a, b))
    assert result.as_numpy("OUTPUT1").tolist() == [0]
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.arange(700) + 1)


def test_arguments_and_errors_of_a_call(relays: Server) -> None:
    with triton_http.InferenceServerClient(relays.address) as client:
        tensor = triton_http.InferInput("X", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
        facts = [fact.decode() for fact in client.infer("options", [tensor]).as_numpy("FACTS")]
    assert facts[:3] == ["an id", '{"k": "v", "n": 3}', "FACTS"]
    version, output, missing, nameless = facts[3:]
    assert re.match(r"2 .*version.*7", version), version
    assert re.match(r"3 .*no output 'NONE': \['FACTS'\]", output), output
    assert re.match(r"2 .*missing", missing), missing
    assert "needs the name of a model" in nameless


# Calls of decoupled models


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("streams") / "repository"
    add_python_model(repository, "square", decoupled_models.SQUARE, decoupled_models.SQUARE_CONFIG)
    add_python_model(repository, "actions", HEAD + decoupled_models.ACTIONS, decoupled_models.ACTIONS_CONFIG)
    add_python_model(repository, "plain", PLAIN, PLAIN_CONFIG)
    add_python_model(repository, "caller", decoupled_models.CALLER, decoupled_models.CALLER_CONFIG)
    with serving(repository, repository.parent, "--profile-s", "0") as running:
        yield running


PLAIN = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(*value(request, "IN") + 1) for request in requests]
"""
)
PLAIN_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""


def stream(
    server: Server, model: str, *values: int, count: int = 1, take: int = -1, **options: Any
) -> tuple[list[int], list[str]]:
    """Return the elements of all responses of `model` to its caller, and the texts of the errors."""
    with triton_http.InferenceServerClient(server.address, network_timeout=60) as client:
        arrays = {
            "MODEL": np.array([model], dtype=object),
            "IN": np.array(values, np.int32),
            "COUNT_TAKE": np.array([count, take], np.int32),
        }
        result = infer(client, "caller", arrays, **options)
        return result.as_numpy("OUT").tolist(), [text.decode() for text in result.as_numpy("ERRORS")]


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        ("square", [0], []),
        ("square", [3], [3] * 3),
        ("square", [300], [300] * 300),  # more than wait in the server
        ("actions", [2, 100], list(range(100))),  # the final flag comes with the last response
        ("plain", [4, 5], [5, 6]),
    ],
)
def test_a_model_calls_a_decoupled_one(streams: Server, model: str, values: list[int], expected: list[int]) -> None:
    assert stream(streams, model, *values, count=2) == (expected * 2, [])


def test_large_responses_arrive_whole(streams: Server) -> None:
    elements, errors = stream(streams, "actions", 12, 1_000_000)
    assert errors == []
    np.testing.assert_array_equal(elements, np.repeat(np.arange(4), 1_000_000))


def test_errors_of_decoupled_models_are_responses(streams: Server) -> None:
    elements, errors = stream(streams, "actions", 3, 2)
    assert (elements[:2], errors[0]) == ([0, 1], "3 after 2")
    elements, errors = stream(streams, "missing", 1, count=2)
    assert (elements, [error[:2] for error in errors]) == ([], ["2 ", "2 "])


def test_dropped_iterators_cancel_their_calls(streams: Server) -> None:
    # More than a process has slots, and each of them more responses than wait in the server.
    assert stream(streams, "square", 1000, count=1100, take=1) == ([1000] * 1100, [])
    before = stream(streams, "actions", 7, 0)[0][1]
    assert stream(streams, "actions", 6, 3, count=2, take=3)[0] == [0, 1, 2] * 2
    until(lambda: stream(streams, "actions", 7, 0)[0][1] == before + 2)


def test_the_end_of_a_request_ends_its_streams(streams: Server) -> None:
    before = stream(streams, "actions", 7, 0)[0][1]
    try:  # the call has the deadline of the request: its error may be in time for a response
        reason = stream(streams, "actions", 6, 1, headers={"X-Request-Timeout-Ms": "300"})[1][0]
    except InferenceServerException as error:
        reason = str(error)
    assert "deadline" in reason
    until(lambda: stream(streams, "actions", 7, 0)[0][1] == before + 1)


def test_one_response_of_a_decoupled_model_is_refused(streams: Server) -> None:
    with (
        triton_http.InferenceServerClient(streams.address) as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        infer(client, "square", {"IN": np.ones(1, np.int32)})
    assert "exec(decoupled=True)" in str(raised.value)
