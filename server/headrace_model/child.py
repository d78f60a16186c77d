"""The program of a model instance's process: loads `model.py`, runs the batches that the server sends, and ends with its sockets.

One thread runs everything: the model's code is called on the main thread. Errors of the model's code become answers; the text of
an exception goes to the log, never to the client.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import os
import struct
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict

import numpy as np

from headrace_model import forms, protocol, python_backend, python_tensors
from headrace_model.calls import Calls
from headrace_model.channel import Frames, Messages
from headrace_model.process import exit_process, limit_memory, run_exit_handlers
from headrace_model.protocol import WrongResultError
from headrace_model.requests import (
    SCHEDULED_AGAIN,
    BatchReader,
    MemberError,
    MemberOutputs,
    ReceivedBatch,
    ResultWriter,
    failed,
)
from headrace_model.slots import Slot
from headrace_model.streams import ResponseSocket

_MAX_LOAD_TEXT = 2000
# Time without a batch after which the memory of calls to other models is released, seconds.
_IDLE_S = 1.0
# Objects between two runs of the garbage collector, unless the model's code sets a number. Python's are 700, 2,000 from 3.13 on.
_OBJECTS_A_COLLECTION = 10_000
_DEFAULT_THRESHOLDS = (700, 2000)
Message = Dict[str, Any]


class ModelServer:
    """Runs the batches of one instance.

    Args:
        frames: socket of the batches.
        form: the loaded model.
        order: load request of the server.
        descriptor: socket of responses that are sent one by one; None without one.
    """

    def __init__(self, frames: Frames, form: Any, order: Message, descriptor: int | None = None) -> None:
        self._frames = frames
        self._form = form
        self._order = {name: index for index, (name, *_) in enumerate(order["inputs"])}
        self._reader = BatchReader([name for name, *_ in order["inputs"]], [name for name, *_ in order["outputs"]])
        self._writer = ResultWriter([(name, code) for name, code, *_ in order["outputs"]])
        self._slots: list[Slot] = []
        self._model = order["model"]
        self._process = os.getpid()
        self._streams: ResponseSocket | None = None
        if descriptor is not None and form.by_request:
            bounds = order.get("responses", {})
            self._streams = ResponseSocket(
                descriptor, self._writer, bool(bounds.get("decoupled")), bounds.get("count", 1), bounds.get("bytes", 0)
            )
        self._decoupled = self._streams is not None and self._streams.decoupled
        python_backend.runtime.responses = self._streams
        python_backend.runtime.is_iterative = bool(order.get("iterative"))

    def serve(self) -> None:
        """Run batches until the server closes its end."""
        frames, is_idle = self._frames, False
        while True:
            frames.set_timeouts(0.0 if is_idle else _IDLE_S)
            try:
                size = frames.receive()
            except BlockingIOError:
                calls = python_backend.runtime.calls
                is_idle = calls is None or calls.release()
                continue
            is_idle = False
            if not size:
                return
            frame = bytes(frames.buffer[:size])
            kind = frame[1]
            slot, number = _SLOT_AND_NUMBER.unpack_from(frame, 4)
            if kind == protocol.CLOSE:
                self._reader.regions.close(number)
                continue
            if kind != protocol.RUN:
                raise protocol.ProtocolError(f"a frame of the kind {kind}")
            while slot >= len(self._slots):
                self._receive_slots()
            kind, count, body, flags = self._run(frame, self._slots[slot])
            if os.getpid() != self._process:  # its parent answers the batch
                sys.stderr.write("a process that the model's code has forked did not end by os._exit: it is ended\n")
                exit_process(1)
            try:
                frames.send(kind, slot, number, count, body, flags)
            except BrokenPipeError:
                return

    def _receive_slots(self) -> None:
        descriptors: list[int] = []
        while not descriptors:
            if not self._frames.receive(descriptors):
                raise EOFError
            frame = self._frames.buffer
            if frame[1] == protocol.CLOSE:  # any thread of the server sends these, also before a slot
                self._reader.regions.close(_SLOT_AND_NUMBER.unpack_from(frame, 4)[1])
            elif not descriptors:
                raise EOFError
        self._slots.extend(Slot(descriptor) for descriptor in descriptors)

    def _run(self, frame: bytes, slot: Slot) -> tuple[int, int, bytes, int]:
        """Run one batch; return kind, count, body and flags of the answer."""
        runtime = python_backend.runtime
        try:
            batch = self._reader.read(frame, slot)
            runtime.batch = batch.number
            if self._form.by_request:
                body, flags = self._writer.done_members(batch, *self._execute(batch))
            else:
                body, flags = self._writer.done_batch(batch, self._form.predict(batch.inputs))
            return protocol.DONE, len(batch.members), body, flags
        except WrongResultError as error:
            return protocol.FAILED, 0, failed(protocol.INTERNAL, str(error)), 0
        except python_tensors.TritonModelException as error:
            return protocol.FAILED, 0, failed(protocol.INTERNAL, str(error) or "the model failed", _traceback(error)), 0
        except SystemExit as error:
            traceback.print_exc()
            if os.getpid() == self._process:
                run_exit_handlers()
            exit_process(error.code if isinstance(error.code, int) else 1)
            raise
        except BaseException as error:  # also a panic of a library in Rust, which is no Exception
            if os.getpid() != self._process:
                traceback.print_exc()
            return protocol.FAILED, 0, failed(protocol.INTERNAL, "", _traceback(error)), 0
        finally:
            runtime.batch = 0

    def _execute(self, batch: ReceivedBatch) -> tuple[list[MemberOutputs | MemberError | None], dict[int, str]]:
        """Run a batch; return the result of each member, and the parameters of responses by index of their member.

        The result of a member whose sender answers it is None, of one that is scheduled again `SCHEDULED_AGAIN`.
        """
        if self._decoupled:  # a thread of the model may read them when the next batch is in the slot
            batch.inputs = {name: array.copy() for name, array in batch.inputs.items()}
        requests = self._requests(batch)
        members, refused = batch.members, batch.refused
        if refused:
            requests = [request for index, request in enumerate(requests) if index not in refused]
            members = [member for index, member in enumerate(members) if index not in refused]
        try:
            responses = self._responses(requests, self._form.execute(requests) if requests else [])
        except BaseException:
            if self._streams is not None:
                self._streams.abandon([request._reference for request in requests])
            raise
        declared = self._writer.declared
        results: list[MemberOutputs | MemberError | None] = []
        parameters: dict[int, str] = {}
        for response, member in zip(responses, members):
            if response is None or response is SCHEDULED_AGAIN:
                results.append(response)
                continue
            if not isinstance(response, python_backend.InferenceResponse):
                raise WrongResultError(f"the model returned {type(response).__name__} in its list of responses")
            error = response._error
            if error is not None:
                results.append((_code(error), str(error._message)))
                continue
            requested = member.output_names
            outputs: MemberOutputs = {}
            for tensor in response._output_tensors:
                name = tensor._name
                if name in declared and (not requested or name in requested):
                    outputs[declared[name][0]] = tensor._array
            if response._parameters:
                parameters[len(results)] = response._parameters
            results.append(outputs)
        for index in sorted(refused):
            results.insert(index, refused[index])
            parameters = {number + (number >= index): text for number, text in parameters.items()}
        return results, parameters

    def _responses(self, requests: list[Any], responses: Any) -> list[Any]:
        """Check what `execute` has returned; return the response of each request.

        It is None for a request that its sender answers, and `SCHEDULED_AGAIN` for one that takes part in the next batch.

        Raises:
            WrongResultError: a request has neither a response nor a sender, or both; or one that is scheduled again has one.
        """
        count = len(requests)
        if responses is not None and len(responses) != count:
            raise WrongResultError(f"the model returned {len(responses)} responses for {count} requests")
        results = [None] * count if responses is None else list(responses)
        if self._decoupled:
            if any(response is not None for response in results):
                raise WrongResultError(
                    "the model is decoupled, and its execute returned responses: send them with request.get_response_sender(), "
                    "and return None"
                )
            return [self._suspend(request) for request in requests] if python_backend.runtime.is_iterative else results
        for index, (request, response) in enumerate(zip(requests, results)):
            reference = request._reference
            if request._release_flags == python_backend.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                if response is not None or reference is not None:
                    raise WrongResultError(
                        "the model returned a response for a request that is scheduled again, or has taken its response sender: "
                        "return None for it, and the response in its last step"
                    )
                results[index] = SCHEDULED_AGAIN
            elif reference is None:
                if response is None:
                    came = f"nothing for {count} requests" if responses is None else "None in its list of responses"
                    raise WrongResultError(f"the model returned {came}, without a response sender")
            elif response is not None:
                raise WrongResultError(
                    "the model returned a response for a request that has a response sender: return None"
                )
        for index, request in enumerate(requests):
            if request._reference is not None and self._streams is not None:
                results[index] = self._streams.take_buffered(request._reference.state)
        return results

    def _suspend(self, request: Any) -> MemberError | None:
        """Return the result of a request of a decoupled iterative model; one whose final flag was sent is not run again."""
        is_again = request._release_flags == python_backend.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        assert self._streams is not None, "a decoupled model has a socket of responses"
        return SCHEDULED_AGAIN if is_again and self._streams.suspend(request._reference) else None

    def _requests(self, batch: ReceivedBatch) -> list[Any]:
        """Create the request objects of a batch; their arrays are views of the slot."""
        members, slot, inputs = batch.members, batch.slot, batch.inputs
        names = tuple(self._writer.declared)
        create, tensor_class, request_class = object.__new__, python_tensors.Tensor, python_backend.InferenceRequest
        parts: dict[str, list[Any]] = {name: [array] for name, array in inputs.items()}
        if len(members) > 1:
            for name, array in inputs.items():
                rows: list[Any] = []
                at = 0
                for member in members:
                    rows.append(array[at : at + member.rows])
                    at += member.rows
                parts[name] = rows
            batch.parts = parts
        requests = []
        for index, member in enumerate(members):
            tensors = []
            for name, rows in parts.items():
                # Without the constructors, which check what a model's code gives them.
                tensor = create(tensor_class)
                tensor._name, tensor._array = name, rows[index]
                tensors.append(tensor)
            request = create(request_class)
            request._inputs = tensors
            request._request_id = member.id
            request._output_names = member.output_names or names
            request._parameters = member.parameters
            request._slot = slot
            request._batch = batch.number
            request._member = index
            if self._decoupled and self._streams is not None:
                if member.open_key is None:
                    reference = self._streams.open(batch.number, index, member.output_names, slot)
                else:
                    reference = self._streams.resume(member.open_key, member.output_names)
                request._reference, request._slot = reference, reference.state
            requests.append(request)
        if batch.separate:
            self._add_separate(batch, requests)
        return requests

    def _add_separate(self, batch: ReceivedBatch, requests: list[Any]) -> None:
        """Add the inputs that each member has for itself to the requests, in the order of the configuration."""
        for index, request in enumerate(requests):
            tensors = request._inputs
            for name, sources in batch.separate.items():
                if sources[index] is not None:
                    tensors.append(python_tensors.create_input(name, sources[index]))
            tensors.sort(key=lambda tensor: self._order[tensor._name])


_SLOT_AND_NUMBER = struct.Struct("<IQ")


def _code(error: Any) -> int:
    code = error._code
    return code if isinstance(code, int) and 0 < code <= protocol.CANCELLED else protocol.INTERNAL


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def import_model(file: Path, version: str) -> ModuleType:
    """Import a model's file; its folder and the model's folder are on `sys.path`, as in Triton.

    Args:
        file: the file, MODEL/VERSION/model.py.
        version: name of its folder.
    """
    for folder in (file.parent, file.parent.parent):
        sys.path.append(str(folder))
    name = version + "." + file.stem
    parent = ModuleType(version)  # for relative imports of files beside it
    parent.__path__ = [str(file.parent)]
    sys.modules[version] = parent
    spec = importlib.util.spec_from_file_location(name, str(file))
    if spec is None or spec.loader is None:
        raise ImportError("no Python file: " + file.name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_model(order: Message) -> Any:
    """Import the model and find its form.

    Args:
        order: load request of the server.

    Raises:
        forms.Refused: the file has no model.
    """
    for name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[name] = python_backend
    runtime = python_backend.runtime
    runtime.model_name, runtime.model_version = order["model"], order["version"]
    file = Path(order["file"])
    runtime.model_dir = str(file.parent)
    if order["form"] == "python":
        return forms.find_form(import_model(file, order["version"]), file)
    return forms.find_form(importlib.import_module("headrace_model.frameworks." + order["form"]), file)


def refusal(order: Message, error: BaseException, step: str) -> Message:
    """Return the message for the server about a model that cannot be loaded.

    Args:
        order: load request of the server.
        error: what was raised.
        step: what raised it, for the text.
    """
    file = Path(order["file"])
    path = "{}/{}/{}".format(order["model"], order["version"], file.name)
    if isinstance(error, forms.Refused):
        return {"refused": [[path, error.line, error.message, error.cure]]}
    line, last = None, ""
    for frame in traceback.extract_tb(error.__traceback__):
        last = f", in {Path(frame.filename).name}:{frame.lineno}"
        if frame.filename == str(file):
            line, last = frame.lineno, ""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        line = error.lineno
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    cure = "correct the code; the log of a server has the traceback"
    if isinstance(error, ModuleNotFoundError):
        package, last = (error.name or "").partition(".")[0], ""
        cure = f"name the package of {package} in requirements.txt, in the model's folder, or install it"
    return {"refused": [[path, line, f"{step} raised {text[:_MAX_LOAD_TEXT]}{last}", cure]]}


def run(frames: Frames, control: Messages, calls: int | None, responses: int | None = None) -> int:
    """Load the model, serve until the server closes the socket, and finalize the model.

    Args:
        frames: socket of the batches.
        control: socket of the control messages.
        calls: descriptor of the socket for calls to other models; None without calls.
        responses: descriptor of the socket of responses that are sent one by one; None without it.

    Returns:
        The exit status of the process.
    """
    order = control.receive()
    if order["protocol"] != protocol.VERSION:
        control.send({"refused": [[order["model"], None, "its environment has another version of headrace_model", ""]]})
        return 1
    limit_memory(order["memory_bytes"])

    def send(message: Message) -> None:
        with suppress(OSError):  # the server is gone, and this process ends soon
            control.send(message)

    python_backend.runtime.send = send
    if calls is not None:
        python_backend.runtime.calls = Calls(calls)
    step = "the import"
    try:
        form = load_model(order)
        if order["do"] == "describe":
            step = "auto_complete_config"
            send({"described": form.describe(order["config"])})
            return 0
        if order.get("responses", {}).get("decoupled") and not form.by_request:
            cure = "write a class TritonPythonModel, or remove decoupled"
            raise forms.Refused("is of a form with one response to a request, and decoupled is true", cure)
        step = "initialize"
        form.initialize(order["args"])
    except BaseException as error:  # also SystemExit, KeyboardInterrupt and a panic of a library in Rust
        if not isinstance(error, forms.Refused):
            traceback.print_exc()
        send(refusal(order, error, step))
        return 1
    _relax_collector()
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "numpy": np.__version__, "form": form.name}
    send({"loaded": dict(versions, has_probe=form.has_probe)})
    if form.has_probe:
        threading.Thread(
            target=answer_probes, args=(control, form, send), name=protocol.PROBE_THREAD, daemon=True
        ).start()
    ModelServer(frames, form, order, responses).serve()
    try:
        form.finalize()
    except BaseException:
        traceback.print_exc()
    return 0


def answer_probes(control: Messages, form: Any, send: Callable[[Message], None]) -> None:
    """Run the readiness checks that the server starts, until the socket is closed.

    It runs on a thread of its own, as in Triton: a batch that runs meanwhile does not delay the answer.

    Args:
        control: socket to the server.
        form: the loaded model.
        send: sends a message.
    """
    while True:
        try:
            number = control.receive().get("probe")
        except (EOFError, OSError, protocol.ProtocolError):
            return
        try:
            is_ready = form.is_ready()
        except BaseException:  # also sys.exit: the model is not ready
            traceback.print_exc()
            is_ready = False
        send({"probed": number, "ready": is_ready})


def _relax_collector() -> None:
    """Let the garbage collector skip the loaded model, and run less often: each batch creates hundreds of objects."""
    gc.collect()
    gc.freeze()
    if gc.get_threshold()[0] in _DEFAULT_THRESHOLDS:
        gc.set_threshold(_OBJECTS_A_COLLECTION, *gc.get_threshold()[1:])


def stream_lines() -> None:
    """Write each line of standard output at once: it is a pipe to the server's log."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
