"""JSON bodies of the responses of the control plane, over HTTP and as messages of gRPC.

Responses are built as these types, and the OpenAPI document is generated from them: the section Attributes of a docstring has the
descriptions of the fields, a type their limits. Names and shapes are those of the Open Inference Protocol V2 and of Triton's
extensions (repository, system and CUDA shared memory, trace, logging, statistics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Quantity = Annotated[float, Meta(ge=0)]
StateName = Annotated[
    str, Meta(extra_json_schema={"enum": ["UNKNOWN", "LOADING", "READY", "UNAVAILABLE", "UNLOADING", "UNLOADED"]})
]
"""Name of the state of a model version in Triton's repository index."""
TRAFFIC_STATES = ("stable", "canary", "shadow", "idle", "undone", "not_ready")
"""States of a version of a model with traffic; see docs/traffic.md."""


class Error(TypedDict):
    """Error: the cause, the allowed values and the remedy."""

    error: str


class ServerLive(TypedDict):
    """The server answers.

    Attributes:
        live: true.
    """

    live: bool


class ServerReady(TypedDict):
    """The server is ready for traffic.

    Attributes:
        ready: true; a server that is not ready answers 503.
    """

    ready: bool


class ModelReady(TypedDict):
    """The model can serve requests.

    Attributes:
        ready: true; a model that is not ready answers 404 or 503.
    """

    name: str
    ready: bool


class ServerMetadata(TypedDict):
    """Name, version and protocol extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """An input or output tensor; -1 is a dimension of any size, the first dimension is the batch."""

    name: str
    datatype: str
    shape: list[Annotated[int, Meta(ge=-1)]]


class ModelMetadata(TypedDict):
    """Input and output tensors of a model.

    Attributes:
        parameters: precision and accuracy of the built engine that serves the model, if one does.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: NotRequired[dict[str, str | float | bool]]


class Duration(TypedDict):
    """Number of events and their total time."""

    count: Count
    ns: Count


class InferenceStatistics(TypedDict):
    """Times of requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(TypedDict):
    """Times of batches of one size."""

    batch_size: Count
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class TritonStatistics(TypedDict):
    """The statistics of a model version that Triton has."""

    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class VersionStatistics(TritonStatistics):
    """Statistics of one model version since it was loaded.

    Attributes:
        last_inference: ms since 1970; 0: never.
        inference_count: rows.
        execution_count: batches.
        headrace: runtime, device, precision, artefact; not_on_gpu: the reason why the version runs on the CPU.
    """

    headrace: dict[str, str]


class Statistics(TypedDict):
    """Exact counts and times."""

    model_stats: list[VersionStatistics]


class ProfileRow(TypedDict):
    """Compute times of batches of one size.

    Attributes:
        median_us: median of the last times.
        p95_us: 95th percentile of the last times.
        observations: batches run for requests since the model was loaded.
        source: `load`: measured before the model served; `requests`: while it serves; `stored`: by an earlier
            process.
        instances: maximum of instances that were busy when the batch began.
    """

    rows: Positive
    median_us: Quantity
    p95_us: Quantity
    observations: Count
    source: Annotated[str, Meta(extra_json_schema={"enum": ["load", "requests", "stored"]})]
    instances: Positive


class ProfileResponse(TypedDict):
    """Compute times of one model version, for the batch sizes that were run."""

    name: str
    version: str
    profile: list[ProfileRow]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One limit of a model's throughput or latency.

    Attributes:
        kind: one word, for scripts.
        explanation: the limit, with the figures that show it.
        cure: what to change, if anything.
        setting: configuration field that the cure changes, if it is one.
        expected: effect of the change as the latency table predicts it.
    """

    kind: str
    explanation: str
    cure: str = ""
    setting: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True)
class SequenceFigures:
    """Sequences of a version with `sequence_batching`.

    Attributes:
        live: sequences between START and end, those in the backlog included.
        slots: slots of the live instances.
        used: slots with a sequence.
        backlog: sequences that wait for a slot.
        ends: sequences that have ended, by reason.
        refusals: requests that were refused because of their sequence, by reason.
    """

    live: Count
    slots: Count
    used: Count
    backlog: Count
    ends: Mapping[str, Count]
    refusals: Mapping[str, Count]


