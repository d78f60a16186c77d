"""JSON bodies of the HTTP API as types, from which the OpenAPI document is generated, with `headrace.core.response_bodies`.

Control requests are decoded as the structs. The types of inference only document the bodies that `codec` reads and writes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.config.traffic_config import TARGET_PATTERN
from headrace.core.limits import CLIENT_PATTERN
from headrace.core.response_bodies import Count, Positive
from headrace.core.tensor import DATATYPES

_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_LOAD_PARAMETERS = {
    "propertyNames": {"pattern": "^(?:config$|file:)"},
    "patternProperties": {"^file:": {"type": "string", "pattern": _BASE64}},
}


# Control requests: unknown fields are rejected.


class IndexRequest(Struct, forbid_unknown_fields=True):
    """Filter of the repository index.

    Attributes:
        ready: list only versions that are READY.
    """

    ready: bool = False


class LoadRequest(Struct, forbid_unknown_fields=True):
    """Parameters of a load; without them, the model is loaded from its files in the repository.

    Parameters replace files of the model and need --allow-model-override.

    Attributes:
        parameters: `config`: a configuration in Triton's JSON, as text; `file:<path>`: a file's content in base64.
    """

    parameters: Annotated[dict[str, str], Meta(extra_json_schema=_LOAD_PARAMETERS)] = {}


class UnloadParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an unload.

    Attributes:
        unload_dependents: also unload the models that only this model uses.
    """

    unload_dependents: bool = False


class UnloadRequest(Struct, forbid_unknown_fields=True):
    """Parameters of an unload."""

    parameters: UnloadParameters = UnloadParameters()


class SystemRegionRequest(Struct, forbid_unknown_fields=True):
    """POSIX shared memory that the client has created.

    Attributes:
        key: as for shm_open.
        byte_size: of the region.
        offset: start of the region within the shared memory object, bytes.
    """

    key: Annotated[str, Meta(min_length=1, max_length=256)]
    byte_size: _Bytes
    offset: Annotated[int, Meta(ge=0, le=2**62)] = 0


class RawHandle(Struct, forbid_unknown_fields=True):
    """cudaIpcMemHandle_t.

    Attributes:
        b64: its bytes in base64.
    """

    b64: Annotated[str, Meta(max_length=4096, pattern=_BASE64)]


class CudaRegionRequest(Struct, forbid_unknown_fields=True):
    """Memory of a GPU that the client has allocated.

    Attributes:
        byte_size: of the region.
        device_id: number of the GPU.
    """

    raw_handle: RawHandle
    byte_size: _Bytes
    device_id: Annotated[int, Meta(ge=0, le=1023)] = 0


_Levels = Annotated[
    list[Literal["OFF", "TIMESTAMPS", "TENSORS"]],
    Meta(
        max_length=8,
        extra_json_schema={
            "anyOf": [
                {"items": {"const": "OFF"}, "maxItems": 1},
                {"items": {"enum": ["TIMESTAMPS", "TENSORS"]}, "contains": {"const": "TIMESTAMPS"}},
            ]
        },
    ),
]


class TraceSettingsRequest(Struct, forbid_unknown_fields=True):
    """Settings to change; null resets a setting, an absent one is unchanged.

    Attributes:
        trace_level: OFF alone, or TIMESTAMPS, with or without TENSORS, which is not recorded.
        trace_rate: trace one of this number of requests.
        trace_count: number of further traces, -1 for no limit.
        log_frequency: traces per file, 0 for one file.
        trace_file: only the operator sets it, with a command line option.
    """

    trace_level: Literal["OFF", "TIMESTAMPS"] | _Levels | UnsetType | None = UNSET
    trace_rate: (
        Annotated[str, Meta(pattern="^[1-9][0-9]{0,8}$")] | Annotated[int, Meta(ge=1, le=2**32 - 1)] | UnsetType | None
    ) = UNSET
    trace_count: (
        Annotated[str, Meta(pattern="^(?:-1|[0-9]{1,9})$")]
        | Annotated[int, Meta(ge=-1, le=2**31 - 1)]
        | UnsetType
        | None
    ) = UNSET
    log_frequency: (
        Annotated[str, Meta(pattern="^[0-9]{1,9}$")] | Annotated[int, Meta(ge=0, le=2**32 - 1)] | UnsetType | None
    ) = UNSET
    trace_file: Annotated[str, Meta(max_length=4096)] | UnsetType | None = UNSET
    trace_mode: Literal["triton", "opentelemetry"] | UnsetType | None = UNSET


