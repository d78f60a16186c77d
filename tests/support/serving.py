"""A real `headrace serve` in a process of its own, on a free port, stopped by SIGTERM and held to exit status 0."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from headrace.inference.scheduling.latency_table import WINDOW

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.processes import children, processor_s

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
COMMAND = (sys.executable, "-m", "headrace")
# For tests with a bound of memory: a fork counts the files of its libraries (17 MB) as resident only once it reads them.
INTERPRETER = (sys.executable, "-u", "-m", "headrace")
# Loading goes on while other tests use the cores; a hanging server must still fail before pytest's own timeout.
READY_TIMEOUT_S = 180.0  # a server with front ends took 84 s on two cores at load 20
STOP_TIMEOUT_S = 30.0

_BANNER = re.compile(r"Headrace listens on https?://\S+?:(\d+)\s")
_GRPC = re.compile(r'(?:gRPC: |"grpc": ")\S+?:(\d+)')
# The end of the banner as text, and as a line of a JSON log.
_BANNER_END = re.compile(r'Ctrl-C stops it\.|"event": "listening".*\}\n')


# Below the ports that systems give to sockets of port 0.
_FIRST_PORT, _PORTS = 20_000, 12_000
# Each process begins elsewhere, so that a run seldom meets ports that another one has just left.
_ports = iter([_FIRST_PORT + (101 * os.getpid() + number) % _PORTS for number in range(_PORTS)])
_claims: list[int] = []


def accepts(port: int) -> bool:
    """True while something accepts connections on a port of this host."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
        return True
    return False


def free_port() -> int:
    """A free port, for programs that cannot choose one themselves.

    No port is handed out twice, neither to this process nor, while it runs, to another one of the same user that runs tests: a
    worker of pytest-xdist, or a run in another checkout.
    """
    for port in _ports:
        if not _claim(port):
            continue
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            return port
    raise AssertionError("no port is free")


