"""The background worker: dropped items are counted, and callers never wait."""

from __future__ import annotations

import threading

import pytest
from headrace.core.errors import Unavailable
from headrace.observability.background import BackgroundWorker
from headrace.observability.labelled_counter import DROPPED

from tests.support.waiting import until

KIND = "test"


def dropped() -> int:
    return dict(DROPPED.items()).get((KIND,), 0)


def test_items_are_delivered_together_and_in_order() -> None:
    seen: list[list[int]] = []

    def work(items: list[int]) -> None:
        seen.append(items)

    background = BackgroundWorker("test-work", KIND, work)
    for number in range(100):
        background.put(number)
    assert background.close(60)
    assert [number for items in seen for number in items] == list(range(100))
    assert len(seen) < 100, "each was a wake-up"
    assert "test-work" not in {thread.name for thread in threading.enumerate()}


def test_the_thread_starts_with_the_worker() -> None:
    """Later, under an attack, the system may start no more threads."""
    background: BackgroundWorker[int] = BackgroundWorker("test-idle", KIND, lambda _: None)
    assert "test-idle" in {thread.name for thread in threading.enumerate()}
    assert background.close(60)
    assert "test-idle" not in {thread.name for thread in threading.enumerate()}


def test_a_thread_that_cannot_start_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unavailable, match=r"starts no thread for 'test-refused'.*ulimit -u"):
        BackgroundWorker("test-refused", KIND, lambda _: None)


def test_without_a_thread_items_are_dropped() -> None:
    before = dropped()
    background: BackgroundWorker[int] = BackgroundWorker("test-none", KIND, lambda _: None, start=False)
    background.put(1)
    assert dropped() - before == 1
    assert background.close(60)


def test_items_over_capacity_are_counted_and_do_not_block() -> None:
    release, seen, before = threading.Event(), list[int](), dropped()

    def slow(items: list[int]) -> None:
        assert release.wait(60)
        seen.extend(items)

    background = BackgroundWorker("test-slow", KIND, slow, capacity=10, gather_s=0)
    for number in range(100):
        background.put(number)
    assert not background.close(0.05)
    release.set()
    assert background.close(60)
    assert len(seen) + dropped() - before == 100
    assert 10 <= len(seen) < 100
    background.put(1)
    assert len(seen) + dropped() - before == 101


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError(28, "No space left on device"), "No space left"), (ZeroDivisionError(), "unexpected exception")],
)
def test_its_death_is_logged_and_ends_the_work(caplog: pytest.LogCaptureFixture, error: Exception, text: str) -> None:
    def dying(_: list[int]) -> None:
        raise error

    before = dropped()
    background = BackgroundWorker("test-dying", KIND, dying, gather_s=0)
    background.put(1)
    until(lambda: background.failed)
    background.put(2)
    until(lambda: dropped() - before == 2)
    assert background.close(60)
    assert text in caplog.text


def test_work_is_called_again_after_the_returned_delay() -> None:
    calls: list[int] = []

    def work(items: list[int]) -> float | None:
        calls.append(len(items))
        return 0.01 if len(calls) < 3 else None

    background = BackgroundWorker("test-again", KIND, work, gather_s=0)
    background.put(1)
    until(lambda: len(calls) == 3)
    assert calls == [1, 0, 0]
    assert background.close(60)
