"""Completes a configuration from its model, and reports contradictions between the two.

Values in the file count, and missing values come from the model.

`max_batch_size` is 4, with dynamic batching, only if merging requests is safe: the first dimension of every input and output
has the same name, and each row is computed from itself only (docs/decisions/0001-batching-without-configuration.md).
Otherwise it is 0. It is also 0 if the file has no `max_batch_size` and `dims` as long as the model's own shape. If rows are
independent, dynamic batching is also on if the file has a `max_batch_size` above 1 but no inputs or no outputs, as in Triton.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.config.binding import problems_of
from headrace.config.config_base import Problem
from headrace.config.model_config import (
    BACKENDS,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    served_backends,
)
from headrace.config.onnx_model import OnnxSignature, TensorSignature
from headrace.config.onnx_rows import RowVerdict
from headrace.config.ragged_rules import ragged_problems, with_rows
from headrace.config.sequence_rules import control_problems, state_problems, without_sequence_tensors
from headrace.config.tensor_config import ModelInput, ModelOutput, completed_problems, model_inputs, model_outputs
from headrace.core.tensor import fits_shape

# Triton's default for models whose configuration it completes.
DEFAULT_MAX_BATCH_SIZE = 4

# Two instances keep a GPU busy; one leaves it idle between two launches: see docs/gpu.md, "How many instances".
_ON_EACH_GPU = 2

_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)


BACKEND_OF_SUFFIX = {
    "onnx": "onnxruntime",
    "plan": "tensorrt",
    "engine": "tensorrt",
    "py": "python",
    "pt": "pytorch",
    "pt2": "pytorch",
    "skops": "sklearn",
    "joblib": "sklearn",
    "pkl": "sklearn",
    "json": "xgboost",
    "ubj": "xgboost",
    "txt": "lightgbm",
}
"""Suffix of a model's file -> its backend where a configuration names none."""


def complete_identity(
    config: ModelConfig, folder_name: str, has_code: bool = False, files: Collection[str] = ()
) -> ModelConfig:
    """Fill in what follows from names alone: name, backend, platform, file.

    Args:
        config: checked configuration: backend and platform are valid and agree.
        folder_name: name of the folder, and of the model if the configuration has no name.
        has_code: True if the served versions have a `model.py` and no ONNX file: a Python model if no backend is named.
        files: names of the files of the newest served version.
    """
    backend = next((b for b in BACKENDS.values() if config.platform == b.platform or config.backend == b.name), None)
    if backend is None:
        # A file of joblib or pickle is read only where the configuration names it: docs/decisions/0016.
        found = (
            each for b in BACKENDS.values() for each in (b.default_model_filename, b.other_filename) if each in files
        )
        filename = config.default_model_filename or next(found, "")
        name = BACKEND_OF_SUFFIX.get(filename.rpartition(".")[2], "onnxruntime")
        if has_code and not config.default_model_filename:
            name = "python"
        if config.is_pipeline:
            name = "ensemble"
        backend = BACKENDS[name if name in served_backends() else "onnxruntime"]
    filename = backend.default_model_filename
    if backend.other_filename in files and filename not in files:
        filename = backend.other_filename
    # A copy without checks: each value is valid, and `model_fields_set` stays that of the file.
    update: dict[str, Any] = {
        "name": folder_name,
        "backend": backend.name,
        "platform": backend.platform,
        "default_model_filename": config.default_model_filename or filename,
    }
    return config.model_copy(update=update)


def complete_instances(config: ModelConfig) -> ModelConfig:
    """Fill in the default instance group and the names of the groups.

    Args:
        config: configuration, complete except for its instances.
    """
    if config.is_pipeline:
        return config
    groups = config.instance_group or (_instances(config),)
    named_groups = tuple(
        group if group.name else group.model_copy(update={"name": f"{config.name}_{index}"})
        for index, group in enumerate(groups)
    )
    return config.model_copy(update={"instance_group": named_groups})


def keeps_rows_apart(config: ModelConfig, signature: OnnxSignature) -> bool:
    """Return True if the analysis of a graph proves that each row of a batch is computed from itself only."""
    return with_rows(config, without_sequence_tensors(config, signature)).rows.independent


