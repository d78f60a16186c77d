"""The number of front ends by the processor time of the event loops."""

from __future__ import annotations

import os

import pytest
from headrace.core.clock import NS_PER_MS as MS
from headrace.core.clock import NS_PER_S
from headrace.server.front_ends.scaling import Scaling, loop_time_ns

NOW = 1000 * NS_PER_S


def decisions(scaling: Scaling, *looks: tuple[float, list[float], int], step_ns: int = 100 * MS) -> list[int]:
    """Return the numbers after looks at the share of the engine process, those of the front ends, and the busy connections."""
    return [
        scaling.decide(engine, front_ends, busy, NOW + number * step_ns)
        for number, (engine, front_ends, busy) in enumerate(looks)
    ]


def test_a_full_engine_process_gets_front_ends_after_two_looks() -> None:
    full = (0.95, [], 32)
    assert decisions(Scaling(4), full, full) == [0, 2]
    assert decisions(Scaling(4), full, (0.2, [], 32), full) == [0, 0, 0], "not in a row"
    assert decisions(Scaling(1), full, full) == [0, 1], "no more than it may have"


def test_an_interpreter_that_threads_of_gpus_fill_gets_front_ends() -> None:
    def last(engine: float, busy: int, all_threads: float) -> int:
        scaling = Scaling(4, has_gpus=True)
        return [scaling.decide(engine, [], busy, NOW + look * 100 * MS, all_threads) for look in range(2)][-1]

    assert last(0.5, 64, 1.2) == 2
    assert [last(0.3, 64, 1.2), last(0.5, 64, 0.8), last(0.5, 8, 1.2)] == [0, 0, 0]


def test_all_threads_of_the_engine_process_are_counted_with_gpus_only() -> None:
    pid = os.getpid()
    for has_gpus in (False, True):
        scaling = Scaling(4, has_gpus)
        scaling.wanted(pid, [], 32, NOW)
        assert (scaling._last_all_ns > 0) is has_gpus


@pytest.mark.parametrize("busy", [1, 3])
def test_few_busy_connections_stay_in_one_process(busy: int) -> None:
    assert decisions(Scaling(4), *[(1.0, [], busy)] * 5) == [0] * 5


def test_a_look_between_two_batches_is_no_end_of_a_crowd() -> None:
    assert decisions(Scaling(4), (0.9, [], 64), (0.9, [], 0)) == [0, 2]


def test_a_lone_caller_after_a_crowd_gets_one_process() -> None:
    lone, crowd = (0.5, [0.4, 0.0], 1), (0.5, [0.4, 0.0], 3)
    assert decisions(Scaling(4), crowd, *[lone] * 12, step_ns=NS_PER_S) == [2] * 11 + [0, 0]
    assert decisions(Scaling(4), *[crowd, lone] * 10, step_ns=NS_PER_S) == [2] * 20


def test_full_front_ends_double() -> None:
    assert decisions(Scaling(4), *[(0.5, [0.9, 0.8], 64)] * 2) == [2, 4]
    assert decisions(Scaling(3), *[(0.5, [0.9, 0.8], 64)] * 2) == [2, 3]
    assert decisions(Scaling(4), *[(0.9, [0.6, 0.5], 64)] * 2) == [2, 4], "half a core each is full"
    assert decisions(Scaling(4), *[(0.9, [0.7, 0.2], 64)] * 4) == [2] * 4, "one more core does not help"


def test_front_ends_end_after_ten_quiet_seconds() -> None:
    quiet, busy = (0.1, [0.1, 0.1], 8), (0.3, [0.2, 0.1], 8)
    assert decisions(Scaling(4), busy, *[quiet] * 11, step_ns=NS_PER_S) == [2] * 10 + [0, 0]
    assert decisions(Scaling(4), busy, *[quiet] * 9, busy, *[quiet] * 9, step_ns=NS_PER_S) == [2] * 20


def test_processes_that_have_just_started_are_not_judged() -> None:
    scaling = Scaling(4)
    pid = os.getpid()
    assert scaling.wanted(pid, [], 32, NOW) == 0, "nothing to compare with"
    scaling._last = {pid: 0}
    assert scaling.wanted(pid, [], 32, NOW + 1) == 0, "one full look"
    assert scaling.wanted(pid, [os.getppid()], 32, NOW + 2) == 1
    assert loop_time_ns(pid) > 0
    assert loop_time_ns(1 << 30) == 0
