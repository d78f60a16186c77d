"""Tensors of a Python model in the memory of a real GPU.

Outputs: the model gives a DLPack capsule, the client gets the values. Inputs: a client's process owns the memory, and the model
gets tensors that its process has opened by CUDA IPC. They are read by PyTorch if it is installed, otherwise by PyCUDA.
Modules of PyTorch: their tensors are on the GPU of the instance.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.exported_memory import export
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import ROOT, Server, serving

pytestmark = gpu_marks(120, "fastapi", "uvicorn")

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x", data_type: TYPE_FP32, dims: [ 4 ] }
output { name: "y", data_type: TYPE_FP32, dims: [ 4 ] }
"""
CODE = """
import ctypes
import numpy as np
import triton_python_backend_utils as pb_utils
import device_capsules

class TritonPythonModel:
    def initialize(self, args):
        self.driver = driver = ctypes.CDLL("libcuda.so.1")
        device, context, self.address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        statuses = [driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0)]
        statuses.append(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        statuses.append(driver.cuCtxPushCurrent_v2(context))
        statuses.append(driver.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(1 << 20)))
        assert not any(statuses), statuses

    def execute(self, requests):
        responses, address = [], self.address.value
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy() * 2
            status = self.driver.cuMemcpyHtoD_v2(
                ctypes.c_uint64(address), ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
            assert not status, status
            tensor = pb_utils.Tensor.from_dlpack("y", device_capsules.capsule(address, x.shape, x.dtype))
            assert not tensor.is_cpu()
            responses.append(pb_utils.InferenceResponse([tensor]))
            address += x.nbytes
        return responses
"""


def test_an_output_on_the_gpu_reaches_the_client(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "doubled" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text(CODE)
    shutil.copy(ROOT / "tests" / "support" / "device_capsules.py", folder)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": list(range(8))}]}
    with serving(tmp_path / "repository", tmp_path) as server:
        for _ in range(3):
            status, _, content = server.request("POST", "/v2/models/doubled/infer", json.dumps(body).encode())
            assert status == 200, content
            assert json.loads(content)["outputs"][0]["data"] == [2.0 * value for value in range(8)]


INPUTS = """
backend: "python"
max_batch_size: 8
input { name: "x", data_type: TYPE_FP32, dims: [ 4 ] }
output [ { name: "y", data_type: TYPE_FP32, dims: [ 4 ] }, { name: "facts", data_type: TYPE_INT64, dims: [ 2 ] } ]
dynamic_batching { max_queue_delay_microseconds: 100000 }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""
# facts: is_cpu, requests of the batch.
READER = """
import numpy as np
import triton_python_backend_utils as pb_utils

try:
    import torch
except ImportError:
    torch = None
    import pycuda.driver as driver
    from headrace_model import device
    driver.init()
    context = driver.Device(0).retain_primary_context()

def doubled(x):
    if x.is_cpu():
        return pb_utils.Tensor("y", x.as_numpy() * 2)
    if torch is not None:
        first, second = torch.from_dlpack(x), torch.utils.dlpack.from_dlpack(x.to_dlpack())
        assert first.is_cuda and first.data_ptr() == second.data_ptr()
        return pb_utils.Tensor.from_dlpack("y", first + second)
    capsule = x.to_dlpack()
    tensor = device.read_capsule(capsule)
    assert (tensor.device_type, tensor.device_id) == x.__dlpack_device__() == (2, 0)
    array = np.empty(x.shape(), np.float32)
    context.push()
    try:
        driver.memcpy_dtoh(array, tensor.data + tensor.byte_offset)
    finally:
        driver.Context.pop()
    return pb_utils.Tensor("y", array * 2)

class TritonPythonModel:
    def initialize(self, args):
        print("the inputs are read by", "PyTorch" if torch is not None else "PyCUDA")

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            facts = np.array([[x.is_cpu(), len(requests)]] * x.shape()[0], np.int64)
            responses.append(pb_utils.InferenceResponse([doubled(x), pb_utils.Tensor("facts", facts)]))
        return responses
"""


def _call(server: Server, path: str, document: dict[str, Any]) -> Any:
    status, _, content = server.request("POST", f"/v2/{path}", json.dumps(document).encode())
    assert status == 200, content
    return json.loads(content or b"{}")


def _infer(server: Server, x: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Values of `y`, and `facts` of the first row."""
    document = _call(server, "models/reader/infer", {"inputs": [{"name": "x", "datatype": "FP32", **x}]})
    outputs = {output["name"]: output["data"] for output in document["outputs"]}
    return outputs["y"], outputs["facts"][:2]


def test_inputs_in_cuda_shared_memory_stay_on_the_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "reader" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(INPUTS)
    (folder / "model.py").write_text(READER)
    values = np.arange(40, dtype=np.float32).reshape(10, 4)

    def shared(region: str, first: int, rows: int) -> dict[str, Any]:
        place = {"shared_memory_offset": 16 * first, "shared_memory_byte_size": 16 * rows}
        return {"shape": [rows, 4], "parameters": {"shared_memory_region": region, **place}}

    with serving(tmp_path / "repository", tmp_path, "--allow-client-shm") as server:
        for number in range(3):  # each time other processes, whose memory may have the same address
            with export((values + number).tobytes()) as one, export((values + 100).tobytes()) as two:
                for name, handle in (("one", one), ("two", two)):
                    document = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "device_id": 0}
                    _call(server, f"cudasharedmemory/region/{name}/register", {**document, "byte_size": values.nbytes})
                host = {"shape": [1, 4], "data": [1, 2, 3, 4]}
                requests = [shared("one", 0, 1), shared("two", 3, 2), host, shared("one", 2, 3)]
                rights = [values[:1] + number, values[3:5] + 100, np.array([1, 2, 3, 4]), values[2:5] + number]
                largest = 0
                with ThreadPoolExecutor(4) as pool:
                    for _ in range(3):
                        results = pool.map(lambda each: _infer(server, each), requests)
                        for (y, facts), right, request in zip(results, rights, requests, strict=True):
                            assert y == (right * 2).reshape(-1).tolist()
                            assert facts[0] == ("data" in request)
                            largest = max(largest, facts[1])
                assert largest > 1, "no batch had several requests"
                for name in ("one", "two"):
                    _call(server, f"cudasharedmemory/region/{name}/unregister", {})
        print([line for line in server.text.splitlines() if "the inputs are read by" in line])
        assert "Traceback" not in server.text, server.text


