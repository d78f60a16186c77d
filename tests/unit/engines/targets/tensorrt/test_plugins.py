"""Convolutions on our kernels: found, replaced, built, run and chosen, on a fake TensorRT and kernels on the host."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.manifest import BatchTiming, MeasuredLayer
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import PLUGIN_PHASES, silent
from headrace_engines.targets.tensorrt import plugin_choice
from headrace_engines.targets.tensorrt.convolutions import find_convolutions, replace_convolutions
from headrace_engines.targets.tensorrt.plugin_choice import (
    EngineComparison,
    PluginChooser,
    compare_engines,
    layer_times,
)
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from headrace_lab.kernels import algorithms
from headrace_lab.kernels.direct import DirectAlgorithm
from onnx import TensorProto, helper, numpy_helper

from tests.support.fake_cuda import FakeCuda
from tests.support.kernels_on_host import install_host_kernels
from tests.support.plugin_case import ORDER, images, residual_block


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, tmp_path: Path) -> None:
    """Our kernels, compiled for the host; only the direct algorithm, since Tensor Cores are slow there."""
    monkeypatch.setattr(algorithms, "ALGORITHMS", (DirectAlgorithm(),))
    install_host_kernels(monkeypatch, cuda)


def test_residual_and_activation_belong_to_the_last_convolution() -> None:
    found = {one.name: one for one in find_convolutions(residual_block(), 4)}
    assert {name: one.nodes for name, one in found.items()} == {
        "conv1": ("conv1", "relu1"),
        "conv2": ("conv2",),
        "conv3": ("conv3", "add", "relu2"),
    }
    assert found["conv3"].inputs == ("x", "c2")
    assert found["conv3"].output == "y"


def test_an_engine_with_named_layers_gives_the_results_of_the_model(
    trt: Any, kernels: None, quick: None, tmp_path: Path
) -> None:
    target, model, path = TensorRtTarget(), residual_block(), tmp_path / "model.plan"
    target.build(model, ORDER, path, silent)
    x = images(3)
    chooser = PluginChooser(target, model, ORDER, path, 4, {"x": images(2)}, lambda engine: [], silent, budget_s=3600)
    choice = chooser.choose("conv1,conv3")
    assert list(choice.layers) == ["conv1", "conv3"]
    engine = target.open(path, choice.model)
    y = engine.run({"x": x})["y"]
    expected = OnnxRunner(residual_block()).run({"x": x})["y"]
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), atol=0.02)
    engine.close()


def chooser_of(tmp_path: Path, refusal: Any = lambda engine: []) -> PluginChooser:
    target, model, path = TensorRtTarget(), residual_block(), tmp_path / "model.plan"
    target.build(model, ORDER, path, silent)
    return PluginChooser(target, model, ORDER, path, 4, {"x": images(2)}, refusal, silent, budget_s=3600)


def phases_of(tmp_path: Path, budget_s: float) -> tuple[list[str], Any]:
    """Return the reported phases of the plug-ins, and the choice."""
    phases: list[str] = []
    target, model, path = TensorRtTarget(), residual_block(), tmp_path / "model.plan"
    target.build(model, ORDER, path, silent)

    def report(share: float, phase: str) -> None:
        assert 0 <= share <= 1
        if phase.startswith(PLUGIN_PHASES):
            phases.append(phase.removeprefix(PLUGIN_PHASES))

    batch = {"x": images(2)}
    chooser = PluginChooser(target, model, ORDER, path, 4, batch, lambda engine: [], report, budget_s=budget_s)
    return phases, chooser.choose("auto")


def test_each_measurement_is_reported_as_soon_as_it_is_known(
    trt: Any, kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_choice, "compare_engines", decided(1.2))
    first = {"conv1": 9e6, "conv2": 3e6, "conv3": 8e6}
    monkeypatch.setattr(plugin_choice, "layer_times", layers_of(first, dict.fromkeys(first, 10)))
    longest = {name: first[name] for name in ("conv1", "conv3", "conv2")}
    phases, choice = phases_of(tmp_path, 3600)
    patterns = [
        "timing TensorRT's layers",
        r"layer 1 of 3, conv1: TensorRT 9000000.0 us, ours [0-9.]+ us \(direct\), ratio [0-9.]+",
        r"layer 2 of 3, conv3: TensorRT 8000000.0 us, ours .*",
        r"layer 3 of 3, conv2: TensorRT 3000000.0 us, ours .*",
        r"building with 3 plug-in layers, [0-9]+ s so far",
        *(f"in the engine, {name}: TensorRT {time_us:.1f} us, plug-in 10.0 us" for name, time_us in longest.items()),
        r"whole engine: 100.0 us without plug-ins, 83.3 us with, speed-up 1.200 \+- 0.001",
    ]
    assert len(phases) == len(patterns)
    for phase, pattern in zip(phases, patterns, strict=True):
        assert re.fullmatch(pattern, phase), (phase, pattern)
    assert {row.layer: row.ratio for row in choice.report.table}["conv1"] == pytest.approx(9e5)


def test_layers_beyond_the_budget_are_not_measured(
    trt: Any, kernels: None, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_choice, "layer_times", layers_of({"conv1": 9, "conv2": 3, "conv3": 8}, {}))
    phases, choice = phases_of(tmp_path, 1e-6)
    reasons = {row.layer: row.reason for row in choice.report.table}
    assert reasons["conv2"] == reasons["conv3"] == "not measured: the budget of 0 s is spent"
    assert choice.report.table[0].kernel_us > 0
    assert "the budget is spent before 2 layers of 3" in phases
    assert not choice.layers


def test_no_engine_is_built_after_the_budget(
    trt: Any, kernels: None, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_choice, "_KERNELS_SHARE", 1e9)
    first = {"conv1": 9e6, "conv2": 3e6, "conv3": 8e6}
    monkeypatch.setattr(plugin_choice, "layer_times", layers_of(first, {"conv1": 10}))
    phases, choice = phases_of(tmp_path, 1e-6)
    assert sum(phase.startswith("building with") for phase in phases) == 1
    assert not choice.layers
    assert choice.report.verdict.endswith("nothing is replaced (the budget of 0 s is spent)")


def test_at_most_three_engines_are_built(
    trt: Any, kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def times(layers: object, convolutions: object) -> dict[str, float]:
        # One layer fewer is faster in each engine.
        calls.append(1)
        names = ["conv1", "conv2", "conv3"]
        return dict.fromkeys(names, 9e6) | dict.fromkeys(names[: 4 - len(calls)], 10.0 if len(calls) > 1 else 9e6)

    monkeypatch.setattr(plugin_choice, "layer_times", times)
    phases, choice = phases_of(tmp_path, 3600)
    assert [phase.split(",")[0] for phase in phases if phase.startswith("building with")] == [
        "building with 3 plug-in layers",
        "building with 2 plug-in layers",
        "building with 1 plug-in layer",
    ]
    assert not choice.layers
    assert [path.name for path in tmp_path.glob("*.plan")] == ["model.plan"]


def decided(speedup: float, error: float = 0.001) -> Any:
    return lambda first, second, batch: EngineComparison(100.0, 100.0 / speedup, speedup, error)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of engines without waiting."""
    monkeypatch.setattr(plugin_choice, "_ROUNDS", 2)
    monkeypatch.setattr(plugin_choice, "_ROUND_S", 0.01)


