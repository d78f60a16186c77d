"""A pipeline from image files to classes, and the same work in process: `python -m loadtest.bench.images`.

Each worker process decodes, resizes and runs the model on one thread, in batches. All begin at the same moment. What they do
together is the limit of a server on the same cores, which has to receive, queue and answer the images besides.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from headrace.core.heap import keep_freed_memory
from headrace.pipelines.execution import top_k
from headrace.pipelines.recipe import ImageRecipe
from headrace.pipelines.steps.decode_image import ImageDecoder
from headrace.pipelines.steps.options import DecodeOptions
from PIL import Image

from loadtest.protocol import HttpRequest
from loadtest.servers import ROOT, pinned

PIPELINE = "classify"
TOP = 5
WIDTH, HEIGHT = 500, 375
_QUALITY = 90
_HEAP_BYTES = 64 << 20
_LEAD_S = 20.0
RECIPE = ImageRecipe(interpolation="bicubic", mean=(127.0,), std=(128.0,))
_CONFIG = """
input: [{{name: file, data_type: bytes, dims: [1]}}]
output:
  - {{name: classes, data_type: int32, dims: [{top}]}}
  - {{name: scores, data_type: fp32, dims: [{top}]}}
pipeline:
  steps:
    decode: {{builtin: decode_image, options: {{processes: {processes}}}, inputs: {{image: file}}, outputs: {{image: pixels}}}}
    resize:
      builtin: resize
      options: {{resize_short_side: 256, crop: [224, 224], interpolation: bicubic, mean: 127.0, std: 128.0}}
      inputs: {{image: pixels}}
      outputs: {{tensor: tensor}}
    model: {{model: {model}, inputs: {{{input}: tensor}}, outputs: {{{output}: p}}}}
    best: {{builtin: top_k, options: {{k: {top}}}, inputs: {{scores: p}}, outputs: {{classes: classes, scores: scores}}}}
"""


def photograph(width: int = WIDTH, height: int = HEIGHT, seed: int = 5) -> bytes:
    """Return a JPEG file with the spectrum of a photograph (amplitude 1/f), of 93 KB at the default size."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1.0
    noise = np.fft.fft2(random.normal(size=(3, height, width))) / frequency**1.2
    planes = np.fft.ifft2(noise).real
    planes[1:] = planes[0] + 0.3 * planes[1:]  # the colours of a photograph follow its brightness
    planes = (planes - planes.mean()) / planes.std()
    pixels = np.clip(128 + 50 * planes, 0, 255).astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def image_request(data: bytes) -> HttpRequest:
    """Return the request that sends an image file as its whole body."""
    return HttpRequest(f"/v2/models/{PIPELINE}/infer", data, {"Content-Type": "image/jpeg"})


def write_pipeline(repository: Path, model: str, file: Path, processes: int = 0) -> None:
    """Write the pipeline of a model into a repository.

    Args:
        repository: its folder.
        model: name of the model, with one input and one output of scores.
        file: the model in ONNX.
        processes: number of images that are decoded at once; 0: half of the cores.
    """
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    folder = repository / PIPELINE
    (folder / "1").mkdir(parents=True, exist_ok=True)
    text = _CONFIG.format(
        top=TOP,
        processes=processes,
        model=model,
        input=session.get_inputs()[0].name,
        output=session.get_outputs()[0].name,
    )
    (folder / "config.yaml").write_text(text)


def expected_classes(file: Path, data: bytes) -> list[int]:
    """Return the best classes of an image, best first, computed in this process."""
    return [int(number) for number in top_k(_classifier(file)([data]), TOP)[0]]


def _classifier(file: Path) -> Callable[[list[bytes]], npt.NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name, decoder = session.get_inputs()[0].name, ImageDecoder(DecodeOptions(), RECIPE)

    def classify(files: list[bytes]) -> npt.NDArray[np.float32]:
        scores: npt.NDArray[np.float32] = session.run(None, {name: np.stack([decoder.decode(data) for data in files])})[
            0
        ]
        return scores

    return classify


@dataclass(frozen=True, slots=True)
class InProcessRate:
    """Combined rate of all workers.

    Attributes:
        images_per_s: decoded, resized and classified.
        cpu_ms: processor time of an image in milliseconds.
    """

    images_per_s: float
    cpu_ms: float


def in_process(
    file: Path | None, workers: int, batch: int, seconds: float, cpus: tuple[int, ...] | None = None
) -> InProcessRate:
    """Measure workers that do the pipeline's work without a server.

    Args:
        file: the model in ONNX; None to decode and resize only.
        workers: number of processes.
        batch: images in a run of the model.
        seconds: duration.
        cpus: cores of all workers; None for any.

    Raises:
        subprocess.CalledProcessError: a worker failed.
    """
    command = [*pinned(cpus), sys.executable, "-m", "loadtest.bench.images", "--batch", str(batch)]
    command += ["--seconds", str(seconds)] + ([] if file is None else ["--model", str(file.resolve())])
    started = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(workers)
    ]
    try:
        for worker in started:  # each says that it is warm
            if worker.stdout is None or not worker.stdout.readline():
                raise subprocess.CalledProcessError(worker.wait(), command)
        for worker in started:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        answers = [worker.communicate(timeout=seconds + _LEAD_S)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
    results = [json.loads(answer) for answer in answers]
    images = sum(result["images"] for result in results)
    rate = sum(result["images"] / result["seconds"] for result in results)
    return InProcessRate(rate, sum(result["cpu_s"] for result in results) * 1e3 / images)


def _work(file: Path | None, batch: int, seconds: float) -> None:
    """Work as one worker: write a line once it is warm, wait for a line, then measure."""
    keep_freed_memory(_HEAP_BYTES)  # as the decoders of the server do
    files = [photograph()] * batch
    decoder = ImageDecoder(DecodeOptions(), RECIPE)
    run: Callable[[list[bytes]], object] = (
        (lambda images: [decoder.decode(data) for data in images]) if file is None else _classifier(file)
    )
    run(files)
    print("warm", flush=True)
    sys.stdin.readline()
    images, begun_s, cpu_s = 0, time.monotonic(), _cpu_s()
    while (elapsed_s := time.monotonic() - begun_s) < seconds:
        run(files)
        images += batch
    print(json.dumps({"images": images, "seconds": elapsed_s, "cpu_s": _cpu_s() - cpu_s}))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Start one worker from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    _work(options.model, options.batch, options.seconds)


if __name__ == "__main__":
    main()
