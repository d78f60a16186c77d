"""Plans built, run, timed and looked into with TensorRT on a real GPU; ONNX Runtime has the right answers.

Also a script, for a GPU machine without pytest: `python tests/gpu/test_tensorrt_engines.py` from the repository's root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

if __name__ == "__main__":
    sys.path.insert(0, ".")

from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.targets.base import Engine, ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget, available

from tests.support.tensorrt_networks import (
    BOOL,
    FLOAT,
    HALF,
    INT64,
    Sketch,
    answers,
    convolutions,
    cosine,
    pictures,
    scales_of,
    transformer,
)

# Level 1 builds in a second or two what level 3 builds in ten; kernels' speed is not what is tested.
TARGET = TensorRtTarget(optimization_level=1)


def rows(minimum: int, optimum: int, maximum: int) -> ShapeRange:
    return ShapeRange({"x": tuple((n, 3, 16, 16) for n in (minimum, optimum, maximum))})  # type: ignore[arg-type]


ORDER = TargetSpec("fp32", (rows(1, 8, 16),))


@contextlib.contextmanager
def built(
    folder: Path,
    model: onnx.ModelProto,
    order: TargetSpec = ORDER,
    target: TensorRtTarget = TARGET,
    report: Any = silent,
) -> Iterator[Engine]:
    path = folder / "model.plan"
    target.build(model, order, path, report)
    engine = target.open(path, model)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    try:
        yield
    except BuildError as error:
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {words}")


def test_the_machine_is_described() -> None:
    assert available() == ""
    machine = TARGET.describe()
    assert machine.target == "tensorrt"
    assert machine.version.startswith(("10.", "11."))
    assert machine.device.startswith("NVIDIA")
    assert machine.driver > 100
    assert TARGET.refuses("fp16") == ""
    minimum = tuple(map(int, machine.capability.split(".")))
    assert bool(TARGET.refuses("fp8")) == (minimum < (8, 9))


def test_fp32_runs_every_batch_of_its_profile(tmp_path: Path) -> None:
    model = convolutions()
    shares_done: list[float] = []
    with built(tmp_path, model, report=lambda done, note: shares_done.append(done)) as engine:
        for n in (8, 1, 16, 3):
            inputs = {"x": pictures(n, seed=n)}
            result, right = engine.run(inputs), answers(model, inputs)
            assert result["logits"].shape == (n, 10)
            # TensorRT computes FP32 with TF32.
            assert cosine(result["logits"], right["logits"]) > 0.9999
            assert result["top"].dtype == np.int64
            assert result["positive"].dtype == np.bool_
            np.testing.assert_array_equal(result["top"], result["logits"].argmax(axis=1))
            np.testing.assert_array_equal(result["positive"], result["logits"] > 0)
        with refused("was not built for x [17, 3, 16, 16]"):
            engine.run({"x": pictures(17)})
        with refused("float64", "float32"):
            engine.run({"x": pictures(1).astype(np.float64)})
        assert engine.memory_bytes > 0
    assert shares_done == sorted(shares_done)
    assert shares_done[-1] == 1.0
    assert len(set(shares_done)) > 3


def test_fp16_computes_in_fp16(tmp_path: Path) -> None:
    inputs = {"x": pictures(8)}
    with built(tmp_path, convolutions(HALF), TargetSpec("fp16", ORDER.profiles)) as engine:
        assert cosine(engine.run(inputs)["logits"], answers(convolutions(), inputs)["logits"]) > 0.999
        kinds = {layer.precision for layer in engine.layers(inputs) if "conv2" in layer.nodes}
        assert kinds == {"fp16"}, kinds


def test_quantized_models_run_in_int8(tmp_path: Path) -> None:
    inputs = {"x": pictures(16)}
    model = convolutions(scales=scales_of(convolutions(), inputs))
    with built(tmp_path, model, TargetSpec("int8", ORDER.profiles)) as engine:
        result = engine.run(inputs)["logits"]
        assert cosine(result, answers(model, inputs)["logits"]) > 0.999
        assert cosine(result, answers(convolutions(), inputs)["logits"]) > 0.98
        kinds = {layer.precision for layer in engine.layers(inputs) if {"conv2", "conv3"} & set(layer.nodes)}
        assert kinds == {"int8"}, kinds


def test_fp8_is_computed_on_gpus_that_support_it(tmp_path: Path) -> None:
    if TARGET.refuses("fp8"):
        return
    net = Sketch()
    weights = net.random(64, 64)

    def quantized(tensor: str, scale: float) -> str:
        name = net.constant(f"{tensor}_scale", np.float32(scale))
        zero = onnx.helper.make_tensor(f"{tensor}_zero", onnx.TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True)
        net.constants.append(zero)
        net.node("QuantizeLinear", [tensor, name, zero.name], f"{tensor}_q")
        return net.node("DequantizeLinear", [f"{tensor}_q", name, zero.name], f"{tensor}_dq")

    net.constant("w", weights)
    net.node("MatMul", [quantized("x", 4 / 448), quantized("w", float(np.abs(weights).max()) / 448)], "y")
    model = net.model([("x", FLOAT, ["n", 64])], [("y", FLOAT, ["n", 64])])
    x = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    profile = ShapeRange({"x": ((32, 64), (32, 64), (64, 64))})
    with built(tmp_path, model, TargetSpec("fp8", (profile,))) as engine:
        assert cosine(engine.run({"x": x})["y"], x @ weights) > 0.995


def test_two_profiles(tmp_path: Path) -> None:
    model = convolutions()
    with built(tmp_path, model, TargetSpec("fp32", (rows(1, 1, 1), rows(8, 16, 32)))) as engine:
        for n in (1, 32, 8, 1):
            inputs = {"x": pictures(n)}
            assert cosine(engine.run(inputs)["logits"], answers(model, inputs)["logits"]) > 0.9999
            assert engine.time(inputs, 0.05).rows == n
        with refused("was not built for x [4, 3, 16, 16]", "or x [8, 3, 16, 16] to [32, 3, 16, 16]"):
            engine.run({"x": pictures(4)})


def test_times_and_layers(tmp_path: Path) -> None:
    model = convolutions()
    inputs = {"x": pictures(16)}
    with built(tmp_path, model) as engine:
        timing = engine.time(inputs, 0.5)
        assert timing.rows == 16
        assert 1 < timing.median_us <= timing.p99_us < 1e5
        assert 0.5 < timing.rows_per_s / (16e6 / timing.median_us) < 1.5
        layers = engine.layers(inputs)
        assert abs(sum(layer.share for layer in layers) - 1) < 1e-6
        total_us = sum(layer.time_us for layer in layers)
        # Layers run one by one under the profiler, replayed graphs do not.
        assert 0.3 < total_us / timing.median_us < 20, (total_us, timing.median_us)
        nodes = {node for layer in layers for node in layer.nodes}
        assert {"conv1", "conv2", "conv3", "gemm"} <= nodes <= {node.name for node in model.graph.node}
        assert all(layer.precision for layer in layers if "conv2" in layer.nodes)
        assert any(layer.tactic for layer in layers)
        # Timing and profiling leave the engine as it was.
        assert cosine(engine.run(inputs)["logits"], answers(model, inputs)["logits"]) > 0.9999


def test_a_transformer_with_two_free_dimensions(tmp_path: Path) -> None:
    model = transformer()
    profile = ShapeRange({"ids": ((1, 4), (4, 16), (8, 32))})
    with built(tmp_path, model, TargetSpec("fp32", (profile,))) as engine:
        for n, s in ((1, 4), (8, 32), (3, 7)):
            ids = np.random.default_rng(n).integers(0, 100, (n, s))
            result, right = engine.run({"ids": ids})["hidden"], answers(model, {"ids": ids})["hidden"]
            assert result.shape == (n, s, 32)
            assert cosine(result, right) > 0.999
        ids = np.zeros((8, 32), np.int64)
        assert engine.time({"ids": ids}, 0.05).median_us > 1
        nodes = {node for layer in engine.layers({"ids": ids}) for node in layer.nodes}
        assert {"query_mm", "scores", "shares"} <= nodes, nodes


def test_inputs_of_other_types(tmp_path: Path) -> None:
    net = Sketch()
    bf16 = net.node("Cast", ["b"], "b32", to=FLOAT)
    half = net.node("Cast", ["h"], "h32", to=FLOAT)
    chosen = net.node("Where", ["mask", bf16, half], "chosen")
    net.node("Cast", [chosen], "y", to=HALF)
    types = [("b", onnx.TensorProto.BFLOAT16), ("h", HALF), ("mask", BOOL)]
    model = net.model([(name, kind, ["n", 4]) for name, kind in types], [("y", HALF, ["n", 4])])
    profile = ShapeRange({name: ((1, 4), (2, 4), (8, 4)) for name, _ in types})
    with built(tmp_path, model, TargetSpec("fp16", (profile,))) as engine:
        b = (np.array([[1, 2, 3, 4]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
        h = np.array([[5, 6, 7, 8]], np.float16)
        mask = np.array([[True, False, True, False]])
        y = engine.run({"b": b, "h": h, "mask": mask})["y"]
        assert y.dtype == np.float16
        assert y.tolist() == [[1, 6, 3, 8]]


def test_an_output_with_a_data_dependent_shape(tmp_path: Path) -> None:
    net = Sketch()
    net.node("NonZero", [net.node("Greater", ["x", net.constant("nought", np.float32(0))], "above")], "where")
    model = net.model([("x", FLOAT, [4, 8])], [("where", INT64, [2, "k"])])
    with built(tmp_path, model, TargetSpec("fp32")) as engine:
        for seed in (0, 1):
            x = np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)
            np.testing.assert_array_equal(engine.run({"x": x})["where"], np.nonzero(x > 0))
        assert engine.run({"x": -np.ones((4, 8), np.float32)})["where"].shape == (2, 0)
        assert engine.time({"x": x}, 0.05).median_us > 1


def test_a_second_build_is_faster_by_the_timing_cache(tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    order = TargetSpec("fp32", ORDER.profiles, timing_cache=cache)
    target = TensorRtTarget()
    seconds = []
    for _ in range(2):
        start_s = time.monotonic()
        with built(tmp_path, convolutions(), order, target):
            seconds.append(time.monotonic() - start_s)
    assert cache.stat().st_size > 100
    assert seconds[1] < seconds[0], seconds
    cache.write_bytes(b"rubbish")
    with built(tmp_path, convolutions(), order):
        assert cache.stat().st_size > 100


def test_unsupported_operators_are_named(tmp_path: Path) -> None:
    net = Sketch()
    net.node("Det", ["x"], "determinant")
    net.node("Bernoulli", [net.node("Sigmoid", ["x"], "sigmoid")], "coin")
    model = net.model([("x", FLOAT, [4, 4])], [("determinant", FLOAT, []), ("coin", FLOAT, [4, 4])])
    with refused("not supported by TensorRT", "node determinant (Det)", "node coin (Bernoulli)"):
        TARGET.build(model, TargetSpec("fp32"), tmp_path / "model.plan", silent)
    assert list(tmp_path.iterdir()) == []


def test_profiles_that_do_not_fit(tmp_path: Path) -> None:
    for order, words in (
        (TargetSpec("fp32"), "write optimization.profiles"),
        (TargetSpec("fp32", (rows(4, 2, 8),)), "do not ascend"),
        (TargetSpec("fp32", (rows(1, 1, 1 << 30),)), "too large"),
    ):
        with refused(words):
            TARGET.build(convolutions(), order, tmp_path / "model.plan", silent)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_stops_a_build(tmp_path: Path) -> None:
    def report(done: float, note: str) -> None:
        if done > 0.1:
            raise KeyboardInterrupt

    try:
        TensorRtTarget().build(convolutions(), ORDER, tmp_path / "model.plan", report)
    except KeyboardInterrupt:
        assert list(tmp_path.iterdir()) == []
    else:
        raise AssertionError("not stopped")


def test_plans_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    TARGET.build(convolutions(), ORDER, path, silent)
    whole = path.read_bytes()
    for content in (b"", b"rubbish", whole[:100], whole[: len(whole) // 2], whole[: len(whole) * 9 // 10]):
        path.write_bytes(content)
        with refused("build it again"):
            TARGET.open(path)
    with refused("cannot be read"):
        TARGET.open(tmp_path / "none.plan")


if importlib.util.find_spec("pytest") is not None:
    import pytest

    _missing = [name for name in ("pycuda", "tensorrt") if importlib.util.find_spec(name) is None]
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(300),
        pytest.mark.skipif(bool(_missing), reason="needs an NVIDIA GPU, PyCUDA and TensorRT"),
    ]

if __name__ == "__main__":
    failed = 0
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            start_s = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    test(Path(folder)) if inspect.signature(test).parameters else test()
                except Exception as error:
                    failed += 1
                    print(f"{name} FAILED: {type(error).__name__}: {error}")
                else:
                    print(f"{name} passed in {time.monotonic() - start_s:.1f} s")
    sys.exit(1 if failed else 0)
