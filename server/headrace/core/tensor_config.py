"""Configuration of a model's tensors: inputs, outputs, pre- and postprocessing, warm-up data.

A configuration lists inputs and outputs as the model has them. With `preprocess.by: server` clients see the image input as UINT8
pixels; with `postprocess` they see the ranked classes instead of an output of scores. A file may contain either form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from headrace.core.config_base import (
    ConfigPart,
    Count,
    DataType,
    Dimension,
    Flag,
    Number,
    PositiveCount,
    Problem,
    Problems,
    Text,
    one_of,
)

# 50 megapixels, the limit of encoded images too.
MAX_SOURCE_PIXELS = 50_000_000

TensorName = Annotated[str, Field(strict=True, min_length=1)]
TensorFormat = Annotated[
    Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"],
    *one_of(("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"), "FORMAT_"),
]


def _as_channels(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) else value


Channels = Annotated[
    tuple[Number, ...],
    BeforeValidator(_as_channels),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}),
]


def shape_problems(tensor: ModelInput | ModelOutput) -> list[Problem]:
    """Check that `dims` can be reshaped to `reshape.shape`: equal product of fixed sizes, equal number of free sizes."""
    dims, reshape = tensor.dims, tensor.reshape
    if reshape is None:
        return []
    fixed = [math.prod(size for size in shape if size > 0) for shape in (dims, reshape.shape)]
    free = [sum(size < 0 for size in shape) for shape in (dims, reshape.shape)]
    if fixed[0] == fixed[1] and free[0] == free[1]:
        return []
    message = f"reshape {list(reshape.shape)} does not hold as many elements as dims {list(dims)}"
    return [Problem(("reshape",), message, "the sizes of both must multiply to the same number")]


class Reshape(ConfigPart):
    """The shape of a tensor in the model, if it differs from the one that clients see."""

    shape: tuple[Dimension, ...] = Field(default=(), description="Shape in the model, without the batch dimension.")


class ModelInput(ConfigPart):
    """One input of the model, as clients see it."""

    name: TensorName = Field(description="Name of the tensor in the model.")
    data_type: DataType = Field(
        default="", description="Element type, e.g. `TYPE_FP32` or `fp32`; read from the model if absent."
    )
    format: TensorFormat = Field(default="FORMAT_NONE", description="Order of an image's dimensions; informative only.")
    dims: tuple[Dimension, ...] = Field(
        default=(),
        description="Shape without the batch dimension (with it if `max_batch_size` is 0); -1 is any size. Read from "
        "the model if absent.",
    )
    reshape: Reshape | None = Field(default=None, description="Shape in the model, if it differs from `dims`.")
    optional: Flag = Field(
        default=False, description="Requests may omit this input; the model must have a default for it."
    )

    @model_validator(mode="after")
    def _check(self) -> ModelInput:
        problems = shape_problems(self)
        if self.format != "FORMAT_NONE" and self.dims and len(self.dims) != 3:
            message = f"{self.format} is for dims of 3 sizes, not {list(self.dims)}"
            problems.append(Problem(("format",), message, "remove format"))
        if problems:
            raise Problems(problems)
        return self


class ModelOutput(ConfigPart):
    """One output of the model, as clients see it."""

    name: TensorName = Field(description="Name of the tensor in the model.")
    data_type: DataType = Field(
        default="", description="Element type, e.g. `TYPE_FP32` or `fp32`; read from the model if absent."
    )
    dims: tuple[Dimension, ...] = Field(
        default=(),
        description="Shape without the batch dimension (with it if `max_batch_size` is 0); -1 is any size. Read from "
        "the model if absent.",
    )
    reshape: Reshape | None = Field(default=None, description="Shape in the model, if it differs from `dims`.")
    label_filename: Text = Field(
        default="",
        description="File in the model's folder with one class name per line, for the last dimension.",
    )

    @model_validator(mode="after")
    def _check(self) -> ModelOutput:
        problems = shape_problems(self)
        if problems:
            raise Problems(problems)
        return self


class Preprocess(ConfigPart):
    """Converts an image to the input tensor: decode, resize, crop, (pixel - mean) / std, layout."""

    input: Text = Field(default="", description="Name of the image input; optional for a model with one input.")
    color: Annotated[Literal["rgb", "gray"], *one_of(("rgb", "gray"))] = Field(
        default="rgb", description="Channels of the image: three (`rgb`) or one (`gray`)."
    )
    resize_short_side: PositiveCount = Field(
        default=256, description="Length of the shorter side after resizing, in pixels; the aspect ratio is kept."
    )
    crop: tuple[PositiveCount, PositiveCount] = Field(
        default=(224, 224), description="Height and width of the centre crop after resizing, in pixels."
    )
    interpolation: Annotated[Literal["bilinear", "bicubic"], *one_of(("bilinear", "bicubic"))] = Field(
        default="bilinear", description="Interpolation for resizing."
    )
    mean: Channels = Field(
        default=(0.0,), description="Subtracted from each pixel (0 to 255): one number, or one for each channel."
    )
    std: Channels = Field(
        default=(1.0,),
        description="Divides each pixel after `mean` is subtracted: one number, or one for each channel.",
    )
    layout: Annotated[Literal["nchw", "nhwc"], *one_of(("nchw", "nhwc"))] = Field(
        default="nchw",
        description="Order of the tensor's dimensions: channels before (`nchw`) or after (`nhwc`) height and width.",
    )
    by: Annotated[Literal["client", "server"], *one_of(("client", "server"))] = Field(
        default="client",
        description="`client`: requests contain the model's input tensor. `server`: requests contain pixels, UINT8 of "
        "[height, width, channels], a quarter of the bytes; the client decodes the file.",
    )
    source: tuple[PositiveCount, PositiveCount] | None = Field(
        default=None,
        description="With `by: server`: height and width of the pixels in a request, which are then resized and "
        "cropped. If absent, requests contain pixels of the size of `crop`, which are only normalised.",
    )

    @property
    def channels(self) -> int:
        """Channels of an image: 3 for "rgb", 1 for "gray"."""
        return 3 if self.color == "rgb" else 1

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Height, width and channels of the pixels in a request, with `by: server`."""
        return (*(self.source or self.crop), self.channels)

    @property
    def tensor(self) -> tuple[int, int, int]:
        """Shape of the model's image input, without the batch dimension."""
        height, width = self.crop
        return (self.channels, height, width) if self.layout == "nchw" else (height, width, self.channels)

    @model_validator(mode="after")
    def _check(self) -> Preprocess:
        channels = self.channels
        problems = [
            Problem((field,), f"{field} has {len(values)} numbers", f"write one number, or {channels} for {self.color}")
            for field, values in (("mean", self.mean), ("std", self.std))
            if len(values) not in (1, channels)
        ]
        if 0 in self.std:
            problems.append(
                Problem(("std",), "std divides the pixels and cannot be 0", "write 1.0 to leave them as they are")
            )
        if max(self.crop) > self.resize_short_side:
            message = (
                f"crop {list(self.crop)} is larger than the picture after resize_short_side {self.resize_short_side}"
            )
            problems.append(Problem(("crop",), message, "crop at most what resizing leaves"))
        problems += self._source_problems()
        if problems:
            raise Problems(problems)
        return self

    def _source_problems(self) -> list[Problem]:
        if self.source is None:
            return []
        if self.by == "client":
            message = "source is for pixels that the server prepares, and preprocess.by is client"
            return [Problem(("source",), message, "write by: server, or remove source")]
        if self.source[0] * self.source[1] > MAX_SOURCE_PIXELS:
            message = f"source {list(self.source)} has more than {MAX_SOURCE_PIXELS} pixels"
            return [Problem(("source",), message, "let clients send smaller pictures")]
        return []


class Postprocess(ConfigPart):
    """Replaces an output of class scores by probabilities, by the best classes, or by both."""

    output: Text = Field(
        default="", description="Name of the output with the scores; optional for a model with one output."
    )
    softmax: Flag = Field(default=False, description="Convert the scores of a row to probabilities.")
    top_k: Count = Field(
        default=0,
        description="Number of best classes for each row, best first, in the outputs named below, which replace the "
        "model's output. 0: the output keeps its name and all classes.",
    )
    scores: TensorName = Field(default="scores", description="Name of the output with the scores, FP32 [top_k].")
    classes: TensorName = Field(
        default="classes", description="Name of the output with the class numbers, INT32 [top_k]."
    )
    labels: TensorName = Field(
        default="labels",
        description="Name of the output with the class names, STRING [top_k]; present if the model's output has a label"
        " file.",
    )

    @model_validator(mode="after")
    def _check(self) -> Postprocess:
        if not self.softmax and not self.top_k:
            message = "postprocess has no effect"
            raise Problems([Problem((), message, "write softmax: true, a top_k, or both, or remove it")])
        if len({self.scores, self.classes, self.labels}) < 3:
            message = f"two outputs of postprocess have one name: {self.scores}, {self.classes}, {self.labels}"
            raise Problems([Problem((), message, "give scores, classes and labels names of their own")])
        return self


class WarmupInput(ConfigPart):
    """Data of one input for the warm-up."""

    data_type: DataType = Field(default="", description="Element type of the input.")
    dims: tuple[Dimension, ...] = Field(
        default=(), description="Shape without the batch dimension, without free sizes."
    )
    zero_data: Flag = Field(default=False, description="Use zeros.")
    random_data: Flag = Field(default=False, description="Use random values.")
    input_data_file: Text = Field(
        default="", description="Use the raw values of this file in the folder `warmup/` of the model."
    )

    @model_validator(mode="after")
    def _check(self) -> WarmupInput:
        if (self.zero_data, self.random_data, bool(self.input_data_file)).count(True) != 1:
            message = "a warm-up input has no data or several kinds of it"
            raise Problems([Problem((), message, "write exactly one of zero_data, random_data, input_data_file")])
        return self


class ModelWarmup(ConfigPart):
    """A request that every instance runs before the model is ready."""

    name: Text = Field(default="", description="Name in the log.")
    batch_size: PositiveCount = Field(default=1, description="Rows in the request.")
    inputs: dict[str, WarmupInput] = Field(default={}, description="Data by input name.")
    count: Count = Field(default=1, description="Number of runs; 0 means one, as in Triton.")


# Datatypes of preprocessed inputs and of scores.
FLOATS = ("TYPE_FP32", "TYPE_FP16")


def picture_input(preprocess: Preprocess | None, inputs: Sequence[ModelInput]) -> int | None:
    """Return the index of the input that the server preprocesses, None without one."""
    if preprocess is None or preprocess.by == "client":
        return None
    names = [tensor.name for tensor in inputs]
    if not preprocess.input:
        return 0 if len(names) == 1 else None
    return names.index(preprocess.input) if preprocess.input in names else None


def scores_output(postprocess: Postprocess | None, outputs: Sequence[ModelOutput]) -> int | None:
    """Return the index of the output with the scores for `postprocess`, None without one."""
    if postprocess is None:
        return None
    names = [tensor.name for tensor in outputs]
    if not postprocess.output:
        return 0 if len(names) == 1 else None
    return names.index(postprocess.output) if postprocess.output in names else None


def served_inputs(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
    """Return the inputs as clients send them."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or _is_served(inputs[index], preprocess):
        return inputs
    tensor = inputs[index]
    # A model without a batch dimension may still have an image input of shape (1, ...).
    dims = (*tensor.dims[:-3], *preprocess.pixels)
    served = ModelInput(
        name=tensor.name,
        data_type="TYPE_UINT8",
        dims=dims,
        format="FORMAT_NONE" if tensor.format == "FORMAT_NONE" else "FORMAT_NHWC",
        optional=tensor.optional,
    )
    return (*inputs[:index], served, *inputs[index + 1 :])


def served_outputs(postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...]) -> tuple[ModelOutput, ...]:
    """Return the outputs as clients receive them."""
    index = scores_output(postprocess, outputs)
    if postprocess is None or index is None:
        return outputs
    tensor = outputs[index]
    made: list[ModelOutput] = []
    if not postprocess.top_k:
        made.append(tensor.model_copy(update={"data_type": "TYPE_FP32", "reshape": None}))
    else:
        known = bool(tensor.dims) and tensor.dims[-1] > 0
        dims = (*tensor.dims[:-1], postprocess.top_k if known else -1)
        made += [
            ModelOutput(name=postprocess.scores, data_type="TYPE_FP32", dims=dims),
            ModelOutput(name=postprocess.classes, data_type="TYPE_INT32", dims=dims),
        ]
        if tensor.label_filename:
            name, file = postprocess.labels, tensor.label_filename
            made.append(ModelOutput(name=name, data_type="TYPE_STRING", dims=dims, label_filename=file))
    return (*outputs[:index], *made, *outputs[index + 1 :])


def model_inputs(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
    """Return the inputs as the model has them; an input in the form of clients gets no type and dims."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or not _is_served(inputs[index], preprocess):
        return inputs
    own = ModelInput(name=inputs[index].name, optional=inputs[index].optional)
    return (*inputs[:index], own, *inputs[index + 1 :])


def model_outputs(postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...]) -> tuple[ModelOutput, ...]:
    """Return the outputs as the model has them; outputs in the form of clients become the output of scores."""
    if postprocess is None or not postprocess.top_k or not postprocess.output:
        return outputs
    made = {postprocess.scores, postprocess.classes, postprocess.labels}
    names = [tensor.name for tensor in outputs]
    if postprocess.output in names or not {postprocess.scores, postprocess.classes} <= set(names):
        return outputs
    at = names.index(postprocess.scores)
    files = [tensor.label_filename for tensor in outputs if tensor.name == postprocess.labels]
    own = ModelOutput(name=postprocess.output, label_filename=files[0] if files else "")
    kept = [tensor for tensor in outputs if tensor.name not in made]
    before = sum(name not in made for name in names[:at])
    return (*kept[:before], own, *kept[before:])


def preprocess_problems(
    preprocess: Preprocess | None, inputs: tuple[ModelInput, ...], max_batch_size: int | None
) -> list[Problem]:
    """Check that the server can preprocess the images of a model.

    Args:
        preprocess: section `preprocess` of the configuration.
        inputs: inputs of the configuration; omitted types and dims are not checked.
        max_batch_size: value of the configuration, None before it is completed from the model.
    """
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or _is_served(inputs[index], preprocess):
        return []
    tensor = inputs[index]
    problems = []
    if tensor.data_type and tensor.data_type not in FLOATS:
        message = f'preprocess.by: server makes floats, input "{tensor.name}" is {tensor.data_type}'
        cure = f"export the model with one of {', '.join(FLOATS)}, or write by: client"
        problems.append(Problem(("preprocess", "by"), message, cure))
    if tensor.reshape is not None:
        message = f'preprocess.by: server makes the tensor that the model takes, input "{tensor.name}" has a reshape'
        problems.append(Problem(("input", index, "reshape"), message, "remove reshape and write the model's own dims"))
    elif "dims" in tensor.model_fields_set and not _takes(tensor.dims, preprocess.tensor, max_batch_size):
        message = (
            f"preprocess.by: server makes tensors of {list(preprocess.tensor)} ({preprocess.layout}), "
            f'input "{tensor.name}" takes {list(tensor.dims)}'
        )
        cure = "correct preprocess.crop, color or layout"
        problems.append(Problem(("preprocess", "by"), message, cure))
    return problems


def completed_problems(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> list[Problem]:
    """Check that the model does not take pixels itself, so that the server can preprocess; `inputs` are the model's."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or not _is_served(inputs[index], preprocess):
        return []
    message = f'preprocess.by: server makes floats, input "{inputs[index].name}" takes UINT8 pixels as they are'
    return [Problem(("preprocess", "by"), message, "write by: client")]


def postprocess_problems(
    postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...], max_batch_size: int | None
) -> list[Problem]:
    """Check that the scores of a model can be ranked; arguments as for `preprocess_problems`."""
    outputs = model_outputs(postprocess, outputs)
    if postprocess is None or not outputs:
        return []
    names = [tensor.name for tensor in outputs]
    index = scores_output(postprocess, outputs)
    if index is None:
        state = f'"{postprocess.output}" is not an output of the model' if postprocess.output else "is not named"
        message = f"the output that postprocess takes the scores from {state}"
        return [Problem(("postprocess",), message, f"write output: one of {', '.join(names)}")]
    tensor, problems = outputs[index], []
    if tensor.data_type and tensor.data_type not in FLOATS:
        message = f'postprocess takes scores from "{tensor.name}", which is {tensor.data_type}'
        problems.append(Problem(("postprocess",), message, f"name an output of {' or '.join(FLOATS)}"))
    if "dims" in tensor.model_fields_set:
        leading = 1 if max_batch_size in (0, None) else 0
        if not 1 <= len(tensor.dims) <= 1 + leading:
            message = f'postprocess takes one score a class, a row of "{tensor.name}" has the shape {list(tensor.dims)}'
            problems.append(Problem(("postprocess",), message, "give it dims of one size; reshape the model's own"))
        elif 0 < tensor.dims[-1] < postprocess.top_k:
            message = f'top_k is {postprocess.top_k}, "{tensor.name}" has {tensor.dims[-1]} classes'
            problems.append(Problem(("postprocess", "top_k"), message, f"write at most {tensor.dims[-1]}"))
    made = (postprocess.scores, postprocess.classes, postprocess.labels) if postprocess.top_k else ()
    for name in made:
        if name in names[:index] + names[index + 1 :]:
            message = f'postprocess makes an output "{name}", and the model has one of that name'
            problems.append(Problem(("postprocess",), message, "give it another name"))
    return problems


def _takes(dims: tuple[int, ...], tensor: tuple[int, ...], max_batch_size: int | None) -> bool:
    *leading, channels, height, width = dims if len(dims) >= 3 else (0, 0, 0)
    if leading and (max_batch_size or len(leading) > 1 or leading[0] not in (-1, 1)):
        return False
    return all(size in (-1, made) for size, made in zip((channels, height, width), tensor, strict=True))


def _is_served(tensor: ModelInput, preprocess: Preprocess) -> bool:
    """Return True for an input in the form that clients send."""
    return tensor.data_type == "TYPE_UINT8" and tensor.dims[-3:] == preprocess.pixels
