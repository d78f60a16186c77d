"""Counters with labels: exact under threads, declared before they are counted."""

from __future__ import annotations

from headrace.observability.labelled_counter import LabelledCounter

from tests.support.waiting import on_threads


def test_counts_of_many_threads_are_exact() -> None:
    counter = LabelledCounter("protocol", "reason")
    counter.declare("http", "never")

    def work(_: int) -> None:
        for _ in range(5000):
            counter.count("http", "too_large")
            counter.count("grpc", "too_large")

    on_threads(work, range(4))
    assert sorted(counter.items()) == [
        (("grpc", "too_large"), 20_000),
        (("http", "never"), 0),
        (("http", "too_large"), 20_000),
    ]


def test_declaring_again_forgets_nothing() -> None:
    counter = LabelledCounter("limit")
    counter.count("body")
    counter.declare("body")
    assert list(counter.items()) == [(("body",), 1)]
