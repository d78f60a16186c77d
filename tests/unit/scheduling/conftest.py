"""A fake model for tests of the scheduler."""

from __future__ import annotations

import pytest

from tests.support.fakes import FakeModel


@pytest.fixture
def model() -> FakeModel:
    """A model under the test's control."""
    return FakeModel()
