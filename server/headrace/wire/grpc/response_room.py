"""Room for responses: inference waits on a connection whose client does not read its responses."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Callable

from headrace.core.clock import monotonic_ns
from headrace.core.errors import Overloaded
from headrace.core.limits import SMALL_BODY_BYTES, UNREAD_FULL, ClientLimits, UnreadResponses

# A connection may hold more than `max_unread_bytes` where the size of responses was not expected: up to this, or to two of the
# largest message. Above, the calls that still run are refused.
MIN_HELD_BYTES = 64 << 20
# Expected bytes up to which another call may start while nothing is unread. With one call more they are still below
# `MIN_HELD_BYTES`, at which honest calls would be refused.
_MAX_EXPECTED_BYTES = 32 << 20


def max_held_bytes(max_message_bytes: int) -> int:
    """Response bytes of one connection, or one stream, above which its running calls are refused."""
    return max(MIN_HELD_BYTES, 2 * max_message_bytes)


def unread_error() -> Overloaded:
    """Return the error of calls on a connection that has too many unread responses."""
    return Overloaded("the client has not read earlier responses on this connection: read them, then retry")


class ResponseRoom:
    """Response bytes of one connection: those that its client has not read, and those that running calls will produce.

    A call of a model with large responses reserves the expected size before it starts, and waits while the connection is over
    `max_unread_bytes`. So the bytes count from the start of a call, and not from its end. While the client has read all
    responses, the connection may expect more: its large calls run together.

    Expected bytes bound this connection only. The memory that all clients share counts bytes that exist: a model whose last
    response was large must not make the calls of other clients fail.

    Ownership: the event loop.

    Args:
        client_limits: limits and counters of the connection's protocol.
        give_way: see `UnreadResponses.observe`.

    Attributes:
        bodies: body memory of the server.
    """

    __slots__ = (
        "_closed", "_expected_bytes", "_give_way", "_max_bytes", "_queued_bytes", "_unread", "_unread_bytes",
        "_waiting", "bodies",
    )  # fmt: skip

    def __init__(self, client_limits: ClientLimits, give_way: Callable[[], bool]) -> None:
        self._unread, self.bodies = UnreadResponses(client_limits), client_limits.bodies
        self._max_bytes = client_limits.limits.max_unread_bytes
        self._give_way = give_way
        self._expected_bytes = self._queued_bytes = self._unread_bytes = 0
        self._closed = False
        self._waiting: deque[Future[None]] = deque()

    async def start(self, size_bytes: int) -> None:
        """Wait until the connection is within its bound, then reserve the expected size of a response; calls start in order.

        The caller must call `end` with the same size.
        """
        is_first = False
        while self._is_full or (self._waiting and not is_first):
            waiter: Future[None] = get_running_loop().create_future()
            if is_first:  # other responses were written between the call of `_wake` and this step
                self._waiting.appendleft(waiter)
            else:
                self._waiting.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the next call starts instead
                elif waiter in self._waiting:
                    self._waiting.remove(waiter)
                raise
            is_first = True
        self._expected_bytes += size_bytes
        self._wake()

    def end(self, size_bytes: int) -> None:
        """Release the bytes of `start`: the size of the response is known, or the call has failed."""
        self._expected_bytes -= size_bytes
        self._wake()

    def queue(self, change_bytes: int) -> None:
        """Change the number of bytes of responses that wait in a stream for earlier ones, or for the client."""
        self._queued_bytes += change_bytes
        self._update()

    @property
    def unread_bytes(self) -> int:
        """Bytes that are written and not read."""
        return self._unread_bytes

    def admit(self, size_bytes: int) -> None:
        """Check that a response may be written; raises Overloaded if memory for unread responses is full."""
        if size_bytes > SMALL_BODY_BYTES and not self._unread.admits(size_bytes):
            raise Overloaded(UNREAD_FULL)

    def update(self, unread_bytes: int) -> None:
        """Set the number of bytes that are written and not read."""
        self._unread_bytes = unread_bytes
        self._update()
        if not self._closed:
            self._unread.observe(monotonic_ns(), self._give_way)

    @property
    def is_slow(self) -> bool:
        """True if the client has read too slowly for `GIVE_WAY_NS`."""
        return self.bodies.is_slow(self._unread)

    def close(self) -> None:
        """Release everything: the connection is closed. Calls that end later change nothing."""
        self._closed = True
        self._unread.update(0)

    def _update(self) -> None:
        if self._closed:
            return
        self._unread.update(self._unread_bytes + self._queued_bytes)
        self._wake()

    @property
    def _is_full(self) -> bool:
        """True if no further call with a large response may start."""
        held_bytes = self._unread.held_bytes
        max_bytes = self._max_bytes if held_bytes else max(self._max_bytes, _MAX_EXPECTED_BYTES)
        return held_bytes + self._expected_bytes > max_bytes

    def _wake(self) -> None:
        """Let the next call start. It reserves its size in the next iteration of the event loop, and wakes the one after it."""
        waiting = self._waiting
        while waiting and not self._is_full:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
