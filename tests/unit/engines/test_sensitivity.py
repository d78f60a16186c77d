"""Which layer quantisation harms most, and how few have to be kept."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from engines.accuracy import measure
from engines.errors import BuildError
from engines.layer_noise import layer_noise
from engines.onnx_graph import Graph, copy_model
from engines.onnx_runner import OnnxRunner
from engines.progress import silent
from engines.quantization.calibration import calibrate
from engines.quantization.placement import place, tensors_to_calibrate
from engines.quantization.qdq import quantizable, quantize
from engines.quantization.samples import Samples
from engines.sensitivity import MEASURED, rank, search
from engines.simplify import simplify
from server.core.optimization_config import Calibration
from tests.onnx_blocks import Network

TARGETS = ("tensorrt", "onnxruntime")


def chain(layers: int, harmed: int, channels: int = 8) -> onnx.ModelProto:
    """Convolutions of which one, by number, reads a channel a thousand times larger than the others."""
    net = Network(seed=4)
    x = net.input("x", ["N", channels, 8, 8])
    scale = np.ones(channels, np.float32)
    for number in range(layers):
        weight = net.random.standard_normal((channels, channels, 3, 3)) / np.sqrt(4.5 * channels) / scale[:, None, None]
        # What makes the large channel is scaled up, what reads it is scaled down: in floating point nothing changes.
        scale = np.ones(channels, np.float32)
        scale[2] = 1000 if number + 1 == harmed else 1
        kernel = net.constant(weight * scale[:, None, None, None])
        x = net.node("Relu", net.node("Conv", x, kernel, name=f"conv{number}", pads=[1] * 4))
    return simplify(net.model(net.node("Flatten", net.node("AveragePool", x, kernel_shape=[4, 4], strides=[4, 4]))))


def pictures(count: int = 12) -> Samples:
    return Samples.of({"x": np.random.default_rng(5).standard_normal((count, 8, 8, 8)).astype(np.float32)})


def ranges_of(model: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    told = Calibration(method="minmax")
    return calibrate(model, tensors_to_calibrate(model), pictures(), told, None, silent)


@pytest.mark.parametrize("target", TARGETS)
def test_the_layer_that_is_harmed_comes_first_and_is_all_that_is_kept(target: str) -> None:
    model = chain(6, harmed=3)
    ranges, told = ranges_of(model), list[float]()
    ranking = rank(model, ranges, target, "int8", pictures(), lambda done, _note: told.append(done))
    names, errors = [name for name, _ in ranking], [error for _, error in ranking]
    # ONNX Runtime stores what a layer makes in 8 bits, so there the one that makes the large channel harms as much.
    harmful = {"conv3"} if target == "tensorrt" else {"conv2", "conv3"}
    assert set(names[: len(harmful)]) == harmful
    assert sorted(names) == [f"conv{i}" for i in range(6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[len(harmful) - 1] > 1000 * errors[len(harmful)] > 0
    assert told == pytest.approx([(i + 1) / 6 for i in range(6)])

    def holds(keep: set[str]) -> bool:
        quantized = OnnxRunner(quantize(model, ranges, target, "int8", keep))
        return measure(OnnxRunner(model), quantized, pictures(), 8, silent).cosine > 0.998

    assert not holds(set())
    assert search(names, holds) == harmful


def test_only_the_named_layers_are_looked_at() -> None:
    model = chain(4, harmed=2)
    ranking = rank(model, ranges_of(model), "tensorrt", "int8", pictures(4), silent, ["conv1", "conv2"])
    assert [name for name, _ in ranking] == ["conv2", "conv1"]


@pytest.mark.parametrize("target", TARGETS)
def test_of_many_layers_the_noisiest_are_measured(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = MEASURED + 4
    model = chain(layers, harmed=12)
    runs = 0

    def counted(*given: object) -> onnx.ModelProto:
        nonlocal runs
        runs += 1
        return quantize(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("engines.sensitivity.quantize", counted)
    told: list[float] = []
    ranking = rank(model, ranges_of(model), target, "int8", pictures(4), lambda done, _note: told.append(done))
    assert runs == MEASURED + 1
    assert ranking[0][0] == "conv12"
    assert (ranking[1][0] == "conv11") == (target == "onnxruntime")
    assert {name for name, _ in ranking} == {f"conv{i}" for i in range(layers)}
    errors = [error for _, error in ranking]
    assert errors == sorted(errors, reverse=True)
    assert all(0 < error <= 1.01 for error in errors)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize("target", TARGETS)
def test_the_noise_of_a_layer_is_what_quantising_it_alone_adds_to_its_output(target: str) -> None:
    model = chain(5, harmed=3)
    ranges, samples = ranges_of(model), pictures()
    layers = quantizable(model)
    stored = place(Graph(copy_model(model)), target).stored
    noise = layer_noise(model, quantize(model, ranges, target), stored, layers, samples, silent)
    (rows,) = samples.batches(len(samples))
    for name in layers:
        alone = quantize(model, ranges, target, "int8", [other for other in layers if other != name])
        # With the output's own pair where there is one, which is what ONNX Runtime stores.
        relu = next(node.output[0] for node in model.graph.node if f"{name}_out" in node.input)
        end = relu if relu in stored else f"{name}_out"
        given, expected = (_value_behind(m, end, rows) for m in (alone, model))
        axes = (0, 2, 3)
        ratios = np.square(given - expected).sum(axes) / np.square(expected).sum(axes)
        assert noise[name] == pytest.approx(np.exp(np.log(np.minimum(ratios, 1)).mean()), rel=0.02)


def _value_behind(model: onnx.ModelProto, tensor: str, rows: dict[str, np.ndarray]) -> np.ndarray:
    graph = Graph(copy_model(model))
    for operator in ("QuantizeLinear", "DequantizeLinear"):
        tensor = next((n.output[0] for n in graph.consumers(tensor) if n.op_type == operator), tensor)
    return OnnxRunner(model, [tensor], optimize=False).run(rows)[tensor]


def test_layers_that_cannot_be_compared_come_first() -> None:
    model = chain(3, harmed=1)
    quantized = quantize(model, ranges_of(model), "tensorrt")
    for node in quantized.graph.node:
        node.input[:] = [name.replace("Relu", "Other") for name in node.input]
        node.output[:] = [name.replace("Relu", "Other") for name in node.output]
    noise = layer_noise(model, quantized, (), quantizable(model), pictures(2), silent)
    assert np.isfinite(noise["conv0"])
    assert noise["conv1"] == noise["conv2"] == np.inf


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 21, 32, 53])
def test_the_search_finds_the_fewest_in_few_trials(needed: int) -> None:
    ranking = [f"layer{i}" for i in range(53)]
    trials: list[int] = []

    def holds(keep: set[str]) -> bool:
        trials.append(len(keep))
        assert keep == set(ranking[: len(keep)])
        return len(keep) >= needed

    assert search(ranking, holds) == set(ranking[:needed])
    assert len(trials) == len(set(trials))
    assert len(trials) <= 2 * np.log2(53) + 1


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_search_without_an_outcome_says_so(count: int) -> None:
    with pytest.raises(BuildError, match=f"even with all {count} layers"):
        search([str(i) for i in range(count)], lambda _keep: False)
