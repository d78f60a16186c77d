"""Redis servers for tests: Debian's, in a process of its own, and one that sends what a test writes."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.support.certificates import Certificates
from tests.support.processes import stop
from tests.support.serving import HOST, free_port
from tests.support.tools import tool


@dataclass
class RedisServer:
    """A Redis server in a process.

    Attributes:
        port: its port.
        process: the process.
        client: a client of the test.
    """

    port: int
    process: subprocess.Popen[bytes]
    client: redis.Redis

    @property
    def option(self) -> str:
        """Value of `--cache-config`."""
        return f"redis,host={HOST},port={self.port}"

    @property
    def patient_option(self) -> str:
        """The same for tests of answers: on a busy machine some come after the 5 ms for which a request waits by default, and
        after the 100 ms with which a connection ends."""
        return f"{self.option},wait_timeout=1000,socket_timeout=60000"

    def pause(self) -> None:
        """Stop the process; its connections stay open."""
        stop(self.process.pid)

    def resume(self) -> None:
        """Let the process go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait(60)

    def values(self) -> dict[bytes, bytes]:
        """All responses by key."""
        keys: list[bytes] = list(self.client.scan_iter("headrace:*"))
        return {key: self.client.get(key) for key in keys}  # type: ignore[misc]


@contextmanager
def redis_server(
    folder: Path, *options: str, port: int = 0, password: str = "", certificates: Certificates | None = None
) -> Iterator[RedisServer]:
    """Start Debian's Redis.

    Args:
        folder: folder of the process and its log.
        options: more options of the command line.
        port: its port; 0 for a free one.
        password: its password; "" for none.
        certificates: the port has TLS with the server's certificate; None for no TLS.
    """
    port = port or free_port()
    ports = ["--port", str(port)] if certificates is None else _tls_words(port, certificates)
    command = [tool("redis-server"), *ports, "--bind", HOST, "--save", "", "--appendonly", "no", *options]
    if password:
        command += ["--requirepass", password]
    with (folder / f"redis-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    client = redis.Redis(
        HOST, port, password=password or None, **({} if certificates is None else _client_tls(certificates))
    )
    try:
        wait_for(client.ping)
        yield RedisServer(port, process, client)
    finally:
        client.close()
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(60)


def _tls_words(port: int, certificates: Certificates) -> list[str]:
    files = {
        "cert": certificates.server.certificate,
        "key": certificates.server.key,
        "ca-cert": certificates.authority,
    }
    words = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
    return ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *words]


def _client_tls(certificates: Certificates) -> dict[str, Any]:
    pair = certificates.client
    files = {"ca_certs": certificates.authority, "certfile": pair.certificate, "keyfile": pair.key}
    return {"ssl": True} | {f"ssl_{name}": str(path) for name, path in files.items()}


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; errors of a connection count as no."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, redis.RedisError):
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError(f"{condition} did not hold in {timeout_s} s")


Reply = Callable[[bytes], bytes | None]
"""Returns what is sent for a command's bytes; None closes the connection."""


@contextmanager
def false_redis(reply: Reply) -> Iterator[int]:
    """A server that answers with what `reply` returns; yields its port.

    Each received piece counts as one command, since its client waits for each answer.
    """
    listener = socket.create_server((HOST, 0))
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while content := connection.recv(1 << 16):
                answer = reply(content)
                if answer is None:
                    return
                connection.sendall(answer)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                start(serve, connection)

    def start(target: Callable[..., None], *args: socket.socket) -> None:
        threads.append(threading.Thread(target=target, args=args, daemon=True))
        threads[-1].start()

    start(accept)
    try:
        yield int(listener.getsockname()[1])
    finally:
        # A close alone ends no call: one that a signal interrupts goes on with the next socket of the same number.
        for each in (listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(60)
        for each in (listener, *connections):
            each.close()
