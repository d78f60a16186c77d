"""Messages and shared memory between the server and a child process that runs a model.

Short messages go over a socket, tensors through shared memory. Both ends run one version of this code on one machine. The other
end may end at any moment, in the middle of a message.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.core.tensor import Array

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
# In front of the tensors: the number of the message whose batch was begun last.
_MARK = struct.Struct("<Q")
_START = _ALIGNMENT
_MAX_FDS = 64
_TEXT = "text"


class Channel:
    """One end of a stream socket that carries messages in JSON, and file descriptors with them.

    One thread receives; several may send.

    Args:
        end: connected; the channel owns it.
        limit_s: how long the other end may keep either of the two waiting; None: for ever.
    """

    def __init__(self, end: socket.socket, limit_s: float | None = None) -> None:
        end.settimeout(limit_s)
        self._end = end
        self._lock = threading.Lock()  # a message is sent in one piece

    def fileno(self) -> int:
        """Of the socket, for a selector."""
        return self._end.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            message: what JSON can hold.
            fds: file descriptors of which the other end gets copies.

        Raises:
            OSError: the other end is gone.
            TimeoutError: it does not read.
        """
        content = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
        head = _LENGTH.pack(len(content))
        with self._lock:
            if fds:
                socket.send_fds(self._end, [head], list(fds))
                head = b""
            self._end.sendall(head + content)

    def receive(self) -> tuple[Message, list[int]]:
        """The next message, and the descriptors that came with it, which belong to the caller.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing came within the limit.
        """
        try:
            head, fds, _flags, _address = socket.recv_fds(self._end, _LENGTH.size, _MAX_FDS)
            if not head:
                raise EOFError
            head += self._exactly(_LENGTH.size - len(head))
            content = self._exactly(_LENGTH.unpack(head)[0])
        except ConnectionError as error:
            raise EOFError from error
        message: Message = json.loads(content.decode("utf-8", "surrogatepass"))
        return message, list(fds)

    def shut(self) -> None:
        """Let the other end find that this one is gone; what it has sent can still be received."""
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:  # it went first
            return

    def __del__(self) -> None:
        # Its users are threads that end at different times; the last of them takes it along.
        self._end.close()

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._end.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class TensorLayout(NamedTuple):
    """Where a tensor lies in a slot.

    Attributes:
        name: of the input or output.
        dtype: as NumPy writes it, or "text" for elements of bytes.
        shape: of the tensor.
        offset: of its first byte.
        size: in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SharedSlot:
    """Shared memory for one batch: a mark, its inputs, and its outputs behind them. It grows, and never shrinks.

    Ownership: one batch at a time; within it one end at a time, in the order of the messages. Each end has its own `SharedSlot`
    on the same memory. Arrays keep the mapping that they were made in when the slot grows.

    Args:
        fd: of the memory; the slot owns it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str, size: int) -> SharedSlot:
        """New memory.

        Args:
            name: for `/proc`.
            size: in bytes, to begin with.

        Raises:
            OSError: there is no memory.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        slot = cls(fd)
        try:
            # Whoever reads memory that the other end has cut off is ended by a signal.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            slot.grow(size)
        except BaseException:
            os.close(fd)
            raise
        return slot

    def grow(self, size: int) -> mmap.mmap:
        """The memory, of at least `size` bytes.

        Raises:
            OSError: there is not so much.
        """
        if self._map is not None and len(self._map) >= size:
            return self._map
        there = os.fstat(self.fd).st_size
        if there < size or there == 0:
            there = max(1 << max(size - 1, 1).bit_length(), mmap.PAGESIZE)
            os.ftruncate(self.fd, there)
        self._map = mmap.mmap(self.fd, there)
        return self._map

    def arrays(self, placed: Iterable[TensorLayout]) -> dict[str, Array]:
        """Views of tensors of numbers, by name; texts as arrays of their own.

        Raises:
            ValueError, TypeError: they do not lie in the slot.
        """
        arrays_by_name: dict[str, Array] = {}
        for name, dtype, shape, offset, size in placed:
            memory = self._reaching(offset + size)
            if dtype == _TEXT:
                arrays_by_name[name] = _texts(memory[offset : offset + size], shape)
            else:
                arrays_by_name[name] = np.ndarray(shape, np.dtype(dtype), memory, offset)
        return arrays_by_name

    def _reaching(self, end: int) -> mmap.mmap:
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self.fd, 0)
        return self._map

    def mark(self, number: int) -> None:
        """A batch is begun, as the other end may read if this one does not live to say more."""
        _MARK.pack_into(self._reaching(_START), 0, number)

    def marked(self) -> int:
        """The number of the batch that was begun last; 0 if none was."""
        number: int = _MARK.unpack_from(self._reaching(_START), 0)[0]
        return number

    def put(self, arrays: Mapping[str, Array], start: int = _START) -> list[TensorLayout]:
        """Copy tensors into the slot, from `start` on.

        Raises:
            OSError: there is no memory for them.
        """
        packed = {name: (array, _packed(array)) for name, array in arrays.items()}
        placed = []
        for name, (array, text) in packed.items():
            size = array.nbytes if text is None else len(text)
            dtype = _TEXT if text is not None else array.dtype.str
            placed.append(TensorLayout(name, dtype, array.shape, start, size))
            start = _aligned(start + size)
        memory = self.grow(start)
        for (array, text), at in zip(packed.values(), placed, strict=True):
            if text is None:
                np.copyto(np.ndarray(at.shape, array.dtype, memory, at.offset), array)
            else:
                memory[at.offset : at.offset + at.size] = text
        return placed

    def close(self) -> None:
        """Give the memory back; it is freed once no array and no other process needs it."""
        os.close(self.fd)
        self._map = None


def lay_out_tensors(like: Mapping[str, Array], rows: int) -> list[TensorLayout]:
    """Where tensors of numbers go that have the dtypes of `like`, and its shapes but for `rows` in front."""
    placed, start = [], _START
    for name, array in like.items():
        shape = (rows, *array.shape[1:])
        size = array.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        placed.append(TensorLayout(name, array.dtype.str, shape, start, size))
        start = _aligned(start + size)
    return placed


def read_layouts(message: Message, key: str) -> list[TensorLayout]:
    """The tensors that a message tells of.

    Raises:
        ValueError, TypeError, KeyError: it tells of none in the right way.
    """
    return [TensorLayout(name, dtype, tuple(shape), offset, size) for name, dtype, shape, offset, size in message[key]]


def end_offset(placed: Sequence[TensorLayout]) -> int:
    """The first byte behind them on which another tensor may begin."""
    return max((_aligned(at.offset + at.size) for at in placed), default=_START)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _packed(array: Array) -> bytes | None:
    """Texts, each behind its length; None if these are numbers."""
    if not array.dtype.hasobject:
        return None
    parts = []
    for item in array.reshape(-1).tolist():
        parts += [_LENGTH.pack(len(item)), item]
    return b"".join(parts)


def _texts(content: bytes, shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(shape, dtype=object)
    items, at = [], 0
    while at < len(content):
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + size
        items.append(content[at - size : at])
    array.reshape(-1)[:] = items
    return array
