"""Loads side by side on the control thread: random commands with failures and delays, memory, measurements, versions at once."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from headrace.core.cancellation import current_cancellation
from headrace.core.errors import Aborted, ConfigError, NotFound, Overloaded, Unavailable
from headrace.core.ledger import CPU, Kind, NoRoom
from headrace.models import accounted_model
from headrace.models.command_queue import MAX_WAITING_COMMANDS
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.loader import Loader
from headrace.models.measuring import MeasuringTurns
from headrace.models.registry import Registry
from headrace.runtimes.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeModel

from tests.support.control_thread import index, infer_values, running, same
from tests.support.models import add_model, affine
from tests.support.waiting import until, until_async


def pause(seconds: float) -> None:
    """Stand for a slow step of a load, which a cancellation ends."""
    ended = threading.Event()
    with current_cancellation().calling(ended.set):
        ended.wait(seconds)


@pytest.mark.parametrize("seed", range(4))
async def test_random_commands_end_in_the_last_request_of_each_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, real, models = random.Random(seed), Loader.load, GpuModelCache()
    names = "abcde"
    for number, name in enumerate(names):
        add_model(tmp_path, name, affine(seed=number))

    def load(self: Loader, folder: Any, version: int, chosen: Any, is_lazy: bool, on_change: Any) -> Any:
        pause(rng.random() / 50)
        if rng.random() < 0.2:
            raise RuntimeError("random failure")
        return real(self, folder, version, chosen, is_lazy, on_change)

    monkeypatch.setattr(Loader, "load", load)
    async with running(tmp_path, names=frozenset("ab"), gpu_model_cache=models) as (reconciler, registry):
        last: dict[str, tuple[str, asyncio.Task[None]]] = {}
        tasks = []
        for _ in range(60):
            name = rng.choice(names)
            (tmp_path / name / "config.yaml").write_text(
                f"max_batch_size: {rng.randint(1, 9)}\n"
            )  # so that it is loaded
            action = "unload" if rng.random() < 0.4 else "load"
            command = reconciler.unload(name, False) if action == "unload" else reconciler.load(name, None, {})
            last[name] = action, asyncio.ensure_future(command)
            tasks.append(last[name][1])
            await asyncio.sleep(rng.choice((0, 0, 0.01)))
            assert {state for state, _ in index(registry).values()} <= {"READY", "LOADING", "UNAVAILABLE", "UNLOADING"}
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in outcomes} <= {type(None), ConfigError, Aborted}, outcomes
        await until_async(lambda: reconciler._loads.is_empty)
        await until_async(lambda: "UNLOADING" not in {state for state, _ in index(registry).values()})
        states = index(registry)
        for number, name in enumerate(names):
            rows = [value for (model, _), value in states.items() if model == name]
            assert len(rows) == 1, states
            is_serving = registry.serving(name, "") is not None
            assert (rows[0][0] == "READY") is is_serving
            if name in last and last[name][0] == "unload":
                # Not loaded: each of its loads was ended before it had begun.
                reasons = ("unloaded",) if name in "ab" else ("unloaded", "not loaded")
                assert rows in [[("UNAVAILABLE", reason)] for reason in reasons]
            elif name in last and last[name][1].exception() is None:
                assert same(await infer_values(registry, name), number)
                assert rows == [("READY", "")]
        for name in names:
            await reconciler.unload(name, False)
        await until_async(lambda: models.loads() == [])
        assert models.ledger.holdings() == []


async def test_an_unload_ends_the_loads_that_fill_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that hang take all places: the unload that would end them was refused."""
    for seed, name in enumerate(("hangs", "waits", "other")):
        add_model(tmp_path, name, affine(seed=seed))
    real = Loader.load

    def load(self: Loader, folder: Any, version: int, chosen: Any, is_lazy: bool, on_change: Any) -> Any:
        if folder.name != "other":
            pause(60)
        return real(self, folder, version, chosen, is_lazy, on_change)

    monkeypatch.setattr(Loader, "load", load)
    async with running(tmp_path, control=ControlPolicy("explicit", load_threads=1), names=frozenset({"other"})) as (
        reconciler,
        registry,
    ):
        await until_async(lambda: not reconciler.loader.commands.waiting)  # those of the start
        commands = [
            asyncio.ensure_future(reconciler.load(name, None, {}))
            for name in ("hangs", "waits")
            for _ in range(MAX_WAITING_COMMANDS // 2)
        ]
        await until_async(lambda: reconciler.loader.commands.waiting == MAX_WAITING_COMMANDS)
        for command in (reconciler.load("other", None, {}), reconciler.unload("other", False)):
            with pytest.raises(Overloaded, match="64 loads and unloads are queued"):
                await command
        for name in ("waits", "hangs"):
            await reconciler.unload(name, False)
        outcomes = await asyncio.gather(*commands, return_exceptions=True)
        assert {type(each) for each in outcomes} == {Aborted}
        await reconciler.load("other", None, {})
        assert same(await infer_values(registry, "other"), 2)


async def test_versions_are_loading_until_all_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), Loader.load
    for version in (1, 2):
        add_model(tmp_path, "m", affine(), version=version, files={"config.yaml": "version_policy: {all: {}}\n"})

    def load(self: Loader, folder: Any, version: int, chosen: Any, is_lazy: bool, on_change: Any) -> Any:
        assert gate.wait(20)
        return real(self, folder, version, chosen, is_lazy, on_change)

    monkeypatch.setattr(Loader, "load", load)
    async with running(tmp_path, names=frozenset()) as (reconciler, registry):
        task = asyncio.ensure_future(reconciler.load("m", None, {}))
        await until_async(lambda: ("m", "1") in index(registry))
        assert index(registry) == dict.fromkeys([("m", "1"), ("m", "2")], ("LOADING", ""))
        for version in ("", "1", "2"):
            with pytest.raises(Unavailable, match="is being loaded"):
                registry.lease("m", version)
        gate.set()
        await task
        assert {state for state, _ in index(registry).values()} == {"READY"}