def complete_from_model(
    config: ModelConfig, signature: OnnxSignature
) -> tuple[ModelConfig | None, list[Problem], list[Problem]]:
    """Fill in missing fields from the model, and compare the others with it.

    Args:
        config: configuration of the file, identity completed.
        signature: signature of the version to complete from.

    Returns:
        The completed configuration (None if there are problems), the problems, and remarks that are not fatal.
    """
    update: dict[str, Any] = {}
    remarks: list[Problem] = []
    graph, signature = signature, with_rows(config, without_sequence_tensors(config, signature))
    if "max_batch_size" not in config.model_fields_set:
        update["max_batch_size"], remarks = _batch_size(config, signature)
    elif config.max_batch_size and not signature.rows.independent and "oversize" not in config.model_fields_set:
        update["oversize"] = "reject"
    if config.max_batch_size and signature.rows.mixed:
        remarks.append(_mixed_remark(config, signature.rows))
    if _needs_isolation(config, graph):
        update["isolation"] = "process"
        message = f"runs in a process of its own, which some values of a request end: {graph.trap}"
        remarks.append(Problem(("isolation",), message, "write isolation: process, or none if no client sends them"))
    batch_size = update.get("max_batch_size", config.max_batch_size)
    # Triton's rule, except for models with dependent rows: a completed configuration gets dynamic batching if it can batch
    # and has no scheduler.
    completes = "max_batch_size" in update or not (config.input and config.output)
    has_scheduler = config.dynamic_batching is not None or config.sequence_batching is not None
    if batch_size > 1 and completes and not has_scheduler and signature.rows.independent:
        update["dynamic_batching"] = DynamicBatching()
    batched = update.get("max_batch_size", config.max_batch_size) > 0
    fatal = [] if config.input else _unsupported_types("input", signature.required_inputs)
    unreadable = [] if config.output else _unsupported_types("output", signature.outputs)
    inputs = config.input or tuple(ModelInput(name=t.name) for t in signature.required_inputs if t.data_type)
    outputs = config.output or tuple(ModelOutput(name=t.name) for t in signature.outputs if t.data_type)
    inputs = model_inputs(config.preprocess, inputs)
    if config.postprocess is not None:
        # Named, so that the configuration in metadata refers to the model's own output.
        output_name = config.postprocess.output or (outputs[0].name if len(outputs) == 1 else "")
        update["postprocess"] = config.postprocess.model_copy(update={"output": output_name})
        outputs = model_outputs(update["postprocess"], outputs)
    if outputs:
        omitted = [p._replace(message=f"{p.message}: it is left out, the others are served") for p in unreadable]
        remarks.extend(omitted)
    else:
        fatal.extend(unreadable)
    update["input"] = tuple(_complete_tensor(tensor, signature.inputs, batched) for tensor in inputs)
    update["output"] = tuple(_complete_tensor(tensor, signature.outputs, batched) for tensor in outputs)
    fields = config.model_fields_set | {"name", "backend", "platform", "default_model_filename", "instance_group"}
    values = {name: getattr(config, name) for name in fields} | update
    try:
        completed = ModelConfig.model_validate(values)
    except ValidationError as error:
        return None, fatal + problems_of(error), remarks
    fatal = fatal or contradictions(completed, graph)
    return (None if fatal else completed), fatal, remarks


def _needs_isolation(config: ModelConfig, graph: OnnxSignature) -> bool:
    """Return True for a model whose process a request can end; GPUs do not trap, and processes share memory on Linux only."""
    on_cpu = config.kind == "onnx" and config.backend != "tensorrt" and hasattr(os, "memfd_create")
    return bool(graph.trap) and on_cpu and "isolation" not in config.model_fields_set


def _instances(config: ModelConfig) -> InstanceGroup:
    if config.backend != "tensorrt":
        return InstanceGroup()
    # Without `model_fields_set`, which marks it as not written (`is_default`).
    return InstanceGroup.model_construct(_fields_set=set(), kind="KIND_GPU", count=instances_on_each_gpu(config))


def instances_on_each_gpu(config: ModelConfig) -> int:
    """Instances on each GPU of a model whose configuration names no instance group."""
    can_overlap = config.max_batch_size > 0 and config.isolation == "none"
    return _ON_EACH_GPU if can_overlap else 1


def _batch_size(config: ModelConfig, signature: OnnxSignature) -> tuple[int, list[Problem]]:
    """Return the `max_batch_size` of a configuration without one, and a remark if it is 0 for a curable reason."""
    signatures = {tensor.name: tensor for tensor in (*signature.inputs, *signature.outputs)}
    configured: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    for tensor in configured:
        shape = signatures[tensor.name].shape if tensor.name in signatures else None
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        if "dims" in tensor.model_fields_set and shape is not None and len(dims) == len(shape):
            return 0, []
    names = {tensor.name for tensor in config.input}
    batched = [("input", tensor) for tensor in signature.inputs if not tensor.has_default or tensor.name in names] + [
        ("output", tensor) for tensor in signature.outputs
    ]
    reason, cure = _unsafe([(side, tensor) for side, tensor in batched if tensor.data_type], signature.rows)
    if not reason:
        return DEFAULT_MAX_BATCH_SIZE, []
    if not cure:
        return 0, []
    message = f"max_batch_size is 0, each request runs alone: {reason}"
    return 0, [Problem(("max_batch_size",), message, cure)]


