"""Errors of the builder; each message states the fault, its location and the remedy."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class BuildError(HeadraceError):
    """A model or an engine cannot be built."""


class CallError(BuildError):
    """The command line contradicts itself, or an option has a value that it cannot have."""


class NoKernelError(BuildError):
    """The target has no kernel for a layer in the precision that it is written in.

    Attributes:
        nodes: ONNX nodes of that layer that read quantised tensors; empty where it has none.
    """

    def __init__(self, text: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.nodes = nodes
