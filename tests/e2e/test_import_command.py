"""`headrace import` with the frameworks themselves, and the imported models on a server.

`HEADRACE_TEST_TORCH_PYTHON` and `HEADRACE_TEST_TENSORFLOW_PYTHON` name interpreters with PyTorch and onnxscript, and with
TensorFlow, Keras and tf2onnx, where they are not installed beside the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import serving


def interpreter(variable: str, *modules: str) -> str:
    """Interpreter that a variable names, or that of the tests if it has the modules; "" without one."""
    named = os.environ.get(variable, "")
    return named or (sys.executable if all(importlib.util.find_spec(name) for name in modules) else "")


TORCH = interpreter("HEADRACE_TEST_TORCH_PYTHON", "torch", "onnxscript")
TENSORFLOW = interpreter("HEADRACE_TEST_TENSORFLOW_PYTHON", "tensorflow", "keras", "tf2onnx")
needs_torch = pytest.mark.skipif(not TORCH, reason="torch and onnxscript are not installed")
needs_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="tensorflow, keras and tf2onnx are not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Two inputs of two types, an embedding, attention, dropout (off in evaluation), a free dimension and two outputs.
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, ids, scale):
        hidden = self.encoder(self.embedding(ids))
        return {"scores": self.head(hidden.mean(1)) * scale, "hidden": hidden}

def make():
    torch.manual_seed(7)
    return Net(), {"ids": torch.randint(0, 50, (1, 12)), "scale": torch.rand(1, 1)}

class Mixed(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)

def mixed():
    return Mixed(), torch.randn(2, 4)

class Branch(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

def branch():
    return Branch(), torch.randn(2, 4)

class Eigenvalues(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x).abs()

def eigenvalues():
    return Eigenvalues(), torch.randn(2, 4, 4)

class Fixed(torch.nn.Module):
    def forward(self, x):
        return x.view(2, -1)

def fixed():
    return Fixed(), torch.randn(2, 4)
"""
ANSWER = """
import numpy as np, torch, net
model = net.make()[0].eval()
inputs = {name: torch.from_numpy(array) for name, array in np.load("inputs.npz").items()}
with torch.no_grad():
    np.savez("answer.npz", **{name: tensor.numpy() for name, tensor in model(**inputs).items()})
"""
KERAS = """
import keras, numpy as np, tensorflow as tf
from keras import layers
keras.utils.set_random_seed(1)
image, meta = layers.Input((8, 8, 3), name="image"), layers.Input((4,), name="meta")
x = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="gelu")(image))
x = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), meta])
kind, age = layers.Dense(5, activation="softmax", name="kind")(layers.Dropout(0.5)(x)), layers.Dense(1, name="age")(x)
model = keras.Model([image, meta], [kind, age])
model.save("two.keras")
random = np.random.default_rng(3)
arrays = {"image": random.normal(size=(3, 8, 8, 3)).astype("f4"), "meta": random.normal(size=(3, 4)).astype("f4")}
np.savez("inputs.npz", **arrays)
kind, age = model([arrays["image"], arrays["meta"]], training=False)
np.savez("answer.npz", kind=kind, age=age)
keras.Model(meta, layers.Lambda(lambda t: t * 2)(meta)).save("lambda.keras")

class Module(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def double(self, x):
        return {"y": x * 2}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def largest(self, x):
        return {"class": tf.argmax(x, 1), "score": tf.reduce_max(x, 1)}

module = Module()
tf.saved_model.save(module, "saved", signatures={"double": module.double, "largest": module.largest})
"""


