"""Targets of a build, and their selection."""

from __future__ import annotations

from headrace_engines.errors import BuildError
from headrace_engines.targets.base import Target

NAMES = ("auto", "onnxruntime", "tensorrt")


def choose_target(name: str) -> Target:
    """Return the target of a name; "auto" is TensorRT if it and a GPU are available, else ONNX Runtime.

    Raises:
        BuildError: TensorRT is requested and not available; the message has the missing part.
    """
    from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget

    if name == "onnxruntime":
        return OnnxRuntimeTarget()
    from headrace_engines.targets.tensorrt.target import TensorRtTarget, available

    missing = available()
    if not missing:
        return TensorRtTarget()
    if name == "tensorrt":
        cure = "`make gpu-packages` installs TensorRT; --target onnxruntime builds for the CPU"
        raise BuildError(f"engines for TensorRT cannot be built on this machine: {missing}: {cure}")
    return OnnxRuntimeTarget()