_CONFIRM = (
    "if the first dimension of every tensor is the batch, and each row is computed from itself only, write max_batch_size and "
    "dynamic_batching: {}; else write max_batch_size: 0"
)


def _unsafe(tensors: list[tuple[str, TensorSignature]], rows: RowVerdict) -> tuple[str, str]:
    """Return the reason why requests must not be merged, and a cure; both "" if they may be merged."""
    first_sizes = [tensor.shape[0] if tensor.shape else None for _, tensor in tensors]
    fixed = [(side, tensor) for (side, tensor), first in zip(tensors, first_sizes, strict=True) if first != -1]
    if fixed or not tensors:
        # A model without any free first dimension accepts only its own shape: there is nothing to explain.
        if len(fixed) == len(tensors):
            return "no first dimension is free", ""
        side, tensor = fixed[0]
        shape = "an unknown shape" if tensor.shape is None else f"the shape {list(tensor.shape)}"
        return f'{side} "{tensor.name}" has {shape}, without a free first dimension', (
            "export the model with a dynamic batch dimension in all inputs and outputs, or write max_batch_size: 0"
        )
    unnamed = [f'{side} "{tensor.name}"' for side, tensor in tensors if not tensor.batch_symbol]
    if unnamed:
        return f"the first dimension of {', '.join(unnamed)} has no name, so it may be no batch dimension", _CONFIRM
    symbols = {tensor.batch_symbol: f'{side} "{tensor.name}"' for side, tensor in tensors}
    if len(symbols) > 1:
        quoted = ", ".join(f'"{symbol}" of {tensor}' for symbol, tensor in symbols.items())
        return f"the first dimensions have different names ({quoted}), so one may be no batch dimension", _CONFIRM
    defaults = [f'{side} "{tensor.name}"' for side, tensor in tensors if tensor.has_default]
    if defaults:
        return f"{', '.join(defaults)} has a default in the model, which has no rows", _CONFIRM
    if not rows.independent:
        if rows.mixed:
            return f"the rows of a batch are not independent: {rows.reason}", "write max_batch_size: 0"
        return f"it is not certain that the rows of a batch are independent: {rows.reason}", _CONFIRM
    return "", ""


def _mixed_remark(config: ModelConfig, rows: RowVerdict) -> Problem:
    """Return a warning for a configuration with batches of a model whose rows depend on one another."""
    if config.dynamic_batching is None:
        message = f"the rows of a batch are not independent: {rows.reason}"
        return Problem(("max_batch_size",), message, "write max_batch_size: 0")
    message = f"the rows of a batch depend on one another, so each request runs alone (see proof): {rows.reason}"
    return Problem(("max_batch_size",), message, "write max_batch_size: 0, or remove dynamic_batching")


def _unsupported_types(field: str, tensors: tuple[TensorSignature, ...]) -> list[Problem]:
    """Return a problem for each tensor of a type that no request can carry."""
    problems = []
    for tensor in tensors:
        if not tensor.data_type:
            # scikit-learn's default export has probabilities in a ZipMap: a sequence of maps.
            zipmap = "; skl2onnx: options={'zipmap': False}" if tensor.onnx_type == "sequence" else ""
            message = f'{field} "{tensor.name}" of the model has the type {tensor.onnx_type}, which no request carries'
            problems.append(Problem((field,), message, f"export it as a tensor{zipmap}"))
    return problems


def _complete_tensor(tensor: _Tensor, signatures: tuple[TensorSignature, ...], batched: bool) -> _Tensor:
    signature = next((candidate for candidate in signatures if candidate.name == tensor.name), None)
    if signature is None:
        return tensor
    update: dict[str, Any] = {}
    if not tensor.data_type and signature.data_type:
        update["data_type"] = signature.data_type
    # With a reshape the model's shape differs from the clients'; absent dims are empty, as in Triton's text format.
    if "dims" not in tensor.model_fields_set and tensor.reshape is None and signature.shape is not None:
        update["dims"] = signature.shape[1:] if batched else signature.shape
    return tensor.model_copy(update=update)


