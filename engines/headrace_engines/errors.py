"""Errors of the builder. Each message states the fault, its location and the remedy."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class BuildError(HeadraceError):
    """A model or an engine cannot be built."""


class CallError(BuildError):
    """Options of the command line contradict each other, or an option has an invalid value."""


class NoKernelError(BuildError):
    """The target has no kernel for a layer in the precision of the graph.

    Attributes:
        nodes: names of the ONNX nodes of that layer that read quantised tensors; may be empty.
    """

    def __init__(self, text: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.nodes = nodes


def failure_text(error: Exception) -> str:
    """Return the message of a failed build: for a full disk or memory, with the remedy."""
    if isinstance(error, MemoryError):
        return "there is not enough memory: close other programs, or use fewer calibration samples"
    if not isinstance(error, OSError):
        return str(error)
    location = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{location}: make room, or check the permissions"
