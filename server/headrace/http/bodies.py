"""JSON bodies of the HTTP API as types: msgspec structs decode control requests, pydantic models document everything else.

No pydantic model is ever instantiated: FastAPI generates the schemas of the OpenAPI document from them, and inference never
reaches them. Names and shapes are those of the Open Inference Protocol V2 and of Triton's HTTP extensions (repository, system
and CUDA shared memory, trace, logging, statistics, model configuration).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from headrace.core.limits import CLIENT_PATTERN
from headrace.core.tensor import DATATYPES
from headrace.http.traffic_bodies import TrafficReport, VersionTraffic

_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


# Control requests: unknown fields are rejected.


class IndexRequest(Struct, forbid_unknown_fields=True):
    """Filter of the repository index."""

    ready: Annotated[bool, Meta(description="list only versions that are READY")] = False


class LoadRequest(Struct, forbid_unknown_fields=True):
    """Parameters of a load; without them, the model is loaded from its files in the repository.

    Parameters replace files of the model and need --allow-model-override.
    """

    parameters: Annotated[
        dict[str, str],
        Meta(
            description="`config`: a configuration in Triton's JSON, as text; `file:<path>`: a file's content in base64",
            extra_json_schema={
                "propertyNames": {"pattern": "^(?:config$|file:)"},
                "patternProperties": {"^file:": {"type": "string", "pattern": _BASE64}},
            },
        ),
    ] = {}


class UnloadParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an unload."""

    unload_dependents: Annotated[bool, Meta(description="also unload the models that only this model uses")] = False


class UnloadRequest(Struct, forbid_unknown_fields=True):
    """Parameters of an unload."""

    parameters: UnloadParameters = UnloadParameters()


class SystemRegionRequest(Struct, forbid_unknown_fields=True):
    """POSIX shared memory that the client has created."""

    key: Annotated[str, Meta(min_length=1, max_length=256, description="as for shm_open")]
    byte_size: Annotated[_Bytes, Meta(description="of the region")]
    offset: Annotated[
        int, Meta(ge=0, le=2**62, description="start of the region within the shared memory object, bytes")
    ] = 0


class RawHandle(Struct, forbid_unknown_fields=True):
    """cudaIpcMemHandle_t."""

    b64: Annotated[str, Meta(max_length=4096, pattern=_BASE64, description="its bytes in base64")]


class CudaRegionRequest(Struct, forbid_unknown_fields=True):
    """Memory of a GPU that the client has allocated."""

    raw_handle: RawHandle
    byte_size: Annotated[_Bytes, Meta(description="of the region")]
    device_id: Annotated[int, Meta(ge=0, le=1023, description="number of the GPU")] = 0


_State = Literal["UNKNOWN", "LOADING", "READY", "UNAVAILABLE", "UNLOADING", "UNLOADED"]
_Levels = Annotated[
    list[Literal["OFF", "TIMESTAMPS", "TENSORS"]],
    Meta(
        max_length=8,
        description="OFF alone, or TIMESTAMPS, with or without TENSORS, which is not recorded",
        extra_json_schema={
            "anyOf": [
                {"items": {"const": "OFF"}, "maxItems": 1},
                {"items": {"enum": ["TIMESTAMPS", "TENSORS"]}, "contains": {"const": "TIMESTAMPS"}},
            ]
        },
    ),
]


class TraceSettingsRequest(Struct, forbid_unknown_fields=True):
    """Settings to change; null resets a setting, an absent one is unchanged."""

    trace_level: Literal["OFF", "TIMESTAMPS"] | _Levels | UnsetType | None = UNSET
    trace_rate: (
        Annotated[str, Meta(pattern="^[1-9][0-9]{0,8}$", description="trace one of this number of requests")]
        | Annotated[int, Meta(ge=1, le=2**32 - 1)]
        | UnsetType
        | None
    ) = UNSET
    trace_count: (
        Annotated[str, Meta(pattern="^(?:-1|[0-9]{1,9})$", description="number of further traces, -1 for no limit")]
        | Annotated[int, Meta(ge=-1, le=2**31 - 1)]
        | UnsetType
        | None
    ) = UNSET
    log_frequency: (
        Annotated[str, Meta(pattern="^[0-9]{1,9}$", description="traces per file, 0 for one file")]
        | Annotated[int, Meta(ge=0, le=2**32 - 1)]
        | UnsetType
        | None
    ) = UNSET
    trace_file: (
        Annotated[str, Meta(max_length=4096, description="only the operator sets it, with a command line option")]
        | UnsetType
        | None
    ) = UNSET
    trace_mode: Literal["triton", "opentelemetry"] | UnsetType | None = UNSET


