import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import ModelInput, ModelOutput, Preprocess, Reshape
from headrace_engines.errors import BuildError
from headrace_engines.quantization.sample_sources import open_samples
from headrace_engines.quantization.samples import Samples, random_samples
from hypothesis import given
from hypothesis import strategies as st

from tests.support.networks import samples_of

OUTPUT = ModelOutput(name="P", data_type="fp32", dims=(10,), label_filename="")


def _config(*inputs, batch=8, **more):
    tensors = inputs or (ModelInput(name="image", data_type="fp32", dims=(3, 4, 5)),)
    return ModelConfig(name="m", max_batch_size=batch, input=tensors, output=(OUTPUT,), **more)


def _input(name="X", data_type="fp32", dims=(4,), **more):
    return ModelInput(name=name, data_type=data_type, dims=dims, **more)


def _all(samples, rows=3):
    batches = list(samples.batches(rows))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _npz(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return "data.npz"


# Samples


@given(st.integers(1, 30), st.integers(1, 12), st.floats(0, 1))
def test_batches_parts_and_labels_belong_together(count, rows, share):
    values = np.arange(count, dtype=np.float32)
    samples = samples_of({"X": values[:, None], "Z": -values[:, None]}, labels=np.arange(count) + 100)
    batches = list(samples.batches(rows))
    assert [len(batch["X"]) for batch in batches[:-1]] == [rows] * (len(batches) - 1)
    np.testing.assert_array_equal(_all(samples, rows)["X"][:, 0], values)
    np.testing.assert_array_equal(_all(samples, rows)["Z"][:, 0], -values)
    head = samples.head(7)
    assert (len(head), head.origin) == (min(7, count), f"arrays ({min(7, count)} sample{'s' * (count > 1)})")
    if count > 1:
        kept, held_out = samples.split(share)
        assert len(kept) + len(held_out) == count
        assert len(kept)
        assert len(held_out)
        assert abs(len(held_out) - share * count) <= 1
        np.testing.assert_array_equal([*kept.labels, *held_out.labels], samples.labels)
        np.testing.assert_array_equal(_all(held_out)["X"][:, 0], held_out.labels - 100)
        np.testing.assert_array_equal(_all(held_out.head(1))["X"][0], held_out.labels[0] - 100)


def test_a_single_sample_cannot_be_split():
    with pytest.raises(BuildError, match="cannot be divided"):
        samples_of({"X": np.zeros((1, 2))}).split(0.25)


def test_the_digest_depends_on_content_order_type_and_labels():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    digest = samples_of({"X": values}).digest
    assert len(digest) == 64
    assert samples_of({"X": values.copy()}).digest == digest
    assert samples_of({"X": np.vstack([values, values])}).head(3).digest == digest
    others = [{"Y": values}, {"X": values[::-1]}, {"X": values.astype(np.float16)}, {"X": values[..., None]}]
    digests = {digest, samples_of({"X": values}, np.arange(3)).digest, *(samples_of(other).digest for other in others)}
    assert len(digests) == 6


def test_samples_of_other_shapes_start_a_batch():
    lengths = [2, 2, 2, 5, 2]
    samples = Samples(lambda n: {"X": np.zeros(lengths[n])}, [bytes([n]) for n in range(5)], "s")
    assert [batch["X"].shape for batch in samples.batches(2)] == [(2, 2), (1, 2), (1, 5), (1, 2)]


# Arrays


def test_arrays_are_matched_by_name_with_labels(tmp_path):
    a = np.arange(20, dtype=np.float32).reshape(5, 4)
    config = _config(_input("A"), _input("B", "int32", (1,)), _input("C", optional=True))
    source = _npz(tmp_path, A=a, B=np.arange(5)[:, None], labels=np.arange(5), note=np.zeros(3))
    samples = open_samples(source, tmp_path, config, 100)
    result = _all(samples)
    assert result["B"].dtype == np.int32
    assert set(result) == {"A", "B"}
    np.testing.assert_array_equal(result["B"][:, 0], samples.labels)
    np.testing.assert_array_equal(result["A"], a[samples.labels])
    assert sorted(samples.labels) == list(range(5))
    assert samples.origin == "data.npz (5 samples)"


@pytest.mark.parametrize("name", ["images", "image", "x", "arr_0"])
def test_the_only_array_feeds_the_only_input(tmp_path, name):
    source = _npz(tmp_path, **{name: np.ones((7, 4), np.float64)}, label=np.zeros((7, 1), np.uint8))
    samples = open_samples(source, tmp_path, _config(_input()), 5)
    assert _all(samples)["X"].dtype == np.float32
    assert _all(samples)["X"].shape == (5, 4)
    np.testing.assert_array_equal(samples.labels, np.zeros(5))


def test_a_limit_selects_the_same_mixture_each_time(tmp_path):
    source = _npz(
        tmp_path, X=np.repeat(np.arange(100, dtype=np.float32), 4).reshape(100, 4), labels=np.arange(100) // 10
    )
    first = open_samples(source, tmp_path, _config(_input()), 60)
    again = open_samples(source, tmp_path, _config(_input()), 60)
    assert first.digest == again.digest
    assert set(first.labels) == set(range(10))
    np.testing.assert_array_equal(_all(first)["X"][:, 0] // 10, first.labels)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_are_read_however_they_are_stored(tmp_path, save, order):
    values = np.random.default_rng(0).standard_normal((9, 3, 2000)).astype(np.float32)
    save(tmp_path / "data.npz", X=np.asarray(values, order=order), labels=np.arange(9))
    samples = open_samples("data.npz", tmp_path, _config(_input(dims=(3, -1))), 4)
    np.testing.assert_array_equal(_all(samples)["X"], values[samples.labels])


def test_arrays_take_the_shape_of_the_model(tmp_path):
    tensor = _input(dims=(6, -1), reshape=Reshape(shape=(2, 3, -1)))
    samples = open_samples(_npz(tmp_path, X=np.zeros((2, 6, 5), np.float32)), tmp_path, _config(tensor), 9)
    assert _all(samples)["X"].shape == (2, 2, 3, 5)


@pytest.mark.parametrize(("dims", "array", "one"), [
    ((1, 4), (3, 4), (1, 4)), ((1, 4), (3, 1, 4), (1, 4)), ((-1, 4), (3, 4), (1, 4)), ((2, 4), (3, 2, 4), (2, 4)),
    ((-1, 4), (3, 5, 4), (5, 4)),
])  # fmt: skip
def test_without_a_batch_dimension_a_batch_is_one_sample(tmp_path, dims, array, one):
    source = _npz(tmp_path, X=np.arange(np.prod(array), dtype=np.float32).reshape(array))
    samples = open_samples(source, tmp_path, _config(_input(dims=dims), batch=0), 9)
    assert (len(samples), samples.batched) == (3, False)
    assert [batch["X"].shape for batch in samples.batches(8)] == [one] * 3


@pytest.mark.parametrize(("arrays", "message"), [
    ({"image": np.zeros((2, 4, 5, 3), "f")}, r"takes \[N, 3, 4, 5\], found \[2, 4, 5, 3\]: the data is channels last \(NHWC\)"),
    ({"image": np.zeros((3, 4, 5), "f")}, r"found \[3, 4, 5\]: the first dimension must count samples"),
    ({"image": np.zeros((2, 3, 4, 6), "f")}, r"takes \[N, 3, 4, 5\], found \[2, 3, 4, 6\]"),
    ({"image": np.zeros((2, 3, 4, 5), "u1")}, r"takes FP32, found uint8: convert it with .astype\('float32'\)"),
    ({"image": np.full((2, 3, 4, 5), np.nan, "f")}, "NaN or infinite"),
    ({"image": np.zeros((0, 3, 4, 5), "f")}, "has no samples"),
    ({"a": np.zeros((2, 3, 4, 5), "f"), "b": np.zeros(2)}, r"has no array for image \(it holds a, b\)"),
    ({"image": np.zeros((2, 3, 4, 5), "f"), "labels": np.zeros(3, int)}, r"'labels' has the shape \[3\] for 2 samples"),
    ({"image": np.zeros((2, 3, 4, 5), "f"), "labels": np.zeros(2)}, "labels are .*: write the number of a class"),
    ({"image": np.zeros((2, 3, 4, 5), "f"), "labels": np.array([0, 10])}, "classes are from 0 to 9"),
    ({"image": np.array([None, None])}, "not a readable .npz .an array of Python objects"),
], ids=str)  # fmt: skip
def test_arrays_that_do_not_fit_are_reported(tmp_path, arrays, message):
    with pytest.raises(BuildError, match=message):
        open_samples(_npz(tmp_path, **arrays), tmp_path, _config(), 9)


@pytest.mark.parametrize(("dims", "shape", "message"), [
    ((4, 5, 3), (2, 3, 4, 5), r"channels first \(NCHW\), the input channels last"),
    ((1, 4, 5), (2, 4, 5), r"single channel is missing: use array\[:, None\]"),
    ((4, 5, 1), (2, 4, 5), r"single channel is missing: use array\[..., None\]"),
    ((3, -1, -1), (2, 64, 64, 3), "the data is channels last"),
])  # fmt: skip
def test_the_usual_mistakes_have_their_cure(tmp_path, dims, shape, message):
    source = _npz(tmp_path, image=np.zeros(shape, np.float32))
    with pytest.raises(BuildError, match=message):
        open_samples(source, tmp_path, _config(_input("image", dims=dims)), 9)


def test_values_out_of_range_and_uneven_arrays_are_reported(tmp_path):
    config = _config(_input("A", "int8"), _input("B", "fp16"))
    source = _npz(tmp_path, A=np.full((2, 4), 300), B=np.zeros((2, 4)))
    with pytest.raises(BuildError, match="'A' has values that INT8 cannot hold"):
        open_samples(source, tmp_path, config, 9)
    source = _npz(tmp_path, A=np.zeros((2, 4), int), B=np.full((2, 4), 1e6))
    with pytest.raises(BuildError, match="'B' has NaN or infinite values"):
        open_samples(source, tmp_path, config, 9)
    source = _npz(tmp_path, A=np.zeros((2, 4), int), B=np.zeros((3, 4)))
    with pytest.raises(BuildError, match=r"differ in their number of samples \('A' 2, 'B' 3\)"):
        open_samples(source, tmp_path, config, 9)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.97])