class VersionTraffic(TypedDict):
    """Traffic of one version or other model; requests, errors, comparisons and agreement are those of the window of the rules.

    Attributes:
        version: number; of another model model:NAME.
        share: of the requests that name no version.
        reason: why a rule took the share, or another model gets no request; else empty.
        promotion: why the version may not be promoted now; empty if it may.
        routed: requests that named no version and reached it.
        errors: errors of the server.
        p99_ms: of the latest 1024 answers.
        comparisons: compared and failed shadow requests.
        agreement: share of the compared rows that agree with the stable version.
        max_difference: largest absolute difference since the version was loaded.
        shadow: shadow requests by outcome.
    """

    version: str
    state: Annotated[str, Meta(extra_json_schema={"enum": TRAFFIC_STATES})]
    share: Annotated[float, Meta(ge=0, le=1)]
    reason: str
    promotion: str
    routed: Count
    requests: Count
    errors: Count
    p99_ms: float | None
    comparisons: Count
    agreement: float | None
    max_difference: float | str | None
    shadow: dict[str, Count]


class TrafficReport(TypedDict):
    """Traffic in force over the versions of a model and other models."""

    model: str
    sticky_header: str
    shadow: dict[str, Any] | None
    rules: dict[str, Any] | None
    versions: list[VersionTraffic]


class Explanation(TypedDict):
    """Limits of one model version, measured over the last seconds.

    Attributes:
        limit: kind of the first finding.
        summary: the first finding in one sentence.
        findings: most important first.
        numbers: figures of the last seconds and of the latency table.
        cache: state and figures of the response cache, if the model has one.
        padding: state of padding and its reason, if the model has `pad`.
        batches: which batch sizes are proven, and why others are not, if they were tested.
        sequences: sequences, slots and backlog, if the model has `sequence_batching`.
        traffic: shares and figures of the versions, if the model has `traffic`.
    """

    name: str
    version: str
    limit: str
    summary: str
    findings: list[Bottleneck]
    numbers: dict[str, Any]
    cache: NotRequired[dict[str, Any]]
    padding: NotRequired[dict[str, str]]
    batches: NotRequired[dict[str, Any]]
    sequences: NotRequired[SequenceFigures]
    traffic: NotRequired[TrafficReport]


class PriorityLoad(TypedDict):
    """Load of one priority level.

    Attributes:
        level: 1 is the most urgent.
        queue_depth: requests in the queue.
        queue_rows: rows in the queue.
        predicted_wait_us: queue time predicted for a request of one row; 0: none, or unknown.
    """

    level: Positive
    queue_depth: Count
    queue_rows: Count
    predicted_wait_us: Count


class LoadFigures(TypedDict):
    """Queue and running batches of a model."""

    queue_depth: Count
    queue_rows: Count
    in_flight: Count
    running_rows: Count
    predicted_wait_us: Count
    drain_us: Count


class LoadResponse(LoadFigures):
    """Load of a model version at this moment.

    Attributes:
        queue_depth: requests in the queue.
        queue_rows: rows in the queue.
        in_flight: requests between arrival and response.
        running_rows: rows that instances are running.
        predicted_wait_us: queue time predicted for a request of one row and default priority; 0: none, or
            unknown.
        drain_us: time until the queue and the running batches are done, if no request came.
        instances: instances that are alive.
        rows_per_s: capacity of all live instances together by the latency table; 0: unknown.
        late_answers: responses after their deadline since the model was loaded.
        levels: load of each priority level.
    """

    name: str
    version: str
    instances: Count
    rows_per_s: Quantity
    late_answers: Count
    levels: list[PriorityLoad]


class IndexRow(TypedDict):
    """A model version in the repository; `version` is empty where the row is about the model as a whole."""

    name: str
    version: str
    state: StateName
    reason: str


class ListedVersion(TypedDict):
    """A version of a model in the repository."""

    version: str
    state: StateName
    reason: str


