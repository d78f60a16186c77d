"""Memory that a client shares with the server, filled with pictures: of the system, or of a GPU that the client owns."""

from __future__ import annotations

import base64
import mmap
import os
from typing import Any, Protocol

from loadtest.protocol import Array, Refused, send_json
from loadtest.servers import HOST

PREFIX = "hrbench_"
FOLDER = "/dev/shm"


class Region(Protocol):
    """Memory that is registered with a server.

    Attributes:
        name: as requests name it.
    """

    name: str

    def close(self) -> None:
        """Unregister it from the server, then free it."""


class SystemRegion:
    """A file in the folder of shared memory.

    Args:
        http_port: of the server that takes it on.
        name: of the region and, behind `PREFIX`, of the file; ends with "_" and the process's id.
        content: what it holds.
    """

    def __init__(self, http_port: int, name: str, content: Array) -> None:
        self.name = name
        self._port = http_port
        self._path = f"{FOLDER}/{PREFIX}{name}"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, content.nbytes)
            # All pages now: a full folder is then an error and no SIGBUS.
            os.posix_fallocate(descriptor, 0, content.nbytes)
            with mmap.mmap(descriptor, content.nbytes) as mapped:
                mapped[:] = content.tobytes()
        finally:
            os.close(descriptor)
        body = {"key": f"/{PREFIX}{name}", "offset": 0, "byte_size": content.nbytes}
        send_json(HOST, http_port, f"/v2/systemsharedmemory/region/{name}/register", body)

    def close(self) -> None:
        """See `Region`."""
        _unregister(self._port, "system", self.name)
        os.unlink(self._path)


class CudaRegion:
    """Memory of a GPU, which the server opens by its IPC handle.

    Args:
        http_port: of the server that takes it on.
        name: of the region.
        content: what it holds.
        device: number of the GPU.
    """

    def __init__(self, http_port: int, name: str, content: Array, device: int = 0) -> None:
        from headrace.cuda.driver import current, loaded

        self.name = name
        self._port = http_port
        self._current = current
        self._device = device
        self._memory: Any
        with current(device):
            self._memory = loaded().mem_alloc(content.nbytes)
            loaded().memcpy_htod(self._memory, content)
            handle = bytes(loaded().mem_get_ipc_handle(self._memory))
        raw = {"b64": base64.b64encode(handle).decode()}
        body = {"raw_handle": raw, "device_id": device, "byte_size": content.nbytes}
        send_json(HOST, http_port, f"/v2/cudasharedmemory/region/{name}/register", body)

    def close(self) -> None:
        """See `Region`."""
        _unregister(self._port, "cuda", self.name)
        with self._current(self._device):
            self._memory.free()


def remove_left() -> int:
    """Unlink files of clients that were killed; how many there were."""
    files = [name for name in os.listdir(FOLDER) if name.startswith(PREFIX)] if os.path.isdir(FOLDER) else []
    left = [name for name in files if not os.path.exists(f"/proc/{name.rpartition('_')[2]}")]
    for name in left:
        os.unlink(f"{FOLDER}/{name}")
    return len(left)


def _unregister(port: int, kind: str, name: str) -> None:
    try:
        send_json(HOST, port, f"/v2/{kind}sharedmemory/region/{name}/unregister", {})
    except (OSError, Refused):
        return  # The server has ended and does not read the memory any more.
