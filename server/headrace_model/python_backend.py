"""The module that a `model.py` for Triton's Python backend imports as `triton_python_backend_utils`.

Names and behaviour are those of Triton's python_backend. A name that is not served here raises AttributeError with the reason.
Runs in the process of a model instance, on Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace_model import protocol
from headrace_model.auto_complete import AutoCompleteConfig
from headrace_model.metrics import Metric, MetricFamily, reporter_for
from headrace_model.python_tensors import (  # noqa: F401  # names of Triton's module
    TRITON_STRING_TO_NUMPY,
    Tensor,
    TritonError,
    TritonModelException,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from headrace_model.streams import SenderError

__all__ = ["Metric", "MetricFamily", "ModelConfig"]

ModelConfig = AutoCompleteConfig

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_CPU_PINNED = 1
TRITONSERVER_MEMORY_GPU = 2
# The first examples of custom metrics have them here.
COUNTER, GAUGE = MetricFamily.COUNTER, MetricFamily.GAUGE


class ModelRuntime:
    """State of the process that the classes of this module use.

    Attributes:
        send: sends a control message to the server.
        calls: calls other models of the server; None without a connection.
        responses: sends responses one by one; None before the model serves, and in a model of our own form.
        metrics: collects custom metrics for the server.
        model_name: name of the model.
        model_version: version of the model.
        model_dir: folder of the version.
        batch: number of the batch that is running; 0 between batches.
        is_iterative: requests may be scheduled again.
    """

    def __init__(self) -> None:
        self.send: Callable[[dict[str, Any]], None] = lambda _message: None
        self.calls: Any = None
        self.responses: Any = None
        self.metrics = reporter_for(lambda message: self.send(message))
        self.model_name = ""
        self.model_version = ""
        self.model_dir = ""
        self.batch = 0
        self.is_iterative = False

    def calling_batch(self) -> int:
        """Return the number of the batch for which a call is made; 0 for none.

        Threads of a decoupled model serve requests of any batch: their calls have no deadline and client of the running one.
        """
        is_execute = threading.current_thread() is threading.main_thread()
        return self.batch if is_execute or self.responses is None or not self.responses.decoupled else 0


runtime = ModelRuntime()


class PreferredMemory:
    """Memory in which a called model should put its outputs; accepted, the outputs are in host memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """Names the request of the running batch that a call serves: the call has its deadline and client, and is cancelled with it.

    Args:
        member: index of the request in its batch; -1 for none.
    """

    __slots__ = ("_member",)

    def __init__(self, member: int = -1) -> None:
        self._member = member


_NO_PARAMETERS: dict[str, Any] = {}
# Parameters of the server with the sequence of a request; clients cannot send these names.
_SEQUENCE_ID = "headrace.sequence_id"
_SEQUENCE_FLAGS = "headrace.sequence_flags"


