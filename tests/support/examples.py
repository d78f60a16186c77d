"""How many examples property tests draw: all of them, or a share where a quick answer is wanted (`make check`)."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("EXAMPLES_SHARE", "1"))


def examples(count: int) -> int:
    """The number of examples to draw where a whole run draws `count`."""
    return max(5, round(count * SHARE))
