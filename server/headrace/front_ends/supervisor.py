"""The supervisor: binds the ports, accepts connections, starts and watches the engine process and the front ends.

It serves nothing itself. It ends last, and the other processes end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.accept import bind
from headrace.front_ends.acceptor import Acceptor
from headrace.front_ends.channel import Ports, Start
from headrace.front_ends.children import Child, describe_end, prepare_forks
from headrace.front_ends.control_state import create_control_state
from headrace.front_ends.counter_array import CounterArray
from headrace.front_ends.meeting import engine_listener
from headrace.front_ends.names import set_process_name
from headrace.settings import Settings

logger = logging.getLogger("headrace")

# Time beyond the drain timeout after which a process that has not ended is killed.
_GRACE_S = 10.0


class ServerSupervisor:
    """Runs a server of several processes.

    Ownership: the event loop.

    Args:
        settings: settings of the server; `front_ends` is at least 1.
        model_filter: names of the served models, for each repository that is served in part.
        first_model: name of the first model given as a file, for the banner; "" if there is none.
    """

    def __init__(
        self, settings: Settings, model_filter: Mapping[Path, frozenset[str]] | None = None, first_model: str = ""
    ) -> None:
        self._settings = settings
        self._model_filter = model_filter or {}
        self._first_model = first_model
        self._acceptors: list[Acceptor] = []
        self._front_ends: list[Child] = []
        # Connections that were passed to each front end, and that it has not counted yet.
        self._passed = [0] * (settings.front_ends + 1)
        self._is_loaded = self._is_announced = self._is_stopping = False
        self._exit_status = 0
        self._time_limits: list[asyncio.TimerHandle] = []

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; returns the exit status."""
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        try:
            return runner.run(self._serve())
        finally:
            runner.close()

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            ports = self._listen()
        except OSError as error:
            cure = "choose another --host, --http-port, --grpc-port or --metrics-port"
            logger.error("cannot listen: %s (%s)", error.strerror or error, cure)
            return 1
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        set_process_name("supervisor")
        prepare_forks()
        self._start_children(ports)
        await self._ended.wait()
        for limit in self._time_limits:
            limit.cancel()
        return self._exit_status

    def _listen(self) -> Ports:
        """Bind all ports; raises OSError."""
        settings = self._settings
        scheme = "https" if settings.tls_cert else "http"
        sockets = {"http": bind(settings.host, settings.http_port)}
        if settings.metrics and settings.metrics_port is not None and settings.metrics_port != settings.http_port:
            sockets["metrics"] = bind(settings.host, settings.metrics_port)
        grpc = ""
        if settings.grpc:
            sock = sockets["grpc"] = bind(settings.host, settings.grpc_port)
            grpc = _address(settings.host, sock.getsockname()[1])
        urls = {
            port: f"{scheme}://{_address(*sock.getsockname()[:2])}" for port, sock in sockets.items() if port != "grpc"
        }
        for port, sock in sockets.items():
            self._acceptors.append(Acceptor(sock, partial(self._pass_on, port)))
        return Ports(urls["http"], grpc, f"{urls.get('metrics', urls['http'])}/metrics")

    def _start_children(self, ports: Ports) -> None:
        settings = self._settings
        self._arrays = [CounterArray.create() for _ in range(settings.front_ends + 1)]
        self._listener = engine_listener()  # inherited by each engine process, so that front ends can always connect
        start = Start(
            settings,
            0,
            os.getpid(),
            secrets.token_bytes(16),
            self._listener.getsockname(),
            self._listener.fileno(),
            ports,
            {str(path): sorted(names) for path, names in self._model_filter.items()},
            self._first_model,
            [array.fd for array in self._arrays],
            create_control_state(),
        )
        make = partial(
            Child, hang_timeout_s=settings.hang_timeout_s, on_message=self._on_message, on_ended=self._on_ended
        )
        self._engine = make(start, (self._listener.fileno(), start.control_state, *start.arrays))
        self._engine.start()
        for number in range(1, settings.front_ends + 1):
            child = make(msgspec.structs.replace(start, number=number), start.arrays)
            self._front_ends.append(child)
            child.start()

    # --- Connections --------------------------------------------------------------------------------------------------

    def _pass_on(self, port: str, sock: socket.socket) -> bool:
        """Pass a connection to a front end, which serves it; False if none reads: then the acceptors go on once one does.

        One that has missed a heartbeat gets none while another answers.
        """
        for child in sorted(self._front_ends, key=lambda child: (child.is_late, self._connections(child.number))):
            if child.is_ready and child.send("connection", port, (sock.fileno(),)):
                self._passed[child.number] += 1
                return True
        for child in self._front_ends:
            if child.is_ready:
                child.when_writable(self._update_acceptors)
        return False

    def _connections(self, number: int) -> int:
        """Return the open connections of a front end: those that it counts, and those passed to it since."""
        return self._arrays[number].all_connections + self._passed[number]

    def _update_acceptors(self) -> None:
        is_open = not self._is_stopping and any(child.is_ready for child in self._front_ends)
        for acceptor in self._acceptors:
            if is_open:
                acceptor.resume()
            else:
                acceptor.pause()

    # --- Children -----------------------------------------------------------------------------------------------------

    def _on_message(self, child: Child, name: str, content: Any) -> None:
        if name == "counted":
            self._passed[child.number] -= content
            return
        if name == "loaded":
            self._is_loaded = True
        elif name == "refused":  # the initial load
            self._exit_status = 1
            self._stop()
        self._update_acceptors()
        if self._is_stopping:
            if name == "ready":
                child.insist("drain" if child.number else "stop")
        elif self._is_loaded and not self._is_announced and all(each.is_ready for each in self._front_ends):
            self._is_announced = True
            self._engine.insist("announce")

    def _on_ended(self, child: Child, status: int, cpu_ns: int) -> None:
        self._arrays[child.number].end(cpu_ns)
        self._passed[child.number] = 0
        self._update_acceptors()
        if self._is_stopping:
            self._continue_stop(child, status)
            return
        if child is self._engine and not self._is_loaded:  # it has logged why
            if status < 0:
                logger.error("the process 'engine' %s while it started: the server stops", describe_end(status))
            self._exit_status = 1
            self._stop()
            return
        pause_s = child.restart_later()
        logger.error("the process '%s' %s; the next starts in %g s", child.name, describe_end(status), pause_s)

    def _reload(self) -> None:
        """SIGHUP: reload certificates and keys. A server that has lost its terminal continues."""
        for child in (self._engine, *self._front_ends):
            child.insist("reload")

    # --- Shutdown -----------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        # Only a second Ctrl-C aborts: supervisors repeat SIGTERM.
        if self._is_stopping:
            logger.warning("Ctrl-C again: exiting without waiting for requests in flight")
            for child in self._front_ends:
                child.insist("force")
        self._stop()

    def _stop(self) -> None:
        """Stop accepting, drain the front ends, then stop the engine."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for acceptor in self._acceptors:
            acceptor.close()
        for child in (self._engine, *self._front_ends):
            child.cancel_restart()
        self._engine.insist("drain")
        for child in self._front_ends:
            child.insist("drain")
        limit_s = self._settings.drain_timeout_s + _GRACE_S
        self._time_limits.append(asyncio.get_running_loop().call_later(limit_s, self._kill, self._front_ends))
        self._continue_stop()

    def _continue_stop(self, child: Child | None = None, status: int = 0) -> None:
        if child is self._engine and status:
            self._exit_status = self._exit_status or 1
        if any(each.is_running for each in self._front_ends):
            return
        if not self._engine.is_running:
            self._ended.set()
            return
        if child is not self._engine:
            self._engine.insist("stop")
            limit_s = self._settings.drain_timeout_s + _GRACE_S
            self._time_limits.append(asyncio.get_running_loop().call_later(limit_s, self._kill, [self._engine]))

    def _kill(self, children: Sequence[Child]) -> None:
        """Kill those that still run."""
        for child in children:
            if child.is_running:
                logger.error("the process '%s' has not ended in time and is killed", child.name)
                self._exit_status = 1
                child.kill()


def _address(host: str, port: int) -> str:
    """Return host:port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
