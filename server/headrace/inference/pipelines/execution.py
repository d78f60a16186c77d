"""Server-side preprocessing and postprocessing around a model: images to tensors, scores to probabilities and classes.

Both phases run on the instance's thread, immediately before and after the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import Postprocess, picture_input, scores_output
from headrace.core.tensor import BY_CONFIG_NAME, Array
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.runtimes.base import Execution
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.wrapped_execution import WrappedExecution

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_LOW = np.uint64(0xFFFFFFFF)


def softmax(scores: Floats) -> Floats:
    """Return the probabilities of the classes of each row.

    Args:
        scores: float32 (rows, classes).

    Returns:
        float32 (rows, classes); each row sums to 1.
    """
    shares: Floats = scores - scores.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    total: Floats = shares.sum(axis=1, keepdims=True)
    shares /= total
    return shares


def top_k(scores: Floats, count: int) -> Ints:
    """Return the indices of the best classes of each row, best first; of equal scores the lower index comes first.

    Args:
        scores: float32 (rows, classes).
        count: number of classes to return, at most `classes`.

    Returns:
        int32 (rows, count).
    """
    classes = scores.shape[1]
    # One integer for each class that orders by score, then by lower index. No two are equal, so a partition gives the
    # same result as a sort at a tenth of its cost.
    bits = (scores + np.float32(0)).view(np.int32)  # -0 becomes 0: they compare equal
    ascending = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
    keys = (ascending.astype(np.uint64) << np.uint64(32)) | (_LOW - np.arange(classes, dtype=np.uint64))
    best = np.partition(keys, classes - count, axis=1)[:, classes - count :]
    best.sort(axis=1)
    return (_LOW - (best[:, ::-1] & _LOW)).astype(np.int32)


__all__ = ["Steps", "steps_of"]


@dataclass(frozen=True, slots=True)
class Pixels:
    """Preprocessing of a model's image input.

    Attributes:
        name: name of the input.
        recipe: preprocessing steps.
        dtype: element type of the model's tensor.
        shape: shape of the model's tensor for one image, with a leading 1 if there is a batch dimension.
    """

    name: str
    recipe: ImageRecipe
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Postprocessing of a model's scores.

    Attributes:
        output: name of the model's output with the scores.
        postprocess: its configuration.
        labels: object array of `bytes`, the names of the classes; None without names.
        ranked: True if the GPU ranks the classes, and only the names are added here.
    """

    output: str
    postprocess: Postprocess
    labels: Array | None
    ranked: bool = False

    def apply(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the model's outputs with the scores replaced by the outputs of `postprocess`, in the same position."""
        results: dict[str, Array] = {}
        for name, array in outputs.items():
            if self.ranked:
                results[name] = array
                if name == self.postprocess.classes:
                    results |= self._label(array)
            elif name == self.output:
                results |= self._rank(array)
            else:
                results[name] = array
        return results

    def _rank(self, array: Array) -> dict[str, Array]:
        postprocess = self.postprocess
        scores = array.astype(np.float32).reshape(-1, array.shape[-1])
        if not postprocess.top_k:
            return {self.output: softmax(scores).reshape(array.shape)}
        # Ranked before the softmax, in which different scores can become equal.
        classes = top_k(scores, min(postprocess.top_k, scores.shape[1]))
        if postprocess.softmax:
            scores = softmax(scores)
        shape = (*array.shape[:-1], classes.shape[1])
        results: dict[str, Array] = {
            postprocess.scores: np.take_along_axis(scores, classes, axis=1).reshape(shape),
            postprocess.classes: classes.reshape(shape),
        }
        return results | self._label(results[postprocess.classes])

    def _label(self, classes: Array) -> dict[str, Array]:
        labels = self.labels
        return {} if labels is None else {self.postprocess.labels: labels[np.minimum(classes, labels.size - 1)]}


@dataclass(frozen=True, slots=True)
class Steps:
    """Preprocessing and postprocessing of one model.

    Attributes:
        pixels: preprocessing of its image input, None without one.
        ranking: postprocessing of its scores, None without it.
        batched: True if the tensors have a batch dimension.
    """

    pixels: Pixels | None
    ranking: Ranking | None
    batched: bool

    def on_gpu(self, pixels: bool, ranking: bool) -> Steps:
        """Return the steps that remain on the CPU if the model's own execution does the given ones.

        Args:
            pixels: the execution preprocesses the images.
            ranking: the execution ranks the classes.
        """
        remaining = self.ranking
        if remaining is not None and ranking:
            adds_labels = remaining.postprocess.top_k and remaining.labels is not None
            remaining = replace(remaining, ranked=True) if adds_labels else None
        return Steps(None if pixels else self.pixels, remaining, self.batched)

    def around(self, execution: Execution) -> Execution:
        """Wrap an execution, with its `reshape` applied, in the steps; return it unchanged if there are none."""
        if self.pixels is None and self.ranking is None:
            return execution
        return PictureExecution(execution, self)


class PictureExecution(WrappedExecution):
    """Execution that preprocesses images and ranks classes around another one; overlapped if that one is.

    Args:
        inner: the model's own execution.
        steps: preprocessing and postprocessing.

    Attributes:
        depth: the inner execution's depth; 1 if it is not overlapped.
        prompt: True if the inner execution never blocks and no image is preprocessed here.
    """

    def __init__(self, inner: Execution, steps: Steps) -> None:
        super().__init__(inner)
        self._pixels = pixels = steps.pixels
        self._ranking = steps.ranking
        self._free: list[Array] = []
        if not steps.batched:
            self.depth = 1
        if pixels is not None:
            self.prompt = self.any_thread = False  # preprocessing an image takes CPU time
            # Imported here, so that servers without image models do not load Pillow.
            from headrace.inference.pipelines.image import PixelSteps

            self._pixel_steps = PixelSteps(pixels.recipe, pixels.dtype)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run a batch: inputs as clients send them, outputs as clients receive them."""
        pixels = self._pixels
        if pixels is not None and pixels.name in inputs:
            sent = inputs[pixels.name]
            tensor = self._pixel_steps.apply(sent.reshape(-1, *pixels.recipe.pixels))
            inputs = {**inputs, pixels.name: tensor if len(pixels.shape) == tensor.ndim else tensor[0]}
        return self._client_outputs(self.inner.run(inputs))

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Begin a batch with a pixel buffer of this execution; all other inputs use the inner batch's memory."""
        pixels = self._pixels
        if pixels is None or pixels.name not in like:
            inner = self._overlapped().begin(like, rows)
            return InFlightBatch(inner.inputs, rows, inner, inner.device, inner.resident_inputs)
        tensor: Array = np.empty(pixels.shape, pixels.dtype)
        inner = self._overlapped().begin({**like, pixels.name: tensor}, rows)
        buffer = self._free.pop() if self._free else np.empty((0,), np.uint8)
        if buffer.shape[0] < rows:
            buffer = np.empty((rows, *pixels.recipe.pixels), np.uint8)
        return InFlightBatch({**inner.inputs, pixels.name: buffer[:rows]}, rows, (inner, buffer))

    def launch(self, batch: InFlightBatch) -> None:
        """Preprocess the images into the inner batch's memory and launch it."""
        inner, pixels = self._release_pixels(batch), self._pixels
        if pixels is not None and inner is not batch.state:
            try:
                self._pixel_steps.apply(batch.inputs[pixels.name], inner.inputs[pixels.name])
            except BaseException:
                self._overlapped().discard(inner)
                raise
        self._overlapped().launch(inner)

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Wait for the batch and return the outputs as clients receive them."""
        return self._client_outputs(self._overlapped().finish(self._inner_batch(batch)))

    def discard(self, batch: InFlightBatch) -> None:
        """Discard the inner batch."""
        self._overlapped().discard(self._release_pixels(batch))

    def _release_pixels(self, batch: InFlightBatch) -> InFlightBatch:
        """Return the inner batch and free the pixel buffer for the next one: the model does not read it."""
        if isinstance(batch.state, tuple):
            self._free.append(batch.state[1])
        return self._inner_batch(batch)

    def _client_outputs(self, outputs: dict[str, Array]) -> dict[str, Array]:
        return outputs if self._ranking is None else self._ranking.apply(outputs)

    def _inner_batch(self, batch: InFlightBatch) -> InFlightBatch:
        inner = batch.state[0] if isinstance(batch.state, tuple) else batch.state
        assert isinstance(inner, InFlightBatch), "the batch was begun by another execution"
        return inner


def steps_of(config: ModelConfig, labels: dict[str, tuple[str, ...]]) -> Steps:
    """Return the preprocessing and postprocessing of a model's configuration.

    Args:
        config: complete configuration.
        labels: class names by output name.
    """
    pixels = ranking = None
    index = picture_input(config.preprocess, config.input)
    if index is not None and config.preprocess is not None:
        tensor = config.input[index]
        recipe = ImageRecipe.from_mapping(config.preprocess.model_dump())
        # For one image; a model without a batch dimension may still take a leading dimension of 1.
        shape = recipe.shape if config.max_batch_size or len(tensor.dims) > 3 else recipe.shape[1:]
        pixels = Pixels(tensor.name, recipe, BY_CONFIG_NAME[tensor.data_type].dtype, shape)
    index_of_scores = scores_output(config.postprocess, config.output)
    if index_of_scores is not None and config.postprocess is not None:
        output = config.output[index_of_scores]
        names = labels.get(output.name) if output.label_filename else None
        class_names = None if names is None else _class_names(names, output.dims[-1])
        ranking = Ranking(output.name, config.postprocess, class_names)
    return Steps(pixels, ranking, config.max_batch_size > 0)


def _class_names(labels: tuple[str, ...], classes: int) -> Array:
    """One name for each class; b"" for a class without a line in the label file."""
    named: Array = np.full(max(classes, len(labels)) + 1, b"", dtype=object)
    named[: len(labels)] = [label.encode() for label in labels]
    return named
