import io

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import ModelInput, ModelOutput, Preprocess
from headrace.inference.pipelines.image import decode, prepare
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace_engines.errors import BuildError
from headrace_engines.quantization import sample_sources as picture_folder
from headrace_engines.quantization.sample_sources import open_samples
from PIL import Image

RECIPE = {"resize_short_side": 12, "crop": (8, 10), "mean": (100.0, 110.0, 120.0), "std": (50.0,)}


def _config(preprocess=RECIPE, dims=(3, 8, 10), data_type="fp32", batch=8, classes=4, labels="", others=()):
    return ModelConfig(
        name="m",
        max_batch_size=batch,
        input=(ModelInput(name="image", data_type=data_type, dims=dims), *others),
        output=(ModelOutput(name="P", data_type="fp32", dims=(classes,), label_filename=labels),),
        preprocess=None if preprocess is None else Preprocess(**preprocess),
    )


def _picture(seed=0, size=(20, 16)):
    stored = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(stored, "PNG")
    return stored.getvalue()


def _fill(folder, *names):
    for seed, name in enumerate(names):
        path = folder / "calibration" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_picture(seed))
    return folder


def _open(folder, config=None, limit=100):
    return open_samples("calibration", folder, config or _config(), limit)


def test_images_go_through_the_preprocessing_of_the_model(tmp_path):
    _fill(tmp_path, *(f"{n}.png" for n in range(5)), "notes.txt", ".hidden.png", ".cache/x.png")
    samples = _open(tmp_path)
    assert samples.origin == "calibration/ (5 pictures)"
    assert samples.labels is None
    result = np.concatenate([batch["image"] for batch in samples.batches(2)])
    assert result.dtype == np.float32
    expected = {prepare(decode(_picture(n)), ImageRecipe(**RECIPE)).tobytes() for n in range(5)}
    assert {row.tobytes() for row in result} == expected


@pytest.mark.parametrize(("data_type", "layout", "dims", "batch", "shape"), [
    ("fp16", "nhwc", (8, 10, 3), 8, (1, 8, 10, 3)), ("uint8", "nchw", (3, 8, 10), 8, (1, 3, 8, 10)),
    ("fp32", "nchw", (1, 3, 8, 10), 0, (1, 3, 8, 10)), ("fp32", "nchw", (3, 8, 10), 0, (3, 8, 10)),
    ("fp32", "nchw", (-1, -1, -1), 4, (1, 3, 8, 10)), ("fp32", "nchw", (-1, 3, 8, 10), 0, (1, 3, 8, 10)),
])  # fmt: skip
def test_pictures_take_the_models_type_and_shape(tmp_path, data_type, layout, dims, batch, shape):
    recipe = {**RECIPE, "layout": layout, "mean": (0.0,), "std": (1.0,)}
    samples = _open(_fill(tmp_path, "a.png"), _config(recipe, dims, data_type, batch))
    array = next(samples.batches(3))["image"]
    assert array.shape == shape
    assert array.dtype == {"fp16": np.float16, "uint8": np.uint8, "fp32": np.float32}[data_type]
    assert array.max() > 100


def test_folders_are_classes_by_number_or_name(tmp_path):
    (tmp_path / "labels.txt").write_text("tench\nEgyptian cat\nrock crab\ntoilet tissue\n")
    config = _config(labels="labels.txt")
    _fill(tmp_path, "egyptian_cat/a.png", "Rock Crab/b.png", "0/c.png", "egyptian_cat/deeper/d.png")
    samples = _open(tmp_path, config)
    digests = {
        hash(batch["image"].tobytes()): label for batch, label in zip(samples.batches(1), samples.labels, strict=True)
    }
    expected = [1, 2, 0, 1]
    recipe = ImageRecipe(**RECIPE)
    assert digests == {hash(prepare(decode(_picture(n)), recipe).tobytes()): c for n, c in enumerate(expected)}
    assert samples.digest != _open(_fill(tmp_path / "other", "a.png"), _config()).digest


def test_folders_that_are_no_classes_are_only_folders(tmp_path):
    assert _open(_fill(tmp_path, "day/a.png", "night/b.png", "c.png")).labels is None


def test_folders_that_are_partly_classes_are_reported(tmp_path):
    with pytest.raises(BuildError, match=r"'night' is not a class of the model .*: name every class by its number"):
        _open(_fill(tmp_path, "1/a.png", "night/b.png"))
    with pytest.raises(BuildError, match="a picture outside of them is not a class"):
        _open(_fill(tmp_path / "2", "1/a.png", "b.png"))


