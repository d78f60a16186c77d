"""Which fields of Triton's schema this server does not have, and which it has without an effect yet. One table, told to users.

A pattern is a dotted path; `*` stands for any index or key. `screen` takes what is refused or ignored out of a document, so
that the schema sees only what it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.config.document import Document, did_you_mean
from headrace.core.errors import Finding
from headrace.core.model_config import Location, Problem
from headrace.core.optimization_config import TENSORRT_ACCELERATORS

_TENSORRT_ONLY = "it is a matter of TensorRT engines; remove it"

# Serving with these would give other answers than the author of the configuration expects. Pattern -> cure.
REFUSED: dict[str, str] = {
    "sequence_batching": "keep the state in the client, as inputs and outputs; sequences come with a later release",
    "ensemble_scheduling": "ensembles come with a later release; call the models one after the other",
    "batch_input": "remove it; pass the counts as inputs of the request",
    "batch_output": "remove it; inputs of different shapes are not merged here",
    "input.*.is_shape_tensor": _TENSORRT_ONLY,
    "output.*.is_shape_tensor": _TENSORRT_ONLY,
    "input.*.is_non_linear_format_io": _TENSORRT_ONLY,
    "output.*.is_non_linear_format_io": _TENSORRT_ONLY,
    "input.*.allow_ragged_batch": "remove it; requests of different shapes are batched apart",
    "instance_group.*.rate_limiter": "remove it; an instance takes work when it is idle",
    "instance_group.*.secondary_devices": "remove it; DLA cores are not used",
    "instance_group.*.profile": "remove it; profiles of TensorRT engines come with a later release",
    "instance_group.*.passive": "remove it; every instance serves",
    "instance_group.*.host_policy": "remove it; start the server under numactl or taskset instead",
    "cc_model_filenames": "remove it; one file serves every GPU, named by default_model_filename",
    "model_operations.op_library_filename": "custom operators are not loaded; export the model with standard ones",
    "model_transaction_policy.decoupled": "remove it if a request has one answer; else it comes with a later release",
    "model_repository_agents": "remove it; prepare the files before the server sees them",
    "response_cache.enable": "the response cache comes with a later release; remove it",
}
# What those of them ask for, in plain words.
FEATURES: dict[str, str] = {
    "sequence_batching": "sequences of requests with a state on the server",
    "ensemble_scheduling": "an ensemble of models",
    "batch_input": "inputs that the server computes from the batch",
    "batch_output": "outputs that the server cuts by the inputs",
    "input.*.allow_ragged_batch": "ragged batches of requests of different shapes",
    "instance_group.*.rate_limiter": "a rate limiter for instances",
    "model_operations.op_library_filename": "custom operators",
    "model_transaction_policy.decoupled": "a decoupled model, which gives any number of answers to a request",
    "model_repository_agents": "agents that change the model's files",
    "response_cache.enable": "a cache of responses",
}

# Nothing is wrong without these: accepted, not kept, said once. Pattern -> what happens instead.
IGNORED: dict[str, str] = {
    "model_metrics": "histograms have the server's own buckets",
    "optimization.cuda.graph_spec": "every batch size is run alike",
}

# Kept in the configuration and shown with it, but nothing acts on them yet. Pattern -> what happens instead.
WITHOUT_EFFECT: dict[str, str] = {
    "metric_tags": "metrics carry the model's name and version",
    "optimization.graph": "ONNX Runtime does all its graph optimisations",
    "optimization.priority": "all models are equal",
    "optimization.cuda": "engines of TensorRT use CUDA graphs anyway, which the parameter `cuda_graphs` turns off",
    "optimization.execution_accelerators.gpu_execution_accelerator.*": "the model runs without this accelerator",
    "optimization.execution_accelerators.gpu_execution_accelerator.*.parameters.*": "`headrace build` does not know it",
    "optimization.execution_accelerators.cpu_execution_accelerator": "the model runs without an accelerator",
    "optimization.eager_batching": "a batch is assembled when an instance is free",
}
# ... except for what `headrace build` reads of them: Triton's own way to ask for a TensorRT engine.
TENSORRT_PARAMETERS = ("precision_mode", "max_workspace_size_bytes")

# `parameters` that a backend here reads. Which backend runs a model is decided when it is loaded, so all of them are allowed.
BACKEND_PARAMETERS: tuple[str, ...] = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    "optimization_level",
    "cuda_graphs",
    "pipeline_depth",
    "one_graph_rows",
    "wait",
)

# `parameters` of Triton's ONNX Runtime backend without an effect here. Name -> what happens instead.
PARAMETERS_WITHOUT_EFFECT: dict[str, str] = {
    "arena_extend_strategy": "ONNX Runtime runs on the CPU here",
    "cudnn_conv_algo_search": "TensorRT chooses the kernels on a GPU",
    "cudnn_conv_use_max_workspace": "TensorRT chooses the kernels on a GPU",
    "do_copy_in_default_stream": "ONNX Runtime runs on the CPU here",
    "gpu_mem_limit": "the field `gpu_memory_budget` limits the memory of a GPU",
    "memory.enable_memory_arena_shrinkage": "the arena keeps its memory",
    "session.use_device_allocator_for_initializers": "ONNX Runtime runs on the CPU here",
    "share_session_between_instances": "instances of one thread share a session anyway",
}

# What these say is what happens anyway.
_DEFAULTS: tuple[object, ...] = (None, False, 0, "", [], {})
# ... but an empty one of these still turns it on.
_ON_WHEN_EMPTY = ("sequence_batching", "ensemble_scheduling")
# Blocks of which every field is refused: an empty one is left out, as it says nothing.
_ONLY_REFUSED = ("model_operations", "model_transaction_policy", "response_cache")
_DEFAULT_WORDS = ("default", "auto", "cpu", "model")


def _says_nothing(value: object) -> bool:
    if isinstance(value, str):
        return value == "" or value.rpartition("_")[2].lower() in _DEFAULT_WORDS
    return value in _DEFAULTS


def _places(data: object, pattern: tuple[str, ...], loc: Location = ()) -> Iterator[Location]:
    """Every place in `data` that `pattern` leads to."""
    if not pattern:
        yield loc
    elif pattern[0] == "*":
        items = enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ()
        for key, item in items:
            yield from _places(item, pattern[1:], (*loc, key))
    elif isinstance(data, dict) and pattern[0] in data:
        yield from _places(data[pattern[0]], pattern[1:], (*loc, pattern[0]))


def _parent(data: dict[str, object], loc: Location) -> Any:
    parent: Any = data
    for part in loc[:-1]:
        parent = parent[part]
    return parent


def _take_out(data: dict[str, object], loc: Location) -> object:
    """Removes the value at `loc`, and the block around it if that is then empty and not part of our schema."""
    parent = _parent(data, loc)
    value: object = parent.pop(loc[-1])
    if len(loc) == 2 and loc[0] in _ONLY_REFUSED and not parent:
        data.pop(str(loc[0]))
    return value


def screen(document: Document) -> list[Finding]:
    """Refuses, takes out and remarks on what this server does not do. Changes `document.data`.

    Returns:
        A fatal finding for each field refused, a warning for each that has no effect.
    """
    findings = []
    for name in _ONLY_REFUSED:
        if document.data.get(name) == {}:
            del document.data[name]
    for pattern, cure in REFUSED.items():
        for loc in list(_places(document.data, tuple(pattern.split(".")))):
            feature = f": it asks for {FEATURES[pattern]}" if pattern in FEATURES else ""
            problem = Problem(loc, f'"{_dotted(loc)}" is not served here{feature}', cure)
            if not _says_nothing(_take_out(document.data, loc)) or pattern in _ON_WHEN_EMPTY:
                findings.append(document.finding(problem))
    for pattern, instead in IGNORED.items():
        for loc in list(_places(document.data, tuple(pattern.split(".")))):
            problem = Problem(loc, f'"{_dotted(loc)}" has no effect: {instead}', "remove it, or leave it for Triton")
            if not _says_nothing(_take_out(document.data, loc)):
                findings.append(document.finding(problem, fatal=False))
    for pattern, instead in WITHOUT_EFFECT.items():
        for loc in _places(document.data, tuple(pattern.split("."))):
            value = _parent(document.data, loc)[loc[-1]]
            if not _says_nothing(value) and not _read_by_build(document.data, loc):
                problem = Problem(loc, f'"{_dotted(loc)}" has no effect yet: {instead}', "")
                findings.append(document.finding(problem, fatal=False))
    return findings + _parameter_findings(document)


def _parameter_findings(document: Document) -> list[Finding]:
    """A warning for each entry of `parameters` that no backend here reads."""
    parameters = document.data.get("parameters")
    findings = []
    for name in parameters if isinstance(parameters, dict) else ():
        if not isinstance(name, str) or name in BACKEND_PARAMETERS:
            continue
        instead, cure = PARAMETERS_WITHOUT_EFFECT.get(name), "remove it, or leave it for Triton"
        if instead is None:
            near = did_you_mean(name, BACKEND_PARAMETERS)
            cure = near if near.endswith("?") else f"the backends read {', '.join(BACKEND_PARAMETERS)}"
        message = f'the parameter "{name[:80]}" has no effect: {instead or "no backend here reads it"}'
        findings.append(document.finding(Problem(("parameters", name), message, cure), fatal=False))
    return findings


def _read_by_build(data: dict[str, object], loc: Location) -> bool:
    """True for a TensorRT accelerator and its parameters that count, and for parameters of one that is told of as a whole."""
    if loc[2:3] != ("gpu_execution_accelerator",):
        return False
    accelerator: Any = _parent(data, (*loc[:4], ""))
    ours = isinstance(accelerator, dict) and str(accelerator.get("name")).lower() in TENSORRT_ACCELERATORS
    return ours if len(loc) == 4 else not ours or loc[-1] in TENSORRT_PARAMETERS


def _dotted(loc: Location) -> str:
    return ".".join(str(part) for part in loc)
