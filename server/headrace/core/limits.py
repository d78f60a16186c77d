"""Limits on clients: sizes, counts and timeouts, with a counter of hits for each; formats of names that clients send.

The metrics have a counter for each limit, under its name. Most limits are options of `headrace serve`; three are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.core.errors import BadRequest, Overloaded, TooLarge

# Name of a shared memory region; equal for all protocols, since a region registered over one may be used over another.
REGION_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9_.:@+=, -]{0,127}$"

# Name of a client, in a header: visible ASCII, without a blank.
CLIENT_PATTERN = "^[!-~]{1,128}$"
# Default name of that header.
CLIENT_HEADER = "x-headrace-client"


def _limit(default: Any, text: str) -> Any:
    """Declare a limit that is an option, with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server. Fields that end in `_bytes` are bytes, in `_s` seconds; the others are counts or ratios.

    The defaults are far above the needs of honest clients and far below values that harm other clients. Limits without a help
    text are constants: no client and no model needs another value.

    Attributes:
        max_chunks: chunks of one HTTP body (Transfer-Encoding: chunked). A body of 128 MiB in chunks of 2 KiB has this many.
        max_json_depth: nested arrays and objects of a JSON body. NumPy has at most 64 dimensions.
        max_json_keys: keys of all objects of a JSON body. A request has about ten for each tensor.
    """

    max_body_bytes: int = _limit(128 << 20, "bytes of the body of one request, compressed or not")
    max_total_body_bytes: int = _limit(1 << 30, "bytes of the bodies of all requests in the server")
    max_header_bytes: int = _limit(16 << 10, "bytes of the headers of one request, or of its gRPC metadata")
    max_chunks: int = 65_536
    max_json_depth: int = 64
    max_json_keys: int = 4096
    max_unpack_ratio: int = _limit(
        200, "largest ratio of a decompressed body to the compressed one, beyond the first MiB"
    )
    max_connections: int = _limit(4096, "open connections, for HTTP and for gRPC each")
    max_streams: int = _limit(1024, "concurrent gRPC calls of one connection")
    header_timeout_s: float = _limit(
        20.0, "seconds for the headers of a request, from the connection or their first byte"
    )
    body_timeout_s: float = _limit(300.0, "seconds for the body of a request, from the end of its headers")
    stall_timeout_s: float = _limit(120.0, "seconds in which a client may read nothing of a response")

    def table(self) -> Mapping[str, float]:
        """Return every limit by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


LIMIT_HELP = {each.name: str(each.metadata["help"]) for each in fields(Limits) if each.metadata}
"""Help texts of the limits that are options, by name."""


class BodyMemory:
    """Reserved bytes of all request bodies in the server, over all protocols.

    Ownership: the event loop writes; the thread of a metrics scrape reads.

    Args:
        limits: the server's limits. `max_total_body_bytes` counts as at least `max_body_bytes`, so that any single allowed body
            fits.

    Attributes:
        reserved_bytes: bytes reserved now.
        requests: requests with at least one byte of a body reserved now.
        max_bytes: largest allowed sum.
    """

    __slots__ = ("max_bytes", "requests", "reserved_bytes")

    def __init__(self, limits: Limits) -> None:
        self.reserved_bytes = self.requests = 0
        self.max_bytes = max(limits.max_total_body_bytes, limits.max_body_bytes)


class BodyReservation:
    """Bytes of the server's `BodyMemory` that one request, or one stream of requests, has reserved.

    Ownership: the event loop. The caller of `ClientLimits.reserve` must call `end`.

    Args:
        client_limits: limits and counters of the request's protocol.
    """

    __slots__ = ("_bodies", "_client_limits", "_ended", "_reserved_bytes")

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits
        self._bodies = client_limits.bodies
        self._reserved_bytes = 0
        self._ended = False

    def check(self, size_bytes: int) -> None:
        """Check that `size_bytes` more bytes fit, without reserving them.

        Raises:
            Overloaded: they do not fit; the hit is counted.
        """
        bodies = self._bodies
        if bodies.reserved_bytes + size_bytes > bodies.max_bytes:
            self._client_limits.hit("max_total_body_bytes")
            raise Overloaded(
                f"the bodies of all requests in the server exceed max_total_body_bytes ({bodies.max_bytes} bytes together): "
                "retry later"
            )

    def grow(self, size_bytes: int) -> None:
        """Reserve `size_bytes` more bytes; a no-op after `end`.

        Raises:
            Overloaded: they do not fit and are not reserved; the hit is counted.
        """
        bodies = self._bodies
        if self._ended:
            return
        if bodies.reserved_bytes + size_bytes > bodies.max_bytes:
            self.check(size_bytes)
        bodies.reserved_bytes += size_bytes
        if not self._reserved_bytes and size_bytes:
            bodies.requests += 1
        self._reserved_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Release `size_bytes` of the reserved bytes."""
        if not self._ended:
            self._bodies.reserved_bytes -= size_bytes
            self._reserved_bytes -= size_bytes
            if not self._reserved_bytes and size_bytes:
                self._bodies.requests -= 1

    def end(self) -> None:
        """Release all reserved bytes at the end of the request; a second call is a no-op."""
        self._ended = True
        if self._reserved_bytes:
            self._bodies.requests -= 1
            self._bodies.reserved_bytes -= self._reserved_bytes
            self._reserved_bytes = 0


class ClientLimits:
    """The limits on the clients of one protocol, with counters.

    Ownership: the event loop writes; the thread of a metrics scrape reads.

    Args:
        limits: the server's limits; the defaults if None.
        protocol: "http" or "grpc".
        bodies: body memory of all protocols; None creates one for this protocol.

    Attributes:
        bodies: body memory.
        hits: number of hits by limit.
        connections: open connections; None if the protocol's engine does not report them.
    """

    __slots__ = ("bodies", "connections", "hits", "limits", "protocol")

    def __init__(self, limits: Limits | None = None, protocol: str = "http", bodies: BodyMemory | None = None) -> None:
        self.limits = limits or Limits()
        self.bodies = bodies or BodyMemory(self.limits)
        self.protocol = protocol
        self.hits = dict.fromkeys(self.limits.table(), 0)
        self.connections: int | None = None

    def hit(self, limit: str) -> None:
        """Count a hit of a limit."""
        self.hits[limit] += 1

    def too_large(self, limit: str, text: str) -> TooLarge:
        """Count a hit, and return the error for the client (413, RESOURCE_EXHAUSTED)."""
        self.hit(limit)
        return TooLarge(text)

    def refused(self, limit: str, text: str) -> BadRequest:
        """Count a hit, and return the error for the client (400, INVALID_ARGUMENT)."""
        self.hit(limit)
        return BadRequest(text)

    def reserve(self) -> BodyReservation:
        """Return an empty reservation for the body of a new request."""
        return BodyReservation(self)

    def enter(self) -> bool:
        """Count a new connection; False (and a hit) if it is over the limit. Call `leave` in either case."""
        self.connections = (self.connections or 0) + 1
        if self.connections <= self.limits.max_connections:
            return True
        self.hit("max_connections")
        return False

    def leave(self) -> None:
        """Count the end of a connection."""
        self.connections = (self.connections or 1) - 1