class ListedModel(TypedDict):
    """A model in the repository.

    Attributes:
        platform: of the latest version that serves; empty if none does.
        state: of the model as a whole, where it has no version.
    """

    name: str
    platform: str
    versions: list[ListedVersion]
    state: NotRequired[StateName]
    reason: NotRequired[str]


class ModelList(TypedDict):
    """Models in the repository, by name.

    Attributes:
        next: `after` of the next page; absent after the last one, and without `limit`.
    """

    models: list[ListedModel]
    next: NotRequired[str]


class SystemRegionStatus(TypedDict):
    """A registered region of system shared memory."""

    name: str
    key: str
    offset: Count
    byte_size: Count


class CudaRegionStatus(TypedDict):
    """A registered region of GPU memory."""

    name: str
    device_id: Count
    byte_size: Count


class TraceSettings(TypedDict):
    """Trace settings in force."""

    trace_level: list[str]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class LogSettingsResponse(TypedDict):
    """Log settings in force."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: Count
    log_format: Literal["default", "ISO8601"]


class StepStatus(TypedDict):
    """A step of a pipeline: its configuration, counts since the pipeline was loaded, and the load of its model now.

    Attributes:
        version: that runs the step now; empty if none does, and for a built-in step.
        joined: step that runs in the same call; empty for none.
        inputs: tensor of the pipeline by name of the model's input.
        outputs: tensor of the pipeline by name of the model's output.
        when: condition; empty for none.
        condition: tensors of the condition.
        each: tensor whose rows are the model's requests; empty for none.
        fallback: model in place of one that fails or would be late; empty for none.
        queued: requests in the queue of the model, of all callers.
        in_flight: requests in the model, of all callers.
        requests: requests with a result.
        fallbacks: requests that the fallback answered.
        skipped: requests that did not run the step: its condition did not hold, or there were no rows.
        latency: requests by time, as for a version.
    """

    name: str
    model: str
    version: str
    builtin: bool
    joined: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    when: str
    condition: Sequence[str]
    each: str
    fallback: str
    ready: bool
    queued: Count
    in_flight: Count
    requests: Count
    fallbacks: Count
    skipped: Count
    failures: Count
    latency: dict[str, Count]


class PipelineStatus(TypedDict):
    """Graph of a pipeline or ensemble with the figures of its steps.

    Attributes:
        kind: ensemble or pipeline.
        outputs: tensor by name of the output.
        limiting: step with the longest mean time of the last seconds; empty without requests.
    """

    kind: str
    inputs: Sequence[str]
    outputs: dict[str, str]
    limiting: str
    steps: list[StepStatus]


class RequestRates(TypedDict):
    """Request rates of a version in the last ten minutes."""

    requests_per_s: list[Quantity]
    failures_per_s: list[Quantity]


# The name of this field is older than the word evicted.
EvictionStatus = TypedDict("EvictionStatus", {"parked": bool})  # noqa: UP013  # a class would repeat the name in the code


class ServingStatus(RequestRates, EvictionStatus):
    """State, counts and gauges of a version that serves.

    Attributes:
        runtime: onnxruntime, onnxruntime_cuda, tensorrt or another backend.
        device: CPU, or e.g. "GPU 0,1".
        precision: of the engine; for the model's own file, which file it is.
        artefact: name of the file that is loaded.
        not_on_gpu: why the version runs on the CPU though a GPU is present or requested, else empty.
        unproven_batches: why batch sizes are not proven, else empty.
        engine: precision of the built engine that serves; empty for the model's own file.
        max_batch_size: maximum rows of a batch where the version runs; 0: no batching.
        instances: configured instances.
        living: instances that are alive.
        restarts: of instances that had died.
        parked: evicted from GPU memory; loaded at the next request.
        queued: requests in the queue.
        wait_ns: queue time predicted for a request now; 0: none, or unknown.
        late: responses after their deadline.
        in_flight: requests between arrival and response.
        requests: successful requests.
        rows: rows of successful requests.
        failures: failed requests by the reason of their error.
        batches: batches by the reason why they were closed.
        sizes: batches by their number of rows.
        queue_ns: total over successful requests, like the next four.
        latency: successful requests by latency: bucket i ends at 2 ** (i / buckets_per_doubling) seconds.
        requests_per_s: successful requests a second in each period of the last ten minutes, the latest last,
            without leading zeros.
        failures_per_s: failed requests, likewise.
        pipeline: of a pipeline or ensemble, else null.
        sequences: of a model with `sequence_batching`, else null.
        traffic: of a model with `traffic`, else null.
    """

    platform: str
    runtime: str
    device: str
    precision: str
    artefact: str
    not_on_gpu: str
    unproven_batches: str
    engine: str
    max_batch_size: Count
    instances: Count
    living: Count
    restarts: Count
    queued: Count
    wait_ns: Count
    late: Count
    in_flight: Count
    requests: Count
    rows: Count
    failures: dict[str, Count]
    batches: dict[str, Count]
    sizes: dict[str, Count]
    queue_ns: Count
    assemble_ns: Count
    compute_ns: Count
    split_ns: Count
    total_ns: Count
    latency: dict[str, Count]
    pipeline: PipelineStatus | None
    sequences: SequenceFigures | None
    traffic: VersionTraffic | None


class VersionStatus(IndexRow):
    """A model version in the repository, with its figures if it serves."""

    serving: ServingStatus | None


class RepositoryStoreStatus(TypedDict):
    """A repository that is mirrored from a store.

    Attributes:
        reachable: false if the last comparison with the store failed.
        error: why it failed; what is loaded stays in service.
        compared_s_ago: seconds since the last comparison that succeeded.
    """

    url: str
    reachable: bool
    error: str
    compared_s_ago: int | None


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One process of a server with front ends.

    Attributes:
        name: supervisor, engine or front_end_ with its number.
        pid: process id; 0 while it does not run.
        cpu_s: CPU seconds, with those of the processes that it replaced.
        memory_bytes: resident memory, shared memory included.
        connections: open client connections.
        moved: connections that it has given up to another process.
        expected: it should run; False for a front end that the load does not need.
    """

    name: str
    pid: Count
    cpu_s: Quantity
    memory_bytes: Count
    starts: Count
    connections: Count
    moved: Count
    expected: bool


