"""Request options in HTTP headers and gRPC metadata (client, timeout, timing, load report, trace), and request parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.access import AccessControl, OpenAccess, Principal
from headrace.core.clock import NS_PER_MS
from headrace.core.errors import BadRequest
from headrace.core.limits import CLIENT_HEADER, CLIENT_PATTERN
from headrace.core.request import NO_PARAMETERS, ParameterValue, SequenceFields
from headrace.core.telemetry import TRACEPARENT_HEADER, TRACESTATE_HEADER, TraceContext, trace_context
from headrace.wire.requests.forwarded_headers import ForwardedHeaders, WireNames

TIMEOUT_HEADER = "x-request-timeout-ms"
TIMING_HEADER = "headrace-timing"
# Format of the load report (Open Request Cost Aggregation); Triton's name of the header.
LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
# Triton's: an error ends the gRPC stream with its status code, instead of being a message on the stream.
STREAM_ERROR_HEADER = "triton_grpc_error"

# Credentials of the caller; read only if the server has keys.
AUTHORIZATION_HEADER = "authorization"
API_KEY_HEADER = "x-api-key"

_OPTION_HEADERS = (
    *(TIMEOUT_HEADER, TIMING_HEADER, LOAD_FORMAT_HEADER, TRACEPARENT_HEADER, TRACESTATE_HEADER),
    STREAM_ERROR_HEADER,
)
_CLIENT = re.compile(CLIENT_PATTERN)
_TIMEOUT = re.compile(r"[0-9]{1,20}")
# A longer timeout counts as none; the limit also keeps timers from overflowing.
MAX_TIMEOUT_NS = 86_400_000 * NS_PER_MS
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request, from its headers or metadata.

    Attributes:
        client: name of the client, "" for none; with keys the name of the key.
        timeout_ns: time that the client waits for the response, 0 for no limit.
        timing: True to return the time of each phase.
        load_format: format of the load report in lower case, "" for none.
        trace: trace context of the caller, None for none.
        ends_stream: True if the first error of a gRPC stream ends it.
        principal: of the credentials; None if the server has no keys.
        routing: values of the sticky headers by name; None without any.
        forwarded: values of the headers that models get as parameters, by name; None without any.
    """

    client: str = ""
    timeout_ns: int = 0
    timing: bool = False
    load_format: str = ""
    trace: TraceContext | None = None
    ends_stream: bool = False
    principal: Principal | None = None
    routing: Mapping[str, str] | None = None
    forwarded: Mapping[str, str] | None = field(default=None, repr=False)

    def deadline_ns(self, start_ns: int, transport_ns: int = 0) -> int:
        """Return the earlier of the option's deadline, counted from `start_ns`, and the transport's; monotonic, 0 for none."""
        return earlier(start_ns + self.timeout_ns if self.timeout_ns else 0, transport_ns)


NO_OPTIONS = RequestOptions()


