"""`headrace.Server` inside a program: blocking and async calls, checks, errors, and the examples of docs/embedding.md."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import headrace
import numpy as np
import onnxruntime
import pytest
from headrace.core.tensor import Array
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.chains import write_chain
from tests.support.models import add_model, affine, identity, sum_difference, unbatched
from tests.support.serving import ROOT
from tests.support.waiting import until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    add_model(folder, "affine", affine(), config="max_batch_size: 8\ndynamic_batching {}\n" + UNBOUNDED_WAITS)
    add_model(folder, "sums", sum_difference(), config="max_batch_size: 8\ndynamic_batching {}\n")
    add_model(folder, "text", identity("BYTES"), config="max_batch_size: 8\n")
    add_model(folder, "plain", unbatched())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[headrace.Server]:
    with headrace.Server(repository, state_dir="", profile_s=0.01) as server:
        yield server


@pytest.fixture(scope="module")
def session(repository: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(repository / "affine" / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)


def test_a_blocking_call_returns_what_the_runtime_returns(
    server: headrace.Server, session: onnxruntime.InferenceSession
) -> None:
    inputs = {"X": rows(3)}
    outputs = server.model("affine").infer(inputs)
    assert list(outputs) == ["Y"]
    np.testing.assert_allclose(outputs["Y"], session.run(None, inputs)[0], rtol=1e-5)
    assert server.models() == ["affine", "plain", "sums", "text"]


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=24), seed=st.integers(0, 1000))
def test_concurrent_callers_get_their_own_rows(
    server: headrace.Server, session: onnxruntime.InferenceSession, sizes: list[int], seed: int
) -> None:
    model = server.model("affine")
    requests = [rows(size, seed + number) for number, size in enumerate(sizes)]

    async def gather() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(model.infer_async({"X": request}) for request in requests))

    with ThreadPoolExecutor(8) as pool:
        blocking = list(pool.map(lambda request: model.infer({"X": request}), requests))
    for request, one, other in zip(requests, blocking, asyncio.run(gather()), strict=True):
        expected = session.run(None, {"X": request})[0]
        np.testing.assert_allclose(one["Y"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other["Y"], expected, rtol=1e-4, atol=1e-5)


async def test_it_works_on_the_running_event_loop(repository: Path, session: onnxruntime.InferenceSession) -> None:
    async with headrace.Server(repository, models=["affine"], state_dir="", profile_s=0) as server:
        model = server.model("affine")
        requests = [rows(2, seed) for seed in range(20)]
        answers = await asyncio.gather(*(model.infer_async({"X": request}) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            np.testing.assert_allclose(answer["Y"], session.run(None, {"X": request})[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="await infer_async"):
            model.infer({"X": requests[0]})
        blocking = await asyncio.to_thread(model.infer, {"X": requests[0]})
        np.testing.assert_allclose(blocking["Y"], answers[0]["Y"], rtol=1e-4, atol=1e-5)


def test_more_rows_than_a_batch_holds(server: headrace.Server, session: onnxruntime.InferenceSession) -> None:
    request = rows(21)
    answer = server.model("affine").infer({"X": request})["Y"]
    np.testing.assert_allclose(answer, session.run(None, {"X": request})[0], rtol=1e-4, atol=1e-5)


def test_lists_texts_and_chosen_outputs(server: headrace.Server) -> None:
    sums = server.model("sums")
    outputs = sums.infer({"A": [[1, 2, 3, 4]], "B": [[0.5, 0.5, 0.5, 0.5]]}, outputs=["DIFFERENCE"])
    assert list(outputs) == ["DIFFERENCE"]
    assert outputs["DIFFERENCE"].tolist() == [[0.5, 1.5, 2.5, 3.5]]
    text = server.model("text").infer({"X": [["a", "ü"], [b"b\x00", ""]]})
    assert text["Y"].tolist() == [[b"a", "ü".encode()], [b"b\x00", b""]]


def test_an_array_that_is_not_contiguous(server: headrace.Server, session: onnxruntime.InferenceSession) -> None:
    wide = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    part = wide[::2, ::2]
    outputs = server.model("affine").infer({"X": part})
    expected = session.run(None, {"X": np.ascontiguousarray(part)})[0]
    np.testing.assert_allclose(outputs["Y"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"Z": np.zeros((1, 16), np.float32)}, r"no input 'Z'; its inputs are \['X'\]"),
        ({}, r"needs the inputs \['X'\]"),
        ({"X": np.zeros((1, 16))}, r"has dtype float64, expected float32 \(FP32\): convert it with astype"),
        ({"X": np.zeros((1, 15), np.float32)}, "15"),
        ({"X": np.zeros((16,), np.float32)}, "shape"),
        ({"X": [["a"] * 16]}, "cannot be read as float32"),
    ],
)
def test_wrong_inputs_are_refused(server: headrace.Server, inputs: dict[str, np.ndarray], message: str) -> None:
    model = server.model("affine")
    with pytest.raises(headrace.BadRequest, match=message):
        model.infer(inputs)
    with pytest.raises(headrace.BadRequest, match=message):
        asyncio.run(model.infer_async(inputs))


def test_other_refusals(server: headrace.Server) -> None:
    with pytest.raises(headrace.NotFound, match="did you mean 'affine'"):
        server.model("afine")
    with pytest.raises(headrace.NotFound):
        server.model("affine", "7")
    model = server.model("affine")
    with pytest.raises(headrace.BadRequest, match="no output 'Q'"):
        model.infer({"X": rows(1)}, outputs=["Q"])
    with pytest.raises(headrace.BadRequest, match="deadline_s is -1"):
        model.infer({"X": rows(1)}, deadline_s=-1)
    with pytest.raises(headrace.DeadlineExceeded):
        model.infer({"X": rows(1)}, deadline_s=1e-9)


async def test_a_cancelled_call_does_not_affect_the_others(server: headrace.Server) -> None:
    model = server.model("affine")
    calls = [asyncio.ensure_future(model.infer_async({"X": rows(1, seed)})) for seed in range(8)]
    await asyncio.sleep(0)
    calls[0].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, dict) for answer in answers[1:])


def test_a_cancelled_call_counts_as_a_failure(tmp_path: Path) -> None:
    waits = "max_batch_size: 8\ndynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 2000000 }\n"
    add_model(tmp_path, "affine", affine(), config=waits)
    with headrace.Server(tmp_path, state_dir="", profile_s=0) as server:
        model = server.model("affine")
        assert server._data_plane is not None
        handle = server._data_plane.registry.serving("affine", "")
        assert handle is not None

        async def main() -> None:
            calls = [asyncio.ensure_future(model.infer_async({"X": rows(1)})) for _ in range(2)]
            await asyncio.to_thread(until, lambda: handle.depth == 2)
            calls[0].cancel()
            await asyncio.wait(calls)
            assert calls[0].cancelled()

        asyncio.run(main())
        until(lambda: handle.recorder.totals().successes == 1)  # counted after the response is delivered
        assert handle.recorder.totals().failures == {"cancelled": 1}


def test_models_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    before = set(threading.enumerate())
    with pytest.raises(headrace.ConfigError, match="broken"), headrace.Server(tmp_path, state_dir=""):
        pass
    add_model(tmp_path / "good", "affine", affine(), config="max_batch_size: 8\n")
    with (
        pytest.raises(headrace.ConfigError, match=r"afine.*no folder of this name"),
        headrace.Server(tmp_path / "good", models=["afine"], state_dir=""),
    ):
        pass
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_use_outside_the_context_raises(repository: Path) -> None:
    server = headrace.Server(repository, models=["affine"], state_dir="", profile_s=0)
    with pytest.raises(RuntimeError, match="use it inside"):
        server.model("affine")
    with server:
        model = server.model("affine")
        with pytest.raises(RuntimeError, match="running already"), server:
            pass
    with pytest.raises(RuntimeError, match="is not running"):
        model.infer({"X": rows(1)})
    with server:  # a second time
        assert model.infer({"X": rows(1)})["Y"].shape == (1, 4)
    with pytest.raises(ValueError, match="no repository"):
        headrace.Server()


def test_an_onnx_file_is_served_by_its_name(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes((repository / "affine" / "1" / "model.onnx").read_bytes())
    with headrace.Server(file, state_dir="", profile_s=0) as server:
        assert server.models() == ["net"]
        assert server.model("net").infer({"X": rows(2)})["Y"].shape == (2, 4)


def test_exit_answers_queued_requests(repository: Path) -> None:
    answers: list[object] = []

    def call(model: headrace.Model) -> None:
        try:
            answers.append(model.infer({"X": rows(8)}))
        except (headrace.Unavailable, RuntimeError) as error:  # came after the end
            answers.append(error)

    with headrace.Server(repository, models=["affine"], state_dir="", profile_s=0) as server:
        model = server.model("affine")
        threads = [threading.Thread(target=call, args=(model,)) for _ in range(16)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 16


def test_importing_it_costs_little() -> None:
    code = "import sys, headrace; print([m for m in sys.modules if m in ('numpy', 'onnxruntime')], headrace.__all__)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("[] ['BadRequest'")
    code = (
        "import sys, headrace; headrace.Server; print([m for m in sys.modules if m in ('fastapi', 'uvicorn', 'grpc')])"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = headrace.Nothing  # type: ignore[attr-defined]


EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "embedding.md").read_text(), re.S | re.M)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page(example: str, repository: Path, tmp_path: Path) -> None:
    models = tmp_path / "model_repository"
    add_model(models, "tiny", affine(), config="max_batch_size: 8\ndynamic_batching {}\n")
    begin = time.monotonic()
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout, time.monotonic() - begin


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 3


def test_a_step_computes_on_the_memory_that_the_step_before_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chain(tmp_path)
    runs: list[tuple[int, int]] = []  # addresses of the input and of the output of a model's run
    run = onnxruntime.InferenceSession.run

    def recorded(session: onnxruntime.InferenceSession, names: list[str], feeds: dict[str, Array]) -> list[Array]:
        (output,) = run(session, names, feeds)
        runs.append((feeds["X"].ctypes.data, output.ctypes.data))
        return [output]

    x = np.ones((2, 16), np.float32)
    with headrace.Server(tmp_path, state_dir="", profile_s=0) as running:
        chain = running.model("chain")
        chain.infer({"X": x})
        monkeypatch.setattr(onnxruntime.InferenceSession, "run", recorded)
        y = chain.infer({"X": x})["Y"]
    first, second, third = runs
    assert first[0] == x.ctypes.data
    assert second[0] == first[1]
    assert third[0] == second[1]
    assert y.ctypes.data == third[1]
