"""Built-in steps in served pipelines: a real tokenizer, images as tensors, suppression, rankings, and rows of many requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.http as http_client
from headrace.inference.pipelines.image import prepare
from headrace.inference.pipelines.recipe import ImageRecipe
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.models import add_model, add_pipeline
from tests.support.serving import Server, serving
from tests.support.triton_clients import infer
from tests.support.waiting import on_threads

tokenizers = pytest.importorskip("tokenizers")

SENTENCES = ("The cat sat on the mat.", "Ein völlig anderer Satz!", "", "naïve 😀 text", "a" * 300)
TEXTS = """
max_batch_size: 8
input: [{name: text, data_type: bytes, dims: [1]}]
output:
  - {name: ids, data_type: int64, dims: [-1]}
  - {name: mask, data_type: int64, dims: [-1]}
  - {name: types, data_type: int64, dims: [-1]}
pipeline:
  steps:
    tokenize:
      builtin: tokenize
      options: {max_length: 32, multiple_of: 8}
      inputs: {text: text}
      outputs: {input_ids: ids, attention_mask: mask, token_type_ids: types}
"""
PIXELS = """
input: [{name: image, data_type: uint8, dims: [-1, -1, 3]}]
output: [{name: tensor, data_type: fp32, dims: [40, 48, 3]}]
pipeline:
  steps:
    resize:
      builtin: resize
      options: {resize_short_side: 64, crop: [40, 48], interpolation: bicubic, mean: [1, 2, 3], std: [4, 5, 6], layout: nhwc}
      inputs: {image: image}
      outputs: {tensor: tensor}
"""
RANKED = """
max_batch_size: 64
input: [{name: x, data_type: fp32, dims: [-1]}]
output:
  - {name: shares, data_type: fp32, dims: [-1]}
  - {name: best, data_type: int32, dims: [3]}
pipeline:
  steps:
    softmax: {builtin: softmax, inputs: {scores: x}, outputs: {probabilities: shares}}
    rank: {builtin: top_k, options: {k: 3}, inputs: {scores: shares}, outputs: {classes: best}}
"""
ROWS = """
input: [{name: rows, data_type: fp32, dims: [-1, 4]}]
output: [{name: features, data_type: fp32, dims: [-1, 3]}]
pipeline: {steps: {describe: {model: affine, each: rows, inputs: {X: rows}, outputs: {Y: features}}}}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("steps") / "repository"
    delay = "dynamic_batching { max_queue_delay_microseconds: 100000 }"
    add_model(folder, "affine", models.affine(4, 3), config=f"max_batch_size: 8 {delay} {UNBOUNDED_WAITS}")
    pipelines = {"texts": TEXTS, "pixels": PIXELS, "ranked": RANKED, "rows": ROWS}
    for name, text in pipelines.items():
        add_pipeline(folder, name, "", files={"config.yaml": text})
    trained().save(str(folder / "texts" / "tokenizer.json"))
    return folder


