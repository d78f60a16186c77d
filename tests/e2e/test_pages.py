"""The server's pages in a real Chromium that can reach only the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import skimage
from headrace.wire.http.routes import page_routes

from tests.support import models
from tests.support.browser import PHONE, Browser, Page
from tests.support.serving import ROOT, Server, run_headrace, serving

pytestmark = pytest.mark.slow

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
PAGES = ROOT / "server/headrace/wire/http/page"
HOSTILE = "<img src=x onerror=alert(1)>"
LABELS = [f"{HOSTILE} number {number}" for number in range(10)]
RECIPE = {"interpolation": "bicubic", "mean": [127.0] * 3, "std": [128.0] * 3}
PLAIN = f"preprocess: {json.dumps(RECIPE)}\noutput: [{{name: LOGITS, label_filename: labels.txt}}]\nmax_batch_size: 4\n"
RANKED = (
    PLAIN.replace('{"inter', '{"by": "server", "source": [256, 300], "inter')
    + "postprocess: {softmax: true, top_k: 3}\n"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("pages") / "repository"
    for name, config in {"plain": PLAIN, "ranked": RANKED}.items():
        files = {"config.yaml": config, "labels.txt": "\n".join(LABELS) + "\n"}
        models.add_model(repository, name, models.pictures(), files=files)
    models.add_model(repository, "affine", models.affine())
    models.add_model(repository, "broken", b"this is no ONNX file")
    (repository / HOSTILE / "1").mkdir(parents=True)  # with a folder of a version, or it would be skipped
    inspect = [
        sys.executable,
        "-m",
        "headrace_engines",
        "inspect",
        "plain",
        "--publish",
        "--model-repository",
        str(repository),
    ]
    subprocess.run(inspect, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    opened = browser.open(f"{server.url}/")
    opened.wait("document.querySelectorAll('#models .card, #idle li').length === 5")
    yield opened
    # In every test: no request leaves for another host, and no script runs that is not the page's own.
    assert [url for url in opened.requested if not url.startswith(server.url)] == []
    assert not [complaint for complaint in opened.complaints() if "/infer" not in complaint]
    assert not [method for method, _ in opened.events if method == "Page.javascriptDialogOpening"]
    opened.close()


def those(selector: str, condition: str, expression: str = "it.outerHTML.slice(0, 90)") -> str:
    """JavaScript for what is `given` of each visible element `it` that is `wanted`."""
    visible = (
        f"[...document.querySelectorAll({json.dumps(selector)})].filter((it) => it.checkVisibility() && ({condition}))"
    )
    return f"{visible}.map((it) => {expression})"


def card(name: str) -> str:
    """JavaScript for a model's card or line in the list."""
    cards = "[...document.querySelectorAll('#models .card, #idle li')]"
    return f"{cards}.find((it) => it.querySelector('h3').innerText.startsWith({json.dumps(name)}))"


def choose(page: Page, name: str, version: str = "1") -> None:
    """Open the view of a version; of one that serves with its sample request."""
    page.evaluate(f"location.hash = encodeURIComponent({json.dumps(name)}) + '/{version}'")
    page.wait(f"document.querySelector('#view h2')?.innerText.startsWith({json.dumps(name)})")
    page.wait("document.getElementById('try').hidden || document.getElementById('try-text').value")


def view(page: Page) -> str:
    """Text of the open view."""
    return page.text("#view")


def affine(server: Server, width: int = 16, rows: int = 1) -> int:
    tensor = {"name": "X", "datatype": "FP32", "shape": [rows, width], "data": [0.5] * (rows * width)}
    return server.request("POST", "/v2/models/affine/infer", json.dumps({"inputs": [tensor]}).encode())[0]


