"""Restarts of instances in tests of the scheduler."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_restarts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep instances that have died dead: on a slow machine one restarts, after 1 s, before a test has looked at its death."""
    if request.path.name != "test_restarts.py":
        monkeypatch.setattr("headrace.inference.scheduling.instance.FIRST_PAUSE_S", 60.0)
