"""The models of `loadtest.gpu.split`, cut by `headrace split`'s own code and built for TensorRT; one process for each.

<work>/whole/NAME                    the model
<work>/two/NAME_part1 ... NAME_split     the parts on GPU 0 and GPU 1, and the pipeline
<work>/one/...                       the same files, with both parts on GPU 0
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from headrace.config.manifest import FORMAT, LayerReport
from headrace_engines.commands.inspect import inspect_source, inspection_inputs
from headrace_engines.onnx_graph import read_onnx, weight_bytes
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import silent
from headrace_engines.project import SOURCE, Project, open_project
from headrace_engines.simplify import simplify
from headrace_engines.split.models import SplitModel, split_model
from headrace_engines.split.part_writer import staged_split
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import ShapeRange, TargetSpec
from onnx import TensorProto, helper, numpy_helper

from loadtest.onnx_models import encoder_layer
from loadtest.protocol import Array

LAYOUTS: dict[str, tuple[int, int]] = {"two": (0, 1), "one": (0, 0)}
RESNET, TRANSFORMER = "resnet50", "transformer"
_PARTS, _SLACK = 2, 0.03
_NOISE = 1 << 22


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare one model; return 0."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.split_models")
    parser.add_argument("model", choices=(RESNET, TRANSFORMER))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=128)
    Preparation(parser.parse_args(arguments)).run()
    return 0


class Preparation:
    """Writes, cuts and builds one model; prints each step with its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._name: str = options.model
        self._start_s = time.monotonic()
        self._on_gpu = options.backend == "tensorrt"
        self._cache = options.work / f"{self._name}.timing"

    def run(self) -> None:
        """Do everything."""
        project = self._write_whole()
        self._say(f"written, {weight_bytes(onnx.load_model(project.source, load_external_data=False)) / 1e9:.2f} GB")
        plan = project.version_folder / "model.plan"
        if self._on_gpu and self._name == RESNET:
            self._build(read_onnx(project.source), project, plan)
        split = self._cut(project, plan)
        for layout, gpus in LAYOUTS.items():
            repository = self._options.work / layout
            with staged_split(project, split, repository, gpus if self._on_gpu else (), replace=True):
                pass
        for number in range(1, _PARTS + 1):
            self._build_part(f"{self._name}_part{number}")
        self._say("done")

    def _write_whole(self) -> Project:
        options = self._options
        folder = options.work / "whole" / self._name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {"max_batch_size": options.rows, "dynamic_batching": {}}
        if self._name == RESNET:
            onnx.save(_resnet50(small=not self._on_gpu), folder / "1" / SOURCE)
        else:
            write_transformer(folder / "1" / SOURCE, options.layers, options.width, options.length)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        project = open_project(str(folder), folder.parent)
        # A plan is served by the tensors in its configuration.
        for field, tensors in (("input", project.config.input), ("output", project.config.output)):
            config[field] = [{"name": t.name, "data_type": t.data_type, "dims": list(t.dims)} for t in tensors]
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return open_project(str(folder), folder.parent)

    def _cut(self, project: Project, plan: Path) -> SplitModel:
        inputs = inspection_inputs(project, choose_target("onnxruntime"), None)
        model = read_onnx(project.source)
        report = self._plan_layers(project, plan, model) if plan.is_file() else inspect_source(project)
        split = split_model(model, report, inputs, parts=_PARTS, slack=_SLACK, batched=True)
        for number, part in enumerate(split.parts, 1):
            received = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in part.received)
            self._say(
                f"part {number}: {part.time_us:.0f} us, {split.weight_bytes[number - 1] / 1e6:.0f} MB of weights"
                + (f", receives {received}" if received else "")
            )
        return split

    def _plan_layers(self, project: Project, plan: Path, model: onnx.ModelProto) -> LayerReport:
        """Return the layers of the whole engine, timed by TensorRT's profiler at the largest batch."""
        target = self._target()
        inputs = {entry.name: np.zeros((self._options.rows, *entry.dims), np.float32) for entry in project.config.input}
        with closing(target.open(plan, model)) as engine:
            timing, layers = engine.time(inputs, 0.3), engine.layers(inputs)
        self._say(f"whole engine: {timing.median_us:.0f} us a batch of {timing.rows}, {timing.rows_per_s:.0f} rows/s")
        return LayerReport(
            format=FORMAT,
            model=project.name,
            version=1,
            artefact=plan.name,
            precision="fp16",
            machine=target.describe(),
            reason="",
            shapes={name: array.shape for name, array in inputs.items()},
            rows=timing.rows,
            median_us=timing.median_us,
            p99_us=timing.p99_us,
            rows_per_s=timing.rows_per_s,
            total_us=sum(layer.time_us for layer in layers),
            layers=tuple(layers),
        )

    def _build_part(self, name: str) -> None:
        """Build the plan of a part and let both layouts serve it."""
        work = self._options.work
        if not self._on_gpu:
            return
        project = open_project(name, work / "two")
        plan = work / "two" / name / "1" / "model.plan"
        self._build(read_onnx(project.source), project, plan)
        os.link(plan, work / "one" / name / "1" / "model.plan")
        for layout in LAYOUTS:
            _use_plan(work / layout / name)

    def _build(self, model: onnx.ModelProto, project: Project, plan: Path) -> None:
        rows = self._options.rows
        shapes = {
            entry.name: ((1, *entry.dims), (rows, *entry.dims), (rows, *entry.dims)) for entry in project.config.input
        }
        # The graph is in FP16 itself; "fp32" only says that nothing is lowered.
        spec = TargetSpec("fp32", (ShapeRange(shapes),), timing_cache=self._cache)
        self._target().build(model, spec, plan, silent)
        self._say(f"{project.name} built, {plan.stat().st_size / 1e6:.0f} MB")

    def _target(self) -> Any:
        from headrace_engines.targets.tensorrt.target import TensorRtTarget

        return TensorRtTarget(self._options.gpu)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start_s:5.1f} s] {self._name}: {text}", flush=True)


