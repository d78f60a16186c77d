"""Readiness checks of a model's code: one at a time, shared by all callers, closed with the process."""

from __future__ import annotations

from headrace.core.clock import NS_PER_MS
from headrace.python.process import ReadinessProbes


class Case:
    def __init__(self) -> None:
        self.now_ns = 0
        self.sent: list[int] = []
        self.is_gone = False
        self.probes = ReadinessProbes(self.send, lambda: self.now_ns)

    def send(self, number: int) -> None:
        if self.is_gone:
            raise BrokenPipeError
        self.sent.append(number)


def test_callers_share_a_check_and_a_fresh_answer() -> None:
    case = Case()
    first = case.probes.start()
    assert case.probes.start() is first
    case.probes.answered(1, True)
    assert first.answer.result(0)
    case.now_ns += 99 * NS_PER_MS
    assert case.probes.start() is first
    case.now_ns += 2 * NS_PER_MS
    second = case.probes.start()
    assert second is not first
    assert case.sent == [1, 2]
    case.probes.answered(2, False)
    assert not second.answer.result(0)


def test_an_answer_to_another_check_is_ignored() -> None:
    case = Case()
    probe = case.probes.start()
    case.probes.answered(7, True)
    case.probes.answered(None, True)
    assert not probe.answer.done()


def test_an_overdue_check_stays_open_and_is_not_repeated() -> None:
    case = Case()
    probe = case.probes.start()
    case.now_ns += 60_000 * NS_PER_MS
    assert case.probes.start() is probe
    assert probe.started_ns == 0
    assert case.sent == [1]


def test_a_dead_process_is_not_ready() -> None:
    case = Case()
    probe = case.probes.start()
    case.probes.close()
    assert not probe.answer.result(0)
    case.is_gone = True
    case.now_ns += 200 * NS_PER_MS
    assert not case.probes.start().answer.result(0)
