"""Model configuration: one schema for `config.pbtxt` and `config.yaml`.

The field names are those of Triton's published `ModelConfig` message. Fields that the message lacks are Headrace's
(`HEADRACE_FIELD_PATHS`): a plain field in `config.yaml`, and in `config.pbtxt` an entry of `parameters` whose key is "headrace."
and the field's dotted name. The object is frozen and validated at construction. An error is raised as pydantic's
`ValidationError` that carries `Problems`.

`model_fields_set` has the fields that a file sets; `headrace.config.auto_complete` completes the others from the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from headrace.config.batching_config import BatchInput, BatchOutput, Padding, batching_problems, padding_problems
from headrace.config.cache_config import CacheLimits, ResponseCache
from headrace.config.config_base import (
    ConfigPart,
    Count,
    Duration,
    Flag,
    Location,
    Number,
    OneOf,
    ParameterText,
    PositiveCount,
    Problem,
    Problems,
    SizeBytes,
    Text,
    Version,
    option,
)
from headrace.config.optimization_config import HEADRACE_OPTIMIZATION_FIELDS, Optimization
from headrace.config.pipeline_config import EnsembleScheduling, PipelineConfig
from headrace.config.sequence_config import SequenceBatching, control_inputs, sequence_problems, state_tensors
from headrace.config.tensor_config import (
    ModelInput,
    ModelOutput,
    ModelWarmup,
    Postprocess,
    Preprocess,
    postprocess_problems,
    preprocess_problems,
    served_inputs,
    served_outputs,
)
from headrace.config.traffic_config import Traffic, traffic_problems
from headrace.core.limits import CLIENT_PATTERN

# More levels than any use needs; each level costs memory.
MAX_PRIORITY_LEVELS = 1024
# Triton's histogram whose buckets a configuration may choose.
FIRST_RESPONSE_HISTOGRAM = "nv_inference_first_response_histogram_ms"
# More instances than any machine has use for; each has a thread, on a GPU up to five.
MAX_INSTANCES = 256


class QueuePolicy(ConfigPart):
    """Limits on the time in the queue and on its length."""

    timeout_action: Annotated[Literal["REJECT", "DELAY"], OneOf()] = option(
        "REJECT", "After the timeout, `REJECT` refuses the request and `DELAY` puts it behind all others."
    )
    default_timeout_microseconds: Duration = option(0, "Maximum time in the queue, in microseconds; 0: no limit.")
    allow_timeout_override: Flag = option(
        False,
        "Allows a request's parameter `timeout`, in microseconds, to shorten `default_timeout_microseconds`. As in "
        "Triton, it has no effect if that is 0. Without the override the parameter is ignored.",
    )
    max_queue_size: Count = option(
        0, "Maximum requests in the queue; further ones are refused. 0: the server's own bound."
    )


class DynamicBatching(ConfigPart):
    """Merges waiting requests into batches. An empty block enables it with the defaults."""

    preferred_batch_size: tuple[PositiveCount, ...] = option(
        (), "Batch sizes in rows that run without further delay; `max_batch_size` if absent."
    )
    max_queue_delay_microseconds: Duration = option(
        0, "Maximum delay of the oldest request to form a larger batch, in microseconds."
    )
    preserve_ordering: Flag = option(False, "Sends responses in the order of the requests.")
    priority_levels: Annotated[int, Field(strict=True, ge=0, le=MAX_PRIORITY_LEVELS)] = option(
        0, "Number of priority levels; 1 is the highest. 0: no priorities."
    )
    default_priority_level: Count = option(
        0, "Level of requests without a priority or with one outside the levels; required with `priority_levels`."
    )
    default_queue_policy: QueuePolicy = option(
        QueuePolicy(), "Queue policy of every level that has none in `priority_queue_policy`."
    )
    priority_queue_policy: dict[Annotated[int, Field(ge=1)], QueuePolicy] = option(
        {}, "Queue policies by priority level."
    )

    def _problems(self) -> Iterator[Problem]:
        levels = self.priority_levels
        if levels and not 1 <= self.default_priority_level <= levels:
            message = f"default_priority_level {self.default_priority_level} is not one of the {levels} priority_levels"
            yield Problem(("default_priority_level",), message, f"write a level from 1 to {levels}")
        if not levels and self.default_priority_level:
            message = "default_priority_level is set, priority_levels is not"
            yield Problem(("default_priority_level",), message, "set priority_levels, or remove it")
        if self.preserve_ordering and levels > 1:
            message = "preserve_ordering and several priority_levels contradict each other"
            yield Problem(("preserve_ordering",), message, "keep one of them")
        for level in self.priority_queue_policy:
            if level > levels:
                loc = ("priority_queue_policy", level)
                yield Problem(loc, f"there is no priority level {level}", f"priority_levels is {levels}")


InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]


class InstanceGroup(ConfigPart):
    """Instances of the model that run in parallel."""

    name: Text = option("", "Name in the log; the model's name and a number if absent.")
    kind: Annotated[InstanceKind, OneOf("KIND_")] = option(
        "KIND_AUTO", "Device of the instances; KIND_AUTO follows the machine."
    )
    count: PositiveCount = option(1, "Number of instances (on each GPU of `gpus` for KIND_GPU).")
    gpus: tuple[Count, ...] = option((), "GPU numbers; all the machine's GPUs if absent.")

    @property
    def is_default(self) -> bool:
        """Return True if the configuration has no instance group and this is the default."""
        return not self.model_fields_set & {"kind", "count", "gpus"}

    def _problems(self) -> Iterator[Problem]:
        if self.kind == "KIND_CPU" and self.gpus:
            yield Problem(("gpus",), "gpus are named in a group of KIND_CPU", "remove gpus, or write KIND_GPU")


class LatestVersions(ConfigPart):
    """Serve the highest version numbers."""

    num_versions: PositiveCount = option(1, "Number of versions.")


class AllVersions(ConfigPart):
    """Serve every version."""


class SpecificVersions(ConfigPart):
    """Serve the listed versions."""

    versions: tuple[Version, ...] = Field(min_length=1, description="Version numbers.")


class VersionPolicy(ConfigPart):
    """Selects the served versions; exactly one of the three fields."""

    latest: LatestVersions | None = option(None, "The highest version numbers.")
    all: AllVersions | None = option(None, "Every version: `all: {}`.")
    specific: SpecificVersions | None = option(None, "The listed versions.")

    def _problems(self) -> Iterator[Problem]:
        if (self.latest, self.all, self.specific).count(None) != 2:
            yield Problem((), "one policy is needed", "write exactly one of latest, all, specific")


LATEST_VERSION = VersionPolicy(latest=LatestVersions())


class MetricIdentifier(ConfigPart):
    """Name of a metric."""

    family: Text = option("", "`nv_inference_first_response_histogram_ms`; any other has no effect.")


class HistogramOptions(ConfigPart):
    """Options of a histogram."""

    buckets: tuple[Number, ...] = option((), "Upper bounds in milliseconds, ascending and above 0.")

    def _problems(self) -> Iterator[Problem]:
        if any(low >= high for low, high in pairwise((0.0, *self.buckets))):
            yield Problem(("buckets",), "the buckets do not ascend from above 0", "write e.g. [10, 100, 1000]")


class MetricControl(ConfigPart):
    """Options of one metric."""

    metric_identifier: MetricIdentifier = option(MetricIdentifier(), "The metric.")
    histogram_options: HistogramOptions | None = option(None, "Options of a histogram.")


class ModelMetrics(ConfigPart):
    """Metrics under Triton's names."""

    metric_control: tuple[MetricControl, ...] = option((), "Options by metric.")

    @property
    def first_response_ms(self) -> tuple[float, ...]:
        """Buckets of the time to the first response in milliseconds; () for the server's own."""
        for control in self.metric_control:
            if control.histogram_options is not None and control.metric_identifier.family == FIRST_RESPONSE_HISTOGRAM:
                return control.histogram_options.buckets
        return ()


