"""Number of examples of property tests: all, or a share in `.ci/run` and `make quick`."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("EXAMPLES_SHARE", "1"))


def examples(count: int) -> int:
    """Return the number of examples for a property test that draws `count` in a whole run."""
    return max(5, round(count * SHARE))
