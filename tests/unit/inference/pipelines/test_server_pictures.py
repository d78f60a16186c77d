"""The CPU's steps from pixels to tensors and from scores to classes, against Pillow, the client's path and plain NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.core.tensor import Array
from headrace.inference.pipelines.execution import PictureExecution, softmax, steps_of, top_k
from headrace.inference.pipelines.image import PixelSteps, prepare, to_pixels
from headrace.inference.pipelines.recipe import ImageRecipe, Resampling, axis
from headrace.runtimes.base import Execution, LoadedModel
from headrace.runtimes.overlapped import InFlightBatch, is_overlapped
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from tests.support.examples import examples
from tests.support.kernel_reference import resample

rng = np.random.default_rng(11)


def image_of(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


sides = st.integers(1, 70)


@st.composite
def recipes(draw: st.DrawFn) -> ImageRecipe:
    short = draw(sides)
    color = draw(st.sampled_from(["rgb", "gray"]))
    return ImageRecipe(
        color=color,
        resize_short_side=short,
        crop=(draw(st.integers(1, short)), draw(st.integers(1, short))),
        interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
        mean=(123.7, 116.3, 103.5) if color == "rgb" else (127.0,),
        std=(58.4, 57.1, 57.4) if color == "rgb" else (3.0,),
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        by="server",
        source=draw(st.one_of(st.none(), st.tuples(sides, sides))),
    )


def expected(pixels: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """The client's tensors; without a source the pixels are the crop already."""
    if recipe.source is None:
        scaled = (pixels.astype(np.float32) - np.float32(recipe.mean)) / np.float32(recipe.std)
        return scaled.transpose(0, 3, 1, 2) if recipe.layout == "nchw" else scaled
    return np.concatenate([prepare(image_of(picture), recipe) for picture in pixels])


@given(recipes(), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_a_batch_matches_client_side_preprocessing(recipe: ImageRecipe, rows: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows, *recipe.pixels), dtype=np.uint8)
    tensor = PixelSteps(recipe).apply(pixels)
    assert tensor.flags.c_contiguous
    assert np.array_equal(tensor, expected(pixels, recipe))
    half = PixelSteps(recipe, np.float16).apply(pixels)
    assert half.dtype == np.float16
    assert np.array_equal(half, expected(pixels, recipe).astype(np.float16))


# The weights that round to 0 at the edge of a bicubic kernel are dropped, so the first row of taps begins below the second's.
DESCENDING = ImageRecipe(resize_short_side=3, crop=(3, 1), interpolation="bicubic", by="server", source=(12, 1))


@given(recipes(), st.integers(0, 2**32 - 1))
@example(DESCENDING, 0)
@settings(max_examples=examples(60), deadline=None)
def test_the_tables_resize_as_pillow_does(recipe: ImageRecipe, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, recipe.pixels, dtype=np.uint8)
    got = resample(pixels, Resampling.of(recipe)).astype(int)
    if recipe.source is None:
        assert np.array_equal(got, pixels)
        return
    height, width = recipe.source
    size = recipe.crop[::-1]
    kind = Image.Resampling.BILINEAR if recipe.interpolation == "bilinear" else Image.Resampling.BICUBIC
    pillow = np.asarray(image_of(pixels).resize(size, kind, box=recipe.window(height, width)), int).reshape(got.shape)
    if np.array_equal(got, pillow):
        return
    # Pillow began with the vertical pass, as its versions do for tall pictures by rules of their own: the same tables in that
    # order give its bits, and ours are as near as rounding in between (and of bicubic clipping) lets them be.
    tables, saved = Resampling.of(recipe), recipe.interpolation
    lower = resample(pixels, Resampling(tables.down, axis(width, 0, width, width, saved)))
    other = resample(lower, Resampling(axis(size[1], 0, size[1], size[1], saved), tables.across))
    assert np.array_equal(other, pillow)
    assert np.abs(got - pillow).max() <= (1 if saved == "bilinear" else 48)


