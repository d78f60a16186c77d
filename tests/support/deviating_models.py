"""Models with one layer that loses most of its values in INT8, or in FP16."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget

from tests.support import networks

# Channel of the tensor "wide" with values a thousand times as large as those of the others; no later layer uses it.
LOUD = 3


def deviating_model() -> onnx.ModelProto:
    """Four 1x1 convolutions; the input of the third, "wide", has one loud channel with a weight of zero.

    With one scale for the tensor, all other channels are zero in INT8: the third layer, node "loud", deviates, and repairs the
    output in floating point.
    """
    text = """
        a = Conv(x, w0, b0)  ar = Relu(a)  b = Conv(ar, w1, b1)  br = Relu(b)
        wide = Mul(br, gain)  loud = Conv(wide, w2, b0)  c = Relu(loud)  d = Conv(c, w3, b0)
        mean = GlobalAveragePool(d)  y = Flatten(mean)
    """
    constants: dict[str, Any] = networks.weights(
        w0=(8, 4, 1, 1), w1=(8, 8, 1, 1), w2=(8, 8, 1, 1), w3=(8, 8, 1, 1), b0=(8,), b1=(8,)
    )
    gain = np.ones((1, 8, 1, 1), np.float32)
    gain[0, LOUD] = 3000
    constants["w2"][:, LOUD] = 0
    # A loud channel that is never clamped to zero.
    constants["b1"][LOUD] = 4
    model = networks.network(text, constants | {"gain": gain}, ("N", 4, 6, 6))
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def wrong_in_the_middle() -> onnx.ModelProto:
    """Return a model of five layers, the third of which `WrongEight` computes wrongly."""
    model = networks.network("a = Sin (x)  b = Neg (a)  c = Tanh (b)  d = Cos (c)  y = Neg (d)", {}, ("N", 4))
    model.graph.node[2].name = "middle"
    return model


class WrongEight(OnnxRuntimeTarget):
    """Builds engines that add one to the layer "middle" in batches of eight rows."""

    def build(self, model: onnx.ModelProto, *arguments: Any) -> None:
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        graph = changed.graph
        index = next((i for i, node in enumerate(graph.node) if node.name == "middle"), None)
        if index is not None:
            middle = graph.node[index]
            text = "s = Shape (x)  n = Gather (s, zero)  q = Equal (n, eight)  f = Cast <to: int = 1> (q)  y = Add (right, f)"
            wrong = networks.network(text, {"zero": np.array(0), "eight": np.array(8)}, ("N", 4)).graph
            wrong.node[0].input[0], wrong.node[-1].output[0] = middle.input[0], middle.output[0]
            middle.output[0] = wrong.node[-1].name = "right"
            nodes = [*graph.node[: index + 1], *wrong.node, *graph.node[index + 1 :]]
            del graph.node[:]
            graph.node.extend(nodes)
            graph.initializer.extend(wrong.initializer)
        super().build(changed, *arguments)