class LogSettingsRequest(Struct, forbid_unknown_fields=True):
    """Settings to change; one that is absent or null is unchanged."""

    log_file: (
        Annotated[str, Meta(max_length=4096, description="only the operator sets it, with a command line option")]
        | UnsetType
        | None
    ) = UNSET
    log_info: bool | UnsetType | None = UNSET
    log_warning: bool | UnsetType | None = UNSET
    log_error: bool | UnsetType | None = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType | None = UNSET
    log_format: Literal["default", "ISO8601"] | UnsetType | None = UNSET


# Responses of the control plane.

_Count = Annotated[int, Field(ge=0)]
_Rows = Annotated[int, Field(ge=1)]
_Time = Annotated[float, Field(ge=0)]


def _optional(**constraints: Any) -> Any:
    """Make a field that may be absent, but is never null."""
    return Field(None, **constraints)


class _Closed(BaseModel):
    """A JSON object without other keys than its fields."""

    model_config = ConfigDict(extra="forbid")


class Error(_Closed):
    """Error: the cause, the allowed values and the remedy."""

    error: str


class ServerLive(_Closed):
    """The server answers."""

    live: bool = Field(description="true")


class ServerReady(_Closed):
    """The server is ready for traffic."""

    ready: bool = Field(description="true; a server that is not ready answers 503")


class ModelReady(_Closed):
    """The model can serve requests."""

    name: str
    ready: bool = Field(description="true; a model that is not ready answers 404 or 503")


class ServerMetadata(_Closed):
    """Name, version and protocol extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(_Closed):
    """An input or output tensor; -1 is a dimension of any size, the first dimension is the batch."""

    name: str
    datatype: str
    shape: list[Annotated[int, Field(ge=-1)]]


class ModelMetadata(_Closed):
    """Input and output tensors of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str | float | bool] = _optional(
        description="precision and accuracy of the built engine that serves the model, if one does"
    )


class ServedModelConfig(BaseModel):
    """The configuration in force as Triton's JSON (`ModelConfig` of model_config.proto), derived fields included."""

    name: str
    platform: str
    backend: str
    max_batch_size: _Count
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    instance_group: list[dict[str, Any]]
    version_policy: dict[str, Any]
    optimization: dict[str, Any]
    parameters: dict[str, Any]
    default_model_filename: str


class Duration(_Closed):
    """Number of events and their total time."""

    count: _Count
    ns: _Count


class InferenceStatistics(_Closed):
    """Times of requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(_Closed):
    """Times of batches of one size."""

    batch_size: _Count
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(BaseModel):
    """Statistics of one model version since it was loaded."""

    name: str
    version: str
    last_inference: _Count = Field(description="ms since 1970; 0: never")
    inference_count: _Count = Field(description="rows")
    execution_count: _Count = Field(description="batches")
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]
    headrace: dict[str, str] = Field(
        description="runtime, device, precision, artefact; not_on_gpu: the reason why the version runs on the CPU"
    )


class Statistics(_Closed):
    """Exact counts and times."""

    model_stats: list[VersionStatistics]


class ProfileRow(_Closed):
    """Compute times of batches of one size."""

    rows: _Rows
    median_us: _Time = Field(description="median of the last times")
    p95_us: _Time = Field(description="95th percentile of the last times")
    observations: _Count = Field(description="batches run for requests since the model was loaded")
    source: Literal["load", "requests", "stored"] = Field(
        description="`load`: measured before the model served; `requests`: while it serves; `stored`: by an earlier process"
    )
    instances: _Rows = Field(description="maximum of instances that were busy when the batch began")


class ProfileResponse(_Closed):
    """Compute times of one model version, for the batch sizes that were run."""

    name: str
    version: str
    profile: list[ProfileRow]


class ExplainFinding(_Closed):
    """One limit of a model's throughput or latency."""

    kind: str = Field(description="one word, for scripts")
    explanation: str = Field(description="the limit, with the figures that show it")
    cure: str = Field(description="what to change, if anything")
    setting: str = Field(description="configuration field that the cure changes, if it is one")
    expected: str = Field(description="effect of the change as the latency table predicts it")


