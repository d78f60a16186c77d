"""Lowering of an FP32 model: layers in floating point, invalid requests, accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.optimization_config import AccuracyBar, Calibration
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision import lowering
from headrace_engines.precision.lowering import LoweredModel, lower_model
from headrace_engines.progress import silent
from headrace_engines.project import BuildData, BuildSpec
from headrace_engines.quantization.qdq import FP8_OPSET, quantizable
from headrace_engines.simplify import simplify
from onnx import TensorProto

from tests.support import networks
from tests.support.networks import samples_of
from tests.support.onnx_blocks import Network


def lowered(
    model: onnx.ModelProto, folder: Path, target: str = "onnxruntime", precision: str = "int8", **settings: Any
) -> LoweredModel:
    calibration = Calibration(method=settings.pop("method", "minmax"), keep=settings.pop("keep", ()))
    refused = settings.pop("no_fp8_convolutions", "")
    spec = BuildSpec(precision, (), None, calibration, AccuracyBar(**settings))
    model = simplify(model)
    rows = samples_of(networks.inputs_of(model, 16))
    return lower_model(model, spec, target, BuildData(rows, rows), folder, silent, refused)


def quantized(model: onnx.ModelProto) -> set[str]:
    """Names of the nodes that read what a DequantizeLinear makes at both of their first inputs."""
    created = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return {node.name for node in model.graph.node if len(node.input) > 1 and created.issuperset(node.input[:2])}


def upsampler() -> onnx.ModelProto:
    """A transposed convolution, which ONNX Runtime has no integer kernel for."""
    return networks.network("y = ConvTranspose(x, w)", networks.weights(w=(4, 4, 2, 2)), ("N", 4, 8, 8))


def few_channels() -> onnx.ModelProto:
    """Two convolutions that are too small for FP8, and products."""
    net = Network(seed=2)
    x = net.input("x", ["N", 3, 8, 8])
    for number, channels in enumerate([(3, 8), (8, 8)]):
        x = net.node("Relu", net.conv(x, channels, f"conv{number}"))
    flat = net.node("Flatten", net.node("GlobalAveragePool", x))
    for number in range(2):
        flat = net.node("Gemm", flat, net.weight(8, 8), name=f"gemm{number}")
    return net.model(flat)


def test_a_model_with_nothing_to_quantise_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no convolution and no product.* onnxruntime runs in int8: use fp32"):
        lowered(upsampler(), tmp_path)
    assert quantized(lowered(upsampler(), tmp_path, "tensorrt").model) == {"node_y"}


def test_a_quantised_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="quantised already: use fp32"):
        lowered(lowered(networks.residual(), tmp_path).model, tmp_path)


def test_keeping_all_layers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"calibration\.keep leaves no node in int8"):
        lowered(networks.residual(), tmp_path, keep=("*",))


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    model = networks.residual()
    node = next(node for node in model.graph.node if node.name == "node_a1")
    node.name = "/block.[0]/conv"
    kept = lowered(model, tmp_path, keep=("/block.[0]/conv",)).float_nodes
    assert kept == ("/block.[0]/conv",)


def test_names_quantised_only_by_the_other_target_may_be_excluded(tmp_path: Path) -> None:
    net = Network()
    x = net.conv(net.input("x", ["N", 4, 8, 8]), (4, 4), "conv")
    model = net.model(net.node("ConvTranspose", x, net.weight(4, 4, 2, 2), name="up"))
    assert "conv" in quantized(lowered(model, tmp_path, keep=("up",)).model)


def test_at_least_half_of_the_layers_that_fp8_has_stay_in_fp8(tmp_path: Path) -> None:
    """Layers that are too small for it do not count: else those that are in FP8 could all be given up."""
    model = few_channels()
    names = quantizable(simplify(model))
    assert quantizable(simplify(model), "tensorrt", "fp8") == ["gemm0", "gemm1"]
    assert len(names) == 4
    created = lowered(model, tmp_path, "tensorrt", "fp8", min_cosine=1.0).model
    assert created.opset_import[0].version >= FP8_OPSET
    assert quantized(created)


@pytest.mark.parametrize("settings", [{"min_cosine": 0.0, "min_top1_agreement": 0.0}, {"min_cosine": 1.0}])
def test_convolutions_are_fp16_without_pairs_if_the_target_has_no_fp8_kernel(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it matter whether layers are searched for that lose too much."""
    model = networks.residual()
    one = lowered(model, tmp_path, "tensorrt", "fp8", no_fp8_convolutions="TensorRT 10.6.0 is too old", **settings)
    assert "5 convolutions run in fp16: TensorRT 10.6.0 is too old" in caplog.text
    assert one.without is not None
    again = one.without(["node_c1"])
    assert again is not None
    for created, element_type in ((one, TensorProto.FLOAT16), (again, TensorProto.FLOAT)):
        assert quantized(created.model) == {"node_y"}
        assert created.float_nodes == ()
        graph = OnnxGraph(copy_model(created.model))
        convolutions = [node for node in graph.nodes if node.op_type == "Conv"]
        assert {graph.element_type(name) for node in convolutions for name in node.input} == {element_type}
        pairs = {node.op_type: node.input[0] for node in graph.nodes if node.op_type == "QuantizeLinear"}
        assert len(pairs) == 1
        assert pairs["QuantizeLinear"].startswith("flat")
    lowered(model, tmp_path, "tensorrt", "int8", no_fp8_convolutions="not used for INT8", **settings)
    assert "not used" not in caplog.text


