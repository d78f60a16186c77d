"""Limits on clients: sizes, counts and timeouts, and how often each was reached; formats of names that clients send.

Every limit has its own count in the metrics, under its name. Most are options of `headrace serve`; three are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.core.errors import BadRequest, Overloaded, TooLarge

# Of a shared memory region; the same over every protocol, so that what one has registered the other can name.
REGION_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9_.:@+=, -]{0,127}$"

# Of a client, in a header: visible ASCII, without a blank.
CLIENT_PATTERN = "^[!-~]{1,128}$"
# ... and the header itself, unless the operator names another.
CLIENT_HEADER = "x-headrace-client"


def _limit(default: Any, text: str) -> Any:
    """A limit that is an option, with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server; what ends in bytes is bytes, in s seconds, the rest are numbers.

    The defaults are far above what honest clients need and far below what hurts the others. Limits without a help text are no
    options: no client and no model needs another value.

    Attributes:
        max_chunks: chunks of one HTTP body (Transfer-Encoding: chunked). As many as a body of 128 MiB has in chunks of 2 KiB.
        max_json_depth: arrays and objects inside of each other in a JSON body. NumPy has at most 64 dimensions.
        max_json_keys: keys of all objects in a JSON body. A request has about ten for each of its tensors.
    """

    max_body_bytes: int = _limit(128 << 20, "of one request, as it comes and unpacked")
    max_total_body_bytes: int = _limit(1 << 30, "of all requests that are in the server at once")
    max_header_bytes: int = _limit(16 << 10, "of the headers of one request, or gRPC's metadata")
    max_chunks: int = 65_536
    max_json_depth: int = 64
    max_json_keys: int = 4096
    max_unpack_ratio: int = _limit(200, "a compressed body's size unpacked to its size, beyond the first MiB")
    max_connections: int = _limit(4096, "open at once, for HTTP and for gRPC each")
    max_streams: int = _limit(1024, "gRPC calls at once on one connection")
    header_timeout_s: float = _limit(20.0, "for the headers of a request, from the connection or their first byte")
    body_timeout_s: float = _limit(300.0, "for the body of a request, from the end of its headers")
    stall_timeout_s: float = _limit(120.0, "without a client's reading anything of an answer")

    def table(self) -> Mapping[str, float]:
        """Every limit by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


LIMIT_HELP = {each.name: str(each.metadata["help"]) for each in fields(Limits) if each.metadata}
"""Help texts of the limits that are options, by name."""


class BodyMemory:
    """The bytes of all requests' bodies that are in the server at once, whatever protocol they came by.

    Ownership: the event loop; whoever asks for metrics reads.

    Args:
        limits: in force. A single body is never too much for all: `max_total_body_bytes` counts as no less than `max_body_bytes`.

    Attributes:
        reserved_bytes: now.
        max_bytes: at any time.
    """

    __slots__ = ("max_bytes", "reserved_bytes")

    def __init__(self, limits: Limits) -> None:
        self.reserved_bytes = 0
        self.max_bytes = max(limits.max_total_body_bytes, limits.max_body_bytes)


class BodyReservation:
    """What one request, or one stream of requests, has of the server's `BodyMemory`.

    Ownership: the event loop. Who has asked a `ClientLimits` for one must see to its `end`.

    Args:
        client_limits: where it is counted that the limit was reached.
    """

    __slots__ = ("_bodies", "_client_limits", "_ended", "_reserved_bytes")

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits
        self._bodies = client_limits.bodies
        self._reserved_bytes = 0
        self._ended = False

    def check(self, size_bytes: int) -> None:
        """Raise Overloaded, counted, if there is no room for so many bytes more."""
        bodies = self._bodies
        if bodies.reserved_bytes + size_bytes > bodies.max_bytes:
            self._client_limits.hit("max_total_body_bytes")
            raise Overloaded(
                f"the requests in the server have {bodies.max_bytes} bytes together, and no more are taken"
            )

    def grow(self, size_bytes: int) -> None:
        """So many bytes have come; after the end they count for nothing.

        Raises:
            Overloaded: there is no room for them, and they are not held; counted.
        """
        bodies = self._bodies
        if self._ended:
            return
        if bodies.reserved_bytes + size_bytes > bodies.max_bytes:
            self.check(size_bytes)
        bodies.reserved_bytes += size_bytes
        self._reserved_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """So many of the bytes that it holds are done with."""
        if not self._ended:
            self._bodies.reserved_bytes -= size_bytes
            self._reserved_bytes -= size_bytes

    def end(self) -> None:
        """The request is over: everything is given back. May be called again."""
        self._ended = True
        self._bodies.reserved_bytes -= self._reserved_bytes
        self._reserved_bytes = 0


class ClientLimits:
    """The limits on one protocol's clients, and how often each was reached.

    Ownership: the event loop writes, whoever asks for metrics reads.

    Args:
        limits: in force.
        protocol: "http" or "grpc".
        bodies: of all protocols; None: this one has them to itself.

    Attributes:
        bodies: those.
        hits: by limit, how often it was reached.
        connections: open now; None where it cannot be told.
    """

    __slots__ = ("bodies", "connections", "hits", "limits", "protocol")

    def __init__(self, limits: Limits | None = None, protocol: str = "http", bodies: BodyMemory | None = None) -> None:
        self.limits = limits or Limits()
        self.bodies = bodies or BodyMemory(self.limits)
        self.protocol = protocol
        self.hits = dict.fromkeys(self.limits.table(), 0)
        self.connections: int | None = None

    def hit(self, limit: str) -> None:
        """Count that a limit was reached."""
        self.hits[limit] += 1

    def too_large(self, limit: str, text: str) -> TooLarge:
        """Count it, and make the error that tells the client (413, RESOURCE_EXHAUSTED)."""
        self.hit(limit)
        return TooLarge(text)

    def refused(self, limit: str, text: str) -> BadRequest:
        """Count it, and make the error that tells the client (400, INVALID_ARGUMENT)."""
        self.hit(limit)
        return BadRequest(text)

    def reserve(self) -> BodyReservation:
        """Room for the body of a request that begins; nothing so far."""
        return BodyReservation(self)

    def enter(self) -> bool:
        """A connection was made; False, and counted, if it is one too many. Each needs its `leave` either way."""
        self.connections = (self.connections or 0) + 1
        if self.connections <= self.limits.max_connections:
            return True
        self.hit("max_connections")
        return False

    def leave(self) -> None:
        """A connection was lost."""
        self.connections = (self.connections or 1) - 1
