"""The seeded faults of `tests/support/mutants.py` can be applied; `python -m tests.support.mutants` runs them."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.support.mutants import MUTANTS, ROOT, Mutant, killers, places, sources


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant) -> None:
    """Follow renames and moves of texts and tests in `tests/support/mutants.py`."""
    files = places(mutant, ROOT)
    assert len(files) == 1, (
        f"the text of the mutant is in {[str(path.relative_to(ROOT)) for path in files]}:\n{mutant.old}"
    )
    ast.parse(files[0].read_text(encoding="utf-8").replace(mutant.old, mutant.new))
    assert killers(mutant, ROOT), f"one of {mutant.tests} is nowhere under tests/"


def test_there_are_at_least_twenty_of_different_names() -> None:
    assert len(MUTANTS) >= 20
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert next(sources(ROOT), None) is not None
