"""A watched repository: what is copied into it serves once it has come to rest, and never before."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from headrace.config.model_folder import ModelFolder
from headrace.config.serving_plan import ServingPlan
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Mailbox
from headrace.core.errors import Unavailable
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.control_policy import ControlPolicy, ModelSelection
from headrace.models.gpu_model_cache import OnChange
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry

from tests.support.control_thread import infer_values
from tests.support.models import add_model, affine
from tests.support.waiting import until_async

POLL = ControlPolicy("poll", poll_interval_s=0.1, settle_s=0.6)


class Watched:
    """A server that watches `repository` in virtual time; `loads` are the models loaded, one entry each time."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.registry = Registry()
        self.loads: list[str] = []
        self.now_ns = 0
        self.reconciler: Reconciler

    def states(self) -> dict[str, str]:
        return {f"{row['name']}/{row['version']}": str(row["state"]) for row in self.registry.index()}

    async def advance(self, seconds: float) -> None:
        """Let virtual time pass; each scan that falls due, with its loads and unloads, has ended on return."""
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.now_ns = max(min(self.reconciler._next_scan_ns, end_ns), self.now_ns)
            self.reconciler.loader.commands.wake()  # ends the wait of the control thread, which is one of real time
            await until_async(lambda: self.now_ns < self.reconciler._next_scan_ns and self.reconciler._loads.is_empty)

    def wait_at_start(self, seconds: float = 0.0) -> bool:
        """Wait of the control thread between the scans of the start."""
        self.now_ns += round(seconds * NS_PER_S)
        return False

    async def until(self, true: Callable[[], bool]) -> None:
        """Let virtual time pass until a condition is true; changed files take the settle time and two scans."""
        for _ in range(20):
            if true():
                return
            await self.advance(POLL.poll_interval_s)
        raise AssertionError(self.states())

    async def answer(self, name: str) -> float:
        return sum(await infer_values(self.registry, name))


@asynccontextmanager
async def watching(repository: Path) -> AsyncIterator[Watched]:
    """A server that watches `repository`."""
    watched = Watched(repository)

    class CountingLoader(Loader):
        def load(
            self, folder: ModelFolder, version: int, chosen: ServingPlan, is_lazy: bool, on_change: OnChange
        ) -> ModelHandle:
            watched.loads.append(folder.name)
            return super().load(folder, version, chosen, is_lazy, on_change)

    loaded = threading.Event()
    watched.reconciler = reconciler = Reconciler(
        ModelSelection([repository]),
        CountingLoader(Mailbox(asyncio.get_running_loop())),
        watched.registry,
        lambda _: loaded.set(),
        POLL,
        clock=lambda: watched.now_ns,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciler._stop, "wait", watched.wait_at_start)
        reconciler.start()
        assert await asyncio.to_thread(loaded.wait, 20)
    try:
        yield watched
    finally:
        assert await asyncio.to_thread(reconciler.stop, 10)


async def test_models_are_loaded_reloaded_and_unloaded_with_their_folders(tmp_path: Path) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    add_model(tmp_path, "b", affine(seed=2))

    async with watching(tmp_path) as server:
        assert server.states() == {"a/1": "READY", "b/1": "READY"}, "all that is at rest serves when the start is over"
        first, other = await server.answer("a"), await server.answer("b")
        add_model(tmp_path, "c", affine(seed=3))
        await server.until(lambda: server.states().get("c/1") == "READY")
        add_model(tmp_path, "a", affine(seed=2))
        assert first != other
        await server.until(
            lambda: sorted(server.loads) == ["a", "a", "b", "c"]
        )  # "a" and "b" side by side at the start
        assert await server.answer("a") == other
        assert server.registry.ready()
        shutil.rmtree(tmp_path / "b")
        await server.until(lambda: not any(name.startswith("b/") for name in server.states()))
        assert sorted(server.loads) == ["a", "a", "b", "c"], "each change was acted on once"
        add_model(tmp_path, "b", affine(seed=4))
        await server.until(lambda: server.states().get("b/1") == "READY")


