from __future__ import annotations

import threading

from headrace.observability.counters import LabelledCounter


def test_counts_of_many_threads_are_exact() -> None:
    tally = LabelledCounter("protocol", "reason")
    tally.declare("http", "never")

    def work() -> None:
        for _ in range(5000):
            tally.count("http", "too_large")
            tally.count("grpc", "too_large")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.items() == [(("grpc", "too_large"), 20_000), (("http", "never"), 0), (("http", "too_large"), 20_000)]


def test_declaring_again_forgets_nothing() -> None:
    tally = LabelledCounter("limit")
    tally.count("body")
    tally.declare("body")
    assert tally.items() == [(("body",), 1)]
