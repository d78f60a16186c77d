"""Simplifies an exported model for the later passes: folds constants, fuses batch norms into convolutions.

ONNX Runtime's "basic" graph optimisations do most of the work and write standard ONNX operators. This module adds the rest: one
operator set for all models, sums of two as additions, merged affine steps, a name for every node.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, version_converter

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxGraph, copy_model, drop_unused_domains, replace_items, write_onnx

# LayerNormalization is one operator since opset 17; TensorRT 10 and 11 read this opset and later ones.
OPSET = 17
# The file format of opset 17; ONNX Runtime has read it since 1.12.
_IR_VERSION = 8
# Fusions of ONNX Runtime that lose the name of a node or put reshapes around a matrix product.
_DISABLED_FUSIONS = ["MatMulAddFusion"]
_STANDARD = ("", "ai.onnx")
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# ONNX Runtime writes constants of larger models beside the file.
_LARGE_BYTES = 1 << 30


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes the same in fewer and more common operators.

    Constants are folded, batch norms, scales and shifts are fused into convolutions, identities and dropouts are removed, every
    node has a unique name (its former one if it had one), the operator set is 17 or later. Inputs, outputs and their shapes do
    not change. Initializers that are also inputs become constants.

    Args:
        model: not changed.

    Raises:
        BuildError: an operator is unknown or invalid; the message has the operator, its node and the remedy.
    """
    graph = OnnxGraph(_prepared(model))
    _sums_to_additions(graph)
    simple = _optimized(graph.finish())
    simple = raise_opset(simple, OPSET)
    graph = OnnxGraph(simple)
    _fold_casts(graph)
    _merge_affine(graph)
    _biased_products_to_gemm(graph)
    _plain_gemm(graph)
    simple = graph.finish()
    constants = {tensor.name for tensor in model.graph.initializer}
    replace_items(simple.graph.input, [value for value in model.graph.input if value.name not in constants])
    replace_items(simple.graph.output, [value for value in model.graph.output if value.name not in constants])
    replace_items(simple.metadata_props, model.metadata_props)
    simple.doc_string, simple.graph.name = model.doc_string, model.graph.name or "graph"
    name_nodes(simple)
    drop_unused_domains(simple)
    return simple


def raise_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Convert a model to ONNX's operator set `version`; return it unchanged if it has that one or a later one.

    Raises:
        BuildError: an operator cannot be converted.
    """
    current = next((o.version for o in model.opset_import if o.domain in _STANDARD), version)
    if current >= version:
        return model
    try:
        converted = version_converter.convert_version(model, version)
    except Exception as error:  # the converter's exceptions share no other base
        reason = str(error).strip().partition("\n")[0]
        cure = f"export the model with opset {version} or later"
        raise BuildError(
            f"opset {current} cannot be converted to {version}{_error_location(model, reason)}: {reason}: {cure}"
        ) from error
    raised = copy_model(model)
    raised.graph.CopyFrom(converted.graph)
    raised.ir_version = max(raised.ir_version, _IR_VERSION if version <= OPSET else _IR_VERSION + 1)
    for entry in raised.opset_import:
        if entry.domain in _STANDARD:
            entry.version = version
    _constants_to_initializers(raised)
    return raised


def _prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with a name for every node and no constants among its inputs."""
    copied = copy_model(model)
    constants = {tensor.name for tensor in copied.graph.initializer}
    replace_items(copied.graph.input, [value for value in copied.graph.input if value.name not in constants])
    copied.ir_version = max(copied.ir_version, _IR_VERSION)
    name_nodes(copied)
    return copied


def name_nodes(model: onnx.ModelProto) -> None:
    """Name nodes without a unique name after their first output."""
    used: set[str] = set()
    for node in model.graph.node:
        base = node.name if node.name and node.name not in used else next(filter(None, node.output), node.op_type)
        name, number = base, 0
        while name in used:
            number += 1
            name = f"{base}_{number}"
        node.name = name
        used.add(name)


