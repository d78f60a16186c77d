"""The JSON of the HTTP control plane as types: requests are decoded by them, and the API page has its schemas from them.

Names and shapes are those of the Open Inference Protocol V2 and of Triton's HTTP extensions (repository, system and CUDA
shared memory, trace, logging, statistics, model configuration).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Count = Annotated[int, Meta(ge=0)]
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


# Requests: every field is named here, anything else is refused.


class IndexRequest(Struct, forbid_unknown_fields=True):
    """Which models to list."""

    ready: Annotated[bool, Meta(description="only those that serve")] = False


class LoadRequest(Struct, forbid_unknown_fields=True):
    """How to load a model; nothing means as it lies in the repository.

    What takes the place of the model's own files needs --allow-model-override.
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
    """How to unload a model."""

    unload_dependents: Annotated[bool, Meta(description="with it the models that only it needs")] = False


class UnloadRequest(Struct, forbid_unknown_fields=True):
    """How to unload a model."""

    parameters: UnloadParameters = UnloadParameters()


class SystemRegionRequest(Struct, forbid_unknown_fields=True):
    """POSIX shared memory that the client has created."""

    key: Annotated[str, Meta(min_length=1, max_length=256, description="as for shm_open")]
    byte_size: Annotated[_Bytes, Meta(description="of the region")]
    offset: Annotated[int, Meta(ge=0, le=2**62, description="where the region begins, bytes")] = 0


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
    """Settings to change; null resets one. What is not there stays as it is."""

    trace_level: Literal["OFF", "TIMESTAMPS"] | _Levels | UnsetType | None = UNSET
    trace_rate: (
        Annotated[str, Meta(pattern="^[1-9][0-9]{0,8}$", description="every how many requests one is traced")]
        | Annotated[int, Meta(ge=1, le=2**32 - 1)]
        | UnsetType
        | None
    ) = UNSET
    trace_count: (
        Annotated[str, Meta(pattern="^(?:-1|[0-9]{1,9})$", description="how many more, -1 for no end")]
        | Annotated[int, Meta(ge=-1, le=2**31 - 1)]
        | UnsetType
        | None
    ) = UNSET
    log_frequency: (
        Annotated[str, Meta(pattern="^[0-9]{1,9}$", description="traces a file, 0 for one file")]
        | Annotated[int, Meta(ge=0, le=2**32 - 1)]
        | UnsetType
        | None
    ) = UNSET
    trace_file: Annotated[str, Meta(max_length=4096, description="the operator's")] | UnsetType | None = UNSET
    trace_mode: Literal["triton", "opentelemetry"] | UnsetType | None = UNSET


class LogSettingsRequest(Struct, forbid_unknown_fields=True):
    """Settings to change. What is null or not there stays as it is."""

    log_file: Annotated[str, Meta(max_length=4096, description="the operator's")] | UnsetType | None = UNSET
    log_info: bool | UnsetType | None = UNSET
    log_warning: bool | UnsetType | None = UNSET
    log_error: bool | UnsetType | None = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType | None = UNSET
    log_format: Literal["default", "ISO8601"] | UnsetType | None = UNSET


# Answers: never made, they only describe what `ControlPlane` and the services give.


class Error(Struct, forbid_unknown_fields=True):
    """What went wrong, and what to do about it."""

    error: str


class ServerLive(Struct, forbid_unknown_fields=True):
    """The server answers."""

    live: Annotated[bool, Meta(description="true")]


class ServerReady(Struct, forbid_unknown_fields=True):
    """Every model that should be served can be."""

    ready: Annotated[bool, Meta(description="true; a server that is not ready answers 503")]


class ModelReady(Struct, forbid_unknown_fields=True):
    """Requests for the model can be served."""

    name: str
    ready: Annotated[bool, Meta(description="true; a model that is not ready answers 404 or 503")]


class ServerMetadata(Struct, forbid_unknown_fields=True):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, forbid_unknown_fields=True):
    """An input or output; -1 is a dimension of any size, the first one is the batch."""

    name: str
    datatype: str
    shape: list[Annotated[int, Meta(ge=-1)]]


class ModelMetadata(Struct, forbid_unknown_fields=True):
    """A model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: (
        Annotated[
            dict[str, str | float | bool],
            Meta(description="of the built engine that serves the model, if one does: its precision and accuracy"),
        ]
        | UnsetType
    ) = UNSET


class ModelConfig(Struct):
    """The configuration in force in Triton's JSON (`ModelConfig` of model_config.proto), derived fields included."""

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


class Duration(Struct, forbid_unknown_fields=True):
    """How often, and how long together."""

    count: _Count
    ns: _Count


