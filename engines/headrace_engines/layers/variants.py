"""Lowered forms of one model that differ in the layers in floating point (int8, fp8) or FP32 (fp16, bf16)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model
from headrace_engines.precision.limits import MOVEMENT, must_stay_fp32
from headrace_engines.precision.lowering import Quantizer, cast_model, fp32_nodes
from headrace_engines.progress import Report
from headrace_engines.project import BuildData, BuildSpec

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
