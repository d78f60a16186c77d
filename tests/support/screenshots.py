"""`python -m tests.support.screenshots DIR`: pictures of the server's page for the documentation."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import skimage
import tritonclient.http as triton

from tests.support.browser import DESKTOP, PHONE, Page, chromium
from tests.support.serving import ROOT, Server, serving

MODELS = ("digits", "efficientnet_lite0", "tiny")
CALLERS = 6
WATCH_S = 65.0
INPUTS = {
    "tiny": ("input", (16,)), "digits": ("image", (1, 8, 8)), "efficientnet_lite0": ("input", (3, 224, 224)),
    "reader": ("image", (1, 8, 8)),
}  # fmt: skip
# A pipeline with a branch: a number is read in the picture if the first look is sure of it.
PIPELINE = """
input: [{name: image, data_type: fp32, dims: [1, 8, 8]}]
output: [{name: names, data_type: bytes, dims: [3]}, {name: sure, data_type: fp32, dims: [-1, 10]}]
pipeline:
  outputs: {names: best}
  steps:
    look: {model: digits, inputs: {image: image}, outputs: {probabilities: probabilities}}
    best:
      builtin: top_k
      options: {k: 3, labels: labels.txt}
      inputs: {scores: probabilities}
      outputs: {labels: best}
    again: {model: digits, when: probabilities.max > 0.6, inputs: {image: image}, outputs: {probabilities: sure}}
"""


def main() -> None:
    """Take the pictures."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary) / "model_repository"
        for name in MODELS:
            shutil.copytree(ROOT / "model_repository" / name, repository / name)
        (repository / "reader" / "1").mkdir(parents=True)
        (repository / "reader" / "config.yaml").write_text(PIPELINE)
        shutil.copy(repository / "digits" / "labels.txt", repository / "reader")
        inspect = [
            sys.executable,
            "-m",
            "headrace_engines",
            "inspect",
            "digits",
            "--publish",
            "--model-repository",
            str(repository),
        ]
        subprocess.run(inspect, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with serving(repository, Path(temporary)) as server, chromium(Path(temporary)) as browser:
            page = browser.open(f"{server.url}/", (DESKTOP[0], 1000, False))
            end = threading.Event()
            threads = [threading.Thread(target=call, args=(server, number, end)) for number in range(CALLERS)]
            for thread in threads:
                thread.start()
            try:
                take(page, folder, server)
                phone = browser.open(f"{server.url}/", PHONE, dark=True)
                time.sleep(WATCH_S / 3)
                phone.evaluate(
                    "[...document.querySelectorAll('#models a')].find((it) => it.innerText === 'tiny').scrollIntoView()"
                )
                phone.screenshot(folder / "page-phone.png")
            finally:
                end.set()
                for thread in threads:
                    thread.join()


def take(page: Page, folder: Path, server: Server) -> None:
    """The page after a while, then the form with a photograph."""
    time.sleep(WATCH_S)
    page.screenshot(folder / "page.png")
    page.evaluate("location.hash = 'efficientnet_lite0/1'")
    page.wait("document.getElementById('try-drop').checkVisibility()")
    page.drop("#try-drop", [Path(skimage.__file__).parent / "data" / "chelsea.png"])
    page.wait("document.querySelector('#try-result .ranking')")
    time.sleep(1)  # for the picture to be drawn
    page.screenshot(folder / "page-try.png", "#try")
    page.evaluate("location.hash = 'reader/1'")
    page.wait("document.querySelector('#view .graph .step')?.textContent.includes('p50')")
    time.sleep(2)
    page.screenshot(folder / "page-pipeline.png", "#view")


def call(server: Server, number: int, end: threading.Event) -> None:
    """Send small requests for all models at random times, a few of them invalid."""
    chance, numbers = random.Random(number), np.random.default_rng(number)
    with triton.InferenceServerClient(server.address) as client:
        while not end.is_set():
            (model,) = chance.choices(("tiny", "digits", "efficientnet_lite0", "reader"), (75, 13, 2, 10))
            name, shape = INPUTS[model]
            rows = 1 if model == "efficientnet_lite0" else chance.choice((1, 1, 1, 2, 4))
            wrong = model == "tiny" and chance.random() < 0.001
            front = () if model == "reader" else (rows,)
            array = numbers.uniform(0, 16, (*front, *shape[:-1], shape[-1] + wrong)).astype(np.float32)
            tensor = triton.InferInput(name, array.shape, "FP32").set_data_from_numpy(array)
            try:
                client.infer(model, [tensor])
            except triton.InferenceServerException:
                assert wrong, "a request that is right was refused"
            end.wait(chance.expovariate(60))


if __name__ == "__main__":
    main()
