"""Limits on clients: sizes, counts and timeouts, with a counter of hits for each; formats of names that clients send.

The metrics have a counter for each limit, under its name. Most limits are options of `headrace serve`; some are constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import nsmallest
from typing import Any, ClassVar, Protocol

from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.errors import BadRequest, Overloaded, TooLarge

# Name of a shared memory region; equal for all protocols, since a region registered over one may be used over another.
REGION_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9_.:@+=, -]{0,127}$"

# Name of a client, in a header: visible ASCII, without a blank.
CLIENT_PATTERN = "^[!-~]{1,128}$"
# Default name of that header.
CLIENT_HEADER = "x-headrace-client"

# Bodies up to this size may use all of `max_total_body_bytes`; one part in SMALL_BODY_RESERVE of it is reserved for them.
SMALL_BODY_BYTES = 64 << 10
SMALL_BODY_RESERVE = 16
# While the bound is full, a client gives way that has been slower than `min_body_bytes_per_s` for this long.
GIVE_WAY_NS = 2 * NS_PER_S
# Shortest time over which a transfer rate is measured.
_RATE_INTERVAL_NS = NS_PER_S // 2
# Time in which the slow clients of all processes give way to a request that one process has refused.
_NEED_NS = 5 * NS_PER_S
# Most clients that give way to one request: each costs a few tens of microseconds.
_MAX_GIVEN_WAY = 64

# Largest number of connections over `max_connections`; liveness, readiness and metrics are served on them.
RESERVED_CONNECTIONS = 64
# One search of idle connections finds at most this many; a search takes some hundred microseconds.
_IDLE_CANDIDATES = 64
# Shortest time between two searches that find nothing.
_IDLE_SEARCH_NS = 50 * NS_PER_MS


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
        max_unread_bytes: responses of one connection that its client has not read; above, no inference starts on it.
        slow_body_s: time after which a body that arrives more slowly than `min_body_bytes_per_s` is refused.
    """

    max_body_bytes: int = _limit(128 << 20, "bytes of the body of one request, compressed or not")
    max_total_body_bytes: int = _limit(
        1 << 30, "bytes of the bodies of all requests in the server, and of responses that clients have not read"
    )
    max_json_bytes: int = _limit(32 << 20, "bytes of the JSON of one inference request over HTTP, without binary data")
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
    min_body_bytes_per_s: int = _limit(
        1024, "lowest rate of a body; slower for 20 s: refused; slower for 2 s while memory for bodies is full: refused"
    )
    slow_body_s: float = 20.0
    max_unread_bytes: int = 16 << 20
    stall_timeout_s: float = _limit(120.0, "seconds in which a client may read nothing of a response")

    def table(self) -> Mapping[str, float]:
        """Return every limit by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


LIMIT_NAMES = tuple(each.name for each in fields(Limits))
"""Names of all limits, in the order of their counters."""
LIMIT_HELP = {each.name: str(each.metadata["help"]) for each in fields(Limits) if each.metadata}
"""Help texts of the limits that are options, by name."""


class Cells(Protocol):
    """Numbers by index: a list in the memory of this process, or a view of memory that other processes read."""

    def __getitem__(self, index: int, /) -> int:
        """Return a number."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Store a number."""


class TransferRate:
    """Rate of one transfer, observed by the timer of its protocol.

    Args:
        transferred_bytes: so far.
        now_ns: monotonic nanoseconds.
        give_way: ends the transfer and releases its bytes; returns False, without effect, if the transfer is complete.

    Attributes:
        bytes_per_s: rate between the last two observations.
        give_way: see Args.
        slow_since_ns: begin of the time in which the transfer was slow; 0 if it is not slow.
    """

    __slots__ = ("_observed_ns", "_transferred_bytes", "bytes_per_s", "give_way", "slow_since_ns")

    def __init__(self, transferred_bytes: int, now_ns: int, give_way: Callable[[], bool]) -> None:
        self._transferred_bytes, self._observed_ns = transferred_bytes, now_ns
        self.give_way = give_way
        self.bytes_per_s = 0.0
        self.slow_since_ns = 0

    def observe(self, transferred_bytes: int, now_ns: int, min_bytes_per_s: int) -> None:
        """Update the rate, unless the last observation is very recent."""
        elapsed_ns = now_ns - self._observed_ns
        if elapsed_ns < _RATE_INTERVAL_NS:
            return
        self.bytes_per_s = (transferred_bytes - self._transferred_bytes) * NS_PER_S / elapsed_ns
        if self.bytes_per_s >= min_bytes_per_s:
            self.slow_since_ns = 0
        elif not self.slow_since_ns:
            self.slow_since_ns = self._observed_ns
        self._transferred_bytes, self._observed_ns = transferred_bytes, now_ns

    def is_slow(self, now_ns: int, time_ns: int) -> bool:
        """Return True if the transfer has been slow for `time_ns` or longer."""
        return self.slow_since_ns > 0 and now_ns - self.slow_since_ns >= time_ns


