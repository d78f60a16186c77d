from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headrace.inference.simulation.traces import ArrivalPattern, Trace, Workload, make_trace, read_trace


def made(load: Workload, models: int = 1, seed: int = 1) -> Trace:
    return make_trace(load, [f"m{number}" for number in range(models)], np.random.default_rng(seed))


def counts(trace: Trace, slices: int) -> np.ndarray:
    result, _ = np.histogram(trace.times_ns, slices, (0, trace.duration_ns))
    return result


@pytest.mark.parametrize("kind", ["poisson", "bursty", "diurnal"])
def test_the_mean_rate_is_the_requested_one(kind: str) -> None:
    trace = made(Workload(500, 400, ArrivalPattern(kind, burst_s=0.2, calm_s=0.8)))
    assert len(trace) / 400 == pytest.approx(500, rel=0.05)
    assert np.all(np.diff(trace.times_ns) >= 0)
    assert 0 <= trace.times_ns[0] <= trace.times_ns[-1] < trace.duration_ns


def test_only_bursts_are_burstier_than_poisson() -> None:
    even, bursty = (counts(made(Workload(1000, 200, ArrivalPattern(kind))), 2000) for kind in ("poisson", "bursty"))
    assert even.var() / even.mean() == pytest.approx(1, abs=0.15), "index of dispersion"
    assert bursty.var() / bursty.mean() > 20


def test_calm_and_bursts_have_their_rates_and_lengths() -> None:
    shape = ArrivalPattern("bursty", burst_factor=8, burst_s=1, calm_s=3)
    result = counts(made(Workload(1000, 800, shape)), 8000)
    calm_hz = 1000 / (1 + 0.25 * 7)
    assert np.median(result) == pytest.approx(calm_hz / 10, rel=0.1)
    assert (result > 2 * calm_hz / 10).mean() == pytest.approx(0.25, abs=0.05)
    assert np.percentile(result, 95) == pytest.approx(8 * calm_hz / 10, rel=0.15)


def test_a_day_swings_about_its_mean() -> None:
    result = counts(made(Workload(1000, 100, ArrivalPattern("diurnal", period_s=50, swing=0.5))), 20)
    assert result[:10].argmin() in (0, 9)
    assert result[:10].argmax() in (4, 5)
    assert result.max() / result.min() == pytest.approx(1.5 / 0.5, rel=0.15)


def test_skew_and_rows_follow_their_weights() -> None:
    trace = made(Workload(1000, 50, rows=((1, 3.0), (8, 1.0)), skew=1.0), models=4)
    counts = np.bincount(trace.models)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.1)
    assert (trace.rows == 8).mean() == pytest.approx(0.25, abs=0.02)
    assert set(trace.rows.tolist()) == {1, 8}


def test_a_recorded_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("seconds,model,rows,priority,timeout_ms\n12.5,b,2,1,30\n12.0,a,,,\n")
    trace = read_trace(file, ["a", "b"], timeout_ns=7)
    assert trace.times_ns.tolist() == [0, 500_000_000]
    assert trace.models.tolist() == [0, 1]
    assert trace.rows.tolist() == [1, 2]
    assert trace.priorities.tolist() == [0, 1]
    assert trace.timeouts_ns.tolist() == [7, 30_000_000]
    assert trace.duration_ns == 500_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows\n1\n", "the header has the columns"),
        ("seconds,colour\n1,red\n", "the header has the columns"),
        ("seconds\n", "has no request"),
        ("seconds\nsoon\n", "t.csv:2: "),
        ("seconds,rows\n1,1\n2,0\n", "t.csv:3: "),
        ("seconds\nnan\n", "t.csv:2: "),
        ("seconds,model\n1,c\n", "t.csv:2: unknown model 'c'"),
        ("seconds,rows\n1,1,1\n", "t.csv:2: "),
    ],
)
def test_invalid_traces_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(file, ["a", "b"])


def test_clients_follow_their_weights_and_change_nothing_else() -> None:
    alone, shared = (made(Workload(1000, 20, clients=clients)) for clients in ((), (("calm", 1.0), ("loud", 9.0))))
    assert alone.times_ns.tolist() == shared.times_ns.tolist()
    assert alone.clients is None
    assert shared.clients is not None
    assert (shared.clients == 1).mean() == pytest.approx(0.9, abs=0.02)
    assert {request.client for _, _, request in shared.requests()} == {"calm", "loud"}


def test_recorded_shapes_and_clients_become_those_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("seconds,shape,client\n2,3x4,b\n1,3x8,a\n3,3x4,\n")
    trace = read_trace(file, ["m"])
    first, second, third = (request for _, _, request in trace.requests())
    assert first.shape_key != second.shape_key == third.shape_key
    assert [first.client, second.client, third.client] == ["a", "b", ""]


def test_a_part_of_a_trace_has_unchanged_times() -> None:
    trace = made(Workload(100, 5, clients=(("a", 1.0), ("b", 1.0))))
    assert trace.clients is not None
    part = trace.of(trace.clients == 1)
    assert part.times_ns.tolist() == trace.times_ns[trace.clients == 1].tolist()
    assert {request.client for _, _, request in part.requests()} == {"b"}
    assert part.duration_ns == trace.duration_ns
