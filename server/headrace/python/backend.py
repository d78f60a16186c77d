"""Serves Python models: loads one process for each instance, and runs batches in them.

A batch is assembled in memory that the process shares, so its rows are copied once. `PythonExecution` sends one small frame and
blocks for the answer on the instance's thread; the outputs are views of the same memory.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from headrace_model import protocol
from headrace_model.protocol import HEADER, ProtocolError
from headrace_model.slots import SlotLease

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import Completion
from headrace.core.errors import BatchLost, HeadraceError, ModelFailed
from headrace.core.request import NO_PARAMETERS, InferResponse, Probe, Responses
from headrace.core.tensor import Array
from headrace.python.outputs import (
    ModelTensors,
    PreparedBatch,
    RequestWriter,
    ResponseOutputs,
    ResultReader,
    error_of,
    prepare,
)
from headrace.python.process import InstanceProcess, ProcessConnection, ProcessOptions, RunningBatch
from headrace.runtimes.base import Backend, Execution, LoadedModel, ProcessStatus
from headrace.runtimes.members import BatchMember, LateResult, MemberResult, NextWaiting, Rescheduled
from headrace.runtimes.processes.child_process import ChildProcess

logger = logging.getLogger("headrace.python")

# Name of the form with request objects, as the model's process reports it.
TRITON_FORM = "triton"
# A batch that a process has not begun when it died is sent to the next one, so often.
_SENDS = 3
_READY_POLL_S = 0.1
# A process that has closed its socket is ending by itself; after this time it is killed.
_CLOSED_S = 3.0


@dataclass(frozen=True, slots=True)
class PythonBackend(Backend):
    """Loads a Python model; see `headrace.runtimes.base.Backend`.

    Attributes:
        tensors: tensors of the model.
        options: how its processes are started; the order's `args` get the name of each instance.
        reads_device_rows: requests get inputs in the memory of GPUs as they are, if the model takes requests.
    """

    tensors: ModelTensors
    options: Callable[[int], ProcessOptions]
    reads_device_rows: bool = False

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> PythonModel:
        """Start a process for each instance and wait until all have loaded the model.

        Args:
            file, parameters: unused; the order has them.
            instances: number of processes.

        Raises:
            ConfigError: a process could not load the model.
        """
        name = self.tensors.model
        processes = [InstanceProcess(f"{name}#{index}", name, self.options(index)) for index in range(instances)]
        model = PythonModel(self.tensors, processes, self.reads_device_rows)
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.wait_loaded()
        except BaseException:
            model.close()
            raise
        versions = processes[0].versions
        logger.info(
            "model %s runs on Python %s, NumPy %s, %d processes",
            name,
            versions.get("python"),
            versions.get("numpy"),
            instances,
        )
        return model


class PythonModel(LoadedModel):
    """A loaded Python model; see `headrace.runtimes.base.LoadedModel`.

    Args:
        tensors: tensors of the model.
        processes: one for each instance, not started yet.
        reads_device_rows: see `PythonBackend`.

    Attributes:
        process_status: status of the processes of all instances: requests are refused if every instance refuses them. Every
            request reads it.
    """

    def __init__(
        self, tensors: ModelTensors, processes: Sequence[InstanceProcess], reads_device_rows: bool = False
    ) -> None:
        self._tensors = tensors
        self._reads_device_rows = reads_device_rows
        self._processes = processes
        self._lock = threading.Lock()  # guards process_status: each supervisor's thread updates it
        self.process_status = ProcessStatus(up=False, refusal="", restarts=0)
        for process in processes:
            process.on_change = self._update_status

    def _update_status(self) -> None:
        with self._lock:
            processes = self._processes
            refusal = "" if any(not process.gate.refusal for process in processes) else processes[0].gate.refusal
            up = all(process.connection is not None for process in processes)
            self.process_status = ProcessStatus(up, refusal, sum(process.restarts for process in processes))

    def execution(self, index: int) -> PythonExecution:
        """Return the execution of an instance."""
        process = self._processes[index]
        # The other form gets arrays of the whole batch.
        has_requests = process.versions.get("form") == TRITON_FORM
        # A region of a client may be closed at the end of a request, while the model's thread still reads it.
        reads_device_rows = self._reads_device_rows and has_requests and not self._tensors.decoupled
        return PythonExecution(self._tensors, process, lambda: self.process_status.refusal, reads_device_rows)

    @property
    def process(self) -> PythonModel:
        """The model itself."""
        return self

    def probes(self) -> list[Probe]:
        """Start the readiness check of every serving instance; see `headrace.runtimes.base.LoadedModel`."""
        connections = [process.connection for process in self._processes]
        return [connection.probes.start() for connection in connections if connection is not None and connection.probes]

    def close(self) -> None:
        """End all processes; each finalizes the model."""
        for process in self._processes:
            process.begin_close()
        for process in self._processes:
            process.close()


@dataclass(eq=False, repr=False)
class PythonExecution(Execution):
    """Runs batches in the process of one instance; see `headrace.runtimes.members.MemberExecution` and `HasBatchMemory`.

    Attributes:
        tensors: tensors of the model.
        process: process of the instance.
        refusal: returns the reason why the model refuses requests; "" while an instance serves.
        reads_device_rows: see `headrace.runtimes.members.MemberExecution`.
    """

    by_member = has_batch_memory = True

    tensors: ModelTensors
    process: InstanceProcess
    refusal: Callable[[], str]
    reads_device_rows: bool = False

    def __post_init__(self) -> None:
        self._batched = self.tensors.batched
        self._responses = ResponseOutputs(self.tensors)
        self._writer = RequestWriter(self.tensors)
        self._reader = ResultReader(self.tensors)
        self._prepared: tuple[ProcessConnection, PreparedBatch] | None = None
        self._keeps_state = False
        self._state_of: ChildProcess | None = None  # the process with the state of the sequences

    def renew_state(self) -> bool:
        """Accept the present process for the sequences that follow; True if an earlier one has ended with the state.

        From the first call on a batch runs in that process only: in another one it would read no state, or another's.
        """
        connection = self.process.connection
        child = None if connection is None else connection.child
        is_lost = self._keeps_state and child is not self._state_of
        self._keeps_state, self._state_of = True, child
        return is_lost

    def wait_ready(self, stopped: Callable[[], bool], next_waiting: NextWaiting) -> None:
        """Block while the process is being restarted and another instance serves, or has as many open requests as allowed.

        Of these, one may give way to the next queued request.
        """
        process = self.process
        while not stopped():
            connection = process.connection
            if connection is None:
                if self.refusal() or not process.gate.wait_change(_READY_POLL_S):
                    return
            elif connection.open.wait_below(self.tensors.max_open, _READY_POLL_S):
                return
            elif (waiting := next_waiting()) is not None:
                connection.open.give_way(*waiting)

    def give_up(self, error: HeadraceError) -> None:
        """Settle the open requests of the process with an error."""
        connection = self.process.connection
        if connection is not None:
            connection.open.fail(error)

    def batch_arrays(self, like: Mapping[str, Array], rows: int) -> dict[str, Array]:
        """Return views of a free slot for the next batch."""
        connection = self.process.gate.wait_open()
        self._prepared = None
        if self._keeps_state:  # before a slot is taken: the process gets a new one with its first batch
            self._check_state(connection)
        batch = prepare(connection.slots.take(), like, rows, self._batched)
        self._prepared = connection, batch
        return {name: array for name, (array, _offset) in batch.arrays.items()}

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run one request, for warm-ups."""
        rows = next(iter(inputs.values())).shape[0] if self._batched else 1
        discard = _DiscardedResponses() if self.tensors.decoupled else None
        member = BatchMember(rows, "", NO_PARAMETERS, (), 0, 0, {}, Completion(), sink=discard)
        (result,) = self.run_members(inputs, [member])
        if isinstance(result, Rescheduled):  # one step is enough; the model is notified that nothing waits for others
            member.completion.withdraw()
            return {}
        if discard is not None or isinstance(result, LateResult):
            late = result if isinstance(result, LateResult) else discard.late if discard is not None else LateResult()
            done: Future[dict[str, Array] | HeadraceError] = Future()
            late.then(done.set_result)
            try:
                result = done.result(self.process.limit_s)
            except TimeoutError:
                result = ModelFailed(f"a warm-up request was not answered within {self.process.limit_s:g} s")
        if isinstance(result, HeadraceError):
            raise result
        assert isinstance(result, dict), "a late result has a dict or an error"
        return {name: array.copy() for name, array in result.items()}

    def run_members(self, inputs: dict[str, Array], members: Sequence[BatchMember]) -> list[MemberResult]:
        """Run a batch in the process; see `MemberExecution.run_members`."""
        prepared, self._prepared = self._prepared, None
        for _ in range(_SENDS):
            connection = self.process.gate.wait_open()
            if self._keeps_state:
                self._check_state(connection)
            if prepared is None or prepared[0] is not connection:
                prepared = connection, prepare(connection.slots.take(), {}, 0, self._batched)
            batch = prepared[1]
            body, flags = self._writer.write(batch, inputs, members, connection.regions)
            number = self._send(connection, batch.lease, members, body, flags)
            is_answered = self._receive(connection, batch, number, members)
            connection.running = None
            try:
                if is_answered:
                    return self._read(connection, batch.lease, number, members)
            except BaseException:
                connection.open.discard(number)
                raise
            connection.child.ended.wait()
            connection.open.wait_drained()
            connection.open.discard(number)
            if batch.lease.slot.begun == number:
                break
        raise BatchLost(
            f"the process of model '{self.process.model}' died while it ran the request, which is not run again: "
            f"{connection.child.cause}"
        )

    def _check_state(self, connection: ProcessConnection) -> None:
        if self._state_of is None:  # no process served when the state was renewed, so no sequence has any
            self._state_of = connection.child
        elif connection.child is not self._state_of:
            raise BatchLost(
                f"the process of model '{self.process.model}' died, and the state of its sequences with it: start them again"
            )

    def _send(
        self, connection: ProcessConnection, lease: SlotLease, members: Sequence[BatchMember], body: bytes, flags: int
    ) -> int:
        connection.batches = number = connection.batches + 1
        connection.open.tensors, connection.open.decoupled = self._responses, self.tensors.decoupled
        connection.open.begin(number, members, lease)
        connection.running = RunningBatch(number, members)  # before the process can make a call
        frames = connection.frames
        try:
            frames.send(protocol.RUN, lease.index, number, len(members), body, flags)
            if lease.is_new:
                lease.is_new = False
                frames.share(protocol.SHARE, lease.index, [lease.slot.fd])
        except OSError:  # it is dead, which `_receive` finds
            return number
        return number

    def _receive(
        self, connection: ProcessConnection, batch: PreparedBatch, number: int, members: Sequence[BatchMember]
    ) -> bool:
        """Wait for the answer to a batch; return False if the process has died, or was killed because it hangs."""
        receive, limit_ns = connection.frames.receive, 0
        while True:
            try:
                size = receive()
                break
            except BlockingIOError:
                now_ns = monotonic_ns()
                limit_ns = limit_ns or now_ns + int(self.process.limit_s * NS_PER_S)
                slot = batch.lease.slot
                for index, member in enumerate(members):
                    if member.completion.is_settled:
                        slot.cancel(index)
                if connection.calls is not None:
                    connection.calls.abandon()
                limit_ns = max(limit_ns, self._progress_limit_ns(connection, now_ns))
                if now_ns >= limit_ns:
                    connection.kill_hanging(f"it did not answer within {self.process.limit_s:g} s")
                    return False
            except (OSError, ProtocolError) as error:
                connection.child.kill(f"its socket failed ({error})")
                return False
        if not size and not connection.child.ended.wait(_CLOSED_S):
            connection.child.kill("it closed its socket")
        return size > 0

    def _progress_limit_ns(self, connection: ProcessConnection, now_ns: int) -> int:
        """Return the limit of a batch whose model sends responses while `execute` runs, or waits for their reader; 0 for none."""
        progress_ns = now_ns if connection.open.is_waiting else connection.open.progress_ns
        return progress_ns + int(self.process.limit_s * NS_PER_S) if self.tensors.decoupled and progress_ns else 0

    def _read(
        self, connection: ProcessConnection, lease: SlotLease, number: int, members: Sequence[BatchMember]
    ) -> list[MemberResult]:
        frames = connection.frames
        frame = memoryview(frames.buffer)
        _version, kind, flags, slot, answered, _count, size = HEADER.unpack_from(frame)
        frame = frame[: HEADER.size + size]
        try:
            if (slot, answered) != (lease.index, number):
                raise ProtocolError(f"an answer to batch {answered} in slot {slot}")
            if kind == protocol.DONE:
                results = self._reader.done(frame, lease, members, connection.slots.is_exhausted)
                return self._returned(connection, number, results, bool(flags & protocol.OPEN_MEMBERS))
            if kind != protocol.FAILED:
                raise ProtocolError(f"an answer of the kind {kind}")
            code, text, traceback = self._reader.failed(frame)
        except Exception as error:  # anything that foreign code can send
            connection.child.kill(f"its answer does not follow the protocol: {error}")
            connection.child.ended.wait()
            raise BatchLost(
                f"the process of model '{self.process.model}' sent an answer that does not follow the protocol"
            ) from error
        connection.open.wait_read()
        raise self._failure(code, text, traceback)

    def _returned(
        self, connection: ProcessConnection, number: int, results: list[MemberResult], has_open: bool
    ) -> list[MemberResult]:
        """Record the return of a batch; return its results, None for requests of a decoupled model."""
        if self.tensors.decoupled:
            if not all(isinstance(result, (LateResult, Rescheduled)) for result in results):
                raise ProtocolError("a response of a decoupled model in the result of its batch")
            results = [None if isinstance(result, LateResult) else result for result in results]
        connection.open.returned(number, results, has_open)
        return results

    def _failure(self, code: int, text: str, traceback: str) -> HeadraceError:
        reference = uuid.uuid4().hex[:12]
        if traceback:
            logger.error("%s: request failed in the model (reference %s)\n%s", self.process.name, reference, traceback)
        if text:
            return error_of(code, text)
        return ModelFailed(
            f"the model failed on this request: see the server log for the cause (reference {reference})", reference
        )

    def close(self) -> None:
        """Release nothing: the model ends its processes."""
        self._prepared = None


class _NoReader:
    """Stream of a warm-up request: its responses are consumed at once."""

    def __init__(self) -> None:
        self.on_consumed: Callable[[int, int], object] | None = None

    def send(self, response: InferResponse | HeadraceError, size_bytes: int) -> None:
        """Drop a response."""


class _DiscardedResponses:
    """Sink of a warm-up request of a decoupled model."""

    def __init__(self) -> None:
        self.responses: Responses = _NoReader()  # stream of the request
        self.late = LateResult()  # the end of the request

    def send(self, result: dict[str, Array] | HeadraceError, size_bytes: int, is_final: bool) -> None:
        """Consume a response."""
        if isinstance(result, HeadraceError):
            self.end(result)
        if self.responses.on_consumed is not None:
            self.responses.on_consumed(1, size_bytes)

    def end(self, error: HeadraceError | None) -> None:
        """Record the end."""
        self.late.set({} if error is None else error)
