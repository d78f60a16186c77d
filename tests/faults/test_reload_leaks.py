"""Descriptors, threads, processes and memory files of every kind of model return after reloads, failed loads and crashes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import skimage

from tests.support.examples import MORE_EXAMPLES
from tests.support.models import add_model, add_pipeline, affine, channel_means, ensemble_config
from tests.support.processes import children
from tests.support.python_models import DECOUPLED, add_python_model
from tests.support.sequence_models import add_state_sums
from tests.support.serving import Server, serving
from tests.support.waiting import until

CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[:, :4] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor)]) for tensor in tensors]
"""
TENSORS = 'input [{ name: "X" data_type: TYPE_FP32 dims: [16] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [4] }]'
PYTHON = f'backend: "python"\nmax_batch_size: 8\n{TENSORS}\ninstance_group [ {{ count: 2 kind: KIND_CPU }} ]'
ROCKET = (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()
IMAGES = """
input: [{name: file, data_type: bytes, dims: [1]}]
output: [{name: logits, data_type: fp32, dims: [3]}]
pipeline:
  steps:
    decode: {builtin: decode_image, options: {processes: 2}, inputs: {image: file}, outputs: {image: pixels}}
    resize: {builtin: resize, options: {resize_short_side: 32, crop: [32, 32]}, inputs: {image: pixels}, outputs: {tensor: x}}
    model: {model: inner, inputs: {IMAGE: x}, outputs: {LOGITS: logits}}
"""
ISOLATED = "isolation: process\nmax_batch_size: 8\n"
REPEATED = pytest.mark.parametrize(
    "times",
    [
        pytest.param(2, id="few"),
        pytest.param(50, marks=[*MORE_EXAMPLES, pytest.mark.timeout(1800)], id="many"),
    ],
)


def add_onnx(repository: Path) -> None:
    add_model(repository, "m", affine(), config="max_batch_size: 8")


def add_isolated(repository: Path) -> None:
    add_model(repository, "m", affine(), files={"config.yaml": ISOLATED})


def add_python(repository: Path) -> None:
    add_python_model(repository, "m", CODE, PYTHON)


def add_ensemble(repository: Path) -> None:
    add_python_model(repository, "inner", CODE, PYTHON)
    io = {"X": ("TYPE_FP32", (16,))}, {"Y": ("TYPE_FP32", (4,))}
    add_pipeline(repository, "m", ensemble_config([("inner", {"X": "X"}, {"Y": "Y"})], *io))


def add_sequence(repository: Path) -> None:
    add_state_sums(repository, "m", "oldest { max_candidate_sequences: 4 }", fails=False)


def add_decoupled(repository: Path) -> None:
    add_python_model(repository, "m", DECOUPLED)


def add_images(repository: Path) -> None:
    add_model(repository, "inner", channel_means(32, 32), config="max_batch_size: 8")
    add_pipeline(repository, "m", "", files={"config.yaml": IMAGES})


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        add: writes the models into a repository; requests go to `m`.
        body: of a request.
        content_type: of the body.
        models: in the order in which they are loaded.
        method: last part of the path.
    """

    add: Callable[[Path], None]
    body: bytes
    content_type: str = "application/json"
    models: tuple[str, ...] = ("m",)
    method: str = "infer"


def body(name: str, datatype: str, values: list[float], **more: object) -> bytes:
    tensor = {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": values}
    return json.dumps({"inputs": [tensor], **more}).encode()


ROW = body("X", "FP32", [1.0] * 16)
START = {"sequence_id": 42, "sequence_start": True}  # without an end: the sequence is open when the model is reloaded
KINDS = {
    "onnx": Kind(add_onnx, ROW),
    "isolated": Kind(add_isolated, ROW),
    "python": Kind(add_python, ROW),
    "ensemble": Kind(add_ensemble, ROW, models=("inner", "m")),
    "sequence": Kind(add_sequence, body("X", "FP32", [1.0], parameters=START)),
    "decoupled": Kind(add_decoupled, b'{"IN": [1]}', method="generate"),
    "images": Kind(add_images, ROCKET, "image/jpeg", ("inner", "m")),
}


def held(server: Server) -> tuple[int, int, int, int]:
    """Descriptors, memory files, threads, and processes."""
    folder = Path(f"/proc/{server.process.pid}")
    links = []
    for path in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            links.append(os.readlink(path))
    threads = len(list((folder / "task").iterdir()))
    return len(links), sum("memfd:" in link for link in links), threads, len(children(server.process.pid))


@REPEATED
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_of_reloads_failed_loads_and_crashes(tmp_path: Path, kind: str, times: int) -> None:
    repository = tmp_path / "models"
    add, content, content_type, names, method = KINDS[kind]
    add(repository)
    broken = '{"parameters": {"config": "{\\"max_batch_size\\": -1}"}}'
    with serving(
        repository, tmp_path, "--model-control", "explicit", "--allow-model-override", "--profile-s", "0"
    ) as server:

        def post(path: str, content: bytes = b"", content_type: str = "application/json") -> int:
            return server.request("POST", f"/v2/{path}", content, {"Content-Type": content_type})[0]

        def cycle() -> None:
            for name in names:
                assert post(f"repository/models/{name}/load") == 200
                assert post(f"repository/models/{name}/load") == 200
            assert post("repository/models/m/load", broken.encode()) == 400
            until(lambda: post(f"models/m/{method}", content, content_type) == 200)
            for pid in children(server.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda: post(f"models/m/{method}", content, content_type) == 200)
            for name in names:
                assert post(f"repository/models/{name}/unload") == 200

        for _ in range(2):
            cycle()
        before: list[tuple[int, int, int, int]] = []
        until(lambda: held(server)[3] == 0 and (before.append(held(server)) or len(before) > 20))
        first = before[-1]
        for _ in range(times):
            cycle()
        until(lambda: all(now <= was for now, was in zip(held(server), first, strict=True)))