class LogSettingsRequest(Struct, forbid_unknown_fields=True):
    """Settings to change; one that is absent or null is unchanged.

    Attributes:
        log_file: only the operator sets it, with a command line option.
    """

    log_file: Annotated[str, Meta(max_length=4096)] | UnsetType | None = UNSET
    log_info: bool | UnsetType | None = UNSET
    log_warning: bool | UnsetType | None = UNSET
    log_error: bool | UnsetType | None = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType | None = UNSET
    log_format: Literal["default", "ISO8601"] | UnsetType | None = UNSET


_Shares = dict[
    Annotated[str, Meta(pattern=TARGET_PATTERN)], Annotated[str, Meta(pattern=r"^\d{1,3}(?:\.\d{1,3})? ?%$")]
]


class TrafficRequest(Struct, forbid_unknown_fields=True):
    """Fields of `traffic` to replace (null removes one); or `promote`; or `reset`.

    Attributes:
        versions: share of each version, and of other models as model:NAME; the stable version has the rest.
        promote: version or model:NAME that gets all traffic, if the rules are met.
        reset: return to the traffic of the configuration.
    """

    versions: _Shares | UnsetType = UNSET
    stable: Annotated[int, Meta(ge=1, le=2**63 - 1)] | UnsetType | None = UNSET
    sticky_header: str | UnsetType = UNSET
    shadow: dict[str, Any] | UnsetType | None = UNSET
    rules: dict[str, Any] | UnsetType | None = UNSET
    promote: Annotated[str, Meta(pattern=TARGET_PATTERN)] | UnsetType = UNSET
    reset: bool = False


# Bodies with further keys: the model's configuration, and inference.


class ServedModelConfig(TypedDict):
    """The configuration in force as Triton's JSON (`ModelConfig` of model_config.proto), derived fields included."""

    name: str
    platform: str
    backend: str
    max_batch_size: Count
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    instance_group: list[dict[str, Any]]
    version_policy: dict[str, Any]
    optimization: dict[str, Any]
    parameters: dict[str, Any]
    default_model_filename: str


_DATATYPES: list[Any] = [datatype.name for datatype in DATATYPES]


class InputParameters(TypedDict, total=False):
    """Location of the data of an input that has no `data`.

    Attributes:
        shared_memory_region: name of the registered region that holds the tensor.
        binary_data_size: bytes of the tensor after the JSON, in the order of the inputs.
    """

    shared_memory_region: str
    shared_memory_offset: Count
    shared_memory_byte_size: Count
    binary_data_size: Count


class RequestInput(TypedDict):
    """An input tensor.

    Attributes:
        data: in row-major order, flat or nested; absent for binary data and shared memory.
    """

    name: str
    datatype: Annotated[str, Meta(examples=_DATATYPES)]
    shape: list[int]
    data: NotRequired[Any]
    parameters: NotRequired[InputParameters]


class OutputParameters(TypedDict, total=False):
    """Form in which an output is returned.

    Attributes:
        shared_memory_region: name of the registered region that holds the tensor.
        binary_data: return the tensor as bytes after the JSON.
        classification: return this number of best classes.
    """

    shared_memory_region: str
    shared_memory_offset: Count
    shared_memory_byte_size: Count
    binary_data: bool
    classification: Count


class RequestOutput(TypedDict):
    """An output tensor to return."""

    name: str
    parameters: NotRequired[OutputParameters]