def test_nothing_is_replaced_where_the_engine_is_not_faster(
    trt: Any, kernels: None, quick: None, tmp_path: Path
) -> None:
    chooser = chooser_of(tmp_path)
    before = (tmp_path / "model.plan").read_bytes()
    choice = chooser.choose("auto")
    assert not choice.layers
    assert choice.uses() == []
    assert choice.report.verdict.endswith("nothing is replaced")
    assert (tmp_path / "model.plan").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.plan")] == ["model.plan"]


def test_faster_layers_of_a_faster_engine_are_kept(
    trt: Any, kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_choice, "compare_engines", decided(1.2))
    monkeypatch.setattr(
        plugin_choice, "layer_times", layers_of({"conv1": 90, "conv2": 30, "conv3": 80}, {"conv1": 40, "conv3": 79})
    )
    choice = chooser_of(tmp_path).choose("auto")
    assert list(choice.layers) == ["conv1"]
    rows = {row.layer: (row.kept, row.reason) for row in choice.report.table}
    assert rows == {
        "conv1": (True, ""),
        "conv3": (False, "the plug-in is not 3 % faster in the engine"),
        "conv2": (False, "our kernel is not 3 % faster"),
    }
    assert choice.report.verdict == "1 layer of 3 replaced by our kernels"
    engine = TensorRtTarget().open(tmp_path / "model.plan", choice.model)
    x = images(4)
    expected = OnnxRunner(residual_block()).run({"x": x})["y"]
    np.testing.assert_allclose(engine.run({"x": x})["y"].astype(np.float32), expected.astype(np.float32), atol=0.02)
    engine.close()


