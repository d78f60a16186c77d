"""Interface between the gRPC server and the services: methods on serialized messages.

The server (`server`) implements HTTP/2, deadlines and message framing, and is independent of inference. The services
(`service`) implement inference and control, and are independent of HTTP/2. Messages are serialized protobuf on both sides, so
that the hot path needs no message objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.core.completion import LoopCompletion
from headrace.core.limits import BodyReservation
from headrace.wire.grpc.response_room import ResponseRoom
from headrace.wire.requests.codec_threads import CodecThreads
from headrace.wire.requests.request_options import RequestOptions, RequestOptionsReader

# The parts of one serialized message, in order.
Message = list[bytes | memoryview]
# A serialized request; a large one for a `DirectMethod` may be a memoryview.
RequestMessage = bytes | memoryview


class GrpcCall(Protocol):
    """A unary call, as its method sees it.

    Attributes:
        received_ns: monotonic time at which the request had arrived.
        deadline_ns: monotonic time at which the client stops waiting; 0 for none.
        completion: completion for which the method waits, set by the method. The server settles or abandons it when the client
            disconnects.
        load_report: serialized report for the trailer `endpoint-load-metrics-bin`, set by the method; b"" for none.
    """

    received_ns: int
    deadline_ns: int
    completion: LoopCompletion | None
    load_report: bytes

    @property
    def options(self) -> RequestOptions:
        """Request options from the call's metadata; raises BadRequest if they are invalid."""

    @property
    def room(self) -> ResponseRoom:
        """Room for responses of the connection, in which a large response is reserved before its inference starts."""

    @property
    def peer(self) -> str:
        """Address of the client, host:port."""

    def admit(self, size_bytes: int) -> None:
        """Check that a response of this size may be written; raises Overloaded if memory for unread responses is full."""


class StreamCall(Protocol):
    """A call with a stream of messages in both directions. One task may read while another writes.

    Attributes:
        deadline_ns: as in `GrpcCall`.
        load_report: as in `GrpcCall`; sent at the end of the stream.
        reservation: of the stream in the budget for all bodies. `read` releases the bytes of its message; a method that
            keeps the message must grow the reservation and shrink it again. The server releases the rest when the call ends.
        stopping: True once the server stops. The method then accepts no new request and ends as soon as it can.
        take: set by the method to take messages while `read` waits, without resuming its task; returns False for a message that
            `read` must return.
    """

    deadline_ns: int
    stopping: bool
    reservation: BodyReservation
    load_report: bytes
    take: Callable[[bytes], bool] | None

    @property
    def options(self) -> RequestOptions:
        """Request options for each message of the stream; raises BadRequest if they are invalid."""

    @property
    def room(self) -> ResponseRoom:
        """Room for responses of the connection, as in `GrpcCall`."""

    async def read(self) -> bytes | None:
        """Wait for the next message; None once the client has half-closed.

        Raises:
            Cancelled: the client disconnected.
            Unavailable: the server stops, also during the wait; responses can still be written.
        """

    def write_now(self, message: Message, *, last: bool) -> bool:
        """Send a message if that is possible without a wait; returns False, with nothing sent, if it needs `write`.

        Args:
            message: to send.
            last: True if no other message follows soon: it is not held back to join the next one.
        """

    async def write(self, message: Message) -> None:
        """Send a message, after a wait if the client reads slowly (backpressure).

        Raises:
            Cancelled: the client disconnected.
        """


class StartedRequest(Protocol):
    """A request of a `DirectMethod`.

    Attributes:
        completion: settled when the request is done.
    """

    completion: LoopCompletion


class DirectMethod(Protocol):
    """A unary method in two synchronous halves, which run without a task: the completion of the request calls back."""

    def start(self, message: RequestMessage, call: GrpcCall) -> StartedRequest | None:
        """Start a request; None if it needs the coroutine in `Methods.unary`. Raises as the coroutine."""

    def end(self, request: Any, call: GrpcCall) -> Message | Awaitable[Message]:
        """Return the response to a started request of `call` whose completion is settled, once; raises as the coroutine.

        The response is an awaitable if it is encoded on another thread.
        """


UnaryMethod = Callable[[bytes, GrpcCall], Awaitable[Message]]
StreamMethod = Callable[[StreamCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Methods:
    """All methods of a server by path, such as "/inference.GRPCInferenceService/ModelInfer".

    A method raises HeadraceError for errors that the client reads (`status.grpc_code`). Any other exception is an error of the
    server: it is logged with a reference and responds with INTERNAL.

    Attributes:
        unary: methods with one request and one response message.
        streams: methods with streams of messages in both directions.
        options_reader: parser of the request options in a call's metadata.
        open_paths: methods that callers without a key may call. Their implementation checks the permission if it depends on
            the message.
        direct: some methods of `unary`, which need no task.
        codec_threads: decompress large messages.
    """

    unary: Mapping[str, UnaryMethod]
    streams: Mapping[str, StreamMethod]
    options_reader: RequestOptionsReader = field(default_factory=RequestOptionsReader)
    open_paths: Collection[str] = ()
    direct: Mapping[str, DirectMethod] = field(default_factory=dict)
    codec_threads: CodecThreads = field(default_factory=CodecThreads)
