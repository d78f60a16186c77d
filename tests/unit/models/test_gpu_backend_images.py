"""Pictures and classes of a plan: prepared and ranked by the GPU within the flight, or by the CPU where no compiler is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.errors import Unsupported
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.inference.pipelines import image
from headrace.inference.pipelines.execution import Ranking, softmax
from headrace.inference.pipelines.image import PixelSteps
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.models.control_policy import ControlPolicy
from headrace.runtimes.cuda.kernels import launching, loading
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from onnx import TensorProto, helper, numpy_helper

from tests.support.control_thread import running
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels

pytestmark = pytest.mark.slow

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox")
CONFIG = """
backend: tensorrt
max_batch_size: {rows}
dynamic_batching: {{}}
input: [{{name: x, data_type: fp32, dims: {dims}}}]
output: [{{name: other, data_type: fp32, dims: {other}}}, {{name: y, data_type: fp32, dims: {scores}{label}{reshape}}}]
preprocess: {{by: server, source: [12, 9], resize_short_side: 7, crop: [6, 5], mean: 100.0, std: 50.0}}
postprocess: {{output: y, top_k: {top_k}, softmax: true}}
"""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda, tmp_path: Path) -> None:
    install_host_kernels(monkeypatch, cuda)
    monkeypatch.setattr(launching, "THREADS", 32)  # a warp; each is a thread of the host's


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cuda(*_: object) -> bytes:
        raise Unsupported("NVRTC is not there: install the CUDA toolkit")

    monkeypatch.setattr(loading, "compile_cuda", compile_cuda)


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU's own steps fail."""

    def forbidden(*_: object) -> Any:
        raise AssertionError("the CPU was to have nothing to do with it")

    monkeypatch.setattr(image, "PixelSteps", forbidden)
    monkeypatch.setattr(Ranking, "_rank", forbidden)


RECIPE = ImageRecipe(by="server", source=(12, 9), resize_short_side=7, crop=(6, 5), mean=(100.0,), std=(50.0,))
WEIGHTS = np.random.default_rng(3).standard_normal((3, 6)).astype(np.float32)


def network(rows: int, tail: tuple[int, ...]) -> onnx.ModelProto:
    """other = the mean of each channel; y = other @ WEIGHTS, of the shape (n, *tail); n is 1 where `rows` is 0."""
    n: Any = "n" if rows else 1
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["other"], name="flatten"),
        helper.make_node("MatMul", ["other", "W"], ["flat"], name="classify"),
        helper.make_node("Reshape", ["flat", "tail"], ["y"], name="shape"),
    ]
    float_of = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    graph = helper.make_graph(
        nodes,
        "pictures",
        [float_of("x", [n, 3, 6, 5])],
        [float_of("other", [n, 3]), float_of("y", [n, *tail])],
        [numpy_helper.from_array(WEIGHTS, "W"), numpy_helper.from_array(np.array([-1, *tail], np.int64), "tail")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def put(folder: Path, rows: int = 6, top_k: int = 2, labels: bool = True, tail: tuple[int, ...] = (6,)) -> Path:
    """A repository with the network as a plan."""
    model = folder / "repository" / "m"
    (model / "1").mkdir(parents=True)
    lead = [] if rows else [1]
    model.joinpath("config.yaml").write_text(
        CONFIG.format(
            rows=rows,
            dims=[*lead, 3, 6, 5],
            other=[*lead, 3],
            scores=[*lead, 6],
            label=", label_filename: labels.txt" if labels else "",
            reshape=f", reshape: {{shape: {list(tail)}}}" if len(tail) > 1 else "",
            top_k=top_k,
        )
    )
    model.joinpath("labels.txt").write_text("\n".join(NAMES))
    profiles = (ShapeRange({"x": ((1, 3, 6, 5), (rows, 3, 6, 5), (rows, 3, 6, 5))}),) if rows else ()
    TensorRtTarget().build(network(rows, tail), TargetSpec("fp32", profiles), model / "1" / "model.plan", silent)
    return folder / "repository"


async def answers(repository: Path, sent: np.ndarray) -> dict[str, Array]:
    """Return the response of the model to one request."""
    async with running(repository, ControlPolicy("none")) as (_, registry):
        states = {(str(r["name"]), str(r["state"]), str(r["reason"])) for r in registry.index()}
        assert states == {("m", "READY", "")}
        handle = registry.lease("m", "")
        try:
            request = InferRequest(inputs={"x": sent}, rows=len(sent), shape_key=sent.shape[1:], received_ns=0)
            return (await handle.infer(request)).outputs
        finally:
            handle.release()


def check(result: dict[str, Array], sent: np.ndarray, names: list[str]) -> None:
    """Hold the answers against NumPy's."""
    other = PixelSteps(RECIPE).apply(sent).mean(axis=(2, 3))
    scores = softmax(other @ WEIGHTS)
    assert list(result) == names
    np.testing.assert_allclose(result["other"], other, rtol=1e-4, atol=1e-6)
    if "y" in names:
        np.testing.assert_allclose(result["y"], scores, rtol=1e-4)
        return
    best = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    assert result["classes"].dtype == np.int32
    np.testing.assert_array_equal(result["classes"], best)
    np.testing.assert_allclose(result["scores"], np.take_along_axis(scores, best, axis=1), rtol=1e-4)
    if "labels" in names:
        assert result["labels"].tolist() == [[NAMES[number].encode() for number in row] for row in best]


def pictures(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, 12, 9, 3), dtype=np.uint8)


@pytest.mark.usefixtures("trt", "kernels", "no_cpu")
async def test_the_gpu_prepares_and_ranks(tmp_path: Path, cuda: LateCuda, caplog: pytest.LogCaptureFixture) -> None:
    sent = pictures(5)
    with caplog.at_level(logging.WARNING, "headrace"):
        result = await answers(put(tmp_path), sent)
    check(result, sent, ["other", "scores", "classes", "labels"])
    assert not caplog.records


@pytest.mark.usefixtures("trt", "kernels", "no_cpu")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"labels": False}, ["other", "scores", "classes"]),
        ({"top_k": 0}, ["other", "y"]),
        ({"tail": (6, 1, 1)}, ["other", "scores", "classes", "labels"]),
        ({"tail": (6, 1, 1), "top_k": 0, "labels": False}, ["other", "y"]),
    ],
)
async def test_every_kind_of_class_ranking(tmp_path: Path, arguments: dict[str, Any], names: list[str]) -> None:
    sent = pictures(3)
    check(await answers(put(tmp_path, **arguments), sent), sent, names)


@pytest.mark.usefixtures("trt", "kernels", "no_cpu")
async def test_a_model_without_a_batch_dimension(tmp_path: Path) -> None:
    sent = pictures(1)
    check(await answers(put(tmp_path, rows=0), sent), sent, ["other", "scores", "classes", "labels"])


@pytest.mark.usefixtures("trt", "no_compiler")
async def test_without_a_compiler_the_cpu_is_used_and_logged_once(
    tmp_path: Path, cuda: LateCuda, caplog: pytest.LogCaptureFixture
) -> None:
    sent = pictures(5)
    with caplog.at_level(logging.WARNING, "headrace"):
        result = await answers(put(tmp_path), sent)
    check(result, sent, ["other", "scores", "classes", "labels"])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "model m: the CPU prepares its pictures and ranks its classes: NVRTC is not there" in line