class BodyMemory:
    """Bytes of all request bodies in the server, and of responses that clients have not read, over all protocols.

    A request that does not fit is refused. Before that, the slowest clients give way: bodies that have stopped arriving, and
    connections that have stopped reading.

    A server of several processes has one body memory in each. Their sum obeys the limits: a process adds the bytes of the
    others before it reserves more than `unchecked_bytes`. A process that refuses a request writes the sum at which it would
    fit into its cells. The slow clients of all processes give way until the sum is as low: `give_way_to_all`.

    Ownership: the event loop writes; the thread of a metrics scrape reads.

    Args:
        limits: the server's limits. `max_total_body_bytes` counts as at least `max_body_bytes`, so that any single allowed body
            fits.
        cells: `CELLS` zeros that hold the figures; None for a list.
        others: cells of the server's other processes; empty for a single process.
        processes: processes that reserve bodies. Each may hold an equal share of one part in SMALL_BODY_RESERVE of the limit
            without a look at the others.

    Attributes:
        cells: reserved bytes, unread bytes and requests of this process, at the indexes `RESERVED`, `UNREAD` and `REQUESTS`; then
            the sum at which a refused request would fit and the time of the refusal, of bodies and of responses.
        max_bytes: largest allowed sum of the reserved and the unread bytes of all processes.
        max_large_bytes: largest sum that a body or a response above `SMALL_BODY_BYTES` may reach; the rest is for small ones.
        unchecked_bytes: sum of this process up to which every body fits.
        rates: transfers that a protocol observes now, by their reservation.
        allocate: returns memory for a large body, uint8[size], for its size and that of its header in bytes; None for memory of
            the process.
    """

    __slots__ = ("_others", "allocate", "cells", "max_bytes", "max_large_bytes", "rates", "unchecked_bytes")

    CELLS: ClassVar[int] = 7
    RESERVED: ClassVar[int] = 0
    UNREAD: ClassVar[int] = 1
    REQUESTS: ClassVar[int] = 2

    def __init__(
        self,
        limits: Limits,
        cells: Cells | None = None,
        others: Sequence[Cells] = (),
        processes: int = 1,
    ) -> None:
        self.cells: Cells = [0] * self.CELLS if cells is None else cells
        self._others = others
        self.max_bytes = max(limits.max_total_body_bytes, limits.max_body_bytes)
        self.max_large_bytes = max(self.max_bytes - self.max_bytes // SMALL_BODY_RESERVE, limits.max_body_bytes)
        self.unchecked_bytes = self.max_large_bytes
        if others:
            self.unchecked_bytes = self.max_bytes // SMALL_BODY_RESERVE // max(processes, 1)
        self.rates: dict[BodyReservation | UnreadResponses, TransferRate] = {}
        self.allocate: Callable[[int, int], Any] | None = (
            None  # NumPy is not imported here: `headrace health` needs none
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes that this process has reserved now for bodies."""
        return self.cells[0]

    @reserved_bytes.setter
    def reserved_bytes(self, size_bytes: int) -> None:
        self.cells[0] = size_bytes

    @property
    def unread_bytes(self) -> int:
        """Response bytes of this process that clients have not read."""
        return self.cells[1]

    @property
    def requests(self) -> int:
        """Requests of this process with at least one byte of a body reserved now."""
        return self.cells[2]

    def totals(self) -> tuple[int, int]:
        """Return the reserved and the unread bytes of all processes."""
        processes = (self.cells, *self._others)
        return sum([cells[0] for cells in processes]), sum([cells[1] for cells in processes])

    def make_room(self, size_bytes: int, now_ns: int, beneficiary: BodyReservation | UnreadResponses) -> bool:
        """Let the slowest clients give way until `size_bytes` are released; False, without effect, if they hold fewer.

        Then the clients of all processes give way, for a later attempt: see `give_way_to_all`.

        Args:
            size_bytes: to release.
            now_ns: monotonic nanoseconds.
            beneficiary: holder that needs the bytes. Only unread responses give way to unread responses.
        """
        kind, index = _NEEDS[isinstance(beneficiary, UnreadResponses)]
        if self._release(size_bytes, size_bytes, now_ns, kind, beneficiary):
            return True
        if self._others:
            if isinstance(beneficiary, BodyReservation):
                size_bytes += beneficiary.held_bytes  # which are released: the request is refused
            self.cells[index], self.cells[index + 1] = self._total(kind) - size_bytes, now_ns
        return False

    def give_way_to_all(self, now_ns: int) -> None:
        """Let slow clients of this process give way to requests that any process has refused; called twice a second.

        They do so if they hold an equal share, by the number of processes, of what is missing. If the slow clients of all
        processes hold enough together, those of one process hold as much.
        """
        processes = (self.cells, *self._others)
        for kind, index in _NEEDS:
            for cells in processes:
                missing_bytes = self._total(kind) - cells[index]
                if missing_bytes <= 0 and cells is self.cells:
                    cells[index + 1] = 0  # it fits now: others need not give way once its next attempt has the bytes
                elif missing_bytes > 0 and now_ns - cells[index + 1] < _NEED_NS:
                    self._release(missing_bytes, missing_bytes // len(processes) + 1, now_ns, kind)

    def _total(self, kind: type) -> int:
        """Return the bytes of all processes that holders of a kind may release."""
        reserved_bytes, unread_bytes = self.totals()
        return unread_bytes if kind is UnreadResponses else reserved_bytes + unread_bytes

    def _release(self, size_bytes: int, min_bytes: int, now_ns: int, kind: type, beneficiary: object = None) -> bool:
        """Let the slowest clients give way until `size_bytes` are released; without effect if they hold under `min_bytes`.

        Returns:
            True if `size_bytes` were released.
        """
        slowest = sorted(
            self._slow_holders(now_ns, kind, beneficiary), key=lambda each: (each[0].bytes_per_s, -each[1])
        )
        slowest = slowest[:_MAX_GIVEN_WAY]
        if sum(size for _, size in slowest) < min_bytes:
            return False
        target_bytes = self.reserved_bytes + self.unread_bytes - size_bytes
        for rate, _ in slowest:
            if self.reserved_bytes + self.unread_bytes <= target_bytes:
                break
            rate.give_way()
        return self.reserved_bytes + self.unread_bytes <= target_bytes

    def is_slow(self, holder: BodyReservation | UnreadResponses) -> bool:
        """Return True if the client of a transfer has been too slow for `GIVE_WAY_NS`."""
        rate = self.rates.get(holder)
        return rate is not None and rate.is_slow(monotonic_ns(), GIVE_WAY_NS)

    def _slow_holders(self, now_ns: int, kind: type, beneficiary: object) -> Iterator[tuple[TransferRate, int]]:
        """Yield the rate and the held bytes of each slow transfer that may give way."""
        for holder, rate in self.rates.items():
            if holder is not beneficiary and isinstance(holder, kind) and rate.is_slow(now_ns, GIVE_WAY_NS):
                yield rate, holder.held_bytes


class BodyReservation:
    """Bytes of the server's `BodyMemory` that one request, or one stream of requests, has reserved.

    A protocol whose body arrives in more than one part calls `observe` on each tick of its timer, once or a few times a second,
    and `pause` when it stops reading the body for reasons of its own. A body that is complete is no longer observed.

    Ownership: the event loop. The caller of `ClientLimits.reserve` must call `end`.

    Args:
        client_limits: limits and counters of the request's protocol.

    Attributes:
        held_bytes: bytes reserved now.
    """

    __slots__ = ("_bodies", "_client_limits", "_ended", "held_bytes")

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits
        self._bodies = client_limits.bodies
        self.held_bytes = 0
        self._ended = False

    def check(self, size_bytes: int) -> None:
        """Check that `size_bytes` more bytes fit, without reserving them. If they do not fit, slow clients give way.

        Raises:
            Overloaded: they do not fit; the hit is counted.
        """
        bodies = self._bodies
        is_small = self.held_bytes + size_bytes <= SMALL_BODY_BYTES
        limit_bytes = bodies.max_bytes if is_small else bodies.max_large_bytes
        reserved_bytes, unread_bytes = bodies.totals()
        if is_small:  # the reserve is for bodies only
            unread_bytes = min(unread_bytes, bodies.max_large_bytes)
        excess_bytes = reserved_bytes + unread_bytes + size_bytes - limit_bytes
        if excess_bytes > 0 and not bodies.make_room(excess_bytes, monotonic_ns(), self):
            self._client_limits.hit("max_total_body_bytes")
            raise Overloaded(
                f"the bodies of all requests in the server, and the responses that clients have not read, exceed "
                f"max_total_body_bytes ({bodies.max_bytes} bytes together): retry later"
            )

    def grow(self, size_bytes: int) -> None:
        """Reserve `size_bytes` more bytes; a no-op after `end`.

        Raises:
            Overloaded: they do not fit and are not reserved; the hit is counted.
        """
        bodies = self._bodies
        if self._ended:
            return
        cells = bodies.cells
        if cells[0] + cells[1] + size_bytes > bodies.unchecked_bytes:
            self.check(size_bytes)
        cells[0] += size_bytes
        if not self.held_bytes and size_bytes:
            cells[2] += 1
        self.held_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Release `size_bytes` of the reserved bytes."""
        if not self._ended:
            cells = self._bodies.cells
            cells[0] -= size_bytes
            self.held_bytes -= size_bytes
            if not self.held_bytes and size_bytes:
                cells[2] -= 1

    def observe(self, received_bytes: int, now_ns: int, give_way: Callable[[], bool]) -> bool:
        """Observe an incomplete body.

        Args:
            received_bytes: bytes of the body, or of the stream, that have arrived so far.
            now_ns: monotonic nanoseconds.
            give_way: refuses the request and calls `end`; returns False, without effect, if the body is complete.

        Returns:
            True if the body has been slower than `min_body_bytes_per_s` for `slow_body_s`: the protocol refuses it.
        """
        limits, rates = self._client_limits.limits, self._bodies.rates
        rate = rates.get(self)
        if rate is None:
            if not self._ended:
                rates[self] = TransferRate(received_bytes, now_ns, give_way)
            return False
        rate.observe(received_bytes, now_ns, limits.min_body_bytes_per_s)
        return rate.is_slow(now_ns, int(limits.slow_body_s * NS_PER_S))

    def pause(self) -> None:
        """Stop observing: the body is complete, or the server delays it."""
        self._bodies.rates.pop(self, None)

    def end(self) -> None:
        """Release all reserved bytes at the end of the request; a second call is a no-op."""
        self._ended = True
        bodies = self._bodies
        if bodies.rates:
            bodies.rates.pop(self, None)
        if self.held_bytes:
            cells = bodies.cells
            cells[2] -= 1
            cells[0] -= self.held_bytes
            self.held_bytes = 0


UNREAD_FULL = (
    "the responses that clients have not read exceed max_total_body_bytes together with this one: retry later, or request less "
    "at once"
)
"""Text of the error in place of a response that `UnreadResponses.admits` refuses."""


class UnreadResponses:
    """Response bytes of one connection that its client has not read; they count in the server's `BodyMemory`.

    They never make a response fail that fits. They make new requests fail, on all connections, while memory is full.

    Use by a protocol:

    - `update` with all bytes that the transport and the streams of the connection hold: when the transport pauses the writer,
      when it resumes it, on each tick of the timer, and with 0 when the connection is lost. A response that is written at once
      needs no call.
    - `admits` before a response above `SMALL_BODY_BYTES` is written or queued. If False, an error is sent instead of it.
    - `observe` on each tick, while bytes are unread.

    Ownership: the event loop.

    Args:
        client_limits: limits and counters of the connection's protocol.

    Attributes:
        held_bytes: bytes that the client has not read.
    """

    __slots__ = ("_bodies", "_client_limits", "_read_bytes", "held_bytes")

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits
        self._bodies = client_limits.bodies
        self.held_bytes = self._read_bytes = 0

    def update(self, size_bytes: int) -> None:
        """Set the number of unread bytes."""
        bodies, change = self._bodies, size_bytes - self.held_bytes
        bodies.cells[1] += change
        self.held_bytes = size_bytes
        if change < 0:
            self._read_bytes -= change
        if not size_bytes and bodies.rates:
            bodies.rates.pop(self, None)

    def admits(self, size_bytes: int) -> bool:
        """Return True if a response of `size_bytes` may be written: with it, all unread responses fit into `max_large_bytes`.

        If it does not fit, connections that read too slowly give way.
        """
        bodies = self._bodies
        excess_bytes = bodies.totals()[1] + size_bytes - bodies.max_large_bytes
        if excess_bytes <= 0 or bodies.make_room(excess_bytes, monotonic_ns(), self):
            return True
        self._client_limits.hit("max_total_body_bytes")
        return False

    def observe(self, now_ns: int, give_way: Callable[[], bool]) -> None:
        """Observe how fast the client reads: too slowly if the rest would take longer than `body_timeout_s`.

        Args:
            now_ns: monotonic nanoseconds.
            give_way: closes the connection, or resets its blocked streams, and calls `update`; returns False, without effect, if
                the client has read everything.
        """
        rates, limits = self._bodies.rates, self._client_limits.limits
        rate = rates.get(self)
        if rate is not None:
            min_bytes_per_s = max(limits.min_body_bytes_per_s, int(self.held_bytes / limits.body_timeout_s))
            rate.observe(self._read_bytes, now_ns, min_bytes_per_s)
        elif self.held_bytes:
            rates[self] = TransferRate(self._read_bytes, now_ns, give_way)


# Kinds of holders that give way to bodies and to responses, each with the index of its two cells in `BodyMemory`.
_NEEDS: tuple[tuple[type, int], ...] = ((object, 3), (UnreadResponses, 5))


class ClientLimits:
    """The limits on the clients of one protocol, with counters.

    Ownership: the event loop writes, codec threads count hits; the thread of a metrics scrape reads.

    Args:
        limits: the server's limits; the defaults if None.
        protocol: "http" or "grpc".
        bodies: body memory of all protocols; None creates one for this protocol.
        cells: `CELLS` zeros that hold the counters; None for a list.
        others: returns the connections of the protocol in the server's other processes; None for a single process.

    Attributes:
        bodies: body memory.
    """

    __slots__ = ("_cells", "_others", "bodies", "limits", "protocol")

    # Whether the protocol is served, the number of its connections, and the hits of each limit.
    CELLS: ClassVar[int] = 2 + len(LIMIT_NAMES)

    def __init__(
        self,
        limits: Limits | None = None,
        protocol: str = "http",
        bodies: BodyMemory | None = None,
        cells: Cells | None = None,
        others: Callable[[], int] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.bodies = bodies or BodyMemory(self.limits)
        self.protocol = protocol
        self._cells: Cells = [0] * self.CELLS if cells is None else cells
        self._others = others

    @property
    def hits(self) -> dict[str, int]:
        """Number of hits by limit, in this process."""
        return {limit: self._cells[index] for limit, index in _HITS.items()}

    @property
    def connections(self) -> int | None:
        """Open connections of this process; None if the protocol is not served."""
        return self._cells[1] if self._cells[0] else None

    @connections.setter
    def connections(self, connections: int | None) -> None:
        self._cells[0], self._cells[1] = connections is not None, connections or 0

    @property
    def all_connections(self) -> int:
        """Open connections of all processes of the server."""
        return self._cells[1] + (0 if self._others is None else self._others())

    def hit(self, limit: str) -> None:
        """Count a hit of a limit."""
        self._cells[_HITS[limit]] += 1

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

    @property
    def reserved_connections(self) -> int:
        """Connections over `max_connections` that wait for their first request, and as many that read their refusal."""
        return min(RESERVED_CONNECTIONS, self.limits.max_connections)

    def enter(self) -> bool:
        """Count a new connection; False (and a hit) if it is over the limit. Call `leave` in either case."""
        self._cells[0] = 1
        self._cells[1] += 1
        if self.all_connections <= self.limits.max_connections:
            return True
        self.hit("max_connections")
        return False

    def leave(self) -> None:
        """Count the end of a connection."""
        self._cells[1] = max(self._cells[1] - 1, 0)


_HITS = {limit: 2 + index for index, limit in enumerate(LIMIT_NAMES)}


class LimitedConnection(Protocol):
    """A connection of a protocol, as `ConnectionReserve` sees it."""

    def idle_rank(self) -> tuple[int, float] | None:
        """Return the rank in which idle connections, and those of slow clients, are closed, lowest first; None for others."""

    def close_idle(self) -> None:
        """Close the connection, which is idle."""

    def refuse_connection(self, with_response: bool) -> None:
        """Close a connection over the limit that has sent no complete request.

        Args:
            with_response: wait until the client has read the refusal; False closes at once behind it.
        """


class ConnectionReserve:
    """Connections of one listener, and those over its limit.

    A connection over the limit is accepted. The limit takes effect at its first request:

    - Requests that the protocol reserves, such as liveness, are answered, then the connection is closed.
    - For any other request the connection that has been idle for longest is closed: first connections without a request, then
      those between two requests, then those of clients that send or read too slowly. The new connection takes its place.
    - If no connection is idle, the request is refused.

    At most `ClientLimits.reserved_connections` connections over the limit wait for their first request; the oldest gives way
    to the next.

    Ownership: the event loop.

    Args:
        client_limits: the limit; counts the connections.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        self._limits = client_limits
        self._connections: dict[LimitedConnection, None] = {}
        self._over: dict[LimitedConnection, None] = {}
        self._candidates: deque[tuple[tuple[int, float], LimitedConnection]] = deque()
        self._next_search_ns = 0

    def add(self, connection: LimitedConnection) -> None:
        """Add a new connection within the limit."""
        self._connections[connection] = None

    def add_over(self, connection: LimitedConnection) -> None:
        """Add a new connection over the limit; closes the oldest such connection if there are too many."""
        self._over[connection] = None
        if len(self._over) > self._limits.reserved_connections:
            oldest = next(iter(self._over))
            del self._over[oldest]
            # A refused connection stays open until its client has read the response: that must be bounded too.
            over = self._limits.all_connections - self._limits.limits.max_connections
            oldest.refuse_connection(with_response=over <= 2 * self._limits.reserved_connections)

    def discard(self, connection: LimitedConnection) -> None:
        """Remove a closed connection."""
        if connection in self._connections:
            del self._connections[connection]
            self._next_search_ns = 0  # what the last search has found, that none is idle, was said of other connections
        self._over.pop(connection, None)

    def admit(self, connection: LimitedConnection) -> bool:
        """Give a connection over the limit a place; returns False if there is none."""
        if self._limits.all_connections > self._limits.limits.max_connections and not self._close_idle():
            return False
        self._over.pop(connection, None)
        self._connections[connection] = None
        return True

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest; returns False if none is idle."""
        while True:
            while self._candidates:
                rank, connection = self._candidates.popleft()
                if connection in self._connections and connection.idle_rank() == rank:
                    del self._connections[connection]
                    connection.close_idle()
                    return True
            now_ns = monotonic_ns()
            if now_ns < self._next_search_ns:
                return False
            idle = (
                (found_rank, number, each)
                for number, each in enumerate(self._connections)
                if (found_rank := each.idle_rank()) is not None
            )
            self._candidates.extend((found_rank, each) for found_rank, _, each in nsmallest(_IDLE_CANDIDATES, idle))
            if not self._candidates:
                self._next_search_ns = now_ns + _IDLE_SEARCH_NS
                return False
