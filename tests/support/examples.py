"""Number of examples of property tests: all, or a share in `.ci/run` and `make quick`."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("EXAMPLES_SHARE", "1"))


def examples(count: int, min_count: int = 5) -> int:
    """Return the number of examples for a property test that draws `count` in a whole run, `min_count` or more."""
    return max(min_count, round(count * SHARE))
