"""`isolation: process` in a model's configuration, from the repository to the answer, on ONNX Runtime."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.core.request import InferRequest
from headrace.models import loader as loader_module
from headrace.models.control_policy import ControlPolicy
from headrace.runtimes.isolated.backend import IsolatedBackend
from headrace.runtimes.processes.supervisor import ProcessGate

from tests.support import fragile_backend as fragile
from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.models import add_model, identity
from tests.support.processes import isolated_children_of_this_process
from tests.support.waiting import until_async

ALL = ControlPolicy("none")
ISOLATED = "isolation: process\n"


async def test_an_isolated_model_answers_as_another_does(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED + "instance_group: [{count: 2}]\n")

    async with running(repository, ALL) as (_, registry):
        for _number in range(4):
            assert same(await infer_values(registry), 1)
        assert len(isolated_children_of_this_process()) == 1
        assert registry.ready()
    assert isolated_children_of_this_process() == []


async def test_readiness_is_false_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED)

    async with running(repository, ALL) as (_, registry):
        (child,) = isolated_children_of_this_process()
        seen, serve = threading.Event(), ProcessGate.open

        def serve_once_seen(gate: ProcessGate[Any], process: Any) -> None:
            assert seen.wait(60)
            serve(gate, process)

        monkeypatch.setattr(ProcessGate, "open", serve_once_seen)
        os.kill(child, signal.SIGKILL)
        await until_async(lambda: not registry.ready())
        seen.set()
        assert same(await infer_values(registry), 1), "it waits for the next process"
        assert registry.ready()
        assert isolated_children_of_this_process() != [child]
        assert index(registry)["m", "1"][0] == "READY"


async def test_a_reload_swaps_processes(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED)

    async with running(repository) as (reconciler, registry):
        await reconciler.load("m", None, {})
        before = isolated_children_of_this_process()
        put(repository, 2)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2)
        await until_async(lambda: len(isolated_children_of_this_process()) == 1)
        assert isolated_children_of_this_process() != before
        await reconciler.unload("m", False)
        await until_async(lambda: isolated_children_of_this_process() == [])


async def test_text_and_pictures_of_any_size(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "t", identity("BYTES"), files={"config.yaml": ISOLATED + "max_batch_size: 4\n"})

    async with running(repository, ALL) as (_, registry):
        handle = registry.lease("t", "")
        for length in (0, 5, 100_000):
            x = np.array([[b"a" * length, b""]], object)
            request = InferRequest(inputs={"X": x}, rows=1, shape_key=(2,), received_ns=0)
            answer: Any = (await handle.infer(request)).outputs["Y"]
            assert answer.tolist() == x.tolist()
        handle.release()


async def test_a_model_that_crashes_at_load_is_set_aside_and_its_neighbour_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config="")
    add_model(repository, "crash", identity(), files={"config.yaml": ISOLATED + "parameters: {words: abort}\n"})
    monkeypatch.setattr(
        loader_module, "isolated", lambda _, config: IsolatedBackend(config.name, fragile.FACTORY, 20.0)
    )

    async with running(repository, ALL) as (_, registry):
        state, reason = index(registry)["crash", "1"]
        assert state == "UNAVAILABLE"
        assert "its process died while it loaded the model: killed by SIGABRT" in reason
        assert same(await infer_values(registry), 1)


async def test_missing_files_have_the_same_error_as_without_isolation(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED + "parameters: {optimization_level: '7'}\n")

    async with running(repository, ALL) as (_, registry):
        reason = index(registry)["m", "1"][1]
        assert "parameter 'optimization_level' is '7' (write -1, 0, 1 or 2)" in reason


def test_the_memory_for_a_batch_follows_from_the_configuration() -> None:
    config = ModelConfig.model_validate(
        {
            "name": "m",
            "max_batch_size": 4,
            "isolation": "process",
            "isolation_timeout_s": 2.5,
            "input": [{"name": "x", "data_type": "uint8", "dims": [224, 224, 3]}],
            "output": [{"name": "y", "data_type": "fp32", "dims": [1000, -1]}],
        }
    )
    created = loader_module.isolated("onnxruntime", config)
    assert (created.name, created.limit_s, created.slot_bytes) == ("m", 2.5, 4 * (224 * 224 * 3 + 4000))


async def test_many_requests_at_once_through_a_crash(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED + "max_batch_size: 4\ndynamic_batching: {}\n")

    async with running(repository, ALL) as (_, registry):
        pending = [asyncio.create_task(infer_values(registry)) for _ in range(200)]
        await asyncio.sleep(0)
        (child,) = isolated_children_of_this_process()
        os.kill(child, signal.SIGKILL)
        answers = await asyncio.gather(*pending, return_exceptions=True)
        wrong = [answer for answer in answers if isinstance(answer, BaseException) or not same(answer, 1)]
        assert wrong == [], "the batch that was inside is run again, one by one"
