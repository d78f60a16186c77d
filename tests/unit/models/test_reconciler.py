"""The control thread with real folders and real models: which models serve, and their memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.models.control_policy import ModelSelection
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry

from tests.support.models import add_model, affine, identity


@asynccontextmanager
async def loaded(*repositories: Path, names: frozenset[str] | None = None) -> AsyncIterator[Registry]:
    """Load the repositories, and close them after the block."""
    registry, done = Registry(), threading.Event()
    loader = Loader(Mailbox(asyncio.get_running_loop()))
    reconciler = Reconciler(ModelSelection(repositories, names), loader, registry, lambda error: done.set())
    reconciler.start()
    assert await asyncio.to_thread(done.wait, 20)
    try:
        yield registry
    finally:
        assert await asyncio.to_thread(reconciler.stop, 10)
    assert not registry.ready()


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


async def test_the_first_of_two_repositories_wins_a_name(tmp_path: Path) -> None:
    for repository, seed in (("a", 1), ("b", 2)):
        add_model(tmp_path / repository, "twin", affine(seed=seed))
        add_model(tmp_path / repository, f"only_{repository}", affine())

    async with loaded(tmp_path / "a", tmp_path / "b") as registry:
        assert set(states(registry)) == {("twin", "1"), ("only_a", "1"), ("only_b", "1")}


async def test_only_selected_models_are_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "wanted", affine())
    add_model(tmp_path, "other", affine())

    async with loaded(tmp_path, names=frozenset({"wanted", "ghost"})) as registry:
        assert states(registry) == {("wanted", "1"): "READY", ("ghost", ""): "UNAVAILABLE"}


async def test_an_unbatched_identity_shares_no_memory_with_its_request(tmp_path: Path) -> None:
    add_model(tmp_path, "same", identity("FP32", (2, 2)))

    async with loaded(tmp_path) as registry:
        x = np.ones((2, 2), np.float32)
        y = await infer_array(registry, "same", x, rows=1)
        x[:] = 7
        assert y.tolist() == [[1, 1], [1, 1]]
