"""The bench of the data plane measures what it says, and stops on a wrong answer."""

from __future__ import annotations

import json

import pytest

from loadtest.bench import dataplane


def test_the_device_sets_the_pace_of_one_caller(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "single-500", "--seconds", "0.2", "--rounds", "1", "--json"]
    assert dataplane.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["single-500"]
    figures = result["single-500"]
    assert figures["rows"]["median"] == pytest.approx(1, rel=0.05), "one may be answered or run across either end"
    assert figures["p50_us"]["median"] >= 500
    assert figures["p99_us"]["median"] >= figures["p50_us"]["median"]
    assert 0 < figures["rate_per_s"]["median"] <= 2000


def test_many_callers_fill_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "full-43000", "--rows", "8", "--seconds", "0.2", "--rounds", "1"]
    assert dataplane.main(words) == 0
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "`full-43000`"
    assert float(row[2].replace(",", "")) > 0
    assert 1 < float(row[5]) <= 8
