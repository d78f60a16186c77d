"""Number of examples of property tests: all, or a share in `.ci/run` and `make quick`."""

from __future__ import annotations

import os

import pytest

SHARE = float(os.environ.get("EXAMPLES_SHARE", "1"))
# Marks of parameters that prove the claim of their test once more: `make test-slow` runs them, a run with a share does not.
MORE_EXAMPLES = (
    pytest.mark.slow,
    pytest.mark.skipif(SHARE < 1, reason="further examples of a claim: make test-slow runs them"),
)


def examples(count: int, min_count: int = 5) -> int:
    """Return the number of examples for a property test that draws `count` in a whole run, `min_count` or more."""
    return max(min_count, round(count * SHARE))
