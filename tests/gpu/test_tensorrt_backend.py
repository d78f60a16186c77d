"""The TensorRT backend on a real GPU: instances, flights, graphs, and a whole server; ONNX Runtime has the right answers.

`pytest -s tests/gpu/test_tensorrt_backend.py` prints throughput and latency against replayed graphs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.backends.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, ModelFailed
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.gpu_marks import gpu_marks
from tests.support.serving import ROOT, serving
from tests.support.tensorrt_networks import FLOAT, HALF, Sketch, answers, convolutions, cosine, pictures, transformer

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


@contextmanager
def opened(path: Path, rows: int = ROWS, instances: int = 1, **parameters: str) -> Iterator[Any]:
    """The executions of a plan; the only one itself if there is one."""
    message = {MAX_BATCH_SIZE: str(rows), **parameters}
    with closing(TensorRtBackend().load(path, instances, message)) as model:
        executions = []
        try:
            executions += [model.execution(index) for index in range(instances)]
            yield executions[0] if instances == 1 else executions
        finally:
            for execution in executions:
                execution.close()


def check(result: dict[str, Any], x: np.ndarray[Any, Any]) -> None:
    """Hold answers of `convolutions` against ONNX Runtime's."""
    right = answers(convolutions(), {"x": x})
    assert result["logits"].shape == (len(x), 10)
    assert cosine(result["logits"], right["logits"]) > 0.9999  # TensorRT computes FP32 with TF32
    assert (result["top"].dtype, result["positive"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(result["top"], result["logits"].argmax(axis=1))
    np.testing.assert_array_equal(result["positive"], result["logits"] > 0)


def fly(execution: Any, x: np.ndarray[Any, Any]) -> Any:
    """Begin, fill and launch."""
    batch = execution.begin({"x": x[:1]}, len(x))
    batch.inputs["x"][:] = x
    execution.launch(batch)
    return batch


@pytest.mark.parametrize("graphs", ["1", "0"])
def test_batches_of_every_size(plan: Path, graphs: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"), opened(plan, cuda_graphs=graphs) as execution:
        for count in (1, 2, 3, 5, 8, 13, 31, 32, 1):
            x = pictures(count, seed=count)
            check(execution.run({"x": x}), x)
        with pytest.raises(ModelFailed, match="not built for"):
            execution.run({"x": pictures(33)})
    assert not caplog.records, "graphs can be captured, and TensorRT complains of nothing"


def test_rows_of_any_length(tmp_path: Path) -> None:
    path, model = tmp_path / "model.plan", transformer()
    TARGET.build(model, TargetSpec("fp32", (ShapeRange({"ids": ((1, 4), (4, 16), (8, 32))}),)), path, silent)
    with opened(path, rows=8) as execution:
        # More shapes than get a graph, and one of them again.
        for count, length in [(1 + n % 8, n) for n in range(4, 33)] + [(3, 7), (3, 7)]:
            ids = np.random.default_rng(length).integers(0, 100, (count, length))
            result = execution.run({"ids": ids})["hidden"]
            assert result.shape == (count, length, 32)
            assert cosine(result, answers(model, {"ids": ids})["hidden"]) > 0.999


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


# Through the data plane


def spec(width: int) -> ModelSpec:
    """Of `convolutions` (16 pixels wide) or `tower` (64)."""
    fp32 = BY_NAME["FP32"]
    inputs = {"x": TensorSpec("x", fp32, (-1, 3, width, width))}
    kinds = {"y": ("FP32", (-1, 10))}
    if width == 16:
        kinds = {"logits": ("FP32", (-1, 10)), "top": ("INT64", (-1,)), "positive": ("BOOL", (-1, 10))}
    outputs = {name: TensorSpec(name, BY_NAME[datatype], shape) for name, (datatype, shape) in kinds.items()}
    return ModelSpec("m", "1", "tensorrt_plan", inputs, outputs, ROWS)


@contextmanager
def handled(path: Path, mailbox: Mailbox, width: int = 16, instances: int = 1) -> Iterator[ModelHandle]:
    """A plan behind a scheduler that merges."""
    model = TensorRtBackend().load(path, instances, {MAX_BATCH_SIZE: str(ROWS)})
    policy = HandlePolicy(BatchPolicy(ROWS), QueueLimits(max_count=1 << 16), instances)
    handle = ModelHandle(spec(width), policy, model, mailbox, Recorder())
    handle.start()
    try:
        yield handle
    finally:
        handle.close(10)


def request(x: np.ndarray[Any, Any]) -> InferRequest:
    return InferRequest(inputs={"x": x}, rows=len(x), shape_key=x.shape[1:], received_ns=time.monotonic_ns())


async def _answer(handle: ModelHandle, x: np.ndarray[Any, Any]) -> Any:
    return (await handle.infer(request(x))).outputs


def tower(width: int = 64) -> onnx.ModelProto:
    """A small residual network: x FP32[n, 3, 64, 64], computed in FP16, -> y FP32[n, 10]."""
    net = Sketch(HALF)
    last = net.node("Cast", ["x"], "half", to=HALF)
    channels = 3
    for number in range(8):
        weights = net.constant(f"w{number}", net.random(width, channels, 3, 3))
        created = net.node("Relu", [net.node("Conv", [last, weights], f"conv{number}", pads=[1] * 4)], f"relu{number}")
        last = net.node("Add", [created, last], f"add{number}") if channels == width else created
        channels = width
    flat = net.node("Flatten", [net.node("GlobalAveragePool", [last], "pool")], "flat")
    net.node(
        "Cast", [net.node("Gemm", [flat, net.constant("fc", net.random(10, width))], "fc_y", transB=1)], "y", to=FLOAT
    )
    return net.model([("x", FLOAT, ["n", 3, 64, 64])], [("y", FLOAT, ["n", 10])])


def test_throughput_and_latency(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    shapes = tuple((n, 3, 64, 64) for n in (1, ROWS, ROWS))
    TARGET.build(tower(), TargetSpec("fp16", (ShapeRange({"x": shapes}),)), path, silent)  # type: ignore[arg-type]
    with closing(TARGET.open(path)) as engine:
        raw = {n: engine.time({"x": np.zeros((n, 3, 64, 64), np.float32)}, 0.5) for n in (1, ROWS)}

    async def scenario(instances: int) -> tuple[float, float, list[float]]:
        x = np.zeros((8, 3, 64, 64), np.float32)
        with handled(path, Mailbox(asyncio.get_running_loop()), 64, instances) as handle:

            async def client(one: np.ndarray[Any, Any], until: float, done: list[int]) -> None:
                while time.monotonic() < until:
                    await handle.infer(request(one))
                    done[0] += len(one)

            rates = []
            for one, clients in ((x, 32), (x[:1], 256)):
                done, start_s = [0], time.monotonic()
                await asyncio.gather(*[client(one, start_s + 1, done) for _ in range(clients)])
                rates.append(done[0] / (time.monotonic() - start_s))
            singles = []
            for _ in range(500):
                start_s = time.perf_counter()
                await handle.infer(request(x[:1]))
                singles.append((time.perf_counter() - start_s) * 1e6)
            return rates[0], rates[1], singles

    print(f"\nraw graphs: {raw[ROWS].rows_per_s:,.0f} rows/s at {ROWS}, {raw[1].median_us:.0f} us at 1")
    for instances in (1, 2):
        by_eights, by_ones, singles = asyncio.run(asyncio.wait_for(scenario(instances), 60))
        p50, p99 = np.percentile(singles[100:], [50, 99])
        share = by_eights / raw[ROWS].rows_per_s
        print(
            f"{instances} instances: {by_eights:,.0f} rows/s by eights ({share:.2f} of raw), {by_ones:,.0f} by ones; "
            f"one client p50 {p50:.0f} us (raw + {p50 - raw[1].median_us:.0f}), p99 {p99:.0f} us"
        )
        assert by_eights > 0
        assert by_ones > 0


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
                    message = module.InferInput("image", [rows, 1, 8, 8], "FP32")
                    message.set_data_from_numpy(image[:rows])
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
