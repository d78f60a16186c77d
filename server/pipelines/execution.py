"""Pictures in, classes out: what stands between a model and its callers where the server prepares and ranks.

Both steps run in the instance's own thread, right before and right after the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.backends.base import Execution, LoadedModel
from server.core.model_config import ModelConfig
from server.core.picture_config import picture_input, scores_output
from server.core.tensor import BY_CONFIG_NAME, Array
from server.core.tensor_config import Postprocess
from server.pipelines.ranking import softmax, top_k
from server.pipelines.recipe import ImageRecipe

__all__ = ["PictureModel", "with_pictures"]


@dataclass(frozen=True, slots=True)
class Pixels:
    """How the picture's input is made.

    Attributes:
        name: of the input.
        recipe: how.
        dtype: of the model's tensor.
        rank: of the model's tensor, with a batch dimension where it has one.
    """

    name: str
    recipe: ImageRecipe
    dtype: np.dtype[np.generic]
    rank: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is made of the scores.

    Attributes:
        output: the model's output.
        asked: of the configuration.
        labels: object array of `bytes`, the classes' names; None where they have none.
    """

    output: str
    asked: Postprocess
    labels: Array | None

    def apply(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs of the model with the scores replaced, in their place."""
        made: dict[str, Array] = {}
        for name, array in outputs.items():
            if name == self.output:
                made |= self._made(array)
            else:
                made[name] = array
        return made

    def _made(self, array: Array) -> dict[str, Array]:
        asked = self.asked
        scores = array.astype(np.float32).reshape(-1, array.shape[-1])
        if not asked.top_k:
            return {self.output: softmax(scores).reshape(array.shape)}
        # Ranked before the softmax, which makes equal what was not.
        classes = top_k(scores, min(asked.top_k, scores.shape[1]))
        if asked.softmax:
            scores = softmax(scores)
        shape = (*array.shape[:-1], classes.shape[1])
        made: dict[str, Array] = {
            asked.scores: np.take_along_axis(scores, classes, axis=1).reshape(shape),
            asked.classes: classes.reshape(shape),
        }
        if self.labels is not None:
            made[asked.labels] = self.labels[np.minimum(classes, self.labels.size - 1)].reshape(shape)
        return made


class PictureExecution:
    """An execution behind pictures and classes; see `server.backends.base.Execution`."""

    def __init__(self, inner: Execution, pixels: Pixels | None, ranking: Ranking | None) -> None:
        self._inner = inner
        self._pixels = pixels
        self._ranking = ranking
        if pixels is not None:
            # Pillow is loaded where a picture is, not by every server.
            from server.pipelines.pixels import PixelSteps

            self._steps = PixelSteps(pixels.recipe, pixels.dtype)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs as callers see them, for inputs as callers send them."""
        pixels = self._pixels
        if pixels is not None and pixels.name in inputs:
            sent = inputs[pixels.name]
            tensor = self._steps.apply(sent.reshape(-1, *pixels.recipe.pixels))
            inputs = {**inputs, pixels.name: tensor if pixels.rank == tensor.ndim else tensor[0]}
        outputs = self._inner.run(inputs)
        return outputs if self._ranking is None else self._ranking.apply(outputs)

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()


@dataclass(frozen=True, slots=True)
class PictureModel:
    """A model whose executions prepare pictures and rank classes; see `server.backends.base.LoadedModel`."""

    inner: LoadedModel
    pixels: Pixels | None
    ranking: Ranking | None

    def execution(self, index: int) -> Execution:
        """The inner execution of instance `index`, behind pictures and classes."""
        return PictureExecution(self.inner.execution(index), self.pixels, self.ranking)

    def close(self) -> None:
        """Close the inner one."""
        self.inner.close()


def with_pictures(model: LoadedModel, config: ModelConfig, labels: dict[str, tuple[str, ...]]) -> LoadedModel:
    """The model as its configuration has callers see it; itself where they see it as it is.

    Args:
        model: behind its `reshape`.
        config: complete.
        labels: class names by output name.
    """
    pixels = ranking = None
    index = picture_input(config.preprocess, config.input)
    if index is not None and config.preprocess is not None:
        tensor = config.input[index]
        recipe = ImageRecipe.from_mapping(config.preprocess.model_dump())
        rank = len(tensor.dims) + (config.max_batch_size > 0)
        pixels = Pixels(tensor.name, recipe, BY_CONFIG_NAME[tensor.data_type].dtype, rank)
    at = scores_output(config.postprocess, config.output)
    if at is not None and config.postprocess is not None:
        output = config.output[at]
        names = labels.get(output.name) if output.label_filename else None
        ranking = Ranking(output.name, config.postprocess, None if names is None else _names(names, output.dims[-1]))
    return model if pixels is None and ranking is None else PictureModel(model, pixels, ranking)


def _names(labels: tuple[str, ...], classes: int) -> Array:
    """A name for every class; b"" for one that the label file has no line for."""
    named: Array = np.full(max(classes, len(labels)) + 1, b"", dtype=object)
    named[: len(labels)] = [label.encode() for label in labels]
    return named