def test_every_model_is_there_with_its_state_and_reason(page: Page) -> None:
    assert page.text("#summary") == "2 failing, 3 idle"
    # The broken model and the folder whose name is none do not make the server unready, but they are seen.
    assert page.text("#ready") == "3 of 5 ready"
    assert page.evaluate("document.getElementById('ready').className") == "badge warn"
    red, green, blue = page.evaluate(
        "getComputedStyle(document.getElementById('ready')).color.match(/[0-9]+/g).map(Number)"
    )
    assert red > green > blue, "amber"
    for name in ("affine", "plain", "ranked"):
        assert page.evaluate(f"{card(name)}.querySelector('.badge').innerText") == "READY"
        assert page.evaluate(f"{card(name)}.getBoundingClientRect().height") < 60, "one line"
    assert page.evaluate(f"{card('broken')}.querySelector('.badge').innerText") == "UNAVAILABLE"
    assert "model.onnx" in page.evaluate(f"{card('broken')}.querySelector('.reason').innerText")
    height = page.evaluate(f"{card('broken')}.querySelector('.reason').getBoundingClientRect().height")
    assert height < 60, "two lines: the whole reason is in the view"
    names = page.evaluate(those("#models h3 a, #idle h3 a", "true", "it.innerText"))
    assert names == [HOSTILE, "broken", "affine", "plain", "ranked"], "what fails comes first"
    choose(page, "affine")
    assert page.evaluate("document.querySelector('#view .figures').innerText").split()[-1] == "1/1"
    choose(page, "broken", "")
    page.wait("document.querySelector('#view .reason').innerText.includes('model.onnx')")
    assert page.evaluate("document.getElementById('try').checkVisibility()") is False


def test_figures_follow_the_traffic(page: Page, server: Server) -> None:
    assert [affine(server) for _ in range(30)] + [affine(server, rows=3) for _ in range(10)] == [200] * 40
    assert [affine(server, width=15) for _ in range(3)] == [400] * 3
    page.wait(f"{card('affine')}?.innerText.includes('Errors in the last minute: 3 bad_request')")
    names = page.evaluate(those("#models h3 a, #idle h3 a", "true", "it.innerText"))
    assert names == [HOSTILE, "broken", "affine", "plain", "ranked"]
    assert page.text("#summary") == "2 failing, 1 busy, 2 idle"
    # The sum over all models.
    assert page.text("#all-errors") == "3"
    assert page.text("#all-p50").split()[1] in ("µs", "ms")
    choose(page, "affine")
    page.wait("document.getElementById('view').innerText.includes('40 requests since it was loaded')")
    text = view(page)
    percentiles = re.search(r"p50\n(.+)\np95\n(.+)\np99\n(.+)\n", text)
    assert percentiles is not None
    times_ms = [
        float(value) * {"µs": 1e-3, "ms": 1}[unit]
        for value, unit in (value_text.split() for value_text in percentiles.groups())
    ]
    assert 0 < times_ms[0] <= times_ms[1] <= times_ms[2] < 10_000
    assert "Rows a batch last minute\n1\n3\n" in text
    columns = "[...it.querySelectorAll('.columns > div')].map((column) => column.title)"
    assert page.evaluate(f"((it) => {columns})(document.getElementById('view'))") == ["1: 30, 75 %", "3: 10, 25 %"]
    assert "Why batches closed last minute\nidle 100 %" in text
    assert "Errors last minute\nbad_request\n3" in text
    assert {"queue", "assemble", "compute", "split"} <= set(text.split())
    # The curve is that of the server's ring, which has a sample every five seconds.
    page.wait("/^maximum [0-9.]+.s$/.test(document.querySelector('#view .maximum').innerText)")
    drawn = page.evaluate("document.querySelector('#view .curve .line').getAttribute('d')")
    points = [point.split(",") for point in drawn[1:].split("L")]
    assert len(points) == 120
    assert len({height for _, height in points}) > 1, "the curve is flat"
    assert page.text("#view .times").split("\n") == ["10 min ago", "5 min", "now"]
    # A page that is opened now has the same past.
    page.evaluate("location.reload()")
    page.wait("document.querySelector('#view .maximum')?.innerText.startsWith('maximum')")


