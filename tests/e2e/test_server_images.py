"""Image conversion and classification by the server, over real sockets, against the same model without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import skimage
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from headrace.inference.pipelines.execution import softmax
from headrace.inference.pipelines.image import decode, prepare, to_pixels
from headrace.inference.pipelines.recipe import ImageRecipe

from tests.support import models
from tests.support.serving import Server, run_headrace, serving

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
FILES = [PHOTOGRAPHS / name for name in ("chelsea.png", "coffee.png", "camera.png", "rocket.jpg")]
RECIPE = {"interpolation": "bicubic", "mean": [127.0] * 3, "std": [128.0] * 3}
LABELS = [f"class {number}" for number in range(10)]
PLAIN = f"preprocess: {json.dumps(RECIPE)}\noutput: [{{name: LOGITS, label_filename: labels.txt}}]\nmax_batch_size: 4\n"
SERVED = PLAIN.replace('{"inter', '{"by": "server", "inter') + "dynamic_batching: {}\n"
RANKED = SERVED + "postprocess: {softmax: true, top_k: 3}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("pictures") / "repository"
    resized = RANKED.replace('{"by"', '{"source": [256, 300], "by"')
    warm = (
        "model_warmup: [{batch_size: 2, inputs: {IMAGE: {random_data: true}}}]\n"
        "input: [{name: IMAGE, data_type: uint8, dims: [224, 224, 3]}]\n"
    )
    configs = {"plain": PLAIN, "pixels": SERVED, "ranked": RANKED + warm, "resized": resized}
    for name, config in configs.items():
        files = {"config.yaml": config, "labels.txt": "\n".join(LABELS) + "\n"}
        models.add_model(repository, name, models.pictures(), files=files)
    with serving(
        repository,
        tmp_path_factory.mktemp("log"),
        "--model-control",
        "explicit",
        "--load-model",
        "*",
        "--allow-model-override",
    ) as running:
        yield running


def recipe(**more: object) -> ImageRecipe:
    return ImageRecipe.from_mapping({**RECIPE, **more})


def sent(array: np.ndarray) -> triton.InferInput:
    kind = {"uint8": "UINT8", "float32": "FP32"}[array.dtype.name]
    return triton.InferInput("IMAGE", array.shape, kind).set_data_from_numpy(array)


@pytest.fixture
def logits(client: triton.InferenceServerClient) -> np.ndarray:
    """Outputs of the model without server-side conversion for an image that the client converts."""
    tensors = np.concatenate([prepare(decode(file.read_bytes()), recipe()) for file in FILES])
    answer = client.infer("plain", [sent(tensors)]).as_numpy("LOGITS")
    assert answer.shape == (4, 10)
    return np.asarray(answer)


def test_pixels_are_a_quarter_of_the_bytes_and_get_the_same_answer(
    client: triton.InferenceServerClient, logits: np.ndarray
) -> None:
    described = client.get_model_metadata("pixels")["inputs"]
    assert described == [{"name": "IMAGE", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}]
    pixels = [to_pixels(decode(file.read_bytes()), recipe(by="server")) for file in FILES]
    assert pixels[0].nbytes == 150_528
    waiting = [client.async_infer("pixels", [sent(picture)]) for picture in pixels]
    answers = np.concatenate([answer.get_result().as_numpy("LOGITS") for answer in waiting])
    assert np.allclose(answers, logits, rtol=1e-5, atol=1e-5)
    assert np.allclose(client.infer("pixels", [sent(np.concatenate(pixels))]).as_numpy("LOGITS"), logits, 1e-5, 1e-5)


def test_classes_come_back_named_over_both_protocols(
    server: Server, client: triton.InferenceServerClient, logits: np.ndarray
) -> None:
    metadata = client.get_model_metadata("ranked")
    assert [(o["name"], o["datatype"], o["shape"]) for o in metadata["outputs"]] == [
        ("scores", "FP32", [-1, 3]),
        ("classes", "INT32", [-1, 3]),
        ("labels", "BYTES", [-1, 3]),
    ]
    pixels = np.concatenate([to_pixels(decode(file.read_bytes()), recipe(by="server")) for file in FILES])
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    tensor = triton_grpc.InferInput("IMAGE", pixels.shape, "UINT8").set_data_from_numpy(pixels)
    with triton_grpc.InferenceServerClient(server.grpc_address) as grpc_client:
        for answer in (client.infer("ranked", [sent(pixels)]), grpc_client.infer("ranked", [tensor])):
            assert np.array_equal(answer.as_numpy("classes"), expected)
            assert np.allclose(answer.as_numpy("scores"), np.take_along_axis(softmax(logits), expected, 1), atol=1e-5)
            named = [[text.decode() for text in row] for row in answer.as_numpy("labels")]
            assert named == [[LABELS[number] for number in row] for row in expected]


def test_larger_pixels_are_resized_and_cropped_by_the_server(client: triton.InferenceServerClient) -> None:
    ours = recipe(by="server", source=[256, 300])
    rng = np.random.default_rng(5)
    pixels = rng.integers(0, 256, (2, 256, 300, 3), dtype=np.uint8)
    from PIL import Image

    tensors = np.concatenate([prepare(Image.fromarray(picture), ours) for picture in pixels])
    expected = np.argsort(-client.infer("plain", [sent(tensors)]).as_numpy("LOGITS"), axis=1)[:, :3]
    assert np.array_equal(client.infer("resized", [sent(pixels)]).as_numpy("classes"), expected)


def test_floats_are_refused_and_so_are_other_sizes(client: triton.InferenceServerClient) -> None:
    with pytest.raises(triton.InferenceServerException, match="UINT8"):
        client.infer("pixels", [sent(np.zeros((1, 3, 224, 224), np.float32))])
    with pytest.raises(triton.InferenceServerException, match="224"):
        client.infer("pixels", [sent(np.zeros((1, 224, 223, 3), np.uint8))])


@pytest.mark.parametrize("model", ["plain", "pixels", "ranked", "resized"])
def test_the_configuration_as_shown_can_be_loaded_again(client: triton.InferenceServerClient, model: str) -> None:
    shown = client.get_model_config(model)
    client.load_model(model, config=json.dumps(shown))
    assert client.get_model_config(model) == shown


def test_the_command_line_sends_photographs_to_each(server: Server) -> None:
    seen = []
    for model in ("plain", "pixels", "ranked"):
        done = run_headrace("infer", model, *FILES, "--url", server.grpc_address, "--json", "--top", "3")
        assert (done.returncode, done.stderr) == (0, "")
        results = json.loads(done.stdout)["results"]
        seen.append([[(c["index"], c["label"]) for c in result["classes"]] for result in results])
    assert seen[0] == seen[1] == seen[2]
    assert all(label == LABELS[index] for picture in seen[0] for index, label in picture)
