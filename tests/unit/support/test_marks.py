"""Marks of the tests: few are slow, fewer measure time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COLLECTED
from tests.support.serving import ROOT

SLOW_SHARE = 0.1


def too_many_slow(marked: list[bool]) -> str:
    """An error message if more than `SLOW_SHARE` of the tests are marked `slow`, else "".

    Args:
        marked: for each collected test, whether it is marked.
    """
    slow, most = sum(marked), int(SLOW_SHARE * len(marked))
    return (
        f"{slow} of {len(marked)} tests are marked slow, at most {most} may be: make some faster" if slow > most else ""
    )


def test_at_most_a_tenth_of_the_tests_is_slow(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[COLLECTED]
    files = set((ROOT / "tests").rglob("test_*.py"))
    if files != {item.path for item in items}:
        pytest.skip("only a part of the tests was collected")
    assert too_many_slow([item.get_closest_marker("slow") is not None for item in items]) == ""


def test_files_with_slow_tests_are_those_of_make_test_slow(request: pytest.FixtureRequest) -> None:
    """`make test-slow` collects no others. Where only a part of the tests was collected, those are checked."""
    pattern = re.search(r'^SLOW_FILES = .*"(.+?)" --include', (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pattern is not None
    files = {item.path for item in request.config.stash[COLLECTED] if item.get_closest_marker("slow")}
    assert [file for file in files if not re.search(pattern[1], file.read_text())] == []


@pytest.mark.parametrize(("slow", "fast", "message"), [(0, 9, ""), (1, 9, ""), (1, 8, "1 of 9 tests are marked slow")])
def test_too_many_slow_tests_are_reported(slow: int, fast: int, message: str) -> None:
    assert too_many_slow([True] * slow + [False] * fast).startswith(message)
    assert (too_many_slow([True] * slow + [False] * fast) == "") == (message == "")


MOST_TIMING = 10


def test_at_most_ten_tests_measure_time(request: pytest.FixtureRequest) -> None:
    marked = (item.nodeid for item in request.config.stash[COLLECTED] if item.get_closest_marker("timing"))
    timing = {name.partition("[")[0] for name in marked}
    assert len(timing) <= MOST_TIMING, timing


FLAKY = """
import pathlib

import pytest

RUNS = pathlib.Path(__file__).with_name("runs")


@pytest.fixture
def run():
    RUNS.write_text(RUNS.read_text() + "." if RUNS.exists() else ".")
    return len(RUNS.read_text())


@pytest.mark.timing
def test_slow_machine(run):
    assert run == 2, "late"


@pytest.mark.timing
def test_always_late(run):
    assert run == 0


def test_broken(run):
    assert run == 1
"""


def test_a_test_that_measures_time_runs_once_more_if_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_flaky.py"
    file.write_text(FLAKY)
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert file.with_name("runs").read_text() == "....."
    first, second = done.stdout.splitlines()[-2:]
    assert (first.startswith("ran twice: "), "::test_slow_machine" in first) == (True, True), done.stdout
    assert "::test_always_late" in second
