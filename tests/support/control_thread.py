"""The control thread in explicit mode over real folders and real models, for tests of loading and unloading."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import Forbidden, Unavailable
from headrace.core.request import InferRequest
from headrace.models.builds import BUILDER
from headrace.models.control_policy import ControlPolicy, ModelSelection
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry

from tests.support.models import add_model, affine
from tests.support.waiting import until_async

EXPLICIT = ControlPolicy("explicit", allow_override=True)
X = np.ones((1, 16), np.float32)
Check = Callable[[Reconciler, Registry], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running(
    repository: Path,
    control: ControlPolicy = EXPLICIT,
    names: frozenset[str] | None = None,
    builder: Sequence[str] = BUILDER,
    **loading: Any,
) -> AsyncIterator[tuple[Reconciler, Registry]]:
    """Start the control thread, and stop it after the block; everything must have ended then.

    Args:
        repository: the models.
        control: who may load.
        names: the models wanted at start.
        builder: builds engines.
        loading: more for the `Loader`.
    """
    registry, loaded = Registry(), threading.Event()
    loader = Loader(
        Mailbox(asyncio.get_running_loop()),
        on_dead=lambda name, number, _: registry.update_health(name, number),
        on_first_use=registry.set_used,
        **loading,
    )
    selection = ModelSelection([repository], names)
    reconciler = Reconciler(selection, loader, registry, lambda _: loaded.set(), control, builder)
    reconciler.start()
    assert await asyncio.to_thread(loaded.wait, 50)
    try:
        yield reconciler, registry
    finally:
        assert await asyncio.to_thread(reconciler.stop, 10)
    with pytest.raises((Unavailable, Forbidden)):
        await reconciler.load("m", None, {})
    assert not [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("m/", "drain", "control", "builds", "load "))
    ]


def run(repository: Path, check: Check, *args: Any, **options: Any) -> None:
    """Check on an event loop beside a control thread, see `running`."""

    async def main() -> None:
        async with running(repository, *args, **options) as (reconciler, registry):
            await check(reconciler, registry)

    asyncio.run(asyncio.wait_for(main(), 60))


def index(registry: Registry) -> dict[tuple[str, str], tuple[str, str]]:
    return {(str(r["name"]), str(r["version"])): (str(r["state"]), str(r["reason"])) for r in registry.index()}


async def infer_values(registry: Registry, name: str = "m", version: str = "") -> list[float]:
    handle = registry.lease(name, version)
    try:
        request = InferRequest(inputs={"X": X}, rows=1, shape_key=(16,), received_ns=0)
        answer: list[float] = (await handle.infer(request)).outputs["Y"][0].tolist()  # type: ignore[assignment]
        return answer
    finally:
        handle.release()


def expected(seed: int) -> list[float]:
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in affine(seed=seed).graph.initializer}
    answer: list[float] = np.maximum(X @ weights["W"] + weights["B"], 0)[0].tolist()
    return answer


def same(answer: list[float], seed: int) -> bool:
    return bool(np.allclose(answer, expected(seed), rtol=1e-4))


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def at_rest(reconciler: Reconciler) -> None:
    """Wait until the control thread has run all commands; where it watches, until it has acted on every change too."""

    async def scans(count: int) -> None:
        for _ in range(count):
            before_ns = reconciler._next_scan_ns
            await until_async(lambda before_ns=before_ns: reconciler._next_scan_ns != before_ns)

    if reconciler._control.mode == "poll":
        await scans(2)  # the first may have begun before the change
        await until_async(lambda: not reconciler._watcher.is_changing)
        await scans(1)
    await until_async(lambda: reconciler._loads.is_empty)
    await reconciler._run_command(lambda: None)


def put(repository: Path, seed: int, version: int = 1, config: str = "") -> None:
    """Replace a version as a careful deployment does: a file beside, then renamed over the old one."""
    folder = add_model(repository.parent / "staging", "m", affine(seed=seed), version=version)
    (repository / "m" / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.onnx").rename(repository / "m" / str(version) / "model.onnx")
    if config:
        (repository / "m" / "config.yaml").write_text(config)
