"""Admission of batches to a child process, and the batches suspected of its death."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from headrace.core.errors import Unavailable
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.isolated import admission
from headrace.runtimes.isolated.admission import BatchAdmission
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(act())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def opened() -> BatchAdmission[str]:
    gate: BatchAdmission[str] = BatchAdmission()
    gate.open("first")
    return gate


def test_batches_wait_for_a_process_and_enter_the_next_one() -> None:
    gate: BatchAdmission[str] = BatchAdmission()
    assert gate.enter("a", wait=False) is None
    thread, result = in_thread(lambda: gate.enter("a", wait=True))
    gate.open("second")
    thread.join(60)
    assert result == ["second"]


def test_suspected_batches_run_alone_and_first() -> None:
    gate = opened()
    for name in "ab":
        gate.enter(name, wait=False)
    gate.shut("")
    assert gate.suspected("a")
    assert gate.suspected("b")
    gate.open("second")
    assert gate.enter("c", wait=False) is None, "while there are suspects"
    assert gate.enter("a", wait=False) == "second"
    assert gate.enter("b", wait=False) is None, "alone means alone"
    thread, result = in_thread(lambda: gate.enter("b", wait=True))
    gate.leave("a")
    thread.join(60)
    assert result == ["second"]
    thread, result = in_thread(lambda: gate.enter("c", wait=True))
    gate.leave("b")
    thread.join(60)
    assert result == ["second"]
    gate.leave("c")


def test_after_a_death_batches_enter_one_at_a_time_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_SOLO_BATCHES", 3)
    gate = opened()
    gate.enter("a", wait=False)
    gate.shut("")
    gate.open("second")
    for name in "bcd":
        assert gate.enter(name, wait=False) == "second"
        assert gate.enter("x", wait=False) is None
        gate.leave(name)
    assert [gate.enter(name, wait=False) for name in "efg"] == ["second"] * 3
    gate.leave("e")
    assert gate.enter("h", wait=False) == "second"


def test_a_suspect_waits_until_the_process_is_empty() -> None:
    gate = opened()
    for name in "ab":
        gate.enter(name, wait=False)
    gate.shut("")
    gate.open("second")
    gate.enter("a", wait=False)
    gate.leave("b")  # no batch needs it any more
    gate.leave("a")
    assert gate.enter("c", wait=False) == "second"


def test_refusals_end_with_the_next_process() -> None:
    gate = opened()
    thread, result = in_thread(lambda: (gate.shut("gone for long"), gate.enter("a", wait=True)))
    thread.join(60)
    assert isinstance(result[0], Unavailable)
    assert gate.refusal == "gone for long"
    with pytest.raises(Unavailable, match="gone for long"):
        gate.enter("a", wait=False)
    gate.open("second")
    assert gate.enter("a", wait=False) == "second"


def test_waiting_batches_get_refusals_and_the_shutdown() -> None:
    gate: BatchAdmission[str] = BatchAdmission()
    waiting = [in_thread(lambda name=name: gate.enter(name, wait=True)) for name in "ab"]  # type: ignore[misc]
    gate.shut("not soon")
    for thread, result in waiting:
        thread.join(60)
        assert isinstance(result[0], Unavailable)
    thread, result = in_thread(lambda: (gate.shut(""), gate.enter("c", wait=True)))
    gate.lose("never more")
    thread.join(60)
    assert isinstance(result[0], ExecutionLost)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "die"]), st.integers(0, 4)), max_size=60))
def test_only_one_suspect_is_ever_inside_and_none_with_others(steps: list[tuple[str, int]]) -> None:
    gate: BatchAdmission[int] = BatchAdmission()
    gate.open(0)
    careful = 0
    inside: set[int] = set()
    suspects: set[int] = set()
    for number, (step, batch) in enumerate(steps, 1):
        if step == "enter" and batch not in inside:
            may = not (inside & suspects) and not (inside and (careful or batch in suspects))
            may = may and (batch in suspects or not suspects)
            assert (gate.enter(batch, wait=False) is not None) == may
            if may:
                inside.add(batch)
        elif step == "leave":
            gate.leave(batch)
            careful -= bool(careful and batch in inside)
            inside.discard(batch)
            suspects.discard(batch)
        elif step == "die":
            assert gate.shut("") == len(inside)
            careful = admission._SOLO_BATCHES if inside else careful
            suspects = suspects | inside if len(inside) > 1 else suspects - inside
            inside = set()
            gate.open(number)
        assert {b for b in range(5) if gate.suspected(b)} == suspects
        assert len(inside) <= 1 or not inside & suspects
        assert len(inside) <= 1 or not careful
