"""What the gRPC engines and the service agree on: methods that take bytes and give bytes.

An engine (`grpc_server` on grpcio, `grpc_fast` on our own HTTP/2) knows HTTP/2, deadlines and message framing and nothing of
inference; the service (`grpc_service`) knows inference and nothing of HTTP/2. Messages are serialized protobuf on both sides,
so that the hot path can do without message objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.completion import LoopCompletion
from headrace.core.limits import HeldBody
from headrace.inference.request_options import Asked, AskedHeaders

# The parts of one serialized message, in order.
Message = list[bytes | memoryview]


class GrpcCall(Protocol):
    """What a method may know of the call it serves.

    Attributes:
        received_ns: monotonic, when the request had arrived.
        deadline_ns: monotonic, when the client stops waiting; 0 if it never does.
        asked: what the call's metadata ask; raises BadRequest if they cannot be read.
        caller: set by the method while it waits; abandoned by the engine when the client leaves.
    """

    received_ns: int
    deadline_ns: int
    caller: LoopCompletion | None

    @property
    def asked(self) -> Asked:
        """See the class."""


class StreamCall(Protocol):
    """A call with many messages both ways. One task may read while another writes.

    Attributes:
        deadline_ns: as in `GrpcCall`.
        asked: as in `GrpcCall`; of each message of the stream.
        held: what the stream has of the room for bodies. A message that was read counts no more unless the method takes it there,
            and gives it back; whatever is left at its end, the engine does.
        stopping: True once the server stops; the method then takes on nothing new and ends when it can.
    """

    deadline_ns: int
    stopping: bool
    held: HeldBody

    @property
    def asked(self) -> Asked:
        """See the class."""

    async def read(self) -> bytes | None:
        """The next message, None once the client has half-closed.

        Raises:
            Cancelled: the client has left.
            Unavailable: the server stops (also while this waits); answers in flight can still be written.
        """

    async def write(self, message: Message) -> None:
        """Send a message, waiting while the client reads slowly. Raises Cancelled if the client has left."""


UnaryMethod = Callable[[bytes, GrpcCall], Awaitable[Message]]
StreamMethod = Callable[[StreamCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Methods:
    """Everything a server answers to, by path ("/inference.GRPCInferenceService/ModelInfer").

    A method raises HeadraceError for what the client reads (`status.grpc_code`); anything else is a fault of ours, which the
    engine logs under a reference and answers with INTERNAL.

    Attributes:
        unary: one message in, one out.
        streams: messages in, messages out.
        asked_headers: what engines read of a call's metadata.
    """

    unary: Mapping[str, UnaryMethod]
    streams: Mapping[str, StreamMethod]
    asked_headers: AskedHeaders = field(default_factory=AskedHeaders)


class GrpcEngine(Protocol):
    """A gRPC server; made with `Methods`, limits and TLS files."""

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port (for `port` 0: the one that the system chose); raises OSError."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once (GOAWAY), wait at most `grace_s` for those that run, then end them with UNAVAILABLE."""
