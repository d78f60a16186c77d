import hashlib

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace_engines.demo import networks
from headrace_engines.demo.build import RESNET50_IMAGENET, WeightsFile
from headrace_engines.demo.networks import GraphBuilder, fp32
from headrace_engines.errors import BuildError
from onnx import numpy_helper

pytestmark = pytest.mark.slow


def _ignore(_done: float, _note: str) -> None: ...


def _published(content: bytes, path) -> WeightsFile:
    path.write_bytes(content)
    return WeightsFile(path.as_uri(), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="module")
def seeded(demo_repository):
    return demo_repository("resnet50") / "resnet50/1/model.onnx"


@pytest.fixture(scope="module")
def state(seeded):
    """A state dict of the whole architecture in a few kB: each tensor is one value, seen through strides of zero."""
    entries = {}
    for constant in onnx.load(seeded).graph.initializer:
        name, shape = constant.name, tuple(constant.dims)
        values = {name: 0.01}
        if not name.startswith("fc.") and name.endswith(".bias"):
            conv = name.removesuffix(".bias")
            norm = conv.replace("downsample.0", "downsample.1").replace("conv", "bn")
            values = dict(
                zip(
                    (f"{norm}.{p}" for p in ("weight", "bias", "running_mean", "running_var")),
                    (2, 3, 5, 4),
                    strict=True,
                )
            )
        entries |= {key: (np.array([value], np.float32), shape, (0,) * len(shape), 0) for key, value in values.items()}
    return entries


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


def test_published_weights_are_read_and_folded(save_checkpoint, state, tmp_path):
    content = save_checkpoint(state)
    assert len(content) < 1_000_000
    artefact = networks.build_resnet50_fetched(_ignore, _published(content, tmp_path / "weights.pth"))
    assert artefact.weights == f"sha256:{hashlib.sha256(content).hexdigest()}"
    constants = {constant.name: numpy_helper.to_array(constant) for constant in artefact.model.graph.initializer}
    scale = 2 / np.sqrt(4 + 1e-5)
    for conv in ("conv1", "layer1.0.downsample.0", "layer4.2.conv3"):
        np.testing.assert_allclose(constants[f"{conv}.weight"], 0.01 * scale, rtol=1e-6)
        np.testing.assert_allclose(constants[f"{conv}.bias"], 3 - 5 * scale, rtol=1e-6)
    np.testing.assert_allclose(constants["fc.weight"], 0.01, rtol=1e-6)


def test_another_architecture_is_refused(save_checkpoint, state, tmp_path):
    del state["layer4.2.conv3.weight"]
    with pytest.raises(BuildError, match=r"layer4\.2\.conv3\.weight is nothing, expected float32 \(2048, 512, 1, 1\)"):
        networks.build_resnet50_fetched(_ignore, _published(save_checkpoint(state), tmp_path / "weights.pth"))


def test_a_file_with_another_checksum_is_refused_unread(tmp_path):
    (tmp_path / "weights.pth").write_bytes(b"anything")
    with pytest.raises(BuildError, match="expected 1111"):
        networks.build_resnet50_fetched(_ignore, WeightsFile(str(tmp_path / "weights.pth"), "1" * 64))


@pytest.mark.parametrize("url", ["/no/such/file.pth", "file:///no/such/file.pth", "ftp://example.org/weights.pth"])
def test_an_unavailable_file_is_reported(url):
    with pytest.raises(BuildError, match=url):
        WeightsFile(url, "1" * 64).read(_ignore)


@pytest.mark.parametrize("digits", ["", "123", "g" * 64, "A" * 64])
def test_a_checksum_that_is_none_is_refused(digits):
    with pytest.raises(BuildError, match="64 hex digits"):
        WeightsFile("weights.pth", digits)


def test_the_published_name_has_the_checksums_first_digits():
    assert RESNET50_IMAGENET.url.endswith(f"-{RESNET50_IMAGENET.sha256[:8]}.pth")


def _onnx_file(reshape_to: int | None = None) -> bytes:
    """A stand-in with the right shape, fixed to one row, whose input is called "data"."""
    graph = GraphBuilder("stand-in")
    x = graph.node("GlobalAveragePool", "data")
    if reshape_to is None:
        x = graph.node("Flatten", x)
    else:
        x = graph.node("Reshape", x, graph.constant("shape", np.array([reshape_to, 3], np.int64)))
    weight = np.random.default_rng(3).standard_normal((1000, 3), np.float32)
    graph.dense(x, "fc", weight, np.zeros(1000, np.float32), output="scores")
    model = graph.model({"data": fp32(3, 224, 224)}, {"scores": fp32(1000)}, "", {})
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    return model.SerializeToString()


def test_an_onnx_file_replaces_the_model(tmp_path):
    artefact = networks.build_resnet50_fetched(_ignore, _published(_onnx_file(), tmp_path / "weights.onnx"))
    session = ort.InferenceSession(artefact.model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(4).standard_normal((5, 3, 224, 224), np.float32)
    assert session.run(["logits"], {"input": rows})[0].shape == (5, 1000)
    assert "SHA-256" in {entry.key: entry.value for entry in artefact.model.metadata_props}["origin"]


def test_an_onnx_file_that_cannot_batch_and_other_files_are_refused(tmp_path):
    for content, message in (
        (_onnx_file(reshape_to=1), "batch"),
        (b"<html>not found</html>", "neither a PyTorch checkpoint nor"),
    ):
        with pytest.raises(BuildError, match=message):
            networks.build_resnet50_fetched(_ignore, _published(content, tmp_path / "weights.onnx"))
