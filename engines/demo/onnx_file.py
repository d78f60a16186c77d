"""Taking a ready ONNX file for a demo model: only if it has the shape of it, and answers rows one by one as in a batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx import helper

from engines.demo.graph import BATCH
from engines.errors import BuildError

# An ONNX element type and a shape without the batch dimension.
Tensor = tuple[int, tuple[int, ...]]


def adopt(
    content: bytes,
    expected_input: Tensor,
    expected_output: Tensor,
    input_name: str,
    output_name: str,
    properties: Mapping[str, str],
) -> onnx.ModelProto:
    """Read an ONNX file, give its one input and output our names, and free its batch dimension.

    Args:
        content: the file's bytes, weights included.
        expected_input: element type and shape of its input.
        expected_output: the same of its output.
        input_name: what the input is called from now on.
        output_name: the same for the output.
        properties: metadata to add.

    Raises:
        BuildError: if the file is no such model, or its batch dimension cannot be freed.
    """
    try:
        model = onnx.load_model_from_string(content)
        onnx.checker.check_model(model)
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise BuildError(f"the weights file is neither a PyTorch checkpoint nor a whole ONNX model: {error}") from error
    constants = {initializer.name for initializer in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    _expect("input", inputs, expected_input)
    _expect("output", list(model.graph.output), expected_output)
    _rename(model.graph, {inputs[0].name: input_name, model.graph.output[0].name: output_name})
    for value in (inputs[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    # Shapes that were inferred for one batch size would contradict the freed dimension.
    del model.graph.value_info[:]
    helper.set_model_props(model, {**{entry.key: entry.value for entry in model.metadata_props}, **properties})
    _check_batches(model, expected_input, input_name)
    return model


def _expect(role: str, values: list[onnx.ValueInfoProto], expected: Tensor) -> None:
    found = [
        (value.type.tensor_type.elem_type, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[1:])
        for value in values
    ]
    if found != [expected]:
        raise BuildError(
            f"the ONNX file's {role}s are (element type, shape of a row) {found}, expected only {expected}"
        )


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _check_batches(model: onnx.ModelProto, expected_input: Tensor, input_name: str) -> None:
    rows = np.random.default_rng(0).standard_normal((2, *expected_input[1]), np.float32)
    try:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        together = session.run(None, {input_name: rows})[0]
        alone = session.run(None, {input_name: rows[1:]})[0]
    # ONNX Runtime's exceptions have no common base but this one.
    except Exception as error:
        raise BuildError(f"the ONNX file does not run with a free batch dimension: {error}") from error
    if not np.allclose(together[1:], alone, rtol=1e-3, atol=1e-4):
        raise BuildError("the ONNX file answers a row in a batch otherwise than the row alone: it cannot be batched")
