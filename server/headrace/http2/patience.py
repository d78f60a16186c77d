"""Reading on later, where reading on now would refuse an honest peer.

A peer may cancel thousands of calls in one breath and open the next within its rights: by its own count none is open. Here the
methods of the cancelled ones need a few turns of the event loop to end. Until they have, the connection is not read, rather
than the new call refused. Work that does not end keeps nobody waiting for more than `TURNS` turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.http2.connection import Http2Connection

# From the reset of a stream to the end of its task: the completion's wake-up, the task's step, its callback; and one to spare.
TURNS = 4


class Patience:
    """Of one connection.

    Args:
        connection: whose reading is put off.
    """

    __slots__ = ("_connection", "_lingering", "_turns")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._lingering = 0
        self._turns = 0

    def wait(self) -> bool:
        """True if a new stream must wait, its frame and all behind it unread; they are read again by and by."""
        connection = self._connection
        if len(connection.streams) + connection.lingering < connection.limits.streams:
            return False
        if self._lingering and connection.lingering >= self._lingering:
            self._turns += 1
        else:
            self._turns = 0
        self._lingering = connection.lingering
        if self._turns >= TURNS or connection.closing or connection.transport.is_closing():
            self._lingering = self._turns = 0
            return False
        connection.transport.pause_reading()
        connection.loop.call_soon(self._read_on)
        return True

    def _read_on(self) -> None:
        connection = self._connection
        if not connection.transport.is_closing():
            connection.transport.resume_reading()
            connection.data_received(b"")
