"""Child process that runs one version of a model: `python -m headrace.backends.process.child PARENT CONTROL INSTANCE...`

PARENT is the server's process id; the other arguments are descriptors of sockets that the server has opened: one for
control, one for each instance. The main thread loads the model and then waits until the control socket closes, which
happens when the server closes it or dies. Each instance has a thread that runs batches in order of arrival, and a
second one that waits for results if batches can overlap. A thread that dies ends the process, so the server notices
at once.

The first part of this module is the channel that both processes use: short messages over a socket, tensors in shared
memory. Both ends run the same version of this code on one machine. The other end may die at any moment, in the middle
of a message.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import json
import logging
import math
import mmap
import os
import re
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.backends.base import Backend, Execution, ExecutionLost, InFlightBatch, LoadedModel, is_pipelined
from headrace.core.errors import ConfigError, Finding, HeadraceError, ModelFailed
from headrace.core.ledger import Kind, Ledger, MemoryAccount, NoRoom, format_bytes
from headrace.core.tensor import Array

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
# Stored before the tensors: message number of the batch that was begun last.
_MARK = struct.Struct("<Q")
_START = _ALIGNMENT
_MAX_FDS = 64
_TEXT = "text"
# Score of oom(5) that is added to the process's own; 1000 would make it the first victim of all.
_OOM_SCORE = "500"
# Messages of allocators: C++, ONNX Runtime's arena, CUDA's host allocations.
_NO_MEMORY = re.compile(r"bad_alloc|bad allocation|[Ff]ailed to allocate|out of memory")


class Channel:
    """One end of a stream socket that carries JSON messages, and file descriptors with them.

    One thread receives; several may send.

    Args:
        end: connected; owned by the channel.
        limit_s: timeout of each send and receive in seconds; None: no timeout.
    """

    def __init__(self, end: socket.socket, limit_s: float | None = None) -> None:
        end.settimeout(limit_s)
        self._end, self._limit_s = end, limit_s
        self._lock = threading.Lock()  # keeps messages of several threads apart

    def fileno(self) -> int:
        """File descriptor of the socket, for a selector."""
        return self._end.fileno()

    def set_limit(self, limit_s: float) -> None:
        """Change the timeout of each send and receive, while no other thread uses the channel."""
        if limit_s != self._limit_s:
            self._end.settimeout(limit_s)
            self._limit_s = limit_s

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            message: serializable as JSON.
            fds: file descriptors to send copies of.

        Raises:
            OSError: the other end is gone.
            TimeoutError: the other end does not read.
        """
        content = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
        head = _LENGTH.pack(len(content))
        with self._lock:
            if fds:
                socket.send_fds(self._end, [head], list(fds))
                head = b""
            self._end.sendall(head + content)

    def receive(self) -> tuple[Message, list[int]]:
        """Return the next message and the descriptors sent with it, which belong to the caller.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: no message came within the limit.
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
        """Close the sending side, so that the other end reads end of file; its messages can still be received."""
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:  # the other end has closed already
            return

    def __del__(self) -> None:
        # The threads that use it end at different times; the last reference closes the socket.
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
    """Position of a tensor in a slot.

    Attributes:
        name: of the input or output.
        dtype: in NumPy's notation, or "text" for elements of bytes.
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
    """Shared memory for one batch: a mark, the inputs, and the outputs after them. It grows and never shrinks.

    Ownership: one batch at a time; within it one end at a time, in the order of the messages. Each end has its own
    `SharedSlot` on the same memory. Arrays keep the mapping that they were created in when the slot grows.

    Args:
        fd: of the memory; owned by the slot.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str, size: int) -> SharedSlot:
        """Allocate a slot.

        Args:
            name: shown in `/proc`.
            size: initial size in bytes.

        Raises:
            OSError: there is no memory.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        slot = cls(fd)
        try:
            # A process that reads memory which the other end has truncated is killed by SIGBUS: forbid shrinking.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            slot.grow(size)
        except BaseException:
            os.close(fd)
            raise
        return slot

    def grow(self, size: int) -> mmap.mmap:
        """Return the memory with at least `size` bytes.

        Raises:
            OSError: there is no memory.
        """
        if self._map is not None and len(self._map) >= size:
            return self._map
        file_bytes = os.fstat(self.fd).st_size
        if file_bytes < size or file_bytes == 0:
            file_bytes = max(1 << max(size - 1, 1).bit_length(), mmap.PAGESIZE)
            os.ftruncate(self.fd, file_bytes)
        self._map = mmap.mmap(self.fd, file_bytes)
        return self._map

    def arrays(self, layouts: Iterable[TensorLayout]) -> dict[str, Array]:
        """Return views of numeric tensors by name; text tensors are copied to arrays of their own.

        Raises:
            ValueError, TypeError: the layouts do not lie in the slot.
        """
        arrays_by_name: dict[str, Array] = {}
        for name, dtype, shape, offset, size in layouts:
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
        """Store the number of the batch that is begun; the other end reads it if this one dies."""
        _MARK.pack_into(self._reaching(_START), 0, number)

    def marked(self) -> int:
        """Return the number of the batch that was begun last; 0 if none was."""
        number: int = _MARK.unpack_from(self._reaching(_START), 0)[0]
        return number

    def put(self, arrays: Mapping[str, Array], start: int = _START) -> list[TensorLayout]:
        """Copy tensors into the slot from offset `start` on and return their layouts.

        Raises:
            OSError: there is no memory for them.
        """
        packed = {name: (array, _packed(array)) for name, array in arrays.items()}
        layouts = []
        for name, (array, text) in packed.items():
            size = array.nbytes if text is None else len(text)
            dtype = _TEXT if text is not None else array.dtype.str
            layouts.append(TensorLayout(name, dtype, array.shape, start, size))
            start = _aligned(start + size)
        memory = self.grow(start)
        for (array, text), layout in zip(packed.values(), layouts, strict=True):
            if text is None:
                target = np.ndarray(layout.shape, array.dtype, memory, layout.offset)
                if _address(target) != _address(array):  # else it was computed there: see `array_at`
                    np.copyto(target, array)
            else:
                memory[layout.offset : layout.offset + layout.size] = text
        return layouts

    def array_at(self, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return uninitialized memory at an offset, where `put` with the same `start` does not have to copy it.

        Raises:
            OSError: there is no memory for it.
        """
        size = np.dtype(dtype).itemsize * math.prod(shape)
        array: Array = np.ndarray(shape, dtype, self.grow(_aligned(start + size)), start)
        return array

    def close(self) -> None:
        """Close the memory; the kernel frees it once no array and no other process uses it."""
        os.close(self.fd)
        self._map = None


def lay_out_tensors(like: Mapping[str, Array], rows: int) -> list[TensorLayout]:
    """Return layouts for numeric tensors with the dtypes and shapes of `like`, with `rows` as the first dimension if not 0."""
    layouts, start = [], _START
    for name, array in like.items():
        shape = (rows, *array.shape[1:]) if rows else array.shape
        size = array.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        layouts.append(TensorLayout(name, array.dtype.str, shape, start, size))
        start = _aligned(start + size)
    return layouts


def read_layouts(message: Message, key: str) -> list[TensorLayout]:
    """Return the tensor layouts of a message.

    Raises:
        ValueError, TypeError, KeyError: the message has no valid layouts.
    """
    return [TensorLayout(name, dtype, tuple(shape), offset, size) for name, dtype, shape, offset, size in message[key]]


def end_offset(layouts: Sequence[TensorLayout]) -> int:
    """Return the first offset after the tensors at which another one may begin."""
    return max((_aligned(layout.offset + layout.size) for layout in layouts), default=_START)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _packed(array: Array) -> bytes | None:
    """Text elements, each after its length; None for numeric tensors."""
    if not array.dtype.hasobject:
        return None
    parts = []
    for item in array.reshape(-1).tolist():
        parts += [_LENGTH.pack(len(item)), item]
    return b"".join(parts)


def _texts(content: bytes, shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(shape, dtype=object)
    items, offset = [], 0
    while offset < len(content):
        (size,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size + size
        items.append(content[offset - size : offset])
    array.reshape(-1)[:] = items
    return array


# Exit status of a child in which a thread died.
EXIT_THREAD_DIED = 70
# Seconds that instances may take to end after the server has closed their sockets.
_GRACE_S = 10.0
_MAX_TEXT = 4000
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("headrace.isolated")


@runtime_checkable
class ComputesInPlace(Protocol):
    """An execution that can compute its first output in shared memory.

    Attributes:
        allocate: returns memory for the first output of the next run from its shape and dtype; set before each run.
    """

    allocate: Callable[[tuple[int, ...], npt.DTypeLike], Array]


class AccountedBackend(Protocol):
    """A backend that books GPU memory.

    Attributes:
        books_memory: True.
    """

    books_memory: bool

    def load(self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount) -> LoadedModel:
        """See `headrace.backends.base.Backend.load`."""


def create_backend(factory: str) -> Backend:
    """Create a backend by its path, e.g. "headrace.backends.onnxruntime:OnnxRuntimeBackend".

    Raises:
        ConfigError: its library is not installed.
    """
    module, _, name = factory.partition(":")
    return cast(Backend, getattr(importlib.import_module(module), name)())


class ExecutionServer:
    """Runs the batches of one instance that the server sends.

    Ownership: `serve` is the instance's thread. `_launched` leads to the finisher, which sends the answer to every
    launch, also to failed ones: answers keep the order of launch.

    Args:
        channel: of the instance.
        open_execution: creates the execution, on the instance's thread.
        opened: called with the execution's depth, or with the error if it could not be created.
    """

    def __init__(
        self,
        channel: Channel,
        open_execution: Callable[[], Execution],
        opened: Callable[[int | Exception], None],
    ) -> None:
        self._channel = channel
        self._open_execution = open_execution
        self._opened = opened
        self._slots: list[SharedSlot] = []
        self._in_place: ComputesInPlace | None = None
        self._launched: SimpleQueue[tuple[Message, InFlightBatch | Exception] | None] = SimpleQueue()

    def serve(self) -> None:
        """Run batches until the server closes its end."""
        try:
            execution = self._open_execution()
        except Exception as error:
            self._opened(error)
            return
        self._in_place = execution if isinstance(execution, ComputesInPlace) else None
        finisher = None
        if is_pipelined(execution):
            finisher = threading.Thread(target=exit_on_error, args=(self._finish_all, execution), daemon=True)
            finisher.start()
        self._opened(execution.depth if is_pipelined(execution) else 1)
        try:
            while True:
                message, fds = self._channel.receive()
                self._slots += [SharedSlot(fd) for fd in fds]
                if message["do"] == "run":
                    self._answer(message, partial(self._run, execution, message))
                elif message["do"] == "launch":
                    self._launch(execution, message)
        except EOFError:
            self._launched.put(None)
            if finisher is not None:
                finisher.join()
            execution.close()

    def _launch(self, execution: Any, message: Message) -> None:
        try:
            inputs = self._inputs(message)
            batch: InFlightBatch = execution.begin(inputs, next(iter(inputs.values())).shape[0])
            try:
                for name, array in batch.inputs.items():
                    np.copyto(array, inputs[name], casting="equiv")
            except Exception:
                execution.discard(batch)
                raise
            execution.launch(batch)
        except Exception as error:
            self._launched.put((message, error))
        else:
            self._launched.put((message, batch))

    def _finish_all(self, execution: Any) -> None:
        while (item := self._launched.get()) is not None:
            message, batch = item
            if isinstance(batch, Exception):
                self._send_answer(_error_message(batch), message)
            else:
                self._answer(message, partial(execution.finish, batch))

    def _answer(self, message: Message, act: Callable[[], dict[str, Array]]) -> None:
        try:
            outputs = act()
            layouts = self._slots[message["slot"]].put(outputs, end_offset(read_layouts(message, "inputs")))
        except Exception as error:
            self._send_answer(_error_message(error), message)
        else:
            self._send_answer({"outputs": layouts}, message)

    def _run(self, execution: Execution, message: Message) -> dict[str, Array]:
        inputs = self._inputs(message)
        if self._in_place is not None:
            start = end_offset(read_layouts(message, "inputs"))
            self._in_place.allocate = partial(self._slots[message["slot"]].array_at, start)
        return execution.run(inputs)

    def _inputs(self, message: Message) -> dict[str, Array]:
        slot = self._slots[message["slot"]]
        slot.mark(message["number"])
        return slot.arrays(read_layouts(message, "inputs"))

    def _send_answer(self, answer: Message, message: Message) -> None:
        self._channel.send({"number": message["number"], **answer})


def _error_message(error: Exception) -> Message:
    """Message for the server about an error; its kind says whether clients may read the text."""
    if isinstance(error, ExecutionLost):
        return {"lost": str(error)[:_MAX_TEXT]}
    if isinstance(error, HeadraceError):
        return {"error": [type(error).__name__, str(error)[:_MAX_TEXT]]}
    memory_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if memory_bytes != resource.RLIM_INFINITY and (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
        text = (
            f"it needs more memory than isolation_memory_limit allows the model's process "
            f"({format_bytes(memory_bytes)}): send fewer or smaller rows, or raise it in the model's configuration"
        )
        return {"error": [ModelFailed.__name__, text]}
    return {"failed": "".join(traceback.format_exception(error))[-_MAX_TEXT:]}


class _Forward(logging.Handler):
    """Forwards log records to the server."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; it is lost if the server is gone."""
        text = self.format(record)[-_MAX_TEXT:]
        try:
            self._channel.send({"log": [record.name, record.levelno, text]})
        except OSError:
            return


def exit_on_error(act: Callable[..., None], *arguments: Any) -> None:
    """End the process if `act` raises: no other thread can take over its work."""
    try:
        act(*arguments)
    except BaseException:
        logger.exception("a thread of the model's process died")
        os._exit(EXIT_THREAD_DIED)


def run(control: Channel, channels: list[Channel]) -> None:
    """Load the model, serve until the control socket closes, and close the model."""
    order, _fds = control.receive()
    _limit_memory(order["memory_bytes"])
    logging.basicConfig(level=order["level"], handlers=[_Forward(control)], format="%(message)s")
    opened: SimpleQueue[tuple[int, int | Exception]] = SimpleQueue()
    try:
        model, account = _load(order, len(channels))
        threads = [_start(model, index, channel, opened) for index, channel in enumerate(channels)]
        depths = [0] * len(channels)
        for _ in channels:
            index, depth = opened.get()
            if isinstance(depth, Exception):
                raise depth
            depths[index] = depth
    except NoRoom as error:
        (finding,) = error.findings
        no_room = [finding.path, finding.message, finding.cure, error.gpu, error.lacking_bytes, error.others]
        control.send({"no_room": no_room})
        return
    except ConfigError as error:
        control.send({"refused": [astuple(finding) for finding in error.findings]})
        return
    except Exception as error:
        logger.exception("the model could not be loaded")
        kind, text = _error_message(error).get("error", ("", ""))
        if kind == ModelFailed.__name__:
            control.send({"refused": [astuple(Finding(Path(order["file"]).name, None, text))]})
        else:
            control.send({"broken": type(error).__name__})
        return
    tensors = {  # that the backend reads from the file; empty if it does not
        side: [(tensor.name, tensor.dtype.str, tensor.shape) for tensor in getattr(model, side, ())]
        for side in ("inputs", "outputs")
    }
    ranges = getattr(model, "shape_ranges", [])
    control.send({"loaded": depths, "tensors": tensors, "ranges": ranges, "held": account.holdings()})
    try:
        while True:
            control.receive()
    except EOFError:
        for thread in threads:
            thread.join(_GRACE_S)
        if not any(thread.is_alive() for thread in threads):
            model.close()


def _limit_memory(size_bytes: int) -> None:
    """Limit the private writable memory of this process; 0 sets no limit.

    RLIMIT_DATA counts what is allocated (setrlimit(2), Linux 4.7). RLIMIT_AS would count the address space as well, of which the
    CUDA driver reserves more than the machine has memory.
    """
    if size_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with suppress(OSError):  # a machine without memory then kills this process rather than the server
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _load(order: Message, instances: int) -> tuple[LoadedModel, MemoryAccount]:
    """Load the model, with an account in a ledger that contains all other models' holdings."""
    ledger, backend = Ledger(), create_backend(order["factory"])
    file, parameters, memory = Path(order["file"]), order["parameters"], order["memory"]
    if memory is None:
        return backend.load(file, instances, parameters), ledger.account("", "")
    for gpu, model, version, kind, size_bytes in memory["others"]:
        ledger.account(model, version).reservation(gpu, Kind(kind), size_bytes)
    for gpu, limit_bytes in memory["limits"]:
        ledger.set_limit(gpu, limit_bytes)
    account = ledger.account(memory["model"], memory["version"], memory["budget"])
    return cast(AccountedBackend, backend).load(file, instances, parameters, account), account


def _start(
    model: LoadedModel, index: int, channel: Channel, opened: SimpleQueue[tuple[int, int | Exception]]
) -> threading.Thread:
    server = ExecutionServer(channel, lambda: model.execution(index), lambda depth: opened.put((index, depth)))
    thread = threading.Thread(target=exit_on_error, args=(server.serve,), name=f"instance {index}", daemon=True)
    thread.start()
    return thread


def main(arguments: list[str]) -> None:
    """Run the process."""
    # Ignored: Ctrl-C and a service's SIGTERM reach the child as well, but the server ends it after the last response.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A child that hangs in native code would not notice that the server was killed and its sockets closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, *descriptors = (int(word) for word in arguments)
    if os.getppid() != parent:
        return
    faulthandler.enable()
    control, *channels = (Channel(socket.socket(fileno=end)) for end in descriptors)
    exit_on_error(run, control, channels)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's shutdown, in which threads of libraries are known to crash.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
