from __future__ import annotations

import pytest

from loadtest.bench.replayed import CASES, main


@pytest.mark.parametrize("case", ["half load", "0.8 load, overlapped", "1.5 load, 32 may wait"])
def test_a_trace_is_replayed_both_ways(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert case in CASES
    assert main(["--seconds", "0.3", "--rounds", "1", "--only", case]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if case in line]
    assert [cells[1] for cells in lines] == ["p50 ms", "p99 ms", "goodput/s", "rows a batch"]
    (_, _, real, simulated, _) = lines[-1]
    assert 1 < float(real) <= 16
    assert 1 < float(simulated) <= 16
