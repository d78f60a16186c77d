"""What the front ends need of the rest of the server, handed in by `app`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from server.core.completion import LoopCompletion
from server.core.errors import HeadraceError
from server.core.request import InferRequest
from server.core.tensor import ModelSpec


class Handle(Protocol):
    """A leased model version; see `server.dataplane.handle.ModelHandle`."""

    spec: ModelSpec

    def admit(self) -> None:
        """Refuse early."""

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Queue a request."""

    def failed(self, error: HeadraceError, received_ns: int) -> None:
        """Count an error."""

    def release(self) -> None:
        """Give the lease back."""


class Models(Protocol):
    """The registry as the front ends see it; see `server.control.registry.Registry`."""

    def lease(self, name: str, version: str) -> Handle:
        """A version to run requests on; "" is the latest. Give it back with `release`."""

    def versions(self, name: str) -> Sequence[str]:
        """The versions that are ready."""

    def config(self, name: str, version: str) -> Mapping[str, object]:
        """The configuration in Triton's JSON."""

    def statistics(self, name: str, version: str) -> Sequence[Mapping[str, object]]:
        """Statistics in Triton's JSON, of all models if `name` is ""."""

    def index(self) -> Sequence[Mapping[str, object]]:
        """Every model found, its state and the reason for it."""

    def ready(self) -> bool:
        """True if all that should be served can be."""
