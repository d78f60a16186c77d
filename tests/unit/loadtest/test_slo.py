"""The figures of overload: what is counted, and that each part runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headrace.inference.simulation.replay import ANSWERED, BatchHistory, Replay
from headrace.inference.simulation.traces import Trace

from loadtest.slo import device, served
from loadtest.slo.__main__ import main
from loadtest.slo.device import CAPACITY_HZ, FIXED, Played, arrivals, by_the_clock, judged, simulated

MS = 1_000_000


def test_responses_between_warm_up_and_end_count() -> None:
    nothing = np.zeros(6, np.int64)
    times_ns = np.array([0, 900, 1200, 1400, 1600, 1998]) * MS
    trace = Trace(times_ns, nothing, nothing + 1, nothing, nothing, 2000 * MS, ("m",))
    outcomes = [ANSWERED, ANSWERED, ANSWERED, ANSWERED, "would_miss", ANSWERED]
    latency_ms = [1, 200, 10, 60, 0, 10]
    done = Replay(trace, [ms * MS for ms in latency_ms], outcomes, [BatchHistory()], end_ns=2008 * MS)
    outcome = judged(Played(done), slo_ms=50)
    assert outcome.throughput_hz == 3, "the first is answered in the warm-up, the last too late"
    assert outcome.goodput_hz == 1
    assert outcome.refused == 1 / 4, "of those that came after the warm-up"
    assert outcome.p50_ms == 10


@pytest.mark.slow
def test_both_methods_agree_at_low_load() -> None:
    trace = arrivals(0.05, 2.0, seed=1)
    real, virtual = (judged(way(trace, FIXED), 50) for way in (by_the_clock, simulated))
    assert real.throughput_hz == pytest.approx(virtual.throughput_hz, rel=0.1)
    assert 8.5 <= virtual.p50_ms <= real.p50_ms, "one row takes so long, and threads wake late"
    assert real.refused == virtual.refused == 0


def test_overload_without_an_objective_misses_every_deadline() -> None:
    result = device.measure(simulated, 1.5, rounds=1, seconds=3)
    assert result["fixed"][0].goodput_hz < 0.2 * CAPACITY_HZ < 0.9 * CAPACITY_HZ < result["slo"][0].goodput_hz


@pytest.mark.slow
def test_the_command_prints_a_verdict_and_fills_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served by a real server: one small objective, one load."""
    monkeypatch.setattr(served, "_BATCHES", (10.0,))
    monkeypatch.setattr(served, "_CALLERS", (1,))
    monkeypatch.setattr(served, "LOADS", (1.5,))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- slo-convolution:begin -->\nold\n<!-- slo-convolution:end -->\nb\n")
    words = ["--only", "convolution", "--rounds", "1", "--seconds", "1", "--markdown", str(page)]
    assert main(words) in (0, 1)
    assert "goodput / capacity" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("a\n")
    assert "old" not in text
    assert "| goodput / capacity, slo 10 batches, 1.5 x capacity |" in text
