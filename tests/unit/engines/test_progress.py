"""Lines of progress for programs and logs."""

from __future__ import annotations

import io

import pytest
from headrace_engines.progress import log_lines, part, with_progress_lines
from headrace_engines.report import BuildDisplay
from rich.console import Console


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_part_covers_its_share() -> None:
    shares: list[float] = []
    report = part(lambda done, _: shares.append(done), 0.5, 0.7)
    for done in (-1.0, 0.0, 0.5, 1.0, 2.0):
        report(done, "")
    assert shares == pytest.approx([0.5, 0.5, 0.6, 0.7, 0.7])


def test_phases_that_alternate_are_printed_once_a_percent(capsys: pytest.CaptureFixture[str]) -> None:
    reported: list[str] = []
    clock = Clock()
    report = with_progress_lines(lambda _, note: reported.append(note), clock)
    for share in (0.101, 0.102, 0.103, 0.2):
        report(share, "measures")
        report(share, "compares")
    assert capsys.readouterr().out.splitlines() == [
        "progress 0.10 measures",
        "progress 0.10 compares",
        "progress 0.20 measures",
        "progress 0.20 compares",
    ]
    assert len(reported) == 8


def test_a_long_phase_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    report = with_progress_lines(lambda *_: None, clock)
    for _ in range(11):
        report(0.5, "measures")
        clock.now_s += 1.0
    assert capsys.readouterr().out.splitlines() == ["progress 0.50 measures"] * 3


def test_logs_have_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    report = log_lines("resnet18", stream, clock)
    for second in range(25):
        clock.now_s = 100.0 + second
        report(second / 100, f"step {second}")
    assert stream.getvalue().splitlines() == ["resnet18: 10%, step 10", "resnet18: 20%, step 20"]


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_display_without_a_terminal_logs(
    is_logged: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(log_lines, "__defaults__", (clock,))
    with BuildDisplay(Console(file=io.StringIO(), force_terminal=False), ["m"], is_logged=is_logged) as display:
        report = display.report("m")
        clock.now_s += 60
        report(0.5, "builds")
    assert capsys.readouterr().err == ("m: 50%, builds\n" if is_logged else "")
