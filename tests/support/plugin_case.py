"""A small FP16 network with convolutions, for the tests of the plug-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_lab.kernels import plugin as convolution_plugin
from onnx import TensorProto, helper, numpy_helper

SIZE = (8, 6, 5)


def residual_block(
    rows: int | None = None, element: int = TensorProto.FLOAT16, *, size: tuple[int, int, int] = SIZE
) -> onnx.ModelProto:
    """y = relu(conv2(relu(conv1(x))) + conv3(x)): x and y FP16 or FP32 [rows or free, *size].

    Nodes: conv1 (3x3, bias), relu1, conv2 (1x1, no bias), conv3 (1x1, bias), add, relu2.
    """
    random = np.random.default_rng(3)
    dtype = helper.tensor_dtype_to_np_dtype(element)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        scale = 1 / np.sqrt(np.prod(shape[1:], initial=1))
        return numpy_helper.from_array((random.standard_normal(shape) * scale).astype(dtype), name)

    c = size[0]
    shape = [rows if rows is not None else "n", *size]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
            helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", kernel_shape=[1, 1]),
            helper.make_node("Conv", ["x", "w3", "b3"], ["c3"], name="conv3", kernel_shape=[1, 1]),
            helper.make_node("Add", ["c3", "c2"], ["s"], name="add"),
            helper.make_node("Relu", ["s"], ["y"], name="relu2"),
        ],
        "residual",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        [
            *(weights("w1", c, c, 3, 3), weights("b1", c), weights("w2", c, c, 1, 1)),
            *(weights("w3", c, c, 1, 1), weights("b3", c)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def images(rows: int, dtype: Any = np.float16, size: tuple[int, int, int] = SIZE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rows).standard_normal((rows, *size)).astype(dtype)


def read_past_rows(patch: pytest.MonkeyPatch) -> None:
    """Let the plug-ins that are opened from now on read their input eight values too far: those of the next row."""
    create = convolution_plugin._OpenConvolution.__init__

    def opened(self: Any, convolution: Any) -> None:
        create(self, convolution)
        launch = self.launch
        self.launch = lambda stream, source, *others: launch(stream, source + 16, *others)

    patch.setattr(convolution_plugin._OpenConvolution, "__init__", opened)


ORDER = TargetSpec("fp16", (ShapeRange({"x": ((1, *SIZE), (2, *SIZE), (4, *SIZE))}),))
