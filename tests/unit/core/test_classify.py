"""The classification extension: order, labels, and how scores are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.core.tensor import BY_NAME, TensorSpec, classify


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("INT32", [1, 5, 10, 4], [b"10:2", b"5:1:pickle"]),
        ("UINT8", [1, 5, 250, 4], [b"250:2", b"5:1:pickle"]),
        ("FP32", [1.1, 3.3, 0.5, 2.4], [b"3.300000:1:pickle", b"2.400000:3"]),
        ("FP16", [0.5, 3.25, 1.5, 2], [b"3.250000:1:pickle", b"2.000000:3"]),
    ],
)
def test_scores_are_written_as_triton_writes_them(datatype: str, values: list[Any], expected: list[bytes]) -> None:
    spec = TensorSpec("S", BY_NAME[datatype], (4,), labels=("apple", "pickle"))
    array = np.array(values, BY_NAME[datatype].dtype)
    assert classify(array, spec, 2, batched=False).tolist() == expected
    assert classify(np.stack([array, array]), spec, 2, batched=True).tolist() == [expected, expected]


def test_rows_without_elements_have_no_classes() -> None:
    spec = TensorSpec("S", BY_NAME["FP32"], (-1, -1))
    assert classify(np.empty((2, 0), np.float32), spec, 3, batched=True).shape == (2, 0)
