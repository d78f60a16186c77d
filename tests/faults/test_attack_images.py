"""Attacks by image files on decode_image: bombs, damaged files, a decoder that hangs or is killed (S30 in docs/security.md)."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage
import tritonclient.grpc as grpc_client
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.support.models import add_model, add_pipeline, channel_means
from tests.support.processes import isolated_children, stop
from tests.support.serving import Server, serving
from tests.support.waiting import on_threads, until
from tests.unit.inference.pipelines.test_image import (
    WEBP_KINDS,
    jpeg_claiming,
    png_chunk,
    png_claiming,
    saved,
    webp_claiming,
)

# Made by the test that sends it, not by the collection of tests.
BOMB = b"a bomb"
ROCKET = (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()
CONFIG = """
input: [{name: file, data_type: bytes, dims: [1]}]
output: [{name: logits, data_type: fp32, dims: [3]}]
pipeline:
  steps:
    decode: {builtin: decode_image, options: {processes: 2, timeout_s: 3}, inputs: {image: file}, outputs: {image: pixels}}
    resize: {builtin: resize, options: {resize_short_side: 32, crop: [32, 32]}, inputs: {image: pixels}, outputs: {tensor: x}}
    model: {model: means, inputs: {IMAGE: x}, outputs: {LOGITS: logits}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("attacked") / "repository"
    add_model(folder, "means", channel_means(32, 32), config="max_batch_size: 8")
    for name in ("classify", "neighbour"):
        add_pipeline(folder, name, "", files={"config.yaml": CONFIG})
    with serving(folder, folder.parent) as started:
        yield started


def post(server: Server, data: bytes, model: str = "classify") -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "image/jpeg"}
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", data, headers)
    return status, json.loads(content)


def is_served(server: Server) -> bool:
    status, answer = post(server, ROCKET)
    return status == 200 and np.isfinite(answer["outputs"][0]["data"]).all().item()


