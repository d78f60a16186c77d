"""States that the server keeps for the sequences of ONNX models, over HTTP and gRPC, with tritonclient's arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.sequence_models import add_state_sums
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, inputs_of, module_of

OLDEST = "oldest { max_candidate_sequences: 8 }"
LISTED = """output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "TOTAL" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "HISTORY_OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]"""
FROM_FILE = 'initial_state { data_type: TYPE_FP32 dims: [ 2 ] data_file: "history" }'


def build(repository: Path) -> Path:
    add_state_sums(repository, "direct", "direct { }")
    add_state_sums(repository, "oldest", OLDEST)
    add_state_sums(repository, "unbatched", OLDEST, batch=0)
    folder = add_state_sums(repository, "initial", "direct { }", history_options=FROM_FILE, outputs=LISTED)
    (folder / "initial_state").mkdir()
    np.array([100, 200], np.float32).tofile(folder / "initial_state" / "history")
    add_state_sums(repository, "reloaded", "direct { }")
    add_state_sums(repository, "warm", "direct { }")
    with (repository / "warm" / "config.pbtxt").open("a") as config:
        inputs = (
            f'inputs {{ key: "{name}" value: {{ data_type: {kind} dims: [ 1 ] zero_data: true }} }}'
            for name, kind in (("X", "TYPE_FP32"), ("FAIL", "TYPE_INT64"))
        )
        config.write(f'model_warmup [ {{ name: "all" batch_size: 4 {" ".join(inputs)} }} ]\n')
    return repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("states") / "repository")


@pytest.fixture(scope="module", params=["one process", "front end"])
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = ("--front-ends", "1") if request.param == "front end" else ()
    with serving(
        repository, tmp_path_factory.mktemp("log"), *options, "--model-control", "explicit", "--load-model", "*"
    ) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    with connect(server, request.param) as running:
        yield running


def tensors(kind: Any, value: float, fails: bool, model: str) -> list[Any]:
    shape = (1,) if model == "unbatched" else (1, 1)
    return inputs_of(kind, {"X": np.full(shape, value, np.float32), "FAIL": np.full(shape, int(fails))})


def infer(
    client: Any, model: str, sequence_id: int, value: float, start: bool = False, end: bool = False, fails: bool = False
) -> Any:
    inputs = tensors(module_of(client), value, fails, model)
    return client.infer(model, inputs, sequence_id=sequence_id, sequence_start=start, sequence_end=end)


def send(client: Any, model: str, sequence_id: int, value: float, **options: bool) -> float:
    """Send a request, and return the sum of its sequence, by both states."""
    result = infer(client, model, sequence_id, value, **options)
    total, by_history = result.as_numpy("Y").item(), result.as_numpy("TOTAL").item()
    assert total == by_history
    return float(total)


@pytest.mark.parametrize("model", ["direct", "oldest", "unbatched", "warm"])
def test_states_of_interleaved_sequences(client: Any, model: str) -> None:
    ids = (1, 2, 3, 4, 5) if model in ("unbatched", "oldest") else (1, 2, 3)
    choose = random.Random(7)
    for sequence_id in ids:
        assert send(client, model, sequence_id, sequence_id, start=True) == sequence_id
    sums = {sequence_id: float(sequence_id) for sequence_id in ids}
    for _ in range(40):
        sequence_id = choose.choice(ids)
        if choose.random() < 0.1:
            with pytest.raises(InferenceServerException):
                send(client, model, sequence_id, 5, fails=True)
        elif choose.random() < 0.2:
            sums[sequence_id] = 1.0
            assert send(client, model, sequence_id, 1, start=True) == 1
        else:
            sums[sequence_id] += 3
            assert send(client, model, sequence_id, 3) == sums[sequence_id]
    for sequence_id in ids:
        assert send(client, model, sequence_id, 1, end=True) == sums[sequence_id] + 1
        assert send(client, model, sequence_id, 2, start=True, end=True) == 2


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_states_of_batches(server: Server, model: str) -> None:
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as grpc:
        grpc.start_stream(lambda result, error: answers.put((result, error)))
        ids, count = (101, 102, 103, 104), 30
        for step in range(count):
            for sequence_id in ids:
                if (step * sequence_id) % 3 == 0 and step not in (0, count - 1):
                    continue  # so that batches differ, and histories too
                grpc.async_stream_infer(
                    model,
                    tensors(triton_grpc, sequence_id, False, model),
                    request_id=f"{sequence_id}",
                    sequence_id=sequence_id,
                    sequence_start=step == 0,
                    sequence_end=step == count - 1,
                )
        steps = dict.fromkeys(ids, 0)
        sent = sum(1 for step in range(count) for each in ids if (step * each) % 3 or step in (0, count - 1))
        for _ in range(sent):
            result, error = answers.get(timeout=60)
            assert error is None, error
            sequence_id = int(result.get_response().id)
            steps[sequence_id] += 1
            expected = sequence_id * steps[sequence_id]
            assert result.as_numpy("Y").item() == result.as_numpy("TOTAL").item() == expected
        grpc.stop_stream()


