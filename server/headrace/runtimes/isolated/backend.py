"""Runs a backend in a child process: a model that crashes or hangs affects neither other models nor the server.

Inputs are assembled in memory that both processes share, and outputs are copied out of it; a batch needs two short
messages. Batches overlap if the backend in the child supports that. `admission.BatchAdmission` decides about batches
when the child dies.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from headrace_model.channel import Frames
from headrace_model.protocol import DONE, HEADER, RUN, SHARE, SPILL, SPILLED, ProtocolError
from headrace_model.slots import Slot, SlotLease

from headrace.core.errors import (
    BadRequest,
    ConfigError,
    Finding,
    HeadraceError,
    ModelFailed,
    TooLarge,
    Unavailable,
    Unsupported,
)
from headrace.core.ledger import Holding, Kind, MemoryAccount, NoRoom
from headrace.core.tensor import Array
from headrace.runtimes.base import Backend, Execution, ExecutionLost, InputRefused, LoadedModel, ProcessStatus
from headrace.runtimes.isolated.admission import BatchAdmission
from headrace.runtimes.isolated.child import LAUNCH
from headrace.runtimes.isolated.tensors import (
    TensorLayout,
    decode_layouts,
    encode_layouts,
    end_offset,
    lay_out_tensors,
    read_tensors,
    write_tensors,
)
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.processes.child_process import ChildProcess, Message
from headrace.runtimes.processes.supervisor import ProcessSupervisor, load_error
from headrace.runtimes.tensorrt.plan import PlanTensor

logger = logging.getLogger("headrace.isolated")

COMMAND = (sys.executable, "-P", "-m", "headrace.runtimes.isolated.child")
# Errors of an execution whose text is meant for clients.
_KINDS: dict[str, type[HeadraceError]] = {
    kind.__name__: kind for kind in (BadRequest, InputRefused, TooLarge, ModelFailed, Unavailable, Unsupported)
}


class FailedInChildError(Exception):
    """The model raised in its process; the text is the traceback there."""


@dataclass(frozen=True, slots=True)
class IsolatedBackend(Backend):
    """Loads models into child processes; see `headrace.runtimes.base.Backend`.

    Attributes:
        name: of the model, for logs and messages.
        factory: of the backend in the child; see `child.create_backend`.
        limit_s: seconds that a batch may take before the process counts as hanging and is killed.
        slot_bytes: initial shared memory for a batch; it grows with the batches.
        memory_bytes: maximum memory of the child process without shared memory; 0 for no limit.
        lent_batches: batches of each execution whose outputs callers may read in shared memory at once, in place of a copy.
    """

    name: str
    factory: str
    limit_s: float
    slot_bytes: int = 0
    memory_bytes: int = 0
    lent_batches: int = 0
    books_memory = True

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount | None = None
    ) -> IsolatedModel:
        """Start a process that loads the file.

        Args:
            file: the model.
            instances: number of executions.
            parameters: of the model's configuration.
            account: account for the GPU memory that the process books; only for a backend that books memory.

        Raises:
            NoRoom: the account has no room.
            ConfigError: the file cannot be loaded, or the process died while loading; or this is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            message, cure = "isolation: process needs memory that two processes share", "use Linux, or remove isolation"
            raise ConfigError([Finding(self.name, None, message, cure)])
        order: Message = {
            "factory": self.factory,
            "file": str(file),
            "parameters": parameters,
            "memory": None if account is None else memory_terms(account),
            "memory_bytes": self.memory_bytes,
            "level": logging.getLogger("headrace").getEffectiveLevel(),
        }
        model = IsolatedModel(self, order, instances)
        model.load()
        if account is not None:
            try:
                for holding in model.held:
                    account.reservation(holding.gpu, Kind(holding.kind), holding.size_bytes)
            except NoRoom:
                model.close()
                raise
        return model


def memory_terms(account: MemoryAccount) -> Message:
    """Limits and holdings that the child needs to refuse a model that does not fit, with the same reason as the server."""
    return {
        "model": account.model,
        "version": account.version,
        "budget": account.budget_bytes,
        "limits": list(account.ledger.limits.items()),
        "others": account.others(),
    }


