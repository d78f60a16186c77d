"""A GPU is often borrowed for minutes: what fails is printed when it fails, so that a run cut short has told it."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed ({report.when}, {report.duration:.1f} s):\n{report.longreprtext}", flush=True)