def _optimized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Apply ONNX Runtime's basic optimisations."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    domains = {node.domain for node in model.graph.node}
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        folder = Path(name)
        try:
            write_onnx(model, folder / "source.onnx")
            options.optimized_model_filepath = str(folder / "simple.onnx")
            if model.ByteSize() > _LARGE_BYTES:
                external = "session.optimized_model_external_initializers_file_name"
                options.add_session_config_entry(external, "simple.data")
            source = str(folder / "source.onnx")
            ort.InferenceSession(
                source, options, providers=["CPUExecutionProvider"], disabled_optimizers=_DISABLED_FUSIONS
            )
            simple = onnx.load_model(folder / "simple.onnx")
        except OSError as error:
            raise BuildError(f"the model cannot be written to {folder.parent}: {error}: make room there") from error
        except Exception as error:  # the binding's exceptions share no other base
            # Remove the error code of the binding and the name of the temporary file.
            reason = re.sub(
                r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed: ?)?", "", str(error).strip()
            )
            reason = reason.partition("\n")[0]
            location = _error_location(model, reason)
            raise BuildError(
                f"ONNX Runtime cannot load the model{location}: {reason}: {_load_advice(reason)}"
            ) from error
    foreign = {node.domain for node in simple.graph.node} - domains - set(_STANDARD)
    if foreign:
        raise BuildError(
            f"ONNX Runtime has written operators of {', '.join(sorted(foreign))}, which other runtimes do not read: "
            "install another version of ONNX Runtime"
        )
    return simple


def _error_location(model: onnx.ModelProto, reason: str) -> str:
    """Return " at node 'x' (Foo)" for the node in a message of ONNX Runtime; "" if the message has none."""

    def mentioned(word: str) -> bool:
        return bool(word) and re.search(rf"(?<![\w/.]){re.escape(word)}(?![\w/])", reason) is not None

    nodes = list(model.graph.node)
    by_name = (node for node in nodes if mentioned(node.name))
    by_operator = (node for node in nodes if mentioned(node.op_type))
    culprit = next(by_name, None) or next(by_operator, None)
    if culprit is None:
        return ""
    operator = f"{culprit.domain}:{culprit.op_type}" if culprit.domain not in _STANDARD else culprit.op_type
    return f" at node '{culprit.name}' ({operator})"


def _load_advice(reason: str) -> str:
    if any(sign in reason for sign in ("not a registered", "No Op registered", "Could not find an implementation")):
        return "export the model without this operator, or write it as an ONNX function of standard operators"
    return "check it with onnx.checker.check_model(model, full_check=True) and export it anew"


def _sums_to_additions(graph: OnnxGraph) -> None:
    """Write a Sum of two tensors, as old exporters write it, as an Add; a Sum of one as an Identity."""
    for node in graph.nodes:
        if node.op_type == "Sum" and node.domain in _STANDARD and len(node.input) < 3:
            node.op_type = "Add" if len(node.input) == 2 else "Identity"


def _constants_to_initializers(model: onnx.ModelProto) -> None:
    """Replace Constant nodes, which the opset conversion adds, by initializers."""
    remaining = []
    for node in model.graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" else None
        if value is None:
            remaining.append(node)
        else:
            model.graph.initializer.add().CopyFrom(value)
            model.graph.initializer[-1].name = node.output[0]
    replace_items(model.graph.node, remaining)


def _fold_casts(graph: OnnxGraph) -> None:
    """Replace casts of 16-bit constants by FP32 constants.

    ONNX Runtime has no FP16 kernels for CPUs: it writes such a model in FP32 with casts of the weights in every run.
    """
    done = set()
    for node in [node for node in graph.nodes if node.op_type == "Cast" and node.output[0] not in graph.outputs]:
        values = graph.constant(node.input[0])
        if values is None or graph.element_type(node.input[0]) not in _HALVES:
            continue
        if graph.attribute(node, "to") == TensorProto.FLOAT:
            tensor = numpy_helper.from_array(values.astype(np.float32), node.output[0])
            graph.model.graph.initializer.append(tensor)
            done.add(node.name)
    _drop(graph, done)


def _single_use(graph: OnnxGraph, tensor: str) -> onnx.NodeProto | None:
    """Return the only node that reads a tensor, if it does so once: `Add(x, x)` is no shift of x."""
    reader = graph.only_reader(tensor)
    return reader if reader is not None and list(reader.input).count(tensor) == 1 else None


