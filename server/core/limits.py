"""What clients may send and how long they may take: one table of limits, and a count of who ran into which.

Every limit is an option of `headrace serve` under its own name, and the label of its count in the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from server.core.errors import BadRequest, TooLarge


def _limit(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server; what ends in bytes is bytes, in s seconds, the rest are numbers.

    The defaults are far above what honest clients need and far below what hurts the others.
    """

    max_body_bytes: int = _limit(128 << 20, "of one request, as it comes and unpacked")
    max_header_bytes: int = _limit(16 << 10, "of the headers of one request, or gRPC's metadata")
    max_chunks: int = _limit(65_536, "chunks of one HTTP body (Transfer-Encoding: chunked)")
    max_json_depth: int = _limit(64, "arrays and objects inside of each other in a JSON body")
    max_json_keys: int = _limit(4096, "keys of all objects in a JSON body")
    max_unpack_ratio: int = _limit(200, "a compressed body's size unpacked to its size, beyond the first MiB")
    max_connections: int = _limit(4096, "open at once, for HTTP and for gRPC each")
    max_streams: int = _limit(1024, "gRPC calls at once on one connection")
    header_timeout_s: float = _limit(20.0, "for the headers of a request, from the connection or their first byte")
    body_timeout_s: float = _limit(300.0, "for the body of a request, from the end of its headers")
    stall_timeout_s: float = _limit(120.0, "without a client's reading anything of an answer")

    def table(self) -> Mapping[str, float]:
        """Every limit by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


LIMIT_HELP = {each.name: str(each.metadata["help"]) for each in fields(Limits)}


class Door:
    """The limits on one protocol's clients, and how often each was reached.

    Ownership: the event loop writes, whoever asks for metrics reads.

    Args:
        limits: in force.
        protocol: "http" or "grpc".

    Attributes:
        hits: by limit, how often it was reached.
        connections: open now; None where it cannot be told.
    """

    __slots__ = ("connections", "hits", "limits", "protocol")

    def __init__(self, limits: Limits | None = None, protocol: str = "http") -> None:
        self.limits = limits or Limits()
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