def test_a_model_in_place_of_its_versions_is_never_unknown() -> None:
    registry = Registry()
    registry.mark_waiting("m", "", is_serving=False)
    seen, stop = list[Exception](), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                registry.lease("m", "")
            except Unavailable:
                continue
            except NotFound as error:
                seen.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(300):
        registry.mark_loading("m", ["1", "2"])
        registry.mark_waiting("m", "", is_serving=False)
    stop.set()
    thread.join()
    assert not seen


async def test_loads_side_by_side_stay_within_the_memory_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models with room for one: both are served in the end, and never are both in memory."""
    for seed, name in enumerate("abcd"):
        add_model(tmp_path, name, affine(seed=seed))
    size = accounted_model._SESSION_BYTES + (tmp_path / "a" / "1" / "model.onnx").stat().st_size
    models, real, held = GpuModelCache(), OnnxRuntimeBackend.load, list[int]()
    models.ledger.set_limit(CPU, size)
    monkeypatch.setattr(accounted_model, "heap_bytes", lambda: None)

    def load(self: OnnxRuntimeBackend, file: Path, instances: int, parameters: dict[str, str]) -> OnnxRuntimeModel:
        held.append(models.ledger.reserved_bytes(CPU))
        pause(0.02)
        return real(self, file, instances, parameters)

    monkeypatch.setattr(OnnxRuntimeBackend, "load", load)
    async with running(tmp_path, names=frozenset(), gpu_model_cache=models) as (reconciler, registry):
        await asyncio.gather(*(reconciler.load(name, None, {}) for name in "abcd"))
        answers = await asyncio.gather(*(infer_values(registry, name) for name in "abcd"))
        assert all(same(answer, seed) for seed, answer in enumerate(answers))
        assert set(held) == {size}
    assert models.ledger.reserved_bytes(CPU) == 0


def test_a_load_that_lacks_memory_waits_for_loads_that_run() -> None:
    models, gate, begun, results = GpuModelCache(), threading.Event(), threading.Event(), dict[str, str]()
    models.ledger.set_limit(0, 10)

    def run(name: str, is_held: bool) -> None:
        def load() -> str:
            account = models.ledger.account(name, "1")
            try:
                account.reservation(0, Kind.WEIGHTS, 8)
                begun.set()
                assert not is_held or gate.wait(20)
                return "loaded"
            finally:  # a load that fails releases its memory, so the other one fits
                account.close()

        results[name] = models.load(load, f"{name}/1")

    first = threading.Thread(target=run, args=("first", True))
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=run, args=("second", False))
    second.start()
    until(lambda: models._short_of_memory.locked())
    assert not results
    gate.set()
    first.join(20)
    second.join(20)
    assert results == {"first": "loaded", "second": "loaded"}
    with pytest.raises(NoRoom):
        models.load(lambda: models.ledger.account("large", "1").reservation(0, Kind.WEIGHTS, 11), "large/1")


def test_measurements_take_turns_and_are_quiet_alone() -> None:
    turns, inside = MeasuringTurns(), list[int]()
    quiet = list[bool]()

    def measure() -> None:
        with turns.measuring() as measurement:
            inside.append(1)
            assert len(inside) == 1
            inside.pop()
        quiet.append(measurement.is_quiet)

    threads = [threading.Thread(target=measure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert quiet == [True] * 8


def test_a_measurement_does_not_wait_for_a_load_that_takes_long_and_is_not_quiet() -> None:
    now_ns = 0
    turns = MeasuringTurns(lambda: now_ns)
    with turns.working():
        now_ns = 2 * 10**9
        with turns.measuring() as measurement:
            pass
    assert not measurement.is_quiet


def test_a_measurement_waits_for_a_load_that_has_just_begun() -> None:
    turns, order = MeasuringTurns(), list[str]()

    def measure() -> None:
        with turns.measuring() as measurement:
            order.append("measured")
        order.append(str(measurement.is_quiet))

    thread = threading.Thread(target=measure)
    with turns.working():
        thread.start()
        until(lambda: turns._waiting == 1)
        order.append("loaded")
    thread.join(20)
    assert order == ["loaded", "measured", "True"]
