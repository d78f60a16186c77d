"""Calls of Python models to other models of this server (BLS), received on the event loop.

A call is leased, queued and answered as a request of a client is, without a thread of its own: the event loop reads the socket,
and the callback of the completion writes the reply. A call belongs to the requests of the batch that makes it: it has their
deadline and their client, and it is cancelled with them. The server reads these from its own record of the batch.

The calling process runs foreign code: frames are checked, and one that does not follow the protocol closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from headrace_model import protocol
from headrace_model.channel import Frames
from headrace_model.protocol import BYTES, DATATYPES, DTYPES, HEADER, SPILL, SPILLED, ProtocolError
from headrace_model.slots import START, Slot, aligned

from headrace.core.clock import NS_PER_US, monotonic_ns
from headrace.core.completion import Mailbox, probe_answer
from headrace.core.errors import (
    Aborted,
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    HeadraceError,
    ModelFailed,
    NotFound,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from headrace.core.request import InferRequest, InferResponse, Probe, SequenceFields
from headrace.core.shapes import CheckedShapes
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.registry import Registry
from headrace.python.call_cycles import CallingProcess, CallReplies, ModelCall, find_cycle
from headrace.python.process import CallSocket, RunningBatch
from headrace.runtimes.members import BatchMember

logger = logging.getLogger("headrace.python")

MAX_DEPTH = 16
# Slots of one process; each call at the same time has one.
MAX_SLOTS = 1024
# Calls of `is_model_ready` that wait at the same time, of all processes; each has a task.
MAX_PROBE_WAITS = 4096
# A longer JSON body is refused before it is read.
MAX_BODY_BYTES = 16 << 20
# Text is copied, also the holes of a memory file, which cost the calling process nothing.
MAX_TEXT_BYTES = 1 << 30
# Specs whose checked shapes a connection keeps.
_MAX_SPECS = 64
# `json.dumps` with separators creates an encoder for each reply.
_encode = json.JSONEncoder(separators=(",", ":")).encode

_CODES: tuple[tuple[type[HeadraceError], int], ...] = (
    (NotFound, protocol.NOT_FOUND),
    (Aborted, protocol.UNAVAILABLE),
    (Conflict, protocol.ALREADY_EXISTS),
    (BadRequest, protocol.INVALID_ARG),
    (Cancelled, protocol.CANCELLED),
    (Unsupported, protocol.UNSUPPORTED),
    (Forbidden, protocol.UNAVAILABLE),
    (Unauthenticated, protocol.UNAVAILABLE),
    (QuotaExceeded, protocol.UNAVAILABLE),
    (Unavailable, protocol.UNAVAILABLE),
    (DeadlineExceeded, protocol.UNAVAILABLE),  # as Triton reports a request that timed out
)


class ModelControl(Protocol):
    """The reconciler, as far as calls use it."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model."""

    def check_caller(self, name: str) -> None:
        """Raise Conflict if the model that made the call is being loaded itself."""


