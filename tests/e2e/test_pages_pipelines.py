"""The graph of a pipeline on the server's page, in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import models
from tests.support.browser import DESKTOP, PHONE, Browser, Page
from tests.support.models import add_model, add_pipeline
from tests.support.serving import Server, serving

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"
GATED = f"""
input: [{{name: x, data_type: fp32, dims: [4]}}]
output: [{{name: shares, data_type: fp32, dims: [4]}}, {{name: features, data_type: fp32, dims: [-1, 3]}}]
pipeline:
  outputs: {{shares: probabilities}}
  steps:
    softmax: {{builtin: softmax, inputs: {{scores: x}}, outputs: {{probabilities: probabilities}}}}
    describe:
      model: affine
      when: probabilities.max > 0.5
      fallback: other
      inputs: {{X: x}}
      outputs: {{Y: "{HOSTILE}"}}
    again: {{model: copy, inputs: {{X: "{HOSTILE}"}}, outputs: {{Y: features}}}}
"""
# The resize runs in the call of the step before it.
JOINED = """
input: [{name: photo, data_type: bytes, dims: [1]}]
output: [{name: small, data_type: fp32, dims: [3, 32, 32]}]
pipeline:
  steps:
    read: {builtin: decode_image, inputs: {image: photo}, outputs: {image: large}}
    shrink: {builtin: resize, options: {resize_short_side: 32, crop: [32, 32], mean: 127.0, std: 50.0},
             inputs: {image: large}, outputs: {tensor: small}}
