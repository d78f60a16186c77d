"""Loading and unloading while the server runs, with real folders and real models, through the control thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import Aborted, ConfigError, HeadraceError, NotFound, Unavailable
from headrace.core.request import InferRequest
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.loader import Loader
from headrace.models.registry import Registry

from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.models import add_model, affine, busy, table_lookup
from tests.support.waiting import until_async


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path / "repository", 1)
    add_model(tmp_path / "repository", "other", affine(seed=9))
    return tmp_path / "repository"


def handles(registry: Registry) -> dict[str, ModelHandle]:
    return {version: handle for name, version, handle in registry.sources() if name == "m"}


async def test_a_model_not_loaded_at_start_is_listed_and_can_be_loaded_and_unloaded(repository: Path) -> None:
    async with running(repository, names=frozenset({"other"})) as (reconciler, registry):
        assert index(registry) == {("m", ""): ("UNAVAILABLE", "not loaded"), ("other", "1"): ("READY", "")}
        assert registry.failures() == [], "--strict has nothing against it"
        assert registry.ready()
        with pytest.raises(Unavailable, match="is not loaded"):
            registry.lease("m", "")
        await reconciler.load("m", None, {})
        assert index(registry) == {("m", "1"): ("READY", ""), ("other", "1"): ("READY", "")}
        await reconciler.unload("m", True)
        with pytest.raises(Unavailable, match="is not loaded"):
            registry.lease("m", "")
        await until_async(lambda: index(registry)["m", "1"] == ("UNAVAILABLE", "unloaded"))
        await reconciler.unload("m", False)  # once more is no error
        assert registry.ready()
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 1)
        (repository / "later").mkdir()
        with pytest.raises(ConfigError, match="no version folder"):
            await reconciler.load("later", None, {})
        assert index(registry)["later", ""][0] == "UNAVAILABLE"


async def test_an_unchanged_model_has_the_same_handle_and_counts(repository: Path) -> None:
    async with running(repository) as (reconciler, registry):
        handle = handles(registry)["1"]
        await infer_values(registry)
        await reconciler.load("m", None, {})
        assert handles(registry)["1"] is handle
        put(repository, 2, version=2, config="version_policy: {all: {}}\nlabels: {stable: 1, canary: 2}\n")
        await reconciler.load("m", None, {})
        assert handles(registry)["1"] is handle, "a new neighbour is no change"
        assert handle.recorder.totals().requests == 1
        assert same(await infer_values(registry, version="stable"), 1)
        assert same(await infer_values(registry, version="canary"), 2)
        (repository / "m" / "config.yaml").write_text("version_policy: {all: {}}\nlabels: {stable: 2}\n")
        await reconciler.load("m", None, {})
        assert handles(registry)["1"] is handle, "labels are not the version's"
        assert same(await infer_values(registry, version="stable"), 2)
        with pytest.raises(NotFound, match="canary"):
            registry.lease("m", "canary")
        (repository / "m" / "config.yaml").write_text("version_policy: {all: {}}\nmax_batch_size: 2\n")
        await reconciler.load("m", None, {})
        assert handles(registry)["1"] is not handle, "this concerns every version"


async def test_versions_follow_the_policy(repository: Path) -> None:
    async with running(repository) as (reconciler, registry):
        for version in (2, 3):
            put(repository, version, version=version)
        for policy, versions in (
            ("{latest: {num_versions: 2}}", ["2", "3"]),
            ("{all: {}}", ["1", "2", "3"]),
            ("{specific: {versions: [1, 3]}}", ["1", "3"]),
            ("{latest: {num_versions: 1}}", ["3"]),
            ("{specific: {versions: [2]}}", ["2"]),
        ):
            (repository / "m" / "config.yaml").write_text(f"version_policy: {policy}\nlabels: {{odd: 3}}\n")
            await reconciler.load("m", None, {})
            assert list(registry.versions("m")) == versions
            assert same(await infer_values(registry), int(versions[-1]))
            for version in ("1", "2", "3"):
                if version in versions:
                    assert same(await infer_values(registry, version=version), int(version))
                else:
                    with pytest.raises((NotFound, Unavailable)):
                        registry.lease("m", version)
        with pytest.raises((NotFound, Unavailable)):
            registry.lease("m", "odd")


async def test_a_label_of_a_missing_version_is_reported(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(repository, 1, config="labels: {stable: 1, canary: 7}\n")

    async with running(repository) as (_, registry):
        assert same(await infer_values(registry, version="stable"), 1)
        with pytest.raises(NotFound):
            registry.lease("m", "canary")
    assert 'label "canary" names version 7, which is not served' in caplog.text


@pytest.mark.parametrize("how", ["garbage", "config", "version", "empty"])
async def test_a_failed_reload_changes_nothing(repository: Path, how: str) -> None:
    async with running(repository) as (reconciler, registry):
        handle = handles(registry)["1"]
        if how == "garbage":
            (repository / "m" / "1" / "model.onnx").write_bytes(b"no model")
        elif how == "config":
            (repository / "m" / "config.yaml").write_text("max_batch_sise: 3\n")
        elif how == "version":
            add_model(repository, "m", b"no model", version=2, files={"config.yaml": "version_policy: {all: {}}\n"})
        else:
            (repository / "m" / "1" / "model.onnx").unlink()
        for _ in range(2):
            with pytest.raises(ConfigError) as refused:
                await reconciler.load("m", None, {})
        assert str(repository) not in str(refused.value)
        assert handles(registry) == {"1": handle}
        assert same(await infer_values(registry), 1)
        state, reason = index(registry)["m", "1"]
        assert state == "READY"
        assert reason.startswith("the last load failed: ")
        assert registry.ready()
        assert not any(thread.name.startswith("m/2") for thread in threading.enumerate())
        for file in ("config.yaml", "2/model.onnx"):
            (repository / "m" / file).unlink(missing_ok=True)
        if (repository / "m" / "2").is_dir():
            (repository / "m" / "2").rmdir()
        put(repository, 3)
        await reconciler.load("m", None, {})
        assert index(registry)["m", "1"] == ("READY", "")
        assert same(await infer_values(registry), 3)


async def test_one_broken_version_does_not_affect_the_others(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_model(
        repository, "half", affine(seed=4), files={"config.yaml": "version_policy: {all: {}}\nbackend: onnxruntime\n"}
    )
    add_model(repository, "half", affine(seed=4), version=2)
    failing, real = {2}, Loader.load

    def load(self: Loader, folder: Any, version: int, chosen: Any, is_lazy: bool, on_change: Any) -> Any:
        if folder.name == "half" and version in failing:
            raise RuntimeError("/secret/path")
        return real(self, folder, version, chosen, is_lazy, on_change)

    monkeypatch.setattr(Loader, "load", load)
    async with running(repository, names=frozenset({"m"})) as (reconciler, registry):
        with pytest.raises(ConfigError, match="half version 2"):
            await reconciler.load("half", None, {})
        assert same(await infer_values(registry, "half"), 4)
        assert index(registry)["half", "2"][0] == "UNAVAILABLE"
        with pytest.raises(Unavailable, match="cannot be served"):
            registry.lease("half", "2")
        failing.clear()
        await reconciler.load("half", None, {})
        assert list(registry.versions("half")) == ["1", "2"]


async def test_concurrent_loads_of_one_model_each_get_their_outcome(repository: Path) -> None:
    async with running(repository) as (reconciler, registry):
        put(repository, 2)
        outcomes = await asyncio.gather(
            *(reconciler.load("m", None, {}) for _ in range(5)),
            reconciler.load("m", '{"max_batch_sise": 1}', {}),
            reconciler.load("m", None, {}),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 5 + [ConfigError] + [type(None)]
        assert same(await infer_values(registry), 2)


async def test_an_unload_ends_the_loads_before_it_and_not_those_after_it(repository: Path) -> None:
    async with running(repository) as (reconciler, registry):
        put(repository, 2)
        *before, unloaded, after = await asyncio.gather(
            *(reconciler.load("m", None, {}) for _ in range(5)),
            reconciler.unload("m", False),
            reconciler.load("m", None, {}),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in before} <= {type(None), Aborted}
        assert isinstance(before[-1], Aborted), "it waited for the four before it"
        assert (unloaded, after) == (None, None)
        assert same(await infer_values(registry), 2)


async def test_too_many_queued_commands_are_refused_and_cancelled_callers_do_not_stop_the_work(
    repository: Path,
) -> None:
    async with running(repository) as (reconciler, registry):
        put(repository, 2)
        leaver = asyncio.ensure_future(reconciler.load("m", None, {}))
        await asyncio.sleep(0)
        leaver.cancel()
        outcomes = await asyncio.gather(
            *(reconciler.unload("other", False) for _ in range(200)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, HeadraceError)]
        assert 0 < len(refused) < 200
        assert all(outcome.reason == "overloaded" for outcome in refused)

        async def is_loaded() -> bool:
            return same(await infer_values(registry), 2)

        await until_async(is_loaded)  # the load whose caller left, on a thread of its own


async def test_a_request_in_flight_is_answered_before_its_version_ends(repository: Path) -> None:
    add_model(repository, "busy", busy())

    async with running(repository) as (reconciler, registry):
        handle = registry.lease("busy", "")
        request = InferRequest(inputs={"STEPS": np.array([20_000], np.int64)}, rows=1, shape_key=None, received_ns=0)
        waiting = handle.infer(request)
        await reconciler.unload("busy", False)
        assert index(registry)["busy", "1"][0] == "UNLOADING"
        with pytest.raises(Unavailable, match="is not loaded"):
            registry.lease("busy", "")
        await reconciler.load("busy", None, {})
        assert index(registry)["busy", "1"][0] == "READY", "wanted again while the old one drains"
        assert (await waiting).outputs["Y"].tolist() == [20_000]
        handle.release()
        await until_async(lambda: not any(thread.name.startswith("drain") for thread in threading.enumerate()))
        assert index(registry)["busy", "1"] == ("READY", "")


async def test_a_warm_up_that_the_model_refuses_fails_the_load(repository: Path) -> None:
    for name, dims, value in (("good", 1, 3), ("bad", 1, 9)):
        warmup = f"model_warmup: [{{name: w, count: 3, inputs: {{X: {{dims: [{dims}], input_data_file: x}}}}}}]\n"
        folder = add_model(repository, name, table_lookup(), files={"config.yaml": warmup})
        (folder / "warmup").mkdir()
        (folder / "warmup" / "x").write_bytes(np.array([value], np.int64).tobytes())

    async with running(repository, names=frozenset({"m"})) as (reconciler, registry):
        await reconciler.load("good", None, {})
        assert registry.statistics("good", "")[0]["execution_count"] == 0
        with pytest.raises(ConfigError, match="refused the values"):
            await reconciler.load("bad", None, {})
        assert index(registry)["bad", "1"][0] == "UNAVAILABLE"
