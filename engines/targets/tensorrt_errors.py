"""TensorRT's complaints turned into sentences that name the ONNX node and say what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx

# Texts of libnvinfer 10 and 11; the name may hold dots, plus signs and braces.
_NO_KERNEL = re.compile(
    r"(?:Could not find any implementation for node|No supported formats for) (.+?)"
    r"(?P<workspace> due to insufficient workspace\b.*)?(?: due to .*)?\.?\)?\s*$"
)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|insufficient memory|Requested size was", re.IGNORECASE)
_OTHER_DEVICE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)
_NAMES_SHOWN = 8
_QUANTIZED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class ParserFault:
    """One error of the ONNX parser.

    Attributes:
        node: name of the ONNX node, or "#3" for the fourth where it has none; empty where no node is to blame.
        operator: e.g. "NonMaxSuppression".
        text: what the parser says.
        unsupported: True if TensorRT does not know the operator, or not this use of it.
    """

    node: str
    operator: str
    text: str
    unsupported: bool


def node_label(model: onnx.ModelProto, index: int, name: str = "") -> str:
    """What people know a node by: its name, or its place in the graph."""
    nodes = model.graph.node
    if not name and 0 <= index < len(nodes):
        name = nodes[index].name
    return name or (f"#{index}" if index >= 0 else "")


def explain_parser(faults: Sequence[ParserFault], version: str) -> str:
    """Why a model cannot be turned into a network.

    Args:
        faults: at least one.
        version: of TensorRT.
    """
    unsupported = [fault for fault in faults if fault.unsupported and fault.node]
    if not unsupported:
        first = faults[0]
        where = f"node {first.node} ({first.operator}): " if first.node else ""
        cure = "check the model with onnx.checker and shape inference, or export it anew"
        return f"TensorRT {version} cannot read the ONNX model: {where}{first.text}: {cure}"
    unique = list({(fault.node, fault.operator): fault for fault in unsupported}.values())
    lines = [f"  node {f.node} ({f.operator}): {f.text}".rstrip(": ") for f in unique[:_NAMES_SHOWN]]
    if len(unique) > _NAMES_SHOWN:
        operators = sorted({fault.operator for fault in unique[_NAMES_SHOWN:]})
        lines.append(f"  and {len(unique) - _NAMES_SHOWN} more ({', '.join(operators)})")
    what = "1 node is" if len(unique) == 1 else f"{len(unique)} nodes are"
    cure = "replace them by other ONNX operators, load a TensorRT plug-in for them, or build for ONNX Runtime"
    return "\n".join([f"{what} not supported by TensorRT {version}; {cure}:", *lines])


def mentioned(text: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a layer's name mentions whole, in the given order."""
    return [name for name in names if name and re.search(rf"(?<![\w/])(?<!\w\.){re.escape(name)}(?![\w/]|\.\w)", text)]


def explain_build(
    errors: Collection[str], model: onnx.ModelProto, version: str, workspace_bytes: int | None, gpu: str
) -> str:
    """Why the builder gave up.

    Args:
        errors: what it logged, oldest first.
        model: that it built.
        version: of TensorRT.
        workspace_bytes: the scratch memory it was given, None: all.
        gpu: for people.
    """
    bound = "" if workspace_bytes is None else f" of {workspace_bytes >> 20} MiB"
    for error in reversed(list(errors)):
        found = _NO_KERNEL.search(error)
        if found is None:
            continue
        nodes = mentioned(found[1], [node.name for node in model.graph.node])
        layer = _shortened(found[1])
        if found["workspace"] and workspace_bytes is not None:
            return f"TensorRT {version} finds no kernel for {layer} within a workspace{bound}: raise optimization.workspace_mb"
        quantized = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
        named = f" (ONNX nodes {', '.join(nodes)})" if nodes else ""
        told = f"TensorRT {version} finds no kernel for {layer}{named} on {gpu}"
        if quantized:
            listed = ", ".join(f'"{name}"' for name in _computing(model, nodes)) or "..."
            return f"{told}: keep it in floating point by optimization.calibration.keep: [{listed}]"
        return f"{told}: take another precision, or raise optimization.workspace_mb"
    if any(_NO_MEMORY.search(error) for error in errors):
        cure = "lower the largest shapes in optimization.profiles, or close what else uses the GPU"
        if workspace_bytes is not None:
            cure = f"raise optimization.workspace_mb, {cure}"
        return f"TensorRT {version} ran out of memory on {gpu}{f' with a workspace{bound}' if bound else ''}: {cure}"
    return f"TensorRT {version} cannot build the engine: {_last(errors)}"


def explain_open(errors: Collection[str], version: str, gpu: str) -> str:
    """Why a plan cannot be loaded."""
    if any(_OTHER_DEVICE.search(error) for error in errors):
        return f"was not built by TensorRT {version} on {gpu}: build it again on this machine ({_last(errors)})"
    if any(_NO_MEMORY.search(error) for error in errors):
        return f"does not fit into the memory of {gpu}: close what else uses the GPU ({_last(errors)})"
    return f"is no plan that TensorRT {version} can load: build it again ({_last(errors)})"


def _computing(model: onnx.ModelProto, names: Collection[str]) -> list[str]:
    """Those nodes whose inputs are quantized; what follows them in a fused layer is not."""
    return [node.name for node in model.graph.node if node.name in names and node.op_type in _QUANTIZED]


def _shortened(layer: str) -> str:
    return layer if len(layer) <= 200 else f"{layer[:200]}..."


def _last(errors: Collection[str]) -> str:
    return list(errors)[-1].strip() if errors else "it logged no error; try again with more free memory"