class RequestParameters(TypedDict, total=False):
    """Options of a request.

    Attributes:
        binary_data_output: return all outputs as bytes after the JSON.
        priority: 1 is the most urgent; 0 and undefined levels are the model's default.
        timeout: maximum queue time, microseconds; only where the model's queue policy has
            allow_timeout_override, and only if it is shorter than the policy's.
        headrace_deadline_us: time the client waits from the arrival of the request on, microseconds; 0: no
            deadline.
        headrace_timing: return the time of each phase.
    """

    binary_data_output: bool
    priority: Count
    timeout: Count
    headrace_deadline_us: Count
    headrace_timing: bool


class InferenceRequest(TypedDict):
    """Inputs of one inference.

    Attributes:
        id: returned with the response.
        outputs: all outputs, if absent or empty.
    """

    id: NotRequired[str]
    inputs: list[RequestInput]
    outputs: NotRequired[list[RequestOutput]]
    parameters: NotRequired[RequestParameters]


class ResponseOutput(TypedDict):
    """An output tensor."""

    name: str
    datatype: Annotated[str, Meta(extra_json_schema={"enum": _DATATYPES})]
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, Any]]


class TimingParameters(TypedDict, total=False):
    """Time of each phase, if the request has `headrace_timing`.

    Attributes:
        headrace_batch_closed: why the batch was closed.
    """

    headrace_decode_us: Count
    headrace_queue_us: Count
    headrace_assemble_us: Count
    headrace_compute_us: Count
    headrace_split_us: Count
    headrace_encode_us: Count
    headrace_total_us: Count
    headrace_batch_rows: Positive
    headrace_batch_closed: str


class InferenceResponse(TypedDict):
    """Outputs of one inference."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    parameters: NotRequired[TimingParameters]
    outputs: list[ResponseOutput]


class GenerateRequest(TypedDict, total=False):
    """Inputs of a model and parameters, as fields of one object.

    A field with the name of an input is that input: a value, an array of values or nested arrays; BYTES are strings. Every other
    field is a parameter: a string, a number or a boolean.

    Attributes:
        id: returned with each response.
        parameters: further inputs and parameters.
    """

    id: str
    parameters: dict[str, Any]


class GenerateResponse(TypedDict):
    """Outputs of a model as fields of one object: a value for one element, else a flat array."""

    model_name: str
    model_version: str
    id: NotRequired[str]


class InferenceHeaders(TypedDict):
    """Request headers of inference.

    Attributes:
        inference_header_content_length: bytes of JSON at the start of the body (decompressed); 0: the body is
            one tensor; absent: all is JSON.
        content_encoding: of the whole body.
        accept_encoding: gzip and deflate, by their weights, for responses of 1 KiB and more.
        x_request_timeout_ms: time the client waits from the first bytes of the request on; 0: no deadline.
        x_headrace_client: client name for quotas and fair shares; --client-header names another header.
        headrace_timing: 1: return the time of each phase.
        endpoint_load_metrics_format: return the load of the model in this format of Open Request Cost
            Aggregation.
    """

    inference_header_content_length: Count
    content_encoding: Literal["gzip", "deflate", "identity"]
    accept_encoding: Annotated[str, Meta(examples=["gzip"])]
    x_request_timeout_ms: Annotated[int, Meta(ge=0, examples=[250])]
    x_headrace_client: Annotated[str, Meta(pattern=CLIENT_PATTERN, examples=["shop"])]
    headrace_timing: Literal["0", "1"]
    endpoint_load_metrics_format: Literal["text", "json"]


class InferenceResponseHeaders(TypedDict):
    """Response headers of inference.

    Attributes:
        inference_header_content_length: bytes of JSON; present if tensors follow it.
        headrace_queue_depth: requests in the model's queue.
        headrace_predicted_wait_us: queue time predicted for a request now; 0: none, or unknown.
        headrace_timing: time of each phase, if requested.
        server_timing: the same in the format of W3C Server Timing.
        endpoint_load_metrics: load of the model, if requested.
    """

    inference_header_content_length: Count
    content_encoding: Literal["gzip", "deflate"]
    headrace_queue_depth: Count
    headrace_predicted_wait_us: Count
    headrace_timing: str
    server_timing: str
    endpoint_load_metrics: str
