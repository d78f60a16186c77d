"""The control thread with real folders and real models: what serves, what is set aside and why, how it all ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import BadRequest, NotFound, Unavailable
from headrace.core.request import InferRequest
from headrace.repository.loader import Loader
from headrace.repository.reconciler import ModelSelection, Reconciler
from headrace.repository.registry import Registry

from tests.support.models import add_model, affine, identity, transposed


@asynccontextmanager
async def loaded(
    *repositories: Path, names: frozenset[str] | None = None
) -> AsyncIterator[tuple[Registry, BaseException | None]]:
    """Load the repositories, and close them after the block; yields the error that loading as a whole ended with, too."""
    registry, done = Registry(), threading.Event()
    errors: list[BaseException | None] = []

    def on_loaded(error: BaseException | None) -> None:
        errors.append(error)
        done.set()

    loader = Loader(Mailbox(asyncio.get_running_loop()))
    reconciler = Reconciler(ModelSelection(repositories, names), loader, registry, on_loaded)
    reconciler.start()
    assert await asyncio.to_thread(done.wait, 20)
    try:
        yield registry, errors[0]
    finally:
        assert await asyncio.to_thread(reconciler.stop, 10)
    assert not registry.ready()


# A plan without its ONNX file: where no GPU is, nothing can serve it.
ELSEWHERE = """
backend: "tensorrt"
max_batch_size: 4
input [{ name: "X" data_type: TYPE_FP32 dims: [ 16 ] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""


def states(registry: Registry) -> dict[tuple[str, str], str]:
    return {(str(row["name"]), str(row["version"])): str(row["state"]) for row in registry.index()}


async def infer_array(
    registry: Registry, name: str, x: np.ndarray[Any, Any], version: str = "", rows: int = 0
) -> np.ndarray[Any, Any]:
    handle = registry.lease(name, version)
    try:
        request = InferRequest(inputs={"X": x}, rows=rows or len(x), shape_key=x.shape[1:], received_ns=0)
        return (await handle.infer(request)).outputs["Y"]
    finally:
        handle.release()


async def test_broken_models_are_set_aside_and_the_others_serve(tmp_path: Path) -> None:
    add_model(tmp_path, "good", affine())
    add_model(tmp_path, "garbage", b"this is no model")
    add_model(tmp_path, "misspelt", affine(), config="max_batch_sise: 4")
    (add_model(tmp_path, "elsewhere", affine(), config=ELSEWHERE) / "1" / "model.onnx").rename(
        tmp_path / "elsewhere" / "1" / "model.plan"
    )
    (tmp_path / "empty").mkdir()

    async with loaded(tmp_path) as (registry, error):
        assert error is None
        assert registry.ready()
        assert states(registry)["good", "1"] == "READY"
        assert {name for name, _, _ in registry.failures()} == {"garbage", "misspelt", "elsewhere"}
        assert "empty" not in registry.names(), "an empty folder is skipped, as on a volume"
        for name, hint in (("misspelt", "max_batch_sise"), ("garbage", r"model\.onnx"), ("elsewhere", "tensorrt")):
            with pytest.raises(Unavailable, match=hint):
                registry.lease(name, "")
        with pytest.raises(NotFound, match="nobody"):
            registry.lease("nobody", "")
        assert str(tmp_path) not in str(registry.index()), "no paths of this machine"
        assert (await infer_array(registry, "good", np.ones((2, 16), np.float32))).shape == (2, 4)


async def test_versions_and_labels(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        config = "labels: {stable: 2, canary: 10}\nversion_policy: {latest: {num_versions: 2}}\n"
        add_model(tmp_path, "many", affine(seed=version), version=version, files={"config.yaml": config})

    async with loaded(tmp_path) as (registry, _):
        assert list(registry.versions("many")) == ["2", "10"], "by number, not by text"
        x = np.ones((1, 16), np.float32)
        latest, stable = await infer_array(registry, "many", x), await infer_array(registry, "many", x, "stable")
        assert latest.tolist() == (await infer_array(registry, "many", x, "canary")).tolist()
        assert latest.tolist() == (await infer_array(registry, "many", x, "10")).tolist()
        assert stable.tolist() == (await infer_array(registry, "many", x, "2")).tolist()
        assert stable.tolist() != latest.tolist()
        for missing in ("1", "3", "nightly"):
            with pytest.raises(NotFound):
                registry.lease("many", missing)
        with pytest.raises(BadRequest):
            registry.lease("many", "../2")
        assert len(registry.statistics("many", "")) == 2
        assert len(registry.statistics("many", "stable")) == 1


async def test_the_first_of_two_repositories_wins_a_name(tmp_path: Path) -> None:
    for repository, seed in (("a", 1), ("b", 2)):
        add_model(tmp_path / repository, "twin", affine(seed=seed))
        add_model(tmp_path / repository, f"only_{repository}", affine())

    async with loaded(tmp_path / "a", tmp_path / "b") as (registry, _):
        assert set(states(registry)) == {("twin", "1"), ("only_a", "1"), ("only_b", "1")}


async def test_only_selected_models_are_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "wanted", affine())
    add_model(tmp_path, "other", affine())

    async with loaded(tmp_path, names=frozenset({"wanted", "ghost"})) as (registry, _):
        assert states(registry) == {("wanted", "1"): "READY", ("ghost", ""): "UNAVAILABLE"}


async def test_a_repository_that_is_no_folder_ends_the_loading(tmp_path: Path) -> None:
    async with loaded(tmp_path / "nowhere") as (registry, error):
        assert not registry.ready()

        assert "not a folder" in str(error)


async def test_reshape_stands_between_callers_and_model(tmp_path: Path) -> None:
    config = (
        "max_batch_size: 4\n"
        'input { name: "X" data_type: TYPE_FP32 dims: [6] reshape { shape: [2, 3] } }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: [6] reshape { shape: [3, 2] } }\n'
    )
    add_model(tmp_path, "flat", transposed(), config=config)

    async with loaded(tmp_path) as (registry, _):
        y = await infer_array(registry, "flat", np.arange(12, dtype=np.float32).reshape(2, 6))
        assert y.tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]


async def test_an_unbatched_identity_shares_no_memory_with_its_request(tmp_path: Path) -> None:
    add_model(tmp_path, "same", identity("FP32", (2, 2)))

    async with loaded(tmp_path) as (registry, _):
        x = np.ones((2, 2), np.float32)
        y = await infer_array(registry, "same", x, rows=1)
        x[:] = 7
        assert y.tolist() == [[1, 1], [1, 1]]
