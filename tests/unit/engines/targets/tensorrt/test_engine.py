"""Runs, timings and layers of plans, on a fake TensorRT of versions 10 and 11."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.runtimes.cuda.driver import current
from headrace_engines.errors import BuildError
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.engine import TensorRtEngine, pointer_of
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt import affine
from tests.support.tensorrt_case import ORDER, X, Y, batches, build


def test_a_plan_runs_any_batch_of_its_profile(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path), affine())
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    many = np.tile(X, (4, 1))
    first = engine.run({"x": many})["y"]
    kept = len(cuda.live)
    second = engine.run({"x": np.asfortranarray(many[:5])})["y"]
    assert len(cuda.live) == kept
    np.testing.assert_array_equal(first, np.tile(Y, (4, 1)))
    np.testing.assert_array_equal(second, np.tile(Y, (4, 1))[:5])
    assert engine.memory_bytes > 4096
    engine.close()
    engine.close()
    with pytest.raises(BuildError, match="is closed"):
        engine.run({"x": X})


def test_wrong_inputs_are_refused(trt: Any, tmp_path: Path) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    for inputs, words in (
        ({}, "lacks x"),
        ({"x": X, "z": X}, "takes no z: its inputs are x"),
        ({"x": X.astype(np.float64)}, "input x is float64: the engine takes float32"),
        ({"x": np.zeros((9, 3), np.float32)}, r"was not built for x \[9, 3\], it takes x \[1, 3\] to \[8, 3\]"),
        ({"x": np.zeros((1, 4), np.float32)}, r"was not built for x \[1, 4\]"),
    ):
        with pytest.raises(BuildError, match=words):
            engine.run(inputs)
    engine.close()


def test_the_best_matching_profile_is_selected(trt: Any, tmp_path: Path) -> None:
    order = TargetSpec("fp32", (batches(1, 1, 8), batches(1, 8, 8), batches(16, 16, 32)))
    engine = TensorRtTarget().open(build(tmp_path, order=order))
    for rows, profile in ((1, 0), (8, 1), (20, 2), (3, 0)):
        values = np.resize(X, (rows, 3))
        np.testing.assert_array_equal(engine.run({"x": values})["y"], np.resize(Y, (rows, 2)))
        assert engine._context.active_optimization_profile == profile
    with pytest.raises(BuildError, match=r"x \[12, 3\], it takes x .* or x \[16, 3\] to \[32, 3\]"):
        engine.run({"x": np.zeros((12, 3), np.float32)})
    engine.close()


def test_plans_of_others_are_refused(trt: Any, tmp_path: Path) -> None:
    target = TensorRtTarget()
    with pytest.raises(BuildError, match=r"cannot be read \(No such file or directory\): build the engine"):
        target.open(tmp_path / "none.plan")
    rubbish = tmp_path / "rubbish.plan"
    rubbish.write_bytes(b"rubbish")
    with pytest.raises(BuildError, match=r"is no plan that TensorRT .* can load: build it again"):
        target.open(rubbish)
    path = build(tmp_path)
    path.write_bytes(path.read_bytes().replace(trt.__version__.encode(), b"10.0.1"))
    with pytest.raises(BuildError, match=r"was not built by TensorRT .* on Fake H1: build it again on this machine"):
        target.open(path)


def test_times_are_measured_by_the_gpu_clock(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    timing = engine.time({"x": X}, 0.05)
    assert timing.rows == 2
    assert timing.median_us == pytest.approx(cuda.work_us)
    assert timing.p99_us == pytest.approx(cuda.work_us)
    assert timing.rows_per_s == pytest.approx(2 / (cuda.work_us / 1e6))
    engine.close()


def test_engines_without_graph_capture_are_timed_too(
    trt: Any, tmp_path: Path, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    cuda.refuse_capture = True
    assert engine.time({"x": X}, 0.02).median_us == pytest.approx(cuda.work_us)
    assert "timed without a CUDA graph" in caplog.text
    engine.close()


def test_layers_name_onnx_nodes_and_their_times(trt: Any, tmp_path: Path) -> None:
    engine = TensorRtTarget().open(build(tmp_path), affine())
    layers = engine.layers({"x": X})
    assert [layer.nodes for layer in layers] == [("matmul",), ("add",), ("relu",)]
    assert [layer.kind for layer in layers] == ["MatMul", "Add", "Relu"]
    assert [layer.time_us for layer in layers] == pytest.approx([10, 20, 30])
    assert sum(layer.share for layer in layers) == pytest.approx(1)
    assert {layer.precision for layer in layers} == {"fp32"}
    assert layers[0].tactic == "fake_matmul"
    # The context that is profiled is not the one that runs.
    assert trt.state.contexts == 2
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    engine.close()


def test_outputs_with_data_dependent_shapes(trt: Any, tmp_path: Path) -> None:
    trt.state.late_shapes = True
    engine = TensorRtTarget().open(build(tmp_path))
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    np.testing.assert_array_equal(engine.run({"x": np.tile(X, (3, 1))})["y"], np.tile(Y, (3, 1)))
    engine.close()


def test_an_output_without_memory_is_reported_and_does_not_affect_the_next_run(
    trt: Any, tmp_path: Path, cuda: FakeCuda
) -> None:
    trt.state.late_shapes = True
    engine = TensorRtTarget().open(build(tmp_path))
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    many = np.tile(X, (4, 1))
    # Room for the input, which is larger, but not for both.
    with current():
        engine._inputs[0].stage(many)
    cuda.room_bytes = 8
    with pytest.raises(BuildError, match=r"running model.plan: allocating 64 bytes of GPU memory failed"):
        engine.run({"x": many})
    cuda.room_bytes = 1000
    np.testing.assert_array_equal(engine.run({"x": many})["y"], np.tile(Y, (4, 1)))
    engine.close()


def test_a_failed_execution_leaves_no_pending_work(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    trt.state.broken = True
    for call in (engine.run, engine.layers, lambda inputs: engine.time(inputs, 0.01)):
        with pytest.raises(BuildError, match="failed on the GPU: TensorRT gives no reason"):
            call({"x": X})
        assert not cuda.busy
        assert cuda.depth == 0
    trt.state.broken = False
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    engine.close()


def test_closing_waits_for_pending_work(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    cuda.busy = True
    engine.close()
    assert not cuda.busy


def test_a_full_gpu_is_reported_at_run_time(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path))
    cuda.room_bytes = 8
    with pytest.raises(BuildError, match=r"running model.plan: allocating 24 bytes of GPU memory failed"):
        engine.run({"x": X})
    cuda.room_bytes = 1000
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    engine.close()


def test_scratch_memory_is_shared_and_freed_with_contexts_in_use(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    engine = TensorRtTarget().open(build(tmp_path), affine())
    engine.run({"x": X})
    before = len(cuda.live)
    engine.layers({"x": X})
    assert len(trt.state.made) == 2
    assert len(cuda.live) == before
    engine.close()
    assert not cuda.live


def test_missing_scratch_memory_is_reported(trt: Any, tmp_path: Path, cuda: FakeCuda) -> None:
    path = build(tmp_path)
    cuda.room_bytes = 4095
    with pytest.raises(BuildError, match=r"needs 0 MiB of scratch memory on the GPU .*optimization.profiles"):
        TensorRtTarget().open(path)
    assert not cuda.live


def test_an_engine_that_cannot_be_opened_leaks_no_memory(
    trt: Any, tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path)

    def refuse(engine: TensorRtEngine) -> None:
        raise BuildError("a tensor of a type that is not NumPy's")

    monkeypatch.setattr(TensorRtEngine, "_read_tensors", refuse)
    with pytest.raises(BuildError, match="not NumPy's"):
        TensorRtTarget().open(path)
    assert not cuda.live


def test_version_compatible_plans_need_leave_to_run_their_code(trt: Any, tmp_path: Path) -> None:
    path = build(tmp_path, order=replace(ORDER, version_compatible=True))
    assert "VERSION_COMPATIBLE" in trt.state.config.flags
    with pytest.raises(BuildError, match="host code is not allowed"):
        TensorRtTarget().open(path)
    engine = TensorRtTarget().open(path, host_code=True)
    np.testing.assert_array_equal(engine.run({"x": X})["y"], Y)
    engine.close()


def test_other_plans_are_built_without_the_flag(trt: Any, tmp_path: Path) -> None:
    build(tmp_path)
    assert trt.state.config.flags == []


def test_addresses_are_read_from_numbers_and_capsules() -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"address"
    assert pointer_of(4096) == 4096
    assert pointer_of(new(4096, None, None)) == 4096
    assert pointer_of(new(4096, name, None)) == 4096