class SequenceStatus(_Closed):
    """Sequences of a version with `sequence_batching`."""

    live: _Count = Field(description="sequences between START and end, those in the backlog included")
    slots: _Count = Field(description="slots of the live instances")
    used: _Count = Field(description="slots with a sequence")
    backlog: _Count = Field(description="sequences that wait for a slot")
    ends: dict[str, _Count] = Field(description="sequences that have ended, by reason")
    refusals: dict[str, _Count] = Field(description="requests that were refused because of their sequence, by reason")


class Explanation(_Closed):
    """Limits of one model version, measured over the last seconds."""

    name: str
    version: str
    limit: str = Field(description="kind of the first finding")
    summary: str = Field(description="the first finding in one sentence")
    findings: list[ExplainFinding] = Field(description="most important first")
    numbers: dict[str, Any] = Field(description="figures of the last seconds and of the latency table")
    cache: dict[str, Any] = _optional(description="state and figures of the response cache, if the model has one")
    padding: dict[str, str] = _optional(description="state of padding and its reason, if the model has `pad`")
    sequences: SequenceStatus = _optional(
        description="sequences, slots and backlog, if the model has `sequence_batching`"
    )
    traffic: TrafficReport = _optional(description="shares and figures of the versions, if the model has `traffic`")


class PriorityLoad(_Closed):
    """Load of one priority level."""

    level: int = Field(ge=1, description="1 is the most urgent")
    queue_depth: _Count = Field(description="requests in the queue")
    queue_rows: _Count = Field(description="rows in the queue")
    predicted_wait_us: _Count = Field(description="queue time predicted for a request of one row; 0: none, or unknown")


class LoadResponse(_Closed):
    """Load of a model version at this moment."""

    name: str
    version: str
    queue_depth: _Count = Field(description="requests in the queue")
    queue_rows: _Count = Field(description="rows in the queue")
    in_flight: _Count = Field(description="requests between arrival and response")
    running_rows: _Count = Field(description="rows that instances are running")
    predicted_wait_us: _Count = Field(
        description="queue time predicted for a request of one row and default priority; 0: none, or unknown"
    )
    drain_us: _Count = Field(description="time until the queue and the running batches are done, if no request came")
    instances: _Count = Field(description="instances that are alive")
    rows_per_s: _Time = Field(description="capacity of all live instances together by the latency table; 0: unknown")
    late_answers: _Count = Field(description="responses after their deadline since the model was loaded")
    levels: list[PriorityLoad] = Field(description="load of each priority level")


class IndexRow(_Closed):
    """A model version in the repository; `version` is empty where the row is about the model as a whole."""

    name: str
    version: str
    state: _State
    reason: str


class ListedVersion(_Closed):
    """A version of a model in the repository."""

    version: str
    state: _State
    reason: str


class ListedModel(_Closed):
    """A model in the repository."""

    name: str
    platform: str = Field(description="of the latest version that serves; empty if none does")
    versions: list[ListedVersion]
    state: _State = _optional(description="of the model as a whole, where it has no version")
    reason: str = _optional()


class ModelList(_Closed):
    """Models in the repository, by name."""

    models: list[ListedModel]
    next: str = _optional(description="`after` of the next page; absent after the last one, and without `limit`")


class SystemRegionStatus(_Closed):
    """A registered region of system shared memory."""

    name: str
    key: str
    offset: _Count
    byte_size: _Count


