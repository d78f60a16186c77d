"""What callers see of a model whose pictures the server prepares and whose scores it ranks, and what contradicts that.

A configuration tells its inputs and outputs as the model has them. With `preprocess.by: server` callers see the picture's input
as UINT8 pixels, with `postprocess` an output of scores as what is made of it. A file may be written either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.config_base import Problem
from headrace.core.tensor_config import ModelInput, ModelOutput, Postprocess, Preprocess

# What pixels can be turned into, and what can be ranked.
FLOATS = ("TYPE_FP32", "TYPE_FP16")


def picture_input(preprocess: Preprocess | None, inputs: Sequence[ModelInput]) -> int | None:
    """Index of the input whose pictures the server prepares, None where it prepares none."""
    if preprocess is None or preprocess.by == "client":
        return None
    names = [tensor.name for tensor in inputs]
    if not preprocess.input:
        return 0 if len(names) == 1 else None
    return names.index(preprocess.input) if preprocess.input in names else None


def scores_output(postprocess: Postprocess | None, outputs: Sequence[ModelOutput]) -> int | None:
    """Index of the output that `postprocess` takes the scores from, None where there is none."""
    if postprocess is None:
        return None
    names = [tensor.name for tensor in outputs]
    if not postprocess.output:
        return 0 if len(names) == 1 else None
    return names.index(postprocess.output) if postprocess.output in names else None


def served_inputs(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
    """The inputs as callers see them."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or _is_served(inputs[index], preprocess):
        return inputs
    tensor = inputs[index]
    # Without a batch dimension a model may still want one picture as a batch of one.
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
    """The outputs as callers see them."""
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


def own_inputs(preprocess: Preprocess | None, inputs: tuple[ModelInput, ...]) -> tuple[ModelInput, ...]:
    """The inputs as the model has them; one that is written as callers see it has its type and dims left open."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or not _is_served(inputs[index], preprocess):
        return inputs
    own = ModelInput(name=inputs[index].name, optional=inputs[index].optional)
    return (*inputs[:index], own, *inputs[index + 1 :])


def own_outputs(postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...]) -> tuple[ModelOutput, ...]:
    """The outputs as the model has them; those written as callers see them become the one they are made from."""
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
    """Why the server cannot prepare the pictures of a model.

    Args:
        preprocess: of the configuration.
        inputs: likewise; what they leave out contradicts nothing.
        max_batch_size: likewise, None if it is still to be found out.
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
    """Why the server cannot prepare the pictures of a model that takes pixels itself; `inputs` are complete, as the model's."""
    index = picture_input(preprocess, inputs)
    if preprocess is None or index is None or not _is_served(inputs[index], preprocess):
        return []
    message = f'preprocess.by: server makes floats, input "{inputs[index].name}" takes UINT8 pixels as they are'
    return [Problem(("preprocess", "by"), message, "write by: client")]


def postprocess_problems(
    postprocess: Postprocess | None, outputs: tuple[ModelOutput, ...], max_batch_size: int | None
) -> list[Problem]:
    """Why the outputs of a model cannot be ranked; arguments as for `preprocess_problems`."""
    outputs = own_outputs(postprocess, outputs)
    if postprocess is None or not outputs:
        return []
    names = [tensor.name for tensor in outputs]
    index = scores_output(postprocess, outputs)
    if index is None:
        told = f'"{postprocess.output}" is not an output of the model' if postprocess.output else "is not told"
        message = f"the output that postprocess takes the scores from {told}"
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
    """True for an input that is written as callers see it."""
    return tensor.data_type == "TYPE_UINT8" and tensor.dims[-3:] == preprocess.pixels
