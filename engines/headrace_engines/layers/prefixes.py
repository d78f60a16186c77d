"""Builds parts of a lowered model for a target, in several lowered forms, and compares their output on samples with FP32."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from headrace_engines.build import PaddedEngine, resized
from headrace_engines.errors import BuildError
from headrace_engines.layers.comparison import observed_differences
from headrace_engines.layers.differences import DifferenceSums, TensorDifference
from headrace_engines.layers.tensors import SourceLayer
from headrace_engines.onnx_graph import Array, OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision.casting import cast_model
from headrace_engines.precision.limits import MOVEMENT, must_stay_fp32
from headrace_engines.precision.lowering import Quantizer, fp32_nodes
from headrace_engines.progress import Report, silent
from headrace_engines.project import BuildData, BuildSpec
from headrace_engines.quantization.samples import Samples
from headrace_engines.targets.base import Engine, ModelRunner, ShapeRange, Target, TargetSpec

# Rows of a run: the FP32 values of the cut are in memory.
ROWS = 4


class PartRunner:
    """Builds parts of models for a target and compares a tensor with FP32.

    Args:
        target: target of the parts.
        order: parameters of the build, with profiles of the model's inputs.
        samples: samples to compare.
        batched: True if the model has a batch dimension.
        folder: folder for artefacts.
        batch_rows: `compare` compares the rows of a batch of this size with the same rows alone, both in the lower precision;
            0 compares with FP32.
    """

    def __init__(
        self, target: Target, order: TargetSpec, samples: Samples, batched: bool, folder: Path, batch_rows: int = 0
    ) -> None:
        self._target, self._order, self._samples, self._batched, self._folder = target, order, samples, batched, folder
        self._batch_rows = batch_rows
        self._numbers = count()
        self._rows, self._min_rows = 1, 1
        if batched and order.profiles:
            self._min_rows, max_rows = min((profile.rows[0], profile.rows[2]) for profile in order.profiles)
            self._rows = min(max(ROWS, self._min_rows), max_rows)

    def compare(self, reference: OnnxRunner, name: str, model: onnx.ModelProto) -> TensorDifference:
        """Return the difference of one tensor.

        Args:
            reference: FP32 model that returns the tensor.
            name: name of the tensor.
            model: part of the lowered model whose first output has the values of the tensor.

        Raises:
            BuildError: the part cannot be built or run, or the shapes differ.
        """
        with self._opened(model, self._profiles(model)) as engine:
            runner: ModelRunner = PaddedEngine(engine, self._min_rows) if self._batched else engine
            return (
                self._compare_batch(runner, model)
                if self._batch_rows
                else self.compare_runner(reference, name, runner, model)
            )

    def _compare_batch(self, runner: ModelRunner, model: onnx.ModelProto) -> TensorDifference:
        """Return the difference between the rows of a batch and the same rows alone; none for a tensor without rows."""
        samples, sums, count = next(iter(self._samples.batches(self._batch_rows))), DifferenceSums(), self._batch_rows
        batch = {entry.name: resized(samples[entry.name], count) for entry in model.graph.input}
        output = model.graph.output[0].name
        rows = [
            runner.run({name: array[i : i + 1] for name, array in batch.items()})[output].copy() for i in range(count)
        ]
        together = runner.run(batch)[output]
        if together.ndim and together.shape == (count * len(rows[0]), *rows[0].shape[1:]):
            sums.add(np.concatenate(rows), together, count)
        else:
            sums.add(together, together, 1)
        return sums.result()

    def compare_runner(
        self, reference: OnnxRunner, name: str, runner: ModelRunner, model: onnx.ModelProto | None = None
    ) -> TensorDifference:
        """Return the difference of one tensor of a loaded model.

        Args:
            reference: FP32 model that returns the tensor.
            name: name of the tensor.
            runner: the loaded model.
            model: its ONNX model, for the names of inputs and output; None if they are those of the samples and the tensor.
        """
        sums = DifferenceSums()
        output = name if model is None else model.graph.output[0].name
        for inputs in self._samples.batches(self._rows):
            read = inputs if model is None else {entry.name: inputs[entry.name] for entry in model.graph.input}
            self._add(sums, name, reference.run(inputs)[name], runner.run(read)[output], self._count(inputs))
        return sums.result()

    def compare_alone(self, reference: OnnxRunner, layer: SourceLayer, model: onnx.ModelProto) -> TensorDifference:
        """Return the difference of a layer that is fed with the FP32 values of the first batch.

        Args:
            reference: FP32 model that also returns the inputs and the output of the layer.
            layer: the layer.
            model: the layer in the lower precision, with FP32 tensors as inputs.

        Raises:
            BuildError: the layer cannot be built or run alone.
        """
        sums = DifferenceSums()
        inputs = next(iter(self._samples.batches(self._rows)))
        values = {**reference.run(inputs), **inputs}
        fed = {}
        for entry in model.graph.input:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            fed[entry.name] = np.ascontiguousarray(values[entry.name].astype(dtype))
        static = _with_shapes(model, fed)
        with self._opened(static, ()) as engine:
            output = engine.run(fed)[static.graph.output[0].name]
            self._add(sums, layer.tensor, values[layer.tensor], output, self._count(inputs))
        return sums.result()

    def compare_observed(
        self, model: onnx.ModelProto, lowered: onnx.ModelProto, names: Sequence[str]
    ) -> dict[str, TensorDifference]:
        """Return the differences of all tensors that the target can read in a lowered model, by name.

        Args:
            model: FP32 model.
            lowered: the lowered model.
            names: names of tensors of the FP32 model.

        Raises:
            BuildError: the model cannot be loaded or run so.
        """
        with closing(self._target.observe(lowered, self._order, names, self._folder, silent)) as observed:
            runner: ModelRunner = PaddedEngine(observed, self._min_rows) if self._batched else observed
            return observed_differences(model, observed, runner, self._samples, self._rows, silent)

    def _count(self, inputs: Mapping[str, Array]) -> int:
        return len(next(iter(inputs.values()))) if self._batched else 1

    @staticmethod
    def _add(sums: DifferenceSums, name: str, expected: Array, actual: Array, count: int) -> None:
        if expected.shape != actual.shape:
            cure = "use --samples with a multiple of the smallest batch of the profile"
            raise BuildError(
                f"tensor {name} is {list(actual.shape)} in the lower precision, {list(expected.shape)} in FP32: {cure}"
            )
        sums.add(expected, actual, count)

    def _profiles(self, model: onnx.ModelProto) -> tuple[ShapeRange, ...]:
        names = {value.name for value in model.graph.input}
        ranges = [{n: shapes for n, shapes in p.shapes.items() if n in names} for p in self._order.profiles]
        return tuple(ShapeRange(shapes) for shapes in ranges if shapes)

    @contextmanager
    def _opened(self, model: onnx.ModelProto, profiles: tuple[ShapeRange, ...]) -> Iterator[Engine]:
        order = replace(self._order, profiles=profiles)
        path = self._folder / f"part{next(self._numbers)}{self._target.suffix}"
        self._target.build(model, order, path, silent)
        try:
            with closing(self._target.open(path, model)) as engine:
                yield engine
        finally:
            for file in self._folder.glob(f"{path.name}*"):
                file.unlink()


def _with_shapes(model: onnx.ModelProto, values: Mapping[str, Array]) -> onnx.ModelProto:
    """Return a model whose inputs have the shapes of these values, and whose outputs have no shape."""
    static = copy_model(model)
    for entry in static.graph.input:
        kind = entry.type.tensor_type.elem_type
        entry.CopyFrom(onnx.helper.make_tensor_value_info(entry.name, kind, values[entry.name].shape))
    for entry in static.graph.output:
        entry.type.tensor_type.ClearField("shape")
    return static


# Lowered forms of one model that differ in the layers in floating point (int8, fp8) or FP32 (fp16, bf16).

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass
class PrecisionVariants:
    """Writes one model with other layers in the higher precision; ranges are calibrated once, by `prepare`.

    Attributes:
        model: simplified, FP32; not changed.
        spec: specification; of a precision below FP32.
        target: "onnxruntime" or "tensorrt".
        data: samples.
        tables: folder of calibration tables.
        no_fp8: reason why the target has no FP8 convolutions; "" if it has.
        kept: names of the nodes that the configuration, and for FP16 the rules, keep in the higher precision.
        layers: names of the layers in the lower precision, in order.
    """

    model: onnx.ModelProto
    spec: BuildSpec
    target: str
    data: BuildData
    tables: Path
    no_fp8: str = ""
    kept: frozenset[str] = frozenset()
    layers: list[str] = field(default_factory=list)

    def prepare(self, report: Report) -> None:
        """Calibrate, and set `kept` and `layers`.

        Raises:
            BuildError: the model cannot be lowered to the precision.
        """
        if self.spec.precision in ("fp16", "bf16"):
            samples = self.data.calibration or self.data.held_out
            rules = must_stay_fp32(self.model, samples, self.spec.precision, report)
            self.kept = frozenset(rules | fp32_nodes(self.model, self.spec))
            self.layers = self._cast_layers()
        elif self.spec.quantized and self.spec.precision != "best":
            self._quantizer = Quantizer(self.model, self.spec, self.target, self.data, self.tables, self.no_fp8)
            self.kept = frozenset(self._quantizer.calibrate(report))
            self.layers = [name for name in self._quantizer.nodes if name not in self.kept]
        else:
            raise BuildError(f"{self.spec.precision} has no layers in a lower precision: use int8, fp8, fp16 or bf16")

    def write(self, keep: Collection[str] = (), *, corrected: bool = True) -> onnx.ModelProto:
        """Return the model with some more layers in the higher precision.

        Args:
            keep: names of the layers besides `kept`.
            corrected: correct the biases of a quantised model, as a build does.
        """
        names = {*self.kept, *keep}
        if self.spec.precision in ("fp16", "bf16"):
            return cast_model(self.model, self.spec.precision, names)
        return self._quantizer.variant(names, corrected=corrected)

    def _cast_layers(self) -> list[str]:
        """Return the nodes that compute in 16 bits."""
        lowered = OnnxGraph(self.write())
        types = {node.name: [lowered.element_type(name) for name in node.output if name] for node in lowered.nodes}
        graph = OnnxGraph(copy_model(self.model))
        graph.sort()
        return [
            node.name
            for node in graph.nodes
            if node.op_type not in MOVEMENT and any(kind in _HALVES for kind in types.get(node.name, ()))
        ]
