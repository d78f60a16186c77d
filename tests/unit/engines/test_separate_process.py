"""Calls in a process of their own: results, errors, progress, death."""

from __future__ import annotations

import os
import signal
from multiprocessing import active_children
from pathlib import Path

import pytest
from headrace_engines.errors import NoKernelError
from headrace_engines.progress import Report, silent
from headrace_engines.separate_process import EndedError, call_apart


def write(path: Path, report: Report) -> None:
    print("noise", flush=True)
    report(0.5, "half")
    path.write_text(str(os.getpid()))


def fail(report: Report) -> None:
    raise NoKernelError("no kernel", ("node",))


def end(number: int, report: Report) -> None:
    report(0.5, "half")
    if number:
        os.kill(os.getpid(), number)
    os._exit(3)


def interrupt(_share: float, _note: str) -> None:
    raise KeyboardInterrupt


def test_the_call_runs_in_another_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[tuple[float, str]] = []
    call_apart(write, tmp_path / "pid", report=lambda share, note: reports.append((share, note)))
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert reports == [(0.5, "half")]
    assert capfd.readouterr().out == ""


def test_its_error_is_raised_here() -> None:
    with pytest.raises(NoKernelError, match="no kernel") as raised:
        call_apart(fail, report=silent)
    assert raised.value.nodes == ("node",)


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGABRT, "by signal 6"), (signal.SIGSEGV, "by signal 11"), (0, "with status 3")]
)
def test_its_death_is_an_error(number: int, how: str) -> None:
    with pytest.raises(EndedError, match=f"that called end ended {how}"):
        call_apart(end, number, report=silent)


def test_an_interrupted_call_leaves_no_process() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_apart(end, 0, report=interrupt)
    assert not active_children()
