"""A GPU is often borrowed for minutes: failures are printed at once, so that an interrupted run has reported them."""

from __future__ import annotations

import pytest
from headrace.runtimes.cuda import devices


@pytest.fixture
def two_gpus() -> None:
    """For tests of several GPUs."""
    if devices.count() < 2:
        pytest.skip("needs two GPUs")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed ({report.when}, {report.duration:.1f} s):\n{report.longreprtext}", flush=True)
