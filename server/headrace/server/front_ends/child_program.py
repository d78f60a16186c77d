"""The part that the engine process and the front ends share: settings, counters, and messages of the supervisor."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.core.clock import monotonic_ns
from headrace.server.front_ends.channel import Start, SupervisorChannel, close_all
from headrace.server.front_ends.passed_servers import PassedServers
from headrace.server.front_ends.shared_state import shared_arrays, shared_limits
from headrace.server.listen import raise_file_limit
from headrace.server.wiring import Reloads


class ChildProgram(ABC):
    """Program of a child process of the supervisor. Ownership: the event loop.

    Args:
        start: first message of the supervisor.
        sock: channel to the supervisor.
        is_front_end: the process passes requests on, which takes further descriptors, and reloads certificates silently.
    """

    def __init__(self, start: Start, sock: socket.socket, is_front_end: bool) -> None:
        self._start = start
        self._socket = sock
        limits = start.settings.limits
        limits = replace(limits, max_connections=raise_file_limit(limits.max_connections, passes_on=is_front_end))
        self._settings = replace(start.settings, limits=limits)
        self._arrays = shared_arrays(start)
        self._limits = shared_limits(self._arrays, self._settings)
        self._reloads = Reloads(is_silent=is_front_end)

    def _open_channel(self) -> None:
        """Receive messages of the supervisor, with the servers for the connections that it passes on."""
        self._channel = SupervisorChannel(self._socket, self._on_message, self._on_orphaned)
        self._servers = PassedServers(self._channel.send, self._settings.drain_timeout_s, self._arrays.own)

    def _on_message(self, name: str, content: Any, descriptors: Sequence[int]) -> None:
        if name == "connection":
            self._servers.take(content, descriptors)
            return
        close_all(descriptors)
        if name == "ping":
            self._channel.send("pong", content)
            self._limits.bodies.give_way_to_all(monotonic_ns())
        elif name == "reload":
            self._reloads.start()
        elif name == "give_up":
            self._servers.give_up()
        elif name == "keep":
            self._servers.keep()
        elif name == "force":
            self._servers.force()
        self._on_command(name)

    @abstractmethod
    def _on_command(self, name: str) -> None:
        """Handle a message without content, after what both kinds of processes do for it."""

    def _on_orphaned(self) -> None:
        """The supervisor has ended: so does this process."""
        os._exit(1)
