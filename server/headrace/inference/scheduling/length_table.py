"""Compute times of a model by rows and length of a batch, to decide whether padding pays.

The table has a node for each pair of powers of two. Times between nodes are interpolated in logarithms, in which a time that is
constant, or proportional to rows or length, is a straight line. A measured time moves the nodes around it by a share of the
error (the least mean squares rule: B. Widrow, M. E. Hoff, Adaptive switching circuits, 1960), so that the table follows the
machine. Nodes that were never measured are extrapolated in proportion to rows and length: larger batches are then expected to
save nothing, and padding needs a measured gain.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

from headrace.core.clock import NS_PER_MS

# Share of an error by which the nodes around a time are moved.
_RATE = 0.2
# Errors of the logarithm beyond this are disturbances: a factor of 2.
_MAX_ERROR = math.log(2)
# Compute time after which estimates are computed again, some hundred times the cost of computing all of them.
_REDRAW_NS = 500 * NS_PER_MS


class LengthTable:
    """Compute times of one version by rows and length; any thread may call.

    Ownership: `_lock` guards changes. Reads take no lock: a node is one number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[tuple[int, int], float] = {}  # logarithm of the time by powers of rows and of length
        self._measured: set[tuple[int, int]] = set()
        self._estimates: dict[tuple[int, int], float] = {}
        self._recorded_ns = 0

    def __bool__(self) -> bool:
        return bool(self._measured)

    def seed(self, times_ns: Mapping[tuple[int, int], int]) -> None:
        """Set times that were measured before any request.

        Args:
            times_ns: compute time in nanoseconds by (rows, length), both powers of two.
        """
        with self._lock:
            for (rows, length), time_ns in times_ns.items():
                node = rows.bit_length() - 1, length.bit_length() - 1
                self._nodes[node] = math.log(max(time_ns, 1))
                self._measured.add(node)
            self._nodes = {node: self._nodes[node] for node in self._measured}
            self._estimates = {}

    def observe(self, rows: int, length: int, time_ns: int) -> None:
        """Record the compute time of a batch."""
        if not self._measured or length < 1:
            return
        with self._lock:
            corners = self._corners(rows, length)
            expected = sum([self._node(node) * share for node, share in corners])
            error = min(max(math.log(max(time_ns, 1)) - expected, -_MAX_ERROR), _MAX_ERROR)
            step = _RATE * error / sum([share * share for _, share in corners])
            for node, share in corners:
                self._nodes[node] += step * share
                if share > 0.5:
                    self._measured.add(node)
            self._recorded_ns += time_ns
            if self._recorded_ns >= _REDRAW_NS:
                self._recorded_ns, self._estimates = 0, {}

    def estimate_ns(self, rows: int, length: int) -> float:
        """Return the usual compute time of a batch in nanoseconds; 0 while nothing is measured."""
        estimate = self._estimates.get((rows, length))
        if estimate is None:
            if not self._measured or length < 1:
                return 0.0
            with self._lock:
                estimate = math.exp(sum([self._node(node) * share for node, share in self._corners(rows, length)]))
                self._estimates[rows, length] = estimate
        return estimate

    def _corners(self, rows: int, length: int) -> list[tuple[tuple[int, int], float]]:
        """Return the nodes around a point, with their shares; without those of share 0."""
        row_power, length_power = math.log2(rows), math.log2(length)
        row, column = int(row_power), int(length_power)
        down, right = row_power - row, length_power - column
        corners = [
            ((row, column), (1 - down) * (1 - right)),
            ((row, column + 1), (1 - down) * right),
            ((row + 1, column), down * (1 - right)),
            ((row + 1, column + 1), down * right),
        ]
        return [(node, share) for node, share in corners if share > 0]

    def _node(self, node: tuple[int, int]) -> float:
        """Return a node; one that was never measured follows the closest measured one."""
        value = self._nodes.get(node)
        if value is None:
            row, column = node
            near = min(self._measured, key=lambda other: (abs(other[0] - row) + abs(other[1] - column), other))
            value = self._nodes[near] + (row - near[0] + column - near[1]) * math.log(2)
            self._nodes[node] = value
        return value
