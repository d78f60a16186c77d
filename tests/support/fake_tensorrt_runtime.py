"""The runtime side of the fake TensorRT: plans are run by ONNX Runtime, unoptimised."""

from __future__ import annotations

import base64
import ctypes
import enum
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from headrace_engines.onnx_graph import OnnxRunner
from onnx import helper

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt_plugins import PluginRunner, destroy_with, load_plugins

MAGIC = b"PLAN"


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64 = range(9)

    @property
    def itemsize(self) -> int:
        return {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT32": 4, "INT64": 8}.get(self.name, 1)


ONNX_TYPES = {
    1: DataType.FLOAT,
    3: DataType.INT8,
    10: DataType.HALF,
    7: DataType.INT64,
    6: DataType.INT32,
    9: DataType.BOOL,
}
_NUMPY = {v: helper.tensor_dtype_to_np_dtype(k) for k, v in ONNX_TYPES.items()}


class FakeRuntime:
    def __init__(self, trt: Any, cuda: FakeCuda, logger: Any) -> None:
        assert cuda.depth > 0, "the real one ends the process here"
        self._trt, self._cuda, self._logger = trt, cuda, logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan: bytes) -> _Engine | None:
        if not plan.startswith(MAGIC):
            self._logger.log(1, "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.")
            return None
        try:
            document = json.loads(plan[len(MAGIC) :])
        except ValueError:
            self._logger.log(1, "Serialization assertion failed: the plan is cut off.")
            return None
        built, here = ([int(part) for part in text.split(".")] for text in (document["version"], self._trt.__version__))
        if document["host_code"] and not self.engine_host_code_allowed:
            self._logger.log(1, "Cannot deserialize engine with lean runtime, host code is not allowed.")
            return None
        fits = document["host_code"] and built[0] == here[0] and built <= here
        if not fits and document["version"] != self._trt.__version__:
            text = "The engine plan file is not compatible with this version of TensorRT, expecting library version"
            self._logger.log(1, f"{text} {self._trt.__version__} got {document['version']}")
            return None
        model = onnx.ModelProto.FromString(base64.b64decode(document["onnx"]))
        plugins = load_plugins(self._trt, document, model, self._logger)
        return None if plugins is None else _Engine(self._trt, self._cuda, self._logger, document, model, plugins)


class _Engine:
    device_memory_size_v2 = 4096

    def __init__(
        self,
        trt: Any,
        cuda: FakeCuda,
        logger: Any,
        document: dict[str, Any],
        model: onnx.ModelProto,
        plugins: dict[str, Any],
    ) -> None:
        self.trt, self.cuda, self.logger = trt, cuda, logger
        self.model = model
        self.plugins = plugins
        destroy_with(self, plugins)
        self.debug: list[str] = document["debug"]
        self.runner: Any = None if plugins else OnnxRunner(self.model, self.debug, optimize=False)
        self.profiles = document["profiles"] or [{}]
        self.num_optimization_profiles = len(self.profiles)
        graph = self.model.graph
        self.values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
        self.inputs = [value.name for value in graph.input]
        self.names = [*self.inputs, *[value.name for value in graph.output]]
        self.num_io_tensors = len(self.names)
        if not trt.__version__.startswith("10."):
            self.get_engine_stat = lambda stat: 12345

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self.inputs else self.trt.TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.TensorLocation.DEVICE

    def get_tensor_format(self, name: str) -> Any:
        return self.trt.TensorFormat.LINEAR

    def get_tensor_dtype(self, name: str) -> DataType:
        return ONNX_TYPES[self.values[name].elem_type]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [d.dim_value if d.HasField("dim_value") else -1 for d in self.values[name].shape.dim]

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return self.profiles[profile][name]

    def create_execution_context(self, strategy: Any = None) -> _Context | None:
        self.trt.state.contexts += 1
        self.trt.state.log("creating a context")
        plugins = {name: plugin.attach_to_context(None) for name, plugin in self.plugins.items()}
        runner = PluginRunner(self.cuda, self.model, plugins) if plugins else self.runner
        created = _Context(self, runner, owns_memory=strategy is None)
        destroy_with(created, plugins)
        if not plugins:  # they own memory of the GPU
            self.trt.state.made.append(created)
        return created

    def create_engine_inspector(self) -> Any:
        fused = self.trt.state.fused - set(self.debug)
        dequantized = {node.output[0] for node in self.model.graph.node if node.op_type == "DequantizeLinear"}
        layers = [
            {
                "Name": node.name,
                "LayerType": node.op_type,
                "Inputs": [
                    {
                        "Name": node.input[0],
                        "Format/Datatype": f"Row major linear {'INT8' if node.input[0] in dequantized else 'FP32'}",
                    }
                ],
                "Outputs": [{"Name": name} for name in node.output if name not in fused],
                "TacticName": f"fake_{node.op_type.lower()}",
                "Metadata": f"[ONNX Layer: {node.name}]",
            }
            for node in self.model.graph.node
        ]
        text = json.dumps({"Layers": layers, "Bindings": self.names})
        return SimpleNamespace(execution_context=None, get_engine_information=lambda form: text)


