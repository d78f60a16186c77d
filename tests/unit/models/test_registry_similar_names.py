"""Names for "did you mean": what is similar, and what a search costs."""

from __future__ import annotations

import time

import pytest
from headrace.models.registry import MAX_NAMES, SimilarNames

NAMES = SimilarNames(["resnet50", "resnet_50", "ResNet-152", "digits", "simple", "simple_int8", "ab"])


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("resnet5", ["resnet50", "resnet_50"]),
        ("resnet-50", ["resnet50", "resnet_50"]),
        ("resnet051", []),
        ("resnet152", ["ResNet-152"]),
        ("Digits", ["digits"]),
        ("digtis", ["digits"]),
        ("didgits", ["digits"]),
        ("digots", ["digits"]),
        ("simpel", ["simple"]),
        ("simple_int", ["simple_int8"]),
        ("wrong_model_name", []),
        ("a", []),
        ("", []),
        ("digits" * 20, []),
    ],
)
def test_similar(name: str, similar: list[str]) -> None:
    assert NAMES.find(name) == similar


def test_a_search_costs_the_same_among_many_long_names() -> None:
    many = SimilarNames(f"{'model_' * 9}{number:05d}" for number in range(5_000))
    assert many.find(f"{'model_' * 9}00001")
    assert not many.find(f"{'model_' * 9}{MAX_NAMES + 500:05d}x")
    started = time.process_time()
    for number in range(1_000):
        many.find(f"{'other_' * 9}{number:05d}")
    assert time.process_time() - started < 1.0, "a millisecond each"
