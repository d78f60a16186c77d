"""Plug-ins of the fake TensorRT: the registry, and what the builder, the runtime and a context do with an `IPluginV3`.

A plan holds the fields that a plug-in serialises. Tensors of plug-ins are channels last, as in the real one's HWC8. Kernels run
on a stream of the fake's own, and are done when `enqueue` has returned to the engine.
"""

from __future__ import annotations

import base64
import ctypes
import enum
import weakref
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

STREAM = 991
_BASES = (
    "IPluginV3",
    "IPluginV3OneCore",
    "IPluginV3OneBuild",
    "IPluginV3OneRuntime",
    "IPluginCreatorV3One",
)


class PluginField(ctypes.Structure):
    """A pointer to the values, in memory as the binding of TensorRT 10.6 has it: a C structure, its address in the object.

    `data` repeats the first value, as that binding does with NumPy 2.
    """

    _fields_ = (
        ("_name", ctypes.c_char_p),
        ("_data", ctypes.c_void_p),
        ("_type", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )

    def __init__(self, name: str, data: Any, type: Any) -> None:  # noqa: A002
        values = np.asarray(data)
        super().__init__(name.encode(), values.ctypes.data, type.value, values.size)
        self.kept, self.dtype, self.type = values, values.dtype, type

    @property
    def name(self) -> str:
        return str(self._name.decode())

    @property
    def data(self) -> Any:
        return np.full(self.size, np.frombuffer(self.content(), self.dtype)[:1])

    def content(self) -> bytes:
        """Return the bytes in memory."""
        return ctypes.string_at(self._data, self.size * self.dtype.itemsize)


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        key = creator.name, creator.plugin_version
        assert key not in self.creators, "the real one returns False"
        assert creator.plugin_namespace == namespace
        self.creators[key] = creator
        return True


def add_plugins(trt: Any) -> None:
    """Add the interfaces of plug-ins to the module."""
    for base in _BASES:
        setattr(trt, base, type(base, (), {"__init__": lambda self: None}))
    trt.PluginField, trt.PluginFieldCollection, trt.DimsExprs = PluginField, list, list
    trt.PluginFieldType = enum.Enum("PluginFieldType", "FLOAT16 FLOAT32 INT8 INT32 CHAR")
    trt.TensorRTPhase = enum.Enum("TensorRTPhase", "BUILD RUNTIME")
    registry = Registry()
    trt.get_plugin_registry = lambda: registry


def serialize_plugins(trt: Any, model: onnx.ModelProto, logger: Any) -> dict[str, dict[str, Any]] | None:
    """Create the plug-ins of a model's nodes as the builder does, and return their fields; None if one is refused."""
    plugins: dict[str, dict[str, Any]] = {}
    for node in model.graph.node:
        creator = _creator(trt, node.op_type)
        if creator is None:
            continue
        fields = [
            PluginField(a.name, np.array(helper.get_attribute_value(a), np.int32), trt.PluginFieldType.INT32)
            for a in node.attribute
        ]
        plugin = creator.create_plugin(node.name, fields, trt.TensorRTPhase.BUILD)
        assert plugin is not None, "the real one ends the process here"
        plugin = plugin.clone()
        count = len(node.input)
        for position in range(count + 1):
            for form in trt.TensorFormat:
                described = [SimpleNamespace(desc=SimpleNamespace(type=trt.DataType.HALF, format=form))] * (count + 1)
                supported = plugin.supports_format_combination(position, described, count)
                assert supported == (form is trt.TensorFormat.HWC8)
        assert plugin.get_output_data_types([trt.DataType.HALF] * count) == [trt.DataType.HALF]
        fields = plugin.get_fields_to_serialize()
        values = {field.name: base64.b64encode(field.content()).decode() for field in fields}
        plugins[node.name] = {"version": creator.plugin_version, "fields": values}
    return plugins


def load_plugins(trt: Any, document: Mapping[str, Any], model: onnx.ModelProto, logger: Any) -> dict[str, Any] | None:
    """Create the plug-ins of a plan as the runtime does; None if one is unknown or refused."""
    plugins = {}
    operators = {node.name: node.op_type for node in model.graph.node}
    for name, stored in document.get("plugins", {}).items():
        key = operators[name], stored["version"]
        creator = trt.get_plugin_registry().creators.get(key)
        if creator is None:
            logger.log(1, f"Cannot find plugin: {key[0]}, version: {key[1]}, namespace:.")
            text = "Cannot deserialize plugin since corresponding IPluginCreator not found in Plugin Registry"
            logger.log(1, text)
            return None
        fields = [
            PluginField(name_, np.frombuffer(base64.b64decode(value), np.int8), trt.PluginFieldType.INT8)
            for name_, value in stored["fields"].items()
        ]
        plugin = creator.create_plugin(name, fields, trt.TensorRTPhase.RUNTIME)
        assert plugin is not None, "the real one ends the process here"
        plugins[name] = plugin
    return plugins


def _creator(trt: Any, operator: str) -> Any:
    return next((c for (name, _), c in trt.get_plugin_registry().creators.items() if name == operator), None)


_kept: list[Any] = []


def destroy_with(owner: Any, plugins: Mapping[str, Any]) -> None:
    """Destroy the plug-ins when their engine or context is deleted; like the binding, keep references to them for ever."""
    _kept.extend(plugins.values())

    def destroy(doomed: list[Any]) -> None:
        for plugin in doomed:
            plugin.destroy()

    weakref.finalize(owner, destroy, list(plugins.values())).atexit = False


class PluginRunner:
    """Runs a model with plug-ins on the host: ONNX's reference, and the plug-ins' kernels.

    Args:
        cuda: the fake GPU.
        model: with nodes of plug-ins.
        plugins: by name of the node, those of the engine or of one context.
    """

    def __init__(self, cuda: Any, model: onnx.ModelProto, plugins: Mapping[str, Any]) -> None:
        self._cuda = cuda
        self.zeros = True
        self.plugins = plugins
        found = weakref.ref(self)  # ONNX keeps the classes of operators
        operators = {node.op_type for node in model.graph.node if node.name in plugins}

        def operator(kind: str) -> type:
            class Operator(OpRun):  # type: ignore[misc]
                op_domain = ""

                def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any]:
                    runner = found()
                    assert runner is not None
                    return (runner.enqueue(runner.plugins[self.onnx_node.name], inputs),)

            return type(kind, (Operator,), {})

        self._session = ReferenceEvaluator(model, new_ops=[operator(kind) for kind in operators])
        self._names = [value.name for value in model.graph.output]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, self._session.run(None, dict(feeds)), strict=True))

    def enqueue(self, plugin: Any, inputs: Any) -> Any:
        """Run a plug-in on arrays (n, c, h, w) and return its output."""
        builder = SimpleNamespace(constant=lambda size: size)
        (shape,) = plugin.get_output_shapes([list(each.shape) for each in inputs], [], builder)
        if self.zeros:
            return np.zeros(shape, inputs[0].dtype)
        blocks = [np.ascontiguousarray(each.transpose(0, 2, 3, 1)) for each in inputs]
        n, k, height, width = shape
        result = np.full((n, height, width, k), np.nan, inputs[0].dtype)
        described = [SimpleNamespace(dims=list(each.shape)) for each in inputs]
        plugin.on_shape_change(described, [SimpleNamespace(dims=shape)])
        queues = getattr(self._cuda, "queues", None)
        if queues is not None:
            queues.setdefault(STREAM, deque())
        addresses = [_aligned(block) for block in blocks]
        target = _aligned(result)
        for (address, _), block in zip(addresses, blocks, strict=True):
            ctypes.memmove(address, block.ctypes.data, block.nbytes)
        plugin.enqueue(described, [], [address for address, _ in addresses], [target[0]], 0, STREAM)
        while queues is not None and queues.get(STREAM):
            assert queues[STREAM].popleft()()
        if queues is not None:
            queues.pop(STREAM, None)
        ctypes.memmove(result.ctypes.data, target[0], result.nbytes)
        return result.transpose(0, 3, 1, 2)


def _aligned(block: Any) -> tuple[int, Any]:
    """Return the address of memory for an array, a multiple of 16, and its owner."""
    owner = ctypes.create_string_buffer(block.nbytes + 16)
    return -(-ctypes.addressof(owner) // 16) * 16, owner
