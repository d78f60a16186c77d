"""Attacks on the server's output: a log that is not read, and a log that hostile clients fill (S3 in docs/security.md)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.attacks import OPTIONS, Attacked, build, grpc_request, http_body, watched
from tests.support.serving import COMMAND, HOST, ROOT, Server, start_process
from tests.support.waiting import until

LINES = 3_000
GARBAGE = 200


class Pipe:
    """A pipe whose reading end can be left unread.

    Attributes:
        text: all that was read, line by line.
    """

    def __init__(self, folder: Path) -> None:
        self.reader, self.writer = os.pipe()
        self.path = folder / "output"
        self._is_reading = threading.Event()
        self._is_reading.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop reading."""
        self._is_reading.clear()

    def resume(self) -> None:
        """Read again."""
        self._is_reading.set()

    def join(self) -> str:
        """Wait for the end of the output and return all of it."""
        self.resume()
        self._thread.join(20)
        return self.path.read_text()

    def _read(self) -> None:
        with self.path.open("wb") as file:
            while data := os.read(self.reader, 65536):
                file.write(data)
                file.flush()
                self._is_reading.wait()


@contextmanager
def piped(folder: Path, *options: str) -> Iterator[tuple[Attacked, Pipe]]:
    """A server whose standard output and standard error are a pipe."""
    repository, pipe = build(folder / "models"), Pipe(folder)
    words = [*COMMAND, "serve", "--model-repository", str(repository), "--host", HOST, "--http-port", "0"]
    words += ["--grpc-port", "0", *OPTIONS, *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with open(pipe.writer, "wb") as stream:
        process = start_process(words, {**inherited, "HEADRACE_STATE_DIR": ""}, stream, stream)
    until(pipe.path.exists)
    server = Server(process, pipe.path)
    try:
        server.wait_until_ready()
        yield Attacked(server, repository), pipe
    finally:
        process.kill()
        process.wait()


def fail_often(server: Attacked) -> None:
    """Send failing requests until far more lines are due than a pipe and the server's queue hold."""
    body = json.dumps({"inputs": [], "id": "x" * 200}).encode()
    content = (
        b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    with server.connect() as wire:
        for _ in range(LINES // 10):
            wire.pour([content * 10])
            for _ in range(10):
                assert wire.answer()[0] == 400


def send_garbage(server: Attacked) -> None:
    for _ in range(GARBAGE):
        with socket.create_connection((HOST, server.server.port), timeout=10) as sock:
            sock.sendall(b"\x16\x03garbage\r\n\r\n")
            sock.recv(1000)


def test_a_pipe_that_is_not_read_blocks_nothing(tmp_path: Path) -> None:
    """Liveness, both protocols and SIGTERM work while standard output and standard error are a full pipe."""
    with piped(tmp_path, "--request-log", "all") as (server, pipe):
        with watched(server, "S3 log pipe unread") as watch:
            pipe.pause()
            fail_often(server)
            send_garbage(server)
            assert server.infer(http_body()) == (200, "")
            assert server.call(grpc_request()) == ("OK", "")
        watch.check()
        server.server.signal(signal.SIGTERM)
        start_s = time.monotonic()
        assert server.server.wait(20) == 0
        assert time.monotonic() - start_s < 15


def test_dropped_lines_are_counted_where_they_were(tmp_path: Path) -> None:
    """After the pipe is read again, a line in the place of the dropped ones says how many; the others are in order."""
    with piped(tmp_path, "--log-format", "json") as (server, pipe):
        before = dropped(server)
        pipe.pause()
        verbose = [json.dumps({"log_verbose_level": level}).encode() for level in (1, 0)]
        for number in range(20_000):
            # Every change is a line, which says what was changed.
            assert server.server.request("POST", "/v2/logging", verbose[number % 2])[0] == 200
            if number % 500 == 0 and dropped(server) - before > 100:
                break
        count = dropped(server) - before
        assert count > 100
        pipe.resume()
        until(lambda: "were dropped" in pipe.path.read_text())
        assert server.infer(http_body()) == (200, "")
        server.server.stop()
        lines = [json.loads(line) for line in pipe.join().splitlines()]
    messages = [line["message"] for line in lines]
    notices = [found for message in messages if (found := re.match(r"(\d+) lines of the log were dropped", message))]
    assert sum(int(found[1]) for found in notices) >= count
    times = [line["time"] for line in lines if "were dropped" not in line["message"]]
    assert times == sorted(times)


def dropped(server: Attacked) -> float:
    return sum(server.samples("headrace_telemetry_dropped_total", kind="log"))


def test_garbage_is_one_line_in_an_interval(attacked: Attacked) -> None:
    """Connections that send garbage are one line, and a second one with the number left out."""
    before = attacked.server.text.count("Invalid HTTP request received")
    with watched(attacked, "S3 garbage connections") as watch:
        send_garbage(attacked)
    watch.check()
    until(
        lambda: re.search(r"more lines like this one were left out .*Invalid HTTP", attacked.server.text), timeout_s=20
    )
    assert attacked.server.text.count("Invalid HTTP request received") - before <= 4
    attacked.still_serves()


def test_a_closed_standard_error(tmp_path: Path) -> None:
    """Without a standard error, or with one whose reader is gone, the server starts, serves and stops."""
    repository = build(tmp_path / "models")
    words = [*COMMAND, "serve", "--model-repository", str(repository), "--host", HOST, "--http-port", "0", "--no-grpc"]
    command = " ".join(words) + " --request-log all 2>&-"
    out = tmp_path / "out"
    with out.open("wb") as stream:
        process = subprocess.Popen(["sh", "-c", "exec " + command], cwd=ROOT, stdout=stream)
    server = Server(process, out)
    try:
        server.wait_until_ready()
        assert server.request("POST", "/v2/models/affine/infer", b"{}")[0] == 400
        server.stop()
    finally:
        process.kill()
        process.wait()


def test_a_pipe_without_a_reader_as_request_log_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = [*COMMAND, "serve", "--model-repository", str(tmp_path), "--http-port", "0", "--no-grpc"]
    done = subprocess.run(
        [*words, "--request-log-file", str(fifo)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
