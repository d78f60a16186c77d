"""A process that runs one version of a model for a server: `python -m headrace.backends.process.child PARENT CONTROL INSTANCE...`

PARENT is the server's process id; the rest are descriptors of sockets that the server has opened: one to control, one an
instance. The main thread loads and then waits for the end of the control socket, which comes when the server wants it to, and
when the server is gone. Each instance has a thread that runs batches as they come, and one more to wait for batches if batches
can overlap. A thread that dies takes the process with it: the server sees that at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, cast

import numpy as np

from headrace.backends.base import Backend, Execution, ExecutionLost, InFlightBatch, LoadedModel, is_pipelined
from headrace.backends.process.channel import Channel, Message, SharedSlot, TensorLayout, end_offset, read_layouts
from headrace.core.errors import ConfigError, Finding, HeadraceError
from headrace.core.ledger import Kind, Ledger, MemoryAccount, NoRoom
from headrace.core.tensor import Array

# Status of a child one of whose threads has died.
DIED = 70
# How long instances may take to end once the server has closed their sockets.
_GRACE_S = 10.0
_MAX_TEXT = 4000
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("headrace.isolated")


class AccountedBackend(Protocol):
    """A backend that books the memory of GPUs."""

    def load(self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount) -> LoadedModel:
        """See `headrace.backends.base.Backend.load`."""


def create_backend(factory: str) -> Backend:
    """A backend by where it is made, e.g. "headrace.backends.onnxruntime:OnnxRuntimeBackend".

    Raises:
        ConfigError: its library is not here.
    """
    module, _, name = factory.partition(":")
    return cast(Backend, getattr(importlib.import_module(module), name)())


def finding_to_json(finding: Finding) -> list[Any]:
    """A finding as JSON; `Finding(*finding_of(f)) == f`."""
    return [finding.path, finding.line, finding.message, finding.cure, finding.fatal]


class ExecutionServer:
    """Runs batches of one instance as the server sends them.

    Ownership: `serve` is the instance's thread; `_flights` leads to the finisher, which sends every answer to a launch, also that
    of one that failed, so that answers keep the order of launch.

    Args:
        channel: of the instance.
        open_execution: makes its execution, on the instance's thread.
        opened: read_layouts the execution's depth, or why there is none.
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
        self._launched: SimpleQueue[tuple[Message, InFlightBatch | Exception] | None] = SimpleQueue()

    def serve(self) -> None:
        """Until the server closes its end."""
        try:
            execution = self._open_execution()
        except Exception as error:
            self._opened(error)
            return
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
            placed = self._slots[message["slot"]].put(outputs, end_offset(_input_layouts(message)))
        except Exception as error:
            self._send_answer(_error_message(error), message)
        else:
            self._send_answer({"outputs": placed}, message)

    def _run(self, execution: Execution, message: Message) -> dict[str, Array]:
        return execution.run(self._inputs(message))

    def _inputs(self, message: Message) -> dict[str, Array]:
        slot = self._slots[message["slot"]]
        slot.mark(message["number"])
        return slot.arrays(_input_layouts(message))

    def _send_answer(self, answer: Message, message: Message) -> None:
        self._channel.send({"number": message["number"], **answer})


def _input_layouts(message: Message) -> list[TensorLayout]:
    return read_layouts(message, "inputs")


def _error_message(error: Exception) -> Message:
    """What the server is read_layouts of an error; whose text callers may read, and whose not, it knows by the kind."""
    if isinstance(error, ExecutionLost):
        return {"lost": str(error)[:_MAX_TEXT]}
    if isinstance(error, HeadraceError):
        return {"error": [type(error).__name__, str(error)[:_MAX_TEXT]]}
    return {"failed": "".join(traceback.format_exception(error))[-_MAX_TEXT:]}


class _Forward(logging.Handler):
    """Sends the log to the server."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """One record; lost if the server is gone."""
        text = self.format(record)[-_MAX_TEXT:]
        try:
            self._channel.send({"log": [record.name, record.levelno, text]})
        except OSError:
            return


def exit_on_error(act: Callable[..., None], *arguments: Any) -> None:
    """End the process if `act` raises: what this thread owes, nobody else can do."""
    try:
        act(*arguments)
    except BaseException:
        logger.exception("a thread of the model's process died")
        os._exit(DIED)


def run(control: Channel, channels: list[Channel]) -> None:
    """Load the model, serve with it until the control socket ends, and close it."""
    order, _fds = control.receive()
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
        control.send({"refused": [finding_to_json(finding) for finding in error.findings]})
        return
    except Exception as error:
        logger.exception("the model could not be loaded")
        control.send({"broken": type(error).__name__})
        return
    tensors = {side: _tensors(model, side) for side in ("inputs", "outputs")}
    control.send({"loaded": depths, "tensors": tensors, "held": account.holdings()})
    try:
        while True:
            control.receive()
    except EOFError:
        for thread in threads:
            thread.join(_GRACE_S)
        if not any(thread.is_alive() for thread in threads):
            model.close()


def _load(order: Message, instances: int) -> tuple[LoadedModel, MemoryAccount]:
    """The model, and its account in a ledger that has all other models' holdings too."""
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


def _tensors(model: LoadedModel, side: str) -> list[tuple[str, str, tuple[int, ...]]] | None:
    """Those that the file itself tells of, where the backend knows."""
    tensors = getattr(model, side, None)
    return None if tensors is None else [(t.name, t.dtype.str, tuple(t.shape)) for t in tensors]


def main(arguments: list[str]) -> None:
    """The process."""
    # The server ends us when it has answered what it took; Ctrl-C and a service's SIGTERM reach us as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A server that is killed closes its sockets; a child that hangs in native code would not see it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, *ends = (int(word) for word in arguments)
    if os.getppid() != parent:
        return
    faulthandler.enable()
    control, *channels = (Channel(socket.socket(fileno=end)) for end in ends)
    exit_on_error(run, control, channels)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own end, in which threads of libraries are known to crash.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