"""
STEPS = 100
BOXES = "[...document.querySelectorAll('#view .graph .step')]"


def chain() -> str:
    """A pipeline of many steps one after the other."""
    tensors = ["x", *(f"t{number}" for number in range(STEPS - 1)), "y"]
    steps = [
        f"    s{number}: {{model: same, inputs: {{X: {tensors[number]}}}, outputs: {{Y: {tensors[number + 1]}}}}}"
        for number in range(STEPS)
    ]
    ends = "input: [{name: x, data_type: fp32, dims: [4]}]\noutput: [{name: y, data_type: fp32, dims: [4]}]\n"
    return f"{ends}max_batch_size: 8\npipeline:\n  steps:\n" + "\n".join(steps) + "\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("graph") / "repository"
    for name in ("affine", "other"):
        add_model(folder, name, models.affine(4, 3), config="max_batch_size: 8 dynamic_batching {}")
    add_model(folder, "copy", models.identity("FP32", ("batch", 3)), config="max_batch_size: 8")
    add_model(folder, "same", models.identity("FP32", ("batch", 4)), config="max_batch_size: 8")
    add_pipeline(folder, "gated", "", files={"config.yaml": GATED})
    add_pipeline(folder, "joined", "", files={"config.yaml": JOINED})
    add_pipeline(folder, "chain", "", files={"config.yaml": chain()})
    with serving(folder, folder.parent, "--model-control", "explicit", "--load-model", "*") as running:
        yield running


def opened(
    browser: Browser, server: Server, name: str, screen: tuple[int, int, bool] = DESKTOP, dark: bool = False
) -> Page:
    page = browser.open(f"{server.url}/#{name}/1", screen, dark)
    page.wait(f"{BOXES}.length > 0 && {BOXES}[0].textContent.includes('requests/s')")
    return page


def finish(page: Page, server: Server) -> None:
    """Check what holds for every page: no foreign host, no refused script, no dialog."""
    assert [url for url in page.requested if not url.startswith(server.url)] == []
    assert page.complaints() == []
    assert not [method for method, _ in page.events if method == "Page.javascriptDialogOpening"]
    page.close()


def infer(server: Server, x: list[float]) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [4], "data": x}
    return server.request("POST", "/v2/models/gated/infer", json.dumps({"inputs": [tensor]}).encode())[0]


def box(name: str) -> str:
    """JavaScript for the box of a step."""
    return f"{BOXES}.find((it) => it.querySelector('.name').textContent === {json.dumps(name)})"


def row(page: Page, name: str) -> list[str]:
    """Cells of a step in the table: step, requests/s, waiting, p50."""
    rows = "[...document.querySelectorAll('#view .steps tbody tr')]"
    match = f"{rows}.find((it) => it.cells[0].innerText.startsWith({json.dumps(name)}))"
    cells: list[str] = page.evaluate(f"[...{match}.cells].map((it) => it.innerText)")
    return cells


def test_the_graph_shows_steps_tensors_and_marks(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "gated")
    texts = page.evaluate(f"{BOXES}.map((it) => [...it.querySelectorAll('text')].map((text) => text.textContent))")
    assert [text[:2] for text in texts] == [
        ["softmax", "built-in step softmax"], ["describe", "affine"], ["again", "copy"],
    ]  # fmt: skip
    assert texts[1][2].startswith("when probabilities.max")
    assert texts[1][3] == "fallback other"
    edges = page.evaluate("[...document.querySelectorAll('#view .edge title')].map((it) => it.textContent)")
    assert sorted(edges) == sorted(["x", "x", "probabilities", "probabilities", HOSTILE, "features"])
    dashed = page.evaluate("[...document.querySelectorAll('#view .condition title')].map((it) => it.textContent)")
    assert dashed == ["probabilities"], "read by the condition only"
    names = page.evaluate("[...document.querySelectorAll('#view .tensor')].map((it) => it.textContent)")
    assert {"x", "probabilities", "features"} <= set(names)
    # From the left to the right: request, softmax, describe, again, response.
    lefts = page.evaluate(f"{BOXES}.map((it) => it.getBoundingClientRect().left)")
    ends = page.evaluate("[...document.querySelectorAll('#view .end')].map((it) => it.getBoundingClientRect().left)")
    assert lefts == sorted(lefts)
    assert ends[0] < lefts[0]
    assert lefts[-1] < ends[1]
    assert "pipeline of 3 steps" in page.text("#view")
    finish(page, server)


def test_a_step_that_runs_in_the_call_of_another_is_named(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "joined")
    texts = page.evaluate(f"{BOXES}.map((it) => [...it.querySelectorAll('.soft')].map((text) => text.textContent))")
    assert texts == [["built-in step decode_image", "with shrink"]]
    finish(page, server)


def test_figures_are_live_and_the_table_has_the_same(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "gated")
    for _ in range(10):
        assert infer(server, [9, 0, 0, 0]) == 200
        assert infer(server, [0, 0, 0, 0]) == 200
    page.wait(f"/[1-9]/.test({box('softmax')}.textContent.match(/([0-9.]+) requests.s/)[1])")
    page.wait("document.querySelector('#view .steps').innerText.includes('last minute: 10 skipped')")
    same = f"""{BOXES}.every((it, place) => {{
        const cells = [...document.querySelectorAll('#view .steps tbody tr')[place].cells].map((cell) => cell.innerText);
        const [rate, times] = [...it.querySelectorAll('text')].map((text) => text.textContent).slice(-3);
        return rate === `${{cells[1]}} requests/s` && times === `${{cells[2]}} waiting, p50 ${{cells[3]}}`;
    }})"""
    assert page.evaluate(same)
    assert re.fullmatch(r"[0-9.]+ (µs|ms)", row(page, "describe")[3])
    assert "skipped" not in row(page, "softmax")[0]
    # One step limits: marked in words, in the graph and in the table.
    assert page.evaluate(f"{BOXES}.filter((it) => it.querySelector('.limits').textContent === 'limits').length") == 1
    assert page.text("#view .steps").count("limits the pipeline") == 1
    finish(page, server)


def test_a_graph_needs_no_other_request_than_the_page(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "gated")
    page.wait("document.getElementById('try-text').value")
    before = len(page.requested)
    page.evaluate("new Promise((resume) => setTimeout(resume, 3200))")
    urls = page.requested[before:]
    assert set(urls) == {f"{server.url}/v2/status"}
    assert 2 <= len(urls) <= 4, "one a second"
    finish(page, server)


@pytest.mark.parametrize("name", ["gated", "chain"])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_on_a_phone(browser: Browser, server: Server, name: str, dark: bool) -> None:
    page = opened(browser, server, name, PHONE, dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    outside = (
        "[...document.querySelectorAll('#view *')].filter((it) => it.checkVisibility() && !it.closest('.graph, pre')"
    )
    assert page.evaluate(f"{outside} && it.getBoundingClientRect().right > innerWidth + 1).length") == 0
    small = "parseFloat(getComputedStyle(it).fontSize) < 12"
    assert page.evaluate(f"[...document.querySelectorAll('#view .graph text')].filter((it) => {small}).length") == 0
    tops = page.evaluate(f"{BOXES}.map((it) => it.getBoundingClientRect().top)")
    assert tops == sorted(tops), "from the top to the bottom"
    # The text of a box stays inside its box.
    inside = """(it) => { const bound = it.querySelector('rect').getBoundingClientRect();
        return [...it.querySelectorAll('text')].every((text) => text.getBoundingClientRect().right <= bound.right + 1); }"""
    assert page.evaluate(f"{BOXES}.every({inside})")
    contrast = page.evaluate(f"contrast({BOXES}[0])".replace("contrast(", f"({CONTRAST})("))
    assert contrast >= 4.5, "WCAG 2 AA"
    finish(page, server)


# Ratio of the luminances of a box's soft text and its ground, as WCAG 2 defines it.
CONTRAST = """(it) => {
    const luminance = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
    const [text, ground] = ['.soft', 'rect'].map((part) => luminance(getComputedStyle(it.querySelector(part)).fill));
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
}"""


def test_it_works_with_the_keyboard_and_has_names(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "chain")
    page.evaluate("document.querySelector('#view .graph').focus()")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Graph of the steps"
    before = page.evaluate("document.querySelector('#view .graph').scrollLeft")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.wait(f"document.querySelector('#view .graph').scrollLeft > {before}")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "step s0, model same"
    for kind in ("rawKeyDown", "char", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.wait("document.querySelector('#view h2').innerText.startsWith('same')")
    page.wait("!document.querySelector('#view .graph').checkVisibility()")
    finish(page, server)
    page = opened(browser, server, "gated")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in tree:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert "Steps of the pipeline with the figures of the graph" in roles["table"]
    assert {"Step", "requests/s", "waiting", "p50"} <= set(roles["columnheader"])
    assert [name.split()[0] for name in roles["rowheader"]] == ["softmax", "describe", "again"]
    finish(page, server)


@pytest.mark.timing
def test_a_hundred_steps_are_drawn_and_updated_quickly(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "chain")
    assert page.evaluate(f"{BOXES}.length") == STEPS
    assert page.evaluate("document.querySelectorAll('#view .steps tbody tr').length") == STEPS
    assert page.evaluate("document.documentElement.scrollWidth") <= DESKTOP[0]
    took_ms = page.evaluate(
        """(async () => {
            const { StepGraph } = await import('/page/graph.js');
            const status = await (await fetch('v2/status')).json();
            const { pipeline } = status.models.find((it) => it.name === 'chain').serving;
            const recent = pipeline.steps.map(() => ({ requests: 0, skipped: 0, fallbacks: 0, failures: 0, rate: 0 }));
            const graph = new StepGraph();
            const times = [];
            for (let turn = 0; turn < 2; turn += 1) {
                const begun = performance.now();
                graph.update(pipeline, recent, status.buckets_per_doubling);
                times.push(performance.now() - begun);
            }
            return times;
        })()"""
    )
    assert took_ms[0] < 1000, "drawn once"
    assert took_ms[1] < 200, "every second"
    finish(page, server)


def test_hostile_names_stay_text(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "gated")
    assert HOSTILE in page.text("#view .steps")
    assert page.evaluate("document.querySelectorAll('#view img, #view script').length") == 0
    finish(page, server)


def test_a_step_without_its_model_is_marked(browser: Browser, server: Server) -> None:
    page = opened(browser, server, "gated")
    assert server.request("POST", "/v2/repository/models/copy/unload", b"{}")[0] == 200
    try:
        page.wait("document.querySelector('#view .badge').innerText === 'UNAVAILABLE'")
        assert "copy" in page.text("#view .reason")
    finally:
        assert server.request("POST", "/v2/repository/models/copy/load", b"{}")[0] == 200
    page.wait("document.querySelector('#view .badge').innerText === 'READY'")
    page.wait(f"{BOXES}.length === 3")
    finish(page, server)


def random_pipeline(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Steps that read tensors of the steps before them."""
    steps = []
    for number in range(count):
        earlier = ["x", *(f"t{index}" for index in range(number))]
        read = rng.choice(earlier, size=min(len(earlier), int(rng.integers(1, 4))), replace=False).tolist()
        steps.append(
            {"inputs": dict(enumerate(read)), "outputs": {"Y": f"t{number}"}, "condition": read[:1] if rng.random() < 0.2 else []}
        )  # fmt: skip
    order = rng.permutation(count)
    return {"inputs": ["x"], "outputs": {"y": f"t{count - 1}"}, "steps": [steps[index] for index in order]}


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_boxes_never_overlap_and_edges_go_forward(browser: Browser, server: Server, count: int) -> None:
    page = browser.open(f"{server.url}/docs")
    for seed in range(5):
        pipeline = random_pipeline(np.random.default_rng(seed), count)
        places = page.evaluate(
            f"""(async () => {{
                const {{ placed }} = await import('/page/layout.js');
                const pipeline = {json.dumps(pipeline)};
                const size = (it) => ({{ along: 190, across: 60 + 20 * (Math.abs(it) % 3) }});
                const sizes = new Map([-1, -2, ...pipeline.steps.keys()].map((it) => [it, size(it)]));
                const {{ nodes, ...rest }} = placed(pipeline, sizes, 50);
                return {{ ...rest, nodes: [...nodes].map(([it, place]) => ({{ it, ...place, size: size(it) }})) }};
            }})()"""
        )
        nodes = places["nodes"]
        assert len(nodes) == count + 2
        for place, node in enumerate(nodes):
            assert 0 <= node["along"] <= places["along"] - node["size"]["along"] + 1e-6
            assert -1e-6 <= node["across"] <= places["across"] - node["size"]["across"] + 1e-6
            for other in nodes[:place]:
                if node["layer"] == other["layer"]:
                    low, high = sorted([node, other], key=lambda each: each["across"])
                    assert low["across"] + low["size"]["across"] < high["across"]
        layers = {node["it"]: node["layer"] for node in nodes}
        assert places["edges"]
        for edge in places["edges"]:
            assert layers[edge["from"]] < layers[edge["to"]]
            ways = [point[0] for point in edge["points"]]
            assert ways == sorted(ways)
            assert len(ways) == 2 * (layers[edge["to"]] - layers[edge["from"]])
    page.close()


def test_rates_of_steps_follow_from_two_answers(browser: Browser, server: Server) -> None:
    page = browser.open(f"{server.url}/docs")
    code = """(async () => {
        const { History } = await import("/page/history.js");
        const step = (requests) => ({ requests, skipped: 0, fallbacks: 0, failures: 0, latency: { 5: requests } });
        const answer = (seconds, requests) => ({ time_ns: seconds * 1e9, uptime_ns: seconds * 1e9,
            models: [{ name: "p", version: "1", serving: { pipeline: { steps: [step(requests)] } } }] });
        const history = new History();
        const seen = [];
        for (const each of [[100, 40], [104, 60], [160, 100], [165, 150], [166, 10]]) {
            history.add(answer(...each));
            const [{ requests, rate, latency }] = history.steps("p\\n1");
            seen.push([requests, rate, latency]);
        }
        return seen;
    })()"""
    assert page.evaluate(code) == [
        [0, 0, {}],
        [20, 5, {"5": 20}],
        [60, 0, {"5": 60}],
        [50, 10, {"5": 50}],
        [10, 10, {"5": 10}],
    ]
    page.close()
