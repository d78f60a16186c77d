"""Pipelines in YAML: conditions, rows of a tensor as requests, fallbacks, built-in steps, reload and unload."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from loadtest.onnx_models import onnx_model
from tests.support import models
from tests.support.models import add_model, add_pipeline
from tests.support.serving import Server, serving
from tests.support.waiting import until

BOXES = """
input: [{name: boxes, data_type: fp32, dims: [-1, 4]}, {name: scores, data_type: fp32, dims: [-1]}]
output: [{name: kept, data_type: fp32, dims: [-1, 4]}, {name: features, data_type: fp32, dims: [-1, 3]}]
pipeline:
  steps:
    suppress:
      builtin: nms
      options: {iou_threshold: 0.5, score_threshold: 0.1}
      inputs: {boxes: boxes, scores: scores}
      outputs: {boxes: kept}
    describe: {model: affine, each: kept, inputs: {X: kept}, outputs: {Y: features}}
"""
# Kept boxes differ from row to row; a detector with batches and one without; a condition; an input that all elements share.
CROPS = """
max_batch_size: 4
input:
  - {name: boxes, data_type: fp32, dims: [-1, 4]}
  - {name: scores, data_type: fp32, dims: [-1]}
  - {name: shift, data_type: fp32, dims: [1]}
output: [{name: kept, data_type: fp32, dims: [-1, 4]}, {name: features, data_type: fp32, dims: [-1, 3]}]
pipeline:
  steps:
    detect: {model: detector, inputs: {X: boxes}, outputs: {Y: found}}
    suppress:
      builtin: nms
      options: {iou_threshold: 0.5, score_threshold: 0.1}
      inputs: {boxes: found, scores: scores}
      outputs: {boxes: kept}
    move: {model: shifted, each: kept, when: boxes.rows < 6, inputs: {X: kept, SHIFT: shift}, outputs: {Y: moved}}
    describe: {model: affine, each: moved, inputs: {X: moved}, outputs: {Y: hidden}}
    again: {model: copy, each: hidden, inputs: {X: hidden}, outputs: {Y: features}}
"""
BATCHED_CROPS = """
max_batch_size: 4
input: [{name: boxes, data_type: fp32, dims: [-1, 4]}]
output: [{name: features, data_type: fp32, dims: [-1, 3]}]
pipeline:
  steps:
    detect: {model: detector, inputs: {X: boxes}, outputs: {Y: found}}
    describe: {model: affine, each: found, inputs: {X: found}, outputs: {Y: features}}
"""
GATED = """
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: shares, data_type: fp32, dims: [4]}, {name: features, data_type: fp32, dims: [-1, 3]}]
pipeline:
  outputs: {shares: probabilities}
  steps:
    softmax: {builtin: softmax, inputs: {scores: x}, outputs: {probabilities: probabilities}}
    # The condition reads a tensor that is no input of the step.
    describe: {model: affine, when: probabilities.max > 0.5, inputs: {X: x}, outputs: {Y: hidden}}
    again: {model: copy, inputs: {X: hidden}, outputs: {Y: features}}
