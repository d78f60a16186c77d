"""Interface between the build pipeline and its targets.

Target.describe() -> Machine                     the machine that an artefact depends on
Target.refuses(precision) -> str                 reason why this machine does not support a precision, or ""
Target.refuses_fp8_convolutions() -> str         reason why convolutions do not run in FP8, or ""
Target.build(model, order, path, report)         builds the artefact's file from an ONNX model in the requested precision
Target.open(path) -> Engine                      loads an artefact, which can run, be timed and list its layers
Target.observe(model, order, names, folder, report) -> ObservedEngine     loads a model whose inner tensors can be read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import onnx
from headrace.config.machine import Machine
from headrace.config.manifest import BatchTiming as BatchTiming
from headrace.config.manifest import MeasuredLayer as MeasuredLayer
from headrace_lab.kernels.plugin import PluginLayer

from headrace_engines.progress import Report

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Optimisation profile: smallest, tuned and largest shape by input name, batch dimension included."""

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    @property
    def rows(self) -> tuple[int, int, int]:
        """Smallest, tuned and largest first dimension of the first input."""
        smallest, tuned, largest = next(iter(self.shapes.values()))
        return smallest[0], tuned[0], largest[0]


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Parameters of a target's build besides the model.

    Attributes:
        precision: "fp32", "fp16", "bf16", "int8" or "fp8", the precision of the model.
        profiles: optimisation profiles; at least one for inputs with free dimensions.
        workspace_bytes: limit of the scratch memory; None without a limit.
        timing_cache: file of measured kernels, read and updated; None for no file.
        version_compatible: the artefact runs with later TensorRT versions too; see `Stamp.version_compatible`.
        optimization_level: effort of TensorRT's builder, 0 (fastest build) to 5; None for the target's default.
        plugin_layers: layers of our plug-in, by the attribute `layer` of the model's nodes.
    """

    precision: str
    profiles: tuple[ShapeRange, ...] = ()
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    optimization_level: int | None = None
    plugin_layers: tuple[PluginLayer, ...] = ()


class ModelRunner(Protocol):
    """Runs a model on batches of inputs."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return all outputs by name; inputs have their batch dimension."""


class Engine(ModelRunner, Protocol):
    """A loaded artefact."""

    def time(self, inputs: Mapping[str, Array], seconds: float) -> BatchTiming:
        """Time executions of a batch for about `seconds`; on a GPU as a CUDA graph with inputs on the device."""

    def layers(self, inputs: Mapping[str, Array]) -> list[MeasuredLayer]:
        """Return the layers in order, timed on this batch."""

    @property
    def memory_bytes(self) -> int:
        """Size of weights and scratch memory of the loaded engine, in bytes."""

    def close(self) -> None:
        """Release all memory."""


class ObservedEngine(ModelRunner, Protocol):
    """A loaded model whose inner tensors can be read; `run` returns them, as FP32, by the name of the FP32 model's tensor.

    Attributes:
        names: names of the FP32 model's tensors that exist in the engine.
        remark: difference of its fused layers from those of the artefact; "" if there is none.
    """

    names: tuple[str, ...]
    remark: str

    def close(self) -> None:
        """Release all memory."""


class Target(Protocol):
    """Builds and runs artefacts on this machine."""

    name: str
    suffix: str

    def describe(self) -> Machine:
        """Describe this machine."""

    def refuses(self, precision: str, *, version_compatible: bool = False) -> str:
        """Return the reason why this machine does not support a precision; "" if it does.

        Args:
            precision: see `TargetSpec`.
            version_compatible: for artefacts that later versions load, too.
        """

    def refuses_fp8_convolutions(self) -> str:
        """Return the reason why convolutions stay FP16 in FP8 artefacts; "" if they run in FP8."""

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        """Write the artefact.

        Raises:
            BuildError: an operator is not supported (the message has its node), a profile does not fit, or memory ran out.
        """

    def open(self, path: Path, source: onnx.ModelProto | None = None, *, host_code: bool = False) -> Engine:
        """Load an artefact.

        Args:
            path: its file.
            source: its ONNX model, with which `layers` returns the names of ONNX nodes.
            host_code: code in the artefact may run, which a version-compatible one has.
        """

    def observe(
        self, model: onnx.ModelProto, order: TargetSpec, names: Sequence[str], folder: Path, report: Report
    ) -> ObservedEngine:
        """Load a lowered model so that its inner tensors can be read; layers that the target fuses stay fused where possible.

        Args:
            model: lowered model, as for `build`.
            order: parameters of the build.
            names: names of tensors of the FP32 model.
            folder: folder for files, which must outlive the engine.
            report: called with the progress.

        Raises:
            BuildError: as for `build` and `open`.
        """