class CudaRegionStatus(_Closed):
    """A registered region of GPU memory."""

    name: str
    device_id: _Count
    byte_size: _Count


class TraceSettings(_Closed):
    """Trace settings in force."""

    trace_level: list[str]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class LogSettingsResponse(_Closed):
    """Log settings in force."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: _Count
    log_format: Literal["default", "ISO8601"]


class StepStatus(_Closed):
    """A step of a pipeline: its configuration, counts since the pipeline was loaded, and the load of its model now."""

    name: str
    model: str
    version: str = Field(description="that runs the step now; empty if none does, and for a built-in step")
    builtin: bool
    inputs: dict[str, str] = Field(description="tensor of the pipeline by name of the model's input")
    outputs: dict[str, str] = Field(description="tensor of the pipeline by name of the model's output")
    when: str = Field(description="condition; empty for none")
    condition: list[str] = Field(description="tensors of the condition")
    each: str = Field(description="tensor whose rows are the model's requests; empty for none")
    fallback: str = Field(description="model in place of one that fails or would be late; empty for none")
    ready: bool
    queued: _Count = Field(description="requests in the queue of the model, of all callers")
    in_flight: _Count = Field(description="requests in the model, of all callers")
    requests: _Count = Field(description="requests with a result")
    fallbacks: _Count = Field(description="requests that the fallback answered")
    skipped: _Count = Field(
        description="requests that did not run the step: its condition did not hold, or there were no rows"
    )
    failures: _Count
    latency: dict[str, _Count] = Field(description="requests by time, as for a version")


class PipelineStatus(_Closed):
    """Graph of a pipeline or ensemble with the figures of its steps."""

    kind: str = Field(description="ensemble or pipeline")
    inputs: list[str]
    outputs: dict[str, str] = Field(description="tensor by name of the output")
    limiting: str = Field(description="step with the longest mean time of the last seconds; empty without requests")
    steps: list[StepStatus]


class ServingStatus(_Closed):
    """State, counts and gauges of a version that serves."""

    platform: str
    runtime: str = Field(description="onnxruntime, onnxruntime_cuda, tensorrt or another backend")
    device: str = Field(description='CPU, or e.g. "GPU 0,1"')
    precision: str = Field(description="of the engine; for the model's own file, which file it is")
    artefact: str = Field(description="name of the file that is loaded")
    not_on_gpu: str = Field(
        description="why the version runs on the CPU though a GPU is present or requested, else empty"
    )
    engine: str = Field(description="precision of the built engine that serves; empty for the model's own file")
    max_batch_size: _Count = Field(description="maximum rows of a batch where the version runs; 0: no batching")
    instances: _Count = Field(description="configured instances")
    living: _Count = Field(description="instances that are alive")
    restarts: _Count = Field(description="of instances that had died")
    is_evicted: bool = Field(alias="parked", description="evicted from GPU memory; loaded at the next request")
    queued: _Count = Field(description="requests in the queue")
    wait_ns: _Count = Field(description="queue time predicted for a request now; 0: none, or unknown")
    late: _Count = Field(description="responses after their deadline")
    in_flight: _Count = Field(description="requests between arrival and response")
    requests: _Count = Field(description="successful requests")
    rows: _Count = Field(description="rows of successful requests")
    failures: dict[str, _Count] = Field(description="failed requests by the reason of their error")
    batches: dict[str, _Count] = Field(description="batches by the reason why they were closed")
    sizes: dict[str, _Count] = Field(description="batches by their number of rows")
    queue_ns: _Count = Field(description="total over successful requests, like the next four")
    assemble_ns: _Count
    compute_ns: _Count
    split_ns: _Count
    total_ns: _Count
    latency: dict[str, _Count] = Field(
        description="successful requests by latency: bucket i ends at 2 ** (i / buckets_per_doubling) seconds"
    )
    requests_per_s: list[_Time] = Field(
        description="successful requests a second in each period of the last ten minutes, the latest last, without leading zeros"
    )
    failures_per_s: list[_Time] = Field(description="failed requests, likewise")
    pipeline: PipelineStatus | None = Field(description="of a pipeline or ensemble, else null")
    sequences: SequenceStatus | None = Field(description="of a model with `sequence_batching`, else null")
    traffic: VersionTraffic | None = Field(description="of a model with `traffic`, else null")


class VersionStatus(IndexRow):
    """A model version in the repository, with its figures if it serves."""

    serving: ServingStatus | None


class ServerProcess(_Closed):
    """One process of a server with front ends."""

    name: str = Field(description="supervisor, engine or front_end_ with its number")
    pid: _Count = Field(description="process id; 0 while it does not run")
    cpu_s: _Time = Field(description="CPU seconds, with those of the processes that it replaced")
    memory_bytes: _Count = Field(description="resident memory, shared memory included")
    starts: _Count
    connections: _Count = Field(description="open client connections")


class RepositoryStoreStatus(_Closed):
    """A repository that is mirrored from a store."""

    url: str
    reachable: bool = Field(description="false if the last comparison with the store failed")
    error: str = Field(description="why it failed; what is loaded stays in service")
    compared_s_ago: int | None = Field(description="seconds since the last comparison that succeeded")


class ServerStatus(_Closed):
    """The server and all models; counts since each version was loaded, at most some tenths of a second old."""

    name: str
    version: str
    time_ns: _Count = Field(description="monotonic time of the figures")
    uptime_ns: _Count
    ready: bool = Field(description="as in /v2/health/ready")
    models_ready: _Count = Field(description="models of which every version that should be served is READY")
    models_expected: _Count = Field(description="models that should be served")
    buckets_per_doubling: _Rows = Field(description="resolution of `latency`")
    history_period_ns: _Rows = Field(description="length of the periods of `requests_per_s`")
    processes: list[ServerProcess] = Field(description="with --front-ends; else empty")
    stores: list[RepositoryStoreStatus] = Field(description="repositories with a URL")
    models: list[VersionStatus]


class LayerTime(_Closed):
    """Time of one layer of the model or engine."""

    name: str
    kind: str
    nodes: list[str] = Field(description="nodes of the ONNX model that the layer computes")
    precision: str
    tactic: str
    time_us: _Time
    share: _Time


class LayerTimes(_Closed):
    """Time of each layer, in order of execution, from the runtime's profiler."""

    format: int
    model: str
    version: int
    artefact: str = Field(description="file that was measured")
    precision: str
    machine: str = Field(description="machine that it was measured on")
    reason: str = Field(description="why it is the model's own file; empty if it is a built engine")
    shapes: dict[str, list[int]]
    rows: _Count
    median_us: _Time
    p99_us: _Time
    rows_per_s: _Time
    total_us: _Time
    layers: list[LayerTime]