class ModelTransactionPolicy(ConfigPart):
    """Number of responses to a request."""

    decoupled: bool = option(
        False,
        "`true`: a request has any number of responses. Python models only; the steps of a pipeline decide for it.",
    )


_CLIENT = re.compile(CLIENT_PATTERN)
# The time between two requests at a lower rate exceeds the counters of nanoseconds.
_MIN_RATE_HZ = 1e-6
_MAX_RATE_HZ = 1e9
# Beyond these bounds a client's share is lost in the rounding of the others'.
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3


def _client(value: str) -> str:
    if not _CLIENT.fullmatch(value):
        cure = "write it as the client sends it: 1 to 128 visible ASCII characters"
        raise Problems([Problem((), f"{value[:80]!r} cannot be the name of a client", cure)])
    return value


ClientName = Annotated[str, Field(strict=True), AfterValidator(_client)]
Weight = Annotated[float, Field(strict=True, ge=_MIN_WEIGHT, le=_MAX_WEIGHT)]


class Slo(ConfigPart):
    """The latency objective. A late response is still delivered."""

    p99_ms: Annotated[float, Field(strict=True, gt=0, le=1e9)] | None = option(
        None, "Latency in milliseconds that 99 % of requests keep. Requests that would miss it are rejected at once."
    )


