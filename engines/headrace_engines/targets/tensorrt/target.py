"""TensorRT on an NVIDIA GPU as a target: builds plans from ONNX.

The import needs neither TensorRT nor a GPU. A target and its engines belong to one thread, which creates, uses and closes the
objects of CUDA and TensorRT.

A build parses the ONNX model, sets profiles, reads the timing cache, builds and writes the plan, with the device current.
Optimisation profiles are the ranges of shapes of a plan; they are checked before TensorRT reads them.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from headrace.config.machine import Machine
from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.convolution_plugin import collect_refusals
from headrace.runtimes.cuda.devices import Gpu
from headrace.runtimes.cuda.driver import current
from headrace_lab.kernels.plugin import PluginLayer

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import write_onnx
from headrace_engines.progress import Report, part
from headrace_engines.separate_process import call_apart
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.api import (
    FP8_CONVOLUTIONS,
    BuildProgress,
    ParserFault,
    TensorRtApi,
    TimingCache,
    as_build_error,
    build_failure,
    explain_parser,
    lean_library,
    load,
    load_lean_library,
    node_label,
    progress_monitor,
    signals_deferred,
    write_atomically,
)
from headrace_engines.targets.tensorrt.engine import TensorRtEngine
from headrace_engines.targets.tensorrt.observed import ObservedPlan, observe_plan

_CURE = "correct optimization.profiles"


def check_profiles(
    inputs: Mapping[str, tuple[tuple[int, ...], int]], profiles: Sequence[ShapeRange], memory_bytes: int
) -> None:
    """Check profiles against a network's inputs.

    Args:
        inputs: shape (-1 for free dimensions) and bytes of an element, by name.
        profiles: profiles of the specification.
        memory_bytes: total memory of the GPU.

    Raises:
        BuildError: a profile is inconsistent, lacks an input, or exceeds the memory of the GPU.
    """
    free = [name for name, (shape, _) in inputs.items() if -1 in shape]
    if free and not profiles:
        raise BuildError(f"the inputs {', '.join(free)} have free dimensions: write optimization.profiles")
    for number, profile in enumerate(profiles):
        location = f"profile {number + 1}" if len(profiles) > 1 else "the profile"
        unknown = sorted(set(profile.shapes) - set(inputs))
        if unknown:
            raise BuildError(
                f"{location} names {', '.join(unknown)}, the model's inputs are {', '.join(inputs)}: {_CURE}"
            )
        missing = [name for name in free if name not in profile.shapes]
        if missing:
            raise BuildError(f"{location} has no shapes for the inputs {', '.join(missing)}, which are free: {_CURE}")
        for name, shapes in profile.shapes.items():
            _check_shapes(f"{location}, input {name}", inputs[name][0], shapes)
        total = sum(
            math.prod(profile.shapes[name][2] if name in profile.shapes else shape) * size
            for name, (shape, size) in inputs.items()
        )
        if total > memory_bytes:
            raise BuildError(
                f"{location} is too large: its largest inputs alone take {_gib(total)}, the GPU has {_gib(memory_bytes)}: "
                "lower the largest shapes in optimization.profiles, or max_batch_size"
            )


def _check_shapes(location: str, shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    smallest, tuned, largest = shapes
    if not len(smallest) == len(tuned) == len(largest) == len(shape):
        raise BuildError(
            f"{location}: the model's shape {list(shape)} has {len(shape)} dimensions, the profile has others: {_CURE}"
        )
    for size, a, b, c in zip(shape, smallest, tuned, largest, strict=True):
        if not 0 < a <= b <= c:
            shapes_text = f"{list(smallest)}, {list(tuned)}, {list(largest)}"
            raise BuildError(f"{location}: {shapes_text} do not ascend from the smallest to the largest: {_CURE}")
        if size != -1 and (a != size or c != size):
            shapes_text = f"{list(smallest)} to {list(largest)}"
            raise BuildError(f"{location}: {shapes_text} do not fit the model's shape {list(shape)}: {_CURE}")


def add_profiles(builder: Any, config: Any, inputs: Mapping[str, Any], profiles: Sequence[ShapeRange]) -> None:
    """Add checked profiles to TensorRT's config; `inputs` are those with free dimensions.

    Raises:
        BuildError: TensorRT rejects a profile.
    """
    for number, profile in enumerate(profiles if inputs else ()):
        optimization_profile = builder.create_optimization_profile()
        for name in inputs:
            set_shape(optimization_profile, name, profile.shapes[name])
        if config.add_optimization_profile(optimization_profile) < 0:
            raise BuildError(f"TensorRT does not take profile {number + 1}: {_CURE}")


def set_shape(profile: Any, name: str, shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    """Set the shapes of an input in an IOptimizationProfile."""
    try:
        profile.set_shape(name, *shapes)
    except ValueError as error:
        raise BuildError(f"TensorRT does not take the shapes of input {name} ({error}): {_CURE}") from error


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# Largest size of a serialised protobuf; larger models are passed as files.
_PROTOBUF_LIMIT_BYTES = 2**31 - 1
_PARSED = 0.02


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """Options of TensorRT's builder.

    Attributes:
        optimization_level: 0 (fastest build) to 5; None for TensorRT's default.
        debug_tensors: names of inner tensors that an execution can report.
        tf32: True if products of FP32 may be rounded to TF32.
        formats: names of `TensorFormat` that inputs and outputs may have; () for LINEAR only.
    """

    optimization_level: int | None = None
    debug_tensors: frozenset[str] = frozenset()
    tf32: bool = True
    formats: tuple[str, ...] = ()


def build_plan(
    api: TensorRtApi,
    model: onnx.ModelProto,
    order: TargetSpec,
    path: Path,
    report: Report,
    options: BuilderOptions,
    gpu: Gpu,
) -> None:
    """Build a plan and write it.

    Raises:
        BuildError: the model or its parameters are not supported, memory ran out, or the disk is full.
    """
    report(0.0, "reading the ONNX model")
    progress = BuildProgress(part(report, _PARSED, 0.99))
    api.log.raised = None
    with api.log.collect() as errors:
        with signals_deferred(progress), _plugin_layers(api, order.plugin_layers) as refusals:
            builder = api.builder(errors)
            network = _parse(api, builder, model, path.parent)
            _mark_debug(network, options.debug_tensors)
            config = _configure(api, builder, network, order, options, gpu)
            cache = TimingCache(api, order.timing_cache)
            cache.attach(config)
            progress.check()
            report(_PARSED, "building")
            plan = _build(api, builder, network, config, progress)
            if plan is None and refusals:
                raise BuildError(f"TensorRT {api.version} cannot build the engine with the plug-in: {refusals[0]}")
            if plan is None:
                raise build_failure(errors, model, api.version, order.workspace_bytes, gpu.name)
            cache.save(config)
        write_atomically(path, memoryview(plan))
    report(1.0, "done")


@contextlib.contextmanager
def _plugin_layers(api: TensorRtApi, layers: Sequence[PluginLayer]) -> Iterator[list[Exception]]:
    """Register the plug-ins and create ours from these layers in the block; yields the errors of our plug-in.

    Raises:
        BuildError: this TensorRT has no such plug-ins.
    """
    creator = api.load_plugins()
    with contextlib.ExitStack() as stack:
        if layers and creator is None:
            raise BuildError(
                f"TensorRT {api.version} has no plug-ins in Python (IPluginV3): update it, or leave out --plugins"
            )
        if creator is not None:
            stack.enter_context(creator.building(layers))
        yield stack.enter_context(collect_refusals())


def _parse(api: TensorRtApi, builder: Any, model: onnx.ModelProto, folder: Path) -> Any:
    with _serialized(model, folder) as (data, file):
        network = api.network(builder)
        parser = api.trt.OnnxParser(network, api.logger)
        if parser.parse(data) if data is not None else parser.parse_from_file(str(file)):
            return network
        faults = _faults(parser, model)
        if data is not None and any(fault.unsupported for fault in faults):
            # The first parser may stop at the first error; this one checks the whole model. Its network must outlive it: in the
            # bindings a network holds its parser, but a parser does not hold its network.
            empty = api.network(builder)
            checker = api.trt.OnnxParser(empty, api.logger)
            checker.supports_model_v2(data)
            faults += _faults(checker, model) + _unsupported(checker, model, faults)
    raise BuildError(explain_parser(faults or [ParserFault("", "", "no reason is given", False)], api.version))


def _mark_debug(network: Any, names: Collection[str]) -> None:
    """Mark the tensors of these names as debug tensors (TensorRT documentation, "Debug Tensors")."""
    for index in range(network.num_layers if names else 0):
        layer = network.get_layer(index)
        for output in range(layer.num_outputs):
            tensor = layer.get_output(output)
            if tensor is not None and tensor.name in names:
                network.mark_debug(tensor)


@contextlib.contextmanager
def _serialized(model: onnx.ModelProto, folder: Path) -> Iterator[tuple[bytes | None, Path | None]]:
    """Yield a model as bytes, or as a file if it is too large."""
    if model.ByteSize() <= _PROTOBUF_LIMIT_BYTES:
        yield model.SerializeToString(), None
        return
    with tempfile.TemporaryDirectory(prefix=".parse.", dir=folder) as temporary:
        file = Path(temporary, "model.onnx")
        write_onnx(model, file)
        try:
            yield None, file
        finally:
            # The write moved the weights out of the caller's model: load them again.
            onnx.load_external_data_for_model(model, temporary)


def _faults(parser: Any, model: onnx.ModelProto) -> list[ParserFault]:
    faults = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        code = str(getattr(error.code(), "name", error.code()))
        text = " ".join(str(error.desc()).split())
        node = int(error.node())
        operator = str(error.node_operator() or "")
        name = node_label(model, node, str(error.node_name() or "")) if operator or error.node_name() else ""
        # TensorRT 10.6 reports a node without importer and plug-in as an assertion with the text "false".
        bare = text.lower() == "false"
        unsupported = code.startswith("UNSUPPORTED") or "No importer registered" in text or "Plugin not found" in text
        unsupported = unsupported or bare or bool(operator and not parser.supports_operator(operator))
        faults.append(ParserFault(name, operator, "" if bare else text, unsupported))
    return faults


def _unsupported(parser: Any, model: onnx.ModelProto, faults: list[ParserFault]) -> list[ParserFault]:
    """Return unsupported nodes, and nodes in unsupported subgraphs, without an error of the parser."""
    labels = {fault.node for fault in faults}
    unsupported = [
        ParserFault(label, node.op_type, "", True)
        for index, node in enumerate(model.graph.node)
        if not parser.supports_operator(node.op_type) and (label := node_label(model, index)) not in labels
    ]
    labels |= {fault.node for fault in unsupported}
    for subgraph in range(parser.num_subgraphs):
        if not parser.is_subgraph_supported(subgraph):
            for index in parser.get_subgraph_nodes(subgraph):
                label = node_label(model, index)
                if label not in labels:
                    unsupported.append(ParserFault(label, model.graph.node[index].op_type, "", True))
    return unsupported


def _configure(
    api: TensorRtApi, builder: Any, network: Any, order: TargetSpec, options: BuilderOptions, gpu: Gpu
) -> Any:
    trt = api.trt
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    values = [tensor.name for tensor in tensors if tensor.is_shape_tensor]
    if values:
        cure = "make them constants of the ONNX model"
        raise BuildError(f"the values of the inputs {', '.join(values)} decide on shapes inside of the model: {cure}")
    shapes = {tensor.name: (tuple(tensor.shape), int(tensor.dtype.itemsize)) for tensor in tensors}
    check_profiles(shapes, order.profiles, gpu.memory_bytes)
    config = builder.create_builder_config()
    if order.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if order.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    level = options.optimization_level if order.optimization_level is None else order.optimization_level
    if level is not None:
        config.builder_optimization_level = level
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.formats:
        mask = sum(1 << int(getattr(trt.TensorFormat, name)) for name in options.formats)
        for tensor in (*tensors, *(network.get_output(index) for index in range(network.num_outputs))):
            tensor.allowed_formats = mask
    add_profiles(builder, config, {name: s for name, (s, _) in shapes.items() if -1 in s}, order.profiles)
    return config


def _build(api: TensorRtApi, builder: Any, network: Any, config: Any, progress: BuildProgress) -> Any:
    """Return the plan (IHostMemory), None if the build fails.

    Raises the exception of a callback, e.g. KeyboardInterrupt.
    """
    # Must outlive the build: TensorRT has no reference to it.
    monitor = progress_monitor(api.trt, progress)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    for raised in (progress.raised, api.log.raised):
        if raised is not None:
            raise raised
    return plan


# Smallest compute capability with arithmetic of a precision (TensorRT documentation, "Support Matrix").
_MIN_CAPABILITY = {"fp32": (7, 5), "fp16": (7, 5), "int8": (7, 5), "bf16": (8, 0), "fp8": (8, 9)}


def available(device: int = 0) -> str:
    """Return the reason why this machine cannot build and run TensorRT engines; "" if it can.

    The GPU is checked first: TensorRT without a GPU ends the process.
    """
    try:
        gpus.describe(device)
        load()
    except HeadraceError as error:
        return str(error)
    return ""


def lean_library_problem() -> str:
    """Return why TensorRT's lean runtime, a part of version-compatible plans, cannot be loaded, and the remedy; "" if it can."""
    version = load().version
    library = lean_library(version)
    if load_lean_library(library):
        return ""
    package = (
        f"pip install 'tensorrt-lean=={version}.*', or the Debian package libnvinfer-lean{version.partition('.')[0]}"
    )
    return (
        f"--version-compatible needs {library} of TensorRT {version}: install it ({package}), or leave the option out"
    )


