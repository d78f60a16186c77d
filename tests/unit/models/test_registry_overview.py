"""Counts and gauges of the server's page: one refresh serves any number of viewers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import orjson
import pytest
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.errors import NotFound
from headrace.core.response_bodies import ProcessFigures, VersionStatus
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models import overview as overview_module
from headrace.models.overview import ServerOverview
from headrace.models.registry import Registry, Serving, State

from tests.support.fakes import infer_request
from tests.support.waiting import until
from tests.unit.inference.pipelines.test_run import turns
from tests.unit.inference.pipelines.test_run_branches import YamlCase
from tests.unit.models.test_registry import loop_with_handles


class Clock:
    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


class Slow(Registry):
    """A registry that takes time to read, as with many models."""

    def __init__(self, clock: Clock, time_ns: int) -> None:
        super().__init__()
        self.looks = 0
        self._clock, self._time_ns = clock, time_ns

    def ready(self) -> bool:
        self.looks += 1
        self._clock.now_ns += self._time_ns
        return super().ready()


def test_counts_and_gauges_of_serving_models() -> None:
    registry = Registry()
    registry.mark("broken", "1", State.LOADING)
    registry.mark("broken", "1", State.UNAVAILABLE, "no such file")
    with loop_with_handles() as (runner, make):
        model = make()
        registry.mark("m", "1", State.LOADING)
        registry.publish("m", Serving({"1": model}))

        async def infer(handle: ModelHandle) -> None:
            for rows in (1, 2):
                await handle.infer(infer_request(1.0, rows=rows, received_ns=monotonic_ns()))

        runner.run(infer(model))
        until(lambda: model.recorder.totals().requests >= 2)  # counted behind the answer
        clock = Clock()
        processes = [ProcessFigures("engine", 7, 1.5, 1 << 20, 2, 0, 0, True)]
        overview = ServerOverview(registry, [], clock, lambda: processes)
        clock.now_ns += 5
        document = orjson.loads(orjson.dumps(runner.run(overview.status())))
        assert (document["time_ns"], document["uptime_ns"], document["ready"]) == (1_005, 5, False)
        assert document["processes"] == [
            {
                "name": "engine",
                "pid": 7,
                "cpu_s": 1.5,
                "memory_bytes": 1 << 20,
                "starts": 2,
                "connections": 0,
                "moved": 0,
                "expected": True,
            }
        ]
        broken, serving = document["models"]
        assert broken == {
            "name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such file", "serving": None,
        }  # fmt: skip
        figures = serving["serving"]
        assert (figures["requests"], figures["rows"], figures["living"]) == (2, 3, 1)
        assert figures["sizes"] == {"1": 1, "2": 1}
        assert (figures["queued"], figures["wait_ns"], figures["late"]) == (0, 0, 0)
        assert sum(figures["batches"].values()) == 2
        assert sum(figures["latency"].values()) == 2
        per_doubling = document["buckets_per_doubling"]
        bounds_ns = sorted(1e9 * 2 ** (int(number) / per_doubling) for number in figures["latency"])
        assert bounds_ns[-1] >= figures["total_ns"] / 2
        assert bounds_ns[0] / 2 ** (1 / per_doubling) <= figures["total_ns"] / 2


async def test_a_pipeline_has_its_graph_with_the_figures_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        "detect": {"model": "detector", "inputs": {"X": "x"}, "outputs": {"Y": "found"}},
        "describe": {
            "model": "describer", "fallback": "simple", "when": "found.max > 0",
            "inputs": {"X": "found"}, "outputs": {"Y": "y"},
        },
    }  # fmt: skip
    case = YamlCase(steps)
    monkeypatch.setattr(overview_module, "monotonic_ns", lambda: case.now_ns)
    registry = Registry()
    registry.mark("p", "1", State.LOADING)
    registry.publish("p", Serving({"1": case.handle}))
    for value in (1, -1):
        waiting = case.send(value)
        case.now_ns += 2 * NS_PER_MS
        case.detector.answer(-1)
        await turns()
        case.now_ns += NS_PER_MS
        if value > 0:
            case.describer.answer()
        await waiting
    (model,) = orjson.loads(orjson.dumps(await ServerOverview(registry, []).status()))["models"]
    msgspec.convert(model, VersionStatus)  # the schema on /docs
    pipeline = model["serving"]["pipeline"]
    assert (pipeline["kind"], pipeline["inputs"], pipeline["outputs"]) == ("pipeline", ["x"], {"y": "y"})
    detect, describe = pipeline["steps"]
    assert {name: describe[name] for name in ("name", "model", "version", "builtin", "when", "each", "fallback")} == {
        "name": "describe", "model": "describer", "version": "1", "builtin": False, "when": "found.max > 0",
        "each": "", "fallback": "simple",
    }  # fmt: skip
    assert (describe["inputs"], describe["outputs"], describe["condition"]) == (
        {"X": "found"},
        {"Y": "y"},
        ["found"],
    )
    assert (detect["requests"], describe["requests"], describe["skipped"], describe["failures"]) == (2, 1, 1, 0)
    assert sum(detect["latency"].values()) == 2
    assert (detect["ready"], detect["queued"]) == (True, 2), "the fake has all its requests in the queue"
    assert pipeline["limiting"] == "detect"


@pytest.mark.parametrize(("look_ns", "fresh_ns"), [(0, 400_000_000), (100_000_000, 2_000_000_000)])
async def test_concurrent_callers_share_one_refresh_and_slow_refreshes_are_rare(look_ns: int, fresh_ns: int) -> None:
    clock = Clock()
    registry = Slow(clock, look_ns)
    overview = ServerOverview(registry, [], clock)
    start_ns = clock.now_ns
    first, *others = await asyncio.gather(*[overview.status() for _ in range(5)])
    assert all(other is first for other in others)
    clock.now_ns = start_ns + fresh_ns - 1
    assert await overview.status() is first
    assert registry.looks == 1
    clock.now_ns = start_ns + fresh_ns
    assert await overview.status() is not first
    assert registry.looks == 2


async def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    overview = ServerOverview(Registry(), [])
    leaving, staying = (asyncio.create_task(overview.status()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying)["models"] == []
    assert leaving.cancelled() or leaving.cancelling()


def test_layers_are_those_of_the_serving_engine(tmp_path: Path) -> None:
    registry = Registry()
    with loop_with_handles() as (runner, make):
        registry.mark("m", "1", State.LOADING)
        registry.publish("m", Serving({"1": make()}))
        overview = ServerOverview(registry, [tmp_path])

        def refused() -> str:
            report = runner.run(asyncio.wait_for(overview.layers("m", ""), 10))
            assert report["layers"] == []
            return str(report["reason"])

        with pytest.raises(NotFound, match="'other' is not found"):
            runner.run(asyncio.wait_for(overview.layers("other", ""), 10))
        assert "no layer times are published" in refused()
        (tmp_path / "m" / "1").mkdir(parents=True)
        assert "headrace inspect m --version 1 --publish" in refused()
        report = tmp_path / "m" / "1" / "layers.json"
        report.write_text("{}")
        assert "is not a layer report" in refused()
        document = {
            "format": 1, "model": "m", "version": 1, "artefact": "model.0123456789ab.onnx", "precision": "int8",
            "machine": {"target": "onnxruntime", "version": "1.31", "device": "cpu", "capability": "avx2", "driver": 0},
            "reason": "",
            "shapes": {"x": [1, 2]}, "rows": 1, "median_us": 3, "p99_us": 4, "rows_per_s": 5, "total_us": 6, "layers": [],
        }  # fmt: skip
        report.write_bytes(orjson.dumps(document))
        assert "are those of model.0123456789ab.onnx, which does not serve" in refused()
        layer = {
            "name": "a",
            "kind": "Conv",
            "nodes": ["n"],
            "precision": "fp32",
            "tactic": "",
            "time_us": 1.5,
            "share": 1,
        }
        report.write_bytes(orjson.dumps({**document, "artefact": "model.onnx", "layers": [layer]}))
        answer = runner.run(overview.layers("m", ""))
        assert answer["layers"] == (layer | {"nodes": ("n",)},)
        report.unlink()
        report.symlink_to("/etc/hostname")
        assert "is a link, which is not followed" in refused()
