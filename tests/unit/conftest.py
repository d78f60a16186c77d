"""Settings of all unit tests."""

from pathlib import Path

import pytest

from tests.support.fakes import FakeModel


@pytest.fixture(autouse=True)
def child_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes, which start with -P and so without the current folder, import backends from `tests.support`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def model() -> FakeModel:
    """A model under the test's control."""
    return FakeModel()
