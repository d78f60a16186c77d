"""Small ONNX files for tests, made by `onnx.helper`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Shape = Sequence[int | str | None] | None


def identity_model(
    inputs: dict[str, tuple[int, Shape]] | None = None, outputs: dict[str, tuple[int, Shape]] | None = None
) -> onnx.ModelProto:
    """Return a model whose outputs are copies of its inputs, in order, with the given types and shapes."""
    inputs = {"x": (TensorProto.FLOAT, ["batch", 16])} if inputs is None else inputs
    outputs = {"y": (TensorProto.FLOAT, ["batch", 16])} if outputs is None else outputs
    sources = list(inputs) or ["nothing"]
    nodes = [helper.make_node("Identity", [sources[i % len(sources)]], [name]) for i, name in enumerate(outputs)]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


def write_model(
    folder: Path, model: onnx.ModelProto | None = None, version: int = 1, config: str = "", name: str = ""
) -> Path:
    """Write a model and its configuration into `folder`; the configuration's file is `name`, or config.yaml."""
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    onnx.save(model or identity_model(), folder / str(version) / "model.onnx")
    if config:
        (folder / (name or "config.yaml")).write_text(config)
    return folder