class OverviewStatus(TypedDict):
    """State of the server and of all models."""

    time_ns: Count
    uptime_ns: Count
    ready: bool
    models_ready: Count
    models_expected: Count
    buckets_per_doubling: Positive
    history_period_ns: Positive
    processes: list[ProcessFigures]
    stores: list[RepositoryStoreStatus]
    models: list[VersionStatus]


class ServerStatus(OverviewStatus):
    """The server and all models; counts since each version was loaded, at most some tenths of a second old.

    Attributes:
        time_ns: monotonic time of the figures.
        ready: as in /v2/health/ready.
        models_ready: models of which every version that should be served is READY.
        models_expected: models that should be served.
        buckets_per_doubling: resolution of `latency`.
        history_period_ns: length of the periods of `requests_per_s`.
        processes: with --front-ends; else empty.
        stores: repositories with a URL.
    """

    name: str
    version: str


class LayerTime(TypedDict):
    """Time of one layer of the model or engine.

    Attributes:
        nodes: nodes of the ONNX model that the layer computes.
    """

    name: str
    kind: str
    nodes: list[str]
    precision: str
    tactic: str
    time_us: Quantity
    share: Quantity


class LayerTimes(TypedDict):
    """Time of each layer, in order of execution, from the runtime's profiler.

    Attributes:
        artefact: file that was measured.
        machine: machine that it was measured on.
        reason: why it is the model's own file, or why there are no layers; empty if it is a built engine.
    """

    format: int
    model: str
    version: int
    artefact: str
    precision: str
    machine: str
    reason: str
    shapes: dict[str, list[int]]
    rows: Count
    median_us: Quantity
    p99_us: Quantity
    rows_per_s: Quantity
    total_us: Quantity
    layers: list[LayerTime]
