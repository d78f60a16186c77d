"""Settings of all unit tests."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakes import FakeModel


@pytest.fixture(autouse=True)
def child_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes, which start with -P and so without the current folder, import backends from `tests.support`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def model(runner: asyncio.Runner) -> Iterator[FakeModel]:
    """A model under the test's control, whose handles are closed before the test's event loop."""
    created = FakeModel()
    yield created
    created.gate.set()
    for served in created.handles:
        assert served.close(60)
