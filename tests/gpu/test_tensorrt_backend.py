"""The TensorRT backend on a real GPU: datatypes, shapes, and a whole server; `contract/test_tensorrt.py` has the batches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.errors import ConfigError
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import tensorrt_case
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import ROOT, serving
from tests.support.tensorrt_networks import FLOAT, HALF, Sketch, answers, convolutions

_no_server = [name for name in ("fastapi", "uvicorn", "tritonclient") if importlib.util.find_spec(name) is None]
pytestmark = gpu_marks(120)

# Level 1 builds in a second or two what level 3 builds in ten; kernels' speed is not what is tested.
TARGET = TensorRtTarget(optimization_level=1)
ROWS = 32


def profile(minimum: int, optimum: int, maximum: int) -> ShapeRange:
    return ShapeRange({"x": tuple((n, 3, 16, 16) for n in (minimum, optimum, maximum))})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`convolutions` for 1 to 32 rows."""
    path = tmp_path_factory.mktemp("plan") / "model.plan"
    TARGET.build(convolutions(), TargetSpec("fp32", (profile(1, 8, ROWS),)), path, silent)
    return path


def opened(path: Path, rows: int = ROWS, instances: int = 1, **parameters: str) -> AbstractContextManager[Any]:
    """The executions of a plan; the only one itself if there is one."""
    return tensorrt_case.opened(path, {MAX_BATCH_SIZE: str(rows), **parameters}, instances)


def test_other_types(tmp_path: Path) -> None:
    net = Sketch()
    wide = net.node("Cast", ["b"], "b32", to=FLOAT)
    net.node("Cast", [net.node("Add", [wide, net.node("Cast", ["h"], "h32", to=FLOAT)], "sum")], "y", to=HALF)
    net.node("Add", ["i", "i"], "j")
    bf16, int32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT32
    model = net.model(
        [("b", bf16, ["n", 4]), ("h", HALF, ["n", 4]), ("i", int32, ["n", 2])],
        [("y", HALF, ["n", 4]), ("j", int32, ["n", 2])],
    )
    widths = {"b": 4, "h": 4, "i": 2}
    order = TargetSpec("fp16", (ShapeRange({name: ((1, w), (2, w), (8, w)) for name, w in widths.items()}),))
    path = tmp_path / "model.plan"
    TARGET.build(model, order, path, silent)
    with opened(path, rows=8) as execution:
        b = (np.array([[1, 2, 3, 4]] * 3, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        h, i = np.full((3, 4), 0.5, np.float16), np.arange(6, dtype=np.int32).reshape(3, 2)
        result = execution.run({"b": b, "h": h, "i": i})
        assert result["y"].dtype == np.float16
        assert result["y"].tolist() == [[1.5, 2.5, 3.5, 4.5]] * 3
        assert result["j"].tolist() == (i + i).tolist()


def test_an_output_with_a_data_dependent_shape(tmp_path: Path) -> None:
    net = Sketch()
    net.node("NonZero", [net.node("Greater", ["x", net.constant("nought", np.float32(0))], "above")], "where")
    path = tmp_path / "model.plan"
    model = net.model([("x", FLOAT, [4, 8])], [("where", onnx.TensorProto.INT64, [2, "k"])])
    TARGET.build(model, TargetSpec("fp32"), path, silent)
    with pytest.raises(ConfigError, match="whose shape depends on the values"), opened(path, rows=0):
        pass


# A whole server


@pytest.mark.skipif(bool(_no_server), reason=f"needs {', '.join(_no_server)}")
def test_a_server_over_http_and_grpc(tmp_path: Path) -> None:
    import tritonclient.grpc as triton_grpc
    import tritonclient.http as triton_http

    repository = tmp_path / "repository"
    words = [
        sys.executable,
        "-m",
        "headrace_engines",
        "models",
        "build",
        "--output",
        str(repository),
        "--only",
        "digits",
    ]
    subprocess.run(words, check=True, cwd=ROOT, timeout=60, capture_output=True)
    folder = repository / "digits"
    model = onnx.load(folder / "1" / "model.onnx")
    shape = ShapeRange({"image": ((1, 1, 8, 8), (8, 1, 8, 8), (ROWS, 1, 8, 8))})
    TARGET.build(model, TargetSpec("fp32", (shape,)), folder / "1" / "model.plan", silent)
    group = "instance_group: [{kind: gpu, count: 2, gpus: [0]}]\n"
    (folder / "config.yaml").write_text(f"backend: tensorrt\nmax_batch_size: {ROWS}\ndynamic_batching: {{}}\n{group}")
    image = np.random.default_rng(3).integers(0, 17, (40, 1, 8, 8)).astype(np.float32)
    right = answers(model, {"image": image})["probabilities"]
    with serving(repository, tmp_path) as server:
        for module, address in ((triton_http, server.address), (triton_grpc, server.grpc_address)):
            with module.InferenceServerClient(address) as client:
                for rows in (1, 3, ROWS, 40):  # the last is more than a batch holds
                    message = module.InferInput("image", [rows, 1, 8, 8], "FP32").set_data_from_numpy(image[:rows])
                    result = client.infer("digits", [message]).as_numpy("probabilities")
                    np.testing.assert_allclose(result, right[:rows], atol=2e-3)
        text = server.text
    assert "without CUDA graphs" not in text
    assert "Traceback" not in text, text


@pytest.mark.skipif(bool(_no_server), reason=f"needs {', '.join(_no_server)}")
def test_a_broken_plan_does_not_take_the_server_down(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.plan").write_bytes(plan.read_bytes()[:5000])
    onnx.save(convolutions(), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text("backend: tensorrt\nmax_batch_size: 8\n")
    with serving(tmp_path / "repository", tmp_path) as server:
        status, _, body = server.request("POST", "/v2/repository/index", b"{}")
        assert status == 200
        assert b"UNAVAILABLE" in body
        assert b"headrace build" in body