MODULE = """
import sys, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]))
    def forward(self, x):
        return x * self.factor, torch.full_like(x, float(x.is_cuda))

script, program = sys.argv[1:]
model, x = Model().eval(), torch.zeros(3, 4)
torch.jit.script(model).save(script)
rows = torch.export.Dim("rows")
torch.export.save(torch.export.export(model.cuda(), (x.cuda(),), dynamic_shapes=({0: rows},)), program)
"""
MODULE_CONFIG = """
backend: "pytorch"
max_batch_size: 8
input { name: "INPUT__0", data_type: TYPE_FP32, dims: [ 4 ] }
output [ { name: "OUTPUT__0", data_type: TYPE_FP32, dims: [ 4 ] }, { name: "OUTPUT__1", data_type: TYPE_FP32, dims: [ 4 ] } ]
instance_group { kind: KIND_GPU }
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_module_of_pytorch_runs_on_its_gpu(tmp_path: Path) -> None:
    files = {}
    for name, suffix in (("script", "pt"), ("program", "pt2")):
        files[name] = tmp_path / "repository" / name / "1" / f"model.{suffix}"
        files[name].parent.mkdir(parents=True)
        (files[name].parent.parent / "config.pbtxt").write_text(MODULE_CONFIG)
    program = tmp_path / "save.py"  # a file: torch.jit.script reads the source of the class
    program.write_text(MODULE)
    subprocess.run([sys.executable, "-W", "ignore", program, files["script"], files["program"]], check=True)
    body = {"inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [2, 4], "data": list(range(8))}]}
    with serving(tmp_path / "repository", tmp_path) as server:
        for name in files:
            outputs = {each["name"]: each["data"] for each in _call(server, f"models/{name}/infer", body)["outputs"]}
            assert outputs == {"OUTPUT__0": [2.0 * value for value in range(8)], "OUTPUT__1": [1.0] * 8}, name
