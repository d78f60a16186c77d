"""Binds a configuration document to `ModelConfig`.

Screening: one table of the fields of Triton's schema that this server refuses, ignores, or accepts without an effect; a pattern
is a dotted path in which `*` stands for any key or index. Binding: the schema, with findings that carry lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from headrace.config.config_base import Location, Problem, Problems
from headrace.config.documents import Document, did_you_mean, read_value
from headrace.config.model_config import (
    BACKENDS,
    HEADRACE_FIELD_PATHS,
    ModelConfig,
    is_headrace_field,
)
from headrace.config.optimization_config import CUDA_ACCELERATOR, CUDA_PARAMETERS, TENSORRT_ACCELERATORS, Optimization
from headrace.core.errors import ConfigError, Finding

_TENSORRT_ONLY = "it is a matter of TensorRT engines; remove it"

# Fields that would change the model's responses. Pattern -> cure.
REFUSED: dict[str, str] = {
    "ensemble_scheduling.step.*.model_namespace": "remove it; all models share one namespace",
    "input.*.is_shape_tensor": _TENSORRT_ONLY,
    "output.*.is_shape_tensor": _TENSORRT_ONLY,
    "input.*.is_non_linear_format_io": _TENSORRT_ONLY,
    "output.*.is_non_linear_format_io": _TENSORRT_ONLY,
    "instance_group.*.rate_limiter": "remove it; an instance takes work when it is idle",
    "instance_group.*.secondary_devices": "remove it; DLA cores are not used",
    "instance_group.*.profile": "remove it; profiles of TensorRT engines come with a later release",
    "instance_group.*.passive": "remove it; every instance serves",
    "instance_group.*.host_policy": "remove it; start the server under numactl or taskset instead",
    "cc_model_filenames": "remove it; one file serves every GPU, named by default_model_filename",
    "model_operations.op_library_filename": "custom operators are not loaded; export the model with standard ones",
    "model_repository_agents": "remove it; prepare the files before the server sees them",
}
# Features behind refused fields, for the message. Pattern -> feature.
FEATURES: dict[str, str] = {
    "instance_group.*.rate_limiter": "a rate limiter for instances",
    "model_operations.op_library_filename": "custom operators",
    "model_repository_agents": "agents that change the model's files",
}

# Fields that change no response: accepted, dropped, reported once. Pattern -> effect.
IGNORED: dict[str, str] = {
    "optimization.cuda.graph_spec": "every batch size is run alike",
}

# Fields that stay in the configuration and have no effect yet. Pattern -> effect.
WITHOUT_EFFECT: dict[str, str] = {
    "metric_tags": "metrics carry the model's name and version",
    "optimization.graph": "ONNX Runtime does all its graph optimisations",
    "optimization.priority": "all models are equal",
    "optimization.cuda": "engines of TensorRT use CUDA graphs anyway, which the parameter `cuda_graphs` turns off",
    "optimization.execution_accelerators.gpu_execution_accelerator.*": "the model runs without this accelerator",
    "optimization.execution_accelerators.gpu_execution_accelerator.*.parameters.*": "it is ignored",
    "optimization.execution_accelerators.cpu_execution_accelerator": "the model runs without an accelerator",
    "optimization.eager_batching": "a batch is assembled when an instance is free",
}
# Exceptions: `headrace build` reads these parameters of Triton's TensorRT accelerator, and the CUDA provider `CUDA_PARAMETERS` of
# its own.
TENSORRT_PARAMETERS = ("precision_mode", "max_workspace_size_bytes")

# `parameters` that a backend reads. The backend of a model is chosen on load, so all of them are allowed.
BACKEND_PARAMETERS: tuple[str, ...] = (
    "intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern",
    "optimization_level", "cuda_graphs", "pipeline_depth", "one_graph_rows", "wait", *CUDA_PARAMETERS,
)  # fmt: skip

# `parameters` of Triton's ONNX Runtime backend without an effect here. Name -> what happens instead.
PARAMETERS_WITHOUT_EFFECT: dict[str, str] = {
    "do_copy_in_default_stream": "copies have a stream of their own",
    "memory.enable_memory_arena_shrinkage": "the arena keeps its memory",
    "session.use_device_allocator_for_initializers": "the arena holds the weights",
    "share_session_between_instances": "instances of one thread share a session anyway",
}

# Values that say the same as an absent field.
_DEFAULTS: tuple[object, ...] = (None, False, 0, "", [], {})
# Blocks that an empty value turns on.
_ON_WHEN_EMPTY = ("ensemble_scheduling", "pipeline", "pad")
# Blocks whose fields are all refused: an empty one is dropped.
_ONLY_REFUSED = ("model_operations",)
_DEFAULT_WORDS = ("default", "auto", "cpu", "model")


def _is_default(value: object) -> bool:
    if isinstance(value, str):
        return value == "" or value.rpartition("_")[2].lower() in _DEFAULT_WORDS
    return value in _DEFAULTS


def _matches(data: object, pattern: str) -> list[tuple[Location, Any]]:
    """Return every location in `data` that matches `pattern`, with its value."""
    matches: list[tuple[Location, Any]] = [((), data)]
    for part in pattern.split("."):
        matches = [((*loc, key), item) for loc, value in matches for key, item in _items(value) if part in ("*", key)]
    return matches


def _items(value: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _parent(data: dict[str, object], loc: Location) -> Any:
    parent: Any = data
    for part in loc[:-1]:
        parent = parent[part]
    return parent


def _remove(data: dict[str, object], loc: Location) -> None:
    """Remove the value at `loc`, and the block around it if that becomes empty and is not part of the schema."""
    parent = _parent(data, loc)
    del parent[loc[-1]]
    if len(loc) == 2 and loc[0] in _ONLY_REFUSED and not parent:
        data.pop(str(loc[0]))


def screen(document: Document) -> list[Finding]:
    """Remove the fields that this server refuses or ignores from `document.data`, and report them.

    Args:
        document: the parsed file; changed.

    Returns:
        A fatal finding for each refused field, a warning for each field without an effect.
    """
    findings, data = [], document.data
    for name in _ONLY_REFUSED:
        if data.get(name) == {}:
            del data[name]
    for pattern, cure in REFUSED.items():
        feature = f": it requests {FEATURES[pattern]}" if pattern in FEATURES else ""
        for loc, value in _matches(data, pattern):
            _remove(data, loc)
            if not _is_default(value) or pattern in _ON_WHEN_EMPTY:
                problem = Problem(loc, f'"{_dotted(loc)}" is not supported{feature}', cure)
                findings.append(document.finding(problem))
    for pattern, instead in IGNORED.items():
        for loc, value in _matches(data, pattern):
            _remove(data, loc)
            if not _is_default(value):
                message = f'"{_dotted(loc)}" has no effect: {instead}'
                findings.append(
                    document.finding(Problem(loc, message, "remove it, or leave it for Triton"), fatal=False)
                )
    for pattern, instead in WITHOUT_EFFECT.items():
        for loc, value in _matches(data, pattern):
            if not _is_default(value) and not _is_read(data, loc):
                problem = Problem(loc, f'"{_dotted(loc)}" has no effect yet: {instead}')
                findings.append(document.finding(problem, fatal=False))
    return findings + _parameter_findings(document)


def _parameter_findings(document: Document) -> list[Finding]:
    """Return a warning for each entry of `parameters` that no backend reads; Python models get all of them."""
    names = (document.data.get("backend"), document.data.get("platform"))  # of any type: nothing is checked yet
    python = [backend for backend in BACKENDS.values() if backend.kind == "python"]
    if any(name in (backend.name, backend.platform) for name in names for backend in python):
        return []
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


def _is_read(data: dict[str, object], loc: Location) -> bool:
    """True for the accelerators of TensorRT and of the CUDA provider and for their parameters that are read, and for parameters
    of an unknown accelerator.
    """
    if loc[2:3] != ("gpu_execution_accelerator",):
        return False
    accelerator: Any = _parent(data, (*loc[:4], ""))
    name = str(accelerator.get("name")).lower() if isinstance(accelerator, dict) else ""
    is_cuda, is_tensorrt = name == CUDA_ACCELERATOR, name in TENSORRT_ACCELERATORS
    if len(loc) == 4:
        return is_cuda or is_tensorrt
    return not (is_cuda or is_tensorrt) or loc[-1] in (CUDA_PARAMETERS if is_cuda else TENSORRT_PARAMETERS)


def _dotted(loc: Location) -> str:
    return ".".join(str(part) for part in loc)


PREFIX = "headrace."


def bind(document: Document) -> tuple[ModelConfig | None, list[Finding]]:
    """Check a document against the schema.

    Args:
        document: the parsed file; changed.

    Returns:
        The configuration, None if there is a fatal finding, and all findings.
    """
    findings = [*document.remarks, *_move_headrace_parameters(document), *screen(document)]
    config = None
    try:
        config = ModelConfig.model_validate(document.data)
    except ValidationError as error:
        findings += [document.finding(problem) for problem in problems_of(error, document.headrace_prefix)]
    if any(finding.fatal for finding in findings):
        config = None
    return config, sorted(findings, key=lambda finding: finding.line or 0)


def _move_headrace_parameters(document: Document) -> list[Finding]:
    """Move `parameters` entries such as "headrace.slo.p99_ms" to the fields they name; changes the document."""
    parameters = document.data.get("parameters")
    findings: list[Finding] = []
    if not isinstance(parameters, dict):
        return findings
    for key in [key for key in parameters if isinstance(key, str) and key.startswith(PREFIX)]:
        problem = _move_parameter(document, key, parameters.pop(key))
        if problem is not None:
            line = document.lines.get(("parameters", key))
            findings.append(Finding(document.path, line, problem.message, problem.cure))
    return findings


def _move_parameter(document: Document, key: str, text: object) -> Problem | None:
    """Move one entry; the value is read as YAML (so also as JSON) and checked later by the schema."""
    loc: Location = ("parameters", key)
    path = tuple(key.removeprefix(PREFIX).split("."))
    if not is_headrace_field(path):
        return Problem(loc, f'unknown parameter "{key}"', _cure_of(key, path))
    if isinstance(text, dict):
        text = text.get("string_value")
    if not isinstance(text, str):
        return Problem(loc, f'"{key}" must be text', "write the value in quotes")
    try:
        value = read_value(text, document.path)
    except ConfigError as error:
        return Problem(loc, f'"{key}": {error.findings[0].message}', error.findings[0].cure)
    return _write_value(document, path, value, document.lines.get(loc))


def _cure_of(key: str, path: tuple[str, ...]) -> str:
    """Return the cure for an unknown parameter: it may be a field of Triton's message, or a misspelt Headrace field."""
    is_optimization = path[0] == "optimization" and len(path) > 1
    if path[0] in ModelConfig.model_fields and (not is_optimization or path[1] in Optimization.model_fields):
        field = _dotted(path[:2] if is_optimization else path[:1])
        return f"{field} is a field of Triton's message, write it as a field"
    return did_you_mean(key, [PREFIX + _dotted(field_path) for field_path in HEADRACE_FIELD_PATHS])


