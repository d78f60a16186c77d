"""Interface of streams to another process that serves some of their requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from headrace.wire.grpc.codec import Envelope
from headrace.wire.grpc.methods import Message, StreamCall


class Forwarder(Protocol):
    """Another process that serves some requests of streams."""

    def takes(self, envelope: Envelope) -> bool:
        """Return True for a request that the other process serves."""

    def is_unordered(self, envelope: Envelope) -> bool:
        """Return True if the responses to a request need not have its place in the order."""

    def sequence_of(self, envelope: Envelope) -> object:
        """Return the sequence of a request, whose requests are sent one after the other; None without one."""

    def responses(self, message: bytes, call: StreamCall) -> AsyncGenerator[Message]:
        """Send a request; yields each ModelStreamInferResponse.

        Raises:
            HeadraceError: the request failed.
            StatusError: the stream must end with this status.
        """