class RequestOptionsReader:
    """Parses request options.

    Args:
        client_header: header with the name of the client, in lower case. Ignored if the server has keys.
        access: resolves credentials; None for a server without keys.
        reads_load_format: False to ignore requests for a load report.
        forwarded: selects the headers that models get as parameters; None for none.
        grpc_forwarded: the same for gRPC metadata.

    Attributes:
        access: see Args.
        grpc: reader of gRPC metadata; this object if it forwards the same.
        names: of all option headers, and with keys of the headers with credentials.
        wire_names: the same names by their bytes on the wire; contains the forwarded ones too.
        no_options: options of a request without any of these headers.
        routing_headers: names of the sticky headers, see `set_routing_headers`.
    """

    def __init__(
        self,
        client_header: str = CLIENT_HEADER,
        access: AccessControl | None = None,
        reads_load_format: bool = True,
        forwarded: ForwardedHeaders | None = None,
        grpc_forwarded: ForwardedHeaders | None = None,
    ) -> None:
        self._client_header, self._forwarded = client_header, forwarded
        self.access = access or OpenAccess()
        has_keys = self.access.has_keys
        source = (AUTHORIZATION_HEADER, API_KEY_HEADER) if has_keys else (client_header,)
        self._caller_names = frozenset(source)
        self._names = frozenset((*source, *_OPTION_HEADERS)) - (set() if reads_load_format else {LOAD_FORMAT_HEADER})
        self.routing_headers: frozenset[str] = frozenset()
        self._callbacks: list[Callable[[], None]] = []
        self._name_headers()
        self.no_options = RequestOptions(principal=self.access.anonymous) if has_keys else NO_OPTIONS
        self.grpc = self
        if grpc_forwarded is not forwarded:
            self.grpc = RequestOptionsReader(
                client_header, self.access, reads_load_format, grpc_forwarded, grpc_forwarded
            )

    def _name_headers(self) -> None:
        self.names = self._names | self.routing_headers
        wire_names = {name.encode(): name for name in self.names}
        self.wire_names = wire_names if self._forwarded is None else WireNames(self.names, self._forwarded)

    def set_routing_headers(self, names: frozenset[str]) -> None:
        """Read other headers too, in lower case, into `RequestOptions.routing`; called on the event loop."""
        if names != self.routing_headers:
            self.routing_headers = names
            self._name_headers()
            self.grpc.set_routing_headers(names)
            for callback in self._callbacks:
                callback()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after a change of the headers that are read, for caches of parsed heads."""
        self._callbacks.append(callback)

    def add(self, values: dict[str, str], name: bytes, value: bytes) -> None:
        """Add the value of a header in `wire_names`.

        Raises:
            BadRequest: it names the caller, or is forwarded, a second time: a proxy may have checked the other value.
        """
        text = self.wire_names[name]
        if text in values and (text in self._caller_names or text not in self.names):
            raise BadRequest(f"the header {text} came twice: send it once")
        values[text] = value.decode("latin-1")

    def values(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the values of the headers in `names`; raises as `add`."""
        values: dict[str, str] = {}
        for name, value in headers:
            if name in self.wire_names:
                self.add(values, name, value)
        return values

    def principal(self, headers: Mapping[str, str], peer: Principal | None = None) -> Principal:
        """Return the principal of a request; never raises.

        Args:
            headers: values by name.
            peer: principal of the client certificate, None for none.
        """
        authorization, api_key = headers.get(AUTHORIZATION_HEADER, ""), headers.get(API_KEY_HEADER, "")
        return self.access.authenticate(authorization, api_key, peer)

    def read(self, headers: Mapping[str, str], peer: Principal | None = None) -> RequestOptions:
        """Parse the options of one request.

        Args:
            headers: values by name; names that are not in `names` are ignored.
            peer: principal of the client certificate, None for none.

        Raises:
            BadRequest: a header has an invalid value.
        """
        if not headers and peer is None:
            return self.no_options
        principal = self.principal(headers, peer) if self.access.has_keys else None
        client = headers.get(self._client_header, "") if principal is None else principal.name
        if client and not _CLIENT.fullmatch(client):
            # Without the value: clients may be identified by a secret key.
            raise BadRequest(f"{self._client_header}: the value is not 1 to 128 visible ASCII characters")
        return RequestOptions(
            client,
            _timeout_ns(headers.get(TIMEOUT_HEADER, "0")),
            _flag(TIMING_HEADER, headers.get(TIMING_HEADER, "0")),
            headers.get(LOAD_FORMAT_HEADER, "").strip().lower(),
            trace_context(headers.get(TRACEPARENT_HEADER, ""), headers.get(TRACESTATE_HEADER, "")),
            _flag(STREAM_ERROR_HEADER, headers.get(STREAM_ERROR_HEADER, "0")),
            principal,
            {name: headers[name] for name in self.routing_headers if name in headers} or None
            if self.routing_headers
            else None,
            None if self._forwarded is None else self._forwarded.values(headers),
        )


def earlier(deadline_ns: int, other_ns: int) -> int:
    """Return the earlier of two deadlines; 0 stands for none."""
    return min(deadline_ns, other_ns) if deadline_ns and other_ns else deadline_ns or other_ns


def _timeout_ns(text: str) -> int:
    if not _TIMEOUT.fullmatch(text):
        raise BadRequest(f"{TIMEOUT_HEADER}: {text[:32]!r} is not a whole number of milliseconds")
    timeout_ns = int(text) * NS_PER_MS
    return timeout_ns if timeout_ns <= MAX_TIMEOUT_NS else 0


def _flag(name: str, text: str) -> bool:
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise BadRequest(f"{name}: {text[:32]!r} is neither 1 nor 0")
    return value


# --- Parameters of requests, inputs and outputs: reserved names, values, ranges of shared memory -----------------------

_MAX_OFFSET = 2**63
_RESERVED = ("triton_", "headrace.", "headrace_")
# Names with a reserved prefix that clients may send. True: the response has the time of each phase.
TIMING_PARAMETER = "headrace_timing"
# Deadline of the request, microseconds after its arrival. Triton's `timeout` limits only the time in the queue.
DEADLINE_PARAMETER = "headrace_deadline_us"
# True: the response may be sent before those of earlier requests on the same gRPC stream.
UNORDERED_PARAMETER = "headrace_unordered"
_CLIENT_PARAMETERS = frozenset({TIMING_PARAMETER, DEADLINE_PARAMETER, UNORDERED_PARAMETER})
# Triton's, over gRPC only. True: on a stream, a response without outputs follows the last one of a decoupled model.
EMPTY_FINAL_PARAMETER = "triton_enable_empty_final_response"
# Triton's parameters of a request that the server reads itself; a model does not get them.
_SERVER_PARAMETERS = frozenset(
    {
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "binary_data_output",
        EMPTY_FINAL_PARAMETER,
    }
)
_PARAMETER_TYPES = frozenset({str, int, float, bool})
_SHARED = "shared_memory_"
_SHARED_PARAMETERS = frozenset({"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"})


