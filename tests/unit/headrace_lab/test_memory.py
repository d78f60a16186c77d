"""`headrace lab memory`: strategies on a fake GPU, their bytes, failures, the table and the advice."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda import memory_pool
from headrace.runtimes.cuda.devices import Nvml
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, current
from headrace_engines.errors import BuildError, CallError
from headrace_lab.commands import memory as lab_memory
from headrace_lab.gpu_load import GpuLoad
from headrace_lab.memory import STRATEGIES, MemoryResult, measure_memory, memory_advice
from rich.console import Console

from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_streams import LateCuda

SIZES = (4096, 512)


@pytest.fixture(autouse=True)
def returned(cuda: LateCuda) -> Iterator[None]:
    yield
    assert not cuda.live
    assert cuda.depth == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("instances", [1, 3])
def test_every_strategy_serves_every_instance(strategy: str, instances: int, cuda: LateCuda) -> None:
    result = measure_memory(strategy, instances, SIZES, 0.001, Nvml())
    assert (result.strategy, result.instances, result.reason) == (strategy, instances, "")
    # Each instance runs at least three requests, however slow the machine is.
    assert result.requests >= 3 * instances
    assert result.requests_per_s > 0
    assert 0 < result.memory_us <= result.memory_p99_us <= result.p99_us


def test_only_slots_and_pool_hold_memory_between_requests(cuda: LateCuda) -> None:
    held = {name: measure_memory(name, 2, SIZES, 0.001, Nvml()) for name in STRATEGIES}
    assert held["allocation"].held_bytes == 0
    assert held["allocation"].peak_bytes == held["slots"].peak_bytes == held["slots"].held_bytes == 2 * sum(SIZES)
    assert held["pool"].held_bytes > 0


def test_the_pool_keeps_its_memory_only_for_the_measurement(cuda: LateCuda) -> None:
    cuda.pool_attributes[4] = 123
    with current():
        pool, stream = memory_pool.StreamMemoryPool(0), CudaStream()
        with pool.keeping_memory():
            assert cuda.pool_attributes[4] == 2**64 - 1
            address = pool.allocate(100, stream)
            assert pool.reserved_bytes == pool.peak_reserved_bytes == 100
            pool.free(address, stream)
            assert address in cuda.live, "it is freed in the order of the stream"
            stream.synchronize()
        assert (cuda.pool_attributes[4], pool.reserved_bytes) == (123, 0)
        del stream


def test_a_gpu_without_pools_has_a_reason(cuda: LateCuda) -> None:
    cuda.has_pools = False
    result = measure_memory("pool", 1, SIZES, 0.001, Nvml())
    assert "finding the memory pool of the GPU failed" in result.reason
    assert result.requests == 0


def test_a_failing_instance_ends_all_and_is_raised(cuda: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.room_bytes = 1000
    with pytest.raises(HeadraceError, match="allocating 4096 bytes"):
        measure_memory("allocation", 3, SIZES, 0.001, Nvml())


def test_wrong_bytes_are_an_error(cuda: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_lab.memory.copy_on_gpu", lambda *_: None)
    with pytest.raises(DeviceError, match="other bytes than it sent"):
        measure_memory("slots", 1, SIZES, 0.001, Nvml())


def called(*words: str) -> str:
    parser = argparse.ArgumentParser()
    lab_memory.add_arguments(parser)
    console = Console(file=io.StringIO(), width=160)
    assert lab_memory.run(parser.parse_args(list(words)), console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_command_prints_all_strategies_and_writes_json(cuda: LateCuda, tmp_path: Path) -> None:
    cuda.has_pools = False
    file = tmp_path / "memory.json"
    text = called("--instances", "2,1", "--seconds", "0.001", "--input-bytes", "64", "--json", str(file))
    assert "allocation per request" in text
    assert "preallocated slots" in text
    assert "stream-ordered pool, 1 instances: finding the memory pool" in text
    document = json.loads(file.read_text())
    assert [(row["instances"], row["strategy"]) for row in document["results"]] == [
        (number, name) for number in (1, 2) for name in STRATEGIES
    ]
    assert document["gpu"]["name"] == "Fake H1"
    assert document["smaller_inputs"]["instances"] == 1
    assert any(line.startswith("Precision: with 8-bit inputs") for line in document["advice"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--instances", "1,x"), "--instances is '1,x': write numbers from 1 to 1024"),
        (("--input-bytes", "0"), "--input-bytes and --output-bytes must be 1 or more"),
        (("--seconds", "0"), "--seconds is 0: write a number above 0"),
    ],
)
def test_wrong_options_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CallError) as raised:
        called(*words)
    assert message in str(raised.value)


def test_without_a_gpu_there_is_one_sentence(cuda: LateCuda) -> None:
    cuda.devices = 0
    with pytest.raises(BuildError, match="the cost of GPU memory cannot be measured: this machine has no NVIDIA GPU"):
        called()


def result(strategy: str, instances: int, rate: float, memory_us: float, **fields: Any) -> MemoryResult:
    return MemoryResult(strategy, instances, 10, rate, 100.0, 200.0, memory_us, 2 * memory_us, **fields)


def test_the_advice_names_costs_knee_and_lowered_clocks() -> None:
    slowed = GpuLoad(1.0, 3, slowed=("power limit",))
    results = [
        result("allocation", 1, 500, 61.5),
        result("slots", 1, 1000, 1.5),
        result("slots", 8, 4000, 2.0),
        result("slots", 64, 4100, 2.0, load=slowed),
    ]
    text = "\n".join(memory_advice(results))
    assert "1 instance: allocation costs 60.0 us more a request and reaches 50% of the requests of slots." in text
    assert "8 instances reach 98% of the best throughput with slots" in text
    assert "The clocks were lowered (power limit)" in text


@pytest.mark.parametrize(
    ("rate", "words"),
    [(1900, "1.90 times the requests: send pixels"), (1050, "1.05 times the requests: the copies are not the limit")],
)
def test_the_advice_on_precision_compares_smaller_inputs(rate: float, words: str) -> None:
    text = "\n".join(memory_advice([result("slots", 1, 1000, 1.5)], result("slots", 1, rate, 1.5)))
    assert f"1 instance of slots reaches {words}" in text


@pytest.mark.parametrize(("power_w", "is_idle"), [(150.0, True), (600.0, False)])
def test_the_advice_on_the_gpu_is_its_power(power_w: float, is_idle: bool) -> None:
    load = GpuLoad(1.0, 3, power_w=power_w, power_limit_w=700.0)
    text = "\n".join(memory_advice([result("slots", 1, 1000, 1.5, load=load)]))
    assert f"it draws {power_w:.0f} of 700 W" in text
    assert ("a smaller GPU would do" in text) is is_idle