def headrace(folder: Path, *words: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("headrace")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def served_answers(folder: Path, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    types = {"float32": "FP32", "int64": "INT64"}
    body: list[dict[str, Any]] = [
        {"name": name, "datatype": types[str(a.dtype)], "shape": list(a.shape), "data": a.ravel().tolist()}
        for name, a in inputs.items()
    ]
    with serving(folder / "model_repository", folder) as server:
        path = f"/v2/models/{model}/infer"
        status, _, content = server.request("POST", path, json.dumps({"inputs": body}).encode())
    assert status == 200, content
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in json.loads(content)["outputs"]}


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@needs_torch
def test_a_torch_model_is_served_with_the_answers_of_torch(torch_folder: Path) -> None:
    shapes = ["--input-shape", "ids=1,S:12", "--input-dtype", "ids=int64"]
    status, output = headrace(torch_folder, "import", "torch", "net.py:make", "--python", TORCH, *shapes)
    assert status == 0, output
    assert "imported model_repository/net" in output
    assert headrace(torch_folder, "validate", "model_repository")[0] == 0
    random = np.random.default_rng(5)
    inputs = {"ids": random.integers(0, 50, (3, 9)), "scale": random.random((3, 1), dtype=np.float32)}
    np.savez(torch_folder / "inputs.npz", **inputs)
    subprocess.run([TORCH, "-c", ANSWER], cwd=torch_folder, check=True, timeout=120)
    answer = np.load(torch_folder / "answer.npz")
    for name, array in served_answers(torch_folder, "net", inputs).items():
        np.testing.assert_allclose(array, answer[name], atol=1e-5)


@needs_torch
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("mixed", ["a row of output output depends on the other rows of its batch", "not imported"]),
        ("branch", ["control flow depends on the values of a tensor", "torch.where"]),
        ("eigenvalues", ["no ONNX form of the operator aten.linalg_eig"]),
        ("fixed", ["the batch is fixed in the model (output [2, -1])", "--static-batch"]),
    ],
)
def test_what_torch_cannot_export_is_refused_by_name(torch_folder: Path, function: str, words: list[str]) -> None:
    status, output = headrace(torch_folder, "import", "torch", f"net.py:{function}", "--python", TORCH)
    assert status == 1
    assert all(word in " ".join(output.split()) for word in words), output
    assert not list((torch_folder / "model_repository").iterdir())


@needs_torch
def test_an_exported_program_is_imported(torch_folder: Path) -> None:
    code = """
import torch, net
model, inputs = net.make()
batch = torch.export.Dim("batch")
inputs = {name: torch.cat([tensor] * 2) for name, tensor in inputs.items()}
shapes = {"ids": {0: batch}, "scale": {0: batch}}
for name, module, dynamic in (("dynamic", model.eval(), shapes), ("static", model, None), ("training", model.train(), shapes)):
    torch.export.save(torch.export.export(module, (), inputs, dynamic_shapes=dynamic), name + ".pt2")
"""
    subprocess.run([TORCH, "-c", code.replace("model.train()", "net.make()[0].train()")], cwd=torch_folder, check=True)
    assert headrace(torch_folder, "import", "torch", "dynamic.pt2", "--python", TORCH)[0] == 0
    status, output = headrace(torch_folder, "import", "torch", "static.pt2", "--python", TORCH)
    assert status == 1
    assert "the batch is fixed in the model" in output
    status, output = headrace(torch_folder, "import", "torch", "training.pt2", "--python", TORCH)
    assert status == 1
    assert "was exported in training mode" in output


@pytest.fixture
def tensorflow_folder(tmp_path: Path) -> Path:
    done = subprocess.run([TENSORFLOW, "-c", KERAS], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return tmp_path


@needs_tensorflow
def test_a_keras_model_is_served_with_the_answers_of_keras(tensorflow_folder: Path) -> None:
    status, output = headrace(tensorflow_folder, "import", "keras", "two.keras", "--python", TENSORFLOW)
    assert status == 0, output
    assert headrace(tensorflow_folder, "validate", "model_repository")[0] == 0
    answer = np.load(tensorflow_folder / "answer.npz")
    inputs = dict(np.load(tensorflow_folder / "inputs.npz"))
    outputs = served_answers(tensorflow_folder, "two", inputs)
    assert set(outputs) == {"kind", "age"}
    for name, array in outputs.items():
        np.testing.assert_allclose(array, answer[name], atol=1e-5)
    status, output = headrace(tensorflow_folder, "import", "keras", "lambda.keras", "--python", TENSORFLOW)
    assert status == 1
    assert "the file has a Lambda layer" in output
    words = ["import", "keras", "lambda.keras", "--python", TENSORFLOW, "--allow-code"]
    assert headrace(tensorflow_folder, *words)[0] == 0


@needs_tensorflow
def test_a_signature_of_a_savedmodel_is_served(tensorflow_folder: Path) -> None:
    status, output = headrace(tensorflow_folder, "import", "savedmodel", "saved", "--python", TENSORFLOW)
    assert status == 1
    assert "(signatures: double, largest): choose one with --signature NAME" in " ".join(output.split())
    words = ["import", "savedmodel", "saved", "--signature", "largest", "--python", TENSORFLOW]
    assert headrace(tensorflow_folder, *words)[0] == 0
    x = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    outputs = served_answers(tensorflow_folder, "saved", {"x": x})
    np.testing.assert_array_equal(outputs["class"], x.argmax(1))
    np.testing.assert_allclose(outputs["score"], x.max(1), rtol=1e-6)
