"""Compares `sequence_batching` with the model: control inputs, states, and the backend of iterative sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.config.config_base import Location, Problem
from headrace.config.model_config import ModelConfig
from headrace.config.onnx_model import OnnxSignature, TensorSignature
from headrace.config.sequence_config import SequenceState, control_inputs, state_tensors
from headrace.core.tensor import fits_shape


def without_sequence_tensors(config: ModelConfig, signature: OnnxSignature) -> OnnxSignature:
    """Return a signature as clients see it: without the inputs that the server fills for sequences, and without state outputs.

    A state output that the configuration lists as an output stays.
    """
    state_inputs, state_outputs = state_tensors(config.sequence_batching)
    inputs = {tensor.name for tensor in (*control_inputs(config.sequence_batching), *state_inputs)}
    outputs = {tensor.name for tensor in state_outputs}.difference(tensor.name for tensor in config.output)
    if not inputs and not outputs:
        return signature
    return replace(
        signature,
        inputs=tuple(tensor for tensor in signature.inputs if tensor.name not in inputs),
        outputs=tuple(tensor for tensor in signature.outputs if tensor.name not in outputs),
    )


def iterative_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problem of iterative sequences of a model whose requests cannot be scheduled again.

    Args:
        config: configuration, identity completed.
    """
    if config.is_iterative and (config.kind, config.backend) != ("python", "python"):
        message = f'iterative_sequence is for the code of Python models, and the backend is "{config.backend}"'
        cure = (
            "remove it and send each step as a request, or write the model as model.py with request.set_release_flags()"
        )
        yield Problem(("sequence_batching", "iterative_sequence"), message, cure)


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
        if shape is not None and not fits_shape(expected, shape):
            message = f'control_input "{control.name}" has the shape {list(shape)} in the model'
            yield Problem((*loc, "name"), message, f"export the model with the shape {list(expected)} for it")


def state_backend_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield a problem if the backend of a model with states does not have them; `config` has its identity."""
    sequences = config.sequence_batching
    if sequences is not None and sequences.state and config.kind not in ("onnx", "plan"):
        message = f'state is for ONNX and TensorRT models, and the backend is "{config.backend}"'
        cure = "keep the state in the code of the model, by the correlation id: see docs/sequences.md"
        yield Problem(("sequence_batching", "state"), message, cure)


def state_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[Problem]:
    """Yield the differences between the states and the tensors of the model."""
    sequences = config.sequence_batching
    if sequences is None or not sequences.state:
        return
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    for index, state in enumerate(sequences.state):
        loc: Location = ("sequence_batching", "state", index)
        sides = (("input", state.input_name, inputs), ("output", state.output_name, outputs))
        for side, name, tensors in sides:
            match = tensors.get(name)
            if match is None:
                message = f'state "{name}" is not an {side} of the model'
                yield Problem((*loc, f"{side}_name"), message, f"the model has {', '.join(tensors)}")
            else:
                yield from _differences(state, side, match, loc, config.max_batch_size > 0)
        for index_of_output, tensor in enumerate(config.output):
            if tensor.name == state.output_name and tensor.reshape is not None:
                message = f'output "{tensor.name}" is a state and has a reshape'
                yield Problem(("output", index_of_output, "reshape"), message, "remove reshape")
    if not config.output:
        message = "all outputs of the model are states, which clients do not get"
        yield Problem(("output",), message, "list those in output that clients may read")


def _differences(
    state: SequenceState, side: str, match: TensorSignature, loc: Location, batched: bool
) -> Iterator[Problem]:
    """Yield the differences between a state and one of its tensors."""
    if match.data_type != state.data_type:
        message = f'state "{match.name}" has the type {state.data_type}, the model has {match.onnx_type}'
        yield Problem(
            (*loc, "data_type"), message, f"write {match.data_type}" if match.data_type else "remove the state"
        )
    shape = match.shape
    if shape is None:
        return
    if batched and (not shape or shape[0] != -1):
        message = f'max_batch_size needs a free first dimension, state "{match.name}" has the shape {list(shape)} in the model'
        cure = "write max_batch_size: 0, or export the model with a dynamic batch dimension"
        yield Problem(("max_batch_size",), message, cure)
        return
    dims = shape[1:] if batched else shape
    # A fixed size of an input must be that of the state. A state with a free size takes any size of an output.
    fits = all(
        dim in (-1, size) or (side == "output" and size == -1) for size, dim in zip(state.dims, dims, strict=False)
    )
    if len(state.dims) != len(dims) or not fits:
        suffix = " behind the batch dimension" if batched else ""
        message = f'state "{match.name}" has dims {list(state.dims)}, the model has {list(dims)}{suffix}'
        yield Problem((*loc, "dims"), message, f"write {list(dims)}")
