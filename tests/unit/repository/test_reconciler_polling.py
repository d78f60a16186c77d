"""A watched repository: what is copied into it serves once it has come to rest, and never before."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.config.model_folder import ModelFolder
from headrace.config.serving_plan import ServingPlan
from headrace.core.completion import Mailbox
from headrace.core.errors import Unavailable
from headrace.core.request import InferRequest
from headrace.repository.loader import Loader
from headrace.repository.reconciler import ControlPolicy, ModelSelection, Reconciler
from headrace.repository.registry import Registry
from headrace.scheduling.handle import ModelHandle

from tests.support.models import add_model, affine

pytestmark = pytest.mark.slow

POLL = ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.25)


class Watched:
    """A server that watches `repository`; `loads` are the models loaded, one entry each time."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.registry = Registry()
        self.loads: list[str] = []

    def states(self) -> dict[str, str]:
        return {f"{row['name']}/{row['version']}": str(row["state"]) for row in self.registry.index()}

    async def until(self, true: Callable[[], bool], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, self.states()
            await asyncio.sleep(0.01)

    async def answer(self, name: str) -> float:
        handle = self.registry.lease(name, "")
        try:
            request = InferRequest(inputs={"X": np.ones((1, 16), np.float32)}, rows=1, shape_key=(16,), received_ns=0)
            return float((await handle.infer(request)).outputs["Y"].sum())  # type: ignore[arg-type]
        finally:
            handle.release()

    async def until_answer(self, name: str, expected: float) -> None:
        """Between the load and the swap the old version still answers."""
        deadline = time.monotonic() + 60
        while await self.answer(name) != expected:
            assert time.monotonic() < deadline, self.states()
            await asyncio.sleep(0.01)


def watch(
    repository: Path, check: Callable[[Watched], Coroutine[Any, Any, None]], control: ControlPolicy = POLL
) -> None:
    """Run `check` beside a server that watches `repository`."""
    watched = Watched(repository)

    class CountingLoader(Loader):
        def load(self, folder: ModelFolder, version: int, chosen: ServingPlan) -> ModelHandle:
            watched.loads.append(folder.name)
            return super().load(folder, version, chosen)

    async def main() -> None:
        loaded = threading.Event()
        loader = CountingLoader(Mailbox(asyncio.get_running_loop()))
        reconciler = Reconciler(ModelSelection([repository]), loader, watched.registry, lambda _: loaded.set(), control)
        reconciler.start()
        assert await asyncio.to_thread(loaded.wait, 20)
        try:
            await check(watched)
        finally:
            assert await asyncio.to_thread(reconciler.stop, 10)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_models_are_loaded_reloaded_and_unloaded_with_their_folders(tmp_path: Path) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    add_model(tmp_path, "b", affine(seed=2))

    async def check(server: Watched) -> None:
        assert server.states() == {"a/1": "READY", "b/1": "READY"}, "all that is at rest serves when the start is over"
        first, other = await server.answer("a"), await server.answer("b")
        add_model(tmp_path, "c", affine(seed=3))
        await server.until(lambda: server.states().get("c/1") == "READY")
        add_model(tmp_path, "a", affine(seed=2))
        assert first != other
        await server.until_answer("a", other)
        assert server.registry.ready()
        shutil.rmtree(tmp_path / "b")
        await server.until(lambda: not any(name.startswith("b/") for name in server.states()))
        assert server.loads == ["a", "b", "c", "a"], "each change was acted on once"
        add_model(tmp_path, "b", affine(seed=4))
        await server.until(lambda: server.states().get("b/1") == "READY")

    watch(tmp_path, check)


def test_a_half_copied_file_is_never_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    content = affine(features=16, classes=4, seed=2).SerializeToString()
    part = len(content) // 8
    slow = ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.8)

    async def check(server: Watched) -> None:
        # In parts, over more than the settle time, into a new model and over a model that serves.
        for name in ("new", "a"):
            target = tmp_path / name / "1" / "model.onnx"
            target.parent.mkdir(parents=True, exist_ok=True)
            before = list(server.loads)
            with target.open("wb") as stream:
                for start in range(0, len(content), part):
                    stream.write(content[start : start + part])
                    stream.flush()
                    await asyncio.sleep(slow.settle_s / 6)
                    assert server.loads == before
                    if name == "new":
                        with pytest.raises(Unavailable, match="being loaded"):
                            server.registry.lease(name, "")
                    else:
                        await server.answer(name)
            await server.until(lambda name=name, before=before: server.loads == [*before, name])
        await server.until(lambda: server.states() == {"a/1": "READY", "new/1": "READY"})
        await server.until_answer("a", await server.answer("new"))
        assert all(row["reason"] == "" for row in server.registry.index())

    watch(tmp_path, check, slow)


