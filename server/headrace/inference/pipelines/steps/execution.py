"""Runs built-in steps as executions of a backend, so that they have queues, deadlines and statistics like any model.

`BuiltinBackend` is loaded in the server's process. `DecoderBackend` is loaded in child processes, which decode images for all
pipelines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.core.errors import BadRequest, ConfigError, Finding
from headrace.core.heap import keep_freed_memory
from headrace.core.tensor import Array
from headrace.inference.pipelines import image as pictures
from headrace.inference.pipelines.execution import softmax, top_k
from headrace.inference.pipelines.steps.decode_image import Allocate, ImageDecoder
from headrace.inference.pipelines.steps.nms import suppress
from headrace.inference.pipelines.steps.options import RESIZE, NmsOptions, RankOptions, read_options
from headrace.inference.pipelines.steps.tokenize import Tokenizer
from headrace.runtimes.base import Backend, Execution, LoadedModel

Compute = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Computes a step on inputs with a batch dimension of at least one row."""


class BuiltinBackend(Backend):
    """Loads built-in steps; see `headrace.runtimes.base.Backend`."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> BuiltinModel:
        """Load a step.

        Args:
            file: folder of the pipeline, for the files that options name.
            instances: number of executions.
            parameters: from `parameters_of`.

        Raises:
            ConfigError: a file of the step is missing or invalid, or its library is not installed.
        """
        kind, options = parameters["kind"], json.loads(parameters["options"])
        return BuiltinModel(kind, _compute_of(kind, options, file), parameters["batched"] == "true")


def parameters_of(kind: str, options: Mapping[str, Any], batched: bool) -> dict[str, str]:
    """Return the parameters with which `BuiltinBackend` loads a step.

    Args:
        kind: name of the built-in step.
        options: checked options.
        batched: True if its tensors have a batch dimension.
    """
    return {"kind": kind, "options": json.dumps(options), "batched": "true" if batched else "false"}


class BuiltinModel(LoadedModel):
    """A loaded step; see `headrace.runtimes.base.LoadedModel`."""

    def __init__(self, kind: str, compute: Compute, batched: bool) -> None:
        self._kind, self._compute, self._batched = kind, compute, batched

    def execution(self, index: int) -> Execution:
        """Create an execution; all share the loaded files, which are not changed."""
        return BuiltinExecution(self._compute, self._batched, self._kind in _SHORT)


class BuiltinExecution(Execution):
    """Runs a step; see `headrace.runtimes.base.Execution`.

    Args:
        compute: computes rows.
        batched: True if tensors have a batch dimension.
        any_thread: True if a run takes microseconds, so that the event loop may run it.
    """

    def __init__(self, compute: Compute, batched: bool, any_thread: bool) -> None:
        self._compute, self._batched, self.any_thread = compute, batched, any_thread

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run the step on inputs of one batch."""
        if self._batched:
            return self._compute(inputs)
        outputs = self._compute({name: array[np.newaxis] for name, array in inputs.items()})
        return {name: array[0] for name, array in outputs.items()}


# Memory that a process keeps for the next image, in bytes: an image of six megapixels, its copies and its tensor.
_DECODER_HEAP_BYTES = 64 << 20
# Steps whose options a process keeps ready; more than servers have.
_MAX_DECODERS = 64


class DecoderBackend(Backend):
    """Decodes images for any `decode_image` step; see `headrace.runtimes.base.Backend`.

    `headrace.python.decoder_pool` names it.
    """

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> DecoderModel:
        """Return the model, which has no file."""
        keep_freed_memory(_DECODER_HEAP_BYTES)
        return DecoderModel()


class DecoderModel(LoadedModel):
    """The decoder of pictures as a loaded model: it has no file."""

    def execution(self, index: int) -> Execution:
        """Create an execution."""
        return DecoderExecution()