def _use_plan(folder: Path) -> None:
    """Serve the plan of a model in place of its ONNX file."""
    for file in folder.glob(f"1/{SOURCE}*"):
        file.unlink()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({"backend": "tensorrt", **config}, sort_keys=False))


def _resnet50(*, small: bool) -> onnx.ModelProto:
    """ResNet-50 in FP16 with seeded weights; small: a convolution net in FP32, to try the bench itself on a CPU."""
    if small:
        from loadtest.onnx_models import convolution

        return convolution((16, 16, 16, 16), side=16)
    from headrace_engines.demo.networks import build_resnet50_seeded

    model = build_resnet50_seeded(silent).model
    assert isinstance(model, onnx.ModelProto)
    return cast_model(simplify(model), "fp16")


def write_transformer(path: Path, layers: int, width: int, length: int) -> int:
    """Write a text encoder in FP16 with its weights in `<name>.data`; return their bytes.

    ids (rows, length) INT64 -> pooled (rows, width) FP16. The weights are slices of one block of noise: drawing a billion numbers
    takes longer than everything else.

    Args:
        path: the ONNX file.
        layers: number of layers.
        width: width of the hidden state, a multiple of 64.
        length: tokens of a text.
    """
    heads, words = width // 64, 1000
    random = _Noise()
    small: dict[str, Array] = {
        "split": np.array([0, 0, heads, 64], np.int64),
        "join": np.array([0, 0, width], np.int64),
        "scale": np.array(0.125, np.float16),
        "bias": np.array(0, np.float16),
        "ones": np.ones(width, np.float16),
        "zeros": np.zeros(width, np.float16),
        "length_axis": np.array([1], np.int64),
        "words": random.standard_normal((words, width), np.float32).astype(np.float16),
    }
    nodes = [helper.make_node("Gather", ["words", "ids"], ["state0"])]
    tensors: list[TensorProto] = []
    offset = 0
    with path.with_name(f"{path.name}.data").open("wb") as file:
        for layer in range(layers):
            weights: dict[str, Array] = {}
            nodes += encoder_layer(layer, width, weights, random)
            for name, values in weights.items():
                tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=values.shape)
                halves = np.ascontiguousarray(values.astype(np.float16))
                file.write(halves.data)
                size_bytes = halves.nbytes
                entries = {"location": f"{path.name}.data", "offset": str(offset), "length": str(size_bytes)}
                for key, text in entries.items():
                    tensor.external_data.add(key=key, value=text)
                tensor.data_location = TensorProto.EXTERNAL
                tensors.append(tensor)
                offset += size_bytes
    nodes.append(helper.make_node("ReduceMean", [f"state{layers}", "length_axis"], ["pooled"], keepdims=0))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "transformer",
        [value("ids", TensorProto.INT64, ["rows", length])],
        [value("pooled", TensorProto.FLOAT16, ["rows", width])],
        [*(numpy_helper.from_array(array, name) for name, array in small.items()), *tensors],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
    return offset


class _Noise(np.random.Generator):
    """Normal numbers from one block, from another offset each time."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))
        self._block = super().standard_normal(_NOISE, np.float32)
        self._offset = 0

    def standard_normal(self, size: Any = None, dtype: Any = np.float32, out: Any = None) -> Any:
        """Return numbers in the given shape."""
        self._offset = (self._offset + 7919) % _NOISE
        return np.resize(np.roll(self._block, self._offset), size)


def clear(work: Path) -> None:
    """Remove the models of an earlier run."""
    for name in ("whole", *LAYOUTS):
        shutil.rmtree(work / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