def test_a_model_without_products_is_rejected_if_the_target_has_no_fp8_convolutions(tmp_path: Path) -> None:
    text = "a = Conv(x, w)  y = Conv(a, w)"
    model = networks.network(text, networks.weights(w=(16, 16, 1, 1)), ("N", 16, 8, 8))
    with pytest.raises(BuildError, match=r"no product to run in fp8, and .*too old: use fp16 or int8"):
        lowered(model, tmp_path, "tensorrt", "fp8", no_fp8_convolutions="TensorRT 10.6.0 is too old")
    assert quantized(lowered(model, tmp_path, "tensorrt", "fp8").model) == {"node_a", "node_y"}


def test_other_layers_are_fp16_if_they_have_a_kernel(tmp_path: Path) -> None:
    model = networks.residual()
    created = lowered(model, tmp_path, "tensorrt", "fp8", min_top1_agreement=0.0, min_cosine=0.0)
    x = networks.inputs_of(model)
    plain = OnnxRunner(model).run(x)["y"]
    assert created.without is not None
    other = created.without(["node_c1"])
    assert other is not None
    assert (created.float_nodes, other.float_nodes) == ((), ())
    for one, element_type in ((created, TensorProto.FLOAT16), (other, TensorProto.FLOAT)):
        onnx.checker.check_model(one.model, full_check=True)
        graph = OnnxGraph(copy_model(one.model))
        pairs = [node for node in graph.nodes if node.op_type == "DequantizeLinear"]
        assert {graph.element_type(node.input[1]) for node in pairs} == {element_type}
        biases = {graph.element_type(node.input[2]) for node in graph.nodes if node.op_type == "Conv"}
        assert biases == {element_type}
        assert networks.cosine(OnnxRunner(one.model, optimize=False).run(x)["y"], plain) > 0.99
    # Nothing but layers in floating point is left to be tried then.
    assert other.without is not None
    again = other.without(["node_c1"])
    assert again is not None
    assert again.float_nodes == ("node_c1",)
    assert other.without(()) is None


def test_no_layer_search_where_it_cannot_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop without labels is reported by the comparison of the artefact, not by the search."""
    monkeypatch.setattr(lowering, "rank_layers", lambda *_: pytest.fail("minutes for a large model"))
    assert (
        lowered(networks.residual(), tmp_path, max_drop=0.1, min_cosine=0.0, min_top1_agreement=0.0).float_nodes == ()
    )


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_tensorrts_own_calibrator_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(BuildError, match=r"no longer used: write calibration\.method: entropy, which builds int8"):
        lowered(networks.residual(), tmp_path, target, method="tensorrt")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_constants_that_two_layers_share_are_corrected_for_each(target: str, tmp_path: Path) -> None:
    text = """
        a = Conv <pads=[1,1,1,1]> (x, w, b)  ar = Relu(a)  c = Conv <pads=[1,1,1,1]> (ar, w, b)  cr = Relu(c)
        y = Conv <pads=[1,1,1,1]> (cr, w, b)
    """
    weights = np.random.default_rng(3).uniform(0.0, 0.02, (4, 4, 3, 3))
    weights[:, 0, 0, 0] = 2.0
    model = networks.network(text, {"w": weights, "b": np.full(4, 0.1)}, ("N", 4, 8, 8))
    created = lowered(model, tmp_path, target, min_cosine=0.0, min_top1_agreement=0.0).model
    names = {"node_a", "node_c", "node_y"}
    assert quantized(created) == names
    assert len({node.input[2] for node in created.graph.node if node.name in names}) == 3


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Types of the first outputs of nodes, by name."""
    graph = OnnxGraph(model)
    return {node.name: graph.element_type(node.output[0]) for node in graph.nodes}


def test_named_nodes_stay_fp32_among_fp16(tmp_path: Path) -> None:
    model = simplify(networks.residual())
    rows = samples_of(networks.inputs_of(model, 4))
    names = [node.name for node in model.graph.node if node.op_type == "Conv"]
    spec = BuildSpec("fp16", (), None, Calibration(), AccuracyBar(), keep_fp32=(names[1],))
    result = lower_model(model, spec, "onnxruntime", BuildData(rows, rows), tmp_path, silent)
    kept = types_of(result.model)
    assert kept[names[1]] == TensorProto.FLOAT
    assert kept[names[2]] == TensorProto.FLOAT16
    assert names[1] in result.float_nodes
    wrong = BuildSpec("fp16", (), None, Calibration(), AccuracyBar(), keep_fp32=("nothing*",))
    with pytest.raises(
        BuildError, match=r"optimization.keep_fp32 has 'nothing\*', which matches no node of the model: use"
    ):
        lower_model(model, wrong, "onnxruntime", BuildData(rows, rows), tmp_path, silent)
