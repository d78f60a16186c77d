"""ONNX graphs as PyTorch networks: equal outputs, and refusals with the node's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="needs PyTorch, which the test environment does not install")
onnxruntime = pytest.importorskip("onnxruntime")

from headrace_engines.optimize.pruning_program.channels import NotUnderstood, map_channels  # noqa: E402
from headrace_engines.optimize.pruning_program.onnx_module import read_network  # noqa: E402

GRAPH = """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4,9,9] x) => (float[N,6] y) {
    a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w0, b0)
    n = BatchNormalization<epsilon=0.001>(a, scale, shift, mean, variance)
    r = Relu(n)
    c = Conv<pads=[0,0,2,2], group=8>(r, w1)
    d = HardSwish(c)
    e = Conv(d, w2)
    f = Add(e, r)
    m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(f)
    p = AveragePool<kernel_shape=[2,2], strides=[1,1]>(f)
    q = Concat<axis=1>(m, m)
    g1 = GlobalAveragePool(q)
    h = Flatten(g1)
    g2 = GlobalAveragePool(p)
    h2 = Reshape(g2, shape)
    k = Concat<axis=1>(h, h2)
    l = Gemm<transB=1, alpha=0.5, beta=2.0>(k, w3, b3)
    s = Mul(l, half)
    t = Clip(s, low, high)
    u = MatMul(t, w4)
    y = Softmax<axis=-1>(u)
}"""
SHAPES = {
    "w0": (8, 4, 3, 3), "b0": (8,), "scale": (8,), "shift": (8,), "mean": (8,), "w1": (8, 1, 3, 3), "w2": (8, 8, 1, 1),
    "w3": (10, 24), "b3": (10,), "w4": (10, 6),
}  # fmt: skip


def graph(text: str = GRAPH) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    arrays |= {"variance": random.uniform(0.5, 2, 8).astype(np.float32), "half": np.float32(0.5)}
    arrays |= {"low": np.float32(-1), "high": np.float32(2), "shape": np.array([-1, 8], np.int64)}
    for name, array in arrays.items():
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def test_outputs_equal_onnx_runtime_s(tmp_path: Path) -> None:
    model = graph()
    onnx.checker.check_model(model)
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((5, 4, 9, 9)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    network = read_network(str(tmp_path / "model.onnx"))
    with torch.no_grad():
        np.testing.assert_allclose(network(torch.from_numpy(x)), expected, atol=1e-5)
    channels = map_channels(network, torch.from_numpy(x[:2]))
    assert [len(group) for group in channels.groups] == [8, 10]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("d = Sin(c)", "node d .Sin. cannot be converted"),
        ("d = Add(c, b0)", "node d .Add.*constant with several values"),
        ("d = Transpose<perm=[0,2,1,3]>(c)", "node d .Transpose."),
        ("d = Softmax<axis=1>(c)", "node d .Softmax."),
        ('d = Conv<auto_pad="SAME_UPPER">(c, w2)', "node d .Conv.*auto_pad"),
    ],
)
def test_unsupported_nodes_are_refused(line: str, words: str, tmp_path: Path) -> None:
    onnx.save(graph(GRAPH.replace("d = HardSwish(c)", line)), tmp_path / "model.onnx")
    with pytest.raises(NotUnderstood, match=words):
        read_network(str(tmp_path / "model.onnx"))


def test_reshape_to_another_batch_is_refused(tmp_path: Path) -> None:
    model = graph(GRAPH.replace("h2 = Reshape(g2, shape)", "h2 = Reshape(g2, pairs)"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 4], np.int64), "pairs"))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotUnderstood, match=r"its shape is .-1, 4., only"):
        read_network(str(tmp_path / "model.onnx"))
