"""Server processes under test: started, waited for, pinned, stopped, and their exit status checked."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.server.commands.connection import ConnectionOptions

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
HEADRACE_COMMAND = (sys.executable, "-m", "headrace", "serve")


class ServerFailed(RuntimeError):
    """A server did not start, died, or did not stop as it should; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers.

    Attributes:
        name: what reports call it.
        port: TCP port on the loopback address.
        pid: the process that was started.
        grpc_port: a second one, for gRPC; 0 if it was started without.
        api_keys: key of each client by name; empty for a server without keys.
    """

    name: str
    port: int
    pid: int
    grpc_port: int = 0
    api_keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{HOST}:{self.port}"

    def headers(self, client: str) -> dict[str, str]:
        """Return the header with the key of a client, which is gRPC's metadata too; empty for a server without keys."""
        return ConnectionOptions(api_key=self.api_keys.get(client, "")).headers()


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command and checks to start one server.

    Attributes:
        name: of reports and of the log file.
        command: the words before the port option.
        port_option: e.g. "--http-port"; a free port follows it.
        ready_path: answers 200 once the server can take load; "" for a server that is ready once it takes connections.
        env: added to this process's environment.
        cpus: the cores it may use; None for all.
        grpc_port_option: the same for a port for gRPC; "" if it needs none.
        own_group: a process group of its own, which is killed after SIGTERM, and any exit status: for servers of other projects
            that leave child processes behind.
    """

    name: str
    command: tuple[str, ...]
    port_option: str = "--port"
    ready_path: str = "/"
    env: tuple[tuple[str, str], ...] = ()
    cpus: tuple[int, ...] | None = None
    grpc_port_option: str = ""
    own_group: bool = False


def headrace(
    model_repository: Path,
    *,
    name: str = "headrace",
    command: Sequence[str] = HEADRACE_COMMAND,
    models: Sequence[str] = (),
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cpus: tuple[int, ...] | None = None,
) -> ServerCommand:
    """Headrace on a model repository, with its default settings; if models are named, it loads these and no other.

    Args:
        model_repository: the folder.
        name: what reports call it.
        command: how it is started.
        models: the only ones to load.
        options: of `headrace serve`, beside those that follow from the rest.
        env: added to this process's environment.
        cpus: the cores it may use.
    """
    words = (*command, "--model-repository", str(model_repository), "--host", HOST, *options)
    if models:
        words += ("--model-control", "explicit")
    for model in models:
        words += ("--load-model", model)
    variables = tuple({"HEADRACE_STATE_DIR": "", **(env or {})}.items())  # no run finds what another one has learned
    return ServerCommand(name, words, "--http-port", "/v2/health/ready", variables, cpus, "--grpc-port")


def peer(
    module: str, name: str, *arguments: str, cpus: tuple[int, ...] | None = None, ready_path: str = "/"
) -> ServerCommand:
    """One of the servers in `loadtest/peers`; `ready_path` "" for one that does not speak HTTP/1.1."""
    words = (sys.executable, "-m", f"loadtest.peers.{module}", *arguments)
    return ServerCommand(name, words, ready_path=ready_path, cpus=cpus)


@contextmanager
def running(server: ServerCommand, log_folder: Path, ready_timeout_s: float = 120.0) -> Iterator[Running]:
    """Start a server on a free port, yield it once it is ready, stop it with SIGTERM.

    Raises:
        ServerFailed: it was not ready in time, or did not exit with 0 within 20 s of SIGTERM.
    """
    port, grpc_port = free_ports(2)
    words = [*pinned(server.cpus), *server.command, server.port_option, str(port)]
    if server.grpc_port_option:
        words += [server.grpc_port_option, str(grpc_port)]
    log_path = log_folder / f"{server.name.replace(' ', '_')}.{port}.log"
    with log_path.open("wb") as log:
        environment = os.environ | dict(server.env)
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=server.own_group
        )
    try:
        _wait_until_ready(server, process, port, log_path, ready_timeout_s)
        yield Running(server.name, port, process.pid, grpc_port if server.grpc_port_option else 0)
    except BaseException:
        _kill(server, process)
        raise
    _stop(server, process, log_path)


def pinned(cpus: tuple[int, ...] | None) -> list[str]:
    """The words that put a command on these cores: `taskset` becomes the command, so that its process id stays true."""
    return [] if cpus is None else ["taskset", "-c", ",".join(map(str, cpus))]


def free_ports(count: int) -> list[int]:
    """TCP ports, all different, that were free a moment ago."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind((HOST, 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def _wait_until_ready(
    server: ServerCommand, process: subprocess.Popen[bytes], port: int, log_path: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"{server.name} exited with {process.returncode} at its start:\n{_tail(log_path)}")
        if _answers(port, server.ready_path):
            return
        time.sleep(0.1)
    raise ServerFailed(f"{server.name} was not ready within {timeout_s:.0f} s:\n{_tail(log_path)}")


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        if not path:
            connection.connect()
            return True
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(server: ServerCommand, process: subprocess.Popen[bytes], log_path: Path, timeout_s: float = 20.0) -> None:
    if process.poll() is not None:
        raise ServerFailed(f"{server.name} died under load with {process.returncode}:\n{_tail(log_path)}")
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _kill(server, process)
        if server.own_group:
            return
        raise ServerFailed(f"{server.name} still ran {timeout_s:.0f} s after SIGTERM:\n{_tail(log_path)}") from None
    if server.own_group:
        _kill(server, process)
    elif status != 0:
        raise ServerFailed(f"{server.name} exited with {status} after SIGTERM, expected 0:\n{_tail(log_path)}")


def _kill(server: ServerCommand, process: subprocess.Popen[bytes]) -> None:
    """Kill the server, with its process group if that is its own, and wait for its end."""
    if server.own_group:
        with suppress(ProcessLookupError):  # every process of the group has ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _tail(log_path: Path, lines: int = 25) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])
