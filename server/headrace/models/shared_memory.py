"""Memory that clients share with the server: POSIX shared memory, and GPU memory by a function that `app` passes in.

System regions are deliberately not mapped. A client may truncate its memory at any time, and a process that touches a
mapping past the end of the file is killed by SIGBUS. `pread` and `pwrite` return a short count or an error instead. A
client cannot stall the server either: a page that is missing in the file reads as zeros, whatever fault handlers the
client has on its own mapping. The cost is one memory copy, as with a mapping, because a tensor must not change while a
model computes on it.

For models on a GPU a region is also mapped and pinned, by a function that `app` passes in: the GPU reads rows itself,
and nothing else touches that mapping. Until it is pinned, or if pinning fails, rows are read as for other models.

Registration is off unless the operator allows it (`--allow-client-shm`). A client that may register regions can read
and write all shared memory of the server's user, including that of other clients: so is Triton's protocol ("shared
memory extension"). Names that servers use for themselves are refused, and no error shows which other names exist.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.core.errors import BadRequest, Conflict, Forbidden, NotFound, TooLarge, Unavailable, Unsupported
from headrace.core.limits import REGION_PATTERN
from headrace.core.response_bodies import CudaRegionStatus, SystemRegionStatus
from headrace.core.tensor import PINNED, Array, Region, ResidentRows, check_range

SYSTEM = "system"
CUDA = "cuda"
_FOLDER = "/dev/shm"
_BYTES: np.dtype[Any] = np.dtype(np.uint8)
_MAX_REGIONS = 1024
_MAX_NAME = 255
# Names of this server, of Triton's Python backend (CVE-2025-23320 used them), and of semaphores of sem_open.
RESERVED = ("headrace_", "triton_python_backend_shm_region_", "sem.")


class Pinned(Protocol):
    """A pinned range of a file that every GPU can read while this object exists."""

    @property
    def address(self) -> int:
        """CUdeviceptr of the first byte."""


# Opens memory of a GPU: (handle, device, size_bytes).
CudaOpener = Callable[[bytes, int, int], Region]
# Pins a range of a file: (descriptor, start, size_bytes, device, done); calls `done` on a thread of its own, None if it failed.
Pin = Callable[[int, int, int, int, Callable[[Pinned | None], None]], None]


class SystemRegion:
    """A range of a file in shared memory. Its descriptor is closed with the last reference to the region.

    Args:
        descriptor: descriptor of the file; the region takes ownership.
        start: offset of the region in the file, in bytes.
        size_bytes: size of the region; `start + size_bytes` was within the file at registration.
        pin: pins it for GPUs; None without GPUs.

    Attributes:
        gpu: None: it is memory of the host.
    """

    gpu: int | None = None

    def __init__(self, descriptor: int, start: int, size_bytes: int, pin: Pin | None = None) -> None:
        self._descriptor = descriptor
        self._start = start
        self._size_bytes = size_bytes
        self._pin = pin
        self._pinned: Pinned | None = None  # written once, by the pinning thread
        self._is_pinning = False  # reset by the pinning thread
        self._pin_requests = 0
        weakref.finalize(self, os.close, descriptor)

    def check(self, offset: int, size_bytes: int) -> None:
        """Check that a range lies in the region.

        Raises:
            BadRequest: it does not.
        """
        check_range(offset, size_bytes, self._size_bytes)

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        """Return a range in pinned memory, uint8[size_bytes]; None if it has to be read because it is not pinned (yet).

        The first call starts pinning. After a failure pinning is tried again when the number of calls has doubled:
        memory that a client has not filled yet cannot be pinned, and may be pinned later.

        Args:
            offset: start of the range in bytes.
            size_bytes: size of the range.
            devices: numbers of the GPUs that would read it.

        Raises:
            BadRequest: the range does not lie in the region.
        """
        self.check(offset, size_bytes)
        pinned = self._pinned
        if pinned is not None:
            base = pinned.address

            def copy(address: int, count: int) -> Array:
                return self.read(address - base, count)

            return ResidentRows(base + offset, PINNED, _BYTES, (size_bytes,), pinned, copy)
        if devices and self._pin is not None and not self._is_pinning:
            self._pin_requests += 1
            if self._pin_requests & (self._pin_requests - 1) == 0:
                self._is_pinning = True
                self._pin(self._descriptor, self._start, self._size_bytes, min(devices), self._on_pinned)
        return None

    def _on_pinned(self, pinned: Pinned | None) -> None:
        self._pinned = pinned
        self._is_pinning = False

    def read(self, offset: int, size_bytes: int) -> Array:
        """Return a copy of a range as uint8[size_bytes].

        Raises:
            BadRequest: the range is outside of the region, or the client has truncated its memory.
            TooLarge: there is no memory for the copy. The caller bounds the bytes of a request.
        """
        self.check(offset, size_bytes)
        try:
            array = np.empty(size_bytes, dtype=np.uint8)
        except MemoryError:
            raise TooLarge(
                f"no memory for a copy of {size_bytes} bytes of shared memory: send smaller requests"
            ) from None
        rest = array.data
        position = self._start + offset
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], position)
            except OSError as error:
                raise BadRequest(f"the shared memory cannot be read: {error.strerror}") from None
            if count == 0:
                raise _truncated()
            rest = rest[count:]
            position += count
        return array

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write data at an offset in bytes.

        Raises:
            BadRequest: the range is outside of the region, or the memory has been truncated, sealed, or has no pages left.
        """
        rest = memoryview(data).cast("B")
        self.check(offset, rest.nbytes)
        position = self._start + offset
        try:
            # Writing past the end would grow a file that the client has truncated.
            if os.fstat(self._descriptor).st_size < position + rest.nbytes:
                raise _truncated()
            while rest:
                count = os.pwrite(self._descriptor, rest, position)
                rest = rest[count:]
                position += count
        except OSError as error:
            raise BadRequest(f"the shared memory cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Registration:
    """A registered region."""

    kind: str
    region: Region
    status: SystemRegionStatus | CudaRegionStatus
    arguments: tuple[str | bytes | int, ...]


class SharedMemoryRegions:
    """All regions that clients have registered, system and CUDA in one namespace.

    Not thread-safe: everything is called on the event loop, where nothing waits longer than a memory copy.

    Args:
        allowed: False makes every method but `status` raise Forbidden.
        cuda: opens GPU memory by (handle, device, size_bytes), raising BadRequest; None without a GPU.
        limit: maximum number of regions; by default 1024, or a quarter of the process's file descriptors if that is less.
        pin: pins system regions for models on a GPU; None without a GPU.
    """

    def __init__(
        self, allowed: bool, cuda: CudaOpener | None, limit: int | None = None, pin: Pin | None = None
    ) -> None:
        self._allowed = allowed
        self._cuda = cuda
        self._pin = pin
        self._limit = _default_limit() if limit is None else limit
        self._regions: dict[str, _Registration] = {}

    def find(self, name: str) -> Region:
        """Return a region; its memory stays open while the caller has a reference.

        Raises:
            Forbidden: shared memory is off.
            NotFound: no region of that name.
        """
        self._require_allowed()
        try:
            return self._regions[name].region
        except KeyError:
            raise _unknown(name) from None

    def register_system(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register POSIX shared memory.

        Args:
            name: name of the region in requests.
            key: as for shm_open, "/name" or "name".
            offset: start of the region in the memory, in bytes.
            size_bytes: size of the region.

        Raises:
            Forbidden: shared memory is off, or the key is reserved for servers.
            Conflict: the name is in use.
            TooLarge: too many regions.
            BadRequest: the name, the key or the range is invalid, or the key does not exist.
            Unsupported: the system has no /dev/shm.
        """
        self._require_free(name)
        file = _file_name(key)
        if offset < 0 or size_bytes < 1:
            raise BadRequest(
                f"a region needs an offset of at least 0 and a byte_size of at least 1, not {offset} and {size_bytes}"
            )
        region = _open_system(file, offset, size_bytes, self._pin)
        status: SystemRegionStatus = {"name": name, "key": key, "offset": offset, "byte_size": size_bytes}
        self._regions[name] = _Registration(SYSTEM, region, status, (key, offset, size_bytes))

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        """Register GPU memory.

        Args:
            name: name of the region in requests.
            handle: the raw IPC handle (cudaIpcMemHandle_t).
            device: number of the GPU.
            size_bytes: size of the region.

        Raises:
            Forbidden: shared memory is off.
            Conflict: the name is in use.
            TooLarge: too many regions.
            BadRequest: the name, the handle, the device or the size is invalid.
            Unsupported: the machine has no GPU.
        """
        self._require_free(name)
        if self._cuda is None:
            raise Unsupported(
                "no CUDA device on this machine: send the tensor in the request, or use system shared memory"
            )
        region = self._cuda(handle, device, size_bytes)
        status: CudaRegionStatus = {"name": name, "device_id": device, "byte_size": size_bytes}
        self._regions[name] = _Registration(CUDA, region, status, (handle, device, size_bytes))

    def registered(self) -> list[tuple[str, str, tuple[str | bytes | int, ...]]]:
        """Return kind, name and further arguments of `register` of all regions; any thread may call."""
        return [(each.kind, name, each.arguments) for name, each in self._regions.copy().items()]

    def register(self, kind: str, name: str, arguments: Sequence[Any]) -> None:
        """Register a region of another process, from `registered`; raises as `register_system` and `register_cuda`."""
        (self.register_system if kind == SYSTEM else self.register_cuda)(name, *arguments)

    def unregister(self, kind: str, name: str) -> None:
        """Remove a region, or all regions of a kind if `name` is ""; requests that run keep the memory open.

        An unknown name, or one of the other kind, is not an error, as in Triton.

        Raises:
            Forbidden: shared memory is off.
        """
        self._require_allowed()
        for region_name in [name] if name else list(self._regions):
            registration = self._regions.get(region_name)
            if registration is not None and registration.kind == kind:
                del self._regions[region_name]

    def status(self, kind: str, name: str) -> Sequence[SystemRegionStatus | CudaRegionStatus]:
        """Return Triton's JSON of one region, or of all of the kind if `name` is ""; empty while shared memory is off.

        Raises:
            NotFound: no region of that name and kind.
        """
        if not self._allowed:
            return []
        documents = [
            r.status for region_name, r in self._regions.items() if r.kind == kind and name in ("", region_name)
        ]
        if name and not documents:
            raise _unknown(name)
        return documents

    def _require_allowed(self) -> None:
        if not self._allowed:
            raise Forbidden("shared memory is disabled: start the server with --allow-client-shm")

    def _require_free(self, name: str) -> None:
        self._require_allowed()
        if re.fullmatch(REGION_PATTERN, name) is None:
            raise BadRequest(
                f"{name[:64]!r} cannot be the name of a shared memory region: it must match {REGION_PATTERN}"
            )
        if name in self._regions:
            raise Conflict(f"shared memory region {name!r} is registered already: unregister it first")
        if len(self._regions) >= self._limit:
            raise TooLarge(f"{self._limit} shared memory regions are registered, the maximum: unregister some")


def _default_limit() -> int:
    if sys.platform != "linux":
        return _MAX_REGIONS
    import resource

    # A region takes one descriptor, two if it is mapped; most descriptors must remain for connections.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_REGIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_REGIONS, soft // 4))


def _file_name(key: str) -> str:
    """Return the file name of a key in the folder of shared memory; raises BadRequest or Forbidden."""
    file = key.removeprefix("/")
    if file in ("", ".", "..") or "/" in file or not file.isprintable() or len(file.encode()) > _MAX_NAME:
        raise BadRequest(
            f"a shared memory key is '/' and a name of 1 to {_MAX_NAME} bytes without '/' and control characters, as for shm_open"
        )
    if file.startswith(RESERVED):
        raise Forbidden("this shared memory key is reserved for servers: choose another name")
    return file


def _open_system(file: str, offset: int, size_bytes: int, pin: Pin | None) -> SystemRegion:
    if sys.platform != "linux":
        # Other systems only allow a mapping, which can kill the process.
        raise Unsupported("system shared memory needs Linux: send the tensor in the request")
    # A FIFO or a device must neither block the process nor become its terminal; the descriptor is checked to be a plain file.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        descriptor = os.open(f"{_FOLDER}/{file}", flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Unavailable("the server has no file descriptor left for a shared memory region") from None
        # One text for a missing file, missing permission and other file types: an error must not show which memory other
        # clients have.
        raise _nothing_there() from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _nothing_there()
        if offset + size_bytes > status.st_size:
            raise BadRequest(f"offset {offset} and byte_size {size_bytes} reach past the end of the shared memory")
        return SystemRegion(descriptor, offset, size_bytes, pin)
    except BadRequest:
        os.close(descriptor)
        raise


def _nothing_there() -> BadRequest:
    return BadRequest(
        "no shared memory under this key that the server may open: create it first, with access for the server"
    )


def _truncated() -> BadRequest:
    return BadRequest(
        "the shared memory is smaller than when it was registered: keep its size until it is unregistered"
    )


def _unknown(name: str) -> NotFound:
    return NotFound(f"no shared memory region {name[:_MAX_NAME]!r}: register it first")
