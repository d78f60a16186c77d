"""From a row of scores to probabilities and the best classes: what `postprocess` does on a CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_LOW = np.uint64(0xFFFFFFFF)


def softmax(scores: Floats) -> Floats:
    """Probabilities of the classes of each row.

    Args:
        scores: float32 (rows, classes).

    Returns:
        float32 (rows, classes), each row summing up to 1.
    """
    shares: Floats = scores - scores.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    total: Floats = shares.sum(axis=1, keepdims=True)
    shares /= total
    return shares


def top_k(scores: Floats, count: int) -> Ints:
    """The numbers of the best classes of each row, best first; of equal scores the lower number comes first.

    Args:
        scores: float32 (rows, classes).
        count: how many, at most the number of classes.

    Returns:
        int32 (rows, count).
    """
    classes = scores.shape[1]
    # One whole number a class that sorts as its score does, then as the lower class: so no two are equal and a partition, which
    # costs a tenth of sorting, is as good.
    bits = (scores + np.float32(0)).view(np.int32)  # -0 becomes 0, which it equals
    ascending = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
    keys = (ascending.astype(np.uint64) << np.uint64(32)) | (_LOW - np.arange(classes, dtype=np.uint64))
    best = np.partition(keys, classes - count, axis=1)[:, classes - count :]
    best.sort(axis=1)
    return (_LOW - (best[:, ::-1] & _LOW)).astype(np.int32)
