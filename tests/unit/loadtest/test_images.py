"""The pipeline of images in the bench: its file, its configuration, its workers, and what bounds it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from headrace.config.model_folder import read_model_folder
from headrace.pipelines.yaml_steps import build_yaml_graph
from PIL import Image

from loadtest.bench import images
from loadtest.bench.cases import CASES
from loadtest.gpu.images import Sample, _is_whole
from tests.support.models import add_model, channel_means


def test_the_photograph_is_the_same_each_time_and_compresses_as_one() -> None:
    data = images.photograph()
    assert data == images.photograph()
    assert 60_000 < len(data) < 120_000
    with Image.open(io.BytesIO(data)) as image:
        assert (image.size, image.mode) == ((500, 375), "RGB")
        assert np.asarray(image).std() > 30


def test_the_pipeline_has_the_steps_that_are_measured(tmp_path: Path) -> None:
    add_model(tmp_path, "means", channel_means(224, 224))
    images.write_pipeline(tmp_path, "means", tmp_path / "means" / "1" / "model.onnx", processes=3)
    graph = build_yaml_graph(read_model_folder(tmp_path / images.PIPELINE, tmp_path).config)
    assert [step.builtin or step.model for step in graph.steps] == ["decode_image", "means", "top_k"]
    decode = graph.steps[0].options
    assert decode["processes"] == 3
    assert decode["resize"]["interpolation"] == images.RECIPE.interpolation


def test_workers_decode_in_process() -> None:
    rate = images.in_process(None, 2, 1, 0.2)
    assert rate.images_per_s > 0
    assert 0.1 < rate.cpu_ms < 1000


def test_the_bound_is_the_processor_that_is_used_up() -> None:
    def bound(server: float, decoders: float) -> str:
        return Sample(100.0, server, 0.4, decoders, 0.1).bound(4)

    assert bound(0.5, 3.7) == "the decoder processes"
    assert bound(1.1, 2.0) == "the interpreter of the server's process"
    assert bound(0.5, 2.0).startswith("none of the processors")


@pytest.mark.parametrize(
    ("received", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n", False),
    ],
)
def test_answers_are_read_to_their_end(received: bytes, whole: bool) -> None:
    assert _is_whole(bytearray(received)) == whole


def test_the_case_is_one_of_the_bench() -> None:
    assert "jpeg" in [case.name for case in CASES]