def test_a_photographs_size_is_resized_to_pillows_bits() -> None:
    recipe = ImageRecipe(by="server", source=(480, 640))
    pixels = rng.integers(0, 256, recipe.pixels, dtype=np.uint8)
    plain = ImageRecipe(mean=(0.0,), std=(1.0,), layout="nhwc")
    assert np.array_equal(resample(pixels, Resampling.of(recipe)), prepare(image_of(pixels), plain)[0])


def test_bytes_sent_for_an_image() -> None:
    image = image_of(rng.integers(0, 256, (300, 500, 3), dtype=np.uint8))
    recipe = ImageRecipe(by="server", mean=(127.0,), std=(64.0,))
    pixels = to_pixels(image, recipe)
    assert np.array_equal(PixelSteps(recipe).apply(pixels), prepare(image, recipe))
    larger = ImageRecipe(by="server", source=(256, 256))
    assert to_pixels(image, larger).shape == (1, 256, 256, 3)
    # A square of the short side's length, from the middle: then the server only crops.
    middle = image.crop((100, 0, 400, 300)).resize((256, 256), Image.Resampling.BILINEAR)
    # (At its edges the resized whole looks at its neighbours, which a part that was cut out has lost.)
    assert np.array_equal(to_pixels(image, larger)[0, :, 2:-2], np.asarray(middle)[:, 2:-2])
    assert Resampling.of(larger).is_copy


scores = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    elements=st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, 1.0]),
)


@given(scores, st.data())
@settings(max_examples=examples(80), deadline=None)
def test_the_best_classes_are_sorted_and_ties_by_index(table: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, table.shape[1]))
    assert np.array_equal(top_k(table, count), np.argsort(-table, axis=1, kind="stable")[:, :count])
    exact = np.exp(table.astype(np.float64) - table.max(axis=1, keepdims=True))
    assert np.allclose(softmax(table), exact / exact.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)


def test_infinite_scores_rank_first_and_last() -> None:
    table = np.array([[0, -np.inf, np.inf, 3]], np.float32)
    assert top_k(table, 4).tolist() == [[2, 3, 0, 1]]


class Model(Execution, LoadedModel):
    """y = the mean of each picture's channels, then 0, 1, ... for the classes behind them."""

    def __init__(self) -> None:
        self.seen: list[Array] = []

    def execution(self, index: int) -> Model:
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        tensor = np.array(inputs["x"])
        self.seen.append(tensor)
        means = tensor.mean(axis=(-2, -1))
        classes = np.broadcast_to(np.arange(3, dtype=np.float32), means.shape)
        return {"other": np.ones(len(tensor)), "y": np.concatenate([means, classes], axis=-1)}

    def close(self) -> None:
        return


CONFIG = {
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "fp32", "dims": [3, 6, 5]}],
    "output": [
        {"name": "other", "data_type": "fp32", "dims": [1]},
        {"name": "y", "data_type": "fp32", "dims": [6], "label_filename": "labels.txt"},
    ],
    "preprocess": {"by": "server", "crop": [6, 5], "mean": 100.0, "std": 50.0},
    "postprocess": {"output": "y", "top_k": 2},
}


def test_a_model_of_one_picture_at_a_time() -> None:
    outputs = [{**tensor} for tensor in CONFIG["output"]]  # type: ignore[attr-defined]
    config = ModelConfig.model_validate({**CONFIG, "max_batch_size": 0, "output": outputs, "postprocess": None})
    model = Model()
    steps_of(config, {}).around(model.execution(0)).run({"x": np.zeros((6, 5, 3), np.uint8)})
    assert model.seen[0].shape == (3, 6, 5)


def test_a_model_without_pipeline_settings_is_unchanged() -> None:
    model = Model()
    config = ModelConfig.model_validate({**CONFIG, "preprocess": None, "postprocess": None})
    assert steps_of(config, {}).around(model.execution(0)) is model


