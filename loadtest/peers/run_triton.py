"""NVIDIA's tritonserver (from the nvidia-pytriton wheel) with its Python backend around ONNX Runtime, one instance.

Runs in the environment of requirements/triton.txt. The wheel has no ONNX Runtime backend. Dynamic batching is on, as Triton's
optimisation guide recommends; the preferred sizes and the delay stay at their defaults, which batch the queued requests.
`--identity FILE` is a model.py that returns its input, the same file that Headrace serves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import onnxruntime as ort
import pytriton

CONFIG = """
name: "model"
backend: "python"
max_batch_size: 64
input [{{ name: "input" data_type: TYPE_FP32 dims: [{features}] }}]
output [{{ name: "output" data_type: TYPE_FP32 dims: [{classes}] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
dynamic_batching {{ }}
"""
# The stub process starts Python without this environment's packages.
MODEL = """
import sys

sys.path.insert(0, {packages!r})

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession({path!r}, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        outputs = self._session.run(None, {{"input": np.concatenate(rows)}})[0]
        parts = np.split(outputs, np.cumsum([len(part) for part in rows])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("output", part)]) for part in parts]
"""


def main() -> None:
    """Write a repository with one model, then become tritonserver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--identity", type=Path, help="a model.py to serve in place of the ONNX file")
    options = parser.parse_args()
    package = Path(pytriton.__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="peer-triton-"))
    backends = folder / "backends"
    shutil.copytree(package / "tritonserver" / "backends", backends)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    session = ort.InferenceSession(str(options.model), providers=["CPUExecutionProvider"])
    model = folder / "repository" / "model"
    (model / "1").mkdir(parents=True)
    features, classes = session.get_inputs()[0].shape[1], session.get_outputs()[0].shape[1]
    (model / "config.pbtxt").write_text(CONFIG.format(features=features, classes=classes))
    packages = sysconfig.get_paths()["purelib"]
    code = MODEL.format(path=str(options.model.resolve()), packages=packages)
    if options.identity:
        code = f"import sys\nsys.path.insert(0, {packages!r})\n{options.identity.read_text()}"
    (model / "1" / "model.py").write_text(code)
    libraries = [
        str(package.parent / "nvidia_pytriton.libs"),
        sysconfig.get_config_var("LIBDIR"),
        os.environ.get("LD_LIBRARY_PATH", ""),
    ]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(filter(None, libraries))}
    binary = str(package / "tritonserver" / "bin" / "tritonserver")
    words = [binary, f"--model-repository={folder / 'repository'}", f"--backend-directory={backends}"]
    words += ["--http-address=127.0.0.1", f"--http-port={options.port}", "--allow-grpc=false", "--allow-metrics=false"]
    words += ["--allow-gpu-metrics=false", "--log-verbose=0"]
    os.execve(binary, words, environment)


if __name__ == "__main__":
    main()