def trained() -> Any:
    """A byte-pair tokenizer with special tokens, and with settings of its own that the step must not take over."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(["the cat sat on the mat", "ein Satz über Katzen"] * 20, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=77)
    tokenizer.enable_truncation(5)
    return tokenizer


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository, repository.parent) as started:
        yield started


def texts(*sentences: str) -> np.ndarray:
    array = np.empty((len(sentences), 1), object)
    array[:, 0] = [sentence.encode() for sentence in sentences]
    return array


def test_texts_are_tokenized_as_the_library_does(client: http_client.InferenceServerClient, repository: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(repository / "texts" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(32)
    expected = [encoding.ids for encoding in tokenizer.encode_batch(list(SENTENCES))]
    result = infer(client, "texts", {"text": texts(*SENTENCES)})
    ids, mask = result.as_numpy("ids"), result.as_numpy("mask")
    assert ids.shape == mask.shape == result.as_numpy("types").shape == (5, 32)
    assert [row[: sum(ones)].tolist() for row, ones in zip(ids, mask, strict=True)] == expected
    assert not ids[mask == 0].any()
    assert infer(client, "texts", {"text": texts("cat")}).as_numpy("ids").shape == (1, 8)


@pytest.mark.parametrize("size", [(64, 64), (500, 375), (33, 200), (70, 1)])
def test_pixels_are_resized_and_normalized_as_a_client_does(
    client: http_client.InferenceServerClient, size: tuple[int, int]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    recipe = ImageRecipe(
        resize_short_side=64, crop=(40, 48), interpolation="bicubic", mean=(1, 2, 3), std=(4, 5, 6), layout="nhwc"
    )
    tensor = infer(client, "pixels", {"image": pixels}).as_numpy("tensor")
    assert np.array_equal(tensor, prepare(Image.fromarray(pixels), recipe)[0])


def test_an_image_without_pixels_is_refused(client: http_client.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="it has no pixels"):
        infer(client, "pixels", {"image": np.zeros((0, 5, 3), np.uint8)})


@pytest.mark.parametrize("shape", [(1, 5), (3, 100), (1, 2048), (1, 2049), (64, 1000)])
def test_small_and_large_scores_are_ranked_alike(
    client: http_client.InferenceServerClient, shape: tuple[int, int]
) -> None:
    scores = np.random.default_rng(1).normal(0, 30, shape).astype(np.float32)
    scores[:, 1] = scores[:, 3] = scores.max(axis=1) + 1  # equal: the lower index first
    shares = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    result = infer(client, "ranked", {"x": scores})
    np.testing.assert_allclose(result.as_numpy("shares"), shares, rtol=1e-4, atol=1e-7)
    assert result.as_numpy("best")[:, :2].tolist() == [[1, 3]] * shape[0]


def test_large_scores_do_not_overflow(client: http_client.InferenceServerClient) -> None:
    scores = np.array([[3e38, -3e38, 3e38]], np.float32)
    assert infer(client, "ranked", {"x": scores}).as_numpy("shares").tolist() == [[0.5, 0.0, 0.5]]


def test_no_scores_are_the_clients_error(client: http_client.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="softmax needs at least one score"):
        infer(client, "ranked", {"x": np.zeros((1, 0), np.float32)})


def test_steps_on_the_event_loop_have_statistics(client: http_client.InferenceServerClient, server: Server) -> None:
    infer(client, "ranked", {"x": np.ones((2, 5), np.float32)})
    _, _, content = server.request("GET", "/v2/status")
    (model,) = [each for each in json.loads(content)["models"] if each["name"] == "ranked"]
    steps = {step["name"]: step for step in model["serving"]["pipeline"]["steps"]}
    assert steps["softmax"]["requests"] >= 1


def test_rows_of_several_requests_share_batches_and_are_gathered(server: Server, repository: Path) -> None:
    """Twelve requests of 0 to 11 rows at once, to a model with batches of 8 rows."""
    session = onnxruntime.InferenceSession(str(repository / "affine" / "1" / "model.onnx"))
    generator = np.random.default_rng(2)
    inputs = [generator.normal(size=(count, 4)).astype(np.float32) for count in range(12)]
    results: dict[int, np.ndarray] = {}
    barrier = threading.Barrier(len(inputs))

    def send(index: int) -> None:
        with http_client.InferenceServerClient(server.url.removeprefix("http://")) as own:
            barrier.wait(30)
            results[index] = infer(own, "rows", {"rows": inputs[index]}).as_numpy("features")

    before = executions(server)
    on_threads(send, range(len(inputs)))
    for index, rows in enumerate(inputs):
        expected = session.run(None, {"X": rows})[0] if len(rows) else np.empty((0, 3), np.float32)
        assert results[index].shape == (len(rows), 3)
        np.testing.assert_allclose(results[index], expected, rtol=1e-4, atol=1e-5)
    assert executions(server) - before < 14  # alone, eight requests take one batch each and three take two


def executions(server: Server) -> int:
    _, _, content = server.request("GET", "/v2/models/affine/stats")
    return int(json.loads(content)["model_stats"][0]["execution_count"])
