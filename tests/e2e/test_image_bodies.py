"""Image files to classes through a pipeline in YAML: curl, JSON, gRPC, batches, and files that are refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import skimage
import tritonclient.grpc as grpc_client
from headrace.inference.pipelines.image import decode, prepare
from headrace.inference.pipelines.recipe import ImageRecipe
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.models import add_model, add_pipeline
from tests.support.serving import Server, serving

ROCKET = Path(skimage.__file__).parent / "data" / "rocket.jpg"
RECIPE = {"resize_short_side": 32, "crop": [32, 32], "mean": 127.0, "std": 50.0}
STEPS = """
pipeline:
  steps:
    decode: {builtin: decode_image, options: {processes: 1, max_pixels: 1000000}, inputs: {image: file}, outputs: {image: pixels}}
    resize:
      builtin: resize
      options: {resize_short_side: 32, crop: [32, 32], mean: 127.0, std: 50.0}
      inputs: {image: pixels}
      outputs: {tensor: tensor}
    model: {model: means, inputs: {IMAGE: tensor}, outputs: {LOGITS: logits}}
    best:
      builtin: top_k
      options: {k: 2, softmax: true, labels: labels.txt}
      inputs: {scores: logits}
      outputs: {labels: labels, scores: scores, classes: classes}
"""
TENSORS = """
input: [{name: file, data_type: bytes, dims: [1]}]
output:
  - {name: labels, data_type: bytes, dims: [2]}
  - {name: scores, data_type: fp32, dims: [2]}
  - {name: classes, data_type: int32, dims: [2]}
"""
LABELS = "red\ngreen\nblue\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("images") / "repository"
    add_model(folder, "means", models.channel_means(32, 32), config="max_batch_size: 8 dynamic_batching {}")
    for name, rows in (("classify", 0), ("batches", 4)):
        text = f"max_batch_size: {rows}\n{TENSORS}{STEPS}"
        add_pipeline(folder, name, "", files={"config.yaml": text, "labels.txt": LABELS})
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository, repository.parent) as started:
        yield started


def saved(color: str, kind: str = "JPEG", size: tuple[int, int] = (60, 40)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


def post(server: Server, data: bytes, model: str = "classify", kind: str = "image/jpeg") -> tuple[int, dict[str, Any]]:
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", data, {"Content-Type": kind})
    return status, json.loads(content)


def output(answer: dict[str, Any], name: str) -> list[Any]:
    (data,) = [each["data"] for each in answer["outputs"] if each["name"] == name]
    return list(data)


@pytest.mark.parametrize(("kind", "name"), [("JPEG", "cat.jpg"), ("PNG", "cat.png"), ("WEBP", "cat.webp")])
def test_curl_sends_a_file_and_gets_classes(server: Server, tmp_path: Path, kind: str, name: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    file = tmp_path / name
    file.write_bytes(saved("blue", kind))
    url = f"{server.url}/v2/models/classify/infer"
    command = [curl, "-s", "--data-binary", f"@{file}", "-H", f"Content-Type: image/{kind.lower()}", url]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    assert output(answer, "labels")[0] == "blue"
    assert output(answer, "classes")[0] == 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("color", ["red", "lime", "blue"])
def test_each_format_is_decoded(server: Server, color: str, kind: str) -> None:
    status, answer = post(server, saved(color, kind), kind=f"image/{kind.lower()}")
    assert (status, output(answer, "labels")[0]) == (200, {"lime": "green"}.get(color, color))


def test_a_photograph_gives_what_the_steps_give_one_after_the_other(server: Server, repository: Path) -> None:
    data = ROCKET.read_bytes()
    status, answer = post(server, data)
    assert status == 200
    tensor = prepare(decode(data), ImageRecipe.from_mapping(RECIPE))
    session = onnxruntime.InferenceSession(str(repository / "means/1/model.onnx"))
    logits = session.run(None, {"IMAGE": tensor})[0][0]
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argsort(-logits, kind="stable")[:2]
    assert output(answer, "classes") == best.tolist()
    np.testing.assert_allclose(output(answer, "scores"), shares[best], rtol=1e-4)


def test_a_batch_of_images_of_different_size_is_one_request(server: Server) -> None:
    files = [saved("red"), saved("blue", "PNG", (33, 90)), saved("lime", "WEBP", (400, 300))]
    with grpc_client.InferenceServerClient(server.grpc_address) as client:
        tensor = grpc_client.InferInput("file", [3, 1], "BYTES")
        tensor.set_data_from_numpy(np.array(files, dtype=object).reshape(3, 1))
        result = client.infer("batches", [tensor])
    assert result.as_numpy("labels")[:, 0].tolist() == [b"red", b"blue", b"green"]
    assert post(server, saved("red"), "batches")[1]["outputs"][0]["shape"] == [1, 2]


def test_an_error_in_one_image_names_the_step(server: Server) -> None:
    status, answer = post(server, b"\xff\xd8\xff" + bytes(100))
    assert status == 400
    assert "in pipeline 'classify', step 'decode' (built-in step decode_image): " in answer["error"]
    with grpc_client.InferenceServerClient(server.grpc_address) as client:
        tensor = grpc_client.InferInput("file", [2, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([saved("red"), b"no image"], dtype=object).reshape(2, 1))
        with pytest.raises(InferenceServerException, match="no image that can be read"):
            client.infer("batches", [tensor])


def test_limits_hold_before_a_pixel_is_decoded(server: Server) -> None:
    status, answer = post(server, saved("red", "PNG", (1001, 1000)), kind="image/png")
    assert (status, "at most 1000000 are accepted" in answer["error"]) == (413, True)


def test_an_image_for_a_model_of_tensors_is_refused(server: Server) -> None:
    status, answer = post(server, saved("red"), "means")
    assert status == 400
    assert "does not decode image files" in answer["error"]


def test_json_with_base64_is_not_an_image(server: Server) -> None:
    text = base64.b64encode(saved("red")).decode()
    body = {"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    status, _, content = server.request("POST", "/v2/models/classify/infer", json.dumps(body).encode())
    assert (status, "no image that can be read" in json.loads(content)["error"]) == (400, True)
