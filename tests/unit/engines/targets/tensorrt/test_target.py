"""Builds of plans, on a fake TensorRT of versions 10 and 11."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.machine import Machine
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.api import load
from headrace_engines.targets.tensorrt.target import TensorRtTarget, available

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt import affine, fake_tensorrt
from tests.support.tensorrt_case import ORDER, X, Y, batches, build

ten = pytest.mark.parametrize("trt_version", ["10.6.0"])


def test_a_missing_gpu_or_tensorrt_is_reported(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "TensorRT cannot be imported" in available()
    assert TensorRtTarget().refuses("fp16") == available()
    for call in (lambda: TensorRtTarget().describe(), lambda: build(tmp_path)):
        with pytest.raises(BuildError, match="install it by NVIDIA's instructions"):
            call()
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt(cuda, "8.6.1"))
    assert "TensorRT 8.6.1 is too old" in available()
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt(cuda))
    assert available() == ""
    cuda.devices = 0
    assert "no NVIDIA GPU" in available()


def test_the_machine_is_described(trt: Any) -> None:
    version = "10.6.0" if trt.__version__ == "10.6.0" else "11.4.0"
    assert TensorRtTarget().describe() == Machine("tensorrt", version, "Fake H1", "9.0", 580)


def test_precisions_unsupported_by_the_gpu_are_refused(trt: Any, cuda: FakeCuda) -> None:
    target = TensorRtTarget()
    assert [target.refuses(p) for p in ("fp32", "fp16", "bf16", "int8", "fp8")] == [""] * 5
    cuda.capability = (8, 0)
    assert target.refuses("bf16") == ""
    assert target.refuses("fp8") == "fp8 needs compute capability 8.9, the Fake H1 has 8.0: take fp16"
    cuda.capability = (7, 0)
    assert "needs compute capability 7.5" in target.refuses("int8")
    assert "no precision 'best'" in target.refuses("best")


@pytest.mark.parametrize(
    ("version", "has"), [("10.1.0", False), ("10.2.0.19", True), ("10.13.2.6", True), ("11.0.0", True)]
)
def test_convolutions_are_fp8_from_10_2_on(
    version: str, has: bool, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt(cuda, version))
    reason = "" if has else "FP8 convolutions need TensorRT 10.2 or newer, this is 10.1.0"
    assert TensorRtTarget().refuses_fp8_convolutions() == reason


def test_version_compatible_plans_need_the_lean_runtime(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_engines.targets.tensorrt import target as module

    loaded: list[str] = []
    monkeypatch.setattr(module, "load_lean_library", lambda name: not loaded.append(name))
    assert TensorRtTarget().refuses("fp16", version_compatible=True) == ""
    library = f"libnvinfer_lean.so.{trt.__version__.partition('.')[0]}"
    assert loaded == [library]
    monkeypatch.setattr(module, "load_lean_library", lambda name: False)
    reason = TensorRtTarget().refuses("fp16", version_compatible=True)
    version = load().version
    assert reason.startswith(f"--version-compatible needs {library} of TensorRT {version}: install it (")
    assert f"tensorrt-lean=={version}.*" in reason
    assert TensorRtTarget().refuses("fp16") == ""


def test_the_lean_runtime_is_searched_beside_tensorrt_and_in_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_engines.targets.tensorrt import api

    searched: list[str] = []

    def missing(path: str, mode: int) -> None:
        searched.append(path)
        raise OSError

    (tmp_path / "wheel" / "tensorrt_lean_libs").mkdir(parents=True)
    (tmp_path / "wheel" / "tensorrt_lean_libs" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "wheel")
    monkeypatch.setattr(api, "_mapped_files", lambda prefix: [Path("/opt/trt/libnvinfer.so.10")])
    monkeypatch.setattr(api.ctypes, "CDLL", missing)
    assert not api.load_lean_library("lean.so")
    beside = str(tmp_path / "wheel" / "tensorrt_lean_libs" / "lean.so")
    assert searched == ["lean.so", "/opt/trt/lean.so", beside]
    monkeypatch.setattr(api.ctypes, "CDLL", lambda path, mode: searched.append(path))
    assert api.load_lean_library("lean.so")


def test_libraries_of_this_process_are_listed() -> None:
    from headrace_engines.targets.tensorrt import api

    assert [path.name.startswith("libc.so") for path in api._mapped_files("libc.so")] == [True]


def test_networks_are_strongly_typed_without_a_flag_in_11(trt: Any, tmp_path: Path) -> None:
    build(tmp_path)
    strongly = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert trt.state.network_flags == [strongly if trt.__version__.startswith("10.") else 0]
    assert trt.state.config.flags == []
    assert trt.state.config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert trt.state.config.pools == {}
    assert [p.name for p in tmp_path.iterdir()] == ["model.plan"]


def test_workspace_and_level_are_handed_on(trt: Any, tmp_path: Path) -> None:
    order = TargetSpec("fp16", ORDER.profiles, workspace_bytes=64 << 20)
    TensorRtTarget(optimization_level=1).build(affine(), order, tmp_path / "model.plan", silent)
    assert trt.state.config.pools == {"WORKSPACE": 64 << 20}
    assert trt.state.config.builder_optimization_level == 1
    # The specification goes before the target.
    order = replace(order, optimization_level=0)
    TensorRtTarget(optimization_level=1).build(affine(), order, tmp_path / "model.plan", silent)
    assert trt.state.config.builder_optimization_level == 0


@ten
@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ((), "inputs x have free dimensions: write optimization.profiles"),
        ((ShapeRange({"z": ((1,), (1,), (1,))}),), "names z, the model's inputs are x"),
        ((ShapeRange({}),), "has no shapes for the inputs x"),
        ((batches(1, 9, 8),), r"input x: \[1, 3\], \[9, 3\], \[8, 3\] do not ascend"),
        ((ShapeRange({"x": ((1, 2), (1, 2), (1, 2))}),), r"do not fit the model's shape \[-1, 3\]"),
        ((ShapeRange({"x": ((1,), (1,), (1,))}),), "has 2 dimensions"),
        ((batches(1, 1, 8), batches(0, 1, 8)), "profile 2, input x: .* do not ascend"),
        ((batches(1, 1, 1 << 40),), r"too large: its largest inputs alone take 12288.0 GiB, the GPU has 1.0 GiB"),
    ],
)
def test_invalid_profiles_are_reported(trt: Any, tmp_path: Path, profiles: tuple[ShapeRange, ...], words: str) -> None:
    with pytest.raises(BuildError, match=words):
        build(tmp_path, order=TargetSpec("fp32", profiles))
    assert list(tmp_path.iterdir()) == []


def test_a_fixed_model_needs_no_profile(trt: Any, tmp_path: Path) -> None:
    engine = TensorRtTarget().open(build(tmp_path, affine(2), TargetSpec("fp32")))
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    with pytest.raises(BuildError, match="was not built for"):
        engine.run({"x": X[:1]})
    engine.close()


def test_values_that_decide_on_shapes_are_refused(trt: Any, tmp_path: Path) -> None:
    model = affine()
    model.graph.input.append(onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [2]))
    with pytest.raises(BuildError, match="values of the inputs shape decide on shapes"):
        build(tmp_path, model)


@pytest.mark.parametrize("one_error", [False, True])
def test_all_unsupported_operators_are_named(trt: Any, tmp_path: Path, one_error: bool) -> None:
    trt.state.unsupported = {"MatMul", "Relu"}
    trt.state.one_error = one_error
    with pytest.raises(BuildError) as raised:
        build(tmp_path)
    text = str(raised.value)
    assert text.startswith("2 nodes are not supported by TensorRT")
    assert "node matmul (MatMul)" in text
    assert "node relu (Relu)" in text
    assert "build for ONNX Runtime" in text
    assert list(tmp_path.iterdir()) == []


def test_a_broken_node_is_named(trt: Any, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot read the ONNX model: node relu \(Broken\): Assertion failed: check"):
        build(tmp_path, affine(operator="Broken"))


def test_errors_of_the_builder_are_reported(trt: Any, tmp_path: Path) -> None:
    model = affine()
    for failure, order, words in (
        (
            "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any implementation for node "
            "matmul + add + relu.)",
            ORDER,
            r"finds no kernel for matmul \+ add \+ relu \(ONNX nodes matmul, add, relu\) on Fake H1: take another precision",
        ),
        (
            "Error Code 10: Internal Error (Could not find any implementation for node matmul due to insufficient workspace. "
            "See verbose log for requested sizes.)",
            TargetSpec("fp32", ORDER.profiles, workspace_bytes=1 << 20),
            "within a workspace of 1 MiB: raise optimization.workspace_mb",
        ),
        (
            "Error Code 1: Cuda Runtime (out of memory)",
            TargetSpec("fp32", ORDER.profiles, workspace_bytes=1 << 20),
            "ran out of memory on Fake H1 with a workspace of 1 MiB: raise optimization.workspace_mb, lower the largest",
        ),
        (
            "Error Code 4: x: tensor volume exceeds 2147483647, dimensions are [9]",
            ORDER,
            "tensors this large .* lower the",
        ),
        ("Error Code 9: something new", ORDER, "cannot build the engine: Error Code 9: something new"),
    ):
        trt.state.failure = [failure]
        with pytest.raises(BuildError, match=words):
            build(tmp_path, model, order)
        assert list(tmp_path.iterdir()) == []


def test_a_kernel_skipped_for_memory_is_reported(trt: Any, tmp_path: Path) -> None:
    def short(model: onnx.ModelProto) -> str:
        logger.log(2, "Tactic Device request: 900MB Available: 800MB. Device memory is insufficient to use tactic.")
        return "Could not find any implementation for node matmul."

    trt.state.refuses = short
    logger = load().logger
    with pytest.raises(
        BuildError, match=r"for lack of memory: lower the largest shapes in optimization.profiles, or close"
    ):
        build(tmp_path)


def test_a_quantized_layer_without_a_kernel_is_excluded(trt: Any, tmp_path: Path) -> None:
    trt.state.failure = ["Could not find any implementation for node matmul + add.", "[e.cpp] Internal Error (build)"]
    model = affine()
    model.graph.node.append(onnx.helper.make_node("QuantizeLinear", ["y", "scale"], ["q"], name="quantize"))
    with pytest.raises(BuildError, match=r'optimization.calibration.keep: \["matmul"\]'):
        build(tmp_path, model)


def test_progress_grows_and_ends(trt: Any, tmp_path: Path) -> None:
    reports: list[tuple[float, str]] = []
    build(tmp_path, report=lambda done, note: reports.append((done, note)))
    shares = [done for done, _ in reports]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert "Timing" in {note for _, note in reports}
    assert len(set(shares)) > 5


def test_an_interrupt_stops_the_build(trt: Any, tmp_path: Path) -> None:
    def report(done: float, note: str) -> None:
        if note == "Timing" and done > 0.1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, report=report)
    assert trt.state.steps < 4
    assert list(tmp_path.iterdir()) == []


SIGNALS = pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "sigterm"]
)


@pytest.fixture
def handlers() -> Iterator[tuple[Any, Any]]:
    """Handlers of SIGINT and SIGTERM that raise, as those of the command line do; they must be in place again afterwards."""

    def terminate(_number: int, _frame: object) -> None:
        raise SystemExit(143)

    # A shell that starts something in the background has it ignore SIGINT.
    raising = signal.default_int_handler, terminate
    numbers = signal.SIGINT, signal.SIGTERM
    inherited = [signal.signal(number, handler) for number, handler in zip(numbers, raising, strict=True)]
    yield raising
    actual = tuple(signal.getsignal(number) for number in numbers)
    for number, handler in zip(numbers, inherited, strict=True):
        signal.signal(number, handler)
    assert actual == raising


@SIGNALS
@ten
@pytest.mark.parametrize("step", [0, 3])
def test_a_signal_stops_the_build(
    trt: Any, tmp_path: Path, handlers: Any, number: int, raised: type[BaseException], step: int
) -> None:
    # What a handler raises inside of TensorRT does not come out of it.
    trt.state.on_step = lambda: signal.raise_signal(number) if trt.state.steps == step else None
    with pytest.raises(raised):
        build(tmp_path, order=TargetSpec("fp32", ORDER.profiles))
    assert trt.state.steps == step + 1
    assert list(tmp_path.iterdir()) == []


@SIGNALS
@ten
@pytest.mark.parametrize("when", ["starting a builder", "parsing"])
def test_a_signal_before_the_build_stops_it(
    trt: Any, tmp_path: Path, handlers: Any, number: int, raised: type[BaseException], when: str
) -> None:
    trt.state.on_log = lambda text: signal.raise_signal(number) if text == when else None
    with pytest.raises(raised):
        build(tmp_path)
    assert trt.state.steps == 0
    assert list(tmp_path.iterdir()) == []


@SIGNALS
@ten
def test_a_signal_outweighs_an_error(
    trt: Any, tmp_path: Path, handlers: Any, number: int, raised: type[BaseException]
) -> None:
    trt.state.on_log = lambda text: signal.raise_signal(number) if text == "parsing" else None
    trt.state.unsupported = {"Relu"}
    with pytest.raises(raised):
        build(tmp_path)


@SIGNALS
@ten
def test_a_signal_while_a_plan_is_loaded_is_not_lost(
    trt: Any, tmp_path: Path, handlers: Any, number: int, raised: type[BaseException]
) -> None:
    path = build(tmp_path)
    trt.state.on_log = lambda text: signal.raise_signal(number) if text == "creating a context" else None
    with pytest.raises(raised):
        TensorRtTarget().open(path)


def test_a_build_outside_the_main_thread_installs_no_signal_handlers(trt: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(build, tmp_path).result().exists()


def test_the_timing_cache_is_saved_and_reused(trt: Any, tmp_path: Path) -> None:
    cache = tmp_path / "caches" / "timing.cache"
    order = TargetSpec("fp32", ORDER.profiles, timing_cache=cache)
    build(tmp_path, order=order)
    assert json.loads(cache.read_bytes())["kernels"] == ["Add", "MatMul", "Relu"]
    build(tmp_path, affine(operator="Sigmoid"), order)
    assert json.loads(cache.read_bytes())["kernels"] == ["Add", "MatMul", "Relu", "Sigmoid"]
    assert [path.name for path in cache.parent.iterdir()] == ["timing.cache"]


def test_entries_cached_concurrently_by_another_builder_are_merged(trt: Any, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    trt.state.on_step = lambda: cache.write_text(json.dumps({"gpu": "Fake H1", "kernels": ["Gelu"]}))
    build(tmp_path, order=TargetSpec("fp32", ORDER.profiles, timing_cache=cache))
    assert json.loads(cache.read_bytes())["kernels"] == ["Add", "Gelu", "MatMul", "Relu"]


@ten
@pytest.mark.parametrize("content", ["not a cache", '{"gpu": "another", "kernels": ["Gelu"]}', ""])
def test_a_foreign_timing_cache_is_replaced(trt: Any, tmp_path: Path, content: str) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_text(content)
    build(tmp_path, order=TargetSpec("fp32", ORDER.profiles, timing_cache=cache))
    actual = json.loads(cache.read_bytes())
    assert actual["gpu"] == "Fake H1"
    assert {"Add", "MatMul", "Relu"} <= set(actual["kernels"])


def test_a_timing_cache_that_cannot_be_written_costs_nothing(trt: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "timing.cache"
    assert build(tmp_path, order=TargetSpec("fp32", ORDER.profiles, timing_cache=cache)).exists()


def test_a_full_disk_is_reported(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BuildError, match=r"model.plan cannot be written \(No space left on device\): free some space"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []
