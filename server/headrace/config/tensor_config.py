"""Configuration of a model's tensors: inputs, outputs, pre- and postprocessing, warm-up data.

A configuration lists inputs and outputs as the model has them. With `preprocess.by: server` clients see the image input as UINT8
pixels; with `postprocess` they see the ranked classes instead of an output of scores. A file may contain either form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from headrace.config.config_base import (
    ConfigPart,
    Count,
    DataType,
    Dimension,
    Flag,
    Number,
    OneOf,
    PositiveCount,
    Problem,
    Text,
    option,
)
from headrace.core.tensor import BY_CONFIG_NAME

# 50 megapixels, the limit of encoded images too.
MAX_SOURCE_PIXELS = 50_000_000

TensorName = Annotated[str, Field(strict=True, min_length=1)]
TensorFormat = Annotated[Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"], OneOf("FORMAT_")]


Channels = Annotated[
    tuple[Number, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}),
]


def shape_problems(tensor: ModelInput | ModelOutput) -> Iterator[Problem]:
    """Check that `dims` can be reshaped to `reshape.shape`: equal product of fixed sizes, equal number of free sizes."""
    dims, reshape = tensor.dims, tensor.reshape
    if reshape is None:
        return
    fixed = [math.prod(size for size in shape if size > 0) for shape in (dims, reshape.shape)]
    free = [sum(size < 0 for size in shape) for shape in (dims, reshape.shape)]
    if fixed[0] != fixed[1] or free[0] != free[1]:
        message = f"reshape {list(reshape.shape)} does not hold as many elements as dims {list(dims)}"
        yield Problem(("reshape",), message, "the sizes of both must multiply to the same number")


class Reshape(ConfigPart):
    """The shape of a tensor in the model, if it differs from the one that clients see."""

    shape: tuple[Dimension, ...] = option((), "Shape in the model, without the batch dimension.")


class ModelInput(ConfigPart):
    """One input of the model, as clients see it."""

    name: TensorName = Field(description="Name of the tensor in the model.")
    data_type: DataType = option("", "Element type, e.g. `TYPE_FP32` or `fp32`; read from the model if absent.")
    format: TensorFormat = option("FORMAT_NONE", "Order of an image's dimensions; informative only.")
    dims: tuple[Dimension, ...] = option(
        (),
        "Shape without the batch dimension (with it if `max_batch_size` is 0); -1 is any size. Read from the model if "
        "absent.",
    )
    reshape: Reshape | None = option(None, "Shape in the model, if it differs from `dims`.")
    allow_ragged_batch: Flag = option(
        False, "Requests of different shapes share a batch: their elements are joined without padding."
    )
    optional: Flag = option(False, "Requests may omit this input; the model must have a default for it.")

    def _problems(self) -> Iterator[Problem]:
        yield from shape_problems(self)
        if self.format != "FORMAT_NONE" and self.dims and len(self.dims) != 3:
            yield Problem(("format",), f"{self.format} is for dims of 3 sizes, not {list(self.dims)}", "remove format")


class ModelOutput(ConfigPart):
    """One output of the model, as clients see it."""

    name: TensorName = Field(description="Name of the tensor in the model.")
    data_type: DataType = option("", "Element type, e.g. `TYPE_FP32` or `fp32`; read from the model if absent.")
    dims: tuple[Dimension, ...] = option(
        (),
        "Shape without the batch dimension (with it if `max_batch_size` is 0); -1 is any size. Read from the model if "
        "absent.",
    )
    reshape: Reshape | None = option(None, "Shape in the model, if it differs from `dims`.")
    label_filename: Text = option(
        "", "File in the model's folder with one class name per line, for the last dimension."
    )

    def _problems(self) -> Iterator[Problem]:
        return shape_problems(self)


class Preprocess(ConfigPart):
    """Converts an image to the input tensor: decode, resize, crop, (pixel - mean) / std, layout."""

    input: Text = option("", "Name of the image input; optional for a model with one input.")
    color: Annotated[Literal["rgb", "gray"], OneOf()] = option(
        "rgb", "Channels of the image: three (`rgb`) or one (`gray`)."
    )
    resize_short_side: PositiveCount = option(
        256, "Length of the shorter side after resizing, in pixels; the aspect ratio is kept."
    )
    crop: tuple[PositiveCount, PositiveCount] = option(
        (224, 224), "Height and width of the centre crop after resizing, in pixels."
    )
    interpolation: Annotated[Literal["bilinear", "bicubic"], OneOf()] = option(
        "bilinear", "Interpolation for resizing."
    )
    mean: Channels = option((0.0,), "Subtracted from each pixel (0 to 255): one number, or one for each channel.")
    std: Channels = option(
        (1.0,), "Divides each pixel after `mean` is subtracted: one number, or one for each channel."
    )
    layout: Annotated[Literal["nchw", "nhwc"], OneOf()] = option(
        "nchw", "Order of the tensor's dimensions: channels before (`nchw`) or after (`nhwc`) height and width."
    )
    by: Annotated[Literal["client", "server"], OneOf()] = option(
        "client",
        "`client`: requests contain the model's input tensor. `server`: requests contain pixels, UINT8 of [height, "
        "width, channels], a quarter of the bytes; the client decodes the file.",
    )
    source: tuple[PositiveCount, PositiveCount] | None = option(
        None,
        "With `by: server`: height and width of the pixels in a request, which are then resized and cropped. If "
        "absent, requests contain pixels of the size of `crop`, which are only normalised.",
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

    def _problems(self) -> Iterator[Problem]:
        channels, crop, source = self.channels, list(self.crop), self.source
        for field, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                cure = f"write one number, or {channels} for {self.color}"
                yield Problem((field,), f"{field} has {len(values)} numbers", cure)
        if 0 in self.std:
            yield Problem(("std",), "std divides the pixels and cannot be 0", "write 1.0 to leave them as they are")
        if max(crop) > self.resize_short_side:
            message = f"crop {crop} is larger than the picture after resize_short_side {self.resize_short_side}"
            yield Problem(("crop",), message, "crop at most what resizing leaves")
        if source is not None and self.by == "client":
            message = "source is for pixels that the server prepares, and preprocess.by is client"
            yield Problem(("source",), message, "write by: server, or remove source")
        elif source is not None and source[0] * source[1] > MAX_SOURCE_PIXELS:
            message = f"source {list(source)} has more than {MAX_SOURCE_PIXELS} pixels"
            yield Problem(("source",), message, "let clients send smaller pictures")


class Postprocess(ConfigPart):
    """Replaces an output of class scores by probabilities, by the best classes, or by both."""

    output: Text = option("", "Name of the output with the scores; optional for a model with one output.")
    softmax: Flag = option(False, "Convert the scores of a row to probabilities.")
    top_k: Count = option(
        0,
        "Number of best classes for each row, best first, in the outputs named below, which replace the model's "
        "output. 0: the output keeps its name and all classes.",
    )
    scores: TensorName = option("scores", "Name of the output with the scores, FP32 [top_k].")
    classes: TensorName = option("classes", "Name of the output with the class numbers, INT32 [top_k].")
    labels: TensorName = option(
        "labels",
        "Name of the output with the class names, STRING [top_k]; present if the model's output has a label file.",
    )

    def _problems(self) -> Iterator[Problem]:
        if not self.softmax and not self.top_k:
            yield Problem((), "postprocess has no effect", "write softmax: true, a top_k, or both, or remove it")
        elif len({self.scores, self.classes, self.labels}) < 3:
            message = f"two outputs of postprocess have one name: {self.scores}, {self.classes}, {self.labels}"
            yield Problem((), message, "give scores, classes and labels names of their own")


class WarmupInput(ConfigPart):
    """Data of one input for the warm-up."""

    data_type: DataType = option("", "Element type of the input.")
    dims: tuple[Dimension, ...] = option((), "Shape without the batch dimension, without free sizes.")
    zero_data: Flag = option(False, "Use zeros.")
    random_data: Flag = option(False, "Use random values.")
    input_data_file: Text = option("", "Use the raw values of this file in the folder `warmup/` of the model.")

    def _problems(self) -> Iterator[Problem]:
        if (self.zero_data, self.random_data, bool(self.input_data_file)).count(True) != 1:
            message = "a warm-up input has no data or several kinds of it"
            yield Problem((), message, "write exactly one of zero_data, random_data, input_data_file")


class ModelWarmup(ConfigPart):
    """A request that every instance runs before the model is ready."""

    name: Text = option("", "Name in the log.")
    batch_size: PositiveCount = option(1, "Rows in the request.")
    inputs: dict[str, WarmupInput] = option({}, "Data by input name.")
    count: Count = option(1, "Number of runs; 0 means one, as in Triton.")


# Datatypes of preprocessed inputs and of scores.
FLOATS = ("TYPE_FP32", "TYPE_FP16")


def picture_input(preprocess: Preprocess | None, inputs: Sequence[ModelInput]) -> int | None:
    """Return the index of the input that the server preprocesses, None without one."""
    return None if preprocess is None or preprocess.by == "client" else _index(preprocess.input, inputs)


def scores_output(postprocess: Postprocess | None, outputs: Sequence[ModelOutput]) -> int | None:
    """Return the index of the output with the scores for `postprocess`, None without one."""
    return None if postprocess is None else _index(postprocess.output, outputs)


def _index(name: str, tensors: Sequence[ModelInput] | Sequence[ModelOutput]) -> int | None:
    """Return the index of the tensor with a name; "" is the only tensor. None without such a tensor."""
    names = [tensor.name for tensor in tensors]
    if not name:
        return 0 if len(names) == 1 else None
    return names.index(name) if name in names else None


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
    if not postprocess.top_k:
        served = [tensor.model_copy(update={"data_type": "TYPE_FP32", "reshape": None})]
    else:
        is_fixed = bool(tensor.dims) and tensor.dims[-1] > 0
        dims = (*tensor.dims[:-1], postprocess.top_k if is_fixed else -1)
        served = [
            ModelOutput(name=postprocess.scores, data_type="TYPE_FP32", dims=dims),
            ModelOutput(name=postprocess.classes, data_type="TYPE_INT32", dims=dims),
        ]
        if tensor.label_filename:
            name, file = postprocess.labels, tensor.label_filename
            served.append(ModelOutput(name=name, data_type="TYPE_STRING", dims=dims, label_filename=file))
    return (*outputs[:index], *served, *outputs[index + 1 :])


def model_inputs(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
    """Return the inputs as the model has them; an input in the form of clients gets no type and dims."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or not _is_served(inputs[index], preprocess):
        return inputs
    tensor = ModelInput(name=inputs[index].name, optional=inputs[index].optional)
    return (*inputs[:index], tensor, *inputs[index + 1 :])


def model_outputs(postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...]) -> tuple[ModelOutput, ...]:
    """Return the outputs as the model has them; outputs in the form of clients become the output of scores."""
    if postprocess is None or not postprocess.top_k or not postprocess.output:
        return outputs
    ranked = {postprocess.scores, postprocess.classes, postprocess.labels}
    names = [tensor.name for tensor in outputs]
    if postprocess.output in names or not {postprocess.scores, postprocess.classes} <= set(names):
        return outputs
    files = [tensor.label_filename for tensor in outputs if tensor.name == postprocess.labels]
    scores = ModelOutput(name=postprocess.output, label_filename=files[0] if files else "")
    others = [tensor for tensor in outputs if tensor.name not in ranked]
    before = sum(name not in ranked for name in names[: names.index(postprocess.scores)])
    return (*others[:before], scores, *others[before:])


def preprocess_problems(
    preprocess: Preprocess | None, inputs: tuple[ModelInput, ...], max_batch_size: int | None
) -> Iterator[Problem]:
    """Check that the server can preprocess the images of a model.

    Args:
        preprocess: section `preprocess` of the configuration.
        inputs: inputs of the configuration; omitted types and dims are not checked.
        max_batch_size: value of the configuration, None before it is completed from the model.
    """
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or _is_served(inputs[index], preprocess):
        return
    tensor = inputs[index]
    if tensor.data_type and tensor.data_type not in FLOATS:
        message = f'preprocess.by: server makes floats, input "{tensor.name}" is {tensor.data_type}'
        cure = f"export the model with one of {', '.join(FLOATS)}, or write by: client"
        yield Problem(("preprocess", "by"), message, cure)
    if tensor.reshape is not None:
        message = f'preprocess.by: server makes the tensor that the model takes, input "{tensor.name}" has a reshape'
        yield Problem(("input", index, "reshape"), message, "remove reshape and write the model's own dims")
    elif "dims" in tensor.model_fields_set and not _takes(tensor.dims, preprocess.tensor, max_batch_size):
        message = (
            f"preprocess.by: server makes tensors of {list(preprocess.tensor)} ({preprocess.layout}), "
            f'input "{tensor.name}" takes {list(tensor.dims)}'
        )
        yield Problem(("preprocess", "by"), message, "correct preprocess.crop, color or layout")


def completed_problems(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> Iterator[Problem]:
    """Check that the model does not take pixels itself, so that the server can preprocess; `inputs` are the model's."""
    index = picture_input(preprocess, inputs)
    if preprocess is not None and index is not None and _is_served(inputs[index], preprocess):
        message = f'preprocess.by: server makes floats, input "{inputs[index].name}" takes UINT8 pixels as they are'
        yield Problem(("preprocess", "by"), message, "write by: client")


def postprocess_problems(
    postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...], max_batch_size: int | None
) -> Iterator[Problem]:
    """Check that the scores of a model can be ranked; arguments as for `preprocess_problems`."""
    outputs = model_outputs(postprocess, outputs)
    if postprocess is None or not outputs:
        return
    names = [tensor.name for tensor in outputs]
    index = scores_output(postprocess, outputs)
    if index is None:
        state = f'"{postprocess.output}" is not an output of the model' if postprocess.output else "is not named"
        message = f"the output that postprocess takes the scores from {state}"
        yield Problem(("postprocess",), message, f"write output: one of {', '.join(names)}")
        return
    tensor = outputs[index]
    if tensor.data_type and tensor.data_type not in FLOATS:
        message = f'postprocess takes scores from "{tensor.name}", which is {tensor.data_type}'
        yield Problem(("postprocess",), message, f"name an output of {' or '.join(FLOATS)}")
    if "dims" in tensor.model_fields_set:
        leading = 1 if max_batch_size in (0, None) else 0
        if not 1 <= len(tensor.dims) <= 1 + leading:
            message = f'postprocess takes one score a class, a row of "{tensor.name}" has the shape {list(tensor.dims)}'
            yield Problem(("postprocess",), message, "give it dims of one size; reshape the model's own")
        elif 0 < tensor.dims[-1] < postprocess.top_k:
            message = f'top_k is {postprocess.top_k}, "{tensor.name}" has {tensor.dims[-1]} classes'
            yield Problem(("postprocess", "top_k"), message, f"write at most {tensor.dims[-1]}")
    for name in (postprocess.scores, postprocess.classes, postprocess.labels) if postprocess.top_k else ():
        if name in names[:index] + names[index + 1 :]:
            message = f'postprocess makes an output "{name}", and the model has one of that name'
            yield Problem(("postprocess",), message, "give it another name")


def _takes(dims: tuple[int, ...], tensor: tuple[int, ...], max_batch_size: int | None) -> bool:
    *leading, channels, height, width = dims if len(dims) >= 3 else (0, 0, 0)
    if leading and (max_batch_size or len(leading) > 1 or leading[0] not in (-1, 1)):
        return False
    return all(allowed in (-1, size) for allowed, size in zip((channels, height, width), tensor, strict=True))


def _is_served(tensor: ModelInput, preprocess: Preprocess) -> bool:
    """Return True for an input in the form that clients send."""
    return tensor.data_type == "TYPE_UINT8" and tensor.dims[-3:] == preprocess.pixels


def row_bytes_of(tensors: Iterable[ModelInput | ModelOutput]) -> int:
    """Return the bytes of a row of tensors; free dimensions count as 1."""
    return sum(
        math.prod(max(size, 1) for size in tensor.dims) * BY_CONFIG_NAME[tensor.data_type].size_bytes
        for tensor in tensors
    )
