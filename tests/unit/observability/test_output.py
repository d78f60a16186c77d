"""The output queue: writers never wait, order is kept, dropped lines are counted; limits on lines of one kind."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading

import pytest
from headrace.observability.output import LINE_INTERVAL_S, LineLimits, OutputQueue, QueuedStream, WaitingWriter

from tests.support.waiting import until


class Reader:
    """A pipe with a queued stream at its writing end."""

    def __init__(self, capacity_bytes: int) -> None:
        self.reader, writer = os.pipe()
        self.queue = OutputQueue(capacity_bytes)
        self.original = os.fdopen(writer, "w")
        self.stream: QueuedStream = self.queue.stream(self.original)
        self.text = ""

    def read(self) -> None:
        """Read until the pipe is closed."""
        with os.fdopen(self.reader) as file:
            self.text = file.read()

    def end(self) -> str:
        """Read everything and end the queue."""
        thread = threading.Thread(target=self.read)
        thread.start()
        assert self.queue.end()
        self.original.close()
        thread.join()
        return self.text


def test_lines_arrive_whole_and_in_order() -> None:
    reader = Reader(1 << 20)
    for number in range(1000):
        reader.stream.write(f"line {number}")
        reader.stream.write("\n")
    reader.stream.write("no end of line")
    assert reader.end().splitlines() == [*(f"line {number}" for number in range(1000)), "no end of line"]


def test_lines_over_the_capacity_are_dropped_at_their_place() -> None:
    reader = Reader(100_000)
    for number in range(5000):
        reader.stream.write(f"{number:05d} {'x' * 93}\n")
    reader_text = reader.end()
    lines = reader_text.splitlines()
    places = [index for index, line in enumerate(lines) if "were dropped" in line]
    dropped = sum(int(lines[index].split()[0]) for index in places)
    kept = [int(line[:5]) for index, line in enumerate(lines) if index not in places]
    assert dropped + len(kept) == 5000
    assert dropped > 2000
    assert kept == sorted(kept)
    missing = 0
    for index in places:
        missing += int(lines[index].split()[0])
        assert int(lines[index - 1][:5]) + 1 + int(lines[index].split()[0]) == (
            int(lines[index + 1][:5]) if index + 1 < len(lines) else 5000
        )
    assert missing == dropped


def test_the_end_does_not_wait_for_a_pipe_that_is_not_read() -> None:
    reader = Reader(1 << 20)
    for _ in range(2000):
        reader.stream.write("x" * 99 + "\n")
    assert not reader.queue.end(timeout_s=3)
    reader.stream.write("after the end\n")


def test_an_unread_stream_does_not_delay_the_other() -> None:
    unread, read = Reader(1 << 20), Reader(1 << 20)
    other = unread.queue.stream(read.original)
    for _ in range(2000):
        unread.stream.write("x" * 99 + "\n")
    other.write("read\n")
    assert os.read(read.reader, 100) == b"read\n"


def test_a_broken_pipe_loses_lines_only(tmp_path: object) -> None:
    del tmp_path
    reader = Reader(1 << 20)
    os.close(reader.reader)
    for _ in range(10):
        reader.stream.write("x\n")
    assert reader.queue.end()


def test_a_waiting_writer_drops_nothing() -> None:
    reader = Reader(50_000)
    content = b"".join(b"%05d %s\n" % (number, b"y" * 93) for number in range(3000))

    def write() -> None:
        writer, remaining = WaitingWriter(reader.stream), memoryview(content)
        while remaining:
            remaining = remaining[writer.write(remaining) :]

    thread = threading.Thread(target=write)
    thread.start()
    received = bytearray()
    while len(received) < len(content):
        received += os.read(reader.reader, 65536)
    thread.join()
    assert received == content


def test_without_a_descriptor_output_is_dropped() -> None:
    queue = OutputQueue()
    stream = queue.stream(None)
    stream.write("x\n")
    assert not stream.isatty()
    with pytest.raises(OSError, match="no file descriptor"):
        stream.fileno()
    assert queue.end()


class Clock:
    """A clock, and the calls that are due on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[float] = []

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("name", "allowed"), [("uvicorn.error", 1), ("headrace.http", 100), ("headrace.control", 1000)]
)
def test_lines_of_one_kind_are_limited(name: str, allowed: int) -> None:
    clock, stream = Clock(), io.StringIO()
    limits = LineLimits(lambda delay_s, _: clock.calls.append(delay_s), clock)
    logger, handler = logging.getLogger(name), logging.StreamHandler(stream)
    handler.addFilter(limits)
    logger.addHandler(handler)
    try:
        for number in range(1000):
            logger.warning("a request failed: %d", number)
        logger.warning("another kind")
        assert stream.getvalue().count("a request failed") == allowed
        assert "another kind" in stream.getvalue()
        assert len(clock.calls) == (allowed < 1000)
        clock.now_s = LINE_INTERVAL_S
        limits.report_ended()
        notice = f"{1000 - allowed} more lines like this one were left out within 10 s: a request failed: %d"
        assert (notice in stream.getvalue()) == (allowed < 1000)
        logger.warning("a request failed: %d", 1000)
        assert "a request failed: 1000" in stream.getvalue()
    finally:
        logger.removeHandler(handler)


def test_limits_hold_no_lock_while_they_log() -> None:
    """A handler's lock and that of the limits were taken in both orders: two threads that log could wait forever."""
    clock = Clock()
    free: list[bool] = []
    notices: list[str] = []

    def try_lock() -> None:
        free.append(limits._lock.acquire(timeout=1))
        if free[-1]:
            limits._lock.release()

    def observe() -> None:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()

    limits = LineLimits(lambda _delay_s, _callback: observe(), clock)
    logger, handler = logging.getLogger("uvicorn.error"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        if "more lines" in record.getMessage():
            notices.append(record.getMessage())
            observe()

    handler.emit = emit  # type: ignore[method-assign]
    handler.addFilter(limits)
    logger.addHandler(handler)
    try:
        for _ in range(2):
            logger.warning("a request failed")
        clock.now_s = LINE_INTERVAL_S
        for _ in range(3):
            logger.warning("a request failed")
        limits.report()
        assert len(notices) == 2
        assert free == [True] * 4
    finally:
        logger.removeHandler(handler)


def test_a_forked_child_writes_its_lines() -> None:
    """The thread that writes exists only in the parent: lines of the child vanished."""
    code = """
import logging, os, sys
from headrace.server.program import configure_logging
configure_logging("text")
print("parent before")
child = os.fork()
if not child:
    print("child prints")
    sys.stderr.write("child's error stream\\n")
    logging.getLogger("headrace").info("child logs")
    logging.getLogger("uvicorn.error").error("child's error")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["child prints", "parent after", "parent before"]
    for text in ("child's error stream", "child logs", "child's error"):
        assert done.stderr.count(text + "\n") == 1


def test_the_queue_calls_back_after_a_time() -> None:
    queue, called = OutputQueue(), threading.Event()
    queue.call_later(0.01, called.set)
    until(called.is_set)
    queue.end()


def test_nothing_is_lost_at_exit() -> None:
    code = """
import logging, sys
from headrace.server.program import configure_logging
configure_logging("text")
for number in range(5000):
    logging.getLogger("headrace").info("line %d", number)
print("on standard output")
raise ValueError("at the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stdout == "on standard output\n"
    assert done.stderr.count("INFO") == 5000
    assert done.stderr.rstrip().endswith("ValueError: at the end")
