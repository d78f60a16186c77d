"""Requests that the server's pages send for inputs of every kind: files as they are, texts, several inputs, each datatype."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.core.tensor import BY_NAME

from tests.e2e.test_image_bodies import LABELS, STEPS, TENSORS, output, post, saved
from tests.support import models
from tests.support.browser import Browser, Page
from tests.support.models import add_model, add_pipeline, ensemble_config
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving

pytestmark = pytest.mark.slow

# Pipelines that read an image file: without and with a batch dimension, and through other pipelines.
DECODERS = ["classify", "batches", "outer", "outermost"]
OUTER = """
input: [{name: photo, data_type: bytes, dims: [1]}]
output: [{name: labels, data_type: bytes, dims: [2]}]
pipeline: {steps: {inner: {model: classify, inputs: {file: photo}, outputs: {labels: labels}}}}
"""
# Pixels, which the server prepares.
PIXELS = "preprocess: {by: server, source: [256, 300]}\npostprocess: {top_k: 3}\nmax_batch_size: 4\n"
# A decoupled model that sends its second token once a file is there.
TOKENS = """
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0])
            for number in range(count):
                while number and not pathlib.Path(__file__).with_name("go").exists():
                    time.sleep(0.01)
                text = pb_utils.Tensor("text_output", np.array([f"t{number} ".encode()], object))
                sender.send(pb_utils.InferenceResponse([text]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TOKENS_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "seed" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
OPTIONAL = """
max_batch_size: 4
input [{ name: "X" data_type: TYPE_FP32 dims: [3] }, { name: "BIAS" data_type: TYPE_FP32 dims: [3] optional: true }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("requests") / "repository"
    add_model(folder, "means", models.channel_means(32, 32), config="max_batch_size: 8 dynamic_batching {}")
    for name, rows in (("classify", 0), ("batches", 4)):
        text = f"max_batch_size: {rows}\n{TENSORS}{STEPS}"
        add_pipeline(folder, name, "", files={"config.yaml": text, "labels.txt": LABELS})
    add_pipeline(folder, "outer", "", files={"config.yaml": OUTER})
    steps = [("outer", {"photo": "picture"}, {"labels": "labels"})]
    tensors = {"picture": ("TYPE_STRING", [1])}, {"labels": ("TYPE_STRING", [2])}
    add_pipeline(folder, "outermost", ensemble_config(steps, *tensors, more="max_batch_size: 0"))
    add_model(folder, "pixels", models.pictures(), files={"config.yaml": PIXELS})
    add_model(folder, "planes", models.pictures())
    add_model(folder, "several", models.sum_difference())
    add_model(folder, "optional", models.optional_bias(), config=OPTIONAL)
    add_model(folder, "bytes", models.identity("UINT8", ("n",)), config="max_batch_size: 0")
    add_model(folder, "rows", models.identity("UINT8", ("batch", "n")), config="max_batch_size: 4")
    add_model(folder, "text", models.identity("BYTES", ("batch", 1)), config="max_batch_size: 4")
    add_model(folder, "texts", models.identity("BYTES", ("batch", 300)), config="max_batch_size: 4")
    add_python_model(folder, "tokens", TOKENS, TOKENS_CONFIG)
    for datatype in BY_NAME:
        add_model(folder, f"of_{datatype}", models.identity(datatype))
    with serving(folder, folder.parent) as running:
        yield running


def opened(browser: Browser, server: Server, model: str) -> Page:
    """Open the view of a model that takes files."""
    page = browser.open(f"{server.url}/#{model}/1")
    page.wait("document.getElementById('try-drop').checkVisibility()")
    return page


def answer(page: Page) -> dict[str, Any]:
    page.wait("document.querySelector('#try-result pre')")
    result: dict[str, Any] = json.loads(page.text("#try-result pre"))
    return result


def content_type(page: Page) -> str:
    """Content type of the last inference request."""
    page.evaluate("0")  # events before this call have arrived after it
    requests = [message["request"] for method, message in page.events if method == "Network.requestWillBeSent"]
    headers = [request["headers"] for request in requests if request["url"].endswith("/infer")][-1]
    return {name.lower(): str(value) for name, value in headers.items()}["content-type"]


@pytest.mark.parametrize("model", DECODERS)
def test_a_dropped_picture_is_sent_as_it_is_to_a_model_that_decodes(
    browser: Browser, server: Server, model: str, tmp_path: Path
) -> None:
    picture = tmp_path / "blue.webp"
    picture.write_bytes(saved("blue", "WEBP"))
    page = opened(browser, server, model)
    assert not page.evaluate("document.getElementById('try-text').checkVisibility()"), "JSON cannot hold a picture"
    page.drop("#try-drop", [picture])
    received = answer(page)
    assert received == post(server, picture.read_bytes(), model)[1]
    assert output(received, "labels")[0] == "blue"
    assert content_type(page) == "image/webp"
    assert page.evaluate("document.getElementById('try-preview').naturalWidth") == 60
    assert page.complaints() == []
    page.close()


def test_a_picture_can_be_chosen_and_the_reason_of_a_refusal_is_shown(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    page = opened(browser, server, "classify")
    page.evaluate("document.getElementById('try-sample').click()")
    assert len(output(answer(page), "labels")) == 2
    (tmp_path / "notes.png").write_text("this is no picture")
    page.choose_files("#try-file", [tmp_path / "notes.png"])
    page.wait("document.querySelector('#try-result .error')")
    assert "no image that can be read" in page.text("#try-result")
    # The extension says nothing: the server reads the format from the file.
    (tmp_path / "red").write_bytes(saved("red", "PNG"))
    page.choose_files("#try-file", [tmp_path / "red"])
    assert output(answer(page), "labels")[0] == "red"
    assert content_type(page) == "image/unknown"
    page.close()


def test_commands_that_send_a_picture_run(browser: Browser, server: Server, tmp_path: Path) -> None:
    picture = tmp_path / "it's blue.jpg"
    picture.write_bytes(saved("blue"))
    page = opened(browser, server, "batches")
    page.evaluate("document.getElementById('try-curl').click()")
    page.wait("document.getElementById('try-code').textContent.endsWith(\"--data-binary '@picture.jpg'\")")
    page.choose_files("#try-file", [picture])
    assert output(answer(page), "labels")[0] == "blue"
    for button, start in (("try-python", "import numpy"), ("try-curl", "curl ")):
        page.evaluate(f"document.getElementById('{button}').click()")
        page.wait(f"document.getElementById('try-code').textContent.startsWith('{start}')")
        code = page.evaluate("document.getElementById('try-code').textContent")
        assert picture.name in code or "'\\''" in code
        command = [sys.executable, "-c"] if button == "try-python" else ["bash", "-c"]
        result = subprocess.run([*command, code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert "blue" in result.stdout
    page.close()


def copied(page: Page, button: str, start: str) -> str:
    """Click on a button and return the command that is copied."""
    page.evaluate(f"document.getElementById('try-code').textContent = ''; document.getElementById('{button}').click()")
    page.wait(f"document.getElementById('try-code').textContent.startsWith({json.dumps(start)})")
    return str(page.evaluate("document.getElementById('try-code').textContent"))


def test_commands_send_the_picture_that_was_sent_to_a_model_of_bytes(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    """The command sends the JSON while no picture is chosen, after another file, and once the JSON is sent."""
    picture, notes = tmp_path / "red.jpg", tmp_path / "notes.txt"
    picture.write_bytes(saved("red"))
    notes.write_text("a line")
    page = opened(browser, server, "text")
    page.wait("document.getElementById('try-text').value")
    json_body = f"curl '{server.url}/v2/models/text/versions/1/infer' -H 'Content-Type: application/json' -d "
    assert copied(page, "try-curl", "curl").startswith(json_body)
    page.choose_files("#try-file", [picture])
    page.wait("document.querySelector('#try-result .error') || document.querySelector('#try-result pre')")
    command = copied(page, "try-curl", "curl")
    assert command == json_body.replace("application/json' -d ", "image/jpeg' --data-binary '@red.jpg'")
    request = ["bash", "-c", f"{command} -sS -o /dev/null -w '%{{size_upload}}'"]
    result = subprocess.run(request, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout == str(len(picture.read_bytes())), result.stderr
    assert 'open("red.jpg", "rb").read()' in copied(page, "try-python", "import numpy")
    page.choose_files("#try-file", [notes])
    assert output(answer(page), "Y") == ["a line"]
    assert copied(page, "try-curl", "curl").startswith(json_body)
    assert 'open("notes.txt", "rb").read()' in copied(page, "try-python", "import numpy")
    page.evaluate("document.getElementById('try-send').click()")
    assert "notes.txt" not in copied(page, "try-python", "import numpy")
    page.close()


@pytest.mark.parametrize("model", ["bytes", "rows", "text"])
def test_a_file_is_the_data_of_a_model_that_reads_bytes(
    browser: Browser, server: Server, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "some.txt"
    content = "a line\nand ünïcode\n".encode()
    file.write_bytes(content)
    page = opened(browser, server, model)
    assert page.evaluate("document.getElementById('try-text').checkVisibility()")
    assert page.text("#try-hint").startswith("The file is sent as it is, as the input ")
    page.choose_files("#try-file", [file])
    data = output(answer(page), "Y")
    assert data == ([content.decode()] if model == "text" else list(content))
    assert page.complaints() == []
    page.close()


def test_text_of_a_decoupled_model_is_shown_as_it_comes(browser: Browser, server: Server) -> None:
    page = browser.open(f"{server.url}/#tokens/1")
    page.wait("document.getElementById('try-text').value.includes('text_input')")
    sample = json.loads(page.evaluate("document.getElementById('try-text').value"))
    assert sample == {"text_input": "The ", "max_tokens": 40}
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.querySelector('#try-result pre')?.textContent === 't0 '")
    (folder,) = [each.parent for each in server.log.parent.rglob("tokens/1/model.py")]
    (folder / "go").touch()
    page.wait("document.querySelector('#try-result .soft')?.textContent.startsWith('40 responses in ')")
    assert page.text("#try-result pre").split() == [f"t{number}" for number in range(40)]
    curl = copied(page, "try-curl", "curl -N ")
    assert subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout.count("data: ") == 40
    program = copied(page, "try-python", "import json")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.count("text_output") == 40
    page.fill("#try-text", '{"text_input": 1}')
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.querySelector('#try-result .error')")
    page.close()


@pytest.mark.parametrize("model", ["planes", "several", "optional", "texts"])
def test_models_whose_input_is_no_file_have_no_chooser(browser: Browser, server: Server, model: str) -> None:
    page = browser.open(f"{server.url}/#{model}/1")
    page.wait("document.getElementById('try-text').value")
    assert not page.evaluate("document.getElementById('try-drop').checkVisibility()")
    page.evaluate("document.getElementById('try-send').click()")
    assert answer(page)["model_name"] == model
    page.close()


def test_the_form_changes_with_the_model(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "classify")
    page.evaluate("location.hash = 'text/1'")
    page.wait("document.getElementById('try-what').textContent === 'Drop a file'")
    assert page.evaluate("document.getElementById('try-send').checkVisibility()")
    assert not page.evaluate("document.getElementById('try-picture').checkVisibility()")
    page.evaluate("location.hash = 'classify/1'")
    page.wait("document.getElementById('try-what').textContent === 'Drop a picture'")
    assert not page.evaluate("document.getElementById('try-send').checkVisibility()")
    page.close()


INFER = "[...document.querySelectorAll('.route')].find((it) => it.querySelector('code').innerText === '/v2/models/{model}/infer')"


@pytest.fixture(scope="module")
def infer_form(browser: Browser, server: Server) -> Iterator[Page]:
    """The form of the inference route on the page of the API."""
    page = browser.open(f"{server.url}/docs")
    page.wait("document.querySelectorAll('.route').length")
    page.evaluate(f"{INFER}.querySelector('summary').click()")
    page.wait(f"{INFER}.querySelector('textarea').value || {INFER}.querySelector('input[type=file]').checkVisibility()")
    yield page
    assert page.complaints() == []
    page.close()


def fill(page: Page, model: str, ready: str) -> None:
    """Write the name of a model and wait for its sample body."""
    form = f"(() => {{ const it = {INFER}.querySelector('input[aria-label=model]'); it.value = {json.dumps(model)}; "
    page.evaluate(f"{form} it.dispatchEvent(new Event('change')); }})()")
    page.wait(ready)


def send(page: Page) -> tuple[int, dict[str, Any]]:
    shown = f"{INFER}.querySelector('.asking pre')"
    page.evaluate(f"{shown}.textContent = ''")
    page.evaluate(f"{INFER}.querySelector('button').click()")
    page.wait(f"{shown}.textContent")
    status, text = page.evaluate(f"{shown}.textContent").split("\n", 1)
    return int(status), json.loads(text)


SAMPLES = {
    "means": ["IMAGE"],
    "pixels": ["IMAGE"],
    "planes": ["IMAGE"],
    "several": ["A", "B"],
    "optional": ["BIAS", "X"],
    "bytes": ["X"],
    "rows": ["X"],
    "text": ["X"],
    "texts": ["X"],
    **{f"of_{datatype}": ["X"] for datatype in BY_NAME},
}


@pytest.mark.parametrize("model", SAMPLES)
def test_each_sample_body_is_accepted(infer_form: Page, server: Server, model: str) -> None:
    metadata = json.loads(server.request("GET", f"/v2/models/{model}")[2])
    names = [tensor["name"] for tensor in metadata["inputs"]]
    infer_form.evaluate(f"{INFER}.querySelector('textarea').value = ''")
    fill(infer_form, model, f"{INFER}.querySelector('textarea').value.includes('inputs')")
    body = json.loads(infer_form.evaluate(f"{INFER}.querySelector('textarea').value"))
    assert [tensor["name"] for tensor in body["inputs"]] == names
    assert sorted(names) == SAMPLES[model]
    status, received = send(infer_form)
    assert (status, received.get("model_name")) == (200, model), received


@pytest.mark.parametrize("model", DECODERS)
def test_the_sample_of_a_model_that_decodes_is_a_picture(
    infer_form: Page, server: Server, model: str, tmp_path: Path
) -> None:
    fill(infer_form, model, f"{INFER}.querySelector('input[type=file]').checkVisibility()")
    assert not infer_form.evaluate(f"{INFER}.querySelector('textarea').checkVisibility()")
    infer_form.evaluate(f"{INFER}.querySelector('input[type=file]').value = ''")
    status, received = send(infer_form)
    assert (status, received["model_name"]) == (200, model)
    assert content_type(infer_form) == "image/png"
    picture = tmp_path / "red.jpg"
    picture.write_bytes(saved("red"))
    infer_form.evaluate(f"{INFER}.querySelector('input[type=file]').id = 'picture'")
    infer_form.choose_files("#picture", [picture])
    status, received = send(infer_form)
    assert (status, output(received, "labels")[0]) == (200, "red")
    assert content_type(infer_form) == "image/jpeg"