class InferenceRequest:
    """A request: one that the server has sent, or one that a model creates to call another model.

    Args:
        inputs: list of Tensor.
        request_id: id of the request.
        correlation_id: sequence of the request; 0 without one.
        requested_output_names: names of the outputs to return.
        model_name: name of the called model.
        model_version: version of the called model; -1: the latest.
        flags: flags of a sequence.
        timeout: time limit of a call in microseconds; 0: the deadline of the running batch.
        preferred_memory: memory of the outputs; has no effect.
        trace: trace of the request of the batch that the call serves; None: it may serve any of them.
        parameters: parameters of the request, a dict or JSON text.
    """

    # Defaults of the class, not attributes of every request: a batch has a request object for each of its members.
    _correlation_id: int | str = 0
    _model_name = ""
    _model_version = -1
    _flags: int | None = None
    _timeout = 0
    _trace: InferenceTrace | None = None
    _slot: Any = None
    _batch = 0
    _member = 0
    _reference: Any = None
    _release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        request_id: str = "",
        correlation_id: int | str = 0,
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: str | dict[str, Any] | None = None,
    ) -> None:
        self._inputs = inputs
        self._request_id: str = protocol.text(request_id)
        self._correlation_id = protocol.text(correlation_id)
        self._output_names: Sequence[str] = [protocol.text(name) for name in requested_output_names]
        self._model_name = protocol.text(model_name)
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._trace = trace
        self._parameters = _NO_PARAMETERS if parameters is None else _parameters(parameters)

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the id that the caller gave the request; "" without one."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the request's sequence, a number or a text; 0 without one."""
        return self._correlation_id or self._parameters.get(_SEQUENCE_ID, 0)

    def requested_output_names(self) -> list[str]:
        """Return the names of the outputs that the caller requested."""
        return list(self._output_names)

    def model_name(self) -> str:
        """Return the name of the model that gets the request."""
        return self._model_name or runtime.model_name

    def model_version(self) -> int:
        """Return the version of the model that gets the request."""
        if self._model_name or not runtime.model_version:
            return self._model_version
        return int(runtime.model_version)

    def parameters(self) -> str:
        """Return the parameters of the request as JSON text."""
        return json.dumps({key: value for key, value in self._parameters.items() if not key.startswith("headrace.")})

    def timeout(self) -> int:
        """Return the time limit of the request in microseconds; 0 without one."""
        return self._timeout

    def flags(self) -> int:
        """Return the flags of a sequence: a sum of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._parameters.get(_SEQUENCE_FLAGS, 0) if self._flags is None else self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a sequence."""
        self._flags = flags

    def trace(self) -> InferenceTrace:
        """Return the trace, to be passed on to a call that serves this request."""
        return InferenceTrace(self._member if self._batch else -1)

    def preferred_memory(self) -> PreferredMemory:
        """Return the memory of the outputs: host memory."""
        return PreferredMemory(TRITONSERVER_MEMORY_CPU)

    def is_cancelled(self) -> bool:
        """Return True once the caller waits no longer: it has disconnected, or its deadline has passed."""
        return self._slot is not None and self._slot.is_cancelled(self._member)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call the model of this request and wait for its response.

        Args:
            decoupled: return an iterator over any number of responses at once; it waits for each of them.
        """
        calls = self._calls()
        return calls.stream(self) if decoupled else calls.infer(self)  # type: ignore[no-any-return]

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:
        """Call the model of this request from `async def execute`; the result of `exec` is awaited."""
        calls = self._calls()
        if not decoupled:
            return calls.infer_async(self)  # type: ignore[no-any-return]
        future = asyncio.get_running_loop().create_future()
        future.set_result(calls.stream(self))
        return future

    def _calls(self) -> Any:
        if not self._model_name:
            raise TritonModelException("a call needs the name of a model: InferenceRequest(model_name=...)")
        return _calls()

    def get_response_sender(self) -> InferenceResponseSender:
        """Return a sender for the responses of this request, which any thread may use after `execute` has returned None for it.

        Raises:
            TritonModelException: the request is one that this model has created, or its response has been returned.
        """
        responses = runtime.responses
        if self._reference is None:
            if not self._batch or responses is None:
                raise TritonModelException(
                    "get_response_sender is for requests that execute has received: a request of the model's own has its "
                    "response from exec"
                )
            if runtime.batch != self._batch:
                raise TritonModelException(
                    "get_response_sender was called after execute had returned the response of the request: call it before, and "
                    "return None for the request"
                )
            self._reference = responses.open(self._batch, self._member, self._output_names, self._slot)
        return InferenceResponseSender(self._reference)

    def set_release_flags(self, flags: int) -> None:
        """Set whether the request ends with `execute`, or takes part in the next batch of this instance as well.

        Args:
            flags: TRITONSERVER_REQUEST_RELEASE_ALL, or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE.

        Raises:
            TritonModelException: the model has no `iterative_sequence`, or the request is not one that `execute` runs.
        """
        is_again = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if not is_again and flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException(
                f"release flags are TRITONSERVER_REQUEST_RELEASE_ALL or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, not {flags!r}"
            )
        if not self._batch or runtime.batch != self._batch:
            raise TritonModelException(
                "set_release_flags is for requests of the running execute: call it before it returns"
            )
        if is_again and not runtime.is_iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, and the model is not iterative: write "
                "sequence_batching { iterative_sequence: true } in its configuration"
            )
        self._release_flags = flags


class ResponseIterator:
    """Responses of `exec(decoupled=True)` in the order in which the model sent them; one thread iterates over them, once.

    The call is cancelled if the iterator is dropped before its end.
    """

    def __init__(self, calls: Any, number: int, lease: Any) -> None:
        self._calls, self._number, self._lease = calls, number, lease

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._lease is None:
            raise StopIteration
        response, may_follow = self._calls.next_response(self._number, self._lease)
        if not may_follow:
            self._lease = None
        if response is None:
            raise StopIteration
        return response  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """Cancel the call: no further response comes."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._calls.drop(self._number, lease)

    def __del__(self) -> None:
        self.cancel()