"""
SAFE = """
max_batch_size: 4
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [3]}]
pipeline: {steps: {careful: {model: picky, fallback: affine, inputs: {X: x}, outputs: {Y: y}}}}
"""
UNSAFE = SAFE.replace("fallback: affine, ", "")
PICKY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if (x < 0).any():
                raise ValueError("negative")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full((len(x), 3), 7, np.float32))]))
        return responses
"""
PICKY_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [4] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [3] } ]
"""


def shifted() -> onnx.ModelProto:
    """Y = X + SHIFT: X (batch, 4), SHIFT (batch, 1), Y (batch, 4)."""
    fp32 = onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Add", ["X", "SHIFT"], ["Y"])]
    return onnx_model(nodes, {"X": (fp32, ("batch", 4)), "SHIFT": (fp32, ("batch", 1))}, {"Y": (fp32, ("batch", 4))})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pipelines") / "repository"
    add_model(folder, "affine", models.affine(4, 3), config="max_batch_size: 8 dynamic_batching {}")
    add_model(folder, "detector", models.identity("FP32", ("batch", "n", 4)), config="max_batch_size: 8")
    add_model(folder, "shifted", shifted(), config="max_batch_size: 8")
    add_model(folder, "copy", models.identity("FP32", ("batch", 3)), config="max_batch_size: 8")
    (folder / "picky/1").mkdir(parents=True)
    (folder / "picky/1/model.py").write_text(PICKY)
    (folder / "picky/config.pbtxt").write_text(PICKY_CONFIG)
    for name, text in (
        ("boxes", BOXES),
        ("crops", CROPS),
        ("batched_crops", BATCHED_CROPS),
        ("gated", GATED),
        ("safe", SAFE),
        ("unsafe", UNSAFE),
    ):
        add_pipeline(folder, name, "", files={"config.yaml": text})
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository, repository.parent, "--model-control", "explicit", "--load-model", "*") as started:
        yield started


def infer(server: Server, model: str, **arrays: np.ndarray) -> tuple[int, dict[str, Any]]:
    tensors = [{"name": n, "datatype": "FP32", "shape": a.shape, "data": a.ravel().tolist()} for n, a in arrays.items()]
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": tensors}).encode())
    document = json.loads(content)
    if status != 200:
        return status, document
    return status, {o["name"]: np.asarray(o["data"], np.float32).reshape(o["shape"]) for o in document["outputs"]}


def features(repository: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(repository / "affine/1/model.onnx"))
    result: np.ndarray = session.run(None, {"X": x})[0]
    return result


def requests_of(server: Server, model: str) -> int:
    _, _, content = server.request("GET", f"/v2/models/{model}/stats")
    return int(json.loads(content)["model_stats"][0]["inference_stats"]["success"]["count"])


@pytest.mark.parametrize("count", [1, 3, 20])
def test_rows_of_a_tensor_run_as_one_request_and_are_gathered(server: Server, repository: Path, count: int) -> None:
    corners = np.arange(count, dtype=np.float32)[:, np.newaxis] * 20
    boxes = np.concatenate([corners, corners, corners + 10, corners + 10], axis=1)
    scores = np.linspace(0.9, 0.2, count, dtype=np.float32)
    before = requests_of(server, "affine")
    status, outputs = infer(server, "boxes", boxes=boxes, scores=scores)
    assert status == 200
    assert outputs["kept"].tolist() == boxes.tolist()
    np.testing.assert_allclose(outputs["features"], features(repository, boxes), rtol=1e-5)
    assert requests_of(server, "affine") == before + 1  # 20 rows, although a batch has 8


@pytest.mark.parametrize("seed", range(30))
def test_a_request_with_several_rows_equals_requests_with_one_row(server: Server, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, count = int(rng.integers(1, 5)), int(rng.integers(1, 8))
    corners = np.arange(count, dtype=np.float32)[:, np.newaxis] * 20 + rng.random((rows, count, 1), np.float32)
    boxes = np.concatenate([corners, corners, corners + 10, corners + 10], axis=2)
    scores = rng.random((rows, count), np.float32) + 0.2
    low = rng.random((rows, count)) < 0.3
    scores[np.repeat(low[:1], rows, axis=0) if seed % 2 else low] = 0  # every second seed: as many in each row
    arrays = {"boxes": boxes, "scores": scores, "shift": rng.random((rows, 1), np.float32)}
    alone = [infer(server, "crops", **{name: a[row : row + 1] for name, a in arrays.items()}) for row in range(rows)]
    assert [status for status, _ in alone] == [200] * rows
    kept = (scores > 0.1).sum(axis=1)
    assert [answer["kept"].shape for _, answer in alone] == [(1, number, 4) for number in kept]
    expected_rows = kept if count < 6 else np.zeros(rows, int)  # the condition
    assert [answer["features"].shape for _, answer in alone] == [(1, number, 3) for number in expected_rows]
    status, together = infer(server, "crops", **arrays)
    if len(set(kept)) > 1:
        other = int(np.flatnonzero(kept != kept[0])[0])
        text = f"output 'kept' has shape [{kept[0]}, 4] for row 0 and [{kept[other]}, 4] for row {other}: "
        assert (status, text in together["error"]) == (400, True)
        return
    assert status == 200
    for name in ("kept", "features"):
        np.testing.assert_allclose(together[name], np.concatenate([answer[name] for _, answer in alone]), rtol=1e-5)


def test_the_crops_of_a_detector_with_batches(server: Server, repository: Path) -> None:
    boxes = np.random.default_rng(1).random((3, 5, 4), np.float32)
    before = requests_of(server, "batched_crops"), requests_of(server, "affine")
    status, outputs = infer(server, "batched_crops", boxes=boxes)
    assert (status, outputs["features"].shape) == (200, (3, 5, 3))
    np.testing.assert_allclose(
        outputs["features"].reshape(15, 3), features(repository, boxes.reshape(15, 4)), rtol=1e-5
    )
    assert (requests_of(server, "batched_crops"), requests_of(server, "affine")) == (before[0] + 1, before[1] + 3)
    status, answer = infer(server, "batched_crops", boxes=np.ones((3, 1366, 4), np.float32))
    assert (status, "at most 4096 are allowed" in answer["error"]) == (400, True)
    status, answer = infer(server, "batched_crops", boxes=np.ones((5, 1, 4), np.float32))
    assert (status, "accepts at most 4" in answer["error"]) == (400, True)


def test_no_rows_skip_the_model(server: Server) -> None:
    before = requests_of(server, "affine")
    status, outputs = infer(server, "boxes", boxes=np.ones((2, 4), np.float32), scores=np.zeros(2, np.float32))
    assert (status, outputs["kept"].shape, outputs["features"].shape) == (200, (0, 4), (0, 3))
    assert requests_of(server, "affine") == before


def test_the_boxes_of_nms_are_bounded(server: Server) -> None:
    steps = np.arange(4097, dtype=np.float32)[:, np.newaxis] * 20
    boxes = np.concatenate([steps, steps, steps + 10, steps + 10], axis=1)
    status, outputs = infer(server, "boxes", boxes=boxes, scores=np.ones(4097, np.float32))
    assert (status, outputs["kept"].shape[0]) == (200, 100)  # max_boxes of nms


def test_a_step_whose_condition_does_not_hold_is_skipped_with_those_behind_it(server: Server, repository: Path) -> None:
    sure, unsure = np.array([9, 0, 0, 0], np.float32), np.zeros(4, np.float32)
    status, outputs = infer(server, "gated", x=sure)
    assert status == 200
    np.testing.assert_allclose(outputs["features"], features(repository, sure[np.newaxis]), rtol=1e-5)
    before = requests_of(server, "copy")
    status, outputs = infer(server, "gated", x=unsure)
    assert (status, outputs["features"].shape) == (200, (0, 3))
    np.testing.assert_allclose(outputs["shares"], [0.25] * 4)
    assert requests_of(server, "copy") == before


def test_a_fallback_answers_where_the_model_fails(server: Server, repository: Path) -> None:
    good, bad = np.ones((2, 4), np.float32), -np.ones((2, 4), np.float32)
    assert infer(server, "safe", x=good)[1]["y"].tolist() == [[7] * 3] * 2
    status, outputs = infer(server, "safe", x=bad)
    assert status == 200
    np.testing.assert_allclose(outputs["y"], features(repository, bad), rtol=1e-5)
    status, answer = infer(server, "unsafe", x=bad)
    assert status == 500
    assert answer["error"].startswith("in pipeline 'unsafe', step 'careful' (model picky/1): ")
    assert "negative" not in answer["error"]


def test_a_pipeline_waits_for_its_models_and_is_unavailable_without_them(server: Server) -> None:
    def state() -> str:
        _, _, content = server.request("POST", "/v2/repository/index", b"{}")
        (found,) = [each["state"] for each in json.loads(content) if each["name"] == "unsafe"]
        return str(found)

    assert state() == "READY"
    server.request("POST", "/v2/repository/models/picky/unload", b"{}")
    assert state() == "UNAVAILABLE"
    assert infer(server, "unsafe", x=np.ones((1, 4), np.float32))[0] == 503
    server.request("POST", "/v2/repository/models/picky/load", b"{}")
    deadline = time.monotonic() + 20
    while state() != "READY" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert infer(server, "unsafe", x=np.ones((1, 4), np.float32))[0] == 200


def test_a_broken_pipeline_names_file_line_and_cure(server: Server, repository: Path) -> None:
    text = GATED.replace("probabilities.max > 0.5", "probabilities.best > 0.5")
    add_pipeline(repository, "broken", "", files={"config.yaml": text})
    status, _, content = server.request("POST", "/v2/repository/models/broken/load", b"{}")
    assert status == 400
    assert "broken/config.yaml:9" in json.loads(content)["error"]
    assert '"best" is no reduction' in json.loads(content)["error"]


def test_a_fallback_that_is_not_served_at_load_or_later(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    add_model(folder, "main", models.affine(4, 3, seed=1), config="max_batch_size: 8")
    add_model(folder, "affine", models.affine(4, 3), config="max_batch_size: 8")
    (folder / "damaged/1").mkdir(parents=True)
    (folder / "damaged/1/model.onnx").write_bytes(b"no model")
    (folder / "picky/1").mkdir(parents=True)
    (folder / "picky/1/model.py").write_text(PICKY)
    (folder / "picky/config.pbtxt").write_text(PICKY_CONFIG)
    text = SAFE.replace("picky", "main")
    fallbacks = (("guarded", "affine"), ("lost", "absent"), ("broken", "damaged"), ("doubtful", "picky"))
    for name, fallback in fallbacks:
        add_pipeline(folder, name, "", files={"config.yaml": text.replace("affine", fallback)})
    x = np.ones((1, 4), np.float32)
    chosen = ("--model-control", "explicit", "--load-model", "guarded", "--load-model", "doubtful")
    with serving(folder, tmp_path, *chosen) as server:

        def control(name: str, action: str) -> tuple[int, str]:
            status, _, content = server.request("POST", f"/v2/repository/models/{name}/{action}", b"{}")
            return status, content.decode()

        for name, fallback in (("lost", "absent"), ("broken", "damaged")):
            status, answer = control(name, "load")
            assert (status, f"needs model '{fallback}', which is not served" in answer) == (400, True)
        status, outputs = infer(server, "guarded", x=x)
        assert (status, outputs["y"].tolist()) == (200, infer_alone(folder, "main", x))
        # Without its model the fallback serves, without both neither, without the fallback the model.
        assert control("main", "unload")[0] == 200
        status, outputs = infer(server, "guarded", x=x)
        assert (status, outputs["y"].tolist()) == (200, infer_alone(folder, "affine", x))
        assert server.request("GET", "/v2/models/guarded/ready")[0] == 200
        status, answer_text = infer(server, "doubtful", x=-x)
        assert (status, "step 'careful' (model picky/1): " in answer_text["error"]) == (500, True)
        until(lambda: "ValueError: negative" in server.log.read_text())
        assert server.log.read_text().count("ValueError: negative") == 1  # the fallback runs once
        assert control("affine", "unload")[0] == 200
        status, answer_text = infer(server, "guarded", x=x)
        assert (status, "needs model 'main', which is not served" in answer_text["error"]) == (503, True)
        assert server.request("GET", "/v2/models/guarded/ready")[0] == 503
        assert control("main", "load")[0] == 200
        status, outputs = infer(server, "guarded", x=x)
        assert (status, outputs["y"].tolist()) == (200, infer_alone(folder, "main", x))


def infer_alone(folder: Path, model: str, x: np.ndarray) -> list[list[float]]:
    session = onnxruntime.InferenceSession(str(folder / model / "1/model.onnx"))
    result: list[list[float]] = session.run(None, {"X": x})[0].tolist()
    return result
