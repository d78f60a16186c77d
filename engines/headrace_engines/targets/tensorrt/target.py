"""TensorRT on an NVIDIA GPU: plans built from ONNX.

Importing this needs neither TensorRT nor a GPU. A target and what it gives out belong to one thread: CUDA's and TensorRT's
objects are made, used and closed there.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from headrace.config.manifest import Machine
from headrace.core.errors import HeadraceError
from headrace.cuda import devices as gpus
from headrace.cuda.driver import current

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.api import FP8_CONVOLUTIONS, as_build_error, load
from headrace_engines.targets.tensorrt.builder import BuilderOptions, build_plan
from headrace_engines.targets.tensorrt.engine import TensorRtEngine

# The least compute capability with arithmetic of a precision (TensorRT documentation, "Support Matrix").
_MIN_CAPABILITY = {"fp32": (7, 5), "fp16": (7, 5), "int8": (7, 5), "bf16": (8, 0), "fp8": (8, 9)}


def available(device: int = 0) -> str:
    """Return what this machine lacks to build and run TensorRT's engines, "" if nothing.

    The GPU is checked first: TensorRT ends the process when it is started without one.
    """
    try:
        gpus.describe(device)
        load()
    except HeadraceError as error:
        return str(error)
    return ""


class TensorRtTarget:
    """Builds and runs plans for one GPU of this machine.

    Args:
        device: number of the GPU.
        optimization_level: TensorRT's builder optimization level, 0 (fast to build) to 5; None: TensorRT's default, 3.
    """

    name = "tensorrt"
    suffix = ".plan"

    def __init__(self, device: int = 0, optimization_level: int | None = None) -> None:
        self._device = device
        self._options = BuilderOptions(optimization_level=optimization_level)

    def describe(self) -> Machine:
        """Describe this machine.
        Raises:
            BuildError: there is no GPU or no TensorRT; says what to install.
        """
        self._demand()
        gpu = gpus.describe(self._device)
        return Machine(self.name, load().version, gpu.name, gpu.capability, gpu.driver)

    def refuses(self, precision: str) -> str:
        """Why this machine cannot have artefacts of a precision, "" if it can."""
        missing = available(self._device)
        if missing:
            return missing
        min_capability = _MIN_CAPABILITY.get(precision)
        if min_capability is None:
            return f"TensorRT engines have no precision '{precision}': take one of {', '.join(_MIN_CAPABILITY)}"
        gpu = gpus.describe(self._device)
        major, _, minor = gpu.capability.partition(".")
        if (int(major), int(minor)) < min_capability:
            needed = ".".join(map(str, min_capability))
            cure = "take fp16" if min_capability > (7, 5) else "build for ONNX Runtime"
            return f"{precision} needs compute capability {needed}, the {gpu.name} has {gpu.capability}: {cure}"
        return ""

    def refuses_fp8_convolutions(self) -> str:
        """Why convolutions stay FP16 in artefacts of FP8, "" if they are FP8 too.

        Raises:
            BuildError: there is no TensorRT.
        """
        api = load()
        if api.fp8_convolutions:
            return ""
        min_version = ".".join(map(str, FP8_CONVOLUTIONS))
        return f"convolutions in FP8 are for TensorRT {min_version} and newer, this is {api.version}"

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        """Write a plan, which appears whole or not at all.

        Raises:
            BuildError: an operator is not supported (named with its node), a profile does not fit, memory ran out, the disk is
                full, or there is no GPU or no TensorRT.
        """
        self._demand()
        with as_build_error(path.name), current(self._device):
            build_plan(load(), model, order, path, report, self._options, gpus.describe(self._device))

    def open(self, path: Path, source: onnx.ModelProto | None = None) -> TensorRtEngine:
        """Load a plan; `source`, the model it was built from, lets `layers` name the ONNX nodes.

        Raises:
            BuildError: there is no such file, it is for another TensorRT or GPU, or memory ran out.
        """
        self._demand()
        with as_build_error(path.name):
            return TensorRtEngine(load(), path, source, self._device)

    def _demand(self) -> None:
        missing = available(self._device)
        if missing:
            raise BuildError(missing)
