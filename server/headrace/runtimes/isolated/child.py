"""Child process that runs one version of a model: `python -m headrace.runtimes.isolated.child PARENT CONTROL INSTANCE...`

PARENT is the server's process id; the other arguments are descriptors of sockets that the server has opened: one for
control, one for each instance. The main thread loads the model and then waits until the control socket closes, which
happens when the server closes it or dies. Each instance has a thread that runs batches in order of arrival, and a
second one that waits for results if batches can overlap. A thread that dies ends the process, so the server notices
at once.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from headrace_model.channel import Frames, Messages
from headrace_model.process import exit_process, limit_memory
from headrace_model.protocol import DONE, FAILED, HEADER, SPILL, SPILLED
from headrace_model.slots import START, Slot, aligned

from headrace.core.errors import ConfigError, Finding, HeadraceError, ModelFailed
from headrace.core.ledger import Kind, Ledger, MemoryAccount, NoRoom, format_bytes
from headrace.core.tensor import Array
from headrace.runtimes.base import Backend, Execution, ExecutionLost, LoadedModel
from headrace.runtimes.isolated.tensors import (
    TensorLayout,
    array_at,
    decode_layouts,
    encode_layouts,
    end_offset,
    read_tensors,
    write_tensors,
)
from headrace.runtimes.overlapped import InFlightBatch, is_overlapped
from headrace.runtimes.processes.child_process import Message, ends_with_parent

# Flag of a RUN frame: the batch may overlap with others.
LAUNCH = 1 << 8
# Messages of allocators: C++, ONNX Runtime's arena, CUDA's host allocations.
_NO_MEMORY = re.compile(r"bad_alloc|bad allocation|[Ff]ailed to allocate|out of memory")
# Exit status of a child in which a thread died.
EXIT_THREAD_DIED = 70
# Seconds that instances may take to end after the server has closed their sockets.
_GRACE_S = 10.0
_MAX_TEXT = 4000

logger = logging.getLogger("headrace.isolated")


@runtime_checkable
class ComputesInPlace(Protocol):
    """An execution that can compute its first output in shared memory.

    Attributes:
        allocate: returns memory for the first output of the next run from its shape and dtype; set before each run.
    """

    allocate: Callable[[tuple[int, ...], npt.DTypeLike], Array]


class AccountedBackend(Protocol):
    """A backend that books GPU memory: its `books_memory` is True."""

    def load(self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount) -> LoadedModel:
        """Load a model file."""


def create_backend(factory: str) -> Backend:
    """Create a backend by its path, e.g. "headrace.runtimes.onnxruntime:OnnxRuntimeBackend".

    Raises:
        ConfigError: its library is not installed.
    """
    module, _, name = factory.partition(":")
    return cast(Backend, getattr(importlib.import_module(module), name)())


class _Order(NamedTuple):
    """A batch that the server has sent."""

    number: int  # number of the batch
    slot_index: int  # index of its slot
    slot: Slot  # the slot
    layouts: list[TensorLayout]  # its inputs there
    end: int  # first offset behind them, where the answer begins


@dataclass(eq=False, repr=False)
class ExecutionServer:
    """Runs the batches of one instance that the server sends.

    Ownership: `serve` is the instance's thread. `_launched` leads to the finisher, which sends the answer to every
    launch, also to failed ones: answers keep the order of launch.

    Attributes:
        frames: socket of the instance.
        open_execution: creates the execution, on the instance's thread.
        opened: called with the execution's depth, or with the error if it could not be created.
    """

    frames: Frames
    open_execution: Callable[[], Execution]
    opened: Callable[[int | Exception], None]

    def __post_init__(self) -> None:
        self._slots: list[Slot] = []
        self._in_place: ComputesInPlace | None = None
        self._launched: SimpleQueue[tuple[_Order, InFlightBatch | Exception] | None] = SimpleQueue()

    def serve(self) -> None:
        """Run batches until the server closes its end."""
        try:
            execution = self.open_execution()
        except Exception as error:
            self.opened(error)
            return
        self._in_place = execution if isinstance(execution, ComputesInPlace) else None
        finisher = None
        if is_overlapped(execution):
            finisher = threading.Thread(target=exit_on_error, args=(self._finish_all, execution), daemon=True)
            finisher.start()
        self.opened(execution.depth if is_overlapped(execution) else 1)
        descriptors: list[int] = []
        while self.frames.receive(None if self._slots else descriptors):
            if not self._slots:  # the first frame has them all
                self._slots = [Slot(descriptor) for descriptor in descriptors]
                continue
            order, is_launch = self._received()
            if is_launch:
                self._launch(execution, order)
            else:
                self._answer(order, partial(self._run, execution, order))
        self._launched.put(None)
        if finisher is not None:
            finisher.join()
        execution.close()

    def _received(self) -> tuple[_Order, bool]:
        """Return the batch of the last frame, and whether it may overlap with others."""
        frame = memoryview(self.frames.buffer)
        _version, _kind, flags, index, number, _count, size = HEADER.unpack_from(frame)
        slot, body = self._slots[index], bytes(frame[HEADER.size : HEADER.size + size])
        slot.begin(number)
        end = START
        if flags & SPILLED:
            offset, size = SPILL.unpack(body)
            body, end = slot.read(offset, size), aligned(offset + size)
        layouts = decode_layouts(body)
        return _Order(number, index, slot, layouts, max(end, end_offset(layouts))), bool(flags & LAUNCH)

    def _launch(self, execution: Any, order: _Order) -> None:
        try:
            inputs = read_tensors(order.slot, order.layouts)
            batch: InFlightBatch = execution.begin(inputs, next(iter(inputs.values())).shape[0])
            try:
                for name, array in batch.inputs.items():
                    np.copyto(array, inputs[name], casting="equiv")
            except Exception:
                execution.discard(batch)
                raise
            execution.launch(batch)
        except Exception as error:
            self._launched.put((order, error))
        else:
            self._launched.put((order, batch))

    def _finish_all(self, execution: Any) -> None:
        while (item := self._launched.get()) is not None:
            order, batch = item
            if isinstance(batch, Exception):
                self._send(FAILED, order, json.dumps(_error_message(batch)).encode(), order.end)
            else:
                self._answer(order, partial(execution.finish, batch))

    def _answer(self, order: _Order, act: Callable[[], dict[str, Array]]) -> None:
        try:
            layouts = write_tensors(order.slot, act(), order.end)
        except Exception as error:
            self._send(FAILED, order, json.dumps(_error_message(error)).encode(), order.end)
        else:
            self._send(DONE, order, encode_layouts(layouts), end_offset(layouts))

    def _run(self, execution: Execution, order: _Order) -> dict[str, Array]:
        inputs = read_tensors(order.slot, order.layouts)
        if self._in_place is not None:
            self._in_place.allocate = partial(array_at, order.slot, order.end)
        return execution.run(inputs)

    def _send(self, kind: int, order: _Order, content: bytes, end: int) -> None:
        """Send an answer; one that is too large for a frame lies in the slot at `end`."""
        body, flags = order.slot.spill(content, end)
        self.frames.send(kind, order.slot_index, order.number, 0, body, flags)


def _error_message(error: Exception) -> Message:
    """Message for the server about an error; its kind says whether clients may read the text."""
    if isinstance(error, ExecutionLost):
        return {"lost": str(error)[:_MAX_TEXT]}
    if isinstance(error, HeadraceError):
        return {"error": [type(error).__name__, str(error)[:_MAX_TEXT]]}
    memory_bytes = memory_limit_reached(error)
    if memory_bytes:
        text = (
            f"it needs more memory than isolation_memory_limit allows the model's process "
            f"({format_bytes(memory_bytes)}): send fewer or smaller rows, or raise it in the model's configuration"
        )
        return {"error": [ModelFailed.__name__, text]}
    return {"failed": "".join(traceback.format_exception(error))[-_MAX_TEXT:]}


def memory_limit_reached(error: Exception) -> int:
    """Return the limit of this process's memory in bytes if the error comes from it; 0 for any other error."""
    memory_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    is_short = isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
    return memory_bytes if is_short and memory_bytes != resource.RLIM_INFINITY else 0


