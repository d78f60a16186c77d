"""The contract between the build pipeline and what it builds for, on one screen.

Target.describe() -> Machine                     the machine that an artefact depends on
Target.refuses(precision) -> str                 why this machine cannot have it, "" if it can
Target.refuses_fp8_convolutions() -> str         why FP8 is for products alone here, "" if it is not
Target.build(model, order, path, report)         from an ONNX model, already lowered to its precision, to the artefact's file
Target.open(path) -> Engine                      loaded: can run, be timed and list its layers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import onnx
from headrace.config.manifest import BatchTiming, Machine

from headrace_engines.progress import Report

__all__ = ["Array", "BatchTiming", "Engine", "Layer", "Machine", "ModelRunner", "ShapeRange", "Target", "TargetSpec"]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """One optimisation profile: by input the smallest, tuned and largest shape, batch dimension included."""

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Parameters of a target's build besides the model.

    Attributes:
        precision: "fp32", "fp16", "bf16", "int8" or "fp8"; the model is already written in it.
        profiles: at least one where an input has free dimensions.
        workspace_bytes: scratch memory that may be used, None: no bound.
        timing_cache: a file of measured kernels that may be read and is brought up to date, None: none.
    """

    precision: str
    profiles: tuple[ShapeRange, ...] = ()
    workspace_bytes: int | None = None
    timing_cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One step of a built engine.

    Attributes:
        name: as the engine calls it.
        kind: e.g. "Conv", "CaskConvolution".
        nodes: names of the ONNX nodes that it does, in order; empty for steps the builder added (reformats).
        precision: of what it computes with, e.g. "int8", "fp16", "fp32".
        tactic: the kernel, where the engine reports it.
        time_us: mean of one execution.
        share: of the whole, 0..1.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    precision: str
    tactic: str
    time_us: float
    share: float


class ModelRunner(Protocol):
    """Runs a model on batches of inputs."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return all outputs by name; inputs have their batch dimension."""


class Engine(ModelRunner, Protocol):
    """An artefact that is loaded."""

    def time(self, inputs: Mapping[str, Array], seconds: float) -> BatchTiming:
        """Time executions of this batch for about so long; on a GPU as a CUDA graph, inputs on the device."""

    def layers(self, inputs: Mapping[str, Array]) -> list[Layer]:
        """Return its layers in order, timed on this batch."""

    @property
    def memory_bytes(self) -> int:
        """Weights and scratch memory that it holds while it is loaded."""

    def close(self) -> None:
        """Give everything back."""


class Target(Protocol):
    """Builds and runs artefacts on this machine."""

    name: str
    suffix: str

    def describe(self) -> Machine:
        """Describe this machine."""

    def refuses(self, precision: str) -> str:
        """Why this machine cannot have artefacts of a precision, "" if it can."""

    def refuses_fp8_convolutions(self) -> str:
        """Why convolutions stay FP16 in artefacts of FP8, "" if they are FP8 too; called where FP8 is not refused."""

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        """Write the artefact.

        Raises:
            BuildError: an operator is not supported (named with its node), a profile does not fit, memory ran out.
        """

    def open(self, path: Path, source: onnx.ModelProto | None = None) -> Engine:
        """Load an artefact; `source`, the model it was built from, lets `layers` name the ONNX nodes."""
