"""Sequences behind a real server, over HTTP, gRPC and gRPC streams, with tritonclient's arguments."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from headrace.wire.grpc.infer_streams import MAX_IN_FLIGHT
from tritonclient.utils import InferenceServerException

from tests.support.sequence_models import add_accumulator, add_echo
from tests.support.serving import Server, serving
from tests.support.triton_clients import infer, inputs_of
from tests.support.waiting import until

ONE_SLOT = "oldest { max_candidate_sequences: 1 }"


def build(repository: Path) -> Path:
    add_accumulator(repository, "sums")
    add_accumulator(repository, "direct_sums", strategy="direct { }")
    add_accumulator(repository, "text_sums", id_type="TYPE_STRING")
    add_accumulator(repository, "one_slot", strategy=ONE_SLOT)
    add_accumulator(repository, "short", strategy=ONE_SLOT, idle_us=1000)
    add_accumulator(repository, "crashing")
    add_accumulator(repository, "reloaded")
    add_accumulator(repository, "unloaded")
    add_echo(repository, "echo", "direct { }")
    add_echo(repository, "echo_oldest", "oldest { max_candidate_sequences: 8 }")
    add_echo(repository, "echo_unbatched", "direct { }", batch=0)
    return repository


SERVERS = {"one process": (), "front end": ("--front-ends", "1")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sequences") / "repository")


@pytest.fixture(scope="module", params=list(SERVERS))
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = (*SERVERS[request.param], "--model-control", "explicit", "--load-model", "*")
    # Live sequences with an idle time of an hour must not hold up its end.
    with serving(repository, tmp_path_factory.mktemp("log"), *options) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(server.address, concurrency=8) as client:
        yield client


@pytest.fixture
def grpc(server: Server) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        yield client


def arrays_of(value: int, rows: int = 1) -> dict[str, np.ndarray]:
    return {"INPUT": np.full((rows, 1), value, np.int32)}


def send(
    client: Any,
    value: int,
    sequence_id: int | str,
    start: bool = False,
    end: bool = False,
    model: str = "sums",
    **more: Any,
) -> int:
    options = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end, **more}
    result = infer(client, model, arrays_of(value), **options)
    return int(result.as_numpy("OUTPUT")[0, 0])


@pytest.fixture(params=["http", "grpc"])
def client(
    request: pytest.FixtureRequest, http: triton_http.InferenceServerClient, grpc: triton_grpc.InferenceServerClient
) -> Any:
    return http if request.param == "http" else grpc


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [("sums", 1, 2**64 - 1), ("direct_sums", 7, 8), ("text_sums", "an id", "1")],
)
def test_two_sequences_do_not_mix(client: Any, model: str, first: int | str, second: int | str) -> None:
    if isinstance(client, triton_grpc.InferenceServerClient) and second == 2**64 - 1:
        second = 2**63 - 1  # tritonclient sends ids over gRPC as int64
    assert send(client, 1, first, start=True, model=model) == 1
    assert send(client, 10, second, start=True, model=model) == 10
    assert send(client, 2, first, model=model) == 3
    assert send(client, 20, second, end=True, model=model) == 30
    assert send(client, 3, first, end=True, model=model) == 6
    for sequence_id in (first, second):
        with pytest.raises(InferenceServerException, match="must specify the START flag on the first request"):
            send(client, 1, sequence_id, model=model)


def test_start_on_a_live_id_begins_a_new_sequence(client: Any) -> None:
    assert send(client, 1, 11, start=True) == 1
    assert send(client, 2, 11, start=True) == 2
    assert send(client, 3, 11, end=True) == 5
    assert send(client, 4, 11, start=True, end=True) == 4


@pytest.mark.parametrize(
    ("model", "sequence_id", "message"),
    [
        ("sums", 0, "must specify a non-zero or non-empty correlation ID"),
        ("sums", "a", "sequence_id is a text, the input 'CORRID' .* is UINT64: send a number"),
        ("text_sums", 5, "sequence_id is a number, the input 'CORRID' .* is BYTES: send a text"),
        ("text_sums", "x" * 129, "129 characters, at most 128"),
    ],
)
def test_refused_ids(client: Any, model: str, sequence_id: int | str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        send(client, 1, sequence_id, start=True, model=model)


def test_a_request_has_one_row(http: triton_http.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="has 2 rows, a request of a sequence has one"):
        infer(http, "sums", arrays_of(1, rows=2), sequence_id=3, sequence_start=True)


def test_flags_are_booleans(server: Server) -> None:
    body = {
        "inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [1]}],
        "parameters": {"sequence_id": 5, "sequence_start": 1},
    }
    request = urllib.request.Request(f"{server.url}/v2/models/sums/infer", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 400
    assert "'sequence_start' is 1, it must be true or false" in json.loads(error.value.read())["error"]


@pytest.mark.parametrize("large_bytes", [0, 1 << 20])
def test_pipelined_sequences_on_one_stream(grpc: triton_grpc.InferenceServerClient, large_bytes: int) -> None:
    # Large requests are decoded on other threads, and reach the engine of a front end in pieces.
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put((result, error)))
    count, ids = 20, (101, 102, 103)
    for step in range(count):
        for sequence_id in ids:
            arrays = arrays_of(sequence_id + step)
            if large_bytes and step % 3 == 0:
                arrays["PADDING"] = np.zeros((1, large_bytes), np.uint8)
            grpc.async_stream_infer(
                "sums",
                inputs_of(triton_grpc, arrays),
                request_id=f"{sequence_id} {step}",
                sequence_id=sequence_id,
                sequence_start=step == 0,
                sequence_end=step == count - 1,
            )
    sums: dict[tuple[int, int], int] = {}
    for _ in range(count * len(ids)):
        result, error = answers.get(timeout=60)
        assert error is None, error
        sequence_id, step = map(int, result.get_response().id.split())
        sums[sequence_id, step] = int(result.as_numpy("OUTPUT")[0, 0])
    grpc.stop_stream()
    for sequence_id in ids:
        for step in range(count):
            assert sums[sequence_id, step] == sum(sequence_id + each for each in range(step + 1))


def echo(
    client: Any, sequence_id: int, start: bool = False, end: bool = False, model: str = "echo"
) -> dict[str, float]:
    shape = (1,) if model == "echo_unbatched" else (1, 1)
    x = np.full(shape, sequence_id, np.float32)
    result = infer(client, model, {"X": x}, sequence_id=sequence_id, sequence_start=start, sequence_end=end)
    names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name).reshape(-1)[0].item() for name in names}


def test_a_stream_reads_on_while_sequences_wait_for_a_slot(grpc: triton_grpc.InferenceServerClient) -> None:
    """The request that frees the only slot comes after more requests than one stream may have in flight."""
    waiting = MAX_IN_FLIGHT + 40
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put((result, error)))
    steps = [(1, True, False), *((number, True, True) for number in range(2, waiting + 2)), (1, False, True)]
    for sequence_id, start, end in steps:
        inputs = inputs_of(triton_grpc, arrays_of(sequence_id))
        grpc.async_stream_infer("one_slot", inputs, sequence_id=sequence_id, sequence_start=start, sequence_end=end)
    for sequence_id, start, _ in steps:
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.as_numpy("OUTPUT")[0, 0] == (sequence_id if start else 2 * sequence_id)
    grpc.stop_stream()


def test_onnx_controls_and_rows(http: triton_http.InferenceServerClient) -> None:
    assert echo(http, 21, start=True) == {"Y": 21, "S": 1, "E": 0, "R": 1, "C": 21, "ROW": 0}
    assert echo(http, 22, start=True) == {"Y": 22, "S": 1, "E": 0, "R": 1, "C": 22, "ROW": 1}
    assert echo(http, 22) == {"Y": 22, "S": 0, "E": 0, "R": 1, "C": 22, "ROW": 1}
    assert echo(http, 21, end=True) == {"Y": 21, "S": 0, "E": 1, "R": 1, "C": 21, "ROW": 0}
    assert echo(http, 23, start=True, end=True) == {"Y": 23, "S": 1, "E": 1, "R": 1, "C": 23, "ROW": 0}
    assert echo(http, 22, end=True)["ROW"] == 1


def test_onnx_with_the_strategy_oldest_and_without_batches(http: triton_http.InferenceServerClient) -> None:
    for sequence_id in (31, 32):
        assert echo(http, sequence_id, start=True, model="echo_oldest")["ROW"] == 0
        assert echo(http, sequence_id, end=True, model="echo_oldest")["E"] == 1
    assert echo(http, 33, True, True, "echo_unbatched") == {"Y": 33, "S": 1, "E": 1, "R": 1, "C": 33}


def test_control_inputs_are_not_inputs_of_clients(http: triton_http.InferenceServerClient) -> None:
    for model, names in (("echo", ["X"]), ("sums", ["INPUT", "PADDING"])):
        assert [each["name"] for each in http.get_model_metadata(model)["inputs"]] == names
        assert len(http.get_model_config(model)["sequence_batching"]["control_input"]) == 4


def test_a_sequence_waits_for_a_slot(grpc: triton_grpc.InferenceServerClient) -> None:
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    assert send(grpc, 1, 41, start=True, model="one_slot") == 1
    grpc.async_infer(
        "one_slot",
        inputs_of(triton_grpc, arrays_of(7)),
        lambda result, error: answers.put((result, error)),
        sequence_id=42,
        sequence_start=True,
    )
    assert send(grpc, 2, 41, model="one_slot") == 3
    assert answers.empty()
    assert send(grpc, 3, 41, end=True, model="one_slot") == 6
    result, error = answers.get(timeout=60)
    assert error is None
    assert result.as_numpy("OUTPUT")[0, 0] == 7
    assert send(grpc, 1, 42, end=True, model="one_slot") == 8


def print_outcome(result: object, error: object) -> None:
    print(result, error)


def test_timeout_and_cancel_in_the_backlog_end_the_sequence(grpc: triton_grpc.InferenceServerClient) -> None:
    assert send(grpc, 1, 51, start=True, model="one_slot") == 1
    with pytest.raises(InferenceServerException, match="exceeded its timeout in the queue"):
        send(grpc, 1, 52, start=True, model="one_slot", timeout=1000)
    with pytest.raises(
        InferenceServerException, match=r"START flag.*a queued request of it was cancelled or timed out"
    ):
        send(grpc, 1, 52, model="one_slot")
    call = grpc.async_infer(
        "one_slot", inputs_of(triton_grpc, arrays_of(7)), print_outcome, sequence_id=53, sequence_start=True
    )
    with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        send(grpc, 1, 54, start=True, model="one_slot", client_timeout=0.5)
    call.cancel()

    def is_over(sequence_id: int) -> bool:
        try:
            send(grpc, 1, sequence_id, model="one_slot", timeout=1)
        except InferenceServerException as error:
            return "START flag" in str(error)
        return False

    until(lambda: is_over(53))
    until(lambda: is_over(54))
    assert send(grpc, 2, 51, end=True, model="one_slot") == 3
    assert send(grpc, 4, 53, start=True, end=True, model="one_slot") == 4


def test_an_idle_sequence_gives_its_slot_away(grpc: triton_grpc.InferenceServerClient) -> None:
    for sequence_id in range(60, 64):  # each waits until the one before it has expired
        assert send(grpc, sequence_id, sequence_id, start=True, model="short") == sequence_id


def test_a_failing_request_leaves_its_sequence_alive(client: Any) -> None:
    assert send(client, 1, 71, start=True) == 1
    with pytest.raises(InferenceServerException, match="refused by the model"):
        send(client, 1001, 71)
    with pytest.raises(InferenceServerException, match=r"a failing request|failed"):
        send(client, 1002, 71)
    assert send(client, 2, 71, end=True) == 3


def test_a_crash_ends_the_sequences_of_the_instance(grpc: triton_grpc.InferenceServerClient) -> None:
    model = "crashing"
    assert send(grpc, 1, 81, start=True, model=model) == 1
    assert send(grpc, 1, 82, start=True, model=model) == 1
    with pytest.raises(InferenceServerException, match="died"):
        send(grpc, 1000, 81, model=model)
    for sequence_id in (81, 82):
        with pytest.raises(InferenceServerException, match=r"died|START flag"):
            send(grpc, 5, sequence_id, model=model)

    def restarts() -> bool:
        try:
            return send(grpc, 5, 82, start=True, model=model) == 5
        except InferenceServerException:
            return False

    until(restarts)
    assert send(grpc, 5, 82, end=True, model=model) == 10


def process(client: Any, sequence_id: int, model: str, start: bool = False, end: bool = False) -> tuple[int, int]:
    result = infer(client, model, arrays_of(1), sequence_id=sequence_id, sequence_start=start, sequence_end=end)
    return int(result.as_numpy("OUTPUT")[0, 0]), int(result.as_numpy("PROCESS")[0, 0])


def test_a_process_that_dies_between_requests_takes_its_sequences_along(
    grpc: triton_grpc.InferenceServerClient,
) -> None:
    model = "crashing"

    def begin() -> int:
        try:
            return process(grpc, 85, model, start=True)[1]
        except InferenceServerException:  # the process of the test before is being replaced
            return 0

    until(begin)
    os.kill(process(grpc, 85, model)[1], signal.SIGKILL)
    refusals = []

    def is_refused() -> bool:
        with pytest.raises(InferenceServerException) as refused:
            process(grpc, 85, model)
        refusals.append(str(refused.value))
        return "START flag" in refusals[-1]

    until(is_refused)
    assert "the instance that has its state died" in refusals[-1]
    until(begin)
    assert process(grpc, 85, model, end=True)[0] == 2


def test_reload_with_a_live_sequence(client: Any, repository: Path) -> None:
    model = "reloaded"
    _, first = process(client, 91, model, start=True)
    code = repository / model / "1" / "model.py"
    code.write_text(code.read_text() + "# changed\n")
    client.load_model(model)
    assert process(client, 91, model) == (2, first)
    total, second = process(client, 92, model, start=True)
    assert (total, second != first) == (1, True)
    assert process(client, 91, model, end=True) == (3, first)
    with pytest.raises(InferenceServerException, match="START flag"):
        process(client, 91, model)
    assert process(client, 91, model, start=True, end=True) == (1, second)
    assert process(client, 92, model, end=True) == (2, second)


def test_unload_with_a_live_sequence(client: Any) -> None:
    model = "unloaded"
    assert send(client, 1, 95, start=True, model=model) == 1
    client.unload_model(model)
    assert send(client, 2, 95, model=model) == 3
    with pytest.raises(InferenceServerException, match="unloaded and starts no sequences"):
        send(client, 1, 96, start=True, model=model)
    assert send(client, 3, 95, end=True, model=model) == 6
    until(lambda: not client.is_model_ready(model))

    def is_gone() -> bool:
        try:
            send(client, 1, 96, start=True, model=model)
        except InferenceServerException as error:
            return "is not loaded" in str(error)
        return False

    until(is_gone)
    client.load_model(model)


def test_live_sequences_do_not_hold_up_the_end_of_the_server(client: Any) -> None:
    assert send(client, 1, 99, start=True) == 1  # the fixture stops the server


def test_start_after_a_reload_ends_the_earlier_sequence(client: Any, repository: Path) -> None:
    model = "reloaded"
    assert process(client, 93, model, start=True)[0] == 1
    code = repository / model / "1" / "model.py"
    code.write_text(code.read_text() + "# changed\n")
    client.load_model(model)
    assert process(client, 93, model, start=True, end=True)[0] == 1
    with pytest.raises(InferenceServerException, match="START flag"):  # not the sequence from before the reload
        process(client, 93, model)
