"""One request and its answer, as the application sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from headrace.http2.frames import ErrorCode, window_update

if TYPE_CHECKING:
    from headrace.http2.connection import Http2Connection


class Stream(ABC):
    """To be subclassed by the application: `received`, `lost` and `too_slow` are called by the connection.

    Ownership: the event loop. A stream is in `connection.streams` until both sides are done or one has reset it; afterwards it
    is `gone`, and nothing it sends gets anywhere.

    Attributes:
        stream_id: of HTTP/2.
        send_window: bytes that the peer still takes of this stream.
        receive_window: bytes that the peer may still send.
        remote_open: False once the peer has sent END_STREAM.
        gone: True once nothing more can be sent.
        receiving: True while the application lacks a part of a body that it needs.
        since: the connection's epoch when `receiving` began or, if answers are blocked, when last a part of them went out.
        granted_bytes: see `Grants`.
        pending: parts of the answer that the windows hold back, None if there never were any.
        pending_bytes: their size.
        ending: the frames that end the stream, to go out behind `pending`; b"" if it goes on.
        queued: True while the outbox has this stream in its round.
    """

    __slots__ = (
        "connection",
        "ending",
        "gone",
        "granted_bytes",
        "pending",
        "pending_bytes",
        "queued",
        "receive_window",
        "receiving",
        "remote_open",
        "send_window",
        "since",
        "stream_id",
    )

    def __init__(self, connection: Http2Connection, stream_id: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.send_window = connection.outbox.initial_window
        self.receive_window = connection.limits.stream_window_bytes
        self.remote_open = True
        self.gone = False
        self.receiving = True
        self.since = connection.epoch
        self.granted_bytes = 0
        self.pending: deque[memoryview] | None = None
        self.pending_bytes = 0
        self.ending = b""
        self.queued = False

    @abstractmethod
    def received(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Bytes `start` to `stop` of `data` came as a part of the body; `end` with the last of them."""

    @abstractmethod
    def lost(self) -> None:
        """The peer has reset the stream or is gone; the stream is `gone` already."""

    @abstractmethod
    def too_slow(self) -> None:
        """The peer has not sent, or not read, what it should have in time."""

    def flushed(self) -> None:  # noqa: B027 - to be overridden by who waits for it, not by all
        """Something pending went out."""

    def expect(self, size_bytes: int) -> None:
        """The body needs `size_bytes` more than have come: see that the peer may send them."""
        missing = size_bytes - self.receive_window
        if missing > 0:
            self.connection.grants.ask(self, missing)

    def open_window(self, size_bytes: int) -> None:
        """Let the peer send `size_bytes` more."""
        if self.remote_open and not self.gone:
            self.receive_window += size_bytes
            self.connection.outbox.control(window_update(self.stream_id, size_bytes))

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once, whatever is pending."""
        if not self.gone:
            self.connection.reset(self.stream_id, code)
