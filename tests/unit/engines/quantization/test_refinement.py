"""Refined placement: layers that are slower in 8 bits leave them, equal layers are measured once, ratios are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.build import build_engine
from headrace_engines.errors import BuildError
from headrace_engines.precision.lowering import LoweredModel
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.quantization.refinement import PatternTimes, Refinement, quantized_layers
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets.base import BatchTiming, MeasuredLayer
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget

from tests.support import networks
from tests.support.engine_projects import write_project
from tests.support.onnx_blocks import Network


def four_equal_and_one_other() -> onnx.ModelProto:
    """Convolutions "a0" to "a3" of one pattern (with a Relu, a convolution before and after), between "first" and "last"."""
    net = Network()
    x = net.input("x", ["N", 3, 8, 8])
    x = net.node("Relu", net.conv(x, (3, 8), "first"))
    for number in range(4):
        x = net.node("Relu", net.conv(x, (8, 8), f"a{number}"))
    x = net.node("Sigmoid", net.conv(x, (8, 4), "last"))
    return simplify(net.model(x))


def names_of(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type == "Conv"]


@dataclass
class Machine:
    """Builds and times engines by the convolutions that are in floating point.

    Attributes:
        times_us: time of each convolution in 8 bits, and in floating point.
        builds: names in floating point of each build.
        fails: a convolution that cannot be built in floating point.
    """

    model: onnx.ModelProto
    times_us: Mapping[str, tuple[float, float]]
    builds: list[tuple[str, ...]] = field(default_factory=list)
    fails: str = ""

    def __post_init__(self) -> None:
        self.ranges = networks.measured_ranges(self.model, tensors_to_calibrate(self.model))

    def lowered(self, keep: tuple[str, ...] = ()) -> LoweredModel:
        quantized = quantize(self.model, self.ranges, "onnxruntime", keep=keep)
        return LoweredModel(quantized, keep, lambda nodes: self.lowered(tuple(sorted({*keep, *nodes}))))

    def build(self, lowered: LoweredModel, path: Path) -> None:
        if self.fails in lowered.float_nodes:
            raise BuildError("no kernel")
        self.builds.append(lowered.float_nodes)
        path.write_text(json.dumps(lowered.float_nodes))

    def open(self, path: Path, lowered: LoweredModel) -> Any:
        return _Engine(self, tuple(json.loads(path.read_text())))


@dataclass
class _Engine:
    machine: Machine
    kept: tuple[str, ...]

    def layers(self, inputs: Any) -> list[MeasuredLayer]:
        return [
            MeasuredLayer(f"kernel of {name}", "Conv", (name,), "int8", "", self._time(name), 0.0)
            for name in self.machine.times_us
        ]

    def time(self, inputs: Any, seconds: float) -> BatchTiming:
        total = sum(map(self._time, self.machine.times_us))
        return BatchTiming(1, total, total, 1e6 / total)

    def _time(self, name: str) -> float:
        return self.machine.times_us[name][name in self.kept]

    def close(self) -> None:
        """Do nothing."""


def refined(machine: Machine, folder: Path) -> tuple[LoweredModel, Refinement]:
    artefact = folder / "model.onnx"
    machine.build(machine.lowered(), artefact)
    times = PatternTimes(folder / "patterns.json", "int8/1")
    refinement = Refinement(machine.build, machine.open, {"x": np.zeros(1)}, times)
    result = refinement.run(machine.lowered(), artefact, silent)
    assert tuple(json.loads(artefact.read_text())) == result.float_nodes, "the artefact is that of the returned model"
    return result, refinement


def test_equal_layers_share_a_pattern() -> None:
    machine = Machine(four_equal_and_one_other(), {})
    patterns = quantized_layers(machine.lowered().model)
    first, *equal, last = names_of(machine.model)
    assert set(patterns) == {first, *equal, last}
    assert len({patterns[name] for name in equal}) == 1
    assert len({patterns[first], patterns[equal[0]], patterns[last]}) == 3


def test_layers_that_are_faster_in_floating_point_leave_8_bits(tmp_path: Path) -> None:
    model = four_equal_and_one_other()
    first, *equal, last = names_of(model)
    times = {first: (50.0, 20.0), **dict.fromkeys(equal, (10.0, 30.0)), last: (5.0, 4.99)}
    machine = Machine(model, times)
    result, refinement = refined(machine, tmp_path)
    # A gain of less than a percent is none.
    assert result.float_nodes == (first,)
    by_layer = {one.nodes[0]: one for one in refinement.results}
    assert by_layer[first].in_float
    assert by_layer[first].ratio == pytest.approx(95 / 65)
    assert not by_layer[last].in_float
    assert not any(one.stored for one in refinement.results)
    # Once without, then once for each of the three patterns.
    assert len(machine.builds) == 4


def test_a_second_build_measures_the_whole_once(tmp_path: Path) -> None:
    model = four_equal_and_one_other()
    first, *equal, last = names_of(model)
    times = {first: (50.0, 20.0), **dict.fromkeys(equal, (30.0, 10.0)), last: (5.0, 9.0)}
    refined(Machine(model, times), tmp_path)
    machine = Machine(model, times)
    result, refinement = refined(machine, tmp_path)
    assert result.float_nodes == tuple(sorted((first, *equal)))
    assert all(one.stored for one in refinement.results)
    assert len(machine.builds) == 2


def test_stored_ratios_that_do_not_hold_change_nothing(tmp_path: Path) -> None:
    model = four_equal_and_one_other()
    first, *equal, last = names_of(model)
    refined(Machine(model, {first: (50.0, 20.0), **dict.fromkeys((*equal, last), (5.0, 9.0))}), tmp_path)
    machine = Machine(model, dict.fromkeys((first, *equal, last), (5.0, 9.0)))
    result, _ = refined(machine, tmp_path)
    assert result.float_nodes == ()


def test_a_layer_without_a_kernel_in_floating_point_stays_in_8_bits(tmp_path: Path) -> None:
    model = four_equal_and_one_other()
    first, *others = names_of(model)
    machine = Machine(model, {first: (50.0, 20.0), **dict.fromkeys(others, (5.0, 9.0))}, fails=first)
    assert refined(machine, tmp_path)[0].float_nodes == ()


def test_ten_layers_are_measured_at_most(tmp_path: Path) -> None:
    net = Network()
    x = net.input("x", ["N", 3, 8, 8])
    for number in range(14):
        # Each has another number of channels, and so another pattern.
        x = net.node("Relu", net.conv(x, (3 + number, 4 + number), f"c{number}"))
    model = simplify(net.model(x))
    times = {name: (10.0 + number, 20.0 + number) for number, name in enumerate(names_of(model))}
    machine = Machine(model, times)
    _, refinement = refined(machine, tmp_path)
    assert [one.nodes[0] for one in refinement.results] == names_of(model)[:3:-1]


def test_unreadable_times_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "patterns.json"
    for text in ("{", "[1]", '{"a": "b"}'):
        file.write_text(text)
        assert PatternTimes(file, "int8/1").get("a") is None
    PatternTimes(file, "int8/1").put("a", 1.5)
    assert PatternTimes(file, "int8/1").get("a") == 1.5
    assert PatternTimes(file, "int8/8").get("a") is None


def test_a_refined_build_has_a_key_of_its_own_and_its_measurements(tmp_path: Path) -> None:
    model = networks.residual()
    project = write_project(tmp_path / "models", model, networks.inputs_of(model, 32), rows=2)
    spec, store = read_spec(project.config, "int8"), Store(tmp_path / "store")
    plain = build_engine(project, spec, OnnxRuntimeTarget(), store, silent)
    result = build_engine(project, replace(spec, refined=True), OnnxRuntimeTarget(), store, silent)
    assert plain.key != result.key
    assert plain.refinement == ()
    assert 0 < len(result.refinement) <= 10
    chosen = {name for one in result.refinement if one["in_float"] for name in one["nodes"]}
    assert chosen <= set(result.float_nodes)
