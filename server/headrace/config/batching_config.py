"""Configuration of batches of requests with different shapes: Triton's `batch_input` and `batch_output`, and `pad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from headrace.config.config_base import ConfigPart, Count, DataType, Number, OneOf, PositiveCount, Problem, option
from headrace.config.tensor_config import ModelInput, ModelOutput, TensorName
from headrace.core.tensor import BF16, BY_CONFIG_NAME, BYTES


class BatchInput(ConfigPart):
    """An input of the model that the server computes from the requests of a batch."""

    kind: Annotated[
        Literal[
            "BATCH_ELEMENT_COUNT",
            "BATCH_ACCUMULATED_ELEMENT_COUNT",
            "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
            "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
            "BATCH_ITEM_SHAPE",
            "BATCH_ITEM_SHAPE_FLATTEN",
        ],
        OneOf("BATCH_"),
    ] = option("BATCH_ELEMENT_COUNT", "What is computed from the source inputs.")
    target_name: tuple[TensorName, ...] = option((), "Names of the model's inputs that receive the values.")
    data_type: DataType = option("", "Element type of the values.")
    source_input: tuple[TensorName, ...] = option((), "Inputs of the requests from which the values are computed.")


class BatchOutput(ConfigPart):
    """An output of the model that is split by the shapes of an input."""

    target_name: tuple[TensorName, ...] = option((), "Names of the outputs that are split.")
    kind: Annotated[Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"], OneOf("BATCH_")] = option(
        "BATCH_SCATTER_WITH_INPUT_SHAPE", "How the outputs are split."
    )
    source_input: tuple[TensorName, ...] = option((), "Inputs whose shapes split the outputs.")


class Padding(ConfigPart):
    """Pads inputs so that requests of different length share a batch, e.g. `{input_ids: 0, multiple_of: 16}`."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "number"}})

    values: dict[Annotated[str, Field(strict=True, min_length=1)], Number] = option(
        {}, "Padding values by input. Each other key of `pad` is read as an entry of it."
    )
    multiple_of: PositiveCount = option(
        16, "Padded lengths are multiples of this; requests with the same padded length share a batch."
    )
    axis: Count = option(1, "Dimension that is padded; 0 is the batch.")

    @model_validator(mode="before")
    @classmethod
    def _collect_values(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        inputs = {name: item for name, item in value.items() if name not in cls.model_fields}
        if not inputs:
            return value
        fields = {name: item for name, item in value.items() if name in cls.model_fields}
        present = fields.get("values", {})
        return {**fields, "values": {**present, **inputs}} if isinstance(present, dict) else fields


_COMPUTED_TYPES = ("TYPE_INT32", "TYPE_FP32")


def batching_problems(
    inputs: tuple[ModelInput, ...],
    outputs: tuple[ModelOutput, ...],
    batch_inputs: tuple[BatchInput, ...],
    batch_outputs: tuple[BatchOutput, ...],
    max_batch_size: int | None,
) -> Iterator[Problem]:
    """Check ragged inputs, `batch_input` and `batch_output`.

    Args:
        inputs: of the configuration; names are not checked if there are none.
        outputs: of the configuration; names are not checked if there are none.
        batch_inputs: of the configuration.
        batch_outputs: of the configuration.
        max_batch_size: None if the configuration does not have it.
    """
    ragged = [(index, tensor) for index, tensor in enumerate(inputs) if tensor.allow_ragged_batch]
    if not max_batch_size and (ragged or batch_inputs or batch_outputs):
        feature = "allow_ragged_batch" if ragged else "batch_input" if batch_inputs else "batch_output"
        cure = "write the most rows of a batch, and dynamic_batching: {}"
        yield Problem(("max_batch_size",), f"{feature} needs max_batch_size above 0", cure)
    for index, tensor in ragged:
        if tensor.reshape is not None or tensor.optional:
            field = "optional" if tensor.optional else "reshape"
            message = f'input "{tensor.name}" has allow_ragged_batch and {field}'
            yield Problem(("input", index, field), message, "remove one of them")
    names = {tensor.name for tensor in inputs}
    targets: set[str] = set()
    for index, computed in enumerate(batch_inputs):
        yield from _source_problems(("batch_input", index), computed, names)
        if computed.data_type not in _COMPUTED_TYPES:
            message = f"batch_input has the data type {computed.data_type or 'none'}"
            yield Problem(("batch_input", index, "data_type"), message, f"write {' or '.join(_COMPUTED_TYPES)}")
        for name in computed.target_name:
            if name in names or name in targets:
                message = (
                    f'batch_input names "{name}", which {"requests have" if name in names else "another one computes"}'
                )
                cure = "remove it from input: the server computes it" if name in names else "name each target once"
                yield Problem(("batch_input", index, "target_name"), message, cure)
            targets.add(name)
    output_names, split = {tensor.name for tensor in outputs}, set[str]()
    for index, scattered in enumerate(batch_outputs):
        yield from _source_problems(("batch_output", index), scattered, names)
        for name in scattered.target_name:
            if (output_names and name not in output_names) or name in split:
                reason = "another one splits too" if name in split else "is not an output of the configuration"
                message = f'batch_output names "{name}", which {reason}'
                cure = "name each target once" if name in split else f"write one of {', '.join(sorted(output_names))}"
                yield Problem(("batch_output", index, "target_name"), message, cure)
            split.add(name)


def _source_problems(loc: tuple[str, int], part: BatchInput | BatchOutput, names: set[str]) -> Iterator[Problem]:
    field = loc[0]
    if not part.target_name:
        yield Problem((*loc, "target_name"), f"{field} names no target", "write target_name: [NAME]")
    if len(part.source_input) != 1:
        message = f"{field} has {len(part.source_input)} source inputs, {part.kind} takes one"
        yield Problem((*loc, "source_input"), message, "write source_input: [NAME]")
    for name in part.source_input:
        if names and name not in names:
            message = f'{field} names the source input "{name}", which is not an input of the configuration'
            yield Problem((*loc, "source_input"), message, f"write one of {', '.join(sorted(names))}")


def padding_problems(
    pad: Padding | None, inputs: tuple[ModelInput, ...], max_batch_size: int | None
) -> Iterator[Problem]:
    """Check `pad` against the inputs; those without `dims` or a data type are not checked.

    Args:
        pad: None without padding.
        inputs: of the configuration; names are not checked if there are none.
        max_batch_size: None if the configuration does not have it.
    """
    if pad is None:
        return
    if max_batch_size == 0:
        cure = "write the most rows of a batch, and dynamic_batching: {}"
        yield Problem(("max_batch_size",), "pad needs max_batch_size above 0", cure)
    if not pad.values:
        yield Problem(("pad",), "pad names no input", "write the padding value of each input, e.g. input_ids: 0")
    if pad.axis == 0:
        yield Problem(
            ("pad", "axis"), "axis 0 is the batch, which is not padded", "write the axis of the length, e.g. 1"
        )
        return
    by_name = {tensor.name: tensor for tensor in inputs}
    for name, value in pad.values.items():
        tensor = by_name.get(name)
        if tensor is None:
            if by_name:
                message = f'pad names "{name}", which is not an input'
                yield Problem(("pad",), message, f"write one of {', '.join(by_name)}")
            continue
        yield from _padded_input_problems(tensor, pad.axis, value)


def _padded_input_problems(tensor: ModelInput, axis: int, value: float) -> Iterator[Problem]:
    name = f'input "{tensor.name}"'
    if tensor.allow_ragged_batch or tensor.reshape is not None:
        field = "allow_ragged_batch" if tensor.allow_ragged_batch else "reshape"
        yield Problem(("pad",), f"{name} has {field}, so it is not padded", f"remove it from pad, or remove {field}")
    elif "dims" in tensor.model_fields_set and (len(tensor.dims) < axis or tensor.dims[axis - 1] != -1):
        message = f"{name} has dims {list(tensor.dims)}, without a free size at axis {axis}"
        yield Problem(("pad",), message, "write -1 at that place of dims, or the axis that is free (0 is the batch)")
    if not tensor.data_type:
        return
    datatype = BY_CONFIG_NAME[tensor.data_type]
    if datatype is BYTES or datatype is BF16:
        yield Problem(("pad",), f"{name} is {tensor.data_type}, which is not padded", "remove it from pad")
    elif datatype.dtype.kind != "f" and (value != int(value) or int(value) != np.array(value).astype(datatype.dtype)):
        yield Problem(
            ("pad",), f"the padding value {value} is no {tensor.data_type} of {name}", "write a value of its type"
        )
