"""The figures of promised latencies: what is counted, and that each part runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headrace.simulation.replay import ANSWERED, BatchHistory, Replay
from headrace.simulation.traces import Trace

from loadtest.slo import deep_queue, parts
from loadtest.slo.__main__ import main
from loadtest.slo.subject import (
    SLOWED_H200,
    USUAL,
    Done,
    LoadFigures,
    Setting,
    arrivals,
    by_the_clock,
    fixed,
    judged,
    promising,
    simulated,
)

MS = 1_000_000


def test_responses_between_warm_up_and_end_count() -> None:
    nothing = np.zeros(6, np.int64)
    times_ns = np.array([0, 900, 1200, 1400, 1600, 1998]) * MS
    trace = Trace(times_ns, nothing, nothing + 1, nothing, nothing, 2000 * MS, ("m",))
    outcomes = [ANSWERED, ANSWERED, ANSWERED, ANSWERED, "would_miss", ANSWERED]
    latency_ms = [1, 200, 10, 60, 0, 10]
    done = Replay(trace, [ms * MS for ms in latency_ms], outcomes, [BatchHistory()], end_ns=2008 * MS)
    outcome = judged(Done(done, fixed()), slo_ms=50)
    assert outcome.throughput_hz == 3, "the first is answered in the warm-up, the last too late"
    assert outcome.goodput_hz == 1
    assert outcome.refused == 1 / 4, "of those that came after the warm-up"
    assert outcome.p50_ms == 10


@pytest.mark.slow
def test_both_methods_agree_at_low_load() -> None:
    trace = arrivals(0.05, 2.0, seed=1)
    real, virtual = (judged(way(trace, fixed()), 50) for way in (by_the_clock, simulated))
    assert real.throughput_hz == pytest.approx(virtual.throughput_hz, rel=0.1)
    assert 8.5 <= virtual.p50_ms <= real.p50_ms, "one row takes so long, and threads wake late"
    assert real.refused == virtual.refused == 0


def test_a_quiet_client_sends_the_same_requests_with_and_without_a_flood() -> None:
    alone, beside = (parts.client_trace(SLOWED_H200, 2, 3, flooded) for flooded in (False, True))
    assert beside.clients is not None
    assert alone.times_ns.tolist() == beside.times_ns[beside.clients == 0].tolist()
    assert len(alone) / 2 == pytest.approx(parts.CALM * SLOWED_H200.capacity_hz, rel=0.1)
    assert len(beside) > 5 * len(alone)


def test_the_best_fixed_setting_meets_the_objective() -> None:
    def figures(p99_ms: float, throughput_hz: float, busy: float) -> LoadFigures:
        return LoadFigures(0, throughput_hz, 0, p99_ms, 0, 0, busy)

    sweep = {
        "quick": figures(20, 999, 1.0),
        "idle": figures(40, 1000, 0.8),
        "late": figures(60, 1005, 0.7),
        "slow": figures(9, 900, 0.5),
    }
    assert parts.best_of(sweep, 50) == ["quick", "idle"]
    assert parts.best_of(sweep, 10) == ["slow"]
    with pytest.raises(ValueError, match="within 5 ms"):
        parts.best_of(sweep, 5)


def test_overload_without_an_objective_misses_every_deadline() -> None:
    contenders = [("slo", promising(parts.SLO_MS)), ("fixed", fixed())]
    result = parts.measure_load(simulated, contenders, 1.5, parts.SLO_MS, rounds=1, seconds=3)
    assert (
        result["fixed"][0].goodput_hz < 0.2 * USUAL.capacity_hz < 0.9 * USUAL.capacity_hz < result["slo"][0].goodput_hz
    )


@pytest.mark.parametrize("name", list(deep_queue.CASES))
def test_a_deep_queue_stays_deep_while_it_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_queue, "WAITING", 200)
    assert all(0 < spent_us < 10_000 for spent_us in deep_queue.measure(deep_queue.CASES[name], stretches=2))


@pytest.mark.slow
def test_the_simulator_is_held_against_the_clock() -> None:
    load, shape, clients, setting = parts.SIMULATED["0.5 load"]
    real, virtual = parts.both(arrivals(load, 2.0, 1, shape, clients), setting, 100.0)
    assert 0 < virtual.p50_ms < 10 * real.p50_ms


@pytest.mark.slow
def test_the_command_prints_a_verdict_and_fills_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_queue, "WAITING", 100)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- slo-queue:begin -->\nold\n<!-- slo-queue:end -->\nb\n")
    assert main(["--only", "queue", "--rounds", "1", "--markdown", str(page)]) in (0, 1)
    assert "PASS" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("a\n")
    assert "old" not in text
    assert "| admission, one objective (us) |" in text


def test_settings_match_their_names() -> None:
    setting: Setting = fixed(16, 2.5)
    assert setting.name == "fixed, 16 rows, 2.5 ms"
    assert (setting.policy.batch.max_rows, setting.policy.batch.max_delay_ns, setting.policy.batch.objective_ns) == (
        16,
        2_500_000,
        0,
    )
    assert promising(25).policy.batch.objective_ns == 25 * MS