# Inference: documents the bodies that `codec` reads and writes.

_DATATYPES: list[Any] = [datatype.name for datatype in DATATYPES]


class SharedMemoryParameters(BaseModel):
    """Location of a tensor in shared memory."""

    shared_memory_region: str = _optional(description="name of the registered region that holds the tensor")
    shared_memory_offset: int = _optional(ge=0)
    shared_memory_byte_size: int = _optional(ge=0)


class InputParameters(SharedMemoryParameters):
    """Location of the data of an input that has no `data`."""

    binary_data_size: int = _optional(
        ge=0, description="bytes of the tensor after the JSON, in the order of the inputs"
    )


class RequestInput(BaseModel):
    """An input tensor."""

    name: str
    datatype: str = Field(examples=_DATATYPES)
    shape: list[int]
    data: Any = _optional(description="in row-major order, flat or nested; absent for binary data and shared memory")
    parameters: InputParameters = _optional()


class OutputParameters(SharedMemoryParameters):
    """Form in which an output is returned."""

    binary_data: bool = _optional(description="return the tensor as bytes after the JSON")
    classification: int = _optional(ge=0, description="return this number of best classes")


class RequestOutput(BaseModel):
    """An output tensor to return."""

    name: str
    parameters: OutputParameters = _optional()


class RequestParameters(BaseModel):
    """Options of a request."""

    binary_data_output: bool = _optional(description="return all outputs as bytes after the JSON")
    priority: int = _optional(ge=0, description="1 is the most urgent; 0 and undefined levels are the model's default")
    timeout: int = _optional(
        ge=0,
        description="maximum queue time, microseconds; only where the model's queue policy has allow_timeout_override, "
        "and only if it is shorter than the policy's",
    )
    headrace_deadline_us: int = _optional(
        ge=0, description="time the client waits from the arrival of the request on, microseconds; 0: no deadline"
    )
    headrace_timing: bool = _optional(description="return the time of each phase")


