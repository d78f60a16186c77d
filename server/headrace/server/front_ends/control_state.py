"""Changes by clients in the engine process, in memory that outlives it: the next engine process begins with them.

That is: models that were loaded and unloaded, traffic, regions of shared memory, trace and log settings.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from typing import Any, cast

import msgspec

from headrace.config.traffic_config import Traffic
from headrace.core.errors import HeadraceError
from headrace.models.shared_memory import SharedMemoryRegions
from headrace.server.wiring import Wiring

logger = logging.getLogger("headrace")

# Position and size of the content. One write of a few bytes is whole or absent after SIGKILL.
_HEADER = struct.Struct("<QQ")


def create_control_state() -> int:
    """Create empty memory for the state; returns its descriptor, which processes inherit by `pass_fds`; raises OSError."""
    return os.memfd_create("headrace-control-state", os.MFD_CLOEXEC)


class ControlState:
    """Saves the state after changes, and restores it once.

    Args:
        fd: descriptor of the memory.
        wiring: parts of the server, started; the models are not loaded yet.
    """

    def __init__(self, fd: int, wiring: Wiring) -> None:
        self._fd = fd
        self._wiring = wiring
        self._regions = cast(SharedMemoryRegions, wiring.services.regions)
        self._lock = threading.Lock()
        header = os.pread(fd, _HEADER.size, 0)
        self._start, self._size = _HEADER.unpack(header) if header else (_HEADER.size, 0)
        self._saved = os.pread(fd, self._size, self._start)
        if self._saved:
            self._restore(msgspec.msgpack.decode(self._saved))

    def save(self) -> None:
        """Save the state if it differs from the last one; any thread may call."""
        data_plane, services = self._wiring.data_plane, self._wiring.services
        with self._lock:
            traffic = data_plane.registry.traffic_changes()
            content = msgspec.msgpack.encode(
                {
                    "models": data_plane.reconciler.requested.copy(),
                    "traffic": {
                        name: [each and each.model_dump(mode="json") for each in traffic[name]] for name in traffic
                    },
                    "regions": self._regions.registered(),
                    "traces": services.traces.changes(),
                    "logs": services.logs.settings(),
                }
            )
            if content == self._saved:
                return
            # Never over the content that a process reads after a kill.
            start = self._start + self._size if self._start < _HEADER.size + len(content) else _HEADER.size
            try:
                os.pwrite(self._fd, content, start)
                os.pwrite(self._fd, _HEADER.pack(start, len(content)), 0)
            except OSError as error:
                logger.error("changes by clients are lost if the engine process ends, they cannot be saved: %s", error)
                return
            self._start, self._size, self._saved = start, len(content), content

    def _restore(self, state: dict[str, Any]) -> None:
        data_plane, services = self._wiring.data_plane, self._wiring.services
        data_plane.reconciler.requested.update(state["models"])
        traffic = {
            name: [each and Traffic.model_validate(each) for each in pair] for name, pair in state["traffic"].items()
        }
        data_plane.registry.restore_traffic(traffic)
        services.traces.restore(state["traces"])
        services.logs.apply(state["logs"])
        for kind, name, arguments in state["regions"]:
            try:
                self._regions.register(kind, name, arguments)
            except HeadraceError as error:
                logger.error("the shared memory region '%s' is not registered any more: %s", name, error)
