import json

import numpy as np
import onnx
import pytest
from headrace.config.optimization_config import Calibration
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.samples import Samples
from onnx import TensorProto, helper, numpy_helper

from tests.support import models
from tests.support.networks import samples_of

MINMAX = Calibration(method="minmax")


def _samples(count=40, seed=0):
    return samples_of({"X": np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)})


def _found(model, tensors, samples=None, calibration=MINMAX, cache=None, report=silent):
    return calibrate(model, tensors, samples or _samples(), calibration, cache, report)


def _weights(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_ranges_are_those_of_the_tensors():
    model, samples = models.affine(), _samples()
    x = next(samples.batches(100))["X"]
    weights = _weights(model)
    product = x @ weights["W"]
    expected = {
        "X": x, "XW": product, "Y": np.maximum(product + weights["B"], 0), "W": weights["W"],
    }  # fmt: skip
    before = model.SerializeToString()
    for name, (low, high) in _found(model, list(expected), samples).items():
        values = expected[name]
        assert (low, high) == pytest.approx((min(values.min(), 0), max(values.max(), 0)), rel=1e-5)
    assert model.SerializeToString() == before


def test_methods_differ():
    model = models.affine()
    result = {
        method: _found(model, ["XWB"], _samples(4000), Calibration(method=method, percentile=99.0))["XWB"]
        for method in ("minmax", "percentile", "entropy", "mse")
    }
    assert result["percentile"][1] < result["minmax"][1]
    assert result["mse"] != result["minmax"]


def test_a_table_serves_again_until_something_changes(tmp_path, monkeypatch):
    model, cache = models.affine(), tmp_path / "tables"
    first = _found(model, ["XW", "Y"], cache=cache)
    (table,) = cache.iterdir()
    notes = []
    assert _found(model, ["XW", "Y"], cache=cache, report=lambda done, note: notes.append((done, note))) == first
    assert notes == [(1.0, "calibrated earlier")]
    changed = [
        (models.affine(seed=1), ["XW", "Y"], None, MINMAX),
        (model, ["Y"], None, MINMAX),
        (model, ["XW", "Y"], _samples(seed=1), MINMAX),
        (model, ["XW", "Y"], None, Calibration(method="percentile")),
        (model, ["XW", "Y"], None, Calibration(method="percentile", percentile=99.0)),
    ]
    for number, (other, tensors, samples, calibration) in enumerate(changed):
        _found(other, tensors, samples, calibration, cache)
        assert len(list(cache.iterdir())) == number + 2
    assert _found(model, ["XW", "Y"], calibration=Calibration(method="minmax", percentile=99.0), cache=cache) == first
    assert len(list(cache.iterdir())) == len(changed) + 1
    assert table.exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", "half", "reversed", "key", "another"])
def test_a_damaged_table_is_made_anew(tmp_path, damage):
    model = models.affine()
    first = _found(model, ["XW", "Y"], cache=tmp_path)
    (table,) = tmp_path.iterdir()
    text = table.read_text()
    document = json.loads(text)
    document["ranges"]["Y"] = {"reversed": [1, -1], "another": [0.0, None]}.get(damage, document["ranges"]["Y"])
    document["key"] = "0" if damage == "key" else document["key"]
    written = {"half": text[: len(text) // 2], "reversed": json.dumps(document), "another": json.dumps(document)}
    table.write_text(written.get(damage, json.dumps(document) if damage == "key" else damage))
    assert _found(model, ["XW", "Y"], cache=tmp_path) == first
    assert json.loads(table.read_text()) == json.loads(text)
    assert list(tmp_path.iterdir()) == [table]


def test_progress_runs_from_zero_to_one():
    reports = []
    _found(models.affine(), ["Y"], _samples(100), report=lambda done, note: reports.append((done, note)))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[0][0] == 0
    assert reports[-1] == (1.0, "calibrated 1 tensors")
    assert len(reports) > 3


def test_an_unknown_tensor_is_reported():
    with pytest.raises(BuildError, match="no tensor 'nothing'"):
        _found(models.affine(), ["Y", "nothing"])


def test_rejected_samples_are_reported():
    samples = samples_of({"X": np.zeros((3, 17), np.float32)})
    with pytest.raises(BuildError, match=r"fails on samples of X \[1, 17\]"):
        _found(models.affine(), ["Y"], samples)


def test_infinity_inside_of_the_model_names_its_tensor():
    nodes = [helper.make_node("Log", ["X"], ["L"]), helper.make_node("Relu", ["L"], ["Y"])]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "XY"]
    graph = helper.make_graph(nodes, "log", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    with pytest.raises(BuildError, match="tensor 'L' has NaN or infinite values"):
        _found(model, ["L"], samples_of({"X": np.zeros((2, 4), np.float32)}))


def test_a_model_without_a_batch_dimension_runs_sample_by_sample():
    samples = Samples(
        lambda n: {"X": np.full((2, 8), float(n), np.float32)}, [bytes([n]) for n in range(3)], "s", batched=False
    )
    model = models.identity(shape=(2, 8))
    assert _found(model, ["X", "Y"], samples) == {"X": (0, 2), "Y": (0, 2)}


def test_a_failed_write_of_a_table_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="the calibration table cannot be written to"):
        _found(models.affine(), ["Y"], cache=tmp_path / "file")
