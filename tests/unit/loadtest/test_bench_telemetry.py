"""The bench of traces and the request log runs, and finds each dearer than nothing."""

from __future__ import annotations

import pytest

from loadtest.bench import telemetry


def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[float] = []

    def once(work: object, _: int) -> float:
        assert callable(work)
        work()
        measured.append(1.5)
        return 1.5

    monkeypatch.setattr(telemetry, "cpu_us", once)
    telemetry.main()
    out = capsys.readouterr().out
    assert len(measured) == 9
    assert out.count("| 1.50 |") == 7
    assert "the spans of a request" in out


def test_work_uses_processor_time() -> None:
    assert telemetry.cpu_us(lambda: sum(range(1000)), 20) > telemetry.cpu_us(lambda: None, 20) > 0
