"""Changes of an exported ONNX file: names of inputs and outputs, and operators that exist in no version of ONNX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import replace_items

_UNREGISTERED = re.compile(r"No Op registered for (\w+) with domain_version of (\d+)")
_NODE = re.compile(r'In Node, \("([^"]*)"')


def mend_graph(path: Path, names: Mapping[str, str], opset: int | None) -> int:
    """Rename tensors, and replace operators that the exporter left in the form of its framework.

    Args:
        path: the file; external data stay where they are.
        names: new name of inputs and outputs by present name.
        opset: version of the operators that was requested; None for any.

    Returns:
        The version of the operators.

    Raises:
        BuildError: the file has another version than requested, or a new name is that of another tensor.
    """
    model = onnx.load_model(path, load_external_data=False)
    actual = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset not in (None, actual):
        raise BuildError(f"the exporter wrote opset {actual}, --opset is {opset}: leave --opset out, or write {actual}")
    names = {old: new for old, new in names.items() if old != new}
    taken = {name for graph in _graphs(model.graph) for node in graph.node for name in (*node.input, *node.output)}
    for old, new in names.items():
        if new in taken - set(names):
            raise BuildError(f"the tensor {old} cannot be called {new}, another one has that name: rename the output")
    for graph in _graphs(model.graph):
        _rename(graph, names)
        _replace_erfc(graph)
    onnx.save_model(model, path)
    return actual


def load_failure(error: BuildError, opset: int) -> BuildError:
    """Return the error for a file that ONNX Runtime does not load: it names the operator and the remedy.

    Args:
        error: error of the session.
        opset: version of the operators in the file.
    """
    text = str(error)
    match, node = _UNREGISTERED.search(text), _NODE.search(text)
    if match is None:
        return BuildError(re.sub(r"/\S*/(?=model\.onnx)", "", text))
    operator = match[1]
    where = f" (node '{node[1]}')" if node else ""
    if not onnx.defs.has(operator):
        cure = "write that part of the model with other operators"
        return BuildError(f"the exporter has no ONNX form of the operator {operator}{where}: {cure}")
    since = min(schema.since_version for schema in onnx.defs.get_all_schemas_with_history() if schema.name == operator)
    return BuildError(
        f"the operator {operator}{where} is not in opset {opset}: write --opset {max(since, opset + 1)} or later"
    )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _graphs(inner)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for field in (graph.input, graph.output, graph.value_info, graph.initializer):
        for value in field:
            value.name = names.get(value.name, value.name)
    for node in graph.node:
        for field_of_node in (node.input, node.output):
            for index, name in enumerate(field_of_node):
                field_of_node[index] = names.get(name, name)


def _replace_erfc(graph: onnx.GraphProto) -> None:
    """Replace Erfc by 1 - Erf: tf2onnx writes the exact GELU of Keras with TensorFlow's operator."""
    if not any(node.op_type == "Erfc" for node in graph.node):
        return
    nodes = []
    for node in graph.node:
        if node.op_type != "Erfc" or node.domain not in ("", "ai.onnx"):
            nodes.append(node)
            continue
        name = node.output[0]
        nodes += [
            helper.make_node("Erf", [node.input[0]], [f"{name}/erf"], name=f"{node.name}/Erf"),
            # 1 in the type of the tensor, which the node does not have.
            helper.make_node("Neg", [f"{name}/erf"], [f"{name}/neg"], name=f"{node.name}/Neg"),
            helper.make_node("Constant", [], [f"{name}/float"], name=f"{node.name}/Constant", value_float=1.0),
            helper.make_node(
                "CastLike", [f"{name}/float", f"{name}/erf"], [f"{name}/one"], name=f"{node.name}/CastLike"
            ),
            helper.make_node("Add", [f"{name}/neg", f"{name}/one"], [name], name=f"{node.name}/Add"),
        ]
    replace_items(graph.node, nodes)