class RateLimit(ConfigPart):
    """Rate limit of one client: a token bucket."""

    requests_per_s: Annotated[float, Field(strict=True, gt=0, le=_MAX_RATE_HZ)] = Field(
        description="Sustained requests per second."
    )
    burst: PositiveCount | None = option(None, "Maximum requests in a burst; if absent, one second's requests.")

    @property
    def burst_size(self) -> int:
        """`burst`, or its default."""
        return self.burst or max(1, int(self.requests_per_s))

    def _problems(self) -> Iterator[Problem]:
        if self.requests_per_s < _MIN_RATE_HZ:
            text = f"{self.requests_per_s!r} requests per second are less than {_MIN_RATE_HZ}, one in 12 days"
            yield Problem(("requests_per_s",), text, "write a higher rate")


class RateLimits(ConfigPart):
    """Rate limits of clients. A request over the limit is refused (429, RESOURCE_EXHAUSTED), even if the queue is empty."""

    default: RateLimit | None = option(
        None, "Limit of each client that is not listed, and of all unnamed clients together; unlimited if absent."
    )
    clients: dict[ClientName, RateLimit] = option({}, "Limits by client name.")

    def _problems(self) -> Iterator[Problem]:
        if self.default is None and not self.clients:
            yield Problem((), "rate_limits has no limits", "write default, clients, or both")


class FairSharing(ConfigPart):
    """Shares of clients within each priority level, in proportion to their weights."""

    default_weight: Weight = option(
        1.0, "Weight of each client that is not listed; all unnamed clients are one client."
    )
    weights: dict[ClientName, Weight] = option({}, "Weights by client name: weight 2 gets twice the share of weight 1.")


BackendKind = Literal["onnx", "plan", "python", "pipeline"]


class Backend(ConfigPart):
    """A backend and its names.

    `kind` says how a version is read and run: an ONNX file, a TensorRT plan, Python code in processes of its own, or
    steps over other models without a file. `other_filename` is served if the configuration names no file, and a version
    has it instead of the default one.
    """

    name: str
    platform: str
    default_model_filename: str
    kind: BackendKind
    other_filename: str = ""


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name="onnxruntime", platform="onnxruntime_onnx", default_model_filename="model.onnx", kind="onnx"),
        Backend(name="tensorrt", platform="tensorrt_plan", default_model_filename="model.plan", kind="plan"),
        Backend(name="python", platform="python", default_model_filename="model.py", kind="python"),
        Backend(name="ensemble", platform="ensemble", default_model_filename="", kind="pipeline"),
        Backend(
            name="pytorch",
            platform="pytorch_libtorch",
            default_model_filename="model.pt",
            kind="python",
            other_filename="model.pt2",
        ),
        Backend(name="sklearn", platform="sklearn", default_model_filename="model.skops", kind="python"),
        Backend(name="xgboost", platform="xgboost", default_model_filename="model.json", kind="python"),
        Backend(name="lightgbm", platform="lightgbm", default_model_filename="model.txt", kind="python"),
    )
}
_PLATFORMS = {backend.platform: backend.name for backend in BACKENDS.values()}

