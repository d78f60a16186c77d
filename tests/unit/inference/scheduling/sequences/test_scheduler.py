"""Threads of instances around the table: batches, idle time, pause, close and failure."""

from __future__ import annotations

import threading

import numpy as np
import orjson
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import Overloaded, QueueTimeout, Unavailable
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.policy import QueueLimits, SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.scheduler import SequenceScheduler

from tests.support.waiting import on_threads, until

HOUR_NS = 3600 * 10**9


class Instances:
    """A scheduler, and threads that answer its batches."""

    def __init__(self, idle_ns: int = HOUR_NS, slots: int = 2, count: int = 1) -> None:
        policy = SequencePolicy(slots=slots, is_direct=False, max_rows=8, idle_ns=idle_ns)
        self.scheduler = SequenceScheduler(policy, QueueLimits(max_count=50), on_ended=self._count)
        self.ended = 0
        self.run: list[int | str] = []
        self.threads = [threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(count)]

    def _count(self, count: int) -> None:
        self.ended += count

    def _serve(self, index: int) -> None:
        self.scheduler.open_instance(index)
        while (batch := self.scheduler.take_batch(index)) is not None:
            for entry in batch.entries:
                assert isinstance(entry, SequenceEntry)
                self.run.append(entry.correlation_id)
                entry.completion.settle(InferResponse({}))
            self.scheduler.finish_batch(index)
        self.scheduler.close_instance(index, "it ended")

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def send(self, correlation_id: int, start: bool = False, end: bool = False) -> ThreadCompletion:
        completion = ThreadCompletion()
        request = InferRequest(inputs={"x": np.zeros((1, 1))}, rows=1, shape_key=None, received_ns=0)
        entry = SequenceEntry(request, completion, 0, correlation_id, start, end)
        entry.remove = self.scheduler.discard
        completion.after = entry.on_settled
        self.entry = entry
        self.scheduler.enqueue([entry])
        return completion


def test_many_sequences_from_many_threads() -> None:
    instances = Instances(slots=3, count=2)
    instances.start()

    def client(number: int) -> None:
        for sequence in range(10):
            for step in range(5):
                completion = instances.send(100 * number + sequence, start=step == 0, end=step == 4)
                assert completion.wait(60)
                assert isinstance(completion.outcome, InferResponse)

    on_threads(client, range(8))
    until(lambda: instances.ended == 80)
    assert len(instances.run) == 400
    figures = instances.scheduler.figures()
    assert (figures.live, figures.slots, figures.used, figures.backlog) == (0, 6, 0, 0)
    assert {reason: count for reason, count in figures.ends.items() if count} == {"end": 80}
    assert not any(figures.refusals.values())
    orjson.dumps(figures)
    instances.scheduler.close()
    instances.join()


def test_a_sleeping_instance_ends_idle_sequences() -> None:
    instances = Instances(idle_ns=1000, slots=1)
    instances.start()
    for number in range(1, 4):
        assert instances.send(number, start=True).wait(60)
    until(lambda: instances.ended == 3)
    assert instances.scheduler.figures().ends["idle"] == 3
    assert not instances.scheduler.accepts(1)
    instances.scheduler.close()
    instances.join()


def test_a_timeout_in_the_queue_ends_the_sequence() -> None:
    instances = Instances()
    completion = instances.send(1, start=True)
    assert instances.scheduler.depth == instances.scheduler.waiting_rows == 1
    instances.scheduler.expire(instances.entry)
    assert isinstance(completion.outcome, QueueTimeout)
    assert (instances.ended, instances.scheduler.depth) == (1, 0)
    assert not instances.scheduler.accepts(1)


def test_close_serves_what_is_queued() -> None:
    instances = Instances()
    completions = [instances.send(1, start=True), instances.send(1)]
    instances.scheduler.close()
    with pytest.raises(Unavailable, match="being unloaded"):
        instances.send(2, start=True)
    instances.start()
    instances.join()
    assert all(isinstance(completion.outcome, InferResponse) for completion in completions)


def test_fail_returns_the_queued_requests_and_reopen_accepts_again() -> None:
    instances = Instances()
    instances.send(1, start=True)
    assert len(instances.scheduler.fail(Unavailable("all died"))) == 1
    with pytest.raises(Unavailable, match="all died"):
        instances.send(1, start=True)
    instances.scheduler.reopen()
    completion = instances.send(1, start=True)
    instances.start()
    assert completion.wait(60)
    instances.scheduler.close()
    instances.join()


def test_pause_ends_the_threads_and_keeps_the_queue() -> None:
    instances = Instances()
    instances.start()
    until(lambda: instances.scheduler.figures().slots == 2)
    instances.scheduler.pause()
    instances.join()
    completion = instances.send(1, start=True)
    instances.scheduler.resume()
    thread = threading.Thread(target=instances._serve, args=(0,), daemon=True)
    thread.start()
    assert completion.wait(60)
    instances.scheduler.close()
    thread.join(60)


def test_lost_state_refuses_what_is_queued() -> None:
    instances = Instances()
    instances.scheduler.open_instance(0)
    instances.send(1, start=True)
    assert isinstance(instances.scheduler.take_batch(0), Batch)
    instances.scheduler.finish_batch(0)
    queued = instances.send(1)
    instances.scheduler.lose_state(0, "it died")
    assert isinstance(queued.outcome, Unavailable)
    assert "it died" in str(queued.outcome)


def test_drop_and_drain() -> None:
    instances = Instances()
    instances.send(1, start=True)
    assert len(instances.scheduler.drop()) == 1
    assert instances.ended == 1
    instances.scheduler.drain_sequences()
    with pytest.raises(Unavailable, match="starts no sequences"):
        instances.send(2, start=True)


def test_a_full_queue_is_overload() -> None:
    instances = Instances()
    for number in range(1, 51):
        instances.send(number, start=True)
    with pytest.raises(Overloaded):
        instances.send(51, start=True)
    assert instances.scheduler.size_bytes == 0
    assert instances.scheduler.rows_ahead(0, 0, "") == instances.scheduler.waiting(0)[0] == 50
    assert instances.scheduler.locate(instances.entry)[0] == 50