class _Forward(logging.Handler):
    """Forwards log records to the server."""

    def __init__(self, control: Messages) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; it is lost if the server is gone."""
        text = self.format(record)[-_MAX_TEXT:]
        try:
            self._control.send({"log": [record.name, record.levelno, text]})
        except OSError:
            return


def exit_on_error(act: Callable[..., None], *arguments: Any) -> None:
    """End the process if `act` raises: no other thread can take over its work."""
    try:
        act(*arguments)
    except BaseException:
        logger.exception("a thread of the model's process died")
        os._exit(EXIT_THREAD_DIED)


def run(control: Messages, instances: list[Frames]) -> None:
    """Load the model, serve until the control socket closes, and close the model."""
    order = control.receive()
    limit_memory(order["memory_bytes"])
    logging.basicConfig(level=order["level"], handlers=[_Forward(control)], format="%(message)s")
    opened: SimpleQueue[tuple[int, int | Exception]] = SimpleQueue()
    try:
        model, account = load_model(order, len(instances))
        threads = [_start(model, index, frames, opened) for index, frames in enumerate(instances)]
        depths = [0] * len(instances)
        for _ in instances:
            index, depth = opened.get()
            if isinstance(depth, Exception):
                raise depth
            depths[index] = depth
    except Exception as error:
        control.send(load_failure(error, order["file"]))
        return
    sides = {"inputs": model.inputs, "outputs": model.outputs}
    tensors = {side: [(tensor.name, tensor.dtype.str, tensor.shape) for tensor in sides[side]] for side in sides}
    control.send({"loaded": depths, **tensors, "ranges": model.shape_ranges, "held": account.holdings()})
    try:
        while True:
            control.receive()
    except EOFError:
        for thread in threads:
            thread.join(_GRACE_S)
        if not any(thread.is_alive() for thread in threads):
            model.close()


def load_failure(error: Exception, file: str) -> Message:
    """Return the message for the server about a model that cannot be loaded.

    Args:
        error: the reason.
        file: file of the model.
    """
    if isinstance(error, NoRoom):
        (finding,) = error.findings
        return {"no_room": [finding.path, finding.message, finding.cure, error.gpu, error.lacking_bytes, error.others]}
    if isinstance(error, ConfigError):
        return {"refused": [_refusal(finding) for finding in error.findings]}
    logger.error("the model could not be loaded", exc_info=error)
    kind, text = _error_message(error).get("error", ("", ""))
    if kind == ModelFailed.__name__:
        return {"refused": [_refusal(Finding(Path(file).name, None, text))]}
    return {"broken": type(error).__name__}


def _refusal(finding: Finding) -> list[object]:
    return [finding.path, finding.line, finding.message, finding.cure]


def load_model(order: Message, instances: int) -> tuple[LoadedModel, MemoryAccount]:
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
    model: LoadedModel, index: int, frames: Frames, opened: SimpleQueue[tuple[int, int | Exception]]
) -> threading.Thread:
    server = ExecutionServer(frames, lambda: model.execution(index), lambda depth: opened.put((index, depth)))
    thread = threading.Thread(target=exit_on_error, args=(server.serve,), name=f"instance {index}", daemon=True)
    thread.start()
    return thread


def inherited_sockets(arguments: list[str]) -> list[socket.socket]:
    """Return the sockets of a process that the server has started; none if the server is gone. The process ends with the server.

    Args:
        arguments: process id of the server, and the descriptors.
    """
    # Ignored: Ctrl-C and a service's signals reach the child as well, but the server ends it after the last response.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, *descriptors = (int(word) for word in arguments)
    if not ends_with_parent(parent):
        return []
    faulthandler.enable()
    return [socket.socket(fileno=end) for end in descriptors]


def main(arguments: list[str]) -> None:
    """Run the process."""
    sockets = inherited_sockets(arguments)
    if not sockets:
        return
    control, *instances = sockets
    exit_on_error(run, Messages(control), [Frames(end) for end in instances])
    exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1:])