def layers_of(first: dict[str, float], later: dict[str, float]) -> Any:
    """Times of the engine without plug-ins, then those of the engines with them."""
    calls: list[int] = []

    def times(layers: object, convolutions: object) -> dict[str, float]:
        calls.append(1)
        return first if len(calls) == 1 else {**first, **later}

    return times


@pytest.mark.parametrize(
    ("speedup", "error", "refusal", "reason"),
    [
        (0.999, 0.0001, [], "the whole engine is not faster"),
        (1.02, 0.02, [], "the whole engine is not faster"),
        (1.2, 0.001, ["its cosine is 0.5"], "accuracy: its cosine is 0.5"),
    ],
)
def test_an_engine_is_kept_only_if_it_is_faster_beyond_the_error_and_accurate(
    trt: Any,
    kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speedup: float,
    error: float,
    refusal: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(plugin_choice, "compare_engines", decided(speedup, error))
    first = {"conv1": 90, "conv2": 80, "conv3": 70}
    monkeypatch.setattr(plugin_choice, "layer_times", layers_of(first, dict.fromkeys(first, 10)))
    choice = chooser_of(tmp_path, lambda engine: refusal).choose("auto")
    assert not choice.layers
    assert {row.reason for row in choice.report.table} == {reason}
    assert choice.report.verdict == f"the engine with our kernels is not kept ({reason}): nothing is replaced"


def test_an_unknown_layer_is_named_with_the_known_ones(trt: Any, kernels: None, tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"--plugins names 'conv9', .* of the model: conv1, conv2, conv3: name some of them"
    ):
        chooser_of(tmp_path).choose("conv1,conv9")


def test_a_model_without_fp16_convolutions(trt: Any, kernels: None, tmp_path: Path) -> None:
    target, path = TensorRtTarget(), tmp_path / "model.plan"
    model = residual_block(element=onnx.TensorProto.FLOAT)
    target.build(model, ORDER, path, silent)
    x = {"x": images(2, np.float32)}
    choice = PluginChooser(target, model, ORDER, path, 4, x, lambda engine: [], silent, budget_s=3600).choose("auto")
    assert choice.report.verdict == "the engine has no FP16 convolution that the plug-in can run: nothing is replaced"


def test_a_batch_beyond_the_layer_fails_the_build(trt: Any, kernels: None, tmp_path: Path) -> None:
    model, layers = replace_convolutions(
        residual_block(), find_convolutions(residual_block(), 1)[:1], {"conv1": DirectAlgorithm()}
    )
    target = TensorRtTarget()
    target.build(model, replace(ORDER, plugin_layers=layers), tmp_path / "model.plan", silent)
    engine = target.open(tmp_path / "model.plan", model)
    with pytest.raises(BuildError, match="HeadraceConvolution runs at most 1 rows, the batch has 2"):
        engine.run({"x": images(2)})
    engine.close()


def test_layers_of_several_convolutions_have_no_time_of_their_own() -> None:
    found = {one.name: one for one in find_convolutions(residual_block(), 4)}

    def layer(time_us: float, *nodes: str) -> MeasuredLayer:
        return MeasuredLayer("+".join(nodes), "", nodes, "fp16", "", time_us, 0.1)

    layers = [layer(5, "conv1"), layer(2, "relu1"), layer(9, "conv2", "conv3"), layer(1, "add", "relu2")]
    assert layer_times(layers, found) == {"conv1": 7}


def test_engines_are_timed_in_turns() -> None:
    order: list[str] = []

    class Engine:
        def __init__(self, name: str, time_us: float) -> None:
            self.name, self.time_us = name, time_us

        def time(self, inputs: object, seconds: float) -> BatchTiming:
            order.append(self.name)
            # Every pair of measurements is slower than the one before.
            return BatchTiming(1, self.time_us * (1 + (len(order) - 1) // 2), 0, 0)

    first: Any = Engine("first", 110)
    second: Any = Engine("second", 100)
    result = compare_engines(first, second, {})
    assert result.speedup == pytest.approx(1.1)
    assert result.error == pytest.approx(0, abs=1e-9)
    assert result.is_faster
    assert order[:4] == ["second", "first", "first", "second"]


def convolution(**values: Any) -> onnx.ModelProto:
    """y = conv(x), 8 channels of 6x5, with other attributes or sizes."""
    channels, outputs = values.pop("channels", 8), values.pop("outputs", 8)
    groups, element = values.get("group", 1), values.pop("element", TensorProto.FLOAT16)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    weights = np.ones((outputs, channels // groups, 3, 3), dtype)
    attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], **values}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", **attributes),
            helper.make_node("Identity", ["c"], ["y"], name="end"),
        ],
        "g",
        [helper.make_tensor_value_info("x", element, ["n", channels, 6, 5])],
        [helper.make_tensor_value_info("y", element, ["n", outputs, "h", "w"])],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, True),
        ({"strides": [2, 2]}, True),
        ({"group": 8}, True),
        ({"strides": [1, 2]}, False),
        ({"pads": [0, 1, 0, 1]}, False),
        ({"pads": [1, 1, 0, 0]}, False),
        ({"dilations": [2, 2], "pads": [2, 2, 2, 2]}, False),
        ({"channels": 4}, False),
        ({"outputs": 12}, False),
        ({"element": TensorProto.FLOAT}, False),
        ({"auto_pad": "SAME_LOWER", "pads": [0, 0, 0, 0]}, False),
    ],
)
def test_convolutions_that_the_plugin_supports(values: dict[str, Any], found: bool) -> None:
    assert bool(find_convolutions(convolution(**values), 4)) == found