@pytest.mark.parametrize("crop", [(224, 224), (7, 3)])
def test_the_buffer_is_reused(crop: tuple[int, int]) -> None:
    steps = PixelSteps(ImageRecipe(by="server", crop=crop))
    first = steps.apply(np.zeros((3, *crop, 3), np.uint8))
    again = steps.apply(np.zeros((2, *crop, 3), np.uint8))
    assert np.shares_memory(first, again)


class OverlappedModel(Model):
    """The same with flights, which it counts; refuses to launch a tensor that holds 7."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        assert (like["x"].shape[1:], like["x"].dtype) == ((3, 6, 5), np.float32)
        self.open += 1
        return InFlightBatch({"x": np.full((rows, 3, 6, 5), np.nan, np.float32)}, rows, "mine")

    def launch(self, batch: InFlightBatch) -> None:
        assert batch.state == "mine"
        assert not np.isnan(batch.inputs["x"]).any()  # type: ignore[call-overload]
        if 7 in batch.inputs["x"]:
            self.open -= 1
            raise RuntimeError("refused")

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        self.open -= 1
        return self.run(batch.inputs)

    def discard(self, batch: InFlightBatch) -> None:
        assert batch.state == "mine"
        self.open -= 1


def flown(execution: PictureExecution, pixels: np.ndarray) -> InFlightBatch:
    batch = execution.begin({"x": pixels[:1]}, len(pixels))
    assert batch.inputs["x"].dtype == np.uint8
    batch.inputs["x"][...] = pixels
    return batch


def test_batches_overlap_if_the_model_overlaps() -> None:
    model = OverlappedModel()
    execution = steps_of(ModelConfig.model_validate(CONFIG), {}).around(model.execution(0))
    assert isinstance(execution, PictureExecution)
    assert is_overlapped(execution)
    some, more = (rng.integers(0, 256, (rows, 6, 5, 3), dtype=np.uint8) for rows in (2, 4))
    batches = [flown(execution, some), flown(execution, more)]
    for batch in batches:
        execution.launch(batch)
    for batch, pixels in zip(batches, (some, more), strict=True):
        # The pixels' memory is free from the launch on: what others write there changes nothing.
        batch.inputs["x"][...] = 0
        got, expected = execution.finish(batch), execution.run({"x": pixels})
        assert all(np.array_equal(got[name], expected[name]) for name in ("scores", "classes", "other"))
    assert model.open == 0


def test_every_batch_is_finished_or_discarded() -> None:
    model = OverlappedModel()
    config = {**CONFIG, "preprocess": {**CONFIG["preprocess"], "mean": 0.0, "std": 1.0}}  # type: ignore[dict-item]
    execution = steps_of(ModelConfig.model_validate(config), {}).around(model.execution(0))
    assert isinstance(execution, PictureExecution)
    execution.discard(flown(execution, np.zeros((2, 6, 5, 3), np.uint8)))
    with pytest.raises(RuntimeError, match="refused"):
        execution.launch(flown(execution, np.full((2, 6, 5, 3), 7, np.uint8)))
    assert model.open == 0


def test_a_ranked_model_without_pictures_overlaps_too() -> None:
    model = OverlappedModel()
    steps = steps_of(ModelConfig.model_validate({**CONFIG, "preprocess": None}), {})
    execution = steps.around(model.execution(0))
    assert isinstance(execution, PictureExecution)
    tensor = rng.standard_normal((2, 3, 6, 5)).astype(np.float32)
    batch = execution.begin({"x": tensor[:1]}, 2)
    batch.inputs["x"][...] = tensor
    execution.launch(batch)
    assert np.array_equal(execution.finish(batch)["classes"], execution.run({"x": tensor})["classes"])


def test_one_picture_at_a_time_does_not_overlap() -> None:
    config = ModelConfig.model_validate({**CONFIG, "max_batch_size": 0, "postprocess": None})
    assert not is_overlapped(steps_of(config, {}).around(OverlappedModel().execution(0)))
    assert not is_overlapped(steps_of(ModelConfig.model_validate(CONFIG), {}).around(Model().execution(0)))
