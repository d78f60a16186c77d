"""TensorRT without a GPU, in the flavours of 10 and 11: builds "plans" that hold the ONNX model and runs them on the host.

What the real one refuses, the fake refuses: a builder without a current context, weak typing in 11, unset shapes.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import json
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt_plugins import add_plugins, serialize_plugins
from tests.support.fake_tensorrt_runtime import MAGIC, ONNX_TYPES, DataType, FakeRuntime


class State:
    """Settings and records of a test.

    Attributes:
        unsupported: operators without an importer.
        one_error: True if the parser stops at the first node it does not support.
        failure: log of a failing builder; empty if the build succeeds.
        refuses: returns the log of a failing build of a model; "" if the build succeeds.
        gpu: name of the GPU, which timing caches are for.
        network_flags: flags of created networks.
        config: the last builder configuration.
        broken: True if executions fail.
        contexts, made: number of created execution contexts, and those without plug-ins, which are never freed.
        fused: tensors inside of fused layers, which the inspector lists only if they are debug tensors.
        late_shapes: True if the shapes of outputs depend on data.
        on_step, on_log: called in a callback of the builder's progress, of the logger; exceptions do not leave the callback.
    """

    def __init__(self) -> None:
        self.unsupported: set[str] = set()
        self.one_error = False
        self.failure: list[str] = []
        self.refuses: Callable[[onnx.ModelProto], str] = lambda model: ""
        self.gpu = "Fake H1"
        self.network_flags: list[int] = []
        self.config: Any = None
        self.broken = False
        self.fused: set[str] = set()
        self.late_shapes = False
        self.steps = 0
        self.contexts = 0
        self.made: list[Any] = []
        self.on_step: Callable[[], None] = lambda: None
        self.on_log: Callable[[str], None] = lambda text: None

    def log(self, text: str) -> None:
        """Send a message to Python's logger."""
        # TensorRT discards exceptions of a callback.
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            self.on_log(text)


def fake_tensorrt(cuda: FakeCuda, version: str = "10.6.0", state: State | None = None) -> Any:
    """A module `tensorrt`; its `state` steers it."""
    trt: Any = ModuleType("tensorrt")
    trt.__version__ = version
    trt.state = state or State()
    old = version.startswith("10.")
    trt.DataType = DataType
    trt.TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
    trt.TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST")
    trt.ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED NONE")
    trt.ExecutionContextAllocationStrategy = enum.Enum("ExecutionContextAllocationStrategy", "STATIC USER_MANAGED")
    trt.LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON")
    trt.MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE TACTIC_DRAM")
    trt.TensorFormat = enum.IntEnum("TensorFormat", "LINEAR CHW32 HWC HWC8", start=0)
    trt.BuilderFlag = enum.Enum(
        "BuilderFlag",
        "FP16 BF16 INT8 FP8 TF32 VERSION_COMPATIBLE" if old else "TF32 EDITABLE_TIMING_CACHE VERSION_COMPATIBLE",
    )
    trt.NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
    for base in ("ILogger", "IProgressMonitor", "IOutputAllocator", "IProfiler", "IDebugListener"):
        setattr(trt, base, type(base, (), {}))
    trt.init_libnvinfer_plugins = lambda logger, namespace: True
    add_plugins(trt)
    if not old:
        trt.EngineStat = enum.Enum("EngineStat", "TOTAL_WEIGHTS_SIZE")
    trt.Builder = lambda logger: _Builder(trt, cuda, logger, old)
    trt.OnnxParser = lambda network, logger: _Parser(trt, network)
    trt.Runtime = lambda logger: FakeRuntime(trt, cuda, logger)
    return trt


class _Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.model: onnx.ModelProto | None = None
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.parsers: list[_Parser] = []
        self.debug: list[str] = []

    @property
    def num_layers(self) -> int:
        return len(self.model.graph.node) if self.model is not None else 0

    def get_layer(self, index: int) -> Any:
        assert self.model is not None
        outputs = [SimpleNamespace(name=name) for name in self.model.graph.node[index].output]
        return SimpleNamespace(num_outputs=len(outputs), get_output=outputs.__getitem__)

    def mark_debug(self, tensor: Any) -> bool:
        self.debug.append(tensor.name)
        return True

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    def read(self, model: onnx.ModelProto) -> None:
        self.model = model
        for value in model.graph.input:
            tensor_type = value.type.tensor_type
            shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor_type.shape.dim)
            tensor = SimpleNamespace(
                name=value.name,
                shape=shape,
                dtype=ONNX_TYPES[tensor_type.elem_type],
                is_shape_tensor=value.name == "shape",
            )
            self.inputs.append(tensor)
        self.outputs = [SimpleNamespace(name=value.name) for value in model.graph.output]


