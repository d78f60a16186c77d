"""Server-side preprocess and postprocess around a model: images to tensors, scores to probabilities and classes.

Both phases run in the instance's own thread, right before and right after the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.backends.base import Execution, InFlightBatch, LoadedModel, PipelinedExecution, is_pipelined, never_blocks
from headrace.core.model_config import ModelConfig
from headrace.core.tensor import BY_CONFIG_NAME, Array
from headrace.core.tensor_config import Postprocess, picture_input, scores_output
from headrace.pipelines.recipe import ImageRecipe

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_LOW = np.uint64(0xFFFFFFFF)


def softmax(scores: Floats) -> Floats:
    """Probabilities of the classes of each row.

    Args:
        scores: float32 (rows, classes).

    Returns:
        float32 (rows, classes), each row summing up to 1.
    """
    shares: Floats = scores - scores.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    total: Floats = shares.sum(axis=1, keepdims=True)
    shares /= total
    return shares


def top_k(scores: Floats, count: int) -> Ints:
    """The numbers of the best classes of each row, best first; of equal scores the lower number comes first.

    Args:
        scores: float32 (rows, classes).
        count: how many, at most the number of classes.

    Returns:
        int32 (rows, count).
    """
    classes = scores.shape[1]
    # One whole number a class that sorts as its score does, then as the lower class: so no two are equal and a partition, which
    # costs a tenth of sorting, is as good.
    bits = (scores + np.float32(0)).view(np.int32)  # -0 becomes 0, which it equals
    ascending = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
    keys = (ascending.astype(np.uint64) << np.uint64(32)) | (_LOW - np.arange(classes, dtype=np.uint64))
    best = np.partition(keys, classes - count, axis=1)[:, classes - count :]
    best.sort(axis=1)
    return (_LOW - (best[:, ::-1] & _LOW)).astype(np.int32)


__all__ = ["PictureModel", "Steps", "steps_of", "with_pictures"]


@dataclass(frozen=True, slots=True)
class Pixels:
    """How the picture's input is made.

    Attributes:
        name: of the input.
        recipe: how.
        dtype: of the model's tensor.
        shape: of the model's tensor, with a 1 in front where it has a batch dimension.
    """

    name: str
    recipe: ImageRecipe
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is made of the scores.

    Attributes:
        output: the model's output.
        asked: of the configuration.
        labels: object array of `bytes`, the classes' names; None where they have none.
        ranked: True where the GPU ranks, and only names are wanting.
    """

    output: str
    postprocess: Postprocess
    labels: Array | None
    ranked: bool = False

    def apply(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs of the model with the scores replaced, in their place."""
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
        # Ranked before the softmax, which makes equal what was not.
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
    """What is done around a model.

    Attributes:
        pixels: how its picture is made, None if it comes as the model takes it.
        ranking: what is made of its scores, None if they go out as they are.
        batched: True if there is a batch dimension in front.
    """

    pixels: Pixels | None
    ranking: Ranking | None
    batched: bool

    def on_gpu(self, pixels: bool, ranking: bool) -> Steps:
        """What is left to do where the model's own execution prepares the pictures, or ranks the classes."""
        remaining = self.ranking
        if remaining is not None and ranking:
            remaining = (
                replace(remaining, ranked=True)
                if remaining.postprocess.top_k and remaining.labels is not None
                else None
            )
        return Steps(None if pixels else self.pixels, remaining, self.batched)


class PictureExecution:
    """An execution behind pictures and classes, pipelined if that one is; see `headrace.backends.base`.

    Args:
        inner: the model's own execution.
        pixels: how its picture is made, None if it comes as the model takes it.
        ranking: what is made of its scores, None if they go out as they are.
        batched: True if there is a batch dimension in front.

    Attributes:
        depth: the inner one's; 1 if it is not pipelined.
    """

    def __init__(self, inner: Execution, pixels: Pixels | None, ranking: Ranking | None, batched: bool) -> None:
        self._inner = inner
        self._pixels = pixels
        self._ranking = ranking
        self._free: list[Array] = []
        self.depth = inner.depth if batched and is_pipelined(inner) else 1
        self.prompt = pixels is None and never_blocks(inner)  # preparing a picture is work
        if pixels is not None:
            # Pillow is loaded where a picture is, not by every server.
            from headrace.pipelines.image import PixelSteps

            self._steps = PixelSteps(pixels.recipe, pixels.dtype)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs as callers see them, for inputs as callers send them."""
        pixels = self._pixels
        if pixels is not None and pixels.name in inputs:
            sent = inputs[pixels.name]
            tensor = self._steps.apply(sent.reshape(-1, *pixels.recipe.pixels))
            inputs = {**inputs, pixels.name: tensor if len(pixels.shape) == tensor.ndim else tensor[0]}
        return self._client_outputs(self._inner.run(inputs))

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """A batch with memory of ours for the pixels; everything else goes to the inner one's."""
        pixels = self._pixels
        if pixels is None or pixels.name not in like:
            inner = self._pipelined().begin(like, rows)
            return InFlightBatch(inner.inputs, rows, inner, inner.device, inner.resident_inputs)
        tensor: Array = np.empty(pixels.shape, pixels.dtype)
        inner = self._pipelined().begin({**like, pixels.name: tensor}, rows)
        buffer = self._free.pop() if self._free else np.empty((0,), np.uint8)
        if buffer.shape[0] < rows:
            buffer = np.empty((rows, *pixels.recipe.pixels), np.uint8)
        return InFlightBatch({**inner.inputs, pixels.name: buffer[:rows]}, rows, (inner, buffer))

    def launch(self, batch: InFlightBatch) -> None:
        """Prepare the pictures straight into the inner batch, and launch that."""
        inner, pixels = self._release_pixels(batch), self._pixels
        if pixels is not None and inner is not batch.handle:
            try:
                self._steps.apply(batch.inputs[pixels.name], inner.inputs[pixels.name])
            except BaseException:
                self._pipelined().discard(inner)
                raise
        self._pipelined().launch(inner)

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """The outputs as callers see them."""
        return self._client_outputs(self._pipelined().finish(_inner(batch)))

    def discard(self, batch: InFlightBatch) -> None:
        """Discard the inner batch."""
        self._pipelined().discard(self._release_pixels(batch))

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()

    def _release_pixels(self, batch: InFlightBatch) -> InFlightBatch:
        """The inner batch; the pixels' memory is free for the next one, since the model has no need of it."""
        if isinstance(batch.handle, tuple):
            self._free.append(batch.handle[1])
        return _inner(batch)

    def _client_outputs(self, outputs: dict[str, Array]) -> dict[str, Array]:
        return outputs if self._ranking is None else self._ranking.apply(outputs)

    def _pipelined(self) -> PipelinedExecution:
        if not is_pipelined(self._inner):
            raise TypeError("the execution behind this one takes one batch at a time")
        return self._inner


def _inner(batch: InFlightBatch) -> InFlightBatch:
    inner = batch.handle[0] if isinstance(batch.handle, tuple) else batch.handle
    assert isinstance(inner, InFlightBatch), "a batch of ours carries the inner one"
    return inner


@dataclass(frozen=True, slots=True)
class PictureModel:
    """A model whose executions prepare pictures and rank classes; see `headrace.backends.base.LoadedModel`."""

    inner: LoadedModel
    pixels: Pixels | None
    ranking: Ranking | None
    batched: bool

    def execution(self, index: int) -> Execution:
        """The inner execution of instance `index`, behind pictures and classes."""
        return PictureExecution(self.inner.execution(index), self.pixels, self.ranking, self.batched)

    def close(self) -> None:
        """Close the inner one."""
        self.inner.close()


def steps_of(config: ModelConfig, labels: dict[str, tuple[str, ...]]) -> Steps:
    """What a configuration wants done around its model.

    Args:
        config: complete.
        labels: class names by output name.
    """
    pixels = ranking = None
    index = picture_input(config.preprocess, config.input)
    if index is not None and config.preprocess is not None:
        tensor = config.input[index]
        recipe = ImageRecipe.from_mapping(config.preprocess.model_dump())
        # Of one picture; a model without a batch dimension may want it as a batch of one nevertheless.
        shape = recipe.shape if config.max_batch_size or len(tensor.dims) > 3 else recipe.shape[1:]
        pixels = Pixels(tensor.name, recipe, BY_CONFIG_NAME[tensor.data_type].dtype, shape)
    at = scores_output(config.postprocess, config.output)
    if at is not None and config.postprocess is not None:
        output = config.output[at]
        names = labels.get(output.name) if output.label_filename else None
        ranking = Ranking(
            output.name, config.postprocess, None if names is None else _class_names(names, output.dims[-1])
        )
    return Steps(pixels, ranking, config.max_batch_size > 0)


def with_pictures(model: LoadedModel, steps: Steps) -> LoadedModel:
    """The model as its configuration has callers see it; itself where they see it as it is.

    Args:
        model: behind its `reshape`.
        steps: to be done around it.
    """
    if steps.pixels is None and steps.ranking is None:
        return model
    return PictureModel(model, steps.pixels, steps.ranking, steps.batched)


def _class_names(labels: tuple[str, ...], classes: int) -> Array:
    """A name for every class; b"" for one that the label file has no line for."""
    named: Array = np.full(max(classes, len(labels)) + 1, b"", dtype=object)
    named[: len(labels)] = [label.encode() for label in labels]
    return named
