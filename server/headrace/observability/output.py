"""Output queue: a thread writes standard output and standard error, so that no other thread blocks on them.

A write blocks while a pipe is full because its reader has stopped, while a terminal is stopped, or while a disk hangs. On the
event loop, one such write would stop all connections. Here every write is put into a bounded queue. If the queue is full, whole
lines are dropped and counted, and a line in their place says how many. `LineLimits` bounds the lines that clients can cause.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import TextIO

from headrace.core.threads import start_thread
from headrace.observability.labelled_counter import DROPPED

_KIND = "log"
CAPACITY_BYTES = 1 << 20
# A pipe that is ready accepts this many bytes without blocking (PIPE_BUF of Linux).
_PIPE_BYTES = 4096
# Most bytes that a writer that waits for room puts into the queue at once.
_PIECE_BYTES = 1 << 16
_POLL_MS = 100
# At the end of the process: time for all output, and time without progress after which the rest is given up.
END_TIMEOUT_S = 5.0
END_STALL_S = 1.0


class QueuedStream(io.TextIOBase):
    """A text stream whose `write` never blocks; takes the place of `sys.stdout` or `sys.stderr`.

    Incomplete lines wait for their end. Any thread may write.

    Args:
        queue: the queue whose thread writes.
        descriptor: file descriptor to write to; None drops all output.
        encoding: of the text.

    Attributes:
        dropped_line: makes the line that stands in the place of a number of dropped lines.
    """

    def __init__(self, queue: OutputQueue, descriptor: int | None, encoding: str = "utf-8") -> None:
        super().__init__()
        self._queue = queue
        self._encoding = encoding
        self._descriptor = descriptor
        self._is_file = descriptor is not None and stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.dropped_line: Callable[[int], str] = "{} lines were dropped: the output was not read in time\n".format
        # The rest is guarded by the queue's lock.
        self._partial = ""
        self._entries: deque[tuple[int, bytes | _Gap]] = deque()
        self._pending_bytes = 0
        self._is_full = False
        self._failed_lines = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the text."""
        return self._encoding

    def fileno(self) -> int:
        """Return the file descriptor; raises OSError if there is none."""
        if self._descriptor is None:
            raise OSError("this stream has no file descriptor")
        return self._descriptor

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Queue the complete lines of a text; returns its length."""
        self._queue.put(self, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the queue's thread writes every line at once."""