class InferenceStatistics(Struct, forbid_unknown_fields=True):
    """Of requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(Struct, forbid_unknown_fields=True):
    """Of batches of one size."""

    batch_size: _Count
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(Struct):
    """Of one version of a model, since it was loaded."""

    name: str
    version: str
    last_inference: Annotated[int, Meta(ge=0, description="ms since 1970, 0 for never")]
    inference_count: Annotated[int, Meta(ge=0, description="rows")]
    execution_count: Annotated[int, Meta(ge=0, description="batches")]
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]
    headrace: Annotated[
        dict[str, str],
        Meta(description="where it runs: runtime, device, precision, artefact; not_on_gpu: why no GPU does"),
    ]


class Statistics(Struct, forbid_unknown_fields=True):
    """Exact counts and times."""

    model_stats: list[VersionStatistics]


class ProfileRow(Struct, forbid_unknown_fields=True):
    """Batches of one size."""

    rows: Annotated[int, Meta(ge=1)]
    median_us: Annotated[float, Meta(ge=0, description="of the last times")]
    p95_us: Annotated[float, Meta(ge=0, description="what 95 of 100 of them kept to")]
    observations: Annotated[
        int, Meta(ge=0, description="batches that were run for requests since the model was loaded")
    ]
    source: Annotated[
        Literal["load", "requests", "stored"],
        Meta(
            description="`load`: measured before the model served; `requests`: while it serves; `stored`: by an earlier process"
        ),
    ]
    instances: Annotated[int, Meta(ge=1, description="at work as the batch began, at the most")]


class Profile(Struct, forbid_unknown_fields=True):
    """Compute times of one version of a model, those of sizes that were run."""

    name: str
    version: str
    profile: list[ProfileRow]


class Finding(Struct, forbid_unknown_fields=True):
    """One thing that limits a model."""

    kind: Annotated[str, Meta(description="one word, for scripts")]
    explanation: Annotated[str, Meta(description="what it is, with the figures it is told from")]
    cure: Annotated[str, Meta(description="what to change, if anything")]
    setting: Annotated[str, Meta(description="field of the configuration that the cure changes, if it is one")]
    expected: Annotated[str, Meta(description="what the change would bring, as far as the profile tells")]


class Explanation(Struct, forbid_unknown_fields=True):
    """What limits one version of a model now, by what happened in the last seconds."""

    name: str
    version: str
    limit: Annotated[str, Meta(description="kind of the first finding")]
    summary: Annotated[str, Meta(description="the first finding in a sentence")]
    findings: Annotated[list[Finding], Meta(description="what matters most first")]
    numbers: Annotated[dict[str, Any], Meta(description="the figures of the last seconds, and what the profile has")]


class LevelLoad(Struct, forbid_unknown_fields=True):
    """One priority level."""

    level: Annotated[int, Meta(ge=1, description="1 is the most urgent")]
    queue_depth: Annotated[int, Meta(ge=0, description="requests that wait")]
    queue_rows: Annotated[int, Meta(ge=0, description="rows that wait")]
    predicted_wait_us: Annotated[
        int, Meta(ge=0, description="of a request of one row, until it is run; 0: unknown, too")
    ]


class Load(Struct, forbid_unknown_fields=True):
    """How busy a version is at this moment."""

    name: str
    version: str
    queue_depth: Annotated[int, Meta(ge=0, description="requests that wait")]
    queue_rows: Annotated[int, Meta(ge=0, description="rows that wait")]
    in_flight: Annotated[int, Meta(ge=0, description="requests between their arrival and their answer")]
    running_rows: Annotated[int, Meta(ge=0, description="rows that instances have taken and not answered")]
    predicted_wait_us: Annotated[
        int,
        Meta(ge=0, description="of a request of one row and the default priority, until it is run; 0: unknown, too"),
    ]
    drain_us: Annotated[int, Meta(ge=0, description="until all that waits and runs is done, if nothing came")]
    instances: Annotated[int, Meta(ge=0, description="that live")]
    rows_per_s: Annotated[float, Meta(ge=0, description="what the instances can do by the latency profile; 0: unknown")]
    late_answers: Annotated[int, Meta(ge=0, description="since the model was loaded, that came after they were due")]
    levels: Annotated[list[LevelLoad], Meta(description="each priority level by itself")]


class IndexRow(Struct, forbid_unknown_fields=True):
    """A version in the repository; `version` is empty where none could be told."""

    name: str
    version: str
    state: _State
    reason: str


class ListedVersion(Struct, forbid_unknown_fields=True):
    """A version of a model in the repository."""

    version: str
    state: _State
    reason: str


class ListedModel(Struct, forbid_unknown_fields=True):
    """A model in the repository."""

    name: str
    platform: Annotated[str, Meta(description="of the latest version that serves; empty if none does")]
    versions: list[ListedVersion]
    state: (
        Annotated[_State, Meta(description="of the model as a whole, where no version could be told")] | UnsetType
    ) = UNSET
    reason: str | UnsetType = UNSET


class ModelList(Struct, forbid_unknown_fields=True):
    """Every model in the repository, by name."""

    models: list[ListedModel]


class SystemRegion(Struct, forbid_unknown_fields=True):
    """A registered region."""

    name: str
    key: str
    offset: _Count
    byte_size: _Count


class CudaRegion(Struct, forbid_unknown_fields=True):
    """A registered region."""

    name: str
    device_id: _Count
    byte_size: _Count


class TraceSettings(Struct, forbid_unknown_fields=True):
    """In force now."""

    trace_level: list[str]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class LogSettings(Struct, forbid_unknown_fields=True):
    """In force now."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: _Count
    log_format: Literal["default", "ISO8601"]