class SharedRange(msgspec.Struct, frozen=True):
    """Range of a client's shared memory.

    Attributes:
        region: registered name.
        offset: start within the region, bytes.
        size_bytes: 0 for a tensor without elements.
    """

    region: str
    offset: int
    size_bytes: int


def request_parameters(parameters: Mapping[str, Any]) -> None:
    """Check the names and the types of request parameters.

    `sequence_id`, `sequence_start` and `sequence_end` are allowed: as in Triton, a model without sequences ignores them.

    Raises:
        BadRequest: a name is reserved, or belongs to a tensor (shared memory); a value is null, an array or an object.
    """
    for name, value in parameters.items():
        if type(value) not in _PARAMETER_TYPES:
            kind = "null" if value is None else "an array" if isinstance(value, list) else "an object"
            cure = "leave it out, or send it as text"
            raise BadRequest(f"parameter {name[:64]!r} must be text, a number, true or false, not {kind}: {cure}")
        if name in _CLIENT_PARAMETERS:
            continue
        _check_parameter(name)
        if name.startswith(_SHARED):
            raise BadRequest(f"parameter {name[:64]!r} belongs to an input or an output, not to the request")


def model_parameters(parameters: Mapping[str, Any]) -> Mapping[str, ParameterValue]:
    """Return the request parameters that a model gets: text, numbers and booleans that the server does not read itself."""
    return {
        name: value
        for name, value in parameters.items()
        if name not in _SERVER_PARAMETERS and name not in _CLIENT_PARAMETERS
    } or NO_PARAMETERS


def sequence_fields(parameters: Mapping[str, Any]) -> SequenceFields | None:
    """Return the sequence parameters of a request; None without `sequence_id`. Only a model with sequences checks them."""
    if "sequence_id" not in parameters:
        return None
    return SequenceFields(
        parameters["sequence_id"], parameters.get("sequence_start", False), parameters.get("sequence_end", False)
    )


def tensor_parameters(parameters: Mapping[str, Any], kind: str, name: str) -> SharedRange | None:
    """Check the parameters of an input or output, and parse its range of shared memory.

    Args:
        parameters: of the tensor.
        kind: "input" or "output", for errors.
        name: of the tensor, for errors.

    Returns:
        The range of shared memory, None if the tensor is not in shared memory.

    Raises:
        BadRequest: a name is reserved, or the range is incomplete or invalid.
    """
    shared = False
    for parameter in parameters:
        _check_parameter(parameter)
        shared = shared or parameter.startswith(_SHARED)
    return _shared_range(parameters, kind, name) if shared else None


def integer(parameters: Mapping[str, Any], name: str) -> int:
    """Return an integer parameter, 0 if it is absent.

    Raises:
        BadRequest: the value is no integer.
    """
    value = parameters.get(name, 0)
    if type(value) is not int:
        raise BadRequest(f"parameter '{name}' must be a whole number, not {type(value).__name__}")
    return value


def flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a boolean parameter, `default` if it is absent.

    Raises:
        BadRequest: the value is no boolean.
    """
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise BadRequest(f"parameter '{name}' must be true or false, not {type(value).__name__}")
    return value


def _check_parameter(name: str) -> None:
    if name.startswith(_RESERVED):
        raise BadRequest(f"parameter {name[:64]!r} is reserved for the server")


def _shared_range(parameters: Mapping[str, Any], kind: str, name: str) -> SharedRange:
    for parameter in parameters:
        if parameter.startswith(_SHARED) and parameter not in _SHARED_PARAMETERS:
            raise BadRequest(f"{kind} '{name}': unknown parameter {parameter[:64]!r}")
    region = parameters.get("shared_memory_region")
    if region is None or "shared_memory_byte_size" not in parameters:
        raise BadRequest(f"{kind} '{name}' needs both shared_memory_region and shared_memory_byte_size, one is missing")
    if type(region) is not str or not region:
        raise BadRequest(f"{kind} '{name}': shared_memory_region must be the name of a region")
    size_bytes, offset = integer(parameters, "shared_memory_byte_size"), integer(parameters, "shared_memory_offset")
    if not (0 <= size_bytes < _MAX_OFFSET and 0 <= offset < _MAX_OFFSET):
        raise BadRequest(
            f"{kind} '{name}': shared_memory_byte_size and shared_memory_offset must be at least 0, "
            f"they are {size_bytes} and {offset}"
        )
    return SharedRange(region, offset, size_bytes)
