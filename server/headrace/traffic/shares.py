"""Selects the version of a request: one by one with exact shares, or by a hash of a header."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headrace.core.traffic_config import ALL_SHARES

_HASH_BITS = 64


class ShareSelector:
    """Distributes requests in fixed shares, without chance.

    After N requests each target has had its share of N, less or more by under one request. The slots of a target have a release
    time and a deadline; the earliest deadline among the released ones is next. This keeps every deadline where the shares sum up
    to one (Tijdeman, The chairman assignment problem, 1980).

    Args:
        shares: of each target, in units that sum up to `ALL_SHARES`.
    """

    __slots__ = ("_counts", "_shares", "_slot")

    def __init__(self, shares: Sequence[int]) -> None:
        if sum(shares) != ALL_SHARES:
            raise ValueError(f"the shares sum up to {sum(shares)}: they must sum up to {ALL_SHARES}")
        self._shares = tuple(shares)
        self._counts = [0] * len(shares)
        self._slot = 0

    def next(self) -> int:
        """Return the index of the next target."""
        slot, counts, selected, earliest = self._slot, self._counts, 0, -1
        for index, share in enumerate(self._shares):
            if share and counts[index] * ALL_SHARES // share <= slot:
                deadline = -(-(counts[index] + 1) * ALL_SHARES // share)
                if earliest < 0 or deadline < earliest:
                    selected, earliest = index, deadline
        counts[selected] += 1
        self._slot = slot + 1
        if self._slot == ALL_SHARES:  # each target has had exactly its share
            self._slot, self._counts = 0, [0] * len(counts)
        return selected


def sticky_index(model: str, value: str, shares: Sequence[int]) -> int:
    """Return the target of a header's value: equal in every process and after every restart.

    Args:
        model: name of the model, so that values are distributed anew for each model.
        value: of the header.
        shares: of each target, in units that sum up to `ALL_SHARES`. A larger share of the first target moves values to it only.
    """
    content = f"{model}\0{value}".encode("utf-8", "surrogatepass")
    point = int.from_bytes(blake2b(content, digest_size=_HASH_BITS // 8).digest(), "big") * ALL_SHARES >> _HASH_BITS
    for index, share in enumerate(shares):
        point -= share
        if point < 0:
            return index
    return len(shares) - 1
