"""An interpreter that stands for one with PyTorch: answers jobs of `headrace_engines.optimize.torch_job` by a script.

The script sees the job's folder, writes the files of a result, and prints what a test wants.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Scales the weight of the source by a factor, so that the loss is in the hands of the test, and counts its calls.
PRUNING = """
import json, pathlib, sys
import numpy as np, onnx
from onnx import numpy_helper
import onnxruntime
folder = pathlib.Path(sys.argv[-1])
job = json.loads((folder / "job.json").read_text())
calls = pathlib.Path(__file__).with_suffix(".calls")
calls.write_text((calls.read_text() if calls.exists() else "") + json.dumps(job) + chr(10))
print("progress 0.50 epoch 1 of 1", flush=True)
print("a library prints this", flush=True)
model = onnx.load(job["path"])
good = job["flops_share"] >= {good_from}
for tensor in model.graph.initializer:
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values if good else -values), tensor.name))
check = np.load(folder / "check.npy")
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(answers,) = session.run(None, {{job["input_name"]: check}})
np.save(folder / "answers.npy", answers + np.float32("{offset}"))
onnx.save(model, folder / "model.onnx")
macs = round(1000 * job["flops_share"])
result = dict(macs=macs, source_macs=1000, parameters=5, source_parameters=10, device="CPU")
(folder / "result.json").write_text(json.dumps(result))
"""
EXPLAINED = """
import json, pathlib, sys
(pathlib.Path(sys.argv[-1]) / "error.json").write_text(json.dumps({"message": "node view (view) cannot be pruned"}))
sys.exit(3)
"""
CRASHED = """
import sys
print("Traceback (most recent call last):", file=sys.stderr)
print("ImportError: libtorch.so is missing", file=sys.stderr)
sys.exit(1)
"""
SILENT = "import sys; sys.exit(0)"
KILLED = "import os; os.kill(os.getpid(), 9)"


def fake_python(folder: Path, program: str) -> Path:
    """Write an executable that runs a program in place of the one on its command line.

    Args:
        folder: existing folder for the executable.
        program: text of a Python program; its last argument is the folder of the job.
    """
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)
    return path


def pruning(good_from: float = 0.0, offset: float = 0.0) -> str:
    """Return a program that keeps the outputs down to a share of the FLOPs and turns them round below.

    Args:
        good_from: smallest share of the FLOPs with the outputs of the source.
        offset: difference of the outputs that it reports for PyTorch from those of its ONNX file.
    """
    return PRUNING.format(good_from=good_from, offset=offset)