class IsolatedProcess:
    """One process, and the sockets of its batches; see `headrace.runtimes.processes.supervisor.SupervisedConnection`.

    Attributes:
        child: the process.
        instances: socket of the batches of each instance.
    """

    def __init__(self, child: ChildProcess, ends: Sequence[socket.socket]) -> None:
        self.child = child
        self.instances = [Frames(end) for end in ends]

    def shut(self) -> None:
        """End the sending side of the sockets, so that the process ends itself after its last answers."""
        self._shut(socket.SHUT_WR)

    def release(self) -> None:
        """End both directions: a process that the dead one has started may hold its sockets open."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, directions: int) -> None:
        for end in (*(frames.end for frames in self.instances), self.child.control.end):
            with suppress(OSError):  # the other end has closed already
                end.shutdown(directions)


class IsolatedModel(ProcessSupervisor[IsolatedProcess], LoadedModel):
    """One version in its child process, which is replaced when it dies; see `headrace.runtimes.base.LoadedModel`.

    Args:
        options: of the process.
        order: load request for the process.
        instances: number of executions that run at the same time.

    Attributes:
        options: see above.
        admission: decides which batches enter the process.
        slots: by instance, the shared memory slots for its batches.
        held: GPU memory that the process has booked.
        inputs: input tensors from the file; empty if the backend does not read them.
        outputs: output tensors from the file, likewise.
        shape_ranges: smallest and largest shape by input, for each optimisation profile; empty without bounds.
    """

    def __init__(self, options: IsolatedBackend, order: Message, instances: int) -> None:
        self.admission: BatchAdmission[IsolatedProcess] = BatchAdmission()
        name, memory_bytes = options.name, options.memory_bytes
        super().__init__(name, name, name, COMMAND, order, memory_bytes, self.admission, logger)
        self.options = options
        self.slots: list[list[Slot]] = []
        self.held: list[Holding] = []
        self.inputs: list[PlanTensor] = []
        self.outputs: list[PlanTensor] = []
        self.shape_ranges: list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = []
        self._instances = instances

    def load(self) -> None:
        """Start the process and wait until it has loaded the model; raises ConfigError if it cannot."""
        self.start()
        try:
            self.wait_loaded()
        except BaseException:
            self.close()
            raise

    def execution(self, index: int) -> IsolatedExecution:
        """Create instance `index`; the process has opened it already."""
        return IsolatedExecution(self, index)

    @property
    def process(self) -> IsolatedModel:
        """The model itself."""
        return self

    @property
    def process_status(self) -> ProcessStatus:
        """Whether the process serves, and its restarts."""
        return ProcessStatus(self.gate.is_open, self.gate.refusal, self.restarts)

    def close(self) -> None:
        """End the process; its memory is free when this returns."""
        super().close()
        self.slots = []

    # On the supervisor's thread

    def _kinds(self) -> Sequence[socket.SocketKind]:
        return [socket.SOCK_SEQPACKET] * self._instances

    def _connect(self, child: ChildProcess, ends: list[socket.socket]) -> IsolatedProcess:
        return IsolatedProcess(child, ends)

    def _accept(self, connection: IsolatedProcess, answer: Message) -> ConfigError | None:
        if "no_room" in answer:
            return NoRoom(*answer["no_room"])
        if "loaded" not in answer:
            return load_error(self.name, f"could not be loaded ({answer.get('broken')})")
        depths = [depth + self.options.lent_batches for depth in answer["loaded"]]
        if not self.slots:
            self._read_answer(answer)
            label, size = f"headrace {self.name}", self.options.slot_bytes
            self.slots = [[Slot.create(label, size) for _ in range(depth)] for depth in depths]
        if depths != [len(slots) for slots in self.slots]:
            return load_error(self.name, "its file runs otherwise than before")
        try:
            for frames, slots in zip(connection.instances, self.slots, strict=True):
                frames.share(SHARE, 0, [slot.fd for slot in slots])
        except OSError:
            self._reap(connection.child)
            return load_error(self.name, f"its process died at its start: {connection.child.cause}")
        return None

    def _read_answer(self, answer: Message) -> None:
        """Read what the first process reports about the file."""
        self.held = [Holding(*holding) for holding in answer["held"]]
        self.inputs, self.outputs = (
            [PlanTensor(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in answer[side]]
            for side in ("inputs", "outputs")
        )
        self.shape_ranges = [
            {name: (tuple(smallest), tuple(largest)) for name, (smallest, largest) in limits.items()}
            for limits in answer["ranges"]
        ]

    def _handle(self, connection: IsolatedProcess, message: Message) -> None:
        name, level, text = message["log"]
        logging.getLogger(name).log(level, "%s", text)

    def _log_line(self, connection: IsolatedProcess, text: str) -> None:
        logger.debug("%d: %s", connection.child.process.pid, text)


class _Transfer:
    """A batch that is run by the process."""

    __slots__ = ("body", "flags", "index", "lease", "number", "process", "slot")

    def __init__(self, lease: SlotLease) -> None:
        # Use of its slot; None once the slot belongs to the caller's arrays, or to the next batch.
        self.lease: SlotLease | None = lease
        self.slot = lease.slot
        self.index = lease.index
        self.body, self.flags = b"", 0  # of its RUN frame
        self.process: IsolatedProcess | None = None  # process that it was sent to; None before
        self.number = 0  # number of the frame, repeated in the answer

    def set_inputs(self, layouts: list[TensorLayout], flags: int) -> None:
        """Encode its frame; raises OSError if there is no memory."""
        self.body, spilled = self.slot.spill(encode_layouts(layouts), end_offset(layouts))
        self.flags = flags | spilled


class IsolatedExecution(Execution):
    """One instance; see `headrace.runtimes.overlapped.OverlappedExecution`, whose rules for threads apply.

    A launch that may not enter the process now (it is being replaced, or another batch must run alone) does not wait:
    the finisher sends the batch later. So the batches inside the process are always the oldest of the open ones, and
    a waiting batch never blocks the launching thread.

    Ownership: `_lock` guards `_unsent` and the order of messages; `_open` and `_free` change by single steps of the
    interpreter.

    Args:
        model: the model.
        index: of the instance.

    Attributes:
        depth: depth of the execution in the process; 1 if that runs one batch at a time.
        limit_s: seconds that a batch may take before the process counts as hanging; may be changed between two batches.
    """

    def __init__(self, model: IsolatedModel, index: int) -> None:
        self._model = model
        self._index = index
        self._slots = model.slots[index]
        self._free = deque(range(len(self._slots)))
        self._open: dict[_Transfer, None] = {}  # launched and not finished
        self._lock = threading.Lock()
        self._unsent: deque[_Transfer] = deque()  # those of `_open` that are not sent yet, in the order of launch
        self._number = 0
        self._lends = model.options.lent_batches > 0
        self.depth = len(self._slots) - model.options.lent_batches
        self.limit_s = model.options.limit_s

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.runtimes.base.Execution.run`."""
        transfer = self._transfer(self._free.pop())  # the slot that was used last is in the processor's caches
        try:
            transfer.set_inputs(write_tensors(transfer.slot, inputs), 0)
            return self._outcome(transfer)
        finally:
            transfer.lease = None

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Begin a batch in shared memory."""
        transfer = self._transfer(self._free.popleft())
        try:
            layouts = lay_out_tensors(like, rows)
            transfer.slot.reserve(end_offset(layouts))
            inputs = read_tensors(transfer.slot, layouts)
            transfer.set_inputs(layouts, LAUNCH)
        except BaseException:
            transfer.lease = None
            raise
        return InFlightBatch(inputs, rows, transfer)

    def _transfer(self, index: int) -> _Transfer:
        return _Transfer(SlotLease(self._free, index, self._slots[index]))

    def launch(self, batch: InFlightBatch) -> None:
        """Send the batch to the process if it may enter now, else queue it."""
        transfer = _transfer_of(batch)
        try:
            with self._lock:
                if self._unsent or not self._try_send(transfer):
                    self._unsent.append(transfer)
        except BaseException:
            transfer.lease = None
            raise
        self._open[transfer] = None

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Wait until the process has run the batch."""
        transfer = _transfer_of(batch)
        try:
            return self._outcome(transfer)
        finally:
            del self._open[transfer]
            transfer.lease = None

    def discard(self, batch: InFlightBatch) -> None:
        """Free the batch's slot."""
        _transfer_of(batch).lease = None

    def close(self) -> None:
        """Wait for batches that a dead thread left open, so that they do not block other instances."""
        for transfer in list(self._open):
            process = transfer.process
            try:
                if process is not None:
                    self._answer(transfer, process)
            except (EOFError, OSError, ProtocolError):
                # `leave` comes after the death of the process: the batch must count as inside then, it may be the cause.
                if process is not None:
                    process.child.kill("")
                    process.child.ended.wait()
            finally:
                self._model.admission.leave(transfer)
        self._slots = []

    def _outcome(self, transfer: _Transfer) -> dict[str, Array]:
        """Outputs of a batch, from this process or from its successor."""
        try:
            while True:
                process = transfer.process or self._sent(transfer)
                child = process.child
                try:
                    kind, body = self._answer(transfer, process)
                    if kind == DONE:
                        return self._outputs(transfer, body)
                    error = json.loads(body)
                    if "lost" not in error:
                        raise _error_of(error)
                    # A new process may get a working device.
                    logger.error(
                        "the process of %s is replaced, it can run no more batches: %s",
                        self._model.name,
                        error["lost"],
                    )
                    child.kill("its device failed")
                except BlockingIOError:
                    child.kill(f"it gave no answer within {self.limit_s:g} s")
                except (EOFError, OSError, ProtocolError):
                    child.kill("")
                transfer.process = None
                child.ended.wait()
                # A batch that the process had not begun cannot have killed it.
                has_begun = transfer.slot.begun == transfer.number
                if has_begun and not self._model.admission.suspected(transfer):
                    cause = child.cause
                    raise ModelFailed(f"the process of {self._model.name} died while it ran the request: {cause}")
        finally:
            self._model.admission.leave(transfer)

    def _sent(self, transfer: _Transfer) -> IsolatedProcess:
        """Wait until the batch may enter, send it, and send the batches that may follow."""
        try:
            process = self._model.admission.enter(transfer, wait=True)
        except BaseException:
            with self._lock:
                self._dequeue(transfer)
            raise
        assert process is not None, "enter() waits until the batch is admitted, or raises"
        with self._lock:
            self._dequeue(transfer)
            self._send(transfer, process)
            while self._unsent and self._try_send(self._unsent[0], quiet=True):
                self._unsent.popleft()
        return process

    # With the lock held

    def _dequeue(self, transfer: _Transfer) -> None:
        if self._unsent and self._unsent[0] is transfer:
            self._unsent.popleft()

    def _try_send(self, transfer: _Transfer, quiet: bool = False) -> bool:
        """Send a batch if it may enter now; `quiet` ignores a refusal, which the batch's own finisher reports."""
        try:
            process = self._model.admission.enter(transfer, wait=False)
        except (Unavailable, ExecutionLost):
            if quiet:
                return False
            raise
        if process is not None:
            self._send(transfer, process)
        return process is not None

    def _send(self, transfer: _Transfer, process: IsolatedProcess) -> None:
        """Send a batch to a process that it has entered; a dead process is detected when its answer is read."""
        self._number += 1
        transfer.process, transfer.number = process, self._number
        try:
            frames = process.instances[self._index]
            frames.set_timeouts(self.limit_s, self.limit_s)
            frames.send(RUN, transfer.index, transfer.number, 0, transfer.body, transfer.flags)
        except BlockingIOError:
            process.child.kill(f"it took no batch within {self.limit_s:g} s")
        except OSError:
            process.child.kill("")

    # On the finisher's thread, or the instance's in a run

    def _answer(self, transfer: _Transfer, process: IsolatedProcess) -> tuple[int, bytes]:
        """Wait for the answer to a batch; return its kind and body."""
        frames = process.instances[self._index]
        while frames.receive():
            frame = memoryview(frames.buffer)
            _version, kind, flags, _slot, number, _count, size = HEADER.unpack_from(frame)
            if number == transfer.number:
                body = bytes(frame[HEADER.size : HEADER.size + size])
                return kind, transfer.slot.read(*SPILL.unpack(body)) if flags & SPILLED else body
        raise EOFError

    def _outputs(self, transfer: _Transfer, body: bytes) -> dict[str, Array]:
        layouts = decode_layouts(body)
        if self._lends and self._free:
            return read_tensors(transfer.slot, layouts, transfer.lease)
        # The next batch needs the slot.
        return {name: array.copy() for name, array in read_tensors(transfer.slot, layouts).items()}


def _error_of(content: Mapping[str, Any]) -> Exception:
    """Return the error of a model from the body of its FAILED frame."""
    if "failed" in content:
        return FailedInChildError(content["failed"])
    kind, text = content["error"]
    return _KINDS.get(kind, ModelFailed)(text)


def _transfer_of(batch: InFlightBatch) -> _Transfer:
    assert isinstance(batch.state, _Transfer), "the batch was begun by another execution"
    return batch.state
