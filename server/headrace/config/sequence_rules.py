"""Compares the control inputs of `sequence_batching` with the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.config.onnx_model import OnnxSignature
from headrace.core.config_base import Problem
from headrace.core.model_config import ModelConfig
from headrace.core.sequence_config import control_inputs


def without_controls(config: ModelConfig, signature: OnnxSignature) -> OnnxSignature:
    """Return a signature without the inputs that the server fills for sequences."""
    names = {tensor.name for tensor in control_inputs(config.sequence_batching)}
    if not names:
        return signature
    return replace(signature, inputs=tuple(tensor for tensor in signature.inputs if tensor.name not in names))


def control_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[Problem]:
    """Yield the differences between the control inputs and the inputs of the model."""
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    for index, control in enumerate(control_inputs(config.sequence_batching)):
        loc, match = ("sequence_batching", "control_input", index), inputs.get(control.name)
        if match is None:
            message = f'control_input "{control.name}" is not an input of the model'
            yield Problem((*loc, "name"), message, f"the model has {', '.join(inputs)}")
            continue
        if match.data_type != control.data_type:
            message = (
                f'control_input "{control.name}" has the type {control.data_type}, the model has {match.onnx_type}'
            )
            yield Problem((*loc, "control"), message, f"write values, or the data_type of the id, of {match.data_type}")
        expected = (-1, 1) if config.max_batch_size else (1,)
        shape = match.shape
        if shape is not None and (
            len(shape) != len(expected) or any(size not in (-1, fit) for size, fit in zip(shape, expected, strict=True))
        ):
            message = f'control_input "{control.name}" has the shape {list(shape)} in the model'
            yield Problem((*loc, "name"), message, f"export the model with the shape {list(expected)} for it")
