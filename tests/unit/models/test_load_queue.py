"""The queue of loads in virtual time: order, limit, loads that hang, loads that are dropped; and random runs of all of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from headrace.core.cancellation import Cancellation, current_cancellation
from headrace.core.clock import NS_PER_S
from headrace.core.errors import Conflict, HeadraceError, Unavailable
from headrace.models import load_queue
from headrace.models.load_queue import LoadQueue

from tests.support.waiting import until

DROPPED = Conflict("dropped")


class Loads:
    """A queue whose loads end when the test says so."""

    def __init__(self, threads: int = 2) -> None:
        self.now_ns = NS_PER_S
        self.queue = LoadQueue(threads, clock=lambda: self.now_ns)
        self.begun: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.gates: dict[str, threading.Event] = {}

    def add(self, name: str, key: str = "", *after: str) -> None:
        gate = self.gates[name] = threading.Event()

        def load() -> None:
            self.begun.append(name)
            with current_cancellation().calling(gate.set):
                gate.wait(20)
            current_cancellation().check()

        self.queue.add(key or name, load, lambda error: self.ended.append((name, type(error).__name__)), after)

    def finish(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: name in self.begun)  # type: ignore[misc]
            self.gates[name].set()
        until(lambda: {name for name, _ in self.ended} >= set(names))

    def close(self) -> None:
        self.queue.stop(Unavailable("stop"))
        assert self.queue.join(10)
        assert self.queue.is_empty


def test_a_queue_stops_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, joined = Loads(), []
    stopping = threading.Thread(target=lambda: (loads.queue.stop(DROPPED), joined.append(loads.queue.join(10))))

    class Slow(threading.Thread):
        def start(self) -> None:
            stopping.start()
            stopping.join(0.1)  # it waits for this start
            super().start()

    monkeypatch.setattr(load_queue.threading, "Thread", Slow)
    loads.add("a")
    monkeypatch.undo()
    stopping.join()
    assert joined == [True]
    assert loads.ended == [("a", "Conflict")]


def test_loads_run_side_by_side_up_to_the_limit() -> None:
    loads = Loads(threads=2)
    for name in "abc":
        loads.add(name)
    until(lambda: sorted(loads.begun) == ["a", "b"])
    assert loads.queue.has("c")
    assert not loads.queue.is_running("c")
    loads.finish("b")
    until(lambda: loads.begun[2:] == ["c"])
    loads.finish("a", "c")
    assert {result for _, result in loads.ended} == {"NoneType"}
    loads.close()


def test_loads_of_one_model_keep_their_order_and_pipelines_wait_for_their_models() -> None:
    loads = Loads(threads=9)
    loads.add("first", "m")
    loads.add("second", "m")
    loads.add("pipeline", "p", "m", "unknown")
    loads.add("other", "o")
    until(lambda: sorted(loads.begun) == ["first", "other"])
    loads.finish("first")
    until(lambda: "second" in loads.begun)
    assert "pipeline" not in loads.begun
    loads.finish("second", "pipeline", "other")
    assert loads.begun.index("pipeline") == 3
    loads.close()


def test_a_load_that_takes_long_leaves_its_place_to_another_one() -> None:
    loads = Loads(threads=1)
    loads.add("hanging")
    loads.add("next")
    until(lambda: loads.begun == ["hanging"])
    due_ns = loads.queue.next_start_ns()
    assert due_ns is not None
    loads.now_ns = due_ns - 1
    loads.queue.start_threads()
    assert loads.begun == ["hanging"]
    loads.now_ns = due_ns
    loads.queue.start_threads()
    loads.finish("next")
    assert loads.queue.next_start_ns() is None
    loads.close()
    assert loads.ended == [("next", "NoneType"), ("hanging", "Unavailable")]


def test_dropped_loads_fail_at_once_and_the_next_one_of_the_model_begins() -> None:
    loads = Loads(threads=9)
    loads.add("running", "m")
    loads.add("waiting", "m")
    loads.add("pipeline", "p", "m")
    until(lambda: loads.begun == ["running"])
    loads.queue.drop("m", DROPPED)
    assert loads.ended == [("running", "Conflict"), ("waiting", "Conflict")]
    loads.add("again", "m")
    loads.finish("pipeline", "again")
    assert "waiting" not in loads.begun
    loads.close()
    assert len(loads.ended) == 4, "each ends once"


def test_a_stopped_queue_refuses_loads() -> None:
    loads = Loads()
    loads.add("m")
    loads.close()
    loads.add("late")
    assert loads.ended == [("m", "Unavailable"), ("late", "Unavailable")]
    assert loads.queue.is_empty


def test_without_threads_the_caller_runs_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    loads, ended = LoadQueue(2), list[BaseException | None]()
    for key in ("a", "a", "b"):
        loads.add(key, lambda: None, ended.append)
    assert ended == [None] * 3
    assert loads.is_empty


def test_cancellation_ends_a_wait_also_one_that_begins_later() -> None:
    cancellation, called = Cancellation(), list[str]()
    with cancellation.calling(lambda: called.append("within")):
        cancellation.cancel(DROPPED)
        cancellation.cancel(Unavailable("second"))
    with cancellation.calling(lambda: called.append("later")):
        pass
    assert called == ["within", "later"]
    with pytest.raises(Conflict):
        cancellation.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_loads_and_drops_end_once_and_in_order(seed: int) -> None:
    rng, queue, lock = random.Random(seed), LoadQueue(3), threading.Lock()
    results: dict[int, list[BaseException | None]] = {}
    running: dict[str, int] = {}
    most, finished = [0], list[tuple[str, int]]()
    after_drop: dict[str, int] = {}

    def action(key: str, number: int, fails: bool) -> Callable[[], None]:
        def load() -> None:
            cancellation = current_cancellation()
            with lock:
                running[key] = running.get(key, 0) + 1
                most[0] = max(most[0], sum(running.values()))
            ended = threading.Event()
            with cancellation.calling(ended.set):
                ended.wait(rng.random() / 500)
            with lock:
                running[key] -= 1
                if cancellation.error is None:
                    finished.append((key, number))
            cancellation.check()
            if fails:
                raise HeadraceError("fails")

        return load

    keys = "abcdef"
    for number in range(150):
        key = rng.choice(keys)
        if rng.random() < 0.2:
            queue.drop(key, DROPPED)
            after_drop[key] = number
        else:
            results[number] = []
            queue.add(key, action(key, number, rng.random() < 0.2), results[number].append, rng.sample(keys, 2))
    until(lambda: queue.is_empty)
    assert all(len(result) == 1 for result in results.values()), "each load ends once"
    for key in keys:
        order = [number for each, number in finished if each == key]
        assert order == sorted(order), "loads of one model keep their order"
    queue.stop(DROPPED)
    assert queue.join(10)
