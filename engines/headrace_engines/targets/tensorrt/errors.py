"""Translates TensorRT's messages into errors that name the ONNX node and the remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx

from headrace_engines.errors import BuildError, NoKernelError

# Texts of libnvinfer 10 and 11; the name may hold dots, plus signs and braces.
_NO_KERNEL = re.compile(
    r"(?:Could not find any implementation for node|No supported formats for) (.+?)"
    r"(?P<workspace> due to insufficient workspace\b.*)?(?: due to .*)?\.?\)?\s*$"
)


_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|insufficient memory|memory is insufficient|Requested size was", re.IGNORECASE
)


_TOO_LARGE = re.compile(
    r"volume exceeds|exceeds \(2\^31\)-1|maximum (?:supported )?element count|TENSOR_VOLUME"
    r"|larger than total memory|getTotalGlobalMem"
)


_SMALLER = "lower the largest shapes in optimization.profiles"


_OTHER_DEVICE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)


_NAMES_SHOWN = 8


_QDQ = ("QuantizeLinear", "DequantizeLinear")


_QUANTIZED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class ParserFault:
    """One error of the ONNX parser.

    Attributes:
        node: name of the ONNX node, or "#3" for the fourth where it has none; empty where no node is to blame.
        operator: e.g. "NonMaxSuppression".
        text: what the parser says.
        unsupported: True if TensorRT does not support the operator, or not this use of it.
    """

    node: str
    operator: str
    text: str
    unsupported: bool


def node_label(model: onnx.ModelProto, index: int, name: str = "") -> str:
    """Return the name of a node, or its index in the graph."""
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


def mentioned_nodes(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that a layer's name contains as whole words, in the given order."""
    return [name for name in names if name and re.search(rf"(?<![\w/])(?<!\w\.){re.escape(name)}(?![\w/]|\.\w)", text)]


def build_failure(
    errors: Collection[str], model: onnx.ModelProto, version: str, workspace_bytes: int | None, gpu: str
) -> BuildError:
    """Why the builder gave up; a `NoKernelError` where other precisions of some layers may help.

    Args:
        errors: what it logged, oldest first.
        model: that it built.
        version: of TensorRT.
        workspace_bytes: the scratch memory it was given, None: all.
        gpu: its name, for messages.
    """
    bound = "" if workspace_bytes is None else f" of {workspace_bytes >> 20} MiB"
    more_memory = f"{_SMALLER}, or close what else uses the GPU"
    if workspace_bytes is not None:
        more_memory = f"raise optimization.workspace_mb, {more_memory}"
    for error in reversed(list(errors)):
        match = _NO_KERNEL.search(error)
        if match is None:
            continue
        nodes = mentioned_nodes(match[1], [node.name for node in model.graph.node])
        layer = _shortened(match[1])
        if match["workspace"] and workspace_bytes is not None:
            failure = f"TensorRT {version} finds no kernel for {layer} within a workspace{bound}"
            return BuildError(f"{failure}: raise optimization.workspace_mb")
        named = f" (ONNX nodes {', '.join(nodes)})" if nodes else ""
        failure = f"TensorRT {version} finds no kernel for {layer}{named} on {gpu}"
        if any(_NO_MEMORY.search(other) or _TOO_LARGE.search(other) for other in errors):
            return BuildError(f"{failure}, some were passed over for want of memory: {more_memory}")
        if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
            listed = ", ".join(f'"{name}"' for name in _computing(model, nodes)) or "..."
            cure = f"keep it in floating point by optimization.calibration.keep: [{listed}]"
            return NoKernelError(f"{failure}: {cure}", _quantized(model, nodes))
        return NoKernelError(f"{failure}: take another precision, raise optimization.workspace_mb, or {_SMALLER}")
    if any(_NO_MEMORY.search(error) for error in errors):
        within = f" with a workspace{bound}" if bound else ""
        return BuildError(f"TensorRT {version} ran out of memory on {gpu}{within}: {more_memory}")
    large = next((error for error in errors if _TOO_LARGE.search(error)), None)
    if large is not None:
        return BuildError(f"TensorRT {version} cannot hold tensors this large ({large.strip()}): {_SMALLER}")
    return BuildError(f"TensorRT {version} cannot build the engine: {_last(errors)}")


def explain_open(errors: Collection[str], version: str, gpu: str) -> str:
    """Why a plan cannot be loaded."""
    if any(_OTHER_DEVICE.search(error) for error in errors):
        return f"was not built by TensorRT {version} on {gpu}: build it again on this machine ({_last(errors)})"
    if any(_NO_MEMORY.search(error) for error in errors):
        return f"does not fit into the memory of {gpu}: close what else uses the GPU ({_last(errors)})"
    return f"is no plan that TensorRT {version} can load: build it again ({_last(errors)})"


def _computing(model: onnx.ModelProto, names: Collection[str]) -> list[str]:
    """Return the nodes whose inputs are quantised; the nodes after them in a fused layer are not."""
    return [node.name for node in model.graph.node if node.name in names and node.op_type in _QUANTIZED]


def _quantized(model: onnx.ModelProto, names: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that read the output of a DequantizeLinear."""
    dequantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    reading = [node for node in model.graph.node if node.op_type not in _QDQ and not dequantized.isdisjoint(node.input)]
    return tuple(node.name for node in reading if node.name in names)


def _shortened(layer: str) -> str:
    return layer if len(layer) <= 200 else f"{layer[:200]}..."


def _last(errors: Collection[str]) -> str:
    return list(errors)[-1].strip() if errors else "it logged no error; try again with more free memory"
