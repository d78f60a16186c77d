"""Every metric of the server in one table: name, kind, labels and meaning.

A family's name is the one that Prometheus stores: that of a counter ends in `_total`. Released names never change.
`python -m deploy.metrics_page docs` writes docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as OpenMetricsExemplar
from prometheus_client.samples import Sample

from headrace.core.clock import NS_PER_S
from headrace.observability.histograms import BUCKETS_S, Exemplar, Histogram

Kind = Literal["counter", "gauge", "histogram", "summary"]
MODEL = ("model", "version")
_LE = [*(str(bound) for bound in BUCKETS_S), "+Inf"]


class ScrapeCollector(Collector):
    """A collector that runs at a scrape only, not at its registration: models and GPUs change, and reading them takes time."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect."""
        return ()


class Durations(HistogramMetricFamily):
    """A histogram with classic and native buckets.

    Attributes:
        natives: label values and histogram of each series.
    """

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, text, labels=labels)
        self.natives: list[tuple[list[str], Histogram]] = []

    def add(self, labels: list[str], histogram: Histogram) -> None:
        """Add a series; the histogram must not change afterwards."""
        self.natives.append((labels, histogram))
        buckets = [_sample(bucket) for bucket in classic_buckets(histogram)]
        self.add_metric(labels, buckets, histogram.sum_ns / NS_PER_S)


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Samples that are made while the page is rendered: tens of thousands at once would start the garbage collector.

    Attributes:
        name: of the samples.
        labels: names of the labels.
        rows: label values and value of each sample; read once.
    """

    name: str
    labels: tuple[str, ...]
    rows: Iterable[tuple[Sequence[str], float]]

    def __iter__(self) -> Iterator[Sample]:
        for values, value in self.rows:
            yield Sample(self.name, dict(zip(self.labels, values, strict=True)), value)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        section: of docs/metrics.md.
        name: as Prometheus stores it.
        kind: Prometheus' type. A counter without the suffix `_total`, as Triton's are, is `unknown` in OpenMetrics, which
            requires the suffix.
        text: help text, one or two sentences.
        labels: names of the labels, without `le` of histograms and `quantile` of summaries.
        native: a histogram of durations that also has native buckets.
        when: condition under which it has series; "" if it always has.
    """

    section: str
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    native: bool = False
    when: str = ""

    def counter(self) -> CounterMetricFamily:
        """Return the family without series, for `add_metric`."""
        return CounterMetricFamily(self.name.removesuffix("_total"), self.text, labels=self.labels)

    def gauge(self) -> GaugeMetricFamily:
        """Return the family without series, for `add_metric`."""
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)

    def summary(self) -> SummaryMetricFamily:
        """Return the family without series, for `add_metric`."""
        return SummaryMetricFamily(self.name, self.text, labels=self.labels)

    def histogram(self) -> HistogramMetricFamily:
        """Return the family without series, for `add_metric`."""
        return HistogramMetricFamily(self.name, self.text, labels=self.labels)

    def durations(self) -> Durations:
        """Return the family without series, for `add`."""
        return Durations(self.name, self.text, self.labels)

    def unknown(self) -> Metric:
        """Return a counter without the suffix `_total`, without series, for `add_sample`."""
        return Metric(self.name, self.text, "unknown")

    def stream(self, rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
        """Return a counter or gauge whose series are read while the page is rendered.

        Args:
            rows: label values and value of each series.
        """
        family = self.counter() if self.kind == "counter" else self.gauge()
        family.samples = SampleStream(self.name, self.labels, rows)  # type: ignore[assignment]  # is only iterated
        return family

    def any_summary(self) -> Metric:
        """Return a summary with quantiles, without series, for `add_sample`; samples of a series must be adjacent."""
        return Metric(self.name, self.text, "summary")


@dataclass(frozen=True, slots=True)
class _Section:
    """Makes the families of a section of docs/metrics.md.

    Attributes:
        title: title of the section.
        labels: first labels of its families.
        when: condition of its families without one of their own.
    """

    title: str
    labels: tuple[str, ...] = ()
    when: str = ""

    def __call__(
        self,
        name: str,
        text: str,
        *more: str,
        labels: tuple[str, ...] | None = None,
        kind: Kind | None = None,
        native: bool = False,
        when: str = "",
    ) -> Family:
        """Return a family: by its name a counter or a gauge, with the section's labels, unless the arguments differ."""
        named: Kind = "counter" if name.endswith("_total") else "gauge"
        first = self.labels if labels is None else labels
        return Family(self.title, name, kind or named, text, (*first, *more), native, when or self.when)


def classic_buckets(histogram: Histogram) -> list[tuple[str, int, Exemplar | None]]:
    """Return upper bound as text, cumulative count and exemplar of each classic bucket."""
    cumulative: list[int] = histogram.counts.cumsum().tolist()
    return [
        (bound, count, histogram.exemplars.get(index))
        for index, (bound, count) in enumerate(zip(_LE, cumulative, strict=True))
    ]


def _sample(bucket: tuple[str, int, Exemplar | None]) -> tuple[str, float] | tuple[str, float, OpenMetricsExemplar]:
    bound, count, exemplar = bucket
    if exemplar is None:
        return bound, count
    return (
        bound,
        count,
        OpenMetricsExemplar({"trace_id": exemplar.trace_id}, exemplar.value_ns / NS_PER_S, exemplar.time_s),
    )


_requests = _Section("Requests and their time", MODEL)
_ONCE = "once for each request in it"
_CODED = "once for each successful request over HTTP or gRPC"
PHASE_SECONDS = {
    phase: _requests(f"headrace_{phase}_seconds", text, kind="histogram", native=True)
    for phase, text in {
        "decode": f"Time to decode and validate a request, {_CODED}.",
        "queue": "Time of a request in the queue.",
        "assemble": f"Time to assemble a batch, {_ONCE}.",
        "compute": f"Compute time of a batch, {_ONCE}.",
        "split": f"Time to split the outputs of a batch, {_ONCE}.",
        "encode": f"Time from the split outputs to the encoded response, {_CODED}.",
        "total": "Time from the arrival of a request to its response.",
    }.items()
}
FIRST_RESPONSE = _requests(
    "headrace_first_response_seconds",
    "Time from the arrival of a request to its first response.",
    kind="histogram",
    native=True,
    when="for a decoupled model",
)
INTER_RESPONSE = _requests(
    "headrace_inter_response_seconds",
    "Time between two responses of a request.",
    kind="histogram",
    native=True,
    when="for a decoupled model",
)
REQUESTS = _requests("headrace_requests_total", "Successful requests.")
ROWS = _requests("headrace_rows_total", "Rows of successful requests.")
FAILURES = _requests(
    "headrace_failures_total", "Failed, rejected and cancelled requests to a model, by reason.", "reason"
)
ERRORS = _requests("headrace_errors_total", "Error responses, with or without a model.", labels=("protocol", "reason"))
LIMIT_HITS = _requests(
    "headrace_limit_hits_total",
    "Requests, connections and streams that reached a limit, by option.",
    labels=("protocol", "limit"),
)

_batches = _Section("Batches", MODEL)
BATCHES = _batches("headrace_batches_total", "Executed batches, by the reason why they were closed.", "closed_by")
BATCH_ROWS = _batches("headrace_batch_rows", "Rows of each executed batch.", kind="histogram")
PROFILE = _batches(
    "headrace_profile_microseconds",
    "Expected compute time of a batch with this many rows, in microseconds.",
    "rows",
    "quantile",
)

_load = _Section("Load", MODEL)
BUSY = _load(
    "headrace_busy_seconds_total",
    "Total time in which instances were busy; its rate() divided by the number of instances is the utilisation.",
)
INLINE_RUNS = _load(
    "headrace_inline_runs_total", "Requests that ran on the event loop instead of on an instance, failed ones included."
)
INLINE_DISABLED = _load(
    "headrace_inline_disabled_total",
    "Runs on the event loop that took more than 2 ms. Each disables such runs for 200 times as long, at most 60 s.",
)
POSITIONS = _load(
    "headrace_batch_positions_total",
    "Rows times length of the batches of a model with `pad`, padding included.",
    when="for a model with `pad`",
)
PADDING_POSITIONS = _load(
    "headrace_padding_positions_total",
    "Positions of `headrace_batch_positions_total` that were padding; the quotient of their rate()s is the share of padding.",
    when="for a model with `pad`",
)
UNPROVEN_SIZES = _load(
    "headrace_unproven_batch_sizes",
    "Batch sizes that failed the tests of docs/proof.md, and are not run unless `proof` is `warn`.",
    when="for a model whose batch sizes were tested",
)
ROW_DIFFERENCES = _load(
    "headrace_row_differences_total",
    "Rows of batches that had other outputs when they were run again alone, of one row in `proof_sample`.",
    when="for a model whose rows are sampled",
)
QUEUE_DEPTH = _load("headrace_queue_depth", "Requests in the queue.")
IN_FLIGHT = _load("headrace_in_flight", "Requests between arrival and response.")
PREDICTED_WAIT = _load(
    "headrace_predicted_wait_seconds",
    "Predicted time in the queue of a new request of one row, by priority level (1 is the highest); 0 "
    "without measurements.",
    "level",
)
DRAIN = _load("headrace_drain_seconds", "Time to complete all queued and running requests.")
CAPACITY = _load(
    "headrace_capacity_rows_per_second",
    "Rows per second that all live instances together can compute; 0 without measurements.",
)
OBJECTIVE = _load(
    "headrace_objective_seconds",
    "Latency objective of the model for 99 % of requests.",
    when="with `slo` in the model's configuration",
)
LATE = _load("headrace_late_total", "Responses after the model's objective or the request's deadline.")
SERVER_QUEUE_DEPTH = _load(
    "headrace_server_queue_depth", "Requests in the queues of all models of the server.", labels=()
)
SERVER_IN_FLIGHT = _load(
    "headrace_server_in_flight",
    "Requests between arrival and response at all models of the server; that of a pipeline counts at the models of its steps.",
    labels=(),
)
SERVER_PREDICTED_WAIT = _load(
    "headrace_server_predicted_wait_seconds",
    "The longest predicted time in the queue of a new request of one row, of all models of the server.",
    labels=(),
)
SERVER_UTILIZATION = _load(
    "headrace_server_utilization_ratio",
    "Work of the server over what it can do, of the last seconds; more than 1 if work waits. `application_utilization` of load "
    "reports.",
    labels=(),
)

_stores = _Section("Repositories in stores", ("repository",))
STORE = "for a repository with a URL"
STORE_REACHABLE = _stores(
    "headrace_repository_reachable", "1 if the last comparison with the store succeeded.", when=STORE
)
STORE_SYNCS = _stores(
    "headrace_repository_syncs_total",
    "Comparisons with the store by result: unchanged, changed, failed.",
    "result",
    when=STORE,
)
STORE_BYTES = _stores("headrace_repository_downloaded_bytes_total", "Bytes downloaded from the store.", when=STORE)

_models = _Section("Models", MODEL)
READY = _models("headrace_ready", "1 while /v2/health/ready answers 200.", labels=())
MODEL_STATE = _models(
    "headrace_model_state",
    "1 for the current state of a version, 0 for the other states; without them while it is unused.",
    "state",
)
MODEL_LOADS = _models(
    "headrace_model_loads_total",
    "Loads and unloads by result: loaded, reloaded, unloaded, failed; only the last of a model that was never used.",
    labels=("model", "result"),
    when="once a model has been loaded",
)
LOAD_SECONDS = _models("headrace_load_seconds", "Time to load a version.", kind="summary")
INSTANCES = _models("headrace_instances", "Live instances.")
INSTANCES_WANTED = _models(
    "headrace_instances_wanted", "Configured instances; 0 while the version is evicted from GPU memory."
)
RESTARTS = _models("headrace_instance_restarts_total", "Instances that died and were restarted.")
PROCESS_UP = _models(
    "headrace_model_process_up", "1 while the process of an isolated model serves.", when="with `isolation: process`"
)
PROCESS_RESTARTS = _models(
    "headrace_model_process_restarts_total",
    "Processes of an isolated model that died and were replaced.",
    when="with `isolation: process`",
)

_sequences = _Section("Sequences", MODEL, "for a model with `sequence_batching`")
SEQUENCES = _sequences("headrace_sequences", "Live sequences, those in the backlog included.")
SEQUENCE_SLOTS = _sequences("headrace_sequence_slots", "Slots of the live instances.")
SEQUENCE_SLOTS_USED = _sequences("headrace_sequence_slots_used", "Slots with a sequence.")
SEQUENCE_BACKLOG = _sequences("headrace_sequence_backlog", "Sequences that wait for a slot.")
SEQUENCE_ENDS = _sequences(
    "headrace_sequence_ends_total",
    "Sequences that have ended, by reason: end, restart (START on its id), idle, cancelled (a queued request was cancelled or "
    "timed out), died (the instance with its state), unloaded, share (its client has more slots than one that waits).",
    "reason",
)
SEQUENCE_REFUSALS = _sequences(
    "headrace_sequence_refusals_total",
    "Requests that were refused because of their sequence, by reason: not_live (no START), queue_full, unloading, ended (queued "
    "when their sequence ended).",
    "reason",
)

_traffic = _Section("Traffic", MODEL, "for a model with `traffic`")
TRAFFIC_SHARE = _traffic(
    "headrace_traffic_share", "Share of the version in requests that name no version, from 0 to 1."
)
TRAFFIC_STATE = _traffic(
    "headrace_traffic_state",
    "1 for the current state of a version: stable, canary, shadow, idle (no share), undone (a rule took its share), not_ready.",
    "state",
)
TRAFFIC_ROUTED = _traffic("headrace_traffic_routed_total", "Requests that named no version and were given to this one.")
TRAFFIC_UNDONE = _traffic(
    "headrace_traffic_undone_total", "Times that a rule of `traffic.rules` took the share of the version.", "rule"
)
_shadow = "for the version of `traffic.shadow`"
SHADOW_REQUESTS = _traffic(
    "headrace_shadow_requests_total",
    "Shadow requests by outcome: compared, failed, or the reason why one was dropped, such as queue_full or too_large.",
    "outcome",
    when=_shadow,
)
SHADOW_ROWS = _traffic("headrace_shadow_rows_total", "Rows of compared and failed shadow requests.", when=_shadow)
SHADOW_AGREEING_ROWS = _traffic(
    "headrace_shadow_agreeing_rows_total",
    "Rows whose shadow answer agrees with that of the stable version; for scores the largest one is at the same place.",
    when=_shadow,
)
SHADOW_MAX_DIFFERENCE = _traffic(
    "headrace_shadow_max_difference",
    "Largest absolute difference between an output of the version and of the stable version since it was loaded.",
    when=_shadow,
)

_cache = _Section("Response cache", MODEL, "with `--cache-config`, for a model with `response_cache.enable`")
CACHE_COUNTERS = {
    name: _cache(f"headrace_cache_{name}_total", text)
    for name, text in {
        "hits": "Requests answered from the response cache.",
        "merged": "Requests answered with the response of an equal request that was in flight.",
        "misses": "Requests that were looked up and computed.",
        "insertions": "Responses stored.",
        "evictions": "Responses removed because memory was needed for others.",
        "expirations": "Responses removed because they were older than `cache.ttl_s`.",
    }.items()
}
CACHE_BYTES = _cache("headrace_cache_bytes", "Memory of the model's responses in the cache.")
CACHE_ENTRIES = _cache("headrace_cache_entries", "The model's responses in the cache.")
CACHE_ENABLED = _cache("headrace_cache_enabled", "0 while the cache is switched off because it does not pay, else 1.")
_redis = "with `--cache-config redis`, for a model with `response_cache.enable`"
CACHE_REDIS_UP = _cache(
    "headrace_cache_redis_up",
    "1 while responses are looked up in Redis, 0 while it does not answer in time.",
    when=_redis,
)
CACHE_REDIS_LOOKUPS = _cache(
    "headrace_cache_redis_lookups_total",
    "Requests that were not in memory, by result: hit, miss, late (no answer in time), refused (a wrong digest or another "
    "format), skipped (Redis does not answer).",
    labels=(*MODEL, "result"),
    when=_redis,
)
CACHE_REDIS_WRITES = _cache(
    "headrace_cache_redis_writes_total",
    "Responses for Redis, by result: stored, dropped (too large, too many, or Redis does not take them).",
    labels=(*MODEL, "result"),
    when=_redis,
)

_steps = _Section("Pipelines", (*MODEL, "step"), "for a pipeline; `step` is a name in its configuration")
STEP_REQUESTS = _steps(
    "headrace_step_requests_total",
    "Pipeline requests by outcome of a step: ok, cached, fallback, skipped or error. A request that is cancelled or late in a "
    "step counts in none.",
    "outcome",
)
STEP_SECONDS = _steps(
    "headrace_step_seconds",
    "Time from the queue of a step to its result, of steps with the outcome ok, cached or fallback.",
    kind="histogram",
    native=True,
)
STEP_WASTED = _steps(
    "headrace_step_wasted_seconds_total",
    "Compute time of results of a step whose pipeline request got an error later.",
)

_engines = _Section("Engines", MODEL)
ENGINE_INFO = _engines(
    "headrace_engine_info",
    "1 for a model that is served by a built engine.",
    "precision",
    "file",
    "below_accuracy_bar",
    when="for a model that is served by a built engine",
)
ENGINE_ACCURACY = _engines(
    "headrace_engine_accuracy",
    "Agreement of the engine's outputs with the FP32 model at build time, by measure; 1 is equal.",
    "measure",
    when="for a model that is served by a built engine",
)
ENGINE_BUILDS = _engines(
    "headrace_engine_builds_total",
    "Engine builds by the server (`build_on_load`), by result: built, failed.",
    labels=("model", "result"),
    when="with `build_on_load`, once a build has ended",
)

_memory = _Section("Memory of models", MODEL)
GPU_MODEL = "once a model on a GPU has been loaded"
GPU_MEMORY = _memory(
    "headrace_gpu_memory_bytes",
    "Memory reserved for models; the label gpu is a number, or host for pinned memory.",
    labels=("gpu", *MODEL, "kind"),
    when=GPU_MODEL,
)
GPU_MEMORY_LIMIT = _memory(
    "headrace_gpu_memory_limit_bytes",
    "Maximum memory of all models together on a GPU.",
    labels=("gpu",),
    when=GPU_MODEL,
)
HOST_BUDGET = "with `--host-memory-budget`"
HOST_MEMORY = _memory("headrace_host_memory_bytes", "Host memory of a version that the CPU runs.", when=HOST_BUDGET)
HOST_MEMORY_LIMIT = _memory(
    "headrace_host_memory_limit_bytes",
    "Maximum host memory of all models together that the CPU runs.",
    labels=(),
    when=HOST_BUDGET,
)
HOST_RESIDENT = _memory(
    "headrace_host_resident_versions",
    "Versions that the CPU runs and that are in memory; the others are loaded by their next request.",
    labels=(),
    when=HOST_BUDGET,
)
ON_DEMAND_LOADS = _memory("headrace_on_demand_loads_total", "Loads of evicted versions caused by a request.")
EVICTIONS = _memory("headrace_evictions_total", "Evictions of a version from memory in favour of another.")


_NVML = "with an NVIDIA driver"
_gpus = _Section("GPUs", ("gpu",), _NVML)
GPU_INFO = _gpus("headrace_gpu_info", "Always 1; the labels identify the GPU.", "name", "uuid", "driver")
GPU_UP = _gpus("headrace_gpu_up", "1 while the driver can read the GPU, 0 once it is lost.")
GPU_UTILIZATION = _gpus(
    "headrace_gpu_utilization_ratio", "Share of the driver's last sampling period in which a kernel ran, 0 to 1."
)
GPU_MEMORY_USED = _gpus("headrace_gpu_device_memory_used_bytes", "Memory in use on the GPU by all processes.")
GPU_MEMORY_TOTAL = _gpus("headrace_gpu_device_memory_total_bytes", "Memory of the GPU.")
GPU_POWER = _gpus("headrace_gpu_power_watts", "Power drawn.")
GPU_POWER_LIMIT = _gpus("headrace_gpu_power_limit_watts", "Power limit of the GPU.")
GPU_ENERGY = _gpus("headrace_gpu_energy_joules_total", "Energy used since the driver was loaded.")
GPU_TEMPERATURE = _gpus("headrace_gpu_temperature_celsius", "Temperature of the GPU's core.")
GPU_CLOCK = _gpus("headrace_gpu_clock_hertz", "Clock of the processors (sm) or the memory.", "clock")
GPU_ECC = _gpus(
    "headrace_gpu_ecc_errors_total", "Memory errors since the driver was loaded: corrected, uncorrected.", "kind"
)
GPU_SLOWED = _gpus("headrace_gpu_slowed", "1 while the GPU reduces its clocks for this reason.", "reason")

_server = _Section("The server")
BUILD_INFO = _server("headrace_build_info", "Always 1; the labels are versions.", "version", "python")
LOOP_LAG = _server(
    "headrace_event_loop_lag_seconds",
    "Delay of a timer on the event loop, measured four times a second; every other task of the loop waits as long.",
    kind="histogram",
    native=True,
)
CONNECTIONS = _server("headrace_connections", "Open connections; absent for a protocol that is not served.", "protocol")
BODIES = _server(
    "headrace_body_bytes",
    "Bytes of the bodies of all requests in the server; --max-total-body-bytes is the limit, with headrace_unread_bytes.",
)
UNREAD = _server("headrace_unread_bytes", "Bytes of responses that clients have not read and the server holds.")
LIMIT = _server("headrace_limit", "Limits on clients in force, by name.", "limit")
THREADS = _server("headrace_threads", "Python threads in the server's process.")
SERVER_PROCESS_UP = _server(
    "headrace_process_up",
    "1 while a process of the server runs, else 0.",
    "process",
    when="in a server of several processes (`--front-ends`)",
)
SERVER_PROCESS_CPU = _server(
    "headrace_process_cpu_seconds_total",
    "CPU time of each process of the server, with that of the processes that it replaced.",
    "process",
    kind="counter",
    when="in a server of several processes (`--front-ends`)",
)
SERVER_PROCESS_MEMORY = _server(
    "headrace_process_resident_memory_bytes",
    "Resident memory of each process of the server; shared memory counts in each that uses it.",
    "process",
    when="in a server of several processes (`--front-ends`)",
)
SERVER_PROCESS_STARTS = _server(
    "headrace_process_starts_total",
    "Starts of each process of the server; more than 1 means that it ended and was replaced.",
    "process",
    kind="counter",
    when="in a server of several processes (`--front-ends`)",
)
SERVER_PROCESS_CONNECTIONS = _server(
    "headrace_process_connections",
    "Open client connections of each process.",
    "process",
    when="in a server of several processes (`--front-ends`)",
)
SERVER_PROCESS_MOVED = _server(
    "headrace_process_connections_moved_total",
    "Connections that each process has given up to another, by the load.",
    "process",
    kind="counter",
    when="in a server of several processes (`--front-ends`)",
)
TELEMETRY_DROPPED = _server(
    "headrace_telemetry_dropped_total",
    "Spans, records of trace files, lines of the request log and of the log that were dropped because they could "
    "not be written or sent in time.",
    "kind",
)
CERTIFICATE = _server(
    "headrace_tls_certificate_expiry_timestamp_seconds",
    "Expiry time of the server's certificate, in seconds since 1970.",
    when="with `--tls-cert`",
)

_triton = _Section("Triton's names, for dashboards made for it", MODEL)
TRITON = {
    name: _triton(f"nv_inference_{name}", text, kind="counter")
    for name, text in {
        "request_success": "Successful requests.",
        "count": "Computed rows of successful requests.",
        "exec_count": "Executed batches.",
        "request_duration_us": "Time of successful requests.",
        "queue_duration_us": "Time in the queue.",
        "compute_input_duration_us": "Time to assemble batches.",
        "compute_infer_duration_us": "Compute time.",
        "compute_output_duration_us": "Time to split batches.",
    }.items()
}
TRITON_FAILURE = _triton(
    "nv_inference_request_failure",
    "Failed requests: REJECTED (queue, deadline or quota), CANCELED, BACKEND (the model failed), OTHER.",
    "reason",
    kind="counter",
)
TRITON_SUMMARY = {
    phase: _triton(f"nv_inference_{name}_summary_us", text, kind="summary")
    for phase, (name, text) in {
        "total": ("request", "Time of successful requests; quantiles of the last minute."),
        "queue": ("queue", "Time in the queue; quantiles of the last minute."),
        "assemble": ("compute_input", "Time to assemble batches; quantiles of the last minute."),
        "compute": ("compute_infer", "Compute time; quantiles of the last minute."),
        "split": ("compute_output", "Time to split batches; quantiles of the last minute."),
    }.items()
}
TRITON_CACHE = {
    name: _triton(f"nv_cache_{name}_per_model", text, kind="counter", when=_cache.when)
    for name, text in {
        "num_hits": "Requests answered from the response cache, or with the response of an equal one in flight.",
        "num_misses": "Requests that were looked up and computed.",
        "hit_duration": "Time of hits in the cache, in microseconds.",
        "miss_duration": "Time of misses in the cache: lookup and insertion, in microseconds.",
    }.items()
}
TRITON_CACHE_SUMMARY = {
    name: _triton(f"nv_cache_{name}_summary_us", text, kind="summary", when=_cache.when)
    for name, text in {
        "hit": "Time of hits in the cache; count and sum, without quantiles.",
        "miss": "Time of misses in the cache: lookup and insertion; count and sum, without quantiles.",
    }.items()
}
TRITON_FIRST_RESPONSE = _triton(
    "nv_inference_first_response_histogram_ms",
    "Time from the arrival of a request to its first response, in milliseconds.",
    kind="histogram",
)
TRITON_PENDING = _triton("nv_inference_pending_request_count", "Requests in the queue.")
TRITON_LOAD_SECONDS = _triton("nv_model_load_duration_secs", "Time of the last load of a version, in seconds.")
TRITON_PINNED = {
    name: _triton(f"nv_pinned_memory_pool_{name}_bytes", text, labels=())
    for name, text in {
        "total": "Pinned memory of the host allocated for models; there is no pool of a fixed size.",
        "used": "Pinned memory of the host in use by models.",
    }.items()
}
TRITON_CPU = {
    name: _triton(f"nv_cpu_{name}", text, labels=(), when="on Linux")
    for name, text in {
        "utilization": "Processor utilisation since the last scrape, 0 to 1.",
        "memory_total_bytes": "Memory of the machine.",
        "memory_used_bytes": "Used memory of the machine.",
    }.items()
}
TRITON_GPU = {
    name: _triton(f"nv_{name}", text, labels=("gpu_uuid",), when=_NVML)
    for name, text in {
        "gpu_utilization": "Share of the driver's last sampling period in which a kernel ran, 0 to 1.",
        "gpu_memory_total_bytes": "Memory of the GPU.",
        "gpu_memory_used_bytes": "Memory in use on the GPU.",
        "gpu_power_usage": "Power drawn, in watts.",
        "gpu_power_limit": "Power limit of the GPU, in watts.",
    }.items()
}
TRITON_ENERGY = _triton(
    "nv_energy_consumption",
    "Energy used since the first scrape, in joules.",
    labels=("gpu_uuid",),
    kind="counter",
    when=_NVML,
)

_process = _Section("The process, from prometheus-client", when="on Linux")

PROCESS = tuple(
    _process(f"process_{name}", text)
    for name, text in {
        "virtual_memory_bytes": "Virtual memory size in bytes.",
        "resident_memory_bytes": "Resident memory size in bytes.",
        "start_time_seconds": "Start time of the process since unix epoch in seconds.",
        "cpu_seconds_total": "Total user and system CPU time spent in seconds.",
        "open_fds": "Number of open file descriptors.",
        "max_fds": "Maximum number of open file descriptors.",
    }.items()
)


def families() -> list[Family]:
    """Return all families in the order of this file."""
    result: list[Family] = []
    for value in globals().values():
        if isinstance(value, Family):
            result.append(value)
        elif isinstance(value, dict | tuple):
            values = value.values() if isinstance(value, dict) else value
            result += [member for member in values if isinstance(member, Family)]
    return result