def test_a_label_file_has_the_classes(tmp_path):
    _fill(tmp_path, "a.png", "day/b.png")
    table = tmp_path / "calibration/labels.csv"
    table.write_text("file,class\na.png,3\nday/b.png,1\n")
    assert sorted(_open(tmp_path).labels) == [1, 3]
    for text, message in [
        ("a.png,3\n", "has no line for day/b.png"), ("a.png,3\nday/b.png,4\n", "'4' is not a class"),
        ("a.png,3,1\n", "labels.csv:1: 3 fields"), ("\xff", "cannot be read"),
    ]:  # fmt: skip
        table.write_bytes(text.encode("latin-1"))
        with pytest.raises(BuildError, match=message):
            _open(tmp_path)


def test_the_choice_hardly_changes_with_a_new_picture(tmp_path):
    _fill(tmp_path, *(f"{n}.png" for n in range(30)))
    first = _open(tmp_path, limit=10)
    assert (len(first), first.digest) == (10, _open(tmp_path, limit=10).digest)
    before = {batch["image"].tobytes() for batch in first.batches(1)}
    (tmp_path / "calibration/new.png").write_bytes(_picture(99))
    after = {batch["image"].tobytes() for batch in _open(tmp_path, limit=10).batches(1)}
    assert len(before & after) >= 9


def test_the_digest_follows_the_picture_and_the_preprocessing(tmp_path):
    _fill(tmp_path, "a.png")
    digests = {_open(tmp_path).digest, _open(tmp_path, _config({**RECIPE, "std": (51.0,)})).digest}
    (tmp_path / "calibration/a.png").write_bytes(_picture(5))
    assert len(digests | {_open(tmp_path).digest}) == 3


def test_images_are_read_on_demand_and_a_few_are_cached(tmp_path, monkeypatch):
    _fill(tmp_path, *(f"{n}.png" for n in range(6)))
    read = []
    monkeypatch.setattr(picture_folder, "decode", lambda data: read.append(1) or decode(data))
    monkeypatch.setattr(picture_folder, "_CACHE_BYTES", 2 * 3 * 8 * 10 * 4)
    samples = _open(tmp_path)
    assert len(read) == 1, "the first names the code that prepares them"
    batches = samples.batches(2)
    next(batches)
    assert len(read) == 2
    assert [len(batch["image"]) for batch in batches] == [2, 2]
    for again in samples.batches(2), samples.batches(2):
        list(again)
    assert len(read) == 6 + 4 + 4


@pytest.mark.parametrize(("config", "message"), [
    (_config(None), "has no preparation of pictures: add a `preprocess` section"),
    (_config(dims=(8, 10, 3)), r"preprocess does not match the model.*takes \[8, 10, 3\], found \[3, 8, 10\].*NCHW"),
    (_config(dims=(3, 9, 9)), r"takes \[3, 9, 9\], found \[3, 8, 10\]"),
    (_config(data_type="int64"), "input 'image' is INT64, pictures become"),
    (_config({**RECIPE, "input": "image"}, others=(ModelInput(name="Z", data_type="fp32", dims=(1,)),)), "inputs Z"),
])  # fmt: skip
def test_models_without_matching_picture_input_are_reported(tmp_path, config, message):
    with pytest.raises(BuildError, match=message):
        _open(_fill(tmp_path, "a.png"), config)


def test_an_empty_folder_is_reported(tmp_path):
    (tmp_path / "calibration").mkdir()
    with pytest.raises(BuildError, match=r"has no pictures \(it is empty\): put .jpg"):
        _open(tmp_path)
    (tmp_path / "calibration/x.txt").write_text("")
    with pytest.raises(BuildError, match="1 files of other types"):
        _open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"this is no picture", _picture()[:300]], ids=["empty", "text", "cut short"])
def test_a_picture_that_cannot_be_read_is_named(tmp_path, content):
    _fill(tmp_path, "good.png", "day/bad.png")
    (tmp_path / "calibration/day/bad.png").write_bytes(content)
    with pytest.raises(BuildError, match=r"m: calibration/day/bad.png: "):
        list(_open(tmp_path).batches(8))


def test_a_linked_picture_must_be_the_models(tmp_path):
    _fill(tmp_path / "m", "a.png")
    (tmp_path / "secret.png").write_bytes(_picture())
    (tmp_path / "m/calibration/b.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(BuildError, match=r"b.png is a link that leads out of the model's folder"):
        _open(tmp_path / "m")


def test_the_digest_depends_on_the_code_of_the_preparation(tmp_path, monkeypatch):
    """Or ranges of pictures that were resized another way would be used again."""
    _fill(tmp_path, "0.png")
    digests = {_open(tmp_path).digest, _open(tmp_path).digest}
    monkeypatch.setattr(picture_folder, "prepare", lambda *arguments: prepare(*arguments) + np.float32(1))
    assert len(digests | {_open(tmp_path).digest}) == 2
