"""Inner tensors of a plan, as debug tensors.

A debug tensor is not fused away, so marking all tensors would measure another engine. The plan is built without marks first; only
tensors that its layers write are marked in a second build, with the same timing cache. The remark counts layers of the first plan
that the second one does not have. A tensor in 8 bits is reported as such and dequantised here.

TensorRT 10.6 cannot mark every tensor: its optimiser may copy the layer that reports one, and the build fails with "slice of
isDebug for NAME' is listed more than once". Such a tensor is built without its mark, and the remark names it. Other marks end the
process of the build: all tensors are outputs of the second plan then, which changes formats, and rarely the fusion.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from headrace_engines.errors import BuildError
from headrace_engines.layers.tensors import Counterpart, counterparts, dequantized
from headrace_engines.onnx_graph import OnnxGraph, copy_model
from headrace_engines.progress import Report, part
from headrace_engines.separate_process import EndedError
from headrace_engines.targets.base import Array
from headrace_engines.targets.tensorrt.engine import TensorRtEngine
from headrace_engines.targets.tensorrt.engine_layers import inspected_layers, read_layers

logger = logging.getLogger("headrace.build")
# Builds with fewer marks, each of which fails within seconds.
_MAX_TRIES = 8
# Builds and opens the plan of a model with some debug tensors.
Build = Callable[[Path, onnx.ModelProto, frozenset[str], Report], TensorRtEngine]


class ObservedPlan:
    """An engine that returns inner tensors; see `headrace_engines.targets.base.ObservedEngine`.

    Args:
        engine: engine with debug tensors; closed with this object.
        graph: graph of the lowered model.
        matches: counterparts of the FP32 model's tensors, by name.
        sources: names of the plan's tensors, by name of the FP32 model's tensor.
        remark: difference from the plan that is served; "" without any.
    """

    def __init__(
        self,
        engine: TensorRtEngine,
        graph: OnnxGraph,
        matches: Mapping[str, Counterpart],
        sources: Mapping[str, str],
        remark: str,
    ) -> None:
        self._engine, self._graph, self._matches, self._sources = engine, graph, matches, sources
        self.names = tuple(sources)
        self.remark = remark

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return the reported tensors, as FP32, by the name of the FP32 model's tensor.

        Raises:
            BuildError: the engine rejects the inputs, or the GPU reports an error.
        """
        values = self._engine.run(inputs)
        if not set(self._sources.values()) <= values.keys():
            values |= self._engine.run_debug(inputs)
        results = {}
        for name, source in self._sources.items():
            if source in values:
                match, array = self._matches[name], values[source]
                element_type = self._graph.element_type(source)
                if element_type == onnx.TensorProto.BFLOAT16:
                    array = array.view(ml_dtypes.bfloat16)
                elif element_type == onnx.TensorProto.FLOAT8E4M3FN:
                    array = array.view(ml_dtypes.float8_e4m3fn)
                stored = bool(match.stored) and source == match.stored
                results[name] = dequantized(self._graph, match, array) if stored else array.astype(np.float32)
        return results

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def observe_plan(
    model: onnx.ModelProto, names: Sequence[str], folder: Path, build: Build, report: Report
) -> ObservedPlan:
    """Build a plan without and with debug tensors.

    Args:
        model: lowered model.
        names: names of tensors of the FP32 model.
        folder: folder of the plans.
        build: builds and opens the plan of a model with some debug tensors.
        report: called with the progress.

    Raises:
        BuildError: the plan cannot be built.
    """
    graph = OnnxGraph(copy_model(model))
    plain = build(folder / "plain.plan", model, frozenset(), part(report, 0.0, 0.5))
    try:
        before = plain.layer_information()
    finally:
        plain.close()
    written = _written_tensors(before) | set(graph.outputs)
    matches = counterparts(names, graph)
    sources = {}
    for name, match in matches.items():
        source = next((one for one in (match.stored, match.tensor) if one and one in written), "")
        if source:
            sources[name] = source
    marked = frozenset(sources.values()) - set(graph.outputs)
    path, share, remarks = folder / "observed.plan", part(report, 0.5, 1.0), []
    engine, refused = _build_marked(path, model, marked, build, share)
    if engine is None:
        remarks.append("TensorRT cannot report its tensors, so they are outputs")
        engine = build(path, _with_outputs(model, graph, marked), frozenset(), share)
    elif refused:
        remarks.append(f"TensorRT cannot report {', '.join(sorted(refused))}")
    sources = {name: source for name, source in sources.items() if source not in refused}
    try:
        remarks.append(_change(before, engine.layer_information(), model))
    except BaseException:
        engine.close()
        raise
    return ObservedPlan(engine, graph, matches, sources, "; ".join(filter(None, remarks)))


def _build_marked(
    path: Path, model: onnx.ModelProto, marked: frozenset[str], build: Build, report: Report
) -> tuple[TensorRtEngine | None, frozenset[str]]:
    """Build a plan with debug tensors, without those that TensorRT refuses; return it and their names.

    The plan is None if the process of the build ended.

    Raises:
        BuildError: the plan cannot be built, and the message names no debug tensor.
    """
    refused: frozenset[str] = frozenset()
    while True:
        try:
            return build(path, model, marked - refused, report), refused
        except EndedError as error:
            logger.info("reading inner tensors as outputs: %s", error)
            return None, frozenset()
        except BuildError as error:
            named = {name for name in marked - refused if _names(error, name)}
            if not named or len(refused) >= _MAX_TRIES:
                raise
            logger.info("reading inner tensors without %s: %s", ", ".join(sorted(named)), error)
            refused |= named


def _names(error: BuildError, tensor: str) -> bool:
    return re.search(rf"(isDebug|debug output) for {re.escape(tensor)}(?![\w./])", str(error)) is not None


def _with_outputs(model: onnx.ModelProto, graph: OnnxGraph, names: Collection[str]) -> onnx.ModelProto:
    """Return a copy of a model that has these tensors as outputs too."""
    result = copy_model(model)
    result.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, graph.element_type(name), None) for name in sorted(names)
    )
    return result


def _written_tensors(information: str) -> set[str]:
    """Return the names of the tensors that the layers of a plan write."""
    layers = (layer for layer in inspected_layers(information) if isinstance(layer, Mapping))
    outputs = (output for layer in layers for output in layer.get("Outputs") or ())
    return {str(output["Name"]) for output in outputs if isinstance(output, Mapping) and "Name" in output}


def _change(before: str, after: str, model: onnx.ModelProto) -> str:
    """Return a sentence on fused layers of the first plan that the second one does not have; "" if it has all."""
    nodes = [node.name for node in model.graph.node if node.name]
    counts = [
        Counter(layer.nodes for layer in read_layers(information, {}, nodes) if layer.nodes)
        for information in (before, after)
    ]
    lost = sum((counts[0] - counts[1]).values())
    if not lost:
        return ""
    return f"reading its tensors changed the fusion of {lost} of {sum(counts[0].values())} layers"
