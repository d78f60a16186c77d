"""Completes a configuration from its model and finds where the two contradict each other.

What a file says counts; what it leaves out comes from the model. `max_batch_size` is 4, with dynamic batching on, only where it
is safe to merge requests: the first dimension of every input and output has the same name, and each row is computed from itself
only (docs/decisions/0001-batching-without-configuration.md). Else it is 0. Where the file gives `dims` as long as the model's own
shape, and no `max_batch_size`, there is no batch dimension either. Where rows are independent, dynamic batching is on, too, if
the file gives a `max_batch_size` above 1 but leaves out the inputs or the outputs, as in Triton.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.config.config_binding import problems_of
from headrace.config.onnx_signature import OnnxSignature, TensorSignature
from headrace.config.row_analysis import RowVerdict
from headrace.core.model_config import (
    BACKENDS,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Problem,
)
from headrace.core.picture_config import completed_problems, own_inputs, own_outputs

# Triton's default for models whose configuration it completes.
DEFAULT_MAX_BATCH_SIZE = 4

# Two instances keep a GPU busy where one leaves it idle between two launches: see docs/gpu.md, "How many instances".
_ON_EACH_GPU = 2

_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)


def complete_identity(config: ModelConfig, folder_name: str) -> ModelConfig:
    """Fills in what follows from names alone: name, backend, platform, file.

    Args:
        config: checked, so backend and platform are known ones and agree.
        folder_name: the model's name, and the configuration's where it tells none.
    """
    backend = next((b for b in BACKENDS.values() if config.platform == b.platform or config.backend == b.name), None)
    if backend is None:
        suffix = config.default_model_filename.rpartition(".")[2]
        backend = BACKENDS["tensorrt" if suffix in ("plan", "engine") else "onnxruntime"]
    # A copy without checks: each value is known to be right, and what was set in the file stays known (model_fields_set).
    update: dict[str, Any] = {
        "name": folder_name,
        "backend": backend.name,
        "platform": backend.platform,
        "default_model_filename": config.default_model_filename or backend.default_model_filename,
    }
    return config.model_copy(update=update)


def complete_instances(config: ModelConfig) -> ModelConfig:
    """Fills in which instances run, where the file names none, and the names of their groups.

    Args:
        config: complete but for that.
    """
    groups = config.instance_group or (_instances(config),)
    named = tuple(
        group if group.name else group.model_copy(update={"name": f"{config.name}_{index}"})
        for index, group in enumerate(groups)
    )
    return config.model_copy(update={"instance_group": named})


def complete_from_model(
    config: ModelConfig, signature: OnnxSignature
) -> tuple[ModelConfig | None, list[Problem], list[Problem]]:
    """Fills in what the configuration leaves out, and compares the rest with the model.

    Args:
        config: as read from the file, identity completed.
        signature: of the version to complete from.

    Returns:
        The completed configuration (None if there are problems), the problems, and remarks that are not fatal.
    """
    update: dict[str, Any] = {}
    remarks: list[Problem] = []
    if "max_batch_size" not in config.model_fields_set:
        update["max_batch_size"], remarks = _batch_size(config, signature)
    elif config.max_batch_size and not signature.rows.independent and "oversize" not in config.model_fields_set:
        update["oversize"] = "reject"
    if config.max_batch_size and signature.rows.mixed:
        remarks.append(_mixed_remark(config, signature.rows))
    batch_size = update.get("max_batch_size", config.max_batch_size)
    # Triton's rule, but for models that it would answer wrongly: a configuration that is completed gets dynamic batching where it
    # can batch and names no scheduler.
    completes = "max_batch_size" in update or not (config.input and config.output)
    if batch_size > 1 and completes and config.dynamic_batching is None and signature.rows.independent:
        update["dynamic_batching"] = DynamicBatching()
    batched = update.get("max_batch_size", config.max_batch_size) > 0
    fatal = [] if config.input else _untold("input", signature.required_inputs)
    unreadable = [] if config.output else _untold("output", signature.outputs)
    inputs = config.input or tuple(ModelInput(name=t.name) for t in signature.required_inputs if t.data_type)
    outputs = config.output or tuple(ModelOutput(name=t.name) for t in signature.outputs if t.data_type)
    inputs = own_inputs(config.preprocess, inputs)
    if config.postprocess is not None:
        # Named, so that the configuration as it is shown to callers leads back to the model's own output.
        named = config.postprocess.output or (outputs[0].name if len(outputs) == 1 else "")
        update["postprocess"] = config.postprocess.model_copy(update={"output": named})
        outputs = own_outputs(update["postprocess"], outputs)
    if outputs:
        left_out = [p._replace(message=f"{p.message}: it is left out, the others are served") for p in unreadable]
        remarks.extend(left_out)
    else:
        fatal.extend(unreadable)
    update["input"] = tuple(_completed(tensor, signature.inputs, batched) for tensor in inputs)
    update["output"] = tuple(_completed(tensor, signature.outputs, batched) for tensor in outputs)
    values = {name: getattr(config, name) for name in config.model_fields_set} | update
    values |= {
        name: getattr(config, name)
        for name in ("name", "backend", "platform", "default_model_filename", "instance_group")
    }
    try:
        completed = ModelConfig.model_validate(values)
    except ValidationError as error:
        return None, fatal + problems_of(error), remarks
    fatal = fatal or contradictions(completed, signature)
    return (None if fatal else completed), fatal, remarks


def _instances(config: ModelConfig) -> InstanceGroup:
    if config.backend != "tensorrt":
        return InstanceGroup()
    # Without `model_fields_set`, which marks it as not written (`is_default`).
    return InstanceGroup.model_construct(_fields_set=set(), kind="KIND_GPU", count=instances_on_each_gpu(config))


def instances_on_each_gpu(config: ModelConfig) -> int:
    """Instances on each GPU of a model whose configuration names no instance group."""
    many = config.max_batch_size > 0 and config.isolation == "none"
    return _ON_EACH_GPU if many else 1


def _batch_size(config: ModelConfig, signature: OnnxSignature) -> tuple[int, list[Problem]]:
    """The `max_batch_size` of a configuration that gives none, and a remark if that is 0 for a reason worth knowing."""
    known = {tensor.name: tensor for tensor in (*signature.inputs, *signature.outputs)}
    listed: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    for tensor in listed:
        shape = known[tensor.name].shape if tensor.name in known else None
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
    """Why requests must not be merged, and what to do about it; both empty if they may be."""
    firsts = [tensor.shape[0] if tensor.shape else None for _, tensor in tensors]
    fixed = [(side, tensor) for (side, tensor), first in zip(tensors, firsts, strict=True) if first != -1]
    if fixed or not tensors:
        # A model without any free first dimension takes just its own shape: there is nothing to explain.
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
        named = ", ".join(f'"{symbol}" of {tensor}' for symbol, tensor in symbols.items())
        return f"the first dimensions have different names ({named}), so one may be no batch dimension", _CONFIRM
    defaults = [f'{side} "{tensor.name}"' for side, tensor in tensors if tensor.has_default]
    if defaults:
        return f"{', '.join(defaults)} has a default in the model, which has no rows", _CONFIRM
    if not rows.independent:
        if rows.mixed:
            return f"the rows of a batch are not independent: {rows.reason}", "write max_batch_size: 0"
        return f"it is not certain that the rows of a batch are independent: {rows.reason}", _CONFIRM
    return "", ""


def _mixed_remark(config: ModelConfig, rows: RowVerdict) -> Problem:
    """Warns of a configuration that asks for batches of a model whose rows depend on one another."""
    if config.dynamic_batching is None:
        return Problem(
            ("max_batch_size",), f"the rows of a batch are not independent: {rows.reason}", "write max_batch_size: 0"
        )
    message = f"requests that share a batch get values that depend on one another: {rows.reason}"
    return Problem(("max_batch_size",), message, "write max_batch_size: 0, or remove dynamic_batching")


def _untold(field: str, tensors: tuple[TensorSignature, ...]) -> list[Problem]:
    """What cannot be derived: tensors of types that no request carries."""
    return [
        Problem(
            (field,),
            f'{field} "{t.name}" of the model has the type {t.onnx_type}, which no request carries',
            # scikit-learn's default export has its probabilities in a ZipMap: a sequence of maps.
            "export it as a tensor; skl2onnx: options={'zipmap': False}"
            if t.onnx_type == "sequence"
            else "export it as a tensor",
        )
        for t in tensors
        if not t.data_type
    ]


def _completed(tensor: _Tensor, known: tuple[TensorSignature, ...], batched: bool) -> _Tensor:
    signature = next((candidate for candidate in known if candidate.name == tensor.name), None)
    if signature is None:
        return tensor
    update: dict[str, Any] = {}
    if not tensor.data_type and signature.data_type:
        update["data_type"] = signature.data_type
    # With a reshape the model's shape is not the callers'; absent dims are empty ones, as in Triton's text format.
    if "dims" not in tensor.model_fields_set and tensor.reshape is None and signature.shape is not None:
        update["dims"] = signature.shape[1:] if batched else signature.shape
    return tensor.model_copy(update=update)


def incomplete(config: ModelConfig) -> list[Problem]:
    """What a configuration must tell itself because there is no ONNX file to read it from."""
    cure = "write it as the model has it; only an ONNX file can be asked for it"
    problems = [
        Problem((field,), f"{field} is missing", cure) for field in ("input", "output") if not getattr(config, field)
    ]
    both: tuple[tuple[str, tuple[ModelInput | ModelOutput, ...]], ...] = (
        ("input", own_inputs(config.preprocess, config.input)),
        ("output", own_outputs(config.postprocess, config.output)),
    )
    for field, tensors in both:
        for index, tensor in enumerate(tensors):
            missing = [name for name in ("data_type", "dims") if name not in tensor.model_fields_set]
            problems += [Problem((field, index), f'{field} "{tensor.name}" has no {name}', cure) for name in missing]
    return problems


def contradictions(config: ModelConfig, signature: OnnxSignature) -> list[Problem]:
    """Where a complete configuration and the model do not agree; each problem tells both sides."""
    problems = _compare("input", config.input, signature.inputs, config.max_batch_size > 0)
    problems += _compare("output", config.output, signature.outputs, config.max_batch_size > 0)
    problems += completed_problems(config.preprocess, config.input)
    listed = {tensor.name: (index, tensor) for index, tensor in enumerate(config.input)}
    for required in signature.required_inputs:
        index, tensor = listed.get(required.name, (0, None))
        if tensor is None:
            message = (
                f'the model has the input "{required.name}" ({required.onnx_type}), the configuration does not list it'
            )
            problems.append(
                Problem(("input",), message, "add it, or leave input out to have all of them read from the model")
            )
        elif tensor.optional:
            message = f'input "{required.name}" is optional in the configuration, the model has no default for it'
            problems.append(Problem(("input", index, "optional"), message, "remove optional"))
    return problems


def _compare(
    field: str,
    tensors: tuple[ModelInput | ModelOutput, ...],
    known: tuple[TensorSignature, ...],
    batched: bool,
) -> list[Problem]:
    problems = []
    by_name = {tensor.name: tensor for tensor in known}
    names = ", ".join(tensor.name for tensor in known if not tensor.has_default)
    for index, tensor in enumerate(tensors):
        signature = by_name.get(tensor.name)
        if signature is None:
            message = f'{field} "{tensor.name}" is not in the model'
            problems.append(Problem((field, index, "name"), message, f"the model has {names}"))
            continue
        if tensor.data_type != signature.data_type:
            message = f'{field} "{tensor.name}" has the type {tensor.data_type or "none"}, the model has {signature.onnx_type}'
            cure = f"write {signature.data_type}" if signature.data_type else "export it as a tensor, or leave it out"
            problems.append(Problem((field, index, "data_type"), message, cure))
        problem = _compare_shape(field, index, tensor, signature.shape, batched)
        if problem is not None:
            problems.append(problem)
    return problems


def _compare_shape(
    field: str, index: int, tensor: ModelInput | ModelOutput, shape: tuple[int, ...] | None, batched: bool
) -> Problem | None:
    name = f'{field} "{tensor.name}"'
    if shape is None:
        if "dims" in tensor.model_fields_set:
            return None
        return Problem((field, index), f"the model does not tell the shape of {name}", "write its dims")
    if batched and (not shape or shape[0] != -1):
        message = f"max_batch_size needs a free first dimension, {name} has the shape {list(shape)} in the model"
        return Problem(
            ("max_batch_size",), message, "write max_batch_size: 0, or export the model with a dynamic batch dimension"
        )
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    own = shape[1:] if batched else shape
    # A free dimension of the model takes any size; a fixed one must be told as it is.
    if len(dims) == len(own) and all(size in (-1, told) for told, size in zip(dims, own, strict=True)):
        return None
    place = " behind the batch dimension" if batched else ""
    return Problem(
        (field, index, "dims"), f"{name} has dims {list(dims)}, the model has {list(own)}{place}", f"write {list(own)}"
    )
