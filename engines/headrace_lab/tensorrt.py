"""TensorRT's own choice for a layer: a network of one convolution with its bias, residual and ReLU.

The network is strongly typed, without TF32. Its inputs and outputs may have NCHW, channels last or blocks of channels, as
TensorRT prefers, so that no conversion is part of the time. For the check, a kernel of the lab converts activations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace.runtimes.cuda.devices import Gpu
from headrace.runtimes.cuda.driver import CudaStream
from headrace.runtimes.cuda.kernels.loading import Kernels
from headrace.runtimes.cuda.memory import DeviceBuffer
from headrace_engines.errors import BuildError
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.api import TensorRtApi, explain_open, load
from headrace_engines.targets.tensorrt.target import BuilderOptions, available, build_plan
from onnx import helper, numpy_helper

from headrace_lab.inputs import DeviceOperands, HostOperands
from headrace_lab.kernels.resources import FOLDER
from headrace_lab.measure import RecordedLaunches, capture_launches

# Layouts by the size of an element; with channels in multiples of the blocks, HWC and HWC8 are (n, h, w, c) without padding.
_FORMATS = {2: ("LINEAR", "HWC8"), 4: ("LINEAR", "HWC", "CHW32")}
_BLOCKS = {"LINEAR": 1, "CHW32": 32}
# Names of TensorRT's kernels have the types of operands, results and sums: f16f16_f16f32_f32 has float32 sums.
_HALF_SUMS = re.compile("f16f16_f16f16_f16(?![0-9])")
_CHANNELS = 32
_GRID = 4096
_THREADS = 256


def layer_model(host: HostOperands) -> onnx.ModelProto:
    """Return the ONNX model of a layer: inputs "x" and, with a residual, "residual"; output "y"."""
    shape, epilogue = host.shape, host.epilogue
    kind = helper.np_dtype_to_tensor_dtype(host.dtype)
    weights = np.ascontiguousarray(host.weights.transpose(0, 3, 1, 2).astype(host.dtype))
    constants = [numpy_helper.from_array(weights, "weights")]
    if epilogue.bias:
        constants.append(numpy_helper.from_array(host.bias.astype(host.dtype), "bias"))
    y_shape = [shape.n, shape.k, shape.out_h, shape.out_w]
    inputs = [helper.make_tensor_value_info("x", kind, [shape.n, shape.c, shape.h, shape.w])]
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    geometry = {"strides": [shape.stride] * 2, "pads": [shape.pad] * 4, "group": shape.groups}
    steps.append(("Conv", [tensor.name for tensor in constants], geometry))
    if epilogue.residual:
        inputs.append(helper.make_tensor_value_info("residual", kind, y_shape))
        steps.append(("Add", ["residual"], {}))
    if epilogue.relu:
        steps.append(("Relu", [], {}))
    nodes = []
    value = "x"
    for number, (operator, operands, attributes) in enumerate(steps, 1):
        output = "y" if number == len(steps) else f"value{number}"
        nodes.append(helper.make_node(operator, [value, *operands], [output], name=operator.lower(), **attributes))
        value = output
    graph = helper.make_graph(nodes, "layer", inputs, [helper.make_tensor_value_info("y", kind, y_shape)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class TensorRt:
    """TensorRT on one GPU.

    Args:
        api: TensorRT.
        gpu: description of the GPU.
        device: its number.
        stream: stream of the layers.
        folder: folder for plans and the timing cache.
        level: effort of the builder, 0 to 5; None for TensorRT's default, 3.
    """

    def __init__(
        self, api: TensorRtApi, gpu: Gpu, device: int, stream: CudaStream, folder: Path, level: int | None = None
    ) -> None:
        self.api = api
        self._gpu = gpu
        self._device = device
        self._stream = stream
        self._folder = folder
        self._level = level

    @property
    def description(self) -> str:
        """Version and settings, for reports."""
        level = "" if self._level is None else f", optimization level {self._level}"
        return f"TensorRT {self.api.version}, strongly typed, no TF32, free layouts{level}"

    def open(self, host: HostOperands, operands: DeviceOperands) -> TensorRtCandidate:
        """Build the engine of a layer; the device must be current.

        Raises:
            BuildError: TensorRT cannot build or load it.
        """
        path = self._folder / "layer.plan"
        shape = host.shape
        formats = _FORMATS[host.dtype.itemsize]
        if shape.c % _CHANNELS or shape.k % _CHANNELS:
            # Blocks of channels would be padded; the buffers are not.
            formats = formats[:1]
        order = TargetSpec("fp16" if host.dtype.itemsize == 2 else "fp32", timing_cache=self._folder / "timing.cache")
        options = BuilderOptions(optimization_level=self._level, tf32=False, formats=formats)
        build_plan(self.api, layer_model(host), order, path, lambda *_: None, options, self._gpu)
        return TensorRtCandidate(self.api, path, host, operands, self._stream, (self._device, self._gpu.name))


def load_tensorrt(gpu: Gpu, device: int, stream: CudaStream, folder: Path, level: int | None = None) -> TensorRt | str:
    """Return TensorRT, or the reason why it cannot be used; arguments as for `TensorRt`."""
    missing = available(device)
    return missing or TensorRt(load(), gpu, device, stream, folder, level)


class TensorRtCandidate:
    """A layer's engine.

    Args:
        api: TensorRT.
        path: file of the plan.
        host: operands of the layer.
        operands: the same on the GPU.
        stream: stream of the layer.
        gpu: number and name of the GPU.

    Raises:
        BuildError: the plan cannot be loaded, or memory is missing.
    """

    name = "tensorrt"

    def __init__(
        self,
        api: TensorRtApi,
        path: Path,
        host: HostOperands,
        operands: DeviceOperands,
        stream: CudaStream,
        gpu: tuple[int, str],
    ) -> None:
        self._device = gpu[0]
        self._host, self._operands, self._stream = host, operands, stream
        self._scratch = DeviceBuffer()
        self._converted: list[DeviceBuffer] = []
        with api.log.collect() as errors:
            self._runtime = api.runtime(errors)
            self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
            if self._engine is None:
                raise BuildError(f"{path} {explain_open(errors, api.version, gpu[1])}")
            self.workspace_bytes: int | None = api.scratch_bytes(self._engine)
            self._scratch.reserve(self.workspace_bytes)
            self._context = api.context(self._engine, self._scratch.address, self.workspace_bytes)
            if self._context is None:
                self._scratch.free()
                raise BuildError(f"{path} has no execution context: close what else uses the GPU")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self._formats = {name: str(self._engine.get_tensor_format(name).name) for name in names}
        self.variant = _tactic(self._engine, api.trt, self._formats)
        self.half_sums = has_half_sums(self.variant)
        shape = host.shape
        self._context.set_input_shape("x", (shape.n, shape.c, shape.h, shape.w))
        if host.epilogue.residual:
            self._context.set_input_shape("residual", (shape.n, shape.k, shape.out_h, shape.out_w))

    def _enqueue(self, addresses: Mapping[str, int]) -> None:
        for name in self._formats:
            self._context.set_tensor_address(name, addresses[name])
        if not self._context.execute_async_v3(self._stream.handle):
            raise BuildError("TensorRT refuses to run the layer: see the messages before")

    def _launch(self, index: int) -> None:
        operands = self._operands
        # Values in another layout are as random as these.
        self._enqueue({"x": operands.x[index], "y": operands.y[index], "residual": operands.residual[index]})

    def run(self) -> int:
        """Run once on the first set of activations, wait, and return the address of the output (n, out_h, out_w, k). Operands
        are converted to the engine's layouts and the output back.
        """
        operands, shape = self._operands, self._host.shape
        operands.poison(0, self._stream)
        addresses = {"x": operands.x[0], "y": operands.y[0], "residual": operands.residual[0]}
        sizes = {"x": shape.x_shape, "y": shape.y_shape, "residual": shape.y_shape}
        for name in ("x", "residual"):
            if self._formats.get(name) in _BLOCKS:
                addresses[name] = self._convert(name, addresses[name], sizes[name], channels_last=False)
        if self._formats["y"] in _BLOCKS:
            self._converted.append(DeviceBuffer(math.prod(shape.y_shape) * self._host.dtype.itemsize))
            addresses["y"] = self._converted[-1].address
        self._enqueue(addresses)
        result = addresses["y"]
        if self._formats["y"] in _BLOCKS:
            result = self._convert("y", result, shape.y_shape, channels_last=True)
        self._stream.synchronize()
        return result

    def _convert(self, name: str, source: int, sizes: tuple[int, int, int, int], *, channels_last: bool) -> int:
        """Queue the conversion of a tensor and return the address of the result."""
        _, height, width, channels = sizes
        itemsize, elements = self._host.dtype.itemsize, math.prod(sizes)
        target = DeviceBuffer(elements * itemsize)
        self._converted.append(target)
        options = {"SIZE": itemsize, "BLOCK": _BLOCKS[self._formats[name]]}
        kernels = Kernels(self._device, f"{FOLDER}/layouts.cu", options, {"change_layout": "PPPiii"})
        arguments = (source, target.address, elements, channels, height * width, int(channels_last))
        kernels.launch("change_layout", (_GRID, 1), _THREADS, self._stream, *arguments)
        self._stream.synchronize()
        kernels.close()
        return target.address

    def capture(self, launches: int) -> RecordedLaunches:
        """Record launches that rotate over the sets of activations."""
        # What the check converted is not needed any more.
        self._free_converted()
        return capture_launches(self._stream, self._launch, launches, len(self._operands))

    def _free_converted(self) -> None:
        for buffer in self._converted:
            buffer.free()
        self._converted.clear()

    def close(self) -> None:
        """Free all memory; all work must be done."""
        # In this order: each object uses the next ones.
        self._context = self._engine = self._runtime = None
        self._scratch.free()
        self._free_converted()


def has_half_sums(tactics: str) -> bool:
    """Return whether a kernel of these accumulates in float16, by its name."""
    return _HALF_SUMS.search(tactics) is not None


def _tactic(engine: Any, trt: Any, formats: Mapping[str, str]) -> str:
    """Return the kernels of the engine and the layouts of input and output."""
    information = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    layers = json.loads(information, strict=False)["Layers"]
    tactics = [str(layer.get("TacticName") or layer.get("LayerType")) for layer in layers if isinstance(layer, dict)]
    return f"{' + '.join(tactics)} ({formats['x']} to {formats['y']})"
