"""A framework of the tests: its models are ONNX files, changed on request so that each fault of an import can be provoked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.importers.source import PROGRAM
from onnx import TensorProto, helper, numpy_helper

# `request["model"]` is the fault to provoke, `request["path"]` an ONNX file.
_PROGRAM = """
import json, os, shutil, sys
import numpy as np
from .exchange import ImportFault, Source, load_file, statistics

def open_source(request, report):
    report(0.1, "loads")
    print("a print of the user's code")
    assert sys.stdin.read() == "", "the user's code reads the builder's lines"
    if request["model"] == "fault":
        raise ImportFault("it has no layers", "add one")
    if request["model"] == "crash":
        os.abort()
    if request["model"] == "chain":
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error
    if request["custom_objects"]:
        load_file(request["custom_objects"])
    return Framework(request)

class Framework(Source):
    def __init__(self, request):
        self.request, self.fault = request, request["model"]
        import onnxruntime  # not for what fails before
        self.session = onnxruntime.InferenceSession(request["path"])

    def export(self, path, report):
        report(0.5, "exports")
        shutil.copy(self.request["path"], path)
        data = os.path.join(os.path.dirname(self.request["path"]), "model.onnx.data")
        if os.path.exists(data):
            shutil.copy(data, os.path.dirname(path))
        extra = json.loads(self.request["function"] or "{}")
        sizes = {i.name: [d if isinstance(d, int) else 4 for d in i.shape] for i in self.session.get_inputs()}
        inputs = [{"name": name, "dims": dims} for name, dims in sizes.items()]
        outputs = [{"name": output.name} for output in self.session.get_outputs()]
        return {"framework": "fake 1.0", "inputs": inputs, "outputs": outputs, **extra}

    def run(self, inputs):
        names = [output.name for output in self.session.get_outputs()]
        rows = len(next(iter(inputs.values())))
        if self.fault == "other sizes" and next(iter(inputs.values())).shape[1:] == (2,):
            raise ValueError("these sizes are refused")
        if self.fault == "one row" and rows == 1:
            raise ValueError("one row is refused")
        results = dict(zip(names, self.session.run(None, inputs)))
        if self.fault == "last row" and rows == 5:
            results[names[0]][4, 0] += 0.1
        if self.fault == "nan":
            results = {name: array * np.nan for name, array in results.items()}
        if self.fault == "dtype":
            results = {name: array.astype(np.float64) for name, array in results.items()}
        if self.fault == "shape":
            results = {name: array[:, :1] for name, array in results.items()}
        return results
"""
Save = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The programs with one more: `fake_program`."""
    folder = tmp_path / "programs"
    shutil.copytree(PROGRAM.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "fake_program.py").write_text(_PROGRAM)
    return folder / "__main__.py"


@pytest.fixture
def save_model(tmp_path: Path) -> Save:
    """Return a function that writes an ONNX file of x [N, 4] -> y [N, 3], or of the nodes and shapes that it is called with."""

    def save(
        nodes: list[onnx.NodeProto] | None = None, rows: Any = "N", size: Any = 4, out: Any = 3, name: str = "net.onnx"
    ) -> Path:
        weights = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
        graph = helper.make_graph(
            nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, size])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, out])],
            [numpy_helper.from_array(weights, "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        path = tmp_path / name
        onnx.save_model(model, path)
        return path

    return save
