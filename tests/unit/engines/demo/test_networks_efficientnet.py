from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from headrace_engines.demo import networks
from headrace_engines.errors import BuildError
from PIL import Image

pytestmark = pytest.mark.slow

PHOTOGRAPHS = [
    ("skimage", "data/coffee.png", {"espresso"}, 0.9),
    ("skimage", "data/camera.png", {"tripod"}, 0.9),
    ("skimage", "data/chelsea.png", {"tiger cat", "Egyptian cat"}, 0.3),
    ("sklearn", "datasets/images/china.jpg", {"palace"}, 0.25),
    ("sklearn", "datasets/images/flower.jpg", {"daisy"}, 0.3),
    ("skimage", "data/motorcycle_left.png", {"moped"}, 0.4),
]


@pytest.fixture(scope="module")
def session(demo_repository):
    path = demo_repository("efficientnet_lite0") / "efficientnet_lite0/1/model.onnx"
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def labels(demo_repository):
    return (demo_repository("efficientnet_lite0") / "efficientnet_lite0/labels.txt").read_text().splitlines()


def _preprocess(path: Path) -> np.ndarray:
    picture = Image.open(path).convert("RGB")
    scale = 256 / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
    pixels = np.asarray(picture.crop((left, top, left + 224, top + 224)), np.float32)
    return ((pixels - 127) / 128).transpose(2, 0, 1)


def _read(package: str, name: str) -> np.ndarray:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / name
    if not path.is_file():
        pytest.skip(f"the installed {package} does not ship {name}")
    return _preprocess(path)


@pytest.mark.parametrize(
    ("package", "name", "expected", "least"), PHOTOGRAPHS, ids=[p[1].split("/")[-1] for p in PHOTOGRAPHS]
)
def test_photographs_get_their_label(session, labels, package, name, expected, least):
    probabilities = session.run(["probabilities"], {"input": _read(package, name)[None]})[0][0]
    best = int(probabilities.argmax())
    assert labels[best] in expected
    assert probabilities[best] >= least


def test_rows_of_a_batch_are_answered_as_alone(session):
    rows = np.stack([_read("skimage", "data/coffee.png"), _read("sklearn", "datasets/images/flower.jpg")])
    together = session.run(None, {"input": rows})[0]
    assert together.shape == (2, 1000)
    np.testing.assert_allclose(together.sum(axis=1), 1, atol=1e-4)
    for row, answer in zip(rows, together, strict=True):
        np.testing.assert_allclose(session.run(None, {"input": row[None]})[0][0], answer, atol=1e-5)


def test_labels_are_a_thousand_different_names(labels):
    assert len(labels) == 1000
    assert len({label.lower() for label in labels}) == 1000
    assert all(label.strip() == label != "" for label in labels)
    assert [labels[i] for i in (0, 282, 698, 967, 999)] == ["tench", "tiger cat", "palace", "espresso", "toilet tissue"]


def test_weights_with_another_checksum_are_refused(monkeypatch):
    monkeypatch.setattr(networks, "EFFICIENTNET_SHA256", "0" * 64)
    with pytest.raises(BuildError, match="expected 000"):
        networks.build_efficientnet_lite0(lambda *_: None)