_TO_ONNX = "export the model to ONNX, and remove backend and platform"
# Backends and platforms that are not served here: the models that they run, and the alternative. A name that is in `BACKENDS`
# too is refused until its row here is deleted.
OTHER_BACKENDS: dict[str, tuple[str, str]] = {
    "vllm": ("a language model on vLLM", "serve it with vLLM itself"),
    "tensorrtllm": ("a language model on TensorRT-LLM", "serve it with TensorRT-LLM itself"),
    "tensorflow": ("a TensorFlow model", f"python -m tf2onnx.convert: {_TO_ONNX}"),
    "tensorflow_savedmodel": ("a TensorFlow SavedModel", f"python -m tf2onnx.convert --saved-model: {_TO_ONNX}"),
    "tensorflow_graphdef": ("a TensorFlow GraphDef", f"python -m tf2onnx.convert --graphdef: {_TO_ONNX}"),
    "openvino": ("an OpenVINO model", f"convert from the framework it was trained in: {_TO_ONNX}"),
    "dali": (
        "a DALI pipeline",
        "remove it: `preprocess: {by: server}` of the model behind it resizes and normalises pictures",
    ),
    "fil": (
        "a forest of trees (FIL)",
        f"skl2onnx or onnxmltools convert XGBoost, LightGBM and scikit-learn: {_TO_ONNX}",
    ),
}

# Longer than any useful deadline: urgent requests keep their rank, and no request waits for ever.
DEFAULT_AGING_US = 10_000_000
DEFAULT_QUEUE_WAIT_US = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"[0-9]{1,19}")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def name_problem(name: str) -> Problem | None:
    """Return the problem of `name` as a model name, or None."""
    if _NAME.fullmatch(name) and ".." not in name:
        return None
    cure = "use letters, digits, '_', '-' and single '.', 128 at most, starting with a letter, a digit or '_'"
    return Problem(("name",), f"{name[:140]!r} cannot be a model's name", cure)


def is_version(text: str) -> bool:
    """Return True if `text` is a valid version number or label."""
    return _NUMBER.fullmatch(text) is not None or _LABEL.fullmatch(text) is not None


def _label(value: str) -> str:
    if not _LABEL.fullmatch(value):
        cure = "use letters, digits, '_' and '-', 64 at most, starting with a letter or '_'"
        raise Problems([Problem((), f"{value[:80]!r} cannot be the label of a version", cure)])
    return value