def test_initial_state_of_a_file_and_a_listed_state(client: Any) -> None:
    result = infer(client, "initial", 21, 5, start=True)
    assert result.as_numpy("HISTORY_OUT").tolist() == [[100, 200, 5]]
    assert (result.as_numpy("TOTAL").item(), result.as_numpy("Y").item()) == (305, 5)
    assert result.as_numpy("SUM_OUT") is None
    result = infer(client, "initial", 21, 6, end=True)
    assert result.as_numpy("HISTORY_OUT").tolist() == [[100, 200, 5, 6]]
    assert infer(client, "initial", 21, 7, start=True, end=True).as_numpy("HISTORY_OUT").tolist() == [[100, 200, 7]]


def test_clients_do_not_send_states_and_read_listed_ones_only(client: Any) -> None:
    kind = module_of(client)
    (state,) = inputs_of(kind, {"SUM_IN": np.ones((1, 1), np.float32)})
    inputs = tensors(kind, 1, False, "direct")
    with pytest.raises(InferenceServerException, match="SUM_IN"):
        client.infer("direct", [*inputs, state], sequence_id=31, sequence_start=True)
    output = kind.InferRequestedOutput("SUM_OUT")
    with pytest.raises(InferenceServerException, match="SUM_OUT"):
        client.infer("direct", inputs, outputs=[output], sequence_id=31, sequence_start=True)
    result = infer(client, "direct", 31, 1, start=True, end=True)
    assert result.as_numpy("SUM_OUT") is result.as_numpy("HISTORY_OUT") is None


def test_metadata_and_configuration(server: Server) -> None:
    with triton_http.InferenceServerClient(server.address) as http:
        metadata = http.get_model_metadata("direct")
        assert [each["name"] for each in metadata["inputs"]] == ["X", "FAIL"]
        assert [each["name"] for each in metadata["outputs"]] == ["Y", "TOTAL"]
        states = http.get_model_config("initial")["sequence_batching"]["state"]
        assert [each["input_name"] for each in states] == ["SUM_IN", "HISTORY_IN"]
        assert states[1]["initial_state"][0]["data_file"] == "history"
    with triton_grpc.InferenceServerClient(server.grpc_address) as grpc:
        config = grpc.get_model_config("initial").config
        assert [each.output_name for each in config.sequence_batching.state] == ["SUM_OUT", "HISTORY_OUT"]
        assert config.sequence_batching.state[1].initial_state[0].dims == [2]


def test_a_reload_keeps_the_states_of_live_sequences(client: Any, repository: Path) -> None:
    model = "reloaded"
    assert send(client, model, 41, 5, start=True) == 5
    config = repository / model / "config.pbtxt"
    config.write_text(config.read_text() + "\n# changed\n")
    with (repository / model / "1" / "model.onnx").open("ab"):
        pass
    client.load_model(model)
    assert send(client, model, 41, 6) == 11
    assert send(client, model, 42, 1, start=True, end=True) == 1
    assert send(client, model, 41, 7, end=True) == 18