async def test_a_half_copied_file_is_never_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    content = affine(features=16, classes=4, seed=2).SerializeToString()
    part = len(content) // 8

    async with watching(tmp_path) as server:
        # In parts, over more than the settle time, into a new model and over a model that serves.
        for name in ("new", "a"):
            target = tmp_path / name / "1" / "model.onnx"
            target.parent.mkdir(parents=True, exist_ok=True)
            before = list(server.loads)
            with target.open("wb") as stream:
                for start in range(0, len(content), part):
                    stream.write(content[start : start + part])
                    stream.flush()
                    await server.advance(POLL.settle_s / 2)  # three scans
                    assert server.loads == before
                    if name == "new":
                        with pytest.raises(Unavailable, match="being loaded"):
                            server.registry.lease(name, "")
                    else:
                        await server.answer(name)
            await server.until(lambda name=name, before=before: server.loads == [*before, name])
        assert server.states() == {"a/1": "READY", "new/1": "READY"}
        assert await server.answer("a") == await server.answer("new")
        assert all(row["reason"] == "" for row in server.registry.index())


async def test_a_model_that_fails_is_tried_again_only_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(tmp_path, "a", affine(seed=1))
    tries: list[str] = []
    real = Loader.load

    def load(
        self: Loader, folder: ModelFolder, version: int, chosen: ServingPlan, is_lazy: bool, on_change: OnChange
    ) -> ModelHandle:
        tries.append(folder.name)
        if folder.config.max_batch_size == 3:
            raise RuntimeError("broken")
        return real(self, folder, version, chosen, is_lazy, on_change)

    monkeypatch.setattr(Loader, "load", load)
    async with watching(tmp_path) as server:
        answer = await server.answer("a")
        (tmp_path / "a" / "config.yaml").write_text("max_batch_size: 3\n")
        await server.until(lambda: tries == ["a", "a"])
        assert "the last load failed" in str(server.registry.index()[0]["reason"])
        await server.advance(4 * POLL.settle_s)
        assert tries == ["a", "a"]
        assert await server.answer("a") == answer, "what served before serves on"
        (tmp_path / "a" / "config.yaml").write_text("max_batch_size: 8\n")
        await server.until(lambda: tries == ["a", "a", "a"])
        assert server.registry.index()[0]["reason"] == ""


async def test_files_that_change_while_they_are_read_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Loader.load

    def load(
        self: Loader, folder: ModelFolder, version: int, chosen: ServingPlan, is_lazy: bool, on_change: OnChange
    ) -> ModelHandle:
        handle = real(self, folder, version, chosen, is_lazy, on_change)
        if not (folder.path / "1" / "more").exists():
            (folder.path / "1" / "more").write_text("somebody is still copying")
        return handle

    add_model(tmp_path, "a", affine(seed=1))
    monkeypatch.setattr(Loader, "load", load)
    async with watching(tmp_path) as server:
        await server.until(lambda: server.states() == {"a/1": "READY"})
        assert server.loads == ["a", "a"], "once in vain, once at rest"


async def test_a_repository_that_is_away_for_a_moment_is_no_wish_to_unload(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "a", affine(seed=1))

    async with watching(repository) as server:
        repository.rename(tmp_path / "away")
        await server.advance(4 * POLL.settle_s)
        await server.answer("a")
        (tmp_path / "away").rename(repository)
        await server.advance(2 * POLL.settle_s)
        assert server.states() == {"a/1": "READY"}
        assert server.loads == ["a"]


async def test_a_volume_is_watched_and_other_files_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a ConfigMap is mounted: links into a hidden folder that is swapped as a whole."""
    volume = tmp_path / "volume"
    for number in (1, 2):
        add_model(volume / f"..{number}", "m", affine(seed=number))
    (volume / "..data").symlink_to("..1")
    (volume / "m").symlink_to("..data/m")
    (volume / "lost+found").mkdir()

    caplog.set_level("INFO")
    async with watching(volume) as watched:
        assert watched.states() == {"m/1": "READY"}
        before = await watched.answer("m")
        (volume / "..new").symlink_to("..2")
        (volume / "..new").rename(volume / "..data")
        await watched.until(lambda: watched.loads == ["m", "m"])
        assert await watched.answer("m") != before
        # A folder that is filled later is a model from then on.
        (volume / "late").mkdir()
        await watched.advance(4 * POLL.settle_s)
        assert "late/" not in watched.states()
        add_model(volume, "late", affine(seed=5))
        await watched.until(lambda: watched.states().get("late/1") == "READY")

    notes = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert notes.count(f"{volume}/lost+found is skipped: it belongs to the file system") == 1
    assert len(notes) == len(set(notes))


async def test_a_model_that_serves_stays_while_its_folder_is_empty(tmp_path: Path) -> None:
    add_model(tmp_path, "m", affine(seed=1))

    async with watching(tmp_path) as watched:
        answer = await watched.answer("m")
        shutil.rmtree(tmp_path / "m" / "1")
        await watched.advance(4 * POLL.settle_s)
        assert await watched.answer("m") == answer