_INCOMPLETE_CURES = {
    "python": "write it as in the model, or in auto_complete_config of model.py, or as annotations",
    "pipeline": "write it: a pipeline's tensors are those of its configuration",
}


def incomplete(config: ModelConfig) -> list[Problem]:
    """Return the fields that a configuration must set because there is no ONNX file to complete it from."""
    cure = _INCOMPLETE_CURES.get(config.kind, "write it as in the model; only an ONNX file can complete it")
    if config.kind == "python" and config.backend != "python":
        cure = f"{config.default_model_filename} lacks it: write it in config.pbtxt, in the model's folder or beside the file"
    problems = [
        Problem((field,), f"{field} is missing", cure) for field in ("input", "output") if not getattr(config, field)
    ]
    both: tuple[tuple[str, tuple[ModelInput | ModelOutput, ...]], ...] = (
        ("input", model_inputs(config.preprocess, config.input)),
        ("output", model_outputs(config.postprocess, config.output)),
    )
    for field, tensors in both:
        for index, tensor in enumerate(tensors):
            missing = [name for name in ("data_type", "dims") if name not in tensor.model_fields_set]
            problems += [Problem((field, index), f'{field} "{tensor.name}" has no {name}', cure) for name in missing]
    return problems


def contradictions(config: ModelConfig, signature: OnnxSignature) -> list[Problem]:
    """Compare a complete configuration with the model; each problem has both values."""
    graph, signature = signature, with_rows(config, without_sequence_tensors(config, signature))
    problems = [
        *ragged_problems(config, graph),
        *control_problems(config, graph),
        *state_problems(config, graph),
        *_compare("input", config.input, signature.inputs, config.max_batch_size > 0),
        *_compare("output", config.output, signature.outputs, config.max_batch_size > 0),
        *completed_problems(config.preprocess, config.input),
    ]
    configured = {tensor.name: (index, tensor) for index, tensor in enumerate(config.input)}
    for required in signature.required_inputs:
        index, tensor = configured.get(required.name, (0, None))
        if tensor is None:
            message = (
                f'the model has the input "{required.name}" ({required.onnx_type}), the configuration does not list it'
            )
            cure = "add it, or leave input out to have all of them read from the model"
            problems.append(Problem(("input",), message, cure))
        elif tensor.optional:
            message = f'input "{required.name}" is optional in the configuration, the model has no default for it'
            problems.append(Problem(("input", index, "optional"), message, "remove optional"))
    return problems


def _compare(
    field: str,
    tensors: tuple[ModelInput | ModelOutput, ...],
    signatures: tuple[TensorSignature, ...],
    batched: bool,
) -> Iterator[Problem]:
    by_name = {tensor.name: tensor for tensor in signatures}
    names = ", ".join(tensor.name for tensor in signatures if not tensor.has_default)
    for index, tensor in enumerate(tensors):
        signature = by_name.get(tensor.name)
        if signature is None:
            message = f'{field} "{tensor.name}" is not in the model'
            yield Problem((field, index, "name"), message, f"the model has {names}")
            continue
        if tensor.data_type != signature.data_type:
            message = f'{field} "{tensor.name}" has the type {tensor.data_type or "none"}, the model has {signature.onnx_type}'
            cure = f"write {signature.data_type}" if signature.data_type else "export it as a tensor, or leave it out"
            yield Problem((field, index, "data_type"), message, cure)
        yield from _compare_shape(field, index, tensor, signature.shape, batched)


def _compare_shape(
    field: str, index: int, tensor: ModelInput | ModelOutput, shape: tuple[int, ...] | None, batched: bool
) -> Iterator[Problem]:
    name = f'{field} "{tensor.name}"'
    if shape is None:
        if "dims" not in tensor.model_fields_set:
            yield Problem((field, index), f"the model has no shape for {name}", "write its dims")
        return
    if batched and (not shape or shape[0] != -1):
        message = f"max_batch_size needs a free first dimension, {name} has the shape {list(shape)} in the model"
        cure = "write max_batch_size: 0, or export the model with a dynamic batch dimension"
        yield Problem(("max_batch_size",), message, cure)
        return
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    model_dims = shape[1:] if batched else shape
    # A free dimension of the model accepts any size; a fixed one must be repeated.
    if not fits_shape(dims, model_dims):
        suffix = " behind the batch dimension" if batched else ""
        message = f"{name} has dims {list(dims)}, the model has {list(model_dims)}{suffix}"
        yield Problem((field, index, "dims"), message, f"write {list(model_dims)}")