class _Parser:
    """As in the bindings of the real one, a network keeps its parser, and no parser keeps its network."""

    def __init__(self, trt: Any, network: _Network) -> None:
        self._trt = trt
        self._known = weakref.ref(network)
        network.parsers.append(self)
        self._errors: list[Any] = []
        self._parts: list[tuple[bool, list[int]]] = []

    def parse(self, data: bytes) -> bool:
        model = onnx.ModelProto.FromString(data)
        self._find(model)
        if self._trt.state.one_error:
            del self._errors[1:]
        self._trt.state.log("parsing")
        if not self._errors:
            self._network().read(model)
        return not self._errors

    def supports_operator(self, name: str) -> bool:
        return name not in self._trt.state.unsupported

    def supports_model_v2(self, data: bytes) -> bool:
        self._find(onnx.ModelProto.FromString(data))
        bad = [error.node() for error in self._errors]
        self._parts = [(True, []), *[(False, [index]) for index in bad]]
        del self._errors[1:]
        return not bad

    def _network(self) -> _Network:
        network = self._known()
        assert network is not None, "the real one reads freed memory here"
        return network

    def _find(self, model: onnx.ModelProto) -> None:
        self._network()
        for index, node in enumerate(model.graph.node):
            if node.op_type in self._trt.state.unsupported:
                text = f"No importer registered for op: {node.op_type}."
                self._errors.append(_error("UNSUPPORTED_NODE", index, node.name, node.op_type, text))
            if node.op_type == "Broken":
                self._errors.append(_error("INVALID_NODE", index, node.name, node.op_type, "Assertion\n failed"))

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    @property
    def num_subgraphs(self) -> int:
        return len(self._parts)

    def is_subgraph_supported(self, index: int) -> bool:
        return self._parts[index][0]

    def get_subgraph_nodes(self, index: int) -> list[int]:
        return self._parts[index][1]


def _error(code: str, index: int, name: str, operator: str, text: str) -> Any:
    return SimpleNamespace(
        code=lambda: SimpleNamespace(name=code),
        node=lambda: index,
        node_name=lambda: name,
        node_operator=lambda: operator,
        desc=lambda: text,
    )


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, minimum: Any, optimum: Any, maximum: Any) -> None:
        self.shapes[name] = [list(minimum), list(optimum), list(maximum)]


class _TimingCache:
    def __init__(self, data: bytes, gpu: str) -> None:
        self.content: dict[str, Any] = json.loads(data) if data else {"gpu": gpu, "kernels": []}

    def combine(self, other: _TimingCache, ignore_mismatch: bool) -> bool:
        self.content["kernels"] = sorted({*self.content["kernels"], *other.content["kernels"]})
        return True

    def serialize(self) -> bytes:
        return json.dumps(self.content).encode()


class _Config:
    """IBuilderConfig; an attribute that the real one lacks cannot be set."""

    __slots__ = (
        "_old",
        "_state",
        "builder_optimization_level",
        "cache",
        "flags",
        "pools",
        "profiles",
        "profiling_verbosity",
        "progress_monitor",
    )

    def __init__(self, state: State, old: bool) -> None:
        self._state = state
        self._old = old
        self.flags: list[str] = []
        self.pools: dict[str, int] = {}
        self.profiles: list[_Profile] = []
        self.cache: _TimingCache | None = None
        self.progress_monitor: Any = None
        self.builder_optimization_level = 3

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.flags.append(f"not {flag.name}")

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.pools[pool.name] = size

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> _TimingCache:
        return _TimingCache(data, self._state.gpu)

    def set_timing_cache(self, cache: _TimingCache, ignore_mismatch: bool) -> bool:
        if cache.content["gpu"] != self._state.gpu:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> _TimingCache | None:
        return self.cache


class _Builder:
    def __init__(self, trt: Any, cuda: FakeCuda, logger: Any, old: bool) -> None:
        assert cuda.depth > 0, "the real one ends the process here"
        self._trt = trt
        self._state: State = trt.state
        self._logger = logger
        self._old = old
        self._state.log("starting a builder")

    def create_network(self, flags: int) -> _Network:
        self._state.network_flags.append(flags)
        return _Network(flags)

    def create_builder_config(self) -> _Config:
        self._state.config = _Config(self._state, self._old)
        return self._state.config

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        model = network.model
        assert model is not None
        self._logger.log(4, "verbose")
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        monitor.phase_start("Timing", "Building Engine", 4)
        for step in range(4):
            # The real one lets no exception out of a callback either.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self._state.on_step()
            self._state.steps += 1
            if not monitor.step_complete("Timing", step):
                self._logger.log(1, "Build canceled by user")
                return None
        monitor.phase_finish("Timing")
        monitor.step_complete("Building Engine", 0)
        failure = [*self._state.failure, *filter(None, [self._state.refuses(model)])]
        for text in failure:
            self._logger.log(1, text)
        if failure:
            return None
        if config.cache is not None:
            result = {node.op_type for node in model.graph.node} | set(config.cache.content["kernels"])
            config.cache.content["kernels"] = sorted(result)
        monitor.step_complete("Building Engine", 1)
        monitor.phase_finish("Building Engine")
        plugins = serialize_plugins(self._trt, model, self._logger)
        if plugins is None:
            return None
        document = {
            "version": self._trt.__version__,
            "plugins": plugins,
            "onnx": base64.b64encode(model.SerializeToString()).decode(),
            "profiles": [profile.shapes for profile in config.profiles],
            "debug": network.debug,
            "host_code": "VERSION_COMPATIBLE" in config.flags,
        }
        return MAGIC + json.dumps(document).encode()


def affine(rows: int | None = None, name: str = "affine", *, operator: str = "Relu") -> onnx.ModelProto:
    """y = relu(x @ w + b): x FP32[rows or free, 3], y FP32[.., 2]; nodes matmul, add, relu."""
    values = onnx.TensorProto.FLOAT
    weights = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="matmul"),
            helper.make_node("Add", ["h", "b"], ["s"], name="add"),
            helper.make_node(operator, ["s"], ["y"], name="relu"),
        ],
        name,
        [helper.make_tensor_value_info("x", values, [rows, 3])],
        [helper.make_tensor_value_info("y", values, [rows, 2])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([1, -1], np.float32), "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
