"""Builds a plan from an ONNX model: parse, profiles, timing cache, build, write. Runs with the device current.

Optimisation profiles are the ranges of shapes that a plan serves; they are checked before TensorRT reads them.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from headrace.cuda.devices import Gpu

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import write_onnx
from headrace_engines.progress import Report, part
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.api import (
    BuildProgress,
    TensorRtApi,
    TimingCache,
    progress_monitor,
    signals_deferred,
    write_atomically,
)
from headrace_engines.targets.tensorrt.errors import ParserFault, build_failure, explain_parser, node_label

_CURE = "correct optimization.profiles"


def check_profiles(
    inputs: Mapping[str, tuple[tuple[int, ...], int]], profiles: Sequence[ShapeRange], memory_bytes: int
) -> None:
    """Hold profiles against a network's inputs.

    Args:
        inputs: by name the shape, -1 where free, and the bytes of an element.
        profiles: from the specification.
        memory_bytes: all of the GPU's memory.

    Raises:
        BuildError: a profile is inconsistent, leaves an input out, or is larger than the GPU.
    """
    free = [name for name, (shape, _) in inputs.items() if -1 in shape]
    if free and not profiles:
        raise BuildError(f"the inputs {', '.join(free)} have free dimensions: write optimization.profiles")
    for number, profile in enumerate(profiles):
        where = f"profile {number + 1}" if len(profiles) > 1 else "the profile"
        unknown = sorted(set(profile.shapes) - set(inputs))
        if unknown:
            raise BuildError(f"{where} names {', '.join(unknown)}, the model's inputs are {', '.join(inputs)}: {_CURE}")
        missing = [name for name in free if name not in profile.shapes]
        if missing:
            raise BuildError(f"{where} has no shapes for the inputs {', '.join(missing)}, which are free: {_CURE}")
        for name, shapes in profile.shapes.items():
            _check_shapes(f"{where}, input {name}", inputs[name][0], shapes)
        total = sum(
            math.prod(profile.shapes[name][2] if name in profile.shapes else shape) * size
            for name, (shape, size) in inputs.items()
        )
        if total > memory_bytes:
            raise BuildError(
                f"{where} is too large: its largest inputs alone take {_gib(total)}, the GPU has {_gib(memory_bytes)}: "
                "lower the largest shapes in optimization.profiles, or max_batch_size"
            )


def _check_shapes(where: str, shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    smallest, tuned, largest = shapes
    if not len(smallest) == len(tuned) == len(largest) == len(shape):
        raise BuildError(
            f"{where}: the model's shape {_text(shape)} has {len(shape)} dimensions, the profile has others: {_CURE}"
        )
    for size, a, b, c in zip(shape, smallest, tuned, largest, strict=True):
        if not 0 < a <= b <= c:
            shapes_text = f"{_text(smallest)}, {_text(tuned)}, {_text(largest)}"
            raise BuildError(f"{where}: {shapes_text} do not ascend from the smallest to the largest: {_CURE}")
        if size != -1 and (a != size or c != size):
            shapes_text = f"{_text(smallest)} to {_text(largest)}"
            raise BuildError(f"{where}: {shapes_text} do not fit the model's shape {_text(shape)}: {_CURE}")


def add_profiles(builder: Any, config: Any, inputs: Mapping[str, Any], profiles: Sequence[ShapeRange]) -> None:
    """Hand checked profiles to TensorRT; `inputs` are those with free dimensions.

    Raises:
        BuildError: TensorRT finds an inconsistency of its own.
    """
    for number, profile in enumerate(profiles if inputs else ()):
        optimization_profile = builder.create_optimization_profile()
        for name in inputs:
            set_shape(optimization_profile, name, profile.shapes[name])
        if config.add_optimization_profile(optimization_profile) < 0:
            raise BuildError(f"TensorRT does not take profile {number + 1}: {_CURE}")


def set_shape(profile: Any, name: str, shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    """One input's shapes in an IOptimizationProfile."""
    try:
        profile.set_shape(name, *shapes)
    except ValueError as error:
        raise BuildError(f"TensorRT does not take the shapes of input {name} ({error}): {_CURE}") from error


