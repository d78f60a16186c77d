"""The soak's judge: every assertion can fail. And its models, ledger, plots and report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from loadtest.soak.judge import Bounds, Run, phase_p99s, verdicts
from loadtest.soak.ledger import Event, Ledger, Line, Outcome, times_between, total
from loadtest.soak.models import APART, MODELS, PICTURES, SLOW, STEADY, SWAPPED, Case, Repository
from loadtest.soak.operations import Operator
from loadtest.soak.report import picture, plots, to_html, to_json
from loadtest.soak.spoilers import grpc_calls, http_requests
from loadtest.soak.watch import Counted, Held, Quiet

PHASES, PHASE_S, HZ = 5, 10.0, 20
MIB = 1 << 20


def held(at_s: float, memory: int = 200 * MIB, descriptors: int = 40, threads: int = 29) -> Held:
    return Held(at_s, memory, descriptors, threads, 2, at_s / 10)


def quiet(number: int, in_flight: int = 0, **changed: int) -> Quiet:
    start_s = number * PHASE_S
    return Quiet(start_s, start_s + PHASE_S, held(start_s + PHASE_S + 1, **changed), in_flight, 0, {"socket": 3})


def answers(model: str, way: str = "HTTP", late_s: float = 0.010) -> Line:
    """20 a second, within 10 ms, later `late_s`."""
    line = Line(way, model)
    for number in range(int(PHASES * PHASE_S * HZ)):
        line.at_s.append(number / HZ)
        line.took_s.append(late_s if number / HZ > 3 * PHASE_S else 0.010)
        line.counts[Outcome.RIGHT] += 1
    return line


def good() -> Run:
    lines = [answers(model) for model in (STEADY, PICTURES, APART, SWAPPED)]
    lines[0].counts[Outcome.LEFT] = 7
    lines[1].counts[Outcome.REFUSED] = 7
    received = lines[0].counts[Outcome.RIGHT]
    events = [Event(phase * PHASE_S, step) for phase in range(PHASES) for step in Operator.STEPS]
    return Run(
        lines=lines,
        details=[],
        events=events,
        phases=[quiet(number) for number in range(PHASES)],
        samples=[held(number / 2) for number in range(100)],
        counted=Counted({STEADY: received + 3, PICTURES: received, APART: received}, PHASES),
        tracebacks=[],
    )


def failed(run: Run) -> list[str]:
    return [verdict.name for verdict in verdicts(run, Bounds()) if not verdict.passed]


def counting(run: Run, outcome: Outcome, count: int = 1) -> Run:
    run.lines[0].counts[outcome] += count
    return run


def last_phase(run: Run, **changed: int) -> Run:
    return replace(run, phases=[*run.phases[:-1], quiet(PHASES - 1, **changed)])


def answered(run: Run, model: str, more: int) -> Run:
    by_model = run.counted.answered | {model: run.counted.answered[model] + more}
    return replace(run, counted=replace(run.counted, answered=by_model))


def test_a_good_run_passes() -> None:
    assert failed(good()) == []


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda run: counting(run, Outcome.LOST), "nothing lost"),
        (lambda run: counting(run, Outcome.FAILED), "nothing wrong"),
        (lambda run: counting(run, Outcome.STRUCK, 41), "nothing wrong"),
        (lambda run: answered(run, STEADY, 5), "the server's own count agrees"),
        (lambda run: answered(run, STEADY, -4), "the server's own count agrees"),
        (lambda run: answered(run, APART, 1), "the server's own count agrees"),
        (lambda run: last_phase(run, in_flight=1), "nothing left behind"),
        (lambda run: last_phase(run, memory=225 * MIB), "memory flat"),
        (lambda run: last_phase(run, descriptors=43), "descriptors flat"),
        (lambda run: last_phase(run, threads=32), "threads flat"),
        (lambda run: replace(run, lines=[*run.lines[:3], answers(SWAPPED, late_s=0.030)]), "p99 stable"),
        (lambda run: replace(run, events=run.events[:-1]), "disturbed enough"),
        (lambda run: replace(run, counted=replace(run.counted, restarts=PHASES - 1)), "disturbed enough"),
        (lambda run: replace(run, tracebacks=["Traceback (most recent call last):"]), "the log expects everything"),
    ],
)
def test_violated_bounds_fail(spoil: Callable[[Run], Run], name: str) -> None:
    assert failed(spoil(good())) == [name]


def test_a_wrong_answer_is_wrong_and_received() -> None:
    assert failed(answered(counting(good(), Outcome.WRONG), STEADY, 1)) == ["nothing wrong"]


def test_an_empty_run_fails_every_check() -> None:
    nothing = Run([], [], [], [], [], Counted({}, 0), [])
    assert set(failed(nothing)) == {verdict.name for verdict in verdicts(nothing, Bounds())} - {
        "the log expects everything"
    }


def test_a_leak_is_named_by_its_kind() -> None:
    run = good()
    leaking = replace(run.phases[-1], held=held(60.0, descriptors=50), open_files={"socket": 13})
    results = verdicts(replace(run, phases=[*run.phases[:-1], leaking]), Bounds())
    assert "socket 3 -> 13" in next(verdict.found for verdict in results if verdict.name == "descriptors flat")


def test_p99s_are_of_undisturbed_models_alone() -> None:
    run = good()
    slow = [answers(APART, late_s=9.0), answers(STEADY, way="HTTP, deadline", late_s=9.0)]
    assert phase_p99s(replace(run, lines=[*run.lines, *slow])) == pytest.approx([0.010] * PHASES)


def test_the_ledger_records_every_outcome() -> None:
    ledger = Ledger()
    ledger.note("HTTP", STEADY, Outcome.RIGHT, 0.25)
    ledger.note("HTTP", STEADY, Outcome.LOST, 0.0, "broken")
    ledger.note("gRPC", SLOW, Outcome.LEFT)
    assert total(ledger.lines, *Outcome) == 3
    assert total(ledger.lines, Outcome.RIGHT, Outcome.LOST, model=STEADY) == 2
    assert times_between(ledger.lines, 0, float("inf")).tolist() == [0.25]
    assert ledger.details == ["HTTP, steady, lost: broken"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("soak") / "models")


@pytest.mark.parametrize("model", MODELS)
def test_no_answer_passes_for_that_of_another_request(repository: Repository, model: str) -> None:
    for one, other in combinations(repository.cases[model], 2):
        for answer in other.accepted:
            assert one.wrong_with({"Y": answer})


def test_an_answer_is_looked_at_in_every_value(repository: Repository) -> None:
    for case in (cases[0] for cases in repository.cases.values()):
        answer = np.array(case.accepted[0])
        assert not case.wrong_with({"Y": answer})
        assert case.wrong_with({"Z": answer})
        answer.flat[-1] += 0.01 * (1 + abs(answer.flat[-1]))
        assert case.wrong_with({"Y": answer})


def test_exchanged_weights_change_the_responses(repository: Repository) -> None:
    first, second = repository.swap(1), repository.swap(2)
    assert isinstance(first, Case)
    assert first.wrong_with({"Y": second.accepted[0]})
    assert len(repository.cases[SWAPPED][0].accepted) == 2


def test_bad_requests_are_distinguished() -> None:
    for bad in (http_requests(), grpc_calls()):
        assert len({request.name for request in bad}) == len(bad) > 5


def test_the_report_shows_everything(tmp_path: Path) -> None:
    run = replace(counting(good(), Outcome.LOST), details=["HTTP, <steady>, lost: no answer"])
    result = verdicts(run, Bounds())
    page = to_html(run, result, "Headrace: soak", ["a machine"])
    assert page.count('<b class="fail">FAIL</b>') == 1
    assert "&lt;steady&gt;" in page
    assert len(plots(run)) == page.count("<svg") == 7
    for event in run.events:
        assert f">{event.name}</text>" in page
    ElementTree.fromstring(picture(run, "a <soak>"))
    whole = json.loads(to_json(run, result, ["a machine"]))
    assert not whole["passed"]
    assert len(whole["phases"]) == PHASES
