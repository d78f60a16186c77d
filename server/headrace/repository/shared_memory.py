"""Memory that clients share with the server: POSIX shared memory, and memory of a GPU by an opener that `app` hands in.

System regions are deliberately not mapped. A client may truncate its memory at any time, and a process that touches a mapping
past the end of the file dies of SIGBUS; `pread` and `pwrite` answer with a short count or an error instead. Nor can a client
stall us: a page that is missing in the file reads as zeros, whatever fault handlers the client has put on its own mapping. It
costs exactly one memory copy either way, as a mapping would: a tensor must not change while a model computes on it.

For models on a GPU a region is mapped nevertheless, and pinned, by whatever `app` hands in: the GPU fetches rows by itself, and
nothing else touches that mapping. Until it is there, and where it cannot be had, they are read like any others.

Registering is off unless the operator allows it (`--allow-client-shm`): whoever may register can read and write all shared
memory that the server's user may, that of other clients included. That is Triton's protocol ("shared memory extension"); the
names that servers use for themselves are refused, and no error tells what else is there.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.core.errors import BadRequest, Conflict, Forbidden, NotFound, TooLarge, Unavailable, Unsupported
from headrace.core.limits import REGION_PATTERN
from headrace.core.tensor import PINNED, Array, ResidentRows, check_range

SYSTEM = "system"
CUDA = "cuda"
_FOLDER = "/dev/shm"
_BYTES: np.dtype[Any] = np.dtype(np.uint8)
_MAX_REGIONS = 1024
_MAX_NAME = 255
# Ours, those of Triton's Python backend (CVE-2025-23320 went through them), and the semaphores of sem_open.
RESERVED = ("headrace_", "triton_python_backend_shm_region_", "sem.")


class OpenRegion(Protocol):
    """Memory that is open; see `headrace.inference.models.Region`."""

    def check(self, offset: int, size_bytes: int) -> None:
        """Raise BadRequest unless the range lies in the region."""

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        """A range where it lies, uint8[size_bytes]; None if it has to be read."""

    def read(self, offset: int, size_bytes: int) -> Array:
        """A copy as uint8[size_bytes]."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put data there."""


class Pinned(Protocol):
    """A range of a file that every GPU reads, as long as somebody holds this."""

    @property
    def address(self) -> int:
        """CUdeviceptr of its first byte."""


# Opens memory of a GPU: (handle, device, size_bytes).
CudaOpener = Callable[[bytes, int, int], OpenRegion]
# Pins a range of a file: (descriptor, start, size_bytes, device, done); calls `done` on a thread of its own, None if it failed.
Pin = Callable[[int, int, int, int, Callable[[Pinned | None], None]], None]