def test_a_damaged_file_is_reported(tmp_path, keep):
    path = tmp_path / _npz(tmp_path, image=np.random.default_rng(0).random((20, 3, 4, 5)))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(BuildError, match=r"data.npz is not a readable .npz"):
        open_samples("data.npz", tmp_path, _config(), 9)


# Places


@pytest.mark.parametrize("source", ["../data.npz", "/etc/passwd", "", "a/../../data.npz", "..\\data.npz", "../r.py:f"])
def test_paths_outside_the_folder_are_refused(tmp_path, source):
    (tmp_path / "m").mkdir()
    np.savez(tmp_path / "data.npz", X=np.zeros((1, 4)))
    with pytest.raises(BuildError, match="leads out of the model's folder"):
        open_samples(source, tmp_path / "m", _config(_input()), 9)


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    np.savez(tmp_path / "data.npz", X=np.zeros((1, 4)))
    (folder / "data.npz").symlink_to(tmp_path / "data.npz")
    with pytest.raises(BuildError, match="a link that leads out"):
        open_samples("data.npz", folder, _config(_input()), 9)


def test_a_missing_or_unknown_source_is_reported(tmp_path):
    with pytest.raises(BuildError, match="the samples 'calibration' are not in the model's folder"):
        open_samples("calibration", tmp_path, _config(), 9)
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(BuildError, match=r"cannot be read from 'data.csv': write a folder of pictures, an .npz"):
        open_samples("data.csv", tmp_path, _config(), 9)