def ranked_by_the_client(server: Server, model: str, picture: Path) -> list[tuple[str, float]]:
    done = run_headrace("infer", model, picture, "--url", server.grpc_address, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"][0]["classes"]
    return [(ranking_row["label"], ranking_row["score"]) for ranking_row in rows]


def labels(page: Page) -> list[list[str]]:
    page.wait("document.querySelector('#try-result .ranking')")
    expression = "[it.querySelector('.name').innerText, it.querySelector('b').innerText]"
    return page.evaluate(those("#try-result li", "true", expression))


@pytest.mark.parametrize("model", ["plain", "ranked"])
def test_a_dropped_picture_is_named_as_the_client_names_it(page: Page, server: Server, model: str) -> None:
    picture = PHOTOGRAPHS / "chelsea.png"
    choose(page, model)
    page.wait("document.getElementById('try-drop').checkVisibility()")
    page.drop("#try-drop", [picture])
    ranking = labels(page)
    expected = ranked_by_the_client(server, model, picture)
    assert [label for label, _ in ranking] == [label for label, _ in expected]
    assert len(ranking) == (5 if model == "plain" else 3)
    if model == "plain":  # logits
        assert [float(score) for _, score in ranking] == pytest.approx(
            [score for _, score in expected], rel=2e-3, abs=2e-3
        )
    else:
        assert [float(score.split()[0]) / 100 for _, score in ranking] == pytest.approx(
            [score for _, score in expected], abs=0.006
        )
    assert page.evaluate("document.getElementById('try-preview').naturalWidth") == 451


@pytest.mark.parametrize("model", ["digits", "efficientnet_lite0", "resnet50"])
def test_the_demo_models_name_pictures(browser: Browser, model: str, tmp_path: Path) -> None:
    assert (ROOT / "model_repository" / model / "1" / "model.onnx").is_file(), (
        "the demo models are not built: make models"
    )
    picture = PHOTOGRAPHS / "camera.png"  # grey, so that of three channels each is tried, and of one
    with serving(ROOT / "model_repository", tmp_path, "--model-control", "explicit", "--load-model", model) as demo:
        page = browser.open(f"{demo.url}/#{model}/1")
        page.wait("document.getElementById('try-drop').checkVisibility()")
        page.drop("#try-drop", [picture])
        ranking = labels(page)
        expected = ranked_by_the_client(demo, model, picture)
        assert page.complaints() == []
        page.close()
    assert [label for label, _ in ranking] == [label for label, _ in expected]


def test_an_image_file_can_be_chosen_and_other_files_are_refused(page: Page, tmp_path: Path) -> None:
    choose(page, "plain")
    page.wait("document.getElementById('try-drop').checkVisibility()")
    page.choose_files("#try-file", [PHOTOGRAPHS / "coffee.png"])
    assert len(labels(page)) == 5
    (tmp_path / "notes.png").write_text("this is no picture")
    page.choose_files("#try-file", [tmp_path / "notes.png"])
    page.wait("document.querySelector('#try-result .error')")
    assert page.text("#try-result") == "notes.png is no picture that this browser can read: save it as JPEG or PNG."


def test_a_model_without_image_inputs_accepts_json(page: Page) -> None:
    choose(page, "affine")
    page.wait("document.getElementById('try-json').checkVisibility()")
    page.wait("document.getElementById('try-text').value.includes('\"X\"')")
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.querySelector('#try-result pre')")
    assert json.loads(page.text("#try-result pre"))["outputs"][0]["shape"] == [1, 4]
    assert re.search(r'"data": \[[^\[\]\n]+, [^\[\]\n]+\]', page.text("#try-result pre")), "numbers in one line"
    for button, start in (("try-python", "import numpy"), ("try-curl", "curl ")):
        page.evaluate(f"document.getElementById('{button}').click()")
        page.wait(f"document.getElementById('try-code').textContent.startsWith('{start}')")
        command = [sys.executable, "-c"] if button == "try-python" else ["bash", "-c"]
        code = page.evaluate("document.getElementById('try-code').textContent")
        result = subprocess.run([*command, code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert "Y" in result.stdout, "the output of the model"
    page.fill("#try-text", '{"inputs": []}')
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.querySelector('#try-result .error')")
    assert "X" in page.text("#try-result")


def test_a_long_sample_is_written_out_when_it_is_sent(page: Page) -> None:
    choose(page, "plain")
    assert '"shape":[1,3,224,224],"data":"zeros"' in page.evaluate("document.getElementById('try-text').value")
    page.evaluate("document.getElementById('try-send').click()")
    page.wait("document.querySelector('#try-result pre')")
    page.evaluate("document.getElementById('try-curl').click()")
    page.wait("document.getElementById('try-code').textContent.includes('[0] * 150528')")
    code = page.evaluate("document.getElementById('try-code').textContent")
    result = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout)["outputs"] == json.loads(page.text("#try-result pre"))["outputs"]
    page.evaluate("document.getElementById('try-sample').click()")
    assert len(labels(page)) == 5


def test_compute_times_and_layers_are_loaded_on_demand(page: Page) -> None:
    texts = {}
    for name in ("plain", "ranked"):
        choose(page, name)
        page.evaluate("document.querySelector('#view summary').click()")
        page.wait("document.querySelector('#view details .ranking')")
        texts[name] = page.evaluate("document.querySelector('#view details').innerText")
        assert "What limits it now" in texts[name]
        assert "A batch computes for\n1 row\n" in texts[name]  # a busy machine has no time for larger ones
    layers = texts["plain"].partition("Layers\n")[2]
    assert "model.onnx, 4 rows" in layers
    shares = [float(share) for share in re.findall(r" ([0-9.]+) %", layers)]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares == sorted(shares, reverse=True)
    assert "Layers\n" not in texts["ranked"]
    assert "headrace inspect ranked --version 1 --publish" in texts["ranked"]


def test_hostile_names_stay_text(page: Page) -> None:
    assert page.evaluate(f"{card(HOSTILE)}.querySelector('h3').innerText").startswith(HOSTILE)
    choose(page, HOSTILE, "")
    choose(page, "plain")
    page.wait("document.getElementById('try-drop').checkVisibility()")
    page.drop("#try-drop", [PHOTOGRAPHS / "coffee.png"])
    assert all(label.startswith(HOSTILE) for label, _ in labels(page))
    assert (
        page.evaluate("document.querySelectorAll('#overview img, #view img, #try-result img, body script').length") == 0
    )


def test_the_content_security_policy_forbids_everything_else(page: Page, server: Server) -> None:
    for attack in (
        "document.body.innerHTML = '<img src=x onerror=alert(1)>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.write('<b>x</b>')",
        "document.createElement('img').setAttribute('onerror', 'alert(1)')",
        "document.createElement('script').textContent = 'alert(1)'",
        "eval('1')",
    ):
        refused = f"(() => {{ try {{ {attack}; return 'taken'; }} catch (error) {{ return error.name; }} }})()"
        assert page.evaluate(refused) in ("TypeError", "EvalError"), attack
    assert page.evaluate("fetch('http://192.0.2.1/').then(() => 'taken', () => 'refused')") == "refused"
    page.events.clear()
    for path in ("/", "/docs", "/page/page.js"):
        headers = server.request("GET", path)[1]
        assert "script-src 'self';" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_files_hold_no_way_out() -> None:
    for file in PAGES.iterdir():
        text = file.read_text()
        assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\son\w+=", text
        ), file
        assert len(text.splitlines()) < 400, file


def test_no_page_leads_to_metrics_that_are_elsewhere(server: Server) -> None:
    routes = {route.path: route for route in page_routes(metrics=False)}
    assert b'"metrics"' not in cast(bytes, routes["/"].run())
    assert b'"metrics"' in server.request("GET", "/")[2]


@pytest.mark.parametrize("path", ["/", "/#plain/1", "/docs"])
def test_it_is_readable_on_a_phone(browser: Browser, server: Server, path: str) -> None:
    page = browser.open(server.url + path, PHONE)
    page.wait("document.querySelectorAll('.route, #models .card, #idle li').length >= 5")
    page.evaluate("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    empty = those("details", "!it.querySelector('div').hasChildNodes()")
    page.wait(f"{empty}.length === 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert (
        page.evaluate(those("body *", "!it.closest('pre') && it.getBoundingClientRect().right > innerWidth + 1")) == []
    )
    assert page.evaluate(those("body *", "parseFloat(getComputedStyle(it).fontSize) < 12")) == []
    touched = "button, select, summary, nav a, input[type=search]"
    assert page.evaluate(those(touched, "it.getBoundingClientRect().height < 40")) == []
    page.close()


def test_the_api_page_shows_every_route_and_sends_requests(browser: Browser, server: Server) -> None:
    page = browser.open(f"{server.url}/docs")
    page.wait("document.querySelectorAll('.route').length")
    described = json.loads(server.request("GET", "/openapi.json")[2])["paths"]
    assert page.evaluate("document.querySelectorAll('.route').length") == sum(map(len, described.values()))
    assert not [path for path in described if path.startswith("/page/")]
    route = "[...document.querySelectorAll('.route')].find((it) => it.querySelector('code').innerText === '/v2/models/{model}')"
    page.evaluate(f"{route}.querySelector('summary').click()")
    page.wait(f"{route}.querySelector('button')")
    assert "inputs: [{" in page.evaluate(f"{route}.innerText")
    page.evaluate("document.querySelectorAll('.route:not([open]) summary').forEach((it) => it.click())")
    page.wait("[...document.querySelectorAll('.route')].every((it) => it.querySelector('button'))")
    assert "`" not in page.evaluate("document.getElementById('routes').textContent")
    page.evaluate("document.querySelectorAll('.route[open]').forEach((it) => { it.open = false; })")
    page.evaluate(f"{route}.open = true")
    page.evaluate(f"{route}.querySelector('input').value = 'affine'")
    page.evaluate(f"{route}.querySelector('button').click()")
    page.wait(f"!{route}.querySelector('.asking pre').hidden && {route}.querySelector('.asking pre').innerText")
    status, answer = page.evaluate(f"{route}.querySelector('.asking pre').innerText").split("\n", 1)
    assert (status, json.loads(answer)["name"]) == ("200", "affine")
    # Bodies are filled in: of inference with the inputs of the first model that serves.
    infer = route.replace("{model}", "{model}/infer")
    page.evaluate(f"{infer}.querySelector('summary').click()")
    page.wait(f"{infer}.querySelector('textarea')?.value.includes('\"X\"')")
    page.evaluate(f"{infer}.querySelector('button').click()")
    page.wait(f"{infer}.querySelector('.asking pre').innerText.startsWith('200')")
    page.fill("#filter", "sharedmemory")
    shown = page.evaluate(those(".route", "true", "it.querySelector('code').innerText"))
    assert shown
    assert all("sharedmemory" in path for path in shown)
    assert page.complaints() == []
    assert all(url.startswith(server.url) for url in page.requested)
    page.close()


def test_the_page_reconnects_after_a_restart(browser: Browser, repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as first:
        page = browser.open(f"{first.url}/#affine/1")
        page.wait("document.querySelector('#view .figures')?.checkVisibility()")
        assert affine(first) == 200
        page.wait("document.getElementById('view').innerText.includes('1 request since')")
        first.stop()
        page.wait("document.getElementById('lost').checkVisibility()")
        port = first.port
    with serving(repository, tmp_path, "--http-port", str(port)):
        page.wait("!document.getElementById('lost').checkVisibility()")
        page.wait("document.getElementById('view').innerText.includes('0 requests since')")
    page.close()