class DecoderExecution(Execution):
    """Decodes images with the options that come with them; see `headrace.runtimes.base.Execution`.

    Inputs: `image` (files) and `options` (JSON of the step's options, [1]). Outputs: those of the step, with a batch dimension.

    Attributes:
        allocate: see `headrace.runtimes.isolated.child.ComputesInPlace`.
    """

    def __init__(self) -> None:
        self._decoders: dict[bytes, tuple[str, ImageDecoder]] = {}
        self.allocate: Allocate = np.empty

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Decode the images of one request."""
        key = inputs["options"][0]
        decoder = self._decoders.get(key)
        if decoder is None:
            if len(self._decoders) >= _MAX_DECODERS:
                self._decoders.clear()
            decoder = self._decoders[key] = _decoder(json.loads(key))
        name, step = decoder
        return {name: _decoded(step, inputs["image"], self.allocate)}


def _decoder(options: Mapping[str, Any]) -> tuple[str, ImageDecoder]:
    """Return the name of the output and the decoder of a step."""
    recipe = read_options(RESIZE, options[RESIZE]) if RESIZE in options else None
    return "image" if recipe is None else "tensor", ImageDecoder(read_options("decode_image", options), recipe)


# Steps of a few microseconds for each row.
_SHORT = ("softmax", "top_k")


def _compute_of(kind: str, options: Mapping[str, Any], folder: Path) -> Compute:
    if kind == RESIZE:
        return _resize(read_options(RESIZE, options))
    if kind == "tokenize":
        step = read_options(kind, options)
        tokenizer = Tokenizer(folder / step.file, step)
        return lambda inputs: dict(tokenizer.tokenize(inputs["text"]))
    if kind == "softmax":
        return lambda inputs: {"probabilities": _probabilities(inputs["scores"])}
    if kind == "nms":
        return lambda inputs: _suppressed(inputs, read_options(kind, options))
    return _ranking(read_options(kind, options), folder)


def _decoded(decoder: ImageDecoder, files: Array, allocate: Allocate) -> Array:
    images = files.reshape(-1).tolist()
    if len(images) == 1:
        return decoder.decode(images[0], allocate)[np.newaxis]
    rows = [decoder.decode(data) for data in images]
    if len({row.shape for row in rows}) > 1:
        raise BadRequest(
            "the images of one request have different sizes: send them one by one, or resize them in the pipeline"
        )
    return np.stack(rows)


def _probabilities(array: Array) -> Array:
    scores = np.asarray(array, np.float32)
    if not scores.shape[1]:
        raise BadRequest("softmax needs at least one score, the tensor has none")
    return softmax(scores)


def _resize(recipe: Any) -> Compute:
    def compute(inputs: Mapping[str, Array]) -> dict[str, Array]:
        rows = [_prepared(pixels, recipe) for pixels in inputs["image"]]
        return {"tensor": np.concatenate(rows)}

    return compute


def _prepared(pixels: Array, recipe: Any) -> Array:
    if 0 in pixels.shape:
        raise BadRequest(f"the image has shape {list(pixels.shape)}: it has no pixels")
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return pictures.prepare(image, recipe)


def _suppressed(inputs: Mapping[str, Array], options: NmsOptions) -> dict[str, Array]:
    boxes, scores = inputs["boxes"][0], inputs["scores"][0]
    classes = inputs["classes"][0] if "classes" in inputs else None
    kept = suppress(boxes, scores, classes, options)
    numbers = np.zeros(kept.shape, np.int64) if classes is None else classes[kept]
    found = {"boxes": boxes[kept], "scores": scores[kept], "classes": numbers, "indices": kept}
    return {name: array[np.newaxis] for name, array in found.items()}


def _ranking(options: RankOptions, folder: Path) -> Compute:
    names = _read_names(folder / options.labels) if options.labels else None

    def compute(inputs: Mapping[str, Array]) -> dict[str, Array]:
        scores = np.asarray(inputs["scores"], np.float32)
        if scores.shape[1] < options.k:
            raise BadRequest(f"top_k needs at least {options.k} scores, the tensor has {scores.shape[1]}")
        # Ranked before the softmax, in which different scores can become equal.
        classes = top_k(scores, options.k)
        values = softmax(scores) if options.softmax else scores
        outputs: dict[str, Array] = {"classes": classes, "scores": np.take_along_axis(values, classes, axis=1)}
        if names is not None:
            outputs["labels"] = names[np.minimum(classes, names.size - 1)]
        return outputs

    return compute


def _read_names(file: Path) -> Array:
    """Return the class names of a file as an object array of `bytes`, and b"" for classes without a line."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        message, cure = f"the labels cannot be read: {error.strerror}", "put the file into the pipeline's folder"
        raise ConfigError([Finding(file.name, None, message, cure)]) from error
    if lines and not lines[-1].strip():
        lines.pop()
    names: Array = np.empty(len(lines) + 1, object)
    names[:] = [*(line.rstrip(b"\r") for line in lines), b""]
    return names
