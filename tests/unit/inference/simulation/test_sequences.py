"""Sequences in virtual time: by hand, against queueing theory, and by the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.__main__ import main
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits, SequencePolicy
from headrace.inference.simulation.replay import LatencyProfile, SimulatedModel, StepLatency
from headrace.inference.simulation.report import sequence_report
from headrace.inference.simulation.sequences import SequenceLoad, SequenceReplay, replay_sequences

from tests.support.sequence_models import add_accumulator

MS = NS_PER_MS


def load(starts_ms: Sequence[float], requests: int = 1, think_ms: float = 0, timeout_ms: float = 0) -> SequenceLoad:
    starts_ns = np.array([round(start * MS) for start in starts_ms], np.int64)
    counts = np.full(len(starts_ns), requests, np.int64)
    return SequenceLoad(
        starts_ns, counts, round(think_ms * MS), 0.0, round(timeout_ms * MS), max(int(starts_ns[-1]), 100 * MS)
    )


def model(
    slots: int = 1,
    direct: bool = True,
    batch_us: float = 1000,
    row_us: float = 0,
    instances: int = 1,
    variation: float = 0,
    max_count: int = 4096,
    idle_ms: float = 1000,
) -> SimulatedModel:
    rules = SequencePolicy(slots=slots, is_direct=direct, max_rows=slots, idle_ns=round(idle_ms * MS))
    policy = HandlePolicy(BatchPolicy(slots), QueueLimits(max_count=max_count), instances, sequences=rules)
    return SimulatedModel(policy, LatencyProfile(StepLatency.line(batch_us, row_us), variation=variation))


def latencies_ms(replay: SequenceReplay) -> list[float]:
    return [latency / MS for latency in replay.latency_ns]


def test_a_sequence_waits_in_the_backlog_until_the_one_before_it_has_ended() -> None:
    replay = replay_sequences(load([0, 0], requests=3, think_ms=5), model())
    # 1 ms for each request and twice 5 ms between them.
    assert replay.backlog_ns.tolist() == [0, 13 * MS]
    assert latencies_ms(replay) == [1, 1, 1, 14, 1, 1]
    assert (replay.max_backlog, replay.ends["end"], replay.end_ns) == (1, 2, 26 * MS)
    assert replay.used_ns == 26 * MS


def test_a_batch_of_the_strategy_direct_has_the_rows_up_to_the_highest_slot() -> None:
    sequences = load([0, 0.1], requests=2, think_ms=10)
    direct = replay_sequences(sequences, model(slots=2, batch_us=0, row_us=1000))
    # The second sequence has slot 1: its batches have two rows, of which one has a request.
    assert latencies_ms(direct) == [1, 2.9, 1, 2]
    oldest = replay_sequences(sequences, model(slots=2, direct=False, batch_us=0, row_us=1000))
    assert latencies_ms(oldest) == [1, 1.9, 1, 1]


def test_a_full_queue_refuses_and_a_timeout_ends_sequences() -> None:
    refused = replay_sequences(load([0, 0, 0, 0]), model(max_count=2))
    assert refused.outcomes == ["", "", "", "overloaded"]
    timed_out = replay_sequences(load([0, 0], requests=3, think_ms=5, timeout_ms=4), model())
    assert timed_out.outcomes == ["", "queue_timeout"]
    assert timed_out.backlog_ns.tolist() == [0, -1]
    assert timed_out.ends["cancelled"] == 1


def test_a_client_that_thinks_longer_than_the_idle_time_loses_its_sequence() -> None:
    replay = replay_sequences(load([0], requests=2, think_ms=50), model(idle_ms=20))
    assert replay.outcomes == ["bad_request"]
    assert (replay.ends["idle"], replay.used_ns) == (1, 21 * MS)


def test_waits_are_those_of_erlang() -> None:
    """Sequences of one request on instances with one slot are an M/M/m queue."""
    servers, service_s, rate_hz = 3, 0.001, 2400.0
    generator = np.random.default_rng(1)
    starts_s = np.cumsum(generator.exponential(1 / rate_hz, 50_000))
    sequences = SequenceLoad(
        (starts_s * NS_PER_S).astype(np.int64),
        np.ones(len(starts_s), np.int64),
        0,
        0.0,
        0,
        int(starts_s[-1] * NS_PER_S),
    )
    replay = replay_sequences(sequences, model(instances=servers, variation=1), seed=2)
    offered = rate_hz * service_s
    last = offered**servers / factorial(servers) * servers / (servers - offered)
    waits = last / (sum(offered**count / factorial(count) for count in range(servers)) + last)
    report = sequence_report(replay, None)
    assert report.waited == pytest.approx(waits, rel=0.03)
    assert replay.backlog_ns.mean() / NS_PER_S == pytest.approx(waits * service_s / (servers - offered), rel=0.06)
    assert report.used == pytest.approx(offered / servers, rel=0.02)


def simulate(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["simulate", "--seconds", "5", "--requests-per-sequence", "10", "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_command_follows_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_accumulator(tmp_path, "sums", strategy="oldest { max_candidate_sequences: 6 }", count=2)
    options = ("--rate", "50", "--think-ms", "30", "--think-variation", "1", "--slo-ms", "50", "--warm-up", "1")
    document = simulate(capsys, str(tmp_path / "sums"), *options, "--compare", "slots=100")
    given, many = document["settings"]
    assert (given["slots"], many["slots"]) == (12, 200)
    assert given["sequences"] == given["completed"] == many["completed"]
    assert document["requests"] == 10 * document["sequences"]
    # 50 sequences/s with 9 pauses of 30 ms need more than 13 slots.
    assert given["slots_used"] > 0.95
    assert given["backlog_us"]["share"] > 0.8
    assert given["max_backlog"] > 10
    assert many["backlog_us"]["share"] == 0
    assert many["slots_used"] == pytest.approx(50 * 0.3 / 200, rel=0.2)
    assert given["goodput"] < many["goodput"]
    assert simulate(capsys, str(tmp_path / "sums"), *options, "--compare", "slots=100") == document


def test_the_command_prints_slots_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seconds", "2", "--requests-per-sequence", "1:1,9:1", "--slots", "16"]) == 0
    output = capsys.readouterr().out
    assert "slots used" in output
    assert "of 16" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sums"], "model 'sums' has sequence_batching: set --requests-per-sequence"),
        (["--requests-per-sequence", "3", "--models", "2"], "for one model without pipelines, not for 2"),
        (["--requests-per-sequence", "3", "--rows", "4"], "--rows has no effect"),
        (["--requests-per-sequence", "3", "--plot", "x.svg"], "--plot draws no sequences"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    add_accumulator(tmp_path, "sums")
    assert main(["simulate", "--model-repository", str(tmp_path), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
