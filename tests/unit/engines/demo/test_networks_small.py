import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace_engines.demo.build import CATALOGUE
from headrace_engines.demo.digits import split_stratified
from onnx import numpy_helper

SLOW = ("efficientnet_lite0", "resnet50", "digits")  # seconds to build


def _session(repository, name):
    return ort.InferenceSession(repository / name / "1/model.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("name", "dtype"), [("add_sub", np.int32), ("add_sub_fp32", np.float32)])
@pytest.mark.parametrize("rows", [1, 5])
def test_add_sub_adds_and_subtracts(demo_repository, name, dtype, rows):
    random = np.random.default_rng(rows)
    a, b = (random.integers(-1000, 1000, (rows, 16)).astype(dtype) for _ in range(2))
    total, difference = _session(demo_repository(name), name).run(["OUTPUT0", "OUTPUT1"], {"INPUT0": a, "INPUT1": b})
    assert total.dtype == difference.dtype == dtype
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(difference, a - b)


def test_tiny_computes_its_documented_perceptron(demo_repository):
    graph = onnx.load(demo_repository("tiny") / "tiny/1/model.onnx").graph
    weights = {constant.name: numpy_helper.to_array(constant) for constant in graph.initializer}
    x = np.random.default_rng(7).standard_normal((9, 16), np.float32)
    hidden = np.maximum(x @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    expected = hidden @ weights["last.weight"].T + weights["last.bias"]
    answer = _session(demo_repository("tiny"), "tiny").run(["output"], {"input": x})[0]
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)
    assert answer.std() > 0.1


@pytest.mark.slow
def test_digits_answers_held_out_pictures(demo_repository):
    folder = demo_repository("digits") / "digits/1"
    with np.load(folder / "held_out.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    assert images.shape == (len(labels), 1, 8, 8)
    assert images.dtype == np.float32
    assert images.max() == 16
    assert np.bincount(labels).min() >= 40
    answers = _session(demo_repository("digits"), "digits").run(["probabilities"], {"image": images})[0].argmax(axis=1)
    accuracy = (answers == labels).mean()
    assert accuracy >= 0.95
    measured = json.loads((folder / "accuracy.json").read_text())
    assert measured["accuracy"] == pytest.approx(accuracy, abs=0.005)
    properties = {entry.key: entry.value for entry in onnx.load(folder / "model.onnx").metadata_props}
    assert float(properties["accuracy"]) == pytest.approx(measured["accuracy"], abs=1e-4)


def test_the_held_out_split_is_stratified_and_apart():
    labels = np.repeat(np.arange(10), [40, 60] * 5)
    train, held_out = split_stratified(labels, 0.25, np.random.default_rng(0))
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    np.testing.assert_array_equal(np.bincount(labels[held_out]), [10, 15] * 5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, model in CATALOGUE.items()
        if model.model_file == "model.onnx"
    ],
)
def test_models_have_their_origin_and_load_in_older_runtimes(demo_repository, name):
    model = onnx.load(demo_repository(name) / name / "1/model.onnx")
    onnx.checker.check_model(model)
    assert model.ir_version <= 9  # the latest that ONNX Runtime 1.17 reads
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties["origin"]
    assert properties["licence"]
    assert model.doc_string
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
