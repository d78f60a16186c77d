"""A model's configuration: one schema for `config.pbtxt` and `config.yaml`.

The field names are those of Triton's published `ModelConfig` message. What that message has no field for is ours
(`OWN_FIELDS`): a plain field in `config.yaml`, and in `config.pbtxt` an entry of `parameters` whose key is the field's
dotted name behind "headrace.". The object is frozen and checked at birth; a problem is raised as pydantic's
`ValidationError` that carries `Problems`.

What a file left out, `model_fields_set` tells: the reader in `control` completes it from the model itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.core.config_base import (
    ConfigPart,
    Count,
    Duration,
    Flag,
    Location,
    ParameterText,
    PositiveCount,
    Problem,
    Problems,
    SizeBytes,
    Text,
    Version,
    one_of,
)
from headrace.core.optimization_config import (
    HEADRACE_OPTIMIZATION_FIELDS,
    Accelerator,
    ExecutionAccelerators,
    Optimization,
)
from headrace.core.picture_config import postprocess_problems, preprocess_problems, served_inputs, served_outputs
from headrace.core.promise_config import FairSharing, RateLimit, RateLimits, Slo
from headrace.core.scheduling_config import (
    LATEST_VERSION,
    AllVersions,
    DynamicBatching,
    InstanceGroup,
    LatestVersions,
    QueuePolicy,
    SpecificVersions,
    VersionPolicy,
)
from headrace.core.tensor_config import (
    ModelInput,
    ModelOutput,
    ModelWarmup,
    Postprocess,
    Preprocess,
    Reshape,
    WarmupInput,
)

__all__ = [
    "BACKENDS",
    "HEADRACE_FIELDS",
    "LATEST_VERSION",
    "OWN_FIELDS",
    "Accelerator",
    "AllVersions",
    "Backend",
    "DynamicBatching",
    "ExecutionAccelerators",
    "FairSharing",
    "InstanceGroup",
    "LatestVersions",
    "Location",
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "ModelWarmup",
    "Optimization",
    "Postprocess",
    "Preprocess",
    "Problem",
    "Problems",
    "QueuePolicy",
    "RateLimit",
    "RateLimits",
    "Reshape",
    "Slo",
    "SpecificVersions",
    "VersionPolicy",
    "WarmupInput",
    "is_own",
    "name_problem",
]


class Backend(ConfigPart):
    """What runs a model, and the names that go with it."""

    name: str
    platform: str
    default_model_filename: str


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name="onnxruntime", platform="onnxruntime_onnx", default_model_filename="model.onnx"),
        Backend(name="tensorrt", platform="tensorrt_plan", default_model_filename="model.plan"),
    )
}
_PLATFORMS = {backend.platform: backend.name for backend in BACKENDS.values()}

_TO_ONNX = "export the model to ONNX, and remove backend and platform"
# Backends and platforms of Triton that are not here: what they run, and what to do instead.
OTHER_BACKENDS: dict[str, tuple[str, str]] = {
    "ensemble": ("an ensemble of models", "ensembles come with a later release; call the models one after the other"),
    "python": (
        "Python code (model.py)",
        "export the model to ONNX; pictures are prepared by `preprocess`, anything else by the client",
    ),
    "vllm": ("a language model on vLLM", "serve it with vLLM itself"),
    "tensorrtllm": ("a language model on TensorRT-LLM", "serve it with TensorRT-LLM itself"),
    "pytorch": ("a TorchScript model", f"torch.onnx.export: {_TO_ONNX}"),
    "pytorch_libtorch": ("a TorchScript model", f"torch.onnx.export: {_TO_ONNX}"),
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

# Longer than anybody waits for an answer in earnest: what is urgent keeps its rank, and nothing waits for ever.
DEFAULT_AGING_US = 10_000_000

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def name_problem(name: str) -> Problem | None:
    """What is wrong with `name` as the name of a model, or None."""
    if _NAME.fullmatch(name) and ".." not in name:
        return None
    cure = "use letters, digits, '_', '-' and single '.', 128 at most, starting with a letter, a digit or '_'"
    return Problem(("name",), f"{name[:140]!r} cannot be a model's name", cure)


def is_version(text: str) -> bool:
    """True if `text` can be the number or the label of a version."""
    return _NUMBER.fullmatch(text) is not None or _LABEL.fullmatch(text) is not None


def _label(value: str) -> str:
    if not _LABEL.fullmatch(value):
        cure = "use letters, digits, '_' and '-', 64 at most, starting with a letter or '_'"
        raise Problems([Problem((), f"{value[:80]!r} cannot be the label of a version", cure)])
    return value


def _duplicates(field: str, tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> list[Problem]:
    names = [tensor.name for tensor in tensors]
    return [
        Problem((field, index, "name"), f'{field} "{name}" is listed twice', "remove one of them")
        for index, name in enumerate(names)
        if name in names[:index]
    ]


def _not_here(field: str, name: str) -> Problem:
    """The refusal of a backend or platform that only Triton has, in plain words."""
    feature, cure = OTHER_BACKENDS.get(name, ("", f"{_TO_ONNX}; served here: {', '.join(BACKENDS)}"))
    what = f": it is {feature}" if feature else ""
    return Problem((field,), f'{field} "{name[:80]}" is not served here{what}', cure)


class ModelConfig(ConfigPart):
    """One model's configuration. Field names are Triton's; the last ones, after `metric_tags`, are Headrace's own."""

    name: Text = Field(default="", description="The model's name. Must be the folder's name, which is the default.")
    platform: Text = Field(
        default="", description="`onnxruntime_onnx` or `tensorrt_plan`; follows from `backend` if absent."
    )
    backend: Text = Field(
        default="", description="`onnxruntime` or `tensorrt`; follows from `platform` or the model's file if absent."
    )
    version_policy: VersionPolicy = Field(
        default=LATEST_VERSION, description="Selects the served versions among those on disk."
    )
    max_batch_size: Count = Field(
        default=0,
        description="Maximum rows of a batch. 0: the model has no batch dimension. If absent, 4 with `dynamic_batching`"
        " on where first dimensions share a name and rows are independent, else 0.",
    )
    input: tuple[ModelInput, ...] = Field(default=(), description="The inputs; read from the model if absent.")
    output: tuple[ModelOutput, ...] = Field(
        default=(), description="The outputs offered to clients; all outputs of the model if absent."
    )
    optimization: Optimization = Field(
        default=Optimization(), description="Options that optimise the model's execution."
    )
    dynamic_batching: DynamicBatching | None = Field(
        default=None, description="Merges waiting requests into batches; `{}` enables it with the defaults."
    )
    instance_group: tuple[InstanceGroup, ...] = Field(
        default=(),
        description="Instances of the model. If absent, one; with `backend: tensorrt`, batches and no isolation, two on"
        " each GPU.",
    )
    default_model_filename: Text = Field(
        default="", description="The model's file in a version's folder; `model.onnx` if absent."
    )
    parameters: dict[str, ParameterText] = Field(
        default={},
        description="Options of the backend. ONNX Runtime: `intra_op_thread_count`, `inter_op_thread_count`, "
        "`execution_mode`, `enable_mem_arena`, `enable_mem_pattern`, `optimization_level`. TensorRT: "
        "`cuda_graphs` (1 or 0), `pipeline_depth` (batches in flight in an instance, 2 to 8), "
        "`one_graph_rows` (batches up to this many rows are one CUDA graph; `auto`: measured), `wait` (for "
        "a batch: `sleep`, `spin`, or `auto`: spin for batches that are one graph).",
    )
    model_warmup: tuple[ModelWarmup, ...] = Field(
        default=(), description="Requests that run before the model is ready."
    )
    metric_tags: dict[str, ParameterText] = Field(default={}, description="Labels for the model's metrics.")
    oversize: Annotated[Literal["split", "reject"], *one_of(("split", "reject"))] = Field(
        default="split",
        description="`split`: a request with more than `max_batch_size` rows is split and its outputs are joined. "
        "`reject`: it is refused, as in Triton. If absent, `reject` where the ONNX graph is not proven to "
        "keep rows independent.",
    )
    preprocess: Preprocess | None = Field(default=None, description="Converts an image to the input tensor.")
    postprocess: Postprocess | None = Field(default=None, description="Replaces an output of class scores.")
    labels: dict[Annotated[str, Field(strict=True), AfterValidator(_label)], Version] = Field(
        default={}, description="Names for versions, e.g. `stable: 3`."
    )
    slo: Slo = Field(default=Slo(), description="The latency objective.")
    rate_limits: RateLimits | None = Field(default=None, description="Rate limit of each client; unlimited if absent.")
    fair_sharing: FairSharing | None = Field(
        default=None,
        description="Shares the model fairly between clients; `{}` enables it. If absent, all requests share one order.",
    )
    priority_aging_microseconds: Duration = Field(
        default=DEFAULT_AGING_US,
        description="With `priority_levels`: a request moves up one level each time it has waited this long, in "
        "microseconds, which prevents starvation. 0: no ageing, higher levels always run first.",
    )
    fallback: Annotated[Literal["onnxruntime"], *one_of(("onnxruntime",))] | None = Field(
        default=None, description="The backend that runs the model where its own backend cannot."
    )
    # Triton's message has a text of this name, for a backend's library; empty there, it says nothing here.
    runtime: Annotated[
        Literal["auto", "onnxruntime", "tensorrt"],
        *one_of(("auto", "onnxruntime", "tensorrt")),
        BeforeValidator(lambda value: value or "auto"),
    ] = Field(
        default="auto",
        description="The runtime. `auto`: the best runtime of this machine (docs/gpu.md has the table); `onnxruntime`: "
        "the CPU; `tensorrt`: a GPU.",
    )
    build_on_load: Flag | None = Field(
        default=None,
        description="Builds the engine of `optimization` if this machine has none, in a separate process while the ONNX"
        " file serves, then swaps. If absent: yes with a GPU and TensorRT if the configuration names a "
        "precision, the TensorRT backend or KIND_GPU; never on a CPU.",
    )
    cpu_max_batch_size: PositiveCount | None = Field(
        default=None,
        description="Maximum rows of a batch on a CPU, if fewer than `max_batch_size`: large batches for a GPU only add"
        " latency on a CPU. Larger requests are split.",
    )
    gpu_memory_budget: SizeBytes | None = Field(
        default=None,
        description='Maximum memory of a version on each GPU, in bytes or as text, e.g. "2GiB". If absent, the memory '
        "that `--gpu-memory-fraction` and the other models leave.",
    )
    keep_loaded: Flag = Field(
        default=False,
        description="The model is never evicted from GPU memory to make room for another.",
    )
    isolation: Annotated[Literal["none", "process"], *one_of(("none", "process"))] = Field(
        default="none",
        description="`process`: the model runs in a child process, so a crash or a hang affects only this model. Costs "
        "about 0.1 ms and a copy for each batch.",
    )
    isolation_timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] = Field(
        default=60.0,
        description="With `isolation: process`: seconds after which a batch counts as hung and its process is killed "
        "and restarted.",
    )

    @property
    def served_input(self) -> tuple[ModelInput, ...]:
        """The inputs as callers see them; `input` has them as the model does."""
        return served_inputs(self.preprocess, self.input)

    @property
    def served_output(self) -> tuple[ModelOutput, ...]:
        """The outputs as callers see them; `output` has them as the model does."""
        return served_outputs(self.postprocess, self.output)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        problems = [
            *self._identity_problems(),
            *_duplicates("input", self.input),
            *_duplicates("output", self.output),
            *self._batch_problems(),
            *self._tensor_problems(),
        ]
        if problems:
            raise Problems(problems)
        return self

    def _identity_problems(self) -> list[Problem]:
        problem = name_problem(self.name) if self.name else None
        problems = [] if problem is None else [problem]
        if self.platform and self.platform not in _PLATFORMS:
            problems.append(_not_here("platform", self.platform))
        elif self.backend and self.backend not in BACKENDS:
            problems.append(_not_here("backend", self.backend))
        elif self.backend and self.platform and _PLATFORMS[self.platform] != self.backend:
            message = f'platform "{self.platform}" does not go with backend "{self.backend}"'
            problems.append(
                Problem(("platform",), message, f'write "{BACKENDS[self.backend].platform}", or remove platform')
            )
        return problems

    def _batch_problems(self) -> list[Problem]:
        # While max_batch_size is still to be completed from the model, nothing can be compared with it.
        if self.dynamic_batching is None or "max_batch_size" not in self.model_fields_set:
            return []
        return [
            Problem(
                ("dynamic_batching", "preferred_batch_size", index),
                f"preferred_batch_size {size} is more than max_batch_size {self.max_batch_size}",
                "raise max_batch_size, or remove the size",
            )
            for index, size in enumerate(self.dynamic_batching.preferred_batch_size)
            if size > self.max_batch_size
        ]

    def _tensor_problems(self) -> list[Problem]:
        names = [tensor.name for tensor in self.input]
        batch = self.max_batch_size if "max_batch_size" in self.model_fields_set else None
        problems = [
            *preprocess_problems(self.preprocess, self.input, batch),
            *postprocess_problems(self.postprocess, self.output, batch),
        ]
        picture = None if self.preprocess is None else self.preprocess.input
        if picture == "" and len(names) > 1:
            message = "preprocess does not tell which of the inputs takes the picture"
            problems.append(Problem(("preprocess",), message, f"write input: one of {', '.join(names)}"))
        elif picture and names and picture not in names:
            message = f'preprocess.input "{picture}" is not an input of the model'
            problems.append(Problem(("preprocess", "input"), message, f"write one of {', '.join(names)}"))
        for index, warmup in enumerate(self.model_warmup):
            problems += [
                Problem(("model_warmup", index, "inputs", name), f'warm-up names "{name}", which is not an input', "")
                for name in warmup.inputs
                if names and name not in names
            ]
        return problems


HEADRACE_FIELDS: tuple[str, ...] = (
    "oversize",
    "preprocess",
    "postprocess",
    "labels",
    "slo",
    "rate_limits",
    "fair_sharing",
    "priority_aging_microseconds",
    "fallback",
    "runtime",
    "build_on_load",
    "cpu_max_batch_size",
    "gpu_memory_budget",
    "keep_loaded",
    "isolation",
    "isolation_timeout_s",
)
# Every place that is ours: whole fields, and those inside of Triton's `optimization`.
OWN_FIELDS: tuple[Location, ...] = (
    *((name,) for name in HEADRACE_FIELDS),
    *(("optimization", name) for name in HEADRACE_OPTIMIZATION_FIELDS),
)


def is_own(loc: Location) -> bool:
    """True for a place that Triton's message does not have, and for all that is inside of one."""
    return any(loc[: len(own)] == own for own in OWN_FIELDS)