class TensorRtTarget:
    """Builds and runs plans for one GPU of this machine.

    Args:
        device: number of the GPU.
        optimization_level: TensorRT's builder optimization level, 0 (fastest build) to 5; None for TensorRT's default, 3.
        debug_tensors: names of inner tensors that its plans can report.
    """

    name = "tensorrt"
    suffix = ".plan"

    def __init__(
        self, device: int = 0, optimization_level: int | None = None, debug_tensors: frozenset[str] = frozenset()
    ) -> None:
        self._device = device
        self._options = BuilderOptions(optimization_level=optimization_level, debug_tensors=debug_tensors)

    def describe(self) -> Machine:
        """Describe this machine.

        Raises:
            BuildError: there is no GPU or no TensorRT; the message has the remedy.
        """
        self._demand()
        gpu = gpus.describe(self._device)
        return Machine(self.name, load().version, gpu.name, gpu.capability, gpu.driver)

    def refuses(self, precision: str, *, version_compatible: bool = False) -> str:
        """Return the reason why this machine does not support a precision; "" if it does. See `Target.refuses`."""
        missing = available(self._device)
        if missing:
            return missing
        min_capability = _MIN_CAPABILITY.get(precision)
        if min_capability is None:
            return f"TensorRT engines have no precision '{precision}': take one of {', '.join(_MIN_CAPABILITY)}"
        gpu = gpus.describe(self._device)
        major, _, minor = gpu.capability.partition(".")
        if (int(major), int(minor)) < min_capability:
            needed = ".".join(map(str, min_capability))
            cure = "take fp16" if min_capability > (7, 5) else "build for ONNX Runtime"
            return f"{precision} needs compute capability {needed}, the {gpu.name} has {gpu.capability}: {cure}"
        return lean_library_problem() if version_compatible else ""

    def refuses_fp8_convolutions(self) -> str:
        """Return the reason why convolutions stay FP16 in FP8 artefacts; "" if they run in FP8.

        Raises:
            BuildError: TensorRT is not installed.
        """
        api = load()
        if api.fp8_convolutions:
            return ""
        min_version = ".".join(map(str, FP8_CONVOLUTIONS))
        return f"FP8 convolutions need TensorRT {min_version} or newer, this is {api.version}"

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        """Write a plan, complete or not at all.

        Raises:
            BuildError: an operator is not supported (the message has its node), a profile does not fit, memory ran out, the disk
                is full, or there is no GPU or no TensorRT.
        """
        self._demand()
        with as_build_error(path.name), current(self._device):
            build_plan(load(), model, order, path, report, self._options, gpus.describe(self._device))

    def open(self, path: Path, source: onnx.ModelProto | None = None, *, host_code: bool = False) -> TensorRtEngine:
        """Load a plan; with its ONNX model, `source`, `layers` returns the names of ONNX nodes. See `Target.open`.

        Raises:
            BuildError: the file is missing or for another TensorRT or GPU, or memory ran out.
        """
        self._demand()
        with as_build_error(path.name):
            return TensorRtEngine(load(), path, source, self._device, host_code=host_code)

    def observe(
        self, model: onnx.ModelProto, order: TargetSpec, names: Sequence[str], folder: Path, report: Report
    ) -> ObservedPlan:
        """Build a plan twice, and mark in the second one the tensors that the layers of the first one write.

        Raises:
            BuildError: as for `build` and `open`.
        """
        self._demand()

        def build(path: Path, model: onnx.ModelProto, marked: frozenset[str], share: Report) -> TensorRtEngine:
            if marked:
                # TensorRT 10.6 corrupts the heap of its process for some marks, e.g. the output of a GlobalAveragePool.
                target = TensorRtTarget(self._device, self._options.optimization_level, marked)
                with _serialized(model, folder) as source:
                    call_apart(_build_apart, target, source, order, path, report=share)
            else:
                self.build(model, order, path, share)
            return self.open(path, model, host_code=order.version_compatible)

        return observe_plan(model, names, folder, build, report)

    def _demand(self) -> None:
        missing = available(self._device)
        if missing:
            raise BuildError(missing)


def _build_apart(
    target: TensorRtTarget, source: tuple[bytes | None, Path | None], order: TargetSpec, path: Path, report: Report
) -> None:
    data, file = source
    model = onnx.load_model_from_string(data) if data is not None else onnx.load(str(file))
    target.build(model, order, path, report)