class ModelCalls:
    """Receives the calls of all Python models.

    Args:
        loop: event loop of the server.
        versions: the registry.

    Attributes:
        loop: as in the argument.
        mailbox: brings responses of decoupled models to the loop.
        control: loads and unloads models; set once it exists.
        connections: connections of all processes; on the event loop.
        callers: names and versions of the models that have called others; added on the event loop.
        probe_waits: waiting calls of `is_model_ready`, with the arguments of `is_probe_cycle`; on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, versions: Registry) -> None:
        self.control: ModelControl | None = None
        self.callers: set[str] = set()
        self.probe_waits: dict[asyncio.Task[None], tuple[str, frozenset[str]]] = {}
        self.connections: list[CallConnection] = []
        self.loop, self.mailbox = loop, Mailbox(loop)
        self._versions = versions
        self._tasks: set[asyncio.Future[None]] = set()

    def open(
        self, end: socket.socket, model: str, version: str, running: Callable[[], RunningBatch | None]
    ) -> CallSocket:
        """Receive calls from a socket; from any thread.

        Args:
            end: socket of the type SOCK_SEQPACKET; owned.
            model: name of the calling model.
            version: its version.
            running: returns the batch that the calling process runs; None between batches.
        """
        connection = CallConnection(end, f"{model}/{version}", self, running)
        connection.post(connection.start)
        return connection

    def lease(self, model: str, version: str, chain: tuple[str, ...]) -> VersionHandle:
        """Lease the version that a call is for.

        Args:
            model, version: of the call; "" is the latest version.
            chain: models that wait for the call, outermost first.

        Raises:
            HeadraceError: it does not serve, or it waits for the call itself and has no other instance.
        """
        if len(chain) > MAX_DEPTH:
            raise BadRequest(f"models call each other {len(chain)} levels deep, at most {MAX_DEPTH} are allowed")
        handle = self._versions.lease(model, version)
        if handle.calls or version_name(handle) in chain:
            try:
                self._check_chain(handle, chain, (), set())
            except BadRequest:
                handle.release()
                raise
        return handle

    def revision(self, caller: str) -> int:
        """Return a number that changes with every load and unload; 0 while a model has called none. Any thread may call.

        Args:
            caller: name and version of the calling model, joined by "/".
        """
        return self._versions.generation if caller in self.callers else 0

    def _check_chain(
        self, handle: VersionHandle, chain: tuple[str, ...], through: tuple[str, ...], checked: set[str]
    ) -> None:
        """Check that a version, or a version that it calls as a pipeline, has an instance that does not wait for the call."""
        name = version_name(handle)
        if name in checked:
            return
        checked.add(name)
        if chain.count(name) >= max(handle.alive, 1):
            raise BadRequest(
                f"model '{handle.spec.name}' calls itself ({' -> '.join([*chain, *through, name])}) and has no other "
                "instance: raise instance_group.count"
            )
        for called in handle.calls:
            member = self._versions.serving(called, "")
            if member is not None:
                self._check_chain(member, chain, (*through, name), checked)

    def probed_by(self, handle: VersionHandle) -> frozenset[str]:
        """Return the versions whose code decides whether a version is ready: itself, or the models of a pipeline."""
        names: set[str] = set()
        handles = [handle]
        while handles:
            current = handles.pop()
            if version_name(current) not in names:
                names.add(version_name(current))
                members = [self._versions.serving(called, "") for called in current.calls]
                handles += [member for member in members if member is not None]
        return frozenset(names)

    def is_probe_cycle(self, waiter: str, probed: frozenset[str]) -> bool:
        """Return True if `is_ready` of a version would wait for its own answer.

        Args:
            waiter: name and version of the model whose `is_ready` makes the call.
            probed: versions whose answers it would wait for.
        """
        names, checked = list(probed), set(probed)
        while names:
            name = names.pop()
            if name == waiter:
                return True
            for other, others in self.probe_waits.values():
                if other == name:
                    names += others - checked
                    checked |= others
        return False

    def wait_for_probes(
        self, waiter: str, probed: frozenset[str], probes: Sequence[Probe], done: Callable[[bool], None]
    ) -> None:
        """Call `done` with True once all probes have answered yes, with False at the first no and without an answer in time.

        Args:
            waiter, probed: as in `is_probe_cycle`; "" for a call that delays no probe.
            probes: running or answered probes.
            done: called on the event loop.
        """
        if all(probe.answer.done() for probe in probes):
            done(all(probe.answer.result() for probe in probes))
            return

        async def wait() -> None:
            is_ready = False
            try:
                for probe in probes:
                    if not await probe_answer(probe):
                        break
                else:
                    is_ready = True
            finally:
                del self.probe_waits[task]
            done(is_ready)

        task = self.loop.create_task(wait())
        self.probe_waits[task] = waiter, probed

    def run(self, action: Awaitable[None], done: Callable[[HeadraceError | None], None]) -> None:
        """Run a load or unload, and call `done` with its error."""

        async def wait() -> None:
            try:
                await action
            except HeadraceError as error:
                done(error)
            except Exception as error:
                logger.exception("a load or unload that a model requested failed")
                done(HeadraceError(f"the operation failed: {type(error).__name__}"))
            else:
                done(None)

        task = self.loop.create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def version_name(handle: VersionHandle) -> str:
    """Return name and number of a version, as chains of calls have them."""
    return f"{handle.spec.name}/{handle.spec.version}"


class CallConnection(CallingProcess):
    """Calls of one process; implements `CallSocket`. On the event loop only, but for its construction, `post` and the members of
    `CallSocket`.

    Args:
        end: the socket; owned.
        caller: name and version of the calling model.
        calls: leases versions.
        running: returns the batch that the process runs.
    """

    def __init__(
        self, end: socket.socket, caller: str, calls: ModelCalls, running: Callable[[], RunningBatch | None]
    ) -> None:
        super().__init__(caller, running)
        end.setblocking(False)
        self._end = end
        self._frames = Frames(end)
        self._calls = calls
        self._slots: list[Slot] = []
        self._unsent: deque[bytes] = deque()
        self._checked: dict[str, tuple[ModelSpec, CheckedShapes]] = {}
        self._is_closed = False

    # From any thread

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the event loop."""
        try:
            self._calls.loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed, and with it the server
            self._end.close()

    def close(self) -> None:
        """Abandon all calls and close the socket."""
        self.post(self._close)

    def abandon(self) -> None:
        """Cancel the calls whose requests are settled."""
        if self.calls:
            self.post(self._abandon)

    # On the event loop

    def start(self) -> None:
        """Begin to read."""
        if not self._is_closed:
            self._calls.connections.append(self)
            self._calls.loop.add_reader(self._end.fileno(), self._read)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # Else this object and the process's connection would keep each other, and its memory.
        self._running_batch = lambda: None
        if self in self._calls.connections:
            self._calls.connections.remove(self)
        loop, descriptor = self._calls.loop, self._end.fileno()
        loop.remove_reader(descriptor)
        loop.remove_writer(descriptor)
        self._frames.close()
        for call in list(self.calls.values()):
            if call.replies is not None:
                call.replies.drop()
            if call.completion is not None:
                call.completion.abandon()
        self._slots = []

    def _abandon(self) -> None:
        for call in list(self.calls.values()):
            if (
                call.parents
                and call.completion is not None
                and all(parent.completion.is_settled for parent in call.parents)
            ):
                call.completion.settle(Cancelled(_PARENTS_SETTLED))

    def _read(self) -> None:
        """Read one frame: a process that waits for its reply has sent no other, and to find that out costs as much as a call."""
        descriptors: list[int] = []
        try:
            size = self._frames.receive(descriptors)
            if size:
                self._handle(bytes(self._frames.buffer[:size]), descriptors)
            else:
                self._close()
        except BlockingIOError:
            return
        except Exception as error:  # anything that foreign code can send
            logger.error("a call of model %s does not follow the protocol: %.500r", self.caller, error)
            self._close()

    def _handle(self, frame: bytes, descriptors: list[int]) -> None:
        _version, kind, flags, slot_index, number, _count, _size = HEADER.unpack_from(frame)
        if kind == protocol.SHARE:
            self._add_slots(slot_index, descriptors)
            return
        if descriptors:
            _close_all(descriptors)
            raise ProtocolError("memory with a frame that shares none")
        if kind == protocol.CLOSE and not self.calls:
            self._slots = []
            return
        if kind == protocol.CANCEL:
            call = self.calls.get(number)
            if call is not None and call.completion is not None:
                call.completion.settle(Cancelled("the model has cancelled its call"))
                if call.replies is not None:
                    call.replies.drop()
            return
        if kind == protocol.CREDIT:
            call = self.calls.get(number)
            if call is not None and call.replies is not None:
                call.replies.take()
            return
        if kind != protocol.CALL or slot_index >= len(self._slots) or number in self.calls:
            raise ProtocolError(f"a frame of the kind {kind}")
        slot = self._slots[slot_index]
        body = frame[HEADER.size :]
        if flags & SPILLED:
            offset, size = SPILL.unpack(body)
            if size > MAX_BODY_BYTES:
                raise ProtocolError(f"a body of {size} bytes")
            body = slot.read(offset, size)
        message = json.loads(body)
        try:
            self._run(slot_index, number, message)
        except HeadraceError as error:
            self._reply_error(slot_index, number, error)

    def _add_slots(self, first: int, descriptors: list[int]) -> None:
        """Map memory that the process has created."""
        try:
            if first != len(self._slots) or first + len(descriptors) > MAX_SLOTS:
                raise ProtocolError(f"a slot with the number {first}")
            while descriptors:
                self._slots.append(Slot.received(descriptors.pop(0)))
        finally:
            _close_all(descriptors)

    def _run(self, slot_index: int, number: int, message: Mapping[str, Any]) -> None:
        operation, model, version = str(message["op"]), str(message["model"]), str(message["version"])
        self._calls.callers.add(self.caller)
        if operation == "infer":
            self._infer(slot_index, number, message, model, version)
            return
        if operation == "ready":
            self._ready(slot_index, number, message, model, version)
            return
        control = self._calls.control
        if control is None:
            raise Unavailable("models cannot be loaded or unloaded now")
        control.check_caller(self.caller.rpartition("/")[0])

        def done(error: HeadraceError | None) -> None:
            if error is None:
                self._reply(slot_index, number, {})
            else:
                self._reply_error(slot_index, number, error)

        if operation == "load":
            self._calls.run(control.load(model, None, {}), done)
        elif operation in ("unload", "unload_dependents"):
            self._calls.run(control.unload(model, operation == "unload_dependents"), done)
        else:
            raise ProtocolError("an operation " + operation)

    def _ready(self, slot_index: int, number: int, message: Mapping[str, Any], model: str, version: str) -> None:
        """Reply whether a model is ready, as its readiness route says: its code has `PROBE_LIMIT_S` to answer."""
        calls = self._calls
        try:
            handle = calls.lease(model, version, ())
        except HeadraceError:
            self._reply(slot_index, number, {"ready": False})
            return
        try:
            handle.admit()
            probed = calls.probed_by(handle)
            # Only code within `is_ready` delays a probe of its own model; a call of `execute` delays none.
            waiter = self.caller if message.get("probe") is True else ""
            if waiter and calls.is_probe_cycle(waiter, probed):
                logger.warning(
                    "is_ready of model %s waits for itself: is_model_ready of '%s' returns False", waiter, model
                )
                self._reply(slot_index, number, {"ready": False})
                return
            probes = handle.probes()
        except HeadraceError:
            self._reply(slot_index, number, {"ready": False})
            return
        finally:
            handle.release()
        if len(calls.probe_waits) >= MAX_PROBE_WAITS:
            raise Unavailable("too many calls of is_model_ready wait: try again later")
        calls.wait_for_probes(
            waiter, probed, probes, lambda is_ready: self._reply(slot_index, number, {"ready": is_ready})
        )

    def _infer(self, slot_index: int, number: int, message: Mapping[str, Any], model: str, version: str) -> None:
        now_ns = monotonic_ns()
        batch, parents = self._parents(int(message["batch"]), int(message["member"]))
        chains = [parent.call.chain for parent in parents if isinstance(parent.call, ModelCall)]
        chain = max(chains, key=len, default=())
        handle = self._calls.lease(model, version, (*chain, self.caller))
        call = ModelCall(self, batch, parents, (*chain, self.caller), version_name(handle), handle)
        try:
            request = self._request(call, self._slots[slot_index], message, now_ns)
            unknown = [name for name in request.outputs if name not in handle.spec.outputs]
            if unknown:
                raise BadRequest(f"model '{model}' has no output {unknown[0][:128]!r}: {list(handle.spec.outputs)}")
            cycle = find_cycle(call, self._calls.connections)
            if cycle:
                raise Unavailable(
                    f"models wait for each other ({' -> '.join(cycle)}) and all their instances are busy: raise "
                    "instance_group.count, or send fewer requests at once"
                )
            if message.get("stream") is True and handle.spec.decoupled:
                write = partial(self._reply_part, slot_index, number, call, request.outputs)
                call.replies = CallReplies(self._calls.mailbox, write)
                request.responses = call.replies.stream
            completion = call.completion = handle.infer(request)
        except HeadraceError as error:
            handle.record_failure(error, now_ns)
            handle.release()
            raise
        except BaseException:
            handle.release()
            raise
        self.calls[number] = call

        def finish() -> None:
            del self.calls[number]
            outcome = completion.outcome
            try:
                if isinstance(outcome, InferResponse):
                    self._reply_outputs(slot_index, number, call, request.outputs, outcome)
                else:
                    error = outcome if isinstance(outcome, HeadraceError) else HeadraceError("the call failed")
                    handle.record_failure(error, now_ns)
                    self._reply_error(slot_index, number, error)
            except Exception as error:  # a callback of a completion must not raise
                logger.error("a reply to model %s cannot be written: %.500r", self.caller, error)
                if isinstance(outcome, InferResponse):
                    handle.record_failure(ModelFailed("the reply cannot be written"), now_ns, outcome)
                self._close()
            finally:
                handle.release()

        if call.replies is None:
            completion.then(finish)
        else:
            call.replies.begin(completion, finish)

    def _parents(self, batch: int, member: int) -> tuple[int, Sequence[BatchMember]]:
        """Return number and requests of the batch that makes a call; 0 and none for a call outside of a batch.

        Raises:
            Cancelled: all of them are cancelled, or have passed their deadlines.
        """
        running = self._running_batch()
        if running is None or running.number != batch:
            return 0, ()
        members = running.members
        parents = members[member : member + 1] if 0 <= member < len(members) else members
        waiting = [parent for parent in parents if not parent.completion.is_settled]
        if not waiting:
            raise Cancelled(_PARENTS_SETTLED)
        return batch, waiting

    def _request(self, call: ModelCall, slot: Slot, message: Mapping[str, Any], now_ns: int) -> InferRequest:
        spec, parents = call.handle.spec, call.parents
        arrays: dict[str, Array] = {}
        for name, code, dims, offset, size in message["inputs"]:
            tensor = spec.inputs.get(str(name))
            if tensor is not None and DATATYPES[code][0] != tensor.datatype.name:
                raise BadRequest(
                    f"input '{name}' of model '{spec.name}' is {tensor.datatype.name}, the call has {DATATYPES[code][0]}"
                )
            arrays[str(name)] = _array(slot, code, tuple(int(number) for number in dims), int(offset), int(size))
            call.end = max(call.end, aligned(int(offset) + int(size)))
        rows, shape_key = self._shapes(spec).rows(arrays)
        if call.handle.cache is not None or call.handle.calls:
            # A response cache must not store a response under a key of other bytes: the process can change the memory, and
            # uses it again after the deadline of the call.
            arrays = {name: array.copy() for name, array in arrays.items()}
        timeout_us, deadlines = int(message["timeout_us"]), [parent.deadline_ns for parent in parents]
        # The latest one: a call may serve any request of the batch.
        deadline_ns = max(deadlines) if deadlines and all(deadlines) else 0
        if timeout_us > 0:
            due_ns = now_ns + timeout_us * NS_PER_US
            deadline_ns = min(deadline_ns, due_ns) if deadline_ns else due_ns
        parameters = {str(name): value for name, value in dict(message["parameters"]).items()}
        if not all(isinstance(value, str | int | float) for value in parameters.values()):
            raise BadRequest("parameters of a call are texts, numbers and booleans")
        return InferRequest(
            inputs=arrays,
            rows=rows,
            shape_key=shape_key,
            id=str(message["id"]),
            received_ns=now_ns,
            deadline_ns=deadline_ns,
            size_bytes=sum([array.nbytes for array in arrays.values()]),
            client=parents[0].client if parents else "",
            outputs=tuple(str(name) for name in message["outputs"]),
            parameters=parameters,
            call=call,
            internal=True,
            sequence=None if message.get("sequence") is None else SequenceFields(*message["sequence"]),
            has_headers=parameters != {} and any(parent.has_headers for parent in parents),
        )

    def _shapes(self, spec: ModelSpec) -> CheckedShapes:
        """Return the checks of a version's shapes."""
        name = f"{spec.name}/{spec.version}"
        checked = self._checked.get(name)
        if checked is None or checked[0] is not spec:
            if len(self._checked) >= _MAX_SPECS:
                self._checked.clear()
            checked = self._checked[name] = spec, CheckedShapes(spec)
        return checked[1]

    # Replies

    def _reply_part(
        self,
        slot_index: int,
        number: int,
        call: ModelCall,
        requested: tuple[str, ...],
        part: InferResponse | HeadraceError,
    ) -> None:
        """Send one of several responses; raises nothing."""
        try:
            if isinstance(part, InferResponse):
                self._reply_outputs(slot_index, number, call, requested, part, protocol.MORE)
            else:
                self._reply_error(slot_index, number, part, protocol.MORE)
        except Exception as error:
            logger.error("a response to model %s cannot be written: %.500r", self.caller, error)
            self._close()

    def _reply_outputs(
        self,
        slot_index: int,
        number: int,
        call: ModelCall,
        requested: tuple[str, ...],
        response: InferResponse,
        flags: int = 0,
    ) -> None:
        if self._is_closed:
            return
        # Behind the inputs: an output may be a view of one.
        slot, spec, end, described = self._slots[slot_index], call.handle.spec, call.end, []
        for name, array in response.outputs.items():
            if requested and name not in requested:
                continue
            code = protocol.CODES[spec.outputs[name].datatype.name]
            size = slot.put(end, array, code)
            described.append([name, code, list(array.shape), end, size])
            end = aligned(end + size)
        message: dict[str, Any] = {"outputs": described}
        if response.parameters:
            message["parameters"] = dict(response.parameters)
        self._reply(slot_index, number, message, end, flags)

    def _reply_error(self, slot_index: int, number: int, error: HeadraceError, flags: int = 0) -> None:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), protocol.INTERNAL)
        self._reply(slot_index, number, {"error": [code, str(error)[:_MAX_TEXT]]}, flags=flags)

    def _reply(
        self, slot_index: int, number: int, message: Mapping[str, Any], end: int = START, flags: int = 0
    ) -> None:
        if self._is_closed:
            return
        body, spilled = self._slots[slot_index].spill(_encode(message).encode(), end)
        frame = HEADER.pack(protocol.VERSION, protocol.REPLY, flags | spilled, slot_index, number, 1, len(body)) + body
        if not self._unsent:
            try:
                self._end.send(frame)
                return
            except BlockingIOError:
                self._calls.loop.add_writer(self._end.fileno(), self._write)
            except OSError:
                self._close()
                return
        self._unsent.append(frame)

    def _write(self) -> None:
        try:
            while self._unsent:
                self._end.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        self._calls.loop.remove_writer(self._end.fileno())


_PARENTS_SETTLED = "the request that made the call is cancelled or past its deadline"
_MAX_TEXT = 4096


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _array(slot: Slot, code: int, shape: tuple[int, ...], offset: int, size: int) -> Array:
    """Return an input in a slot: numbers as a view, text as a copy.

    Raises:
        ProtocolError: the range is not in the slot, or does not have the size of the shape.
    """
    if offset < START or any(number < 0 for number in shape):
        raise ProtocolError(f"a tensor at {offset}")
    if code == BYTES:
        slot.reach(offset, size)
        if size > MAX_TEXT_BYTES:
            raise BadRequest(f"an input has {size} bytes of text, at most {MAX_TEXT_BYTES} are allowed in a call")
        return protocol.unpack_texts(slot.read(offset, size), shape)
    dtype = DTYPES[code]
    if size != math.prod(shape) * dtype.itemsize:
        raise ProtocolError(f"a tensor of {size} bytes")
    slot.reach(offset, size)
    slot.check_written(size)
    return np.ndarray(shape, dtype, slot.memory, offset)
