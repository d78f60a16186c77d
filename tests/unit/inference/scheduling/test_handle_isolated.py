"""A model in a child process, behind the queue: failed requests, and responses while it restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ModelFailed, Unavailable
from headrace.core.request import InferResponse
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.observability.metrics import MetricsPage
from headrace.runtimes.isolated.backend import IsolatedBackend
from headrace.runtimes.processes import supervisor

from tests.support import fragile_backend as fragile
from tests.support.fakes import SPEC, infer_request
from tests.support.processes import isolated_children_of_this_process

pytestmark = pytest.mark.slow


@asynccontextmanager
async def serving(folder: Path, words: str, limit_s: float = 20.0, **policy: Any) -> AsyncIterator[ModelHandle]:
    """A handle on the fragile model; its process must have ended after the block."""
    (folder / "model").write_text(words)
    loading = IsolatedBackend("fake", fragile.FACTORY, limit_s)
    model = await asyncio.to_thread(loading.load, folder / "model", policy.get("instances", 1), {})
    chosen = HandlePolicy(batch=BatchPolicy(8), **policy)
    handle = ModelHandle(SPEC, chosen, model, Mailbox(asyncio.get_running_loop()), Recorder())
    handle.start()
    try:
        yield handle
    finally:
        assert await asyncio.to_thread(handle.close, 20)
    assert isolated_children_of_this_process() == []


def y_of(answer: object) -> float:
    assert isinstance(answer, InferResponse), answer
    return float(np.asarray(answer.outputs["y"])[0, 0])


@pytest.mark.parametrize("words", ["wait", "wait overlapped"])
@pytest.mark.parametrize("instances", [1, 2])
async def test_only_the_request_that_kills_the_process_gets_the_error(
    tmp_path: Path, words: str, instances: int
) -> None:
    async with serving(tmp_path, words, instances=instances) as handle:
        values = [1, 2, fragile.ABORT, 4, 5, 6, fragile.EXIT, 8, 9, 10, 11, 12]
        waiting = [handle.infer(infer_request(value)) for value in values]
        (tmp_path / "go").touch()
        answers = dict(zip(values, await asyncio.gather(*waiting, return_exceptions=True), strict=True))
        for value in (fragile.ABORT, fragile.EXIT):
            error = answers.pop(value)
            assert isinstance(error, ModelFailed), error
            assert str(error).startswith("the process of fake died while it ran the request")
        assert {value: y_of(answer) for value, answer in answers.items()} == {value: 2 * value for value in answers}
        # One for each batch that the two were in, and one for each of the two alone; more where they met others inside.
        assert 2 <= handle.process_status.restarts <= 7  # type: ignore[union-attr]


async def test_requests_are_rejected_during_long_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (600.0,))

    async with serving(tmp_path, "") as handle:
        with pytest.raises(ModelFailed):
            await handle.infer(infer_request(fragile.EXIT))
        with pytest.raises(Unavailable, match="has died and is being started again"):
            handle.admit()
        with pytest.raises(Unavailable):
            await handle.infer(infer_request(1))
        _type, page = MetricsPage(lambda: [("fake", "1", handle)]).render()
        assert b'headrace_model_process_up{model="fake",version="1"} 0.0' in page
        assert b'headrace_model_process_restarts_total{model="fake",version="1"} 1.0' in page


async def test_a_closed_handle_does_not_wait_for_a_slow_process_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (600.0,))

    async with serving(tmp_path, "") as handle:
        with pytest.raises(ModelFailed):
            await handle.infer(infer_request(fragile.EXIT))