# Noise


def test_noise_is_the_same_every_time_and_fits_the_model():
    config = _config(
        _input("F", dims=(2, -1)), _input("H", "fp16"), _input("U", "uint8", (500,)), _input("I", "int64"),
        _input("S", "bytes"), _input("B", "bool"), _input("R", dims=(6,), reshape=Reshape(shape=(2, 3))),
    )  # fmt: skip
    samples = random_samples(config, 5, {"F": (2, 7)})
    first, second = samples.batches(3)
    again = next(random_samples(config, 5, {"F": (2, 7)}).batches(3))
    assert {name: array.shape for name, array in second.items()} == {
        "F": (2, 2, 7), "H": (2, 4), "U": (2, 500), "I": (2, 4), "S": (2, 4), "B": (2, 4), "R": (2, 2, 3)
    }  # fmt: skip
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert [first[name].dtype.char for name in "FHUIB"] == list("feBl?")
    assert (first["U"].min() < 10, first["U"].max() > 245, first["I"].max() <= 1) == (True, True, True)
    assert set(first["S"].ravel()) <= {"0", "1"}
    assert next(random_samples(config, 1).batches(1))["F"].shape == (1, 2, 1)
    assert random_samples(config, 5).digest != samples.digest
    assert samples.origin == "random inputs"


def test_noise_for_a_model_of_pictures_is_noise_in_pixels():
    config = _config(_input("image", dims=(3, 64, 64)), preprocess=Preprocess(mean=(127.0,), std=(64.0,)))
    noise = next(random_samples(config, 4).batches(4))["image"]
    assert noise.dtype == np.float32
    assert noise.mean() == pytest.approx(0, abs=0.05)
    assert noise.std() == pytest.approx(255 / np.sqrt(12) / 64, rel=0.05)


def test_noise_without_a_batch_dimension():
    samples = random_samples(_config(_input(dims=(-1, 4)), batch=0), 3)
    assert [batch["X"].shape for batch in samples.batches(8)] == [(1, 4)] * 3
