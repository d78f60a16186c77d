import numpy as np
import onnx
import onnxruntime as ort
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeded(demo_repository):
    return demo_repository("resnet50") / "resnet50/1/model.onnx"


def test_a_row_is_answered_alone_as_in_a_batch(seeded):
    session = ort.InferenceSession(seeded, providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(1).standard_normal((3, 3, 224, 224), np.float32)
    together = session.run(["logits"], {"input": rows})[0]
    assert together.shape == (3, 1000)
    assert np.isfinite(together).all()
    for row, logits in zip(rows, together, strict=True):
        np.testing.assert_allclose(session.run(["logits"], {"input": row[None]})[0][0], logits, rtol=1e-3, atol=1e-3)


def test_outputs_vary_and_have_a_bounded_scale(seeded):
    session = ort.InferenceSession(seeded, providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(2).standard_normal((2, 3, 224, 224), np.float32)
    rows[1] = np.linspace(-2, 2, 224, dtype=np.float32)
    logits = session.run(["logits"], {"input": rows})[0]
    assert 0.1 < logits.std() < 10
    assert np.corrcoef(logits)[0, 1] < 0.9


def test_the_stride_of_a_block_is_in_its_3x3_convolution(seeded):
    strided = []
    for node in onnx.load(seeded).graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Conv" and attributes["strides"] == [2, 2]:
            strided.append((node.input[1], attributes["kernel_shape"][0]))
    blocks = [
        (f"layer{n}.0.{name}.weight", kernel) for n in (2, 3, 4) for name, kernel in (("conv2", 3), ("downsample.0", 1))
    ]
    assert strided == [("conv1.weight", 7), *blocks]