def _merge_affine(graph: OnnxGraph) -> None:
    """Merge a scale or shift by channel after a batch norm into the batch norm."""
    merged = set()
    for norm in [node for node in graph.nodes if node.op_type == "BatchNormalization"]:
        while (step := _single_use(graph, norm.output[0])) is not None and step.op_type in ("Mul", "Add"):
            scale, shift = graph.constant(norm.input[1]), graph.constant(norm.input[2])
            if scale is None or shift is None:
                break
            other = step.input[1] if step.input[0] == norm.output[0] else step.input[0]
            term = _by_channel(graph, graph.constant(other), norm.output[0], len(scale))
            if term is None:
                break
            scale, shift = (scale * term, shift * term) if step.op_type == "Mul" else (scale, shift + term)
            graph.rewire(norm, 1, graph.add_constant(f"{norm.name}_scale", scale))
            graph.rewire(norm, 2, graph.add_constant(f"{norm.name}_bias", shift))
            norm.output[0] = step.output[0]
            merged.add(step.name)
    _drop(graph, merged)


def _drop(graph: OnnxGraph, names: set[str]) -> None:
    """Remove nodes whose outputs other nodes produce now."""
    if names:
        replace_items(graph.model.graph.node, [node for node in graph.nodes if node.name not in names])
        graph.sort()


def _by_channel(graph: OnnxGraph, values: Array | None, tensor: str, channels: int) -> Array | None:
    """Return a constant operand of [N, C, ...] as [C]; None if it does not have one value per channel."""
    shape = graph.shape(tensor)
    if values is None or shape is None:
        return None
    full = (1,) * (len(shape) - values.ndim) + values.shape
    if len(full) != len(shape) or full[0] != 1 or math.prod(full[2:]) != 1 or full[1] not in (1, channels):
        return None
    return np.broadcast_to(values.reshape(-1), (channels,)).copy()


def _biased_products_to_gemm(graph: OnnxGraph) -> None:
    """Write a matrix product and a bias by column as one Gemm, which has kernels that add the bias."""
    done = set()
    for node in [node for node in graph.nodes if node.op_type == "MatMul"]:
        step = _single_use(graph, node.output[0])
        weight, first_shape = graph.shape(node.input[1]), graph.shape(node.input[0])
        if (
            step is None
            or step.op_type != "Add"
            or weight is None
            or first_shape is None
            or len(first_shape) != 2
            or len(weight) != 2
        ):
            continue
        bias = step.input[1] if step.input[0] == node.output[0] else step.input[0]
        constant = graph.is_constant(node.input[1]) and graph.is_constant(bias)
        if constant and graph.shape(bias) in ((weight[1],), (1, weight[1])):
            node.op_type = "Gemm"
            node.input.append(bias)
            node.output[0] = step.output[0]
            done.add(step.name)
    _drop(graph, done)


def _plain_gemm(graph: OnnxGraph) -> None:
    """Move the factors of a Gemm into its constants, and expand its bias to one value per column."""
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type == "Gemm" else None
        if weight is None or weight.dtype != np.float32:
            continue
        alpha, beta = graph.attribute(node, "alpha", 1.0), graph.attribute(node, "beta", 1.0)
        columns = weight.shape[0 if graph.attribute(node, "transB", 0) else 1]
        bias = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(columns, np.float32)
        if alpha != 1.0:
            graph.rewire(node, 1, graph.add_constant(f"{node.name}_weight", weight * np.float32(alpha)))
            _set_float(node, "alpha", 1.0)
        if bias is None or bias.size not in (1, columns) or bias.shape[:-1] not in ((), (1,)):
            continue
        if len(node.input) > 2 and (beta != 1.0 or bias.shape != (columns,)):
            whole = np.broadcast_to(bias.reshape(-1) * np.float32(beta), (columns,))
            graph.rewire(node, 2, graph.add_constant(f"{node.name}_bias", whole))
            _set_float(node, "beta", 1.0)


def _set_float(node: onnx.NodeProto, name: str, value: float) -> None:
    others = [attribute for attribute in node.attribute if attribute.name != name]
    replace_items(node.attribute, [*others, helper.make_attribute(name, value)])
