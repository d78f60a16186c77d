"""Computations of the pages in a real Chromium against the Python client: tensors, rates, percentiles."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from headrace.inference.pipelines.image import decode, prepare, to_pixels
from headrace.inference.pipelines.recipe import ImageRecipe, Resampling, axis
from PIL import Image

from tests.support.browser import Page, chromium
from tests.support.kernel_reference import resample
from tests.support.serving import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.open(f"{server.url}/")


def as_file(content: bytes) -> str:
    """JavaScript for a File."""
    return f"new File([Uint8Array.from(atob('{base64.b64encode(content).decode()}'), (it) => it.charCodeAt(0))], 'x')"


def in_browser(page: Page, content: bytes, recipe: ImageRecipe, datatype: str) -> np.ndarray:
    fields = {
        name: getattr(recipe, name) for name in ("color", "resize_short_side", "crop", "interpolation", "mean", "std")
    }
    settings: Mapping[str, object] = {**fields, "layout": recipe.layout, "by": recipe.by, "source": recipe.source}
    parameters = {
        f"headrace.preprocess.{name}": {"string_value": json.dumps(value)} for name, value in settings.items()
    }
    config = {"max_batch_size": 4, "output": [], "parameters": parameters}
    metadata = {"inputs": [{"name": "i", "datatype": datatype, "shape": [-1]}], "outputs": [{"name": "o"}]}
    code = f"""(async () => {{
        const {{ decode, pictureTask, tensorOf }} = await import("/page/pictures.js");
        const task = pictureTask({json.dumps(config)}, {json.dumps(metadata)});
        const tensor = tensorOf(await decode({as_file(content)}), task);
        let text = "";
        for (const value of tensor.bytes) text += String.fromCharCode(value);
        return [tensor.shape, tensor.datatype, btoa(text)];
    }})()"""
    shape, kind, text = page.evaluate(code)
    dtype = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}[kind]
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    rng = np.random.default_rng(width * height)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    small = rng.integers(0, 256, (height // 3 + 1, width // 3 + 1, *channels), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("fields", "picture"),
    [
        ({"interpolation": "bicubic", "mean": [127], "std": [128]}, png(97, 61)),
        ({"interpolation": "bilinear", "layout": "nhwc", "mean": [1, 2, 3], "std": [4, 5, 6]}, png(61, 97)),
        ({"color": "gray", "resize_short_side": 8, "crop": [8, 8], "std": [15.9375]}, png(8, 8, "L")),
        ({"color": "gray", "crop": [20, 30]}, png(301, 200)),
        ({"resize_short_side": 64, "crop": [64, 50]}, png(20, 31)),
        ({"interpolation": "bicubic"}, png(33, 32, "RGBA")),
        ({"by": "server"}, png(120, 80)),
        ({"by": "server", "source": [40, 60]}, png(120, 77)),
    ],
)
def test_pixels_are_those_of_the_client(page: Page, fields: dict[str, object], picture: bytes) -> None:
    recipe = ImageRecipe.from_mapping({"resize_short_side": 36, "crop": [32, 32], **fields})
    image = decode(picture)
    expected = to_pixels(image, recipe) if recipe.by == "server" else prepare(image, recipe)
    actual = in_browser(page, picture, recipe, "FP32")
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # One of 255 where Pillow begins with the other pass, a few where a bicubic one overshoots: see inference/pipelines/recipe.py.
    pixels = np.abs(actual.astype(float) - expected.astype(float))
    if recipe.by == "client":
        pixels *= recipe.std if recipe.layout == "nhwc" else np.reshape(recipe.std, (-1, 1, 1))
    assert pixels.max() <= (4.01 if recipe.interpolation == "bicubic" else 1.01)
    if recipe.source is None:
        # And not even that against our own arithmetic, which the GPU's kernels have too.
        height, width, channels = image.height, image.width, recipe.channels
        left, top, right, bottom = recipe.window(height, width)
        across = axis(width, left, right, recipe.crop[1], recipe.interpolation)
        tables = Resampling(axis(height, top, bottom, recipe.crop[0], recipe.interpolation), across)
        mode = "RGB" if channels == 3 else "L"
        exact = resample(np.asarray(image.convert(mode)).reshape(height, width, channels), tables)
        rows = actual[0] if recipe.layout == "nhwc" or recipe.by == "server" else actual[0].transpose(1, 2, 0)
        if recipe.by == "client":
            rows = np.rint(rows.astype(float) * recipe.std + recipe.mean)
        assert np.array_equal(rows, exact)


def test_a_turned_photograph_stands_upright_and_halves_are_rounded(page: Page) -> None:
    gradient = Image.fromarray(np.repeat(np.arange(64, dtype=np.uint8)[:, None] * 4, 64, 1))
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient.save(stream, "JPEG", quality=95, exif=exif)
    recipe = ImageRecipe.from_mapping({"color": "gray", "resize_short_side": 32, "crop": [32, 32], "std": [3]})
    expected = prepare(decode(stream.getvalue()), recipe)
    assert expected[0, 0, 0, 0] > expected[0, 0, 0, -1] + 30, "the test's own picture does not turn"
    actual = in_browser(page, stream.getvalue(), recipe, "FP16")
    assert actual.dtype == np.float16
    assert np.abs(actual - expected).max() < 1.5
    values = [0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, 65519.0, 65520.0, 6e-8, 2.9e-8, 6.1e-5, 2049.0, 2051.0, 1e-30]
    bits = page.evaluate(
        f"import('/page/pictures.js').then((it) => {json.dumps(values)}.map((value) => it.half(value)))"
    )
    with np.errstate(over="ignore"):
        assert bits[2:] == np.array(values[2:]).astype(np.float16).view(np.uint16).tolist()


def test_rates_and_percentiles_follow_from_two_answers(page: Page) -> None:
    code = """(async () => {
        const { History, since, percentile } = await import("/page/history.js");
        const times = { late: 0, queue_ns: 0, assemble_ns: 0, compute_ns: 0, split_ns: 0, total_ns: 0 };
        const serving = (requests, latency) => ({ ...times, requests, rows: requests, failures: {}, batches: { idle: requests },
            sizes: { 1: requests }, latency });
        const answer = (seconds, requests, latency) => ({ time_ns: seconds * 1e9, uptime_ns: seconds * 1e9,
            models: [{ name: "m", version: "1", serving: serving(requests, latency) }] });
        const history = new History();
        history.add(answer(0, 100, { "-80": 100 }));
        history.add(answer(2, 300, { "-80": 100, "-40": 200 }));
        const again = history.add(answer(2, 300, {}));
        history.add(answer(4, 50, { "-80": 50 }));
        const reloaded = since(serving(300, { "-40": 300 }), serving(50, { "-80": 50 }));
        const anew = new History();
        anew.add(answer(50, 100, {}));
        anew.add(answer(1, 0, {}));
        return [history.rates(), again, history.rates("m\\n1"), reloaded, anew.answers.length,
            percentile({ "-80": 50, "-40": 50 }, 0.5, 8), percentile({ "-80": 50, "-40": 50 }, 0.99, 8), percentile({}, 0.5, 8)];
    })()"""
    rates, again, of_one, reloaded, answers, p50, p99, none = page.evaluate(code)
    assert rates == of_one == [100, 25]
    assert again is False
    assert (reloaded["requests"], reloaded["latency"]) == (50, {"-80": 50})
    assert answers == 1
    assert p50 == pytest.approx(1e3 * 2**-10)
    assert 1e3 * 2 ** (-41 / 8) < p99 <= 1e3 * 2**-5
    assert none is None


def test_answers_with_nan_are_parsed(page: Page) -> None:
    text = json.dumps({"id": 'NaN "quoted\\" Infinity', "data": [float("nan"), float("-inf"), 1.5]})
    code = f'import("/page/client.js").then(({{ parseJson }}) => parseJson({json.dumps(text)}))'
    assert page.evaluate(code) == {"id": 'NaN "quoted\\" Infinity', "data": ["NaN", "-Infinity", 1.5]}


def test_processes_show_their_cpu_time_and_restarts(page: Page) -> None:
    code = """(async () => {
        const { describe } = await import("/page/processes.js");
        const row = { name: "front_end_1", pid: 9, cpu_s: 3, memory_bytes: 96 * 1024 * 1024, starts: 3, connections: 1 };
        return [describe(row, { ...row, cpu_s: 2.5 }, 2), describe({ ...row, name: "engine", starts: 1 }, null, 0),
                describe({ ...row, pid: 0 }, null, 0)];
    })()"""
    assert page.evaluate(code) == [
        "front end 1 (9): 25 % of a core, 96 MiB, 1 connection, restarted 2 times",
        "engine (9): 96 MiB, 1 connection",
        "front end 1: not running, 3 starts",
    ]


def test_failing_models_come_before_busy_ones_and_curves_add_up(page: Page) -> None:
    code = """(async () => {
        const { groupOf } = await import("/page/models.js");
        const { curve } = await import("/page/history.js");
        const serving = { living: 1, instances: 1, queued: 0, in_flight: 0 };
        const groups = [
            [{ state: "UNAVAILABLE", serving: null }, null],
            [{ state: "READY", serving: { ...serving, living: 0 } }, { requests: 0, failures: {} }],
            [{ state: "READY", serving }, { requests: 9, failures: { model_failed: 1 } }],
            [{ state: "READY", serving }, { requests: 9, failures: { bad_request: 1 } }],
            [{ state: "READY", serving: { ...serving, queued: 2 } }, { requests: 0, failures: {} }],
            [{ state: "READY", serving }, { requests: 0, failures: {} }],
            [{ state: "UNLOADED", serving: null }, null],
        ].map(([model, recent]) => groupOf(model, recent));
        const sum = curve([{ requests_per_s: [1, 2], failures_per_s: [] }, { requests_per_s: [0.5], failures_per_s: [3, 0, 1] }]);
        return [groups, sum.length, sum.slice(-4)];
    })()"""
    groups, length, last = page.evaluate(code)
    assert groups == ["failing", "failing", "failing", "busy", "busy", "idle", "idle"]
    assert (length, last) == (120, [0, 3, 1, 3.5])
