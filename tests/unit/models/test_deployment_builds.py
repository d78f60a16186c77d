"""build_on_load: the model serves at once, its engine takes over when it is built, and no request notices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from headrace.config.manifest import is_artefact_name
from headrace.config.model_folder import ModelFolder
from headrace.config.serving_plan import ServingPlan
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_model_cache import OnChange
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace.observability.labelled_counter import BUILDS

from tests.support.control_thread import EXPLICIT, at_rest, index, infer_values, put, running, same
from tests.support.fake_builder import command
from tests.support.models import add_model, affine
from tests.support.waiting import until_async

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow

BUILT = "optimization: {precision: int8}\nbuild_on_load: true\n"
POLL = ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.2)
ENGINE = affine(seed=2).SerializeToString()


class Workshop:
    """A repository with the model "m", a fake builder for it, and a count of the loads."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self.orders = folder / "orders"
        put(self.repository, 1, config=BUILT)
        self.command = command(self.orders)
        (self.orders / "engine.onnx").write_bytes(ENGINE)
        self.loads: list[str] = []

    def calls(self) -> list[str]:
        path = self.orders / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def hold(self) -> None:
        (self.orders / "hold").touch()

    def let_go(self) -> None:
        (self.orders / "hold").unlink()

    @asynccontextmanager
    async def running(self, control: ControlPolicy = EXPLICIT) -> AsyncIterator[tuple[Reconciler, Registry]]:
        real = Loader.load

        def load(
            loader: Loader, folder: ModelFolder, version: int, chosen: ServingPlan, is_lazy: bool, on_change: OnChange
        ) -> ModelHandle:
            self.loads.append(chosen.file.name)
            return real(loader, folder, version, chosen, is_lazy, on_change)

        names = None if control.mode == "poll" else frozenset({"m"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loader, "load", load)
            async with running(self.repository, control, names, self.command) as server:
                yield server


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def reason_of(registry: Registry) -> str:
    state, reason = index(registry)["m", "1"]
    assert state == "READY"
    return reason


async def settled(registry: Registry) -> None:
    """Wait until nothing is being built."""
    await until_async(
        lambda: "usually a minute" not in reason_of(registry) and "queued to be" not in reason_of(registry)
    )


async def test_the_engine_serves_when_it_is_built(workshop: Workshop) -> None:
    workshop.hold()

    async with workshop.running() as (reconciler, registry):
        assert registry.ready()
        assert same(await infer_values(registry), 1)
        await until_async(lambda: workshop.calls() == ["started"])
        waits = "building ONNX Runtime INT8, usually a minute or two; the CPU serves meanwhile"
        assert reason_of(registry) == waits
        workshop.let_go()
        await settled(registry)
        assert same(await infer_values(registry), 2)
        assert reason_of(registry) == ""
        await at_rest(reconciler)
        assert [is_artefact_name(name) for name in workshop.loads] == [False, True]
        assert reason_of(registry) == ""
        assert workshop.calls() == ["started"]


async def test_what_serves_is_kept_if_the_engine_is_slower(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    (workshop.orders / "slower").write_text("m was not published: it is 0.68 times as fast as what serves now\n")
    caplog.set_level(logging.WARNING, "headrace")
    async with workshop.running() as (_, registry):
        await settled(registry)
        text = "an engine was built, but is not published: it is 0.68 times as fast as what serves now"
        assert reason_of(registry).endswith(f"; {text}")
        assert same(await infer_values(registry), 1)
    (record,) = [each for each in caplog.records if each.getMessage().endswith(text)]
    assert record.levelno == logging.WARNING
    assert dict(BUILDS.items())["m", "slower"] >= 1


async def test_a_failed_build_is_reported_and_not_retried(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    (workshop.orders / "fail").write_text(f"{workshop.repository}/m: node 'x' cannot be quantised\n")

    caplog.set_level(logging.ERROR, "headrace")
    async with workshop.running() as (reconciler, registry):
        await settled(registry)
        expected = "none is built; building it failed: m: node 'x' cannot be quantised"
        assert reason_of(registry).endswith(expected)
        await reconciler.load("m", None, {})
        assert reason_of(registry).endswith(expected), "a load of the same is no new attempt"
        assert same(await infer_values(registry), 1)
        assert workshop.calls() == ["started"]
        # What it was built from has changed: that is one.
        (workshop.orders / "fail").unlink()
        put(workshop.repository, 3)
        await reconciler.load("m", None, {})
        await settled(registry)
        assert same(await infer_values(registry), 2)
        assert workshop.calls() == ["started", "started"]
    assert [r.getMessage() for r in caplog.records] == [
        "model m version 1: building its engine failed: m: node 'x' cannot be quantised"
    ]


async def test_a_model_that_is_loaded_anew_may_try_again(workshop: Workshop) -> None:
    (workshop.orders / "fail").write_text("no\n")

    async with workshop.running() as (reconciler, registry):
        await settled(registry)
        (workshop.orders / "fail").unlink()
        await reconciler.unload("m", False)
        await reconciler.load("m", None, {})
        await settled(registry)
        assert same(await infer_values(registry), 2)


async def test_new_samples_are_a_new_attempt(workshop: Workshop) -> None:
    (workshop.orders / "fail").write_text("no samples\n")
    config_text = "optimization: {precision: int8, calibration: {data: samples.npz}}\nbuild_on_load: true\n"
    (workshop.repository / "m" / "config.yaml").write_text(config_text)

    async with workshop.running(POLL) as (_, registry):
        await settled(registry)
        (workshop.orders / "fail").unlink()
        (workshop.repository / "m" / "samples.npz").write_bytes(b"x")
        await until_async(lambda: len(workshop.calls()) == 2)
        await settled(registry)
        assert same(await infer_values(registry), 2)
        assert len(workshop.calls()) == 2


async def test_unloaded_models_are_not_built(workshop: Workshop) -> None:
    workshop.hold()

    async with workshop.running() as (reconciler, registry):
        await until_async(lambda: workshop.calls() == ["started"])
        await reconciler.unload("m", False)
        await until_async(lambda: workshop.calls() == ["started", "stopped"])
        workshop.let_go()
        timer = reconciler._builds._kill_timer
        await until_async(lambda: timer is not None and timer.finished.is_set())  # the builder has ended
        await until_async(lambda: index(registry)["m", "1"][0] == "UNAVAILABLE")
        await at_rest(reconciler)
        assert index(registry)["m", "1"][0] == "UNAVAILABLE"
        assert workshop.loads == ["model.onnx"]


async def test_a_model_that_changes_while_it_is_built_gets_another_engine(workshop: Workshop) -> None:
    workshop.hold()

    async with workshop.running() as (reconciler, registry):
        await until_async(lambda: workshop.calls() == ["started"])
        put(workshop.repository, 3)
        await reconciler.load("m", None, {})
        await until_async(lambda: workshop.calls() == ["started", "stopped", "started"])
        assert same(await infer_values(registry), 3)
        workshop.let_go()
        await settled(registry)
        assert same(await infer_values(registry), 2)


async def test_the_end_of_a_build_loads_no_other_changed_files(workshop: Workshop) -> None:
    workshop.hold()

    async with workshop.running() as (reconciler, registry):
        await until_async(lambda: workshop.calls() == ["started"])
        # The folder is being changed; the watcher, or a load request, signals the end of the change.
        put(workshop.repository, 3)
        workshop.let_go()
        await until_async(lambda: bool(list((workshop.repository / "m" / "1").glob("model.*.onnx"))))
        await until_async(lambda: "files have changed since: load the model again" in reason_of(registry))
        assert same(await infer_values(registry), 1)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2), "the engine was built from the new file"


async def test_uploaded_models_are_not_built(workshop: Workshop) -> None:
    content = affine(seed=4).SerializeToString()
    text = '{"parameters": {"headrace.build_on_load": {"string_value": "true"}}}'

    async with workshop.running() as (reconciler, registry):
        await settled(registry)
        await reconciler.load("m", text, {"1/model.onnx": content})
        assert same(await infer_values(registry), 4)
        assert "headrace build m" in reason_of(registry)
        await reconciler.load("m", text.replace("{", '{"max_batch_size": 2, ', 1), {})
        assert same(await infer_values(registry), 1)
        await until_async(lambda: reconciler._builds._current is None and not reconciler._builds._waiting)
        assert workshop.calls() == ["started"]


async def test_an_engine_that_does_not_load_is_not_built_again(workshop: Workshop) -> None:
    (workshop.orders / "engine.onnx").write_bytes(b"no engine")

    async with workshop.running() as (reconciler, registry):
        await settled(registry)
        assert "which cannot be loaded" in reason_of(registry)
        assert same(await infer_values(registry), 1)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 1)
        assert workshop.calls() == ["started"]


async def test_a_builder_that_publishes_nothing_is_not_started_again(workshop: Workshop) -> None:
    workshop.command = ("true",)

    async with workshop.running() as (reconciler, registry):
        await settled(registry)
        expected = (
            "model.onnx serves in place of the int8 engine: none is built (headrace build m --target onnxruntime)"
        )
        assert reason_of(registry) == expected
        await reconciler.load("m", None, {})
        assert reason_of(registry) == expected


async def test_models_come_first_engines_second(workshop: Workshop) -> None:
    for name in ("a", "z"):
        add_model(workshop.repository, name, affine(seed=1), files={"config.yaml": BUILT})
    seen: list[int] = []

    async with workshop.running(POLL) as (_, registry):
        assert workshop.loads[:3] == ["model.onnx"] * 3
        await until_async(lambda: all(reason == "" for _, reason in index(registry).values()))
        seen.append(len(workshop.calls()))
    assert seen == [3]


Act = Callable[[Reconciler], Coroutine[Any, Any, None]]


def moment(workshop: Workshop, reconciler: Reconciler, name: str) -> bool:
    """True once a moment of the first build has come."""
    states = {
        "load": True,
        "process": reconciler._builds._process is not None,
        "builder": workshop.calls() != [],
        "engine": any((workshop.repository / "m" / "1").glob("model.*.onnx")),
        "end": reconciler._builds._current is None and bool(reconciler._builds._outcomes),
    }
    return states[name]


@pytest.mark.parametrize("name", ["load", "process", "builder", "engine", "end"])
async def test_loads_and_unloads_at_any_moment_of_a_build_leave_it_sane(workshop: Workshop, name: str) -> None:
    async with workshop.running() as (reconciler, registry):
        await until_async(lambda: moment(workshop, reconciler, name))
        await reconciler.load("m", None, {})
        await reconciler.unload("m", False)
        await reconciler.load("m", None, {})
        await settled(registry)
        assert same(await infer_values(registry), 2)
        assert reason_of(registry) == ""
