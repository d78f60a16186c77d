"""Loading and unloading of ensembles and their models, on the control thread with real models."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.request import InferRequest
from headrace.models.control_policy import ControlPolicy
from headrace.models.registry import Registry

from tests.support.control_thread import index, running
from tests.support.models import add_model, add_pipeline, affine, ensemble_config, identity, scores
from tests.support.waiting import until_async

FP32 = "TYPE_FP32"
LABELS = {"labels.txt": "cat\ndog\nowl\nyak\n"}


def add_all(repository: Path, outer: bool = False) -> None:
    """`net` -> `rank` in ensemble `m`; names so that the ensemble is loaded last only by its dependencies."""
    add_model(repository, "net", affine(), config="max_batch_size: 8")
    output = 'output [ { name: "SCORES" data_type: TYPE_FP32 dims: [4] label_filename: "labels.txt" } ]'
    add_model(repository, "rank", scores(4), config=f"max_batch_size: 8 {output}", files=LABELS)
    add_pipeline(repository, "m", config())
    if outer:
        steps = [("m", {"x": "x"}, {"y": "z"})]
        add_pipeline(repository, "a_outer", ensemble_config(steps, {"x": (FP32, (16,))}, {"z": (FP32, (4,))}))


def config(more: str = "max_batch_size: 8", first: str = "net") -> str:
    steps = [(first, {"X": "x"}, {"Y": "l"}), ("rank", {"X": "l"}, {"SCORES": "y"})]
    return ensemble_config(steps, {"x": (FP32, (16,))}, {"y": (FP32, (4,))}, more)


async def infer(registry: Registry, name: str, output: str = "y") -> np.ndarray:
    handle = registry.lease(name, "")
    try:
        x = np.ones((1, 16), np.float32)
        request = InferRequest(inputs={"x": x}, rows=1, shape_key=None, received_ns=0)
        return np.asarray((await handle.infer(request)).outputs[output])
    finally:
        handle.release()


def reason(registry: Registry, name: str = "m", version: str = "1") -> tuple[str, str]:
    return index(registry)[name, version]


async def test_models_load_before_the_ensembles_that_call_them(tmp_path: Path) -> None:
    add_all(tmp_path, outer=True)

    async with running(tmp_path) as (_, registry):
        assert {state for state, _ in index(registry).values()} == {"READY"}
        assert (await infer(registry, "a_outer", "z") == await infer(registry, "m")).all()
        assert registry.ready()


async def test_a_pipeline_without_a_version_folder_has_version_1(tmp_path: Path) -> None:
    add_all(tmp_path, outer=True)
    for name in ("m", "a_outer"):  # git keeps no empty folder
        (tmp_path / name / "1").rmdir()

    async with running(tmp_path) as (reconciler, registry):
        assert reason(registry) == ("READY", "")
        before = await infer(registry, "a_outer", "z")
        await reconciler.load("m", None, {})
        assert (await infer(registry, "a_outer", "z") == before).all()
        (tmp_path / "m" / "2").mkdir()
        await reconciler.load("m", None, {})
        assert registry.versions("m") == ["2"]


async def test_labels_are_those_of_the_model_behind_an_output(tmp_path: Path) -> None:
    add_all(tmp_path)

    async with running(tmp_path) as (_, registry):
        handle = registry.serving("m", "")
        assert handle is not None
        assert handle.spec.outputs["y"].labels == ("cat", "dog", "owl", "yak")


async def test_a_load_of_an_ensemble_brings_its_models(tmp_path: Path) -> None:
    add_all(tmp_path, outer=True)
    add_model(tmp_path, "unused", affine())

    async with running(tmp_path, names=frozenset()) as (reconciler, registry):
        assert not list(registry.sources())
        await reconciler.load("a_outer", None, {})
        assert sorted(name for name, _, _ in registry.sources()) == ["a_outer", "m", "net", "rank"]


async def test_models_of_a_selected_ensemble_are_loaded_at_start(tmp_path: Path) -> None:
    add_all(tmp_path)
    add_model(tmp_path, "unused", affine())

    async with running(tmp_path, names=frozenset({"m"})) as (_, registry):
        assert sorted(name for name, _, _ in registry.sources()) == ["m", "net", "rank"]


async def test_a_missing_model_is_named_with_the_line_of_its_step(tmp_path: Path) -> None:
    add_all(tmp_path)
    shutil.rmtree(tmp_path / "rank")

    async with running(tmp_path) as (reconciler, registry):
        state, text = reason(registry)
        assert state == "UNAVAILABLE"
        assert "m/config.pbtxt:5: error: needs model 'rank', which is not served: " in text
        with pytest.raises(ConfigError, match="needs model 'rank'"):
            await reconciler.load("m", None, {})
        # It is loaded as soon as the model is there.
        add_model(tmp_path, "rank", scores(4), config="max_batch_size: 8")
        await reconciler.load("rank", None, {})
        assert reason(registry) == ("READY", "")
        assert (await infer(registry, "m")).shape == (1, 4)


async def test_a_new_version_that_does_not_fit_stops_the_ensemble_and_not_the_model(tmp_path: Path) -> None:
    add_all(tmp_path)

    async with running(tmp_path) as (reconciler, registry):
        add_model(tmp_path, "rank", identity(), version=2)
        (tmp_path / "rank/config.pbtxt").write_text("max_batch_size: 8")
        await reconciler.load("rank", None, {})
        state, text = reason(registry)
        assert (state, text.startswith("it does not fit its models: ")) == ("UNAVAILABLE", True)
        assert reason(registry, "rank", "2")[0] == "READY"
        with pytest.raises(Unavailable, match="does not fit its models"):
            await infer(registry, "m")
        shutil.rmtree(tmp_path / "rank/2")
        await reconciler.load("rank", None, {})
        assert reason(registry)[0] == "READY"
        assert (await infer(registry, "m")).shape == (1, 4)


async def test_a_reload_of_a_model_is_used_by_the_next_request(tmp_path: Path) -> None:
    add_all(tmp_path)

    async with running(tmp_path) as (reconciler, registry):
        before, handle = await infer(registry, "m"), registry.serving("m", "")
        add_model(tmp_path, "net", affine(seed=3), version=2)
        await reconciler.load("net", None, {})
        assert registry.serving("m", "") is handle
        assert not np.allclose(before, await infer(registry, "m"))


async def test_unload_with_dependents_takes_the_models_that_no_other_ensemble_calls(tmp_path: Path) -> None:
    add_all(tmp_path)
    add_model(tmp_path, "own", affine(), config="max_batch_size: 8")
    add_pipeline(tmp_path, "other", config(first="own"))

    async with running(tmp_path) as (reconciler, registry):
        await reconciler.unload("m", False)
        assert sorted(name for name, _, _ in registry.sources()) == ["net", "other", "own", "rank"]
        await reconciler.load("m", None, {})
        await reconciler.unload("m", True)
        assert sorted(name for name, _, _ in registry.sources()) == ["other", "own", "rank"]


async def test_ensembles_that_call_each_other_are_refused(tmp_path: Path) -> None:
    io = {"x": (FP32, (4,))}, {"y": (FP32, (4,))}
    add_pipeline(tmp_path, "m", ensemble_config([("other", {"x": "x"}, {"y": "y"})], *io))
    add_pipeline(tmp_path, "other", ensemble_config([("m", {"x": "x"}, {"y": "y"})], *io))

    async with running(tmp_path) as (_, registry):
        texts = [text for state, text in index(registry).values() if state == "UNAVAILABLE"]
        assert len(texts) == 2
        assert any("it calls itself: m -> other -> m" in text for text in texts), texts


async def test_requests_in_flight_end_before_an_ensemble_and_its_models_are_closed(tmp_path: Path) -> None:
    add_all(tmp_path)

    async with running(tmp_path) as (reconciler, registry):
        handle = registry.lease("m", "")
        request = InferRequest(inputs={"x": np.ones((1, 16), np.float32)}, rows=1, shape_key=None, received_ns=0)
        waiting = handle.infer(request)
        await reconciler.unload("m", True)
        assert (await waiting).outputs["y"].shape == (1, 4)
        handle.release()
        await until_async(lambda: index(registry)["m", "1"][0] == "UNAVAILABLE")
        assert index(registry)["m", "1"] == ("UNAVAILABLE", "unloaded")


async def test_polling_loads_a_changed_ensemble_after_its_changed_models(tmp_path: Path) -> None:
    add_all(tmp_path)
    polling = ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.05)

    async with running(tmp_path, polling) as (_, registry):
        add_model(tmp_path, "zz_new", affine(), config="max_batch_size: 8")
        add_pipeline(tmp_path, "m", config(first="zz_new"))
        await until_async(lambda: "zz_new" in getattr(registry.serving("m", ""), "calls", ()))
        assert (await infer(registry, "m")).shape == (1, 4)
        shutil.rmtree(tmp_path / "m")
        await until_async(lambda: registry.serving("m", "") is None)
        with pytest.raises(HeadraceError):
            registry.lease("m", "")