def decoders(server: Server) -> list[int]:
    return sorted(isolated_children(server.process.pid))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of one colour: a thousand times smaller than its pixels."""
    rows = zlib.compress(bytes(1 + width * 3) * height, 9)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (png_claiming(65535, 65535), 413),
        (jpeg_claiming(65535, 65535), 413),
        (BOMB, 413),
        (jpeg_claiming(3000, 3000), 400),  # allowed, but the pixels do not come
        (ROCKET[:-2000], 400),
        (ROCKET[:30] + bytes(2000), 400),
        (b"", 400),
        (b"\xff\xd8" * 100_000, 400),
        (b"GIF89a" + bytes(1000), 400),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run\n", 400),
        (bytes(21_000_000), 413),
    ],
    ids=[
        "png claims",
        "jpeg claims",
        "bomb",
        "few pixels",
        "cut",
        "damaged",
        "empty",
        "markers",
        "gif",
        "eps",
        "bytes",
    ],
)
def test_hostile_files_are_refused_and_end_no_process(server: Server, data: bytes, status: int) -> None:
    before, size = decoders(server), resident_bytes(server.process.pid)
    answered, answer = post(server, png_bomb(8000, 8000) if data == BOMB else data)
    assert (answered, "step 'decode'" in answer["error"]) == (status, True)
    assert decoders(server) == before
    assert resident_bytes(server.process.pid) - size < 100_000_000
    assert is_served(server)


# 134 to 179 million pixels: below Pillow's own limit; a WebP of that size takes more memory than a decoder process has. Above,
# Pillow's error has the number of pixels only.
@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png_claiming(12000, 12000), "12000 x 12000 = 144000000"),
        (jpeg_claiming(12000, 12000), "12000 x 12000 = 144000000"),
        *((webp_claiming(kind, 12000, 12000), "12000 x 12000 = 144000000") for kind in WEBP_KINDS),
        (png_claiming(16000, 16000), "256000000"),
        (jpeg_claiming(16000, 16000), "256000000"),
        *((webp_claiming(kind, 16000, 16000), "16000 x 16000 = 256000000") for kind in WEBP_KINDS),
    ],
    ids=[
        f"{name} of {size}"
        for size in ("144 megapixels", "256 megapixels")
        for name in ("png", "jpeg", "webp", "webp without loss", "webp with features")
    ],
)
def test_each_format_with_too_many_pixels_is_refused_alike(server: Server, data: bytes, size: str) -> None:
    before = decoders(server)
    message = f"the image has {size} pixels, at most 50000000 are accepted: send a smaller one"
    status, answer = post(server, data)
    assert status == 413
    assert answer["error"].endswith(message)
    with grpc_client.InferenceServerClient(server.grpc_address) as client:
        tensor = grpc_client.InferInput("file", [1], "BYTES").set_data_from_numpy(np.array([data], dtype=object))
        with pytest.raises(InferenceServerException) as refusal:
            client.infer("classify", [tensor])
    assert refusal.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    assert refusal.value.message().endswith(message)
    assert decoders(server) == before


@pytest.mark.parametrize("size", [(1, 65500), (65500, 1)])
def test_a_line_of_pixels_is_decoded_in_little_memory(server: Server, size: tuple[int, int]) -> None:
    before = decoders(server)
    status, _ = post(server, saved(Image.new("RGB", size, "red"), "JPEG"))
    assert status == 200
    assert decoders(server) == before


def test_a_bomb_within_the_limit_stays_in_the_decoder(server: Server) -> None:
    size = resident_bytes(server.process.pid)
    status, answer = post(server, png_bomb(6000, 6000))
    assert status in (200, 500), answer  # decoded, or too slow on this machine
    assert resident_bytes(server.process.pid) - size < 100_000_000
    until(lambda: is_served(server))


def test_random_changes_of_a_file_never_end_the_service(server: Server) -> None:
    generator = np.random.default_rng(7)
    before = decoders(server)
    for _ in range(60):
        data = bytearray(ROCKET[:6000] + ROCKET[-6000:])
        for position in generator.integers(0, len(data), 20):
            data[position] = generator.integers(256)
        status, answer = post(server, bytes(data))
        assert status in (200, 400, 413), answer
    assert decoders(server) == before


def test_a_decoder_that_hangs_is_killed_and_others_go_on(server: Server) -> None:
    stopped, other = decoders(server)
    stop(stopped)
    answers: list[tuple[int, dict[str, Any]]] = []
    on_threads(lambda model: answers.append(post(server, ROCKET, model)), ("classify", "neighbour") * 4)
    statuses = sorted(status for status, _ in answers)
    assert statuses[:-1] == [200] * 7
    assert statuses[-1] in (200, 500)  # the one inside the process, which had not begun it: the next process runs it
    until(lambda: len(decoders(server)) == 2 and stopped not in decoders(server))
    assert other in decoders(server)
    assert is_served(server)


def test_pipelines_share_the_decoders(server: Server) -> None:
    until(lambda: len(decoders(server)) == 2)
    assert post(server, ROCKET)[0] == post(server, ROCKET, "neighbour")[0] == 200
    assert post(server, ROCKET[:-2000], "neighbour")[0] == 400
    assert len(decoders(server)) == 2


def test_killed_decoders_are_replaced(server: Server) -> None:
    for pid in decoders(server):
        os.kill(pid, signal.SIGKILL)
    until(lambda: is_served(server))
    until(lambda: len(decoders(server)) == 2)


def test_a_file_of_a_step_does_not_lead_out_of_the_folder(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    add_model(folder, "means", channel_means(32, 32))
    secret = tmp_path / "secret.txt"
    secret.write_text("red\ngreen\nblue\n")
    steps = "{builtin: top_k, options: {k: 1, labels: labels.txt}, inputs: {scores: x}, outputs: {labels: names}}"
    text = (
        "input: [{name: x, data_type: fp32, dims: [3]}]\noutput: [{name: names, data_type: bytes, dims: [1]}]\n"
        f"pipeline: {{steps: {{best: {steps}}}}}\n"
    )
    add_pipeline(folder, "leak", "", files={"config.yaml": text})
    (folder / "leak" / "labels.txt").symlink_to(secret)
    with serving(folder, tmp_path, "--model-control", "explicit") as started:
        status, _, content = started.request("POST", "/v2/repository/models/leak/load", b"{}")
        assert status == 400
        assert "a link that leads out of the pipeline's folder" in json.loads(content)["error"]


def test_the_files_of_the_tests_are_images() -> None:
    assert Image.open(io.BytesIO(png_bomb(10, 10))).convert("RGB").size == (10, 10)
