"""Starts of Python models ahead of their load: taken once, never lost, never left open."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from headrace.repository.load_ahead import LoadAhead

from tests.support.waiting import until


class Model:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def finish(ahead: LoadAhead, name: str) -> None:
    """Wait until a job has ended."""
    until(lambda: name not in ahead._open)
    assert ahead.next_name([name], 0) == name


def test_a_start_in_a_job_is_taken_once() -> None:
    ahead = LoadAhead()
    models = {name: Model() for name in "abc"}
    ahead.begin({name: lambda name=name: ahead.record(name, lambda: models[name]) for name in models})  # type: ignore[misc]
    for name, model in models.items():
        finish(ahead, name)
        assert ahead.take(name, Model) is model
        assert ahead.take(name, Model) is not model
    ahead.close()
    assert not any(model.closed.is_set() for model in models.values())


def test_jobs_run_at_the_same_time_and_never_more_than_the_threads() -> None:
    ahead, lock = LoadAhead(threads=3), threading.Lock()
    together = threading.Barrier(3, timeout=10)
    running = [0, 0]

    def job() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        together.wait()
        with lock:
            running[0] -= 1

    ahead.begin({str(index): job for index in range(9)})
    for index in range(9):
        finish(ahead, str(index))
    assert running == [0, 3]


def test_a_job_that_hangs_delays_no_other_model() -> None:
    ahead, gate = LoadAhead(threads=2), threading.Event()
    ahead.begin({"hanging": gate.wait, "quick": lambda: None, "later": lambda: None})  # type: ignore[dict-item]
    names, order = ["hanging", "quick", "later", "without job"], list[str]()
    while len(order) < 3:
        name = ahead.next_name([name for name in names if name not in order], 10)
        if name is not None:
            order.append(name)
    assert sorted(order) == ["later", "quick", "without job"]
    assert ahead.next_name(["hanging"], 0.01) is None
    gate.set()
    finish(ahead, "hanging")


def test_a_start_that_fails_ahead_is_run_again_by_the_load() -> None:
    ahead, results = LoadAhead(), [ValueError("too early"), "loaded"]

    def start() -> Any:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    ahead.begin({"m": lambda: ahead.record("key", start)})
    finish(ahead, "m")
    assert ahead.take("key", start) == "loaded"


def test_results_that_no_load_has_taken_are_closed() -> None:
    ahead, early, late, gate = LoadAhead(), Model(), Model(), threading.Event()

    def slow() -> Model:
        gate.wait(10)
        return late

    ahead.begin({"early": lambda: ahead.record("early", lambda: early), "late": lambda: ahead.record("late", slow)})
    finish(ahead, "early")
    ahead.close()
    assert early.closed.is_set()
    gate.set()
    assert late.closed.wait(10)


def test_a_key_that_has_changed_is_started_again() -> None:
    ahead, stale = LoadAhead(), Model()
    ahead.begin({"m": lambda: ahead.record(("files", 1), lambda: stale)})  # type: ignore[dict-item, return-value]
    finish(ahead, "m")
    assert ahead.take(("files", 2), Model) is not stale
    ahead.close()
    assert stale.closed.is_set()


def test_without_threads_the_loads_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = LoadAhead()
    ahead.begin({"m": lambda: None, "n": lambda: None})
    assert ahead.next_name(["m", "n"], 10) == "m"
    assert ahead.take("m", lambda: 1) == 1
