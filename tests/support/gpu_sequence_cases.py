"""Sequences with states and controls on TensorRT: the same cases for a real GPU and for a fake.

Values are small whole numbers, so that answers are exact.
"""

from __future__ import annotations

import random
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as triton_grpc
from headrace.config.model_folder import read_model_folder
from headrace_engines.__main__ import main
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model

ROWS, WIDTH, CANDIDATES = 8, 4, 20
MODELS = ("direct", "oldest", "initial", "built")
INITIAL = np.arange(WIDTH, dtype=np.float32)
STRATEGIES = dict.fromkeys(MODELS, "direct: {}") | {"oldest": f"oldest: {{max_candidate_sequences: {CANDIDATES}}}"}
CONFIG = """
max_batch_size: 8
input: [{name: X, data_type: fp32, dims: [4]}]
output: [OUTPUTS]
instance_group: [{kind: gpu, count: 2}]
sequence_batching:
  max_sequence_idle_microseconds: 3600000000
  STRATEGY
  control_input:
  - {name: START, control: [{kind: start, fp32_false_true: [0, 1]}]}
  - {name: READY, control: [{kind: ready, fp32_false_true: [0, 1]}]}
  state:
  - {input_name: SUM_IN, output_name: SUM_OUT, data_type: fp32, dims: [4]INITIAL}
"""
OUTPUTS = [f"{{name: {name}, data_type: fp32, dims: [{size}]}}" for name, size in (("Y", WIDTH), ("FLAGS", 1))]


def sums() -> onnx.ModelProto:
    """Y and SUM_OUT are X + SUM_IN, FP32 (batch, 4); FLAGS is START + 2 READY, (batch, 1)."""
    nodes = [
        helper.make_node("Add", ["X", "SUM_IN"], ["Y"]),
        helper.make_node("Add", ["SUM_IN", "X"], ["SUM_OUT"]),
        helper.make_node("Add", ["READY", "READY"], ["twice"]),
        helper.make_node("Add", ["START", "twice"], ["FLAGS"]),
    ]
    wide, one = (TensorProto.FLOAT, ("batch", WIDTH)), (TensorProto.FLOAT, ("batch", 1))
    inputs = {"X": wide, "SUM_IN": wide, "START": one, "READY": one}
    return onnx_model(nodes, inputs, {"Y": wide, "SUM_OUT": wide, "FLAGS": one})


def make_repository(folder: Path) -> Path:
    """Build the models; returns the repository. `built` has an ONNX file and its engine, the others have plans."""
    repository, model = folder / "repository", sums()
    for name in MODELS:
        outputs, initial = OUTPUTS, ""
        if name == "initial":
            outputs = [*OUTPUTS, "{name: SUM_OUT, data_type: fp32, dims: [4]}"]
            initial = ", initial_state: [{data_type: fp32, dims: [4], data_file: sums}]"
            (repository / name / "initial_state").mkdir(parents=True)
            INITIAL.tofile(repository / name / "initial_state" / "sums")
        (repository / name / "1").mkdir(parents=True)
        text = CONFIG.replace("OUTPUTS", ", ".join(outputs)).replace("STRATEGY", STRATEGIES[name])
        backend = "" if name == "built" else "backend: tensorrt"
        (repository / name / "config.yaml").write_text(backend + text.replace("INITIAL", initial))
    onnx.save(model, repository / "built" / "1" / "model.onnx")
    profiles = read_spec(read_model_folder(repository / "built", repository).config).profiles
    for name in MODELS[:3]:
        plan = repository / name / "1" / "model.plan"
        TensorRtTarget(optimization_level=1).build(model, TargetSpec("fp32", profiles), plan, silent)
    words = [
        "--model-repository",
        str(repository),
        "--cache",
        str(folder / "store"),
        "--state-dir",
        str(folder / "state"),
    ]
    assert main(["build", "built", "--publish-slower", "--target", "tensorrt", *words]) == 0
    return repository


def check_model(client: triton_grpc.InferenceServerClient, model: str, requests: int = 400) -> None:
    """Interleave sequences on one stream, more than there are slots, and compare every answer with an oracle in NumPy."""
    choose = random.Random(model)
    initial = INITIAL if model == "initial" else np.zeros(WIDTH, np.float32)
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    live: dict[int, np.ndarray] = {}
    expected: list[tuple[np.ndarray, bool]] = []
    for number in range(requests):
        sequence_id = choose.randint(1, 24)
        start = sequence_id not in live or choose.random() < 0.05
        if start:
            live[sequence_id] = initial
        value = np.array([[choose.randint(-9, 9) for _ in range(WIDTH)]], np.float32)
        live[sequence_id] = live[sequence_id] + value[0]
        end = choose.random() < 0.15 or number >= requests - 60
        expected.append((live[sequence_id], start))
        if end:
            del live[sequence_id]
        _send(client, model, value, number, sequence_id, start, end)
    for sequence_id in list(live):
        _send(client, model, np.zeros((1, WIDTH), np.float32), len(expected), sequence_id, False, True)
        expected.append((live.pop(sequence_id), False))
    for _ in expected:
        result, error = answers.get(timeout=60)
        assert error is None, error
        total, start = expected[int(result.get_response().id)]
        assert result.as_numpy("Y").tolist() == [total.tolist()], result.get_response().id
        assert result.as_numpy("FLAGS").tolist() == [[2 + start]]
        state = result.as_numpy("SUM_OUT")
        assert (state is None) if model != "initial" else state.tolist() == [total.tolist()]
    client.stop_stream()


def _send(
    client: triton_grpc.InferenceServerClient,
    model: str,
    value: np.ndarray,
    number: int,
    sequence_id: int,
    start: bool,
    end: bool,
) -> None:
    tensor = triton_grpc.InferInput("X", value.shape, "FP32").set_data_from_numpy(value)
    client.async_stream_infer(
        model,
        [tensor],
        request_id=str(number),
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=end,
    )