def _write_value(document: Document, path: tuple[str, ...], value: object, line: int | None) -> Problem | None:
    """Write `value` at the dotted path `path`; creates the blocks on the way."""
    block: Any = document.data
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if not isinstance(block, dict) or (is_last and part in block):
            return Problem(path, f'"{PREFIX}{_dotted(path)}" is written twice', "keep one of them")
        if line is not None:
            document.lines.setdefault(path[: depth + 1], line)
        block = block.setdefault(part, value if is_last else {})
    return None


def problems_of(error: ValidationError, headrace_prefix: str = "") -> list[Problem]:
    """Translate pydantic's errors into problems.

    Args:
        error: validation error of the schema.
        headrace_prefix: prefix of the names of Headrace's own fields.
    """
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        loc: Location = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Problems):
            for problem in cause.problems:
                item_loc = (*loc, *problem.loc)
                # A problem of the whole configuration names its field in the message; one of a value does not.
                subject = "" if problem.loc or not loc else f"{_field_name(loc, headrace_prefix)}: "
                problems.append(Problem(item_loc, subject + problem.message, problem.cure))
        else:
            problems.append(_problem(detail, loc, headrace_prefix))
    return problems


def _problem(detail: Any, loc: Location, headrace_prefix: str) -> Problem:
    name, value = _field_name(loc, headrace_prefix), f"{detail['input']!r:.80}"
    match detail["type"]:
        case "extra_forbidden":
            blocks = [] if len(loc) > 1 else [block for block in _fields_at(()) if name in _fields_at((block,))]
            cure = f"write it in the block {' or '.join(blocks)}" if blocks else ""
            return Problem(loc, f'unknown field "{name}"', cure or did_you_mean(str(loc[-1]), _fields_at(loc[:-1])))
        case "missing":
            return Problem(loc, f'"{name}" is missing', f"write {loc[-1]}")
        case "model_type" | "dict_type" | "model_attributes_type":
            return Problem(loc, f"{name} must be a block of fields, not {value}", "write {} for the defaults")
        case "tuple_type" | "list_type":
            return Problem(loc, f"{name} must be a list, not {value}", "write [...], or one item a line behind '-'")
        case "string_type":
            return Problem(loc, f"{name} must be text, not {value}", "put it in quotes")
        case "bool_type":
            return Problem(loc, f"{name} must be true or false, not {value}", "write true or false")
        case "int_type" | "float_type" | "int_parsing" | "int_from_float":
            cure = "write the number without quotes" if isinstance(detail["input"], str) else "write a number"
            kind = "a number" if detail["type"] == "float_type" else "a whole number"
            return Problem(loc, f"{name} must be {kind}, not {value}", cure)
    expected = str(detail["msg"]).removeprefix("Input should ").removeprefix("Tuple should ")
    return Problem(loc, f"{name} should {expected}, not {value}", "correct the value")


def _field_name(loc: Location, headrace_prefix: str) -> str:
    return headrace_prefix + _dotted(loc) if is_headrace_field(loc) else _dotted(loc)


def _fields_at(loc: Location) -> list[str]:
    """Return the field names of the part of the schema at `loc`."""
    model: type[BaseModel] = ModelConfig
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = model_in(field.annotation) or model
    return list(model.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model class in a field's annotation, e.g. of `tuple[ModelInput, ...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := model_in(inner)) is not None), None)