class WaitingWriter(io.RawIOBase):
    """Byte stream that waits for room in the queue of a stream instead of dropping lines; for a thread of its own.

    Args:
        stream: whose queue is used.
    """

    def __init__(self, stream: QueuedStream) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Queue some complete lines; waits for room. Returns the number of bytes, at most 64 KiB or one line."""
        piece = bytes(data[:_PIECE_BYTES])
        end = piece.rfind(b"\n") + 1
        if not end:
            piece = bytes(data)
            end = piece.find(b"\n") + 1 or len(piece)
        self._stream._queue.put_waiting(self._stream, piece[:end])
        return end


class _Gap:
    """Dropped lines, in the queue at their place; `is_final` once their number is being written."""

    __slots__ = ("is_final", "lines")

    def __init__(self) -> None:
        self.lines = 0
        self.is_final = False


class OutputQueue:
    """The queue of all streams and the thread that writes them.

    A stream that is not read never delays the other: the thread polls a descriptor before it writes to it. Lines of both streams
    are written in the order in which they came.

    Ownership: the lock guards the streams' entries. It is reentrant: a finalizer may log while the lock is held.

    Args:
        capacity_bytes: maximum bytes that wait for one stream.

    Raises:
        Unavailable: the thread cannot be started.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition(threading.RLock())
        self._numbers = count()
        self._streams: list[QueuedStream] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._written_bytes = 0
        self._is_ended = False
        self._before_end: list[Callable[[], None]] = []
        DROPPED.declare(_KIND)
        start_thread(threading.Thread(target=self._run, name="headrace-output", daemon=True))

    def stream(self, original: TextIO | None) -> QueuedStream:
        """Return a stream in the place of another one.

        Args:
            original: stream with a file descriptor; None if that is closed, then all output is dropped.
        """
        try:
            descriptor = None if original is None else original.fileno()
            stream = QueuedStream(self, descriptor, getattr(original, "encoding", None) or "utf-8")
        except (OSError, ValueError):
            stream = QueuedStream(self, None)
        self._streams.append(stream)
        return stream

    def put(self, stream: QueuedStream, text: str) -> None:
        """Queue the complete lines of a text, or drop and count them if the queue of the stream is full."""
        with self._changed:
            text = stream._partial + text
            end = text.rfind("\n") + 1
            if not end and len(text) > _PIECE_BYTES:
                end = len(text)
            stream._partial = text[end:]
            if not end:
                return
            data = text[:end].encode(stream._encoding, "backslashreplace")
            if self._is_ended:
                _write_now(stream, data)
                return
            limit = self._capacity_bytes // 2 if stream._is_full else self._capacity_bytes
            stream._is_full = stream._descriptor is None or stream._pending_bytes + len(data) > limit
            if stream._is_full:
                self._drop(stream, data.count(b"\n"))
            else:
                self._append(stream, data)

    def put_waiting(self, stream: QueuedStream, data: bytes) -> None:
        """Queue complete lines; waits for room, and drops them at the end of the process."""
        with self._changed:
            while stream._pending_bytes > self._capacity_bytes // 2 and not self._is_ended:
                self._changed.wait()
            if self._is_ended:
                _write_now(stream, data)
            elif stream._descriptor is not None:
                self._append(stream, data)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call a function on the queue's thread after a time in seconds; it must not block."""
        with self._changed:
            heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), callback))
            self._changed.notify_all()

    def before_end(self, callback: Callable[[], None]) -> None:
        """Call a function at the start of `end`."""
        self._before_end.append(callback)

    def end(self, timeout_s: float = END_TIMEOUT_S) -> bool:
        """Write the queued lines at the end of the process; later lines are written at once if that does not block.

        Returns:
            False if lines are lost: the time is over, or a stream accepted nothing for a second.
        """
        for callback in self._before_end:
            callback()
        start_s = last_s = time.monotonic()
        with self._changed:
            for stream in self._streams:
                if stream._partial:
                    self.put(stream, "\n")
            written_bytes = self._written_bytes
            while self._is_pending():
                self._changed.wait(0.05)
                now_s = time.monotonic()
                if self._written_bytes != written_bytes:
                    last_s, written_bytes = now_s, self._written_bytes
                elif now_s - last_s > END_STALL_S:
                    break
                if now_s - start_s > timeout_s:
                    break
            self._is_ended = True
            self._changed.notify_all()
            return not self._is_pending()

    def survive_fork(self) -> None:
        """Let children that this process forks write at once: the thread exists only in the parent. For the standard streams."""
        os.register_at_fork(
            before=self._changed.acquire, after_in_parent=self._changed.release, after_in_child=self._after_fork
        )

    def _after_fork(self) -> None:
        global _queue
        _queue = None
        for stream in self._streams:  # the parent writes the queued lines
            stream._entries.clear()
            stream._partial, stream._pending_bytes, stream._failed_lines = "", 0, 0
        self._timers.clear()
        self._is_ended = True  # for log handlers, which hold the queued streams
        self._changed.release()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream in self._streams and stream._descriptor is not None:
                plain = open(stream._descriptor, "w", 1, stream._encoding, "backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, plain)

    def _is_pending(self) -> bool:
        return any(stream._entries for stream in self._streams)

    # --- With the lock held -------------------------------------------------------------------------------------------

    def _append(self, stream: QueuedStream, data: bytes) -> None:
        stream._entries.append((next(self._numbers), data))
        stream._pending_bytes += len(data)
        self._changed.notify_all()

    def _drop(self, stream: QueuedStream, lines: int) -> None:
        DROPPED.count(_KIND, by=lines)
        if stream._descriptor is None:
            return
        last = stream._entries[-1][1] if stream._entries else None
        gap = last if isinstance(last, _Gap) and not last.is_final else _Gap()
        if gap is not last:
            stream._entries.append((next(self._numbers), gap))
        gap.lines += lines

    # --- On the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ended:
            self._call_due()
            with self._changed:
                waiting = sorted((stream._entries[0][0], stream) for stream in self._streams if stream._entries)
                if not waiting:
                    self._changed.wait(self._timers[0][0] - time.monotonic() if self._timers else None)
                    continue
            # Only this thread removes entries, so that the first ones stay.
            for _, stream in waiting:
                if _is_ready(stream, 0):
                    self._write_first(stream)
                    break
            else:
                _wait_until_ready([stream for _, stream in waiting])

    def _call_due(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            with self._changed:
                callback = heappop(self._timers)[2]
            callback()

    def _write_first(self, stream: QueuedStream) -> None:
        """Write the first entry of a stream, which is ready; of a pipe as much as it accepts without blocking."""
        with self._changed:
            number, entry = stream._entries[0]
            failed_lines, stream._failed_lines = stream._failed_lines, 0
            if isinstance(entry, _Gap):
                entry.is_final = True
                dropped_lines, data, lines = entry.lines + failed_lines, b"", 0
            else:
                dropped_lines, data, lines = failed_lines, entry, entry.count(b"\n")
        if dropped_lines:
            data = stream.dropped_line(dropped_lines).encode(stream._encoding, "backslashreplace") + data
        assert stream._descriptor is not None, "a stream without a descriptor has no entries"
        try:
            written = os.write(stream._descriptor, data if stream._is_file else data[:_PIPE_BYTES])
        except OSError:  # no reader, no terminal any more, a full disk: the next line tries again
            written = len(data)
            DROPPED.count(_KIND, by=lines)
            with self._changed:
                stream._failed_lines += dropped_lines + lines
        rest = data[written:]
        with self._changed:
            self._written_bytes += written
            stream._pending_bytes += len(rest) - (len(entry) if isinstance(entry, bytes) else 0)
            stream._entries.popleft()
            if rest:
                stream._entries.appendleft((number, rest))
            self._changed.notify_all()


def _is_ready(stream: QueuedStream, timeout_ms: int) -> bool:
    if stream._is_file or stream._descriptor is None:
        return True
    poll = select.poll()
    poll.register(stream._descriptor, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def _wait_until_ready(streams: list[QueuedStream]) -> None:
    poll = select.poll()
    for stream in streams:
        if stream._descriptor is not None:
            poll.register(stream._descriptor, select.POLLOUT)
    poll.poll(_POLL_MS)


def _write_now(stream: QueuedStream, data: bytes) -> None:
    """Write at the end of the process, after the thread; drops what would block."""
    with suppress(OSError):
        while data and stream._descriptor is not None and not stream._entries and _is_ready(stream, 0):
            data = data[os.write(stream._descriptor, data if stream._is_file else data[:_PIPE_BYTES]) :]


# Lines of one kind in each interval, by logger: of those that clients can cause. The loggers below a name share its number.
LINE_INTERVAL_S = 10.0
_LINES_PER_INTERVAL = {
    "asyncio": 1,
    "uvicorn": 1,
    "headrace.uncaught": 20,
    "py.warnings": 20,
    "headrace.grpc": 100,
    "headrace.http": 100,
    "headrace.http2": 100,
    "headrace.instance": 100,
    "headrace.isolated": 100,
    "headrace.model": 100,
}
_MAX_KIND_CHARS = 120
_MAX_KINDS = 1000
_IS_NOTICE = "headrace_is_notice"
# A kind of lines: logger, level, text without its values.
_Key = tuple[str, int, str]


class LineLimits(logging.Filter):
    """Limits warnings and errors of one kind in each interval; one line then says how many were left out.

    A kind is a logger, a level and the text without its values. Only loggers whose lines clients can cause are limited. A
    connection that sends garbage must not fill the disk, and formatting tracebacks must not fill the event loop.

    Any thread may log.

    Args:
        call_later: calls a function after a time in seconds; the function logs the numbers of lines left out.
        clock: seconds, monotonic.
    """

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._call_later = call_later
        self._clock = clock
        self._lock = threading.RLock()
        self._kinds: dict[_Key, _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is logged."""
        if record.levelno < logging.WARNING or hasattr(record, _IS_NOTICE):
            return True
        max_lines = _max_lines(record.name)
        if not max_lines:
            return True
        key = (record.name, record.levelno, str(record.msg).partition("\n")[0][:_MAX_KIND_CHARS])
        ended: list[tuple[_Key, _Kind]] = []
        with self._lock:
            now_s = self._clock()
            kind = self._kinds.get(key)
            if kind is None or now_s >= kind.end_s:
                if kind is not None:
                    ended.append((key, kind))
                elif len(self._kinds) >= _MAX_KINDS:
                    ended = list(self._kinds.items())
                    self._kinds.clear()
                kind = self._kinds[key] = _Kind(now_s + LINE_INTERVAL_S)
            kind.lines += 1
            lines = kind.lines
        # Without the lock: handlers and the queue have locks of their own.
        for each in ended:
            self._report(*each)
        if lines == max_lines + 1:
            self._call_later(kind.end_s - now_s, self.report_ended)
        return lines <= max_lines

    def report_ended(self) -> None:
        """Log the numbers of lines left out in intervals that have ended."""
        self.report(self._clock())

    def report(self, now_s: float = float("inf")) -> None:
        """Log the numbers of lines left out in intervals that have ended by a time, and begin new ones."""
        with self._lock:
            ended = [(key, kind) for key, kind in self._kinds.items() if now_s >= kind.end_s]
            for key, _ in ended:
                del self._kinds[key]
        for key, kind in ended:
            self._report(key, kind)

    def _report(self, key: _Key, kind: _Kind) -> None:
        name, level, text = key
        left_out = kind.lines - _max_lines(name)
        if left_out > 0:
            DROPPED.count(_KIND, by=left_out)
            message = "%d more lines like this one were left out within %g s: %s"
            logging.getLogger(name).log(level, message, left_out, LINE_INTERVAL_S, text, extra={_IS_NOTICE: True})


class _Kind:
    """Lines of one kind in one interval, which ends at `end_s`."""

    __slots__ = ("end_s", "lines")

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s
        self.lines = 0


def _max_lines(name: str) -> int:
    """Return the lines of one kind in an interval, 0 for no limit."""
    while name not in _LINES_PER_INTERVAL:
        name, _, _ = name.rpartition(".")
        if not name:
            return 0
    return _LINES_PER_INTERVAL[name]


_queue: OutputQueue | None = None


def queue_standard_streams() -> OutputQueue:
    """Put queued streams in the place of `sys.stdout` and `sys.stderr`; a second call returns the same queue.

    Raises:
        Unavailable: the thread cannot be started.
    """
    global _queue
    if _queue is None:
        _open_standard_descriptors()
        queue = OutputQueue()
        for original in (sys.stdout, sys.stderr):
            if original is not None:
                original.flush()
        sys.stdout, sys.stderr = queue.stream(sys.stdout), queue.stream(sys.stderr)
        _queue = queue
        queue.survive_fork()
        atexit.register(queue.end)
    return _queue


def _open_standard_descriptors() -> None:
    """Open /dev/null in the place of closed standard streams: a socket with number 2 would receive messages of native code."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)


def end_output() -> None:
    """Write the queued lines before `os._exit`."""
    if _queue is not None:
        _queue.end()


def standard_error_writer() -> io.RawIOBase | None:
    """Return a byte stream to the queued standard error, None if `sys.stderr` is not queued."""
    return WaitingWriter(sys.stderr) if isinstance(sys.stderr, QueuedStream) else None