def test_a_sum_with_a_broadcast_tensor_is_no_residual() -> None:
    model = residual_block()
    model.graph.node[3].input[1] = "w4"  # conv3 has one output channel, which Add repeats
    model.graph.node[3].input[2] = "b4"
    weights = np.ones((1, 8, 1, 1), np.float16), np.ones(1, np.float16)
    model.graph.initializer.extend(
        numpy_helper.from_array(one, name) for one, name in zip(weights, ("w4", "b4"), strict=True)
    )
    found = {one.name: one.nodes for one in find_convolutions(model, 4)}
    assert found == {"conv1": ("conv1", "relu1"), "conv2": ("conv2",)}


def test_an_output_of_the_model_is_not_fused_away() -> None:
    model = residual_block()
    model.graph.output.append(helper.make_tensor_value_info("c1", TensorProto.FLOAT16, ["n", 8, 6, 5]))
    found = {one.name: one for one in find_convolutions(model, 4)}
    assert found["conv1"].nodes == ("conv1",)
    assert found["conv1"].output == "c1"
    assert not found["conv1"].epilogue.relu


def test_a_fixed_batch_is_the_largest() -> None:
    assert {one.shape.n for one in find_convolutions(residual_block(6), 1)} == {6}


def test_a_wrong_kernel_is_left_out(
    trt: Any, kernels: None, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    right = DirectAlgorithm.open

    def wrong(self: Any, device: int, shape: Any, dtype: Any, epilogue: Any, weights: Any, bias: Any = None) -> Any:
        return right(self, device, shape, dtype, epilogue, weights[..., ::-1], bias)

    monkeypatch.setattr(DirectAlgorithm, "open", wrong)
    choice = chooser_of(tmp_path).choose("auto")
    assert {row.reason for row in choice.report.table} == {"no kernel supports the shape"}
    assert "direct  is left out: its result for n 2 c 8 6x5 k 8 3x3 stride 1 pad 1 differs by" in caplog.text


def test_a_build_that_fails_with_plugins_replaces_nothing(
    trt: Any, kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"conv1": 90, "conv2": 80, "conv3": 70}
    monkeypatch.setattr(plugin_choice, "layer_times", layers_of(first, dict.fromkeys(first, 10)))
    chooser = chooser_of(tmp_path)
    trt.state.refuses = lambda model: "No kernel" if any("Headrace" in n.op_type for n in model.graph.node) else ""
    choice = chooser.choose("auto")
    assert not choice.layers
    assert choice.report.verdict.startswith("the engine with our kernels cannot be built: nothing is replaced (")
