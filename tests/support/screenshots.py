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
INPUTS = {"tiny": ("input", (16,)), "digits": ("image", (1, 8, 8)), "efficientnet_lite0": ("input", (3, 224, 224))}


def main() -> None:
    """Take the pictures."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary) / "model_repository"
        for name in MODELS:
            shutil.copytree(ROOT / "model_repository" / name, repository / name)
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
                    "[...document.querySelectorAll('.card')].find((it) => it.innerText.startsWith('tiny')).scrollIntoView()"
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
    page.evaluate("document.querySelectorAll('.card button.try')[1].click()")
    page.wait("document.getElementById('try-drop').checkVisibility()")
    page.drop("#try-drop", [Path(skimage.__file__).parent / "data" / "chelsea.png"])
    page.wait("document.querySelector('#try-result .ranking')")
    time.sleep(1)  # for the picture to be drawn
    page.screenshot(folder / "page-try.png", "#try")


def call(server: Server, number: int, end: threading.Event) -> None:
    """Send small requests for all models at random times, a few of them invalid."""
    chance = random.Random(number)
    with triton.InferenceServerClient(server.address) as client:
        while not end.is_set():
            (model,) = chance.choices(("tiny", "digits", "efficientnet_lite0"), (80, 18, 2))
            name, shape = INPUTS[model]
            rows = 1 if model == "efficientnet_lite0" else chance.choice((1, 1, 1, 2, 4))
            wrong = model == "tiny" and chance.random() < 0.001
            array = np.ones((rows, *shape[:-1], shape[-1] + wrong), np.float32)
            tensor = triton.InferInput(name, array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            try:
                client.infer(model, [tensor])
            except triton.InferenceServerException:
                assert wrong, "a request that is right was refused"
            end.wait(chance.expovariate(60))


if __name__ == "__main__":
    main()