class SystemRegion:
    """A range of a file in shared memory. Its descriptor is closed with the last reference to the region.

    Args:
        descriptor: of the file, now the region's own.
        start: where in the file the region begins.
        size_bytes: of the region; `start + size_bytes` was within the file when it was registered.
        pin: pins it for GPUs, None where there are none.
    """

    __slots__ = (
        "__weakref__",
        "_descriptor",
        "_is_pinning",
        "_pin",
        "_pin_requests",
        "_pinned",
        "_size_bytes",
        "_start",
    )

    def __init__(self, descriptor: int, start: int, size_bytes: int, pin: Pin | None = None) -> None:
        self._descriptor = descriptor
        self._start = start
        self._size_bytes = size_bytes
        self._pin = pin
        self._pinned: Pinned | None = None  # written once, by the thread that pins
        self._is_pinning = False  # for that thread, which says so itself
        self._pin_requests = 0
        weakref.finalize(self, os.close, descriptor)

    def check(self, offset: int, size_bytes: int) -> None:
        """Hold a range against the region.

        Raises:
            BadRequest: it does not lie in the region.
        """
        check_range(offset, size_bytes, self._size_bytes)

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        """A range in pinned memory, uint8[size_bytes]; None if it has to be read, as it has until it is pinned.

        The first to ask gets it pinned. If that fails, it is tried again when twice as many have asked: memory that a client has
        not filled yet is not pinned, and may be later.

        Args:
            offset, size_bytes: the range.
            devices: numbers of the GPUs that would read it.

        Raises:
            BadRequest: it does not lie in the region.
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
        """A copy as uint8[size_bytes].

        Raises:
            BadRequest: out of the region, or the client has truncated its memory.
            TooLarge: there is no memory for the copy. What a request may ask for is bounded by whoever reads it.
        """
        self.check(offset, size_bytes)
        try:
            array = np.empty(size_bytes, dtype=np.uint8)
        except MemoryError:
            raise TooLarge(f"the server has no memory for a copy of {size_bytes} bytes of shared memory") from None
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
        """Put data there.

        Raises:
            BadRequest: out of the region, or the memory has been truncated, sealed, or has no pages left to give.
        """
        rest = memoryview(data).cast("B")
        self.check(offset, rest.nbytes)
        position = self._start + offset
        try:
            # Writing past the end would make the file grow again, in the name of a client that no longer wants it.
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
    """A name that is taken."""

    kind: str
    region: OpenRegion
    status: Mapping[str, object]


class SharedMemoryRegions:
    """All regions that clients have registered, system and CUDA under one set of names.

    Not thread-safe: everything is called on the event loop, and nothing waits there for longer than a memory copy.

    Args:
        allowed: without it every method but `status` raises Forbidden.
        cuda: opens memory of a GPU by (handle, device, size_bytes), raising BadRequest; None where there is no GPU.
        limit: most regions at a time; by default 1024, or a quarter of the file descriptors that the process may have.
        pin: pins system regions for models on a GPU; None where there is none.
    """

    def __init__(
        self, allowed: bool, cuda: CudaOpener | None, limit: int | None = None, pin: Pin | None = None
    ) -> None:
        self._allowed = allowed
        self._cuda = cuda
        self._pin = pin
        self._limit = _default_limit() if limit is None else limit
        self._regions: dict[str, _Registration] = {}

    def find(self, name: str) -> OpenRegion:
        """A region; whoever holds it keeps the memory open.

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
        """Take on POSIX shared memory.

        Args:
            name: by which requests will name it.
            key: as for shm_open, "/name" or "name".
            offset: where in the memory the region begins, bytes.
            size_bytes: of the region.

        Raises:
            Forbidden: shared memory is off, or the key is reserved for servers.
            Conflict: the name is taken.
            TooLarge: too many regions.
            BadRequest: the name, the key or the range is wrong, or there is nothing to open under the key.
            Unsupported: no /dev/shm on this system.
        """
        self._require_free(name)
        file = _file_name(key)
        if offset < 0 or size_bytes < 1:
            raise BadRequest(
                f"a region needs an offset of at least 0 and a byte_size of at least 1, not {offset} and {size_bytes}"
            )
        region = _open_system(file, offset, size_bytes, self._pin)
        status = {"name": name, "key": key, "offset": offset, "byte_size": size_bytes}
        self._regions[name] = _Registration(SYSTEM, region, status)

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        """Take on memory of a GPU.

        Args:
            name: by which requests will name it.
            handle: the IPC handle (cudaIpcMemHandle_t), raw.
            device: number of the GPU.
            size_bytes: of the region.

        Raises:
            Forbidden: shared memory is off.
            Conflict: the name is taken.
            TooLarge: too many regions.
            BadRequest: the name, the handle, the device or the size is wrong.
            Unsupported: no GPU here.
        """
        self._require_free(name)
        if self._cuda is None:
            raise Unsupported(
                "no CUDA device on this machine: send the tensor in the request, or use system shared memory"
            )
        region = self._cuda(handle, device, size_bytes)
        self._regions[name] = _Registration(CUDA, region, {"name": name, "device_id": device, "byte_size": size_bytes})

    def unregister(self, kind: str, name: str) -> None:
        """Take a name away, those of all regions of a kind if it is ""; requests in flight keep what they hold.

        A name that is not there, or is of the other kind, is no error, as in Triton.

        Raises:
            Forbidden: shared memory is off.
        """
        self._require_allowed()
        for region_name in [name] if name else list(self._regions):
            registration = self._regions.get(region_name)
            if registration is not None and registration.kind == kind:
                del self._regions[region_name]

    def status(self, kind: str, name: str) -> Sequence[Mapping[str, object]]:
        """Triton's JSON of one region, of all of the kind if `name` is ""; nothing while shared memory is off.

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
            raise Forbidden("shared memory is off: start the server with --allow-client-shm")

    def _require_free(self, name: str) -> None:
        self._require_allowed()
        if re.fullmatch(REGION_PATTERN, name) is None:
            raise BadRequest(
                f"{name[:64]!r} cannot be the name of a shared memory region: it must match {REGION_PATTERN}"
            )
        if name in self._regions:
            raise Conflict(f"shared memory region {name!r} is registered already: unregister it first")
        if len(self._regions) >= self._limit:
            raise TooLarge(f"{self._limit} shared memory regions are registered, no more are taken: unregister some")


def _default_limit() -> int:
    if sys.platform != "linux":
        return _MAX_REGIONS
    import resource

    # A descriptor a region, two if it is mapped: most of the descriptors must be left to connections.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_REGIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_REGIONS, soft // 4))


def _file_name(key: str) -> str:
    """The file in the folder of shared memory; raises BadRequest or Forbidden."""
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
        # Elsewhere shared memory is no file that could be read: only a mapping is left, and that can kill us.
        raise Unsupported("system shared memory needs Linux: send the tensor in the request")
    # A FIFO or a device must neither block us nor become our terminal; what is opened is checked to be a plain file.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        descriptor = os.open(f"{_FOLDER}/{file}", flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Unavailable("the server has no file descriptor left for a shared memory region") from None
        # One text for "not there", "not yours" and "not a plain file": it must not tell what other clients have.
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