class InferenceRequest(BaseModel):
    """Inputs of one inference."""

    id: str = _optional(description="returned with the response")
    inputs: list[RequestInput]
    outputs: list[RequestOutput] = _optional(description="all outputs, if absent or empty")
    parameters: RequestParameters = _optional()


class ResponseOutput(BaseModel):
    """An output tensor."""

    name: str
    datatype: str = Field(json_schema_extra={"enum": _DATATYPES})
    shape: list[int]
    data: list[Any] = _optional()
    parameters: dict[str, Any] = _optional()


class TimingParameters(BaseModel):
    """Time of each phase, if the request has `headrace_timing`."""

    headrace_decode_us: int = _optional(ge=0)
    headrace_queue_us: int = _optional(ge=0)
    headrace_assemble_us: int = _optional(ge=0)
    headrace_compute_us: int = _optional(ge=0)
    headrace_split_us: int = _optional(ge=0)
    headrace_encode_us: int = _optional(ge=0)
    headrace_total_us: int = _optional(ge=0)
    headrace_batch_rows: int = _optional(ge=1)
    headrace_batch_closed: str = _optional(description="why the batch was closed")


class InferenceResponse(BaseModel):
    """Outputs of one inference."""

    model_name: str
    model_version: str
    id: str = _optional()
    parameters: TimingParameters = _optional()
    outputs: list[ResponseOutput]


class GenerateRequest(BaseModel):
    """Inputs of a model and parameters, as fields of one object.

    A field with the name of an input is that input: a value, an array of values or nested arrays; BYTES are strings. Every other
    field is a parameter: a string, a number or a boolean.
    """

    model_config = ConfigDict(extra="allow")

    id: str = _optional(description="returned with each response")
    parameters: dict[str, Any] = _optional(description="further inputs and parameters")


class GenerateResponse(BaseModel):
    """Outputs of a model as fields of one object: a value for one element, else a flat array."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    id: str = _optional()


class InferenceHeaders(BaseModel):
    """Request headers of inference."""

    inference_header_content_length: _Count = Field(
        description="bytes of JSON at the start of the body (decompressed); 0: the body is one tensor; absent: all is JSON"
    )
    content_encoding: Literal["gzip", "deflate", "identity"] = Field(description="of the whole body")
    accept_encoding: str = Field(
        description="gzip and deflate, by their weights, for responses of 1 KiB and more", examples=["gzip"]
    )
    x_request_timeout_ms: _Count = Field(
        description="time the client waits from the first bytes of the request on; 0: no deadline", examples=[250]
    )
    x_headrace_client: str = Field(
        description="client name for quotas and fair shares; --client-header names another header",
        pattern=CLIENT_PATTERN,
        examples=["shop"],
    )
    headrace_timing: Literal["0", "1"] = Field(description="1: return the time of each phase")
    endpoint_load_metrics_format: Literal["text", "json"] = Field(
        description="return the load of the model in this format of Open Request Cost Aggregation"
    )


class InferenceResponseHeaders(BaseModel):
    """Response headers of inference."""

    inference_header_content_length: _Count = Field(description="bytes of JSON; present if tensors follow it")
    content_encoding: Literal["gzip", "deflate"]
    headrace_queue_depth: _Count = Field(description="requests in the model's queue")
    headrace_predicted_wait_us: _Count = Field(
        description="queue time predicted for a request now; 0: none, or unknown"
    )
    headrace_timing: str = Field(description="time of each phase, if requested")
    server_timing: str = Field(description="the same in the format of W3C Server Timing")
    endpoint_load_metrics: str = Field(description="load of the model, if requested")