def _duplicates(field: str, tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> Iterator[Problem]:
    names = [tensor.name for tensor in tensors]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem((field, index, "name"), f'{field} "{name}" is listed twice', "remove one of them")


def served_backends() -> tuple[str, ...]:
    """Return the names of the backends that are served."""
    return tuple(name for name in BACKENDS if name not in OTHER_BACKENDS)


def _not_here(field: str, name: str) -> Problem:
    """Return the problem of a backend or platform that only Triton has."""
    feature, cure = OTHER_BACKENDS.get(name, ("", f"{_TO_ONNX}; served here: {', '.join(served_backends())}"))
    reason = f": it is {feature}" if feature else ""
    return Problem((field,), f'{field} "{name[:80]}" is not served here{reason}', cure)


class ModelConfig(ConfigPart):
    """One model's configuration. Field names are Triton's; the last ones, after `metric_tags`, are Headrace's own."""

    name: Text = option("", "The model's name. Must be the folder's name, which is the default.")
    platform: Text = option("", "`onnxruntime_onnx` or `tensorrt_plan`; follows from `backend` if absent.")
    backend: Text = option("", "`onnxruntime` or `tensorrt`; follows from `platform` or the model's file if absent.")
    version_policy: VersionPolicy = option(LATEST_VERSION, "Selects the served versions among those on disk.")
    max_batch_size: Count = option(
        0,
        "Maximum rows of a batch. 0: the model has no batch dimension. If absent, 4 with `dynamic_batching` on where "
        "first dimensions share a name and rows are independent, else 0.",
    )
    input: tuple[ModelInput, ...] = option((), "The inputs; read from the model if absent.")
    output: tuple[ModelOutput, ...] = option((), "The outputs offered to clients; all outputs of the model if absent.")
    optimization: Optimization = option(Optimization(), "Options that optimise the model's execution.")
    batch_input: tuple[BatchInput, ...] = option((), "Inputs that the server computes from the requests of a batch.")
    batch_output: tuple[BatchOutput, ...] = option((), "Outputs that are split by the shapes of an input.")
    dynamic_batching: DynamicBatching | None = option(
        None, "Merges waiting requests into batches; `{}` enables it with the defaults."
    )
    sequence_batching: SequenceBatching | None = option(
        None, "Requests belong to sequences, whose state the model or its code keeps; see docs/sequences.md."
    )
    ensemble_scheduling: EnsembleScheduling | None = option(
        None, "Steps of an ensemble (`platform: ensemble`), which calls other models."
    )
    instance_group: tuple[InstanceGroup, ...] = option(
        (),
        "Instances of the model. If absent, one; with `backend: tensorrt`, batches and no isolation, two on each GPU.",
    )
    default_model_filename: Text = option("", "The model's file in a version's folder; `model.onnx` if absent.")
    parameters: dict[str, ParameterText] = option(
        {},
        "Options of the backend. ONNX Runtime: `intra_op_thread_count`, `inter_op_thread_count`, `execution_mode`, "
        "`enable_mem_arena`, `enable_mem_pattern`, `optimization_level`. TensorRT: `cuda_graphs` (1 or 0), "
        "`pipeline_depth` (batches in flight in an instance, 2 to 8), `one_graph_rows` (batches up to this many rows "
        "are one CUDA graph; `auto`: measured), `wait` (for a batch: `sleep`, `spin`, or `auto`: spin for batches that "
        "are one graph). ONNX Runtime's CUDA provider: those of ONNX Runtime, `pipeline_depth`, `gpu_mem_limit` (bytes), "
        "`arena_extend_strategy`, `cudnn_conv_algo_search`, `cudnn_conv_use_max_workspace`, `use_tf32`.",
    )
    model_warmup: tuple[ModelWarmup, ...] = option((), "Requests that run before the model is ready.")
    response_cache: ResponseCache | None = option(None, "Caches the model's responses.")
    model_transaction_policy: ModelTransactionPolicy | None = option(None, "Number of responses to a request.")
    model_metrics: ModelMetrics | None = option(None, "Buckets of Triton's histograms.")
    metric_tags: dict[str, ParameterText] = option({}, "Labels for the model's metrics.")
    oversize: Annotated[Literal["split", "reject"], OneOf()] = option(
        "split",
        "`split`: a request with more than `max_batch_size` rows is split and its outputs are joined. `reject`: it is "
        "refused, as in Triton. If absent, `reject` where the ONNX graph is not proven to keep rows independent.",
    )
    preprocess: Preprocess | None = option(None, "Converts an image to the input tensor.")
    postprocess: Postprocess | None = option(None, "Replaces an output of class scores.")
    labels: dict[Annotated[str, Field(strict=True), AfterValidator(_label)], Version] = option(
        {}, "Names for versions, e.g. `stable: 3`."
    )
    slo: Slo = option(Slo(), "The latency objective.")
    rate_limits: RateLimits | None = option(None, "Rate limit of each client; unlimited if absent.")
    fair_sharing: FairSharing | None = option(
        None,
        "Shares the model fairly between clients; `{}` enables it. If absent, all requests share one order, except those of a "
        "decoupled model, which always shares fairly.",
    )
    priority_aging_microseconds: Duration = option(
        DEFAULT_AGING_US,
        "With `priority_levels`: a request moves up one level each time it has waited this long, in microseconds, "
        "which prevents starvation. 0: no ageing, higher levels always run first.",
    )
    max_queue_wait_microseconds: Duration | None = option(
        None,
        "Longest predicted time in the queue of a request without a deadline and an objective, in microseconds; further "
        "ones are refused. 0: no limit. If absent: 1000000, or 0 if every queue policy has `max_queue_size` or "
        "`default_timeout_microseconds`. Two batches of each instance may always wait.",
    )
    fallback: Annotated[Literal["onnxruntime"], OneOf()] | None = option(
        None, "The backend that runs the model where its own backend cannot."
    )
    # Triton's message has a string field of this name, for a backend's library; it is ignored if empty.
    runtime: Annotated[
        Literal["auto", "onnxruntime", "tensorrt"],
        OneOf(),
        BeforeValidator(lambda value: value or "auto"),
    ] = option(
        "auto",
        "The runtime. `auto`: the best runtime of this machine (docs/gpu.md has the table); `onnxruntime`: the CPU; "
        "`tensorrt`: a GPU.",
    )
    build_on_load: Flag | None = option(
        None,
        "Builds the engine of `optimization` if this machine has none, in a separate process while the ONNX file "
        "serves, then swaps. If absent: yes with a GPU and TensorRT if the configuration names a precision, the "
        "TensorRT backend or KIND_GPU; never on a CPU.",
    )
    cpu_max_batch_size: PositiveCount | None = option(
        None,
        "Maximum rows of a batch on a CPU, if fewer than `max_batch_size`: large batches for a GPU only add latency on "
        "a CPU. Larger requests are split.",
    )
    gpu_memory_budget: SizeBytes | None = option(
        None,
        'Maximum memory of a version on each GPU, in bytes or as text, e.g. "2GiB". If absent, the memory '
        "that `--gpu-memory-fraction` and the other models leave.",
    )
    keep_loaded: Flag = option(
        False,
        "The model is never evicted from memory to make room for another. On a CPU with `--host-memory-budget`, it is "
        "loaded at start.",
    )
    unload_after_s: Annotated[float, Field(strict=True, ge=1, le=31_536_000)] | None = option(
        None,
        "Seconds without a request after which the model is evicted from memory; the next request loads it again "
        "(docs/many-models.md). If absent, it stays. Not with `keep_loaded`.",
    )
    isolation: Annotated[Literal["none", "process"], OneOf()] = option(
        "none",
        "`process`: the model runs in a child process, so a crash or a hang affects only this model. Costs about 0.1 "
        "ms and a copy for each batch.",
    )
    isolation_timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] = option(
        60.0,
        "With `isolation: process`: seconds after which a batch counts as hung and its process is killed and "
        "restarted.",
    )
    isolation_memory_limit: SizeBytes | None = option(
        None,
        "With `isolation: process`: maximum memory of the model's process without shared memory, in bytes or as text, "
        'e.g. "4GiB". A batch that needs more fails alone. If absent, the memory of the machine.',
    )

    execution_timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] | None = option(
        None,
        "Of a Python model: seconds after which a batch counts as hung and its process is killed and restarted. If "
        "absent, `isolation_timeout_s`.",
    )
    max_open_requests: Annotated[int, Field(strict=True, ge=1, le=65536)] = option(
        256,
        "Of a Python model: requests of an instance that `execute` has returned without their last response. With as many "
        "the instance takes no further batch, and one of them may give way to a queued request.",
    )
    pipeline: PipelineConfig | None = option(None, "Steps over other models and built-in steps.")
    proof: Annotated[
        Literal["off", "warn", "enforce"],
        OneOf(),
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads off as False
    ] = option(
        "enforce",
        "Tests at the first load on this machine, and while the server is idle, whether batches change answers "
        "(docs/proof.md). `enforce`: batches that do are not run. `warn`: they run, with a warning. `off`: no test.",
    )
    proof_sample: Annotated[int, Field(strict=True, ge=0)] = option(
        100_000,
        "One row in so many of the batches is run again alone while the server is idle; a batch size that gave it other outputs "
        "is not run any more (docs/proof.md). 0: none. Not with `proof: off`.",
    )
    pad: Padding | None = option(None, "Pads inputs, so that requests of different length share a batch.")
    cache: CacheLimits | None = option(None, "Limits of the model in the response cache.")
    traffic: Traffic | None = option(
        None,
        "Shares of versions and other models in requests that name no version, and shadow requests; see docs/traffic.md. The "
        "versions that it names are served beside those of `version_policy`, whose `latest` counts the others.",
    )

    @property
    def kind(self) -> BackendKind:
        """Kind of the backend; "onnx" before completion."""
        if self.is_pipeline:
            return "pipeline"
        return BACKENDS[self.backend].kind if self.backend in BACKENDS else "onnx"

    @property
    def is_decoupled(self) -> bool:
        """True if a request has any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled

    @property
    def is_iterative(self) -> bool:
        """True if each request is a sequence, and the model may schedule it again."""
        return self.sequence_batching is not None and self.sequence_batching.iterative_sequence

    @property
    def is_pipeline(self) -> bool:
        """True if the model consists of steps over other models."""
        has_steps = self.ensemble_scheduling is not None or self.pipeline is not None
        return has_steps or self.platform == "ensemble"

    @property
    def served_input(self) -> tuple[ModelInput, ...]:
        """The inputs as clients send them; `input` has those of the model."""
        return served_inputs(self.preprocess, self.input)

    @property
    def model_input(self) -> tuple[ModelInput, ...]:
        """The inputs as the model has them: `input`, and those that the server fills for sequences."""
        return (*self.input, *control_inputs(self.sequence_batching), *state_tensors(self.sequence_batching)[0])

    @property
    def model_output(self) -> tuple[ModelOutput, ...]:
        """The outputs as the model has them: `output`, and the states of sequences that are not listed there."""
        names = {tensor.name for tensor in self.output}
        states = state_tensors(self.sequence_batching)[1]
        return (*self.output, *(tensor for tensor in states if tensor.name not in names))

    @property
    def served_output(self) -> tuple[ModelOutput, ...]:
        """The outputs as clients receive them; `output` has those of the model."""
        return served_outputs(self.postprocess, self.output)

    def _problems(self) -> Iterator[Problem]:
        yield from self._identity_problems()
        instances = sum(group.count * max(len(group.gpus), 1) for group in self.instance_group)
        if instances > MAX_INSTANCES:
            message = f"instance_group has {instances} instances, at most {MAX_INSTANCES} are allowed"
            yield Problem(
                ("instance_group",), message, "lower count: more instances than processors make no model faster"
            )
        if self.keep_loaded and self.unload_after_s is not None:
            yield Problem(("unload_after_s",), "unload_after_s does not go with keep_loaded", "remove one of them")
        yield from _duplicates("input", self.input)
        yield from _duplicates("output", self.output)
        batch = self.max_batch_size if "max_batch_size" in self.model_fields_set else None
        # No check is possible before max_batch_size is completed from the model.
        if self.dynamic_batching is not None and batch is not None:
            for index, size in enumerate(self.dynamic_batching.preferred_batch_size):
                if size > batch:
                    message = f"preferred_batch_size {size} is more than max_batch_size {batch}"
                    loc = ("dynamic_batching", "preferred_batch_size", index)
                    yield Problem(loc, message, "raise max_batch_size, or remove the size")
        yield from preprocess_problems(self.preprocess, self.input, batch)
        yield from postprocess_problems(self.postprocess, self.output, batch)
        yield from batching_problems(self.input, self.output, self.batch_input, self.batch_output, batch)
        yield from padding_problems(self.pad, self.input, batch)
        yield from self._batching_problems()
        others = {
            "dynamic_batching": self.dynamic_batching is not None,
            "ensemble_scheduling": self.is_pipeline,
            "response_cache": self.response_cache is not None and self.response_cache.enable,
            "preprocess": self.preprocess is not None,
            "postprocess": self.postprocess is not None,
            "pad": self.pad is not None,
            "batch_input": bool(self.batch_input),
            "batch_output": bool(self.batch_output),
            "allow_ragged_batch": any(tensor.allow_ragged_batch for tensor in self.input),
            "fair_sharing": self.fair_sharing is not None,
        }
        yield from sequence_problems(self.sequence_batching, self.input, others, batch)
        yield from traffic_problems(self.traffic, self.name, self.sequence_batching is not None, self.is_decoupled)
        yield from self._input_name_problems()

    def _batching_problems(self) -> Iterator[Problem]:
        """Return the problems of ragged batches and padding with other options of the configuration."""
        ragged = any(tensor.allow_ragged_batch for tensor in self.input)
        fields = {"allow_ragged_batch": ragged, "batch_input": self.batch_input, "batch_output": self.batch_output}
        features = [*(name for name, value in fields.items() if value), *(("pad",) if self.pad is not None else ())]
        for feature in features:
            loc = ("input",) if feature == "allow_ragged_batch" else (feature,)
            if self.kind in ("python", "pipeline") and feature != "allow_ragged_batch":
                cure = "remove it; the code receives each request in its own shape"
                yield Problem(loc, f"{feature} is for ONNX and TensorRT models", cure)
            if self.preprocess is not None and self.preprocess.by == "server":
                yield Problem(loc, f"{feature} does not go with preprocess.by: server", "remove one of them")

    def _identity_problems(self) -> Iterator[Problem]:
        if self.name and (problem := name_problem(self.name)):
            yield problem
        if self.platform and (self.platform not in _PLATFORMS or self.platform in OTHER_BACKENDS):
            yield _not_here("platform", self.platform)
        elif self.backend and self.backend not in served_backends():
            yield _not_here("backend", self.backend)
        elif self.backend and self.platform and _PLATFORMS[self.platform] != self.backend:
            message = f'platform "{self.platform}" does not go with backend "{self.backend}"'
            yield Problem(("platform",), message, f'write "{BACKENDS[self.backend].platform}", or remove platform')

    def _input_name_problems(self) -> Iterator[Problem]:
        names = [tensor.name for tensor in self.input]
        picture = None if self.preprocess is None else self.preprocess.input
        if picture == "" and len(names) > 1:
            message = "preprocess.input is missing, and the model has several inputs"
            yield Problem(("preprocess",), message, f"write input: one of {', '.join(names)}")
        elif picture and names and picture not in names:
            message = f'preprocess.input "{picture}" is not an input of the model'
            yield Problem(("preprocess", "input"), message, f"write one of {', '.join(names)}")
        for index, warmup in enumerate(self.model_warmup):
            for name in warmup.inputs:
                if names and name not in names:
                    loc = ("model_warmup", index, "inputs", name)
                    yield Problem(loc, f'warm-up names "{name}", which is not an input')


_FIELDS = tuple(ModelConfig.model_fields)
# Fields that Triton's message does not have.
HEADRACE_FIELDS: tuple[str, ...] = _FIELDS[_FIELDS.index("metric_tags") + 1 :]
# Every field that is Headrace's: top-level fields, and those inside Triton's `optimization`.
HEADRACE_FIELD_PATHS: tuple[Location, ...] = (
    *((name,) for name in HEADRACE_FIELDS),
    *(("optimization", name) for name in HEADRACE_OPTIMIZATION_FIELDS),
)


def is_headrace_field(loc: Location) -> bool:
    """Return True for a field that Triton's message does not have, or a place inside one."""
    return any(loc[: len(path)] == path for path in HEADRACE_FIELD_PATHS)
