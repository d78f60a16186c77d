"""Compares ragged inputs, `batch_input`, `batch_output` and `pad` of a configuration with the model.

The model sees a ragged input as one dimension of elements, and the computed inputs in the shape of their kind. `with_rows`
returns the signature as it would be with rows, for the comparisons of ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.config.config_base import Problem
from headrace.config.model_config import ModelConfig
from headrace.config.onnx_model import OnnxSignature, TensorSignature
from headrace.config.onnx_rows import RowVerdict
from headrace.config.tensor_config import ModelInput, ModelOutput, Reshape

_FREE = (-1, -1)  # rows, and any size: the shape of an input without dims


def is_ragged(config: ModelConfig) -> bool:
    """Return True if requests of different shapes share a batch without padding."""
    return bool(config.batch_input or config.batch_output) or any(tensor.allow_ragged_batch for tensor in config.input)


def with_rows(config: ModelConfig, signature: OnnxSignature) -> OnnxSignature:
    """Return a signature in which ragged inputs and scattered outputs have rows, without the computed inputs."""
    if not is_ragged(config):
        return signature
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    dims = {tensor.name: tensor.dims for tensor in tensors if "dims" in tensor.model_fields_set}
    ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
    scattered = {name for part in config.batch_output for name in part.target_name}
    computed = {name for part in config.batch_input for name in part.target_name}

    def rows_of(tensor: TensorSignature) -> TensorSignature:
        return replace(tensor, shape=(-1, *dims[tensor.name]) if tensor.name in dims else _FREE)

    return OnnxSignature(
        tuple(rows_of(t) if t.name in ragged else t for t in signature.inputs if t.name not in computed),
        tuple(rows_of(t) if t.name in scattered else t for t in signature.outputs),
        RowVerdict(False, reason="requests of different shapes share a batch"),
    )


def ragged_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[Problem]:
    """Compare the ragged and computed inputs with those of the model."""
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    for index, tensor in enumerate(config.input):
        match = inputs.get(tensor.name)
        if tensor.allow_ragged_batch and match is not None and match.shape not in (None, (-1,)):
            message = f'input "{tensor.name}" has allow_ragged_batch, the model has the shape {list(match.shape or ())} for it'
            cure = "export the model with the shape [-1] for it: the elements of all requests, or remove allow_ragged_batch"
            yield Problem(("input", index, "allow_ragged_batch"), message, cure)
    for index, part in enumerate(config.batch_input):
        for name in part.target_name:
            match = inputs.get(name)
            if match is None:
                message = f'batch_input names "{name}", which is not an input of the model'
                yield Problem(("batch_input", index, "target_name"), message, f"the model has {', '.join(inputs)}")
            elif match.data_type != part.data_type:
                message = f'batch_input "{name}" has the type {part.data_type}, the model has {match.onnx_type}'
                yield Problem(("batch_input", index, "data_type"), message, f"write {match.data_type}")
            else:
                rank = 2 if part.kind == "BATCH_ITEM_SHAPE" else 1
                if match.shape is not None and (len(match.shape) != rank or match.shape[0] != -1):
                    message = f'batch_input "{name}" is {part.kind}, the model has the shape {list(match.shape)} for it'
                    cure = f"export the model with {rank} dimension{'s' * (rank - 1)} for it, the first of them free"
                    yield Problem(("batch_input", index, "kind"), message, cure)


def joined_inputs(config: ModelConfig) -> tuple[ModelInput, ...]:
    """Return the inputs of a model with ragged batches, with their whole shapes in the model as dims.

    Args:
        config: completed configuration; `is_ragged` is True.
    """
    sources = {tensor.name: len(tensor.dims) for tensor in config.input}
    computed = [
        ModelInput(name=name, data_type=part.data_type, dims=(-1, *dims))
        for part in config.batch_input
        for dims in [(sources[part.source_input[0]],) if part.kind == "BATCH_ITEM_SHAPE" else ()]
        for name in part.target_name
    ]
    sent = [
        tensor.model_copy(update={"dims": (-1,)} if tensor.allow_ragged_batch else _whole(tensor.dims, tensor.reshape))
        for tensor in config.input
    ]
    return (*sent, *computed)


def joined_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """Return the outputs with their whole shapes in the model as dims; without those that `batch_output` splits, whose shapes are
    free.
    """
    scattered = {name for part in config.batch_output for name in part.target_name}
    return tuple(
        tensor.model_copy(update=_whole(tensor.dims, tensor.reshape))
        for tensor in config.output
        if tensor.name not in scattered
    )


def _whole(dims: tuple[int, ...], reshape: Reshape | None) -> dict[str, Any]:
    """Return the fields of a tensor of rows with its whole shape in the model."""
    return {"dims": (-1, *(dims if reshape is None else reshape.shape)), "reshape": None}
