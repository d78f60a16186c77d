"""Samples of the demo models, opened as `headrace build` opens them."""

import numpy as np
import onnxruntime as ort
import pytest
from headrace.config.model_folder import read_model_folder
from headrace_engines.demo import samples
from headrace_engines.demo.build import CATALOGUE
from headrace_engines.quantization.sample_sources import open_samples


def _open(repository, name, precision=None):
    folder = read_model_folder(repository / name, repository)
    assert folder.findings == ()
    options = folder.config.optimization
    assert options.precision == precision
    calibration = open_samples(options.calibration.data, folder.path, folder.config, options.calibration.samples)
    return calibration, open_samples(options.accuracy.data, folder.path, folder.config, options.accuracy.samples)


@pytest.mark.slow
def test_digits_calibrates_on_its_training_samples(demo_repository):
    calibration, accuracy = _open(demo_repository("digits"), "digits")
    assert calibration.origin == "calibration.npz (256 samples)"
    assert np.bincount(calibration.labels).min() >= 10
    with np.load(demo_repository("digits") / "digits/1/held_out.npz") as held_out:
        assert len(accuracy) == len(held_out["labels"])
        rows = {image.tobytes() for image in held_out["images"]}
    batch = next(accuracy.batches(1000))
    assert {image.tobytes() for image in batch["image"]} == rows
    session = ort.InferenceSession(
        demo_repository("digits") / "digits/1/model.onnx", providers=["CPUExecutionProvider"]
    )
    assert (session.run(None, batch)[0].argmax(axis=1) == accuracy.labels).mean() >= 0.95
    with np.load(demo_repository("digits") / "digits/calibration.npz") as stored:
        assert len(stored["labels"]) == 1797 - len(accuracy)
        # A few of these small pictures are there twice in the data set itself.
        assert len({image.tobytes() for image in stored["image"]} & rows) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficientnet_lite0", "resnet50"])
def test_models_of_pictures_have_pictures(demo_repository, name):
    calibration, accuracy = _open(demo_repository(name), name, "fp16")
    assert calibration.origin == "calibration/ (64 pictures)"
    assert accuracy.origin == "accuracy/ (48 pictures)"
    assert calibration.labels is None
    batch = next(accuracy.batches(2))["input"]
    assert batch.shape == (2, 3, 224, 224)
    assert 0.3 < batch.std() < 2


@pytest.mark.slow
def test_no_picture_is_there_twice_and_all_are_the_same_every_time():
    created = samples.build_photographs()
    assert len(set(created.values())) == len(created) == 112
    assert samples.build_photographs() == created
    assert sum(map(len, created.values())) < 4 << 20


def test_sample_code_is_not_part_of_the_model_digest():
    for model in CATALOGUE.values():
        assert not {model.samples.partition(":")[0]} & set(model.sources)
        assert bool(model.samples) == bool(model.sample_paths)
