"""The forms of a model.py: Triton's class, and Headrace's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from headrace_model import Tensor, forms, model
from headrace_model import python_backend as pb_utils


def load(text: str, name: str = "the_model") -> Any:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, "model.py", "exec"), vars(module))
    return forms.find_form(module, Path("model.py"))


TRITON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        return config
    def initialize(self, args):
        self.name = args["model_name"]
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(self.name, r.inputs()[0].as_numpy() * 2)]) for r in requests]
    def finalize(self):
        self.name = ""
"""


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)


def requests_of(*values: float) -> list[pb_utils.InferenceRequest]:
    return [pb_utils.InferenceRequest([pb_utils.Tensor("x", np.array([value]))]) for value in values]


def test_tritons_class_is_run() -> None:
    form = load(TRITON)
    assert (form.name, form.by_request) == ("triton", True)
    described = form.describe({"name": "m"})
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
    assert described == {"name": "m", "max_batch_size": 0, "input": [tensor], "output": []}
    form.initialize({"model_name": "m"})
    responses = form.execute(requests_of(1, 2))
    assert [response.output_tensors()[0].as_numpy().tolist() for response in responses] == [[2], [4]]
    assert form.is_ready()
    form.finalize()


def test_an_async_execute_is_run_to_its_end() -> None:
    text = """
import asyncio
class TritonPythonModel:
    async def execute(self, requests):
        return list(await asyncio.gather(*[self.one(r) for r in requests]))
    async def one(self, request):
        await asyncio.sleep(0)
        return request.request_id() + "done"
    def is_model_ready(self):
        return False
"""
    form = load(text)
    form.initialize({})
    for _ in range(2):
        assert form.execute([pb_utils.InferenceRequest(request_id="a"), pb_utils.InferenceRequest()]) == [
            "adone",
            "done",
        ]
    assert not form.is_ready()
    form.finalize()


def test_a_completed_configuration_must_be_returned() -> None:
    text = "class TritonPythonModel:\n  def execute(self, r): ...\n  auto_complete_config = staticmethod(lambda config: None)"
    with pytest.raises(forms.Refused, match="auto_complete_config returned NoneType"):
        load(text).describe({})


def test_a_class_with_predict_is_run() -> None:
    text = """
from headrace_model import Tensor
class Doubler:
    max_batch_size = 8
    inputs = {"x": Tensor["fp32", -1]}
    outputs = {"y": Tensor["string"]}
    def load(self, context): self.factor = int(context.version)
    def predict(self, batch): return {"y": batch["x"] * self.factor}
    def is_ready(self): return self.factor == 2
    def close(self): self.factor = 0
"""
    form = load(text)
    assert (form.name, form.by_request) == ("predict", False)
    assert form.describe({"name": "m"}) == {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": []}],
        "dynamic_batching": {},
    }
    assert form.describe({"max_batch_size": 0, "input": [1]})["input"] == [1]
    form.initialize({"model_version": "2"})
    assert form.predict({"x": np.ones(3)})["y"].tolist() == [2, 2, 2]
    assert form.is_ready()
    form.finalize()
    assert not form.is_ready()


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_decorated_function_is_run(future: str) -> None:
    text = f"""{future}
from headrace_model import Tensor, model
@model(max_batch_size=4)
def add(a: Tensor["fp32", 2], b: Tensor["fp32", 2]) -> {{"sum": Tensor["fp32", 2]}}:
    return {{"sum": a + b}}
"""
    form = load(text)
    config = form.describe({})
    assert [tensor["name"] for tensor in config["input"]] == ["a", "b"]
    assert config["output"] == [{"name": "sum", "data_type": "TYPE_FP32", "dims": [2]}]
    assert config["max_batch_size"] == 4
    form.initialize({})
    assert form.predict({"b": np.array([1]), "a": np.array([2])})["sum"].tolist() == [3]


def test_a_decorated_function_stays_callable() -> None:
    @model
    def twice(x: Tensor[int32, 2]) -> {y: Tensor[int32, 2]}:  # type: ignore[valid-type]  # noqa: F821
        return {"y": x * 2}  # type: ignore[operator]

    assert twice(3) == {"y": 6}
    assert twice.max_batch_size == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no model"),
        ("class A:\n  def predict(self, b): ...\nclass B:\n  def predict(self, b): ...", "has 2 models: A, B"),
        ("class TritonPythonModel: ...", "has no method execute"),
    ],
)
def test_files_without_one_model_are_refused(text: str, message: str) -> None:
    with pytest.raises(forms.Refused, match=message) as refused:
        load(text)
    assert refused.value.cure


HELPERS = {
    "a class": "class Helper:\n  def predict(self, batch): ...\n",
    "two classes": "class A:\n  def predict(self, b): ...\nclass B(A):\n  def predict(self, b): ...\n",
    "a protocol": "from typing import Protocol\nclass Net(Protocol):\n  def predict(self, batch): ...\n",
    "a data class": "from dataclasses import dataclass\n@dataclass\nclass Net:\n  x: int\n  def predict(self, b): ...\n",
    "an abstract class": "import abc\nclass Net(abc.ABC):\n  @abc.abstractmethod\n  def predict(self, batch): ...\n",
    "a class method": "class Net:\n  @classmethod\n  def predict(cls, batch): ...\n",
    "a base class": "class Net:\n  def predict(self, batch): ...\n",
    "a function": "import headrace_model\n@headrace_model.model\ndef f(x): ...\n",
}


@pytest.mark.parametrize("helpers", HELPERS)
def test_helper_classes_may_stand_beside_tritons_class(helpers: str) -> None:
    for text in (HELPERS[helpers] + TRITON, TRITON + HELPERS[helpers]):
        assert isinstance(load(text), forms.TritonForm)
    if helpers == "a base class":
        assert isinstance(
            load(HELPERS[helpers] + TRITON.replace("TritonPythonModel", "TritonPythonModel(Net)")), forms.TritonForm
        )


def test_a_base_class_and_a_second_name_are_no_models_of_their_own() -> None:
    form = load(
        "class Base:\n  def predict(self, b): return 1\nclass Mine(Base):\n  def predict(self, b): return 2\nModel = Mine"
    )
    assert form.predict({}) == 2


def test_imported_models_do_not_count() -> None:
    load("class Base:\n  def predict(self, batch): return batch", name="the_base")
    form = load("from the_base import Base\nclass Mine(Base): ...")
    assert form.predict({"x": 1}) == {"x": 1}


def test_wrong_annotations_are_named() -> None:
    with pytest.raises(TypeError, match="'fp31' is not a datatype"):
        Tensor["fp31", 2]
    with pytest.raises(TypeError, match="a dimension is a positive number"):
        Tensor["fp32", 0]
    form = load("from headrace_model import model\n@model\ndef f(x) -> {}: ...")
    with pytest.raises(TypeError, match="argument 'x' of f needs the annotation"):
        form.describe({})