def _text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# A serialized protobuf cannot be larger; such models go through files.
_PROTOBUF_LIMIT_BYTES = 2**31 - 1


_PARSED = 0.02


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """Effort of the builder.

    Attributes:
        optimization_level: 0 (fast to build) to 5; None: TensorRT's default.
    """

    optimization_level: int | None = None


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
        BuildError: the model or its parameters cannot be built, memory ran out, or the disk is full.
    """
    report(0.0, "reading the ONNX model")
    progress = BuildProgress(part(report, _PARSED, 0.99))
    api.log.raised = None
    with api.log.collect() as errors:
        with signals_deferred(progress):
            api.load_plugins()
            builder = api.builder(errors)
            network = _parse(api, builder, model, path.parent)
            config = _configure(api, builder, network, order, options, gpu)
            cache = TimingCache(api, order.timing_cache)
            cache.attach(config)
            progress.check()
            report(_PARSED, "building")
            plan = _build(api, builder, network, config, progress)
            if plan is None:
                raise build_failure(errors, model, api.version, order.workspace_bytes, gpu.name)
            cache.save(config)
        write_atomically(path, memoryview(plan))
    report(1.0, "done")


def _parse(api: TensorRtApi, builder: Any, model: onnx.ModelProto, folder: Path) -> Any:
    with _serialized(model, folder) as (data, file):
        network = api.network(builder)
        parser = api.trt.OnnxParser(network, api.logger)
        if parser.parse(data) if data is not None else parser.parse_from_file(str(file)):
            return network
        faults = _faults(parser, model)
        if data is not None and any(fault.unsupported for fault in faults):
            # The parser may have stopped at the first; this one checks the whole model. Its network must outlive it: the
            # bindings let a network keep its parser, not a parser its network.
            empty = api.network(builder)
            again = api.trt.OnnxParser(empty, api.logger)
            again.supports_model_v2(data)
            faults += _faults(again, model) + _unsupported(again, model, faults)
    raise BuildError(explain_parser(faults or [ParserFault("", "", "no reason is given", False)], api.version))


@contextlib.contextmanager
def _serialized(model: onnx.ModelProto, folder: Path) -> Iterator[tuple[bytes | None, Path | None]]:
    """A model as bytes, or as a file where it is too large for that."""
    if model.ByteSize() <= _PROTOBUF_LIMIT_BYTES:
        yield model.SerializeToString(), None
        return
    with tempfile.TemporaryDirectory(prefix=".parse.", dir=folder) as temporary:
        file = Path(temporary, "model.onnx")
        write_onnx(model, file)
        try:
            yield None, file
        finally:
            # Writing moved the weights out of the model, which is the caller's.
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
        # An assertion that is written as false is how 10.6 says that a node without an importer is no plug-in either.
        bare = text.lower() == "false"
        unsupported = code.startswith("UNSUPPORTED") or "No importer registered" in text or "Plugin not found" in text
        unsupported = unsupported or bare or bool(operator and not parser.supports_operator(operator))
        faults.append(ParserFault(name, operator, "" if bare else text, unsupported))
    return faults


def _unsupported(parser: Any, model: onnx.ModelProto, faults: list[ParserFault]) -> list[ParserFault]:
    """Nodes of operators or in parts that TensorRT does not support, of which it has given no error."""
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
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if order.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    add_profiles(builder, config, {name: s for name, (s, _) in shapes.items() if -1 in s}, order.profiles)
    return config


def _build(api: TensorRtApi, builder: Any, network: Any, config: Any, progress: BuildProgress) -> Any:
    """Return the plan (IHostMemory), None if the build fails; an interrupt is raised."""
    # Must outlive the build: TensorRT does not hold it.
    monitor = progress_monitor(api.trt, progress)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    for raised in (progress.raised, api.log.raised):
        if raised is not None:
            raise raised
    return plan