def _claim(port: int) -> bool:
    """Lock the byte of a port in a file that all test processes of the user share; False if another process has it.

    The system releases the lock when the process ends. Child processes do not inherit it.
    """
    if not _claims:
        path = Path(tempfile.gettempdir(), f"headrace-test-ports-{os.getuid()}")
        _claims.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        fcntl.lockf(_claims[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


class ServerFailed(AssertionError):
    """The server did not start, died, or did not stop as it should; the text has its log."""


@dataclass
class Server:
    """A server process.

    Attributes:
        process: the child process.
        log: the file with its standard output and standard error.
        port: HTTP port; 0 before the banner is read.
        grpc_port: gRPC port; 0 before the banner is read, and without gRPC.
    """

    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path
    port: int = 0
    grpc_port: int = 0

    @property
    def address(self) -> str:
        """host:port of HTTP, as tritonclient takes it."""
        return f"{HOST}:{self.port}"

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC, as tritonclient takes it."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def url(self) -> str:
        """URL of the HTTP server."""
        return f"http://{self.address}"

    @property
    def text(self) -> str:
        """Output of the server so far."""
        return self.log.read_text(errors="replace")

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for the banner, which comes when all models are loaded, and read the ports from it.

        Raises:
            ServerFailed: the process ended, or said nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        while (result := _BANNER.search(text := self.text)) is None or _BANNER_END.search(text) is None:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server exited with {self.process.returncode} at its start:\n{self.text}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server was not ready within {timeout_s:g} s:\n{self.text}")
            time.sleep(0.02)
        self.port = int(result[1])
        grpc = _GRPC.search(text)
        self.grpc_port = int(grpc[1]) if grpc is not None else 0

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One HTTP request on a connection of its own: status, headers (names in lower case) and body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        """End the process, if it still runs."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the process to end; its exit status.

        Raises:
            ServerFailed: it still runs after `timeout_s`; it is killed.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ServerFailed(f"the server still ran after {timeout_s:g} s:\n{self.text}") from None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, then the process must end with status 0 in time.

        Raises:
            ServerFailed: it had ended before, or does not end so.
        """
        if self.process.poll() is not None:
            raise ServerFailed(f"the server died with {self.process.returncode}:\n{self.text}")
        self.signal(signal.SIGTERM)
        status = self.wait(timeout_s)
        if status != 0:
            raise ServerFailed(f"the server exited with {status} after SIGTERM, expected 0:\n{self.text}")


def front_ends() -> tuple[str, ...]:
    """Options for the front-end processes of all servers, from TEST_FRONT_ENDS: runs the end-to-end tests against them."""
    number = os.environ.get("TEST_FRONT_ENDS", "")
    return ("--front-ends", number) if number else ()


def start(
    repository: Path | str,
    log: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
) -> Server:
    """Start `headrace serve` on free ports and return at once; the caller must see to its end, e.g. by a `with`.

    Args:
        repository: the model repository, or its URL; a second one can be named in `options`.
        log: file for what the server prints.
        options: of `headrace serve`; a later `--http-port` or `--grpc-port` takes the place of the free one.
        env: environment variables to add; the test's own HEADRACE_ variables never reach the server.
        command: what comes before `serve`. A fork stands for a new interpreter where both run alike.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    inherited["HEADRACE_STATE_DIR"] = ""  # no test finds what another one left behind
    ports = ["--host", HOST, "--http-port", "0", "--grpc-port", "0"]
    words = [*command, "serve", "--model-repository", str(repository), *ports, *front_ends(), *options]
    whole = {**inherited, "COLUMNS": "200", **(env or {})}
    with log.open("wb") as stream:
        return Server(start_process(words, whole, stream, stream), log)


def start_process(
    words: Sequence[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes], cwd: Path = ROOT
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a command with an empty standard input, by a fork where it runs alike.

    Args:
        words: program and arguments, such as `COMMAND` and a command of `headrace`.
        env: the whole environment.
        output, errors: files for standard output and standard error.
        cwd: current folder of the command.
    """
    if sys.platform == "linux" and _fork_server().can_start(words[:3], env):
        return _fork_server().start(words, cwd, env, output, errors)
    return subprocess.Popen(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)


def run_headrace(
    *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command of `headrace` to its end, by a fork where it runs alike, and return its status and output.

    Args:
        words: the command and its arguments.
        env: the whole environment; None for that of the test without HEADRACE_ variables.
        cwd: current folder of the command.
        timeout_s: time after which it is killed, seconds.

    Raises:
        subprocess.TimeoutExpired: it ran longer.
    """
    if env is None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    line = [*COMMAND, *map(str, words)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_process(line, env, output, errors, cwd)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(line, status, output.read().decode(), errors.read().decode())


@cache
def _fork_server() -> ForkServer:
    """The fork server of this process."""
    return ForkServer()


@contextmanager
def serving(
    repository: Path | str,
    folder: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
) -> Iterator[Server]:
    """A server that is ready, for the length of a `with`; then stopped by SIGTERM, and its exit status must be 0.

    A server that the body has stopped itself (`stop`) is left alone.

    Args:
        repository: the model repository.
        folder: where its log goes, e.g. pytest's `tmp_path`.
        options, env, command: as for `start`.

    Raises:
        ServerFailed: it does not start, or does not stop as it should.
    """
    server = start(repository, folder / f"{Path(repository).name}.log", *options, env=env, command=command)
    try:
        server.wait_until_ready()
        yield server
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise
    if server.process.returncode is None:
        server.stop()
    elif server.process.returncode != 0:
        raise ServerFailed(f"the server exited with {server.process.returncode}:\n{server.text}")


def look_quick(server: Server) -> int:
    """Let `busy` be known for short batches: who would surely be late is refused at once, and not queued to be late.

    Returns:
        Steps that take a second of processor time on this machine, and so at least a second: the machine may become more
        or less busy until they run. Deadlines in tests are long and what they wait for takes still longer: where something
        else has the processors for a moment, a short deadline is hopeless, and refused.
    """
    body = '{"inputs": [{"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [%d]}]}'
    steps, took_s = 1_000, 0.0
    while took_s < 0.3:
        steps *= 2
        began_s = _processor_s(server)
        assert server.request("POST", "/v2/models/busy/infer", (body % steps).encode())[0] == 200
        took_s = _processor_s(server) - began_s
    for _ in range(WINDOW):  # fewer leave slow times of earlier tests in the window, whose 95th percentile counts
        assert server.request("POST", "/v2/models/busy/infer", (body % 1).encode())[0] == 200
    return int(steps / took_s)


def _processor_s(server: Server) -> float:
    """Processor time of a server, with that of its processes, in seconds."""
    return sum(map(processor_s, [server.process.pid, *children(server.process.pid)]))
