"""Ready-made models of frameworks, in this process: their results are those of the framework itself."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.config.documents import read_pbtxt
from headrace_model.frameworks import Tensors, completed
from headrace_model.frameworks import sklearn as sklearn_backend
from headrace_model.frameworks.lightgbm import LightGbmModel
from headrace_model.frameworks.sklearn import ScikitLearnModel
from headrace_model.frameworks.xgboost import XGBoostModel
from headrace_model.predict_form import ModelContext

Output = tuple[str, str, list[int]]
RNG = np.random.default_rng(7)
ROWS = RNG.normal(size=(60, 4))
CLASSES = (ROWS[:, 0] > 0).astype(int) + (ROWS[:, 1] > 0.5)


def context(
    file: Path, outputs: list[Output], inputs: tuple[str, ...] = ("x",), rows: int = 64, **parameters: str
) -> ModelContext:
    config = {
        "max_batch_size": rows,
        "input": [{"name": name, "data_type": "TYPE_FP64", "dims": [4 // len(inputs)]} for name in inputs],
        "output": [{"name": name, "data_type": kind, "dims": dims} for name, kind, dims in outputs],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }
    return ModelContext({"model_file": str(file), "model_config": json.dumps(config)})


@pytest.fixture(scope="module")
def classifier() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(ROWS, CLASSES)


def dump_skops(model: object, file: Path) -> None:
    import_module("skops.io").dump(model, file)


def dump_joblib(model: object, file: Path) -> None:
    import_module("joblib").dump(model, file)


@pytest.mark.parametrize(("dump", "name"), [(dump_skops, "model.skops"), (dump_joblib, "model.joblib")])
def test_scikit_learn_answers_by_method(
    tmp_path: Path,
    classifier: Any,
    dump: Callable[[object, Path], None],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dump(classifier, tmp_path / name)
    outputs: list[Output] = [
        ("label", "TYPE_INT64", [1]),
        ("probabilities", "TYPE_FP32", [3]),
        ("decision_function", "TYPE_FP64", [-1]),
    ]
    model = ScikitLearnModel()
    model.load(context(tmp_path / name, outputs))
    result = model.predict({"x": ROWS[:5]})
    np.testing.assert_array_equal(result["label"], classifier.predict(ROWS[:5])[:, None])
    np.testing.assert_allclose(result["probabilities"], classifier.predict_proba(ROWS[:5]), rtol=1e-6)
    np.testing.assert_array_equal(result["decision_function"], classifier.decision_function(ROWS[:5]))
    assert [array.dtype for array in result.values()] == [np.int64, np.float32, np.float64]
    assert ("runs code in it" in capsys.readouterr().err) == (name == "model.joblib")


def test_columns_of_several_inputs_stand_side_by_side(tmp_path: Path, classifier: Any) -> None:
    dump_skops(classifier, tmp_path / "model.skops")
    model = ScikitLearnModel()
    model.load(context(tmp_path / "model.skops", [("label", "TYPE_INT64", [1])], ("first", "second")))
    result = model.predict({"second": ROWS[:5, 2:], "first": ROWS[:5, :2]})
    np.testing.assert_array_equal(result["label"][:, 0], classifier.predict(ROWS[:5]))


def test_labels_may_be_texts(tmp_path: Path) -> None:
    from sklearn.tree import DecisionTreeClassifier

    names = np.array(["grün", "rot", "blau"])
    tree = DecisionTreeClassifier(random_state=0).fit(ROWS, names[CLASSES])
    dump_joblib(tree, tmp_path / "model.joblib")
    model = ScikitLearnModel()
    model.load(context(tmp_path / "model.joblib", [("label", "TYPE_STRING", [1])]))
    labels = model.predict({"x": ROWS[:5]})["label"]
    assert labels.shape == (5, 1)
    assert [label.decode() for label in labels.ravel()] == list(tree.predict(ROWS[:5]))


def test_a_method_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    dump_skops(LinearRegression().fit(ROWS, CLASSES), tmp_path / "model.skops")
    with pytest.raises(ValueError, match="probabilities needs predict_proba, which LinearRegression lacks"):
        ScikitLearnModel().load(context(tmp_path / "model.skops", [("probabilities", "TYPE_FP32", [3])]))


class Sneaky:
    """A type that is not part of scikit-learn."""

    def predict(self, rows: Any) -> Any:
        return rows[:, 0]


def test_a_foreign_type_in_a_file_of_skops_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    dump_skops(Sneaky(), tmp_path / "model.skops")
    name = f"{Sneaky.__module__}.Sneaky"
    outputs: list[Output] = [("y", "TYPE_FP64", [1])]
    with pytest.raises(ValueError, match=f"types that are not trusted: {name}") as refused:
        ScikitLearnModel().load(context(tmp_path / "model.skops", outputs))
    line = str(refused.value).partition("write ")[2].partition(" in config.pbtxt")[0]
    assert read_pbtxt(line, "config.pbtxt").data["parameters"] == {"trusted_types": name}
    model = ScikitLearnModel()
    model.load(context(tmp_path / "model.skops", outputs, trusted_types=name))
    np.testing.assert_array_equal(model.predict({"x": ROWS[:5]})["y"][:, 0], ROWS[:5, 0])


ESTIMATORS = [
    *("ensemble.RandomForestClassifier", "ensemble.ExtraTreesRegressor", "ensemble.GradientBoostingClassifier"),
    *("ensemble.HistGradientBoostingRegressor", "ensemble.AdaBoostClassifier", "ensemble.IsolationForest"),
    *("tree.DecisionTreeClassifier", "svm.SVC", "svm.LinearSVR", "neighbors.KNeighborsClassifier", "cluster.KMeans"),
    *("neural_network.MLPRegressor", "gaussian_process.GaussianProcessRegressor", "calibration.CalibratedClassifierCV"),
    *("linear_model.TweedieRegressor", "naive_bayes.GaussianNB", "linear_model.LogisticRegression"),
]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("in_pipeline", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_every_type_of_scikit_learn_is_trusted(tmp_path: Path, name: str, in_pipeline: bool) -> None:
    module, _, kind = name.rpartition(".")
    model = getattr(import_module(f"sklearn.{module}"), kind)()
    if in_pipeline:
        scaler = import_module("sklearn.preprocessing").StandardScaler()
        model = import_module("sklearn.pipeline").make_pipeline(scaler, model)
    model.fit(ROWS, CLASSES)
    dump_skops(model, tmp_path / "model.skops")
    served = ScikitLearnModel()
    served.load(context(tmp_path / "model.skops", [("y", "TYPE_FP64", [1])]))
    np.testing.assert_allclose(served.predict({"x": ROWS[:5]})["y"][:, 0], model.predict(ROWS[:5]))


@pytest.mark.parametrize(
    "name",
    [
        *("sklearn.datasets._base.urlretrieve", "sklearn.datasets._base.RemoteFileMetadata", "sklearn.utils.fixes.np"),
        *("sklearn.metrics.accuracy_score", "sklearn.utils._joblib.load", "sklearn.base.Path", "os.system", "sklearn"),
        *(
            "sklearn.utils._testing.TempMemmap",
            "sklearn.externals.array_api_compat.numpy.load",
            "sklearnx.Tree",
            "open",
        ),
        *("sklearn.pipeline.Bunch", "sklearn.pipeline.islice", "sklearn.pipeline.sparse", "sklearn.base.defaultdict"),
    ],
)
def test_names_in_modules_of_scikit_learn_are_no_types_of_it(name: str) -> None:
    assert sklearn_backend._is_of_scikit_learn(name) == (name == "sklearn.pipeline.Bunch")


def test_a_pickle_named_skops_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    (tmp_path / "model.skops").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(Exception, match="zip"):
        ScikitLearnModel().load(context(tmp_path / "model.skops", [("y", "TYPE_FP64", [1])]))
    assert not marker.exists()


def test_xgboost_returns_predictions_margins_leaves_and_contributions(tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost")
    booster = xgboost.train(
        {"objective": "multi:softprob", "num_class": 3, "nthread": 1}, xgboost.DMatrix(ROWS, CLASSES), 4
    )
    booster.save_model(tmp_path / "model.json")
    outputs: list[Output] = [
        ("scores", "TYPE_FP32", [3]),
        ("margin", "TYPE_FP32", [3]),
        ("leaf", "TYPE_INT32", [12]),
        ("contributions", "TYPE_FP32", [3, 5]),
    ]
    model = XGBoostModel()
    model.load(context(tmp_path / "model.json", outputs, intra_op_thread_count="1"))
    result, matrix = model.predict({"x": ROWS[:6]}), xgboost.DMatrix(ROWS[:6])
    np.testing.assert_allclose(result["scores"], booster.predict(matrix), rtol=1e-6)
    np.testing.assert_allclose(result["margin"], booster.predict(matrix, output_margin=True), rtol=1e-6)
    np.testing.assert_array_equal(result["leaf"], booster.predict(matrix, pred_leaf=True))
    np.testing.assert_allclose(result["contributions"], booster.predict(matrix, pred_contribs=True), rtol=1e-6)


def test_lightgbm_returns_predictions_margins_and_leaves(tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    options = {"objective": "multiclass", "num_class": 3, "num_threads": 1, "verbose": -1, "min_data_in_leaf": 2}
    booster = lightgbm.train(options, lightgbm.Dataset(ROWS, CLASSES), 4)
    booster.save_model(tmp_path / "model.txt")
    outputs: list[Output] = [("scores", "TYPE_FP32", [3]), ("margin", "TYPE_FP64", [3]), ("leaf", "TYPE_INT32", [12])]
    model = LightGbmModel()
    model.load(context(tmp_path / "model.txt", outputs, intra_op_thread_count="1"))
    result = model.predict({"x": ROWS[:6]})
    np.testing.assert_allclose(result["scores"], booster.predict(ROWS[:6]), rtol=1e-6)
    np.testing.assert_allclose(result["margin"], booster.predict(ROWS[:6], raw_score=True), rtol=1e-12)
    np.testing.assert_array_equal(result["leaf"], booster.predict(ROWS[:6], pred_leaf=True))


TABLE = {"name": "x", "data_type": "TYPE_FP64", "dims": [4]}
RESULTS = [
    {"name": "label", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "class", "data_type": "TYPE_INT64", "dims": [1]},
    {"name": "is_new", "data_type": "TYPE_BOOL", "dims": [1]},
    {"name": "probabilities", "data_type": "TYPE_FP64", "dims": [3]},
]
MARGIN = {"name": "margin", "data_type": "TYPE_FP32", "dims": [1]}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({}, {"max_batch_size": 64, "dynamic_batching": {}, "input": [TABLE], "output": RESULTS}),
        ({"max_batch_size": 0}, {"input": [TABLE], "output": RESULTS}),
        ({"max_batch_size": 8, "input": [{**TABLE, "name": "y"}]}, {"output": RESULTS}),
        ({"output": [MARGIN]}, {"input": [TABLE]}),
        (
            {"input": [], "output": []},
            {"max_batch_size": 64, "dynamic_batching": {}, "input": [TABLE], "output": RESULTS},
        ),
    ],
)
def test_a_configuration_gets_what_it_lacks(config: dict[str, Any], added: dict[str, Any]) -> None:
    def predict(table: Any) -> dict[str, Any]:
        assert (table.shape, table.dtype) == ((1, 4), np.float64)
        return {
            "label": np.array(["grün"]),
            "class": np.array([2], np.int32),
            "is_new": np.array([True]),
            "probabilities": np.array([[0.5, 0.25, 0.25]], np.float32),
        }

    before = json.dumps(config)
    assert completed(config, 4, predict) == {**config, **added}
    assert json.dumps(config) == before


def test_boosters_complete_a_configuration(tmp_path: Path) -> None:
    lightgbm, xgboost = import_module("lightgbm"), import_module("xgboost")
    tree = lightgbm.train({"verbosity": -1, "min_data_in_leaf": 5}, lightgbm.Dataset(ROWS, ROWS[:, 0]), 2)
    tree.save_model(tmp_path / "model.txt")
    xgboost.train({"nthread": 1}, xgboost.DMatrix(ROWS, ROWS[:, 0]), 2).save_model(tmp_path / "model.json")
    for model, name in ((LightGbmModel(), "model.txt"), (XGBoostModel(), "model.json")):
        config = model.complete({"name": "m"}, str(tmp_path / name))
        assert config["input"] == [TABLE]
        assert config["output"] == [{"name": "prediction", "data_type": "TYPE_FP64", "dims": [1]}]


def test_an_output_type_that_no_framework_has_is_refused() -> None:
    with pytest.raises(ValueError, match="the output y is TYPE_BF16, which no framework returns"):
        Tensors(context(Path(), [("y", "TYPE_BF16", [1])]).config)


def test_a_model_without_batches_has_its_own_shape() -> None:
    without_batches = context(Path(), [("y", "TYPE_FP32", [5, 1])], rows=0)
    assert Tensors(without_batches.config).result("y", np.ones(5)).shape == (5, 1)
