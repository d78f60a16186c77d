"""Finds nodes that end their process for some values of a request: the smallest whole number divided by -1.

ONNX Runtime divides on the CPU without a check, and the processor raises SIGFPE. The test of all operators is
`tests/faults/test_trapping_operators.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("headrace.config")

# Operators that divide the first input by the second one.
_DIVISIONS = frozenset({"Div", "Mod"})
# TensorProto's numbers of INT8, INT16, INT32 and INT64.
_WHOLE_NUMBERS = frozenset({3, 5, 6, 7})
_UNKNOWN = 0


def trapping_node(model: onnx.ModelProto) -> str:
    """Return a node whose values may end its process, for messages; "" if there is none.

    A type that is not known counts as whole numbers, a graph that cannot be analysed as such a node.

    Args:
        model: with few local functions they are inlined before; types in others are not known.
    """
    try:
        return _trapping_node(model)
    except Exception as error:  # an unexpected graph must not prevent serving
        logger.debug("divisions of a graph could not be found", exc_info=error)
        return f"the graph could not be analysed ({type(error).__name__})"


def _trapping_node(model: onnx.ModelProto) -> str:
    for function in model.functions:
        division = _division(function.node)
        if division is not None:
            return _text(division)
    if _division(model.graph.node) is None:
        return ""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    return _in_graph(model.graph, opset, {}, {})


def _division(nodes: Iterable[onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return the first division among nodes and in their subgraphs; None if there is none."""
    for node in nodes:
        if node.op_type in _DIVISIONS:
            return node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                found = _division(graph.node)
                if found is not None:
                    return found
    return None


def _in_graph(
    graph: onnx.GraphProto, opset: int, kinds: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]
) -> str:
    """Search a graph; `kinds` and `constants` are types and tensors of the graph around it."""
    constants = {**constants, **{tensor.name: tensor for tensor in graph.initializer}}
    kinds = {**kinds, **{name: tensor.data_type for name, tensor in constants.items()}}
    kinds |= {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info)}
    for info in graph.input:
        constants.pop(info.name, None)  # a request may send another value
    for node in graph.node:
        divides = node.op_type in _DIVISIONS and node.domain in ("", "ai.onnx")
        if divides and kinds.get(node.input[0], _UNKNOWN) in (*_WHOLE_NUMBERS, _UNKNOWN):
            divisor = constants.get(node.input[1])
            if divisor is None or not _is_safe(divisor):
                return _text(node)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found = _in_graph(inner, opset, kinds, constants)
                if found:
                    return found
            if node.op_type == "Constant" and attribute.HasField("t"):
                constants[node.output[0]] = attribute.t
        kinds |= zip(node.output, _output_kinds(node, opset, kinds), strict=False)
    return ""


def _text(node: onnx.NodeProto) -> str:
    return f'{node.op_type} node "{node.name or node.output[0]}" divides whole numbers'


def _is_safe(divisor: onnx.TensorProto) -> bool:
    from onnx import numpy_helper

    if divisor.data_location:  # stored in another file
        return False
    return -1 not in numpy_helper.to_array(divisor)


def _output_kinds(node: onnx.NodeProto, opset: int, kinds: Mapping[str, int]) -> Iterable[int]:
    """Return the types of a node's outputs, by the schema of its operator."""
    from onnx import TensorProto, defs

    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Cast":
        return [attributes["to"].i]
    if node.op_type in ("Constant", "ConstantOfShape"):
        is_whole = {"value_int", "value_ints"} & attributes.keys()
        return [attributes["value"].t.data_type if "value" in attributes else 7 if is_whole else 1]
    try:
        schema = defs.get_schema(node.op_type, opset, "" if node.domain == "ai.onnx" else node.domain)
    except defs.SchemaError:
        return []
    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    sources: dict[str, str] = {}
    for formal, name in zip(schema.inputs, node.input, strict=False):
        if name:
            sources.setdefault(formal.type_str, name)
    result = []
    for output in schema.outputs:
        options = allowed.get(output.type_str, [output.type_str])
        if output.type_str in sources:
            result.append(kinds.get(sources[output.type_str], _UNKNOWN))
        else:
            names = {option.removeprefix("tensor(").removesuffix(")").upper() for option in options}
            whole = {name for name in names if name.startswith("INT")}
            result.append(_UNKNOWN if len(names) > 1 and whole else getattr(TensorProto, names.pop(), _UNKNOWN))
    return result