class InferenceResponseSender:
    """Sends the responses of one request; from `InferenceRequest.get_response_sender`. Any thread may use it.

    A request whose senders are all dropped without the final flag ends with an error.

    Args:
        reference: keeps the request open.
    """

    __slots__ = ("_reference",)

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        Blocks while the client has not read enough of the responses before. Responses of a request that is cancelled are dropped.

        Args:
            response: the response; None with the final flag: no other response follows.
            flags: 0, or TRITONSERVER_RESPONSE_COMPLETE_FINAL with the last response.

        Raises:
            TritonModelException: the response cannot be sent, or the final flag was sent before.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL) or isinstance(flags, bool):
            raise TritonModelException(f"flags are 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL, not {flags!r}")
        if response is None and not flags:
            raise TritonModelException(
                "send() has no response: pass one, or flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"a response is an InferenceResponse, not {type(response).__name__}")
        try:
            runtime.responses.send(self._reference.state, response, bool(flags))
        except (SenderError, protocol.WrongResultError) as error:
            raise TritonModelException(str(error)) from None

    def is_cancelled(self) -> bool:
        """Return True once nothing waits for the responses: the client has disconnected, or the deadline has passed."""
        state = self._reference.state
        return bool(state.is_cancelled())


def _parameters(parameters: str | dict[str, Any]) -> dict[str, Any]:
    values = json.loads(parameters) if isinstance(parameters, (str, bytes)) else parameters
    if not isinstance(values, dict) or not all(isinstance(v, (str, int, float, bool)) for v in values.values()):
        raise TritonModelException(f"parameters are an object of texts, numbers and booleans, not {parameters!r:.200}")
    return dict(values)


def _response_parameters(parameters: str | dict[str, Any]) -> str:
    """Return parameters of a response as JSON text, "" for none."""
    values = _parameters(parameters)
    if not all(
        isinstance(name, str) and _is_parameter(name) and _is_parameter(value) for name, value in values.items()
    ):
        raise TritonModelException(
            f"parameters are texts, booleans and numbers of 64 bits by their names, not {values!r:.200}"
        )
    text = json.dumps(values) if values else ""
    limit = protocol.MAX_PARAMETER_BYTES
    if len(text) > limit:
        raise TritonModelException(
            f"parameters of a response have {len(text)} bytes as JSON, at most {limit}: return a tensor"
        )
    return text


def _is_parameter(value: Any) -> bool:
    if isinstance(value, str):
        return value == value.encode("utf-8", "ignore").decode()  # without single surrogates
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _calls() -> Any:
    if runtime.calls is None:
        raise TritonModelException("other models can only be called while the model is served")
    return runtime.calls


class InferenceResponse:
    """The response to one request.

    Args:
        output_tensors: list of Tensor.
        error: error that the client receives instead of the tensors.
        parameters: parameters of the response, a dict or JSON text, of at most 64 KiB as JSON.
    """

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: str | dict[str, Any] | None = None,
    ) -> None:
        if type(output_tensors) is not list and not isinstance(output_tensors, (list, tuple)):
            raise TritonModelException(f"output_tensors is a list of Tensor, not {type(output_tensors).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error is a TritonError, not {type(error).__name__}")
        self._output_tensors = output_tensors
        self._error = error
        self._parameters = _response_parameters(parameters) if parameters else ""

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Return True if the response has an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return self._parameters or "{}"


class Logger:
    """Writes to the server's log, under the model's name."""

    INFO, WARNING, ERROR, VERBOSE = "info", "warning", "error", "verbose"

    @staticmethod
    def log(message: str, level: str = "info") -> None:
        """Log a message."""
        if level not in ("info", "warning", "error", "verbose"):
            raise TritonModelException(f"a log level is Logger.INFO, WARNING, ERROR or VERBOSE, not {level!r}")
        runtime.send({"log": [level, str(protocol.text(message))]})

    @staticmethod
    def log_info(message: str) -> None:
        """Log a message of the level INFO."""
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log a warning."""
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Log an error."""
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log a message that only the level DEBUG of the server shows."""
        Logger.log(message, Logger.VERBOSE)


LogLevel = Logger


def _by_name(tensors: Iterable[Any], name: str) -> Any:
    name = protocol.text(name)
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request; None if the request has no such input."""
    return _by_name(inference_request._inputs, name)  # type: ignore[no-any-return]


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response; None if the response has no such output."""
    return _by_name(inference_response._output_tensors, name)  # type: ignore[no-any-return]


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an input; None if there is none."""
    return next((part for part in model_config.get("input", ()) if part["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an output; None if there is none."""
    return next((part for part in model_config.get("output", ()) if part["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return True if the configuration requests a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return True if a model of the server is ready."""
    return bool(_calls().control("ready", protocol.text(model_name), str(protocol.text(model_version))))


def load_model(model_name: str, files: dict[str, Any] | None = None, config: str = "") -> None:
    """Load a model of the repository; the server needs `--model-control-mode explicit`."""
    if files or config:
        raise TritonModelException(
            "load_model with files or config is not served here: put the model into the repository"
        )
    _calls().control("load", protocol.text(model_name), "")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; the server needs `--model-control-mode explicit`."""
    _calls().control("unload_dependents" if unload_dependents else "unload", protocol.text(model_name), "")


def get_model_dir() -> str:
    """Return the folder of the running version."""
    return runtime.model_dir


_REFUSED = {
    "RawData": "inputs are NumPy arrays, read them with as_numpy()",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    reason = _REFUSED.get(name, "docs/python-models.md lists the names that are")
    raise AttributeError(f"triton_python_backend_utils.{name} is not served here: {reason}")
