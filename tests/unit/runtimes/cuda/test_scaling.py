"""Whether pixels may be scaled by multiplying instead of dividing."""

from __future__ import annotations

import numpy as np
from headrace.runtimes.cuda.kernels import launching
from hypothesis import given
from hypothesis import strategies as st


# Below 2**-142 a mean can meet the bit pattern for which `multiplies` returns False to be safe.
@given(st.floats(-300, 300, width=32, allow_subnormal=False), st.floats(0.0078125, 3e5, width=32))
def test_multiplying_is_exact_for_common_recipes(mean: float, std: float) -> None:
    assert launching.multiplies(np.float32(mean), np.float32(std))


def test_multiplying_is_not_used_if_inexact() -> None:
    for std in (1e-45, 1e-40, 3e38, np.inf, np.nan):
        assert not launching.multiplies(np.float32(100), np.float32(std))
