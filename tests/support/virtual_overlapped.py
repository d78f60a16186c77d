"""An overlapped execution in virtual time: a device of three engines that take what a cost model says.

Copy in, compute and copy out each take one batch at a time, in the order of launch, as a GPU with a copy engine each way does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from headrace.core.tensor import Array
from headrace.runtimes.base import Execution
from headrace.runtimes.overlapped import InFlightBatch


@dataclass(frozen=True)
class Cost:
    """Duration of a step: a constant for the batch, and a duration for each row."""

    fixed_ns: int = 0
    row_ns: int = 0

    def ns(self, rows: int) -> int:
        return self.fixed_ns + self.row_ns * rows


@dataclass(frozen=True)
class CostModel:
    """Durations of the steps of a batch.

    Attributes:
        fill: the host copies the rows into the batch, on the instance's thread.
        copy_in, compute, copy_out: on the device.
    """

    fill: Cost = field(default_factory=Cost)
    copy_in: Cost = field(default_factory=Cost)
    compute: Cost = field(default_factory=Cost)
    copy_out: Cost = field(default_factory=Cost)


@dataclass
class VirtualOverlapped(Execution):
    """y = 2x, done when the engines are.

    Attributes:
        costs: of each step.
        clock: virtual, nanoseconds.
        spend: called with the nanoseconds that the thread is about to spend.
        depth: largest number of batches in flight.
        done_ns: end of each batch in flight, in the order of launch.
        computing_ns: how long the compute engine was busy.
    """

    costs: CostModel
    clock: Callable[[], int]
    spend: Callable[[int], None]
    depth: int = 2
    done_ns: deque[int] = field(default_factory=deque)
    computing_ns: int = 0

    def __post_init__(self) -> None:
        self._free_ns = [0, 0, 0]

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        assert len(self.done_ns) < self.depth
        self.spend(self.costs.fill.ns(rows))  # which comes next, and is over at the launch
        return InFlightBatch({name: np.empty((rows, *a.shape[1:]), a.dtype) for name, a in like.items()}, rows)

    def launch(self, in_flight: InFlightBatch) -> None:
        at_ns = self.clock()
        steps = (self.costs.copy_in, self.costs.compute, self.costs.copy_out)
        for engine, cost in enumerate(steps):
            at_ns = self._free_ns[engine] = max(at_ns, self._free_ns[engine]) + cost.ns(in_flight.rows)
        self.computing_ns += self.costs.compute.ns(in_flight.rows)
        self.done_ns.append(at_ns)

    def finish(self, in_flight: InFlightBatch) -> dict[str, Array]:
        assert self.clock() >= self.done_ns.popleft(), "finished before the device was"
        return {"y": in_flight.inputs["x"] * 2}

    def discard(self, in_flight: InFlightBatch) -> None:
        pass

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        raise AssertionError("nothing here needs the plain road")

    def close(self) -> None:
        pass
