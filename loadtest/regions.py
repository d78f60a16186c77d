"""Memory that a client shares with the server: of the system, or of a GPU that the client owns."""

from __future__ import annotations

import base64
import mmap
import os
from contextlib import suppress
from typing import Any

from loadtest.protocol import Array, Refused, send_json
from loadtest.servers import HOST

PREFIX = "hrbench_"
FOLDER = "/dev/shm"


class Region:
    """Memory that is registered with a server.

    Args:
        http_port: of the server.
        kind: "system" or "cuda".
        name: as requests name it.
        body: of the registration.
    """

    def __init__(self, http_port: int, kind: str, name: str, body: dict[str, Any]) -> None:
        self.name = name
        self._port = http_port
        self._url = f"/v2/{kind}sharedmemory/region/{name}"
        send_json(HOST, http_port, f"{self._url}/register", body)

    def close(self) -> None:
        """Unregister it from the server, then free it."""
        with suppress(OSError, Refused):  # a server that has ended does not read the memory any more
            send_json(HOST, self._port, f"{self._url}/unregister", {})


class SystemRegion(Region):
    """A file in the folder of shared memory.

    Args:
        http_port: of the server.
        name: of the region and, behind `PREFIX`, of the file; ends with "_" and the process's id.
        content: the memory's content.

    Attributes:
        path: the file.
    """

    def __init__(self, http_port: int, name: str, content: Array) -> None:
        self.path = f"{FOLDER}/{PREFIX}{name}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # All pages now: a full folder is then an error and no SIGBUS.
            os.posix_fallocate(descriptor, 0, content.nbytes)
            with mmap.mmap(descriptor, content.nbytes) as mapped:
                mapped[:] = content.tobytes()
            body = {"key": f"/{PREFIX}{name}", "offset": 0, "byte_size": content.nbytes}
            super().__init__(http_port, "system", name, body)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """See `Region`."""
        super().close()
        os.unlink(self.path)


class CudaRegion(Region):
    """Memory of a GPU, which the server opens by its IPC handle.

    Args:
        http_port: of the server.
        name: of the region.
        content: the memory's content.
        device: number of the GPU.
    """

    def __init__(self, http_port: int, name: str, content: Array, device: int = 0) -> None:
        from headrace.cuda.driver import current, loaded

        self._current = current
        self._device = device
        self._memory: Any
        with current(device):
            self._memory = loaded().mem_alloc(content.nbytes)
            loaded().memcpy_htod(self._memory, content)
            handle = bytes(loaded().mem_get_ipc_handle(self._memory))
        raw = {"b64": base64.b64encode(handle).decode()}
        super().__init__(http_port, "cuda", name, {"raw_handle": raw, "device_id": device, "byte_size": content.nbytes})

    def close(self) -> None:
        """See `Region`."""
        super().close()
        with self._current(self._device):
            self._memory.free()


def remove_left() -> int:
    """Unlink files of clients that were killed; return their number."""
    files = [name for name in os.listdir(FOLDER) if name.startswith(PREFIX)] if os.path.isdir(FOLDER) else []
    left = [name for name in files if not os.path.exists(f"/proc/{name.rpartition('_')[2]}")]
    for name in left:
        os.unlink(f"{FOLDER}/{name}")
    return len(left)
