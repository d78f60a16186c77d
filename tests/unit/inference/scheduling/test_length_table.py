"""Compute times by rows and length."""

from __future__ import annotations

import pytest
from headrace.inference.scheduling.length_table import LengthTable

ROWS, LENGTHS = (1, 2, 4, 8), (8, 16, 32, 64)


def time_ns(rows: int, length: int) -> int:
    return 100_000 + 2_000 * rows * length


@pytest.fixture
def table() -> LengthTable:
    table = LengthTable()
    table.seed({(rows, length): time_ns(rows, length) for rows in ROWS for length in LENGTHS})
    return table


def test_an_empty_table_estimates_nothing() -> None:
    table = LengthTable()
    table.observe(1, 8, 1000)
    assert not table
    assert table.estimate_ns(1, 8) == 0


@pytest.mark.parametrize(("rows", "length"), [(1, 8), (3, 20), (6, 48), (8, 64), (5, 9), (7, 63)])
def test_times_between_the_measured_ones_are_close(table: LengthTable, rows: int, length: int) -> None:
    assert table.estimate_ns(rows, length) == pytest.approx(time_ns(rows, length), rel=0.06)


def test_times_beyond_the_measured_ones_grow_in_proportion(table: LengthTable) -> None:
    assert table.estimate_ns(16, 64) == pytest.approx(2 * table.estimate_ns(8, 64))
    assert table.estimate_ns(16, 128) == pytest.approx(4 * table.estimate_ns(8, 64))


def test_the_table_follows_new_times(table: LengthTable) -> None:
    for _ in range(400):
        for rows, length in ((1, 20), (3, 20), (6, 40)):
            table.observe(rows, length, 3 * time_ns(rows, length))
    for rows, length in ((1, 20), (3, 20), (6, 40)):
        assert table.estimate_ns(rows, length) == pytest.approx(3 * time_ns(rows, length), rel=0.1)


def test_a_disturbance_moves_an_estimate_by_little(table: LengthTable) -> None:
    before = table.estimate_ns(2, 16)
    table.observe(2, 16, 1000 * time_ns(2, 16))
    for _ in range(500):
        table.observe(8, 64, time_ns(8, 64))
    assert before < table.estimate_ns(2, 16) < 1.2 * before
