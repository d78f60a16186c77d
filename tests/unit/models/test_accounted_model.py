"""A model with its account has the abilities of the model inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from headrace.models.accounted_model import AccountedModel
from headrace.runtimes.base import LoadedModel

# Of the served version: its GPUs, its executions with the steps, and its end.
OF_THE_VERSION = {"devices", "resident_devices", "execution", "close"}
ABILITIES = sorted({name for name in vars(LoadedModel) if not name.startswith("_")} - OF_THE_VERSION)


@pytest.mark.parametrize("name", ABILITIES)
def test_an_accounted_model_has_the_abilities_of_its_model(name: str) -> None:
    inner: Any = SimpleNamespace(**{ability: object() for ability in ABILITIES})
    outer: Any = AccountedModel(inner, None, 1, frozenset(), (), None, None)  # type: ignore[arg-type]
    assert getattr(outer, name) is getattr(inner, name)
