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
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.runtimes.cuda.devices import has_device_files
from headrace.server.front_ends.acceptor import Acceptor
from headrace.server.front_ends.channel import Ports, Start, close_all
from headrace.server.front_ends.children import Child, describe_end, prepare_forks
from headrace.server.front_ends.control_state import create_control_state
from headrace.server.front_ends.counter_array import CounterArray
from headrace.server.front_ends.handshake import engine_listener
from headrace.server.front_ends.process_names import set_process_name
from headrace.server.front_ends.scaling import LOOK_S, Scaling
from headrace.server.settings import Settings
from headrace.wire.accept import bind

logger = logging.getLogger("headrace")

# Time beyond the drain timeout after which a process that has not ended is killed.
_GRACE_S = 10.0
# Front ends that are not needed any more have this time to give up their connections, which are drained then.
_LEAVE_S = 5.0
# ... and so much longer while some are in the middle of a request.
_LEAVE_BUSY_NS = 25 * NS_PER_S


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
        self._sockets: dict[str, int] = {}  # descriptors of the listening sockets by port
        self._engine_accepts = False
        self._front_ends: list[Child] = []
        # Connections that were passed to each front end, and that it has not counted yet.
        self._passed = [0] * (settings.front_ends + 1)
        # With `auto`; else all front ends run, and the engine process has no connections.
        self._scaling = Scaling(settings.front_ends, has_device_files()) if settings.front_ends_reason else None
        self._moved: deque[tuple[str, socket.socket]] = deque()  # connections that wait for a process
        # Front ends that end without need: monotonic time by which each is drained, from then on by which it is killed.
        self._leaving: dict[int, int] = {}
        self._draining: set[int] = set()
        self._look_timer: asyncio.TimerHandle | None = None
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
            self._sockets[port] = sock.fileno()
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
        sockets = self._sockets if self._scaling is not None else {}
        engine = msgspec.structs.replace(start, sockets=sockets)
        self._engine = make(engine, (self._listener.fileno(), start.control_state, *start.arrays, *sockets.values()))
        self._start_child(self._engine)
        for number in range(1, settings.front_ends + 1):
            child = make(msgspec.structs.replace(start, number=number), start.arrays)
            self._front_ends.append(child)
            if self._scaling is None:
                self._start_child(child)

    def _start_child(self, child: Child) -> None:
        self._arrays[child.number].expect(True)
        child.start()

    # --- Connections --------------------------------------------------------------------------------------------------

    def _pass_on(self, port: str, sock: socket.socket) -> bool:
        """Pass a connection to a process, which serves it; False if none reads: then the acceptors go on once one does.

        One that has missed a heartbeat gets none while another answers.
        """
        takers = self._takers()
        for child in sorted(takers, key=lambda child: (child.is_late, self._connections(child.number))):
            if child.send("connection", port, (sock.fileno(),)):
                self._passed[child.number] += 1
                sock.close()
                return True
        for child in takers:
            child.when_writable(self._update_acceptors)
        return False

    def _takers(self) -> list[Child]:
        """Return the processes that get connections: front ends, or with `auto` and none of them the engine process."""
        ready = [child for child in self._front_ends if child.is_ready and child.number not in self._leaving]
        if not ready and self._scaling is not None and self._engine.is_ready:
            return [self._engine]
        return ready

    def _pass_moved(self) -> bool:
        """Pass connections on that processes have given up; False if some wait until a process reads."""
        while self._moved:
            port, sock = self._moved[0]
            if not self._pass_on(port, sock):
                return False
            self._moved.popleft()
        return True

    def _connections(self, number: int) -> int:
        """Return the open connections of a front end: those that it counts, and those passed to it since."""
        return self._arrays[number].all_connections + self._passed[number]

    def _update_acceptors(self) -> None:
        takers = [] if self._is_stopping else self._takers()
        is_open = bool(takers) and self._pass_moved()
        # While the engine process serves alone, it also accepts.
        is_alone = takers == [self._engine]
        if is_alone != self._engine_accepts:
            self._engine_accepts = is_alone
            self._engine.insist("accept" if is_alone else "pause")
        for acceptor in self._acceptors:
            if is_open and not is_alone:
                acceptor.resume()
            else:
                acceptor.pause()

    # --- Children -----------------------------------------------------------------------------------------------------

    def _on_message(self, child: Child, name: str, content: Any, descriptors: Sequence[int]) -> None:
        if name == "moved" and not self._is_stopping:
            self._moved += [(content, socket.socket(fileno=descriptor)) for descriptor in descriptors]
            self._pass_moved()
            return
        close_all(descriptors)
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
            return
        if name == "ready" and child.number and self._scaling is not None:
            self._engine.insist("give_up")
            for each in self._front_ends:
                if each is not child and each.is_ready and not self._leaving:
                    each.insist("share")
        expected = self._front_ends if self._scaling is None else [self._engine]
        if self._is_loaded and not self._is_announced and all(each.is_ready for each in expected):
            self._is_announced = True
            self._engine.insist("announce")
            if self._scaling is not None:
                self._look()

    # --- Number of front ends -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Start and end front ends as the load needs."""
        assert self._scaling is not None
        now_ns = monotonic_ns()
        running = [child for child in self._front_ends if child.is_running]
        busy = sum([array.busy for array in self._arrays])
        wanted = self._scaling.wanted(self._engine.pid, [child.pid for child in running], busy, now_ns)
        if self._leaving:
            self._drain_left(now_ns)
        elif wanted > len(running):
            logger.info("front ends: %d in place of %d, by the load", wanted, len(running))
            for child in self._front_ends:
                if not child.is_running and wanted > len(running):
                    self._start_child(child)
                    running.append(child)
        elif wanted < len(running):
            logger.info("front ends: none in place of %d, by the load", len(running))
            limit_ns = now_ns + round(_LEAVE_S * NS_PER_S)
            self._leaving = {child.number: limit_ns for child in running}
            self._engine.insist("keep")
            for child in running:
                self._arrays[child.number].expect(False)
                child.insist("give_up")
        self._look_timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _drain_left(self, now_ns: int) -> None:
        """Drain the front ends that have given up their connections, or had the time for it; kill those that do not end."""
        for child in self._front_ends:
            limit_ns = self._leaving.get(child.number)
            if limit_ns is None:
                continue
            if child.number in self._draining:
                if now_ns >= limit_ns:
                    logger.error("the process '%s' has not given up its connections and is killed", child.name)
                    child.kill()
                continue
            more_ns = _LEAVE_BUSY_NS if self._arrays[child.number].busy else 0
            if not self._connections(child.number) or now_ns >= limit_ns + more_ns:
                self._draining.add(child.number)
                self._leaving[child.number] = now_ns + round((self._settings.drain_timeout_s + _GRACE_S) * NS_PER_S)
                child.insist("drain")

    def _on_ended(self, child: Child, status: int, cpu_ns: int) -> None:
        self._arrays[child.number].end(cpu_ns)
        self._passed[child.number] = 0
        if child is self._engine:
            self._engine_accepts = False
        has_left = self._leaving.pop(child.number, 0) > 0
        self._draining.discard(child.number)
        self._update_acceptors()
        if self._is_stopping:
            self._continue_stop(child, status)
            return
        if has_left:
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
            for child in (self._engine, *self._front_ends):
                child.insist("force")
        self._stop()

    def _stop(self) -> None:
        """Stop accepting, drain the front ends, then stop the engine."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        for acceptor in self._acceptors:
            acceptor.close()
        for _, sock in self._moved:
            sock.close()
        self._moved.clear()
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