class _Context:
    def __init__(self, engine: _Engine, runner: Any, owns_memory: bool) -> None:
        self._engine = engine
        self._runner = runner
        self.enqueue_emits_profile = True
        self._scratch: int | None = 0 if owns_memory else None
        self.active_optimization_profile = 0
        self.profiler: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._listener: Any = None
        self._reports = False

    def set_debug_listener(self, listener: Any) -> bool:
        self._listener = listener
        return bool(self._engine.debug)

    def set_all_tensors_debug_state(self, flag: bool) -> bool:
        self._reports = flag
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory
        assert size == self._engine.device_memory_size_v2
        self._scratch = memory

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.active_optimization_profile = index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        ranges = self._engine.profiles[self.active_optimization_profile].get(name)
        if ranges is not None and not all(a <= s <= b for a, s, b in zip(ranges[0], shape, ranges[2], strict=True)):
            return False
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self._addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self._allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> list[int]:
        if self._engine.trt.state.late_shapes:
            return [-1 for _ in self._engine.get_tensor_shape(name)]
        return list(self._run(self._shapes, None)[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream
        assert self._scratch is not None, "it has no device memory"
        if self._engine.trt.state.broken:
            return False
        done: list[bool] = []
        cuda = self._engine.cuda
        if cuda.captured is None:
            cuda.now_us += getattr(cuda, "enqueue_us", 0)
        # The real one reads shapes and addresses when the work is queued.
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        cuda.submit(lambda: done.append(self._execute(shapes, addresses)), stream)
        return all(done)

    def _execute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> bool:
        cuda = self._engine.cuda
        cuda.now_us += getattr(cuda, "row_us", 0) * [*shapes.values(), (1,)][0][0]
        for name, values in self._run(shapes, addresses).items():
            values = np.array(values, order="C")
            if name in self._engine.debug:
                if self._reports and not self._report(name, values):
                    return False
                continue
            address = addresses.get(name)
            if self._engine.trt.state.late_shapes:
                address = self._allocators[name].reallocate_output_async(name, 0, values.nbytes, 256, 77)
                if not address:
                    return False
                self._allocators[name].notify_shape(name, values.shape)
            assert address
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
        if self.profiler is not None and self.enqueue_emits_profile:
            self.report_to_profiler()
        return True

    def report_to_profiler(self) -> bool:
        if self.profiler is not None:
            for number, node in enumerate(self._engine.model.graph.node):
                self.profiler.report_layer_time(node.name, 0.01 * (number + 1))
        return True

    def _report(self, name: str, values: Any) -> bool:
        kinds = {dtype: kind for kind, dtype in _NUMPY.items()}
        place, kind = self._engine.trt.TensorLocation.DEVICE, kinds[values.dtype]
        return bool(self._listener.process_debug_tensor(values.ctypes.data, place, kind, list(values.shape), name, 77))

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int] | None) -> dict[str, Any]:
        """Run on the inputs at these addresses, on zeros without."""
        feeds = {}
        for name, shape in shapes.items():
            kind = self._engine.get_tensor_dtype(name)
            feeds[name] = np.zeros(shape, _NUMPY[kind]) if addresses is None else array_at(addresses[name], shape, kind)
        if isinstance(self._runner, PluginRunner):
            self._runner.zeros = addresses is None
        return self._runner.run(feeds)


def array_at(address: int, shape: Any, kind: DataType) -> Any:
    dtype = np.dtype(_NUMPY[kind])
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)