def test_a_model_that_fails_is_tried_again_only_when_its_files_change(tmp_path: Path) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    tries: list[str] = []
    real = Loader.load

    def load(self: Loader, folder: ModelFolder, version: int, chosen: ServingPlan) -> ModelHandle:
        tries.append(folder.name)
        if folder.config.max_batch_size == 3:
            raise RuntimeError("broken")
        return real(self, folder, version, chosen)

    async def check(server: Watched) -> None:
        answer = await server.answer("a")
        (tmp_path / "a" / "config.yaml").write_text("max_batch_size: 3\n")
        await server.until(lambda: tries == ["a", "a"])
        await server.until(lambda: "the last load failed" in str(server.registry.index()[0]["reason"]))
        await asyncio.sleep(4 * POLL.settle_s)
        assert tries == ["a", "a"]
        assert await server.answer("a") == answer, "what served before serves on"
        (tmp_path / "a" / "config.yaml").write_text("max_batch_size: 8\n")
        await server.until(lambda: tries == ["a", "a", "a"])
        await server.until(lambda: server.registry.index()[0]["reason"] == "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "load", load)
        watch(tmp_path, check)


def test_files_that_change_while_they_are_read_are_not_served(tmp_path: Path) -> None:
    real = Loader.load

    def load(self: Loader, folder: ModelFolder, version: int, chosen: ServingPlan) -> ModelHandle:
        handle = real(self, folder, version, chosen)
        if not (folder.path / "1" / "more").exists():
            (folder.path / "1" / "more").write_text("somebody is still copying")
        return handle

    add_model(tmp_path, "a", affine(seed=1))

    async def check(server: Watched) -> None:
        await server.until(lambda: server.states() == {"a/1": "READY"})
        assert server.loads == ["a", "a"], "once in vain, once at rest"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "load", load)
        watch(tmp_path, check)


def test_a_repository_that_is_away_for_a_moment_is_no_wish_to_unload(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "a", affine(seed=1))

    async def check(server: Watched) -> None:
        repository.rename(tmp_path / "away")
        await asyncio.sleep(4 * POLL.settle_s)
        await server.answer("a")
        (tmp_path / "away").rename(repository)
        await asyncio.sleep(2 * POLL.settle_s)
        assert server.states() == {"a/1": "READY"}
        assert server.loads == ["a"]

    watch(repository, check)


def test_a_volume_is_watched_and_other_files_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a ConfigMap is mounted: links into a hidden folder that is swapped as a whole."""
    volume = tmp_path / "volume"
    for number in (1, 2):
        add_model(volume / f"..{number}", "m", affine(seed=number))
    (volume / "..data").symlink_to("..1")
    (volume / "m").symlink_to("..data/m")
    (volume / "lost+found").mkdir()

    async def check(watched: Watched) -> None:
        assert watched.states() == {"m/1": "READY"}
        before = await watched.answer("m")
        (volume / "..new").symlink_to("..2")
        (volume / "..new").rename(volume / "..data")
        await watched.until(lambda: watched.loads == ["m", "m"])
        deadline = time.monotonic() + 60
        while await watched.answer("m") == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        # A folder that is filled later is a model from then on.
        (volume / "late").mkdir()
        await asyncio.sleep(0.2)
        assert "late/" not in watched.states()
        add_model(volume, "late", affine(seed=5))
        await watched.until(lambda: watched.states().get("late/1") == "READY")

    with caplog.at_level("INFO"):
        watch(volume, check)
    notes = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert notes.count(f"{volume}/lost+found is skipped: it belongs to the file system") == 1
    assert len(notes) == len(set(notes))


def test_a_model_that_serves_stays_while_its_folder_is_empty(tmp_path: Path) -> None:
    add_model(tmp_path, "m", affine(seed=1))

    async def check(watched: Watched) -> None:
        answer = await watched.answer("m")
        shutil.rmtree(tmp_path / "m" / "1")
        await asyncio.sleep(1.0)
        assert await watched.answer("m") == answer

    watch(tmp_path, check)
