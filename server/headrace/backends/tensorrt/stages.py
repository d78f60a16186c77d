"""What a GPU does between a model's callers and its plan: pixels to a tensor, scores to classes.

A stage stands before one input of the plan or behind one output. Callers see something else in its place (`outside`), of as many
rows; the plan's own tensor never leaves the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.backends.tensorrt.plan import Plan, Shape, Shapes, refused
from headrace.core.errors import ModelFailed
from headrace.cuda.driver import Stream

Dtype = np.dtype[Any]
Launch = Callable[[Stream, int, int, Sequence[int]], None]  # as `Work.launch`


class Work(Protocol):
    """A stage on one GPU, for all instances there. A launch allocates nothing and waits for nothing: it may be captured."""

    def launch(self, stream: Stream, source: int, rows: int, targets: Sequence[int]) -> None:
        """Queue the work of a batch; the device is current.

        Args:
            stream: on which.
            source: address of what goes in.
            rows: of the batch, padding and all.
            targets: address of each tensor that comes out, in the order of `Stage.outside`.

        Raises:
            DeviceError: the driver refuses.
        """

    @property
    def fetch(self) -> Launch | None:
        """The same for rows anywhere: `source` is the address of uint64 (rows,), where each of them is. None: it cannot."""

    def close(self) -> None:
        """Give back what it holds; all work is done."""


class Stage(Protocol):
    """A step before an input of a plan, or behind an output."""

    @property
    def tensor(self) -> str:
        """The input or output of the plan."""

    @property
    def row(self) -> Shape:
        """Shape of one row of it, as the plan has it."""

    @property
    def outside(self) -> Mapping[str, tuple[Dtype, Shape]]:
        """What callers see in its place, by name: element type and shape of a row. Just one before an input."""

    def open(self, device: int) -> Work:
        """Get ready on a GPU.

        Raises:
            Unsupported, DeviceError: that cannot be had.
        """


@dataclass(frozen=True, slots=True)
class Joined:
    """A stage that is ready on a GPU.

    Attributes:
        stage: what is done.
        work: does it.
    """

    stage: Stage
    work: Work

    def rows(self, shape: Shape) -> int:
        """Rows in a tensor of the plan of this shape."""
        return math.prod(shape[: len(shape) - len(self.stage.row)])

    def outward(self, shape: Shape) -> dict[str, Shape] | None:
        """Shapes of what callers see for one of the plan's tensor; None if it has other rows than the stage knows."""
        lead = len(shape) - len(self.stage.row)
        if lead < 0 or shape[lead:] != self.stage.row:
            return None
        return {name: (*shape[:lead], *row) for name, (_, row) in self.stage.outside.items()}

    def inward(self, shape: Shape) -> Shape | None:
        """Shape of the plan's tensor for one that callers send; None if they cannot."""
        ((_, row),) = self.stage.outside.values()
        lead = len(shape) - len(row)
        return (*shape[:lead], *self.stage.row) if lead >= 0 and shape[lead:] == row else None


class Port(NamedTuple):
    """A tensor of the plan and what callers see of it.

    Attributes:
        tensor: the plan's.
        dtype: its element type.
        outside: by callers' names their element types.
        joined: the stage in between, None where callers see the plan's tensor itself.
    """

    tensor: str
    dtype: Dtype
    outside: dict[str, Dtype]
    joined: Joined | None


class Ports:
    """A plan's tensors as callers see them.

    Args:
        plan: the plan.
        stages: by the plan's tensor, on the plan's GPU.

    Attributes:
        inputs: in the plan's order.
        outputs: likewise.
        given: element types of what callers send, by name.

    Raises:
        ConfigError: two tensors would have the same name, or a stage does not go with its tensor.
    """

    def __init__(self, plan: Plan, stages: Mapping[str, Joined]) -> None:
        self._plan = plan
        self.inputs = [_port(tensor.name, tensor.dtype, stages) for tensor in plan.inputs]
        self.outputs = [_port(tensor.name, tensor.dtype, stages) for tensor in plan.outputs]
        self.given = {name: dtype for port in self.inputs for name, dtype in port.outside.items()}
        seen = [name for port in self.outputs for name in port.outside]
        for name in seen:
            if seen.count(name) > 1:
                raise refused(plan.name, f"has an output '{name}' beside postprocess's", "give postprocess other names")

    def inward(self, shapes: Shapes) -> dict[str, Shape]:
        """Shapes of the plan's inputs for those that callers send.

        Raises:
            ModelFailed: callers cannot send that.
        """
        found: dict[str, Shape] = {}
        for port in self.inputs:
            shape = shapes[port.tensor]
            wanted = shape if port.joined is None else port.joined.inward(shape)
            if wanted is None:
                raise ModelFailed(f"{self._plan.name} takes no '{port.tensor}' of {list(shape)}")
            found[port.tensor] = wanted
        return found

    def outward(self, ports: Iterable[Port], shapes: Shapes) -> dict[str, Shape]:
        """Shapes of what callers see, for those of the plan's tensors.

        Raises:
            ModelFailed: the plan's are not what the stages were made for.
        """
        found: dict[str, Shape] = {}
        for port in ports:
            shape = shapes[port.tensor]
            seen = {port.tensor: shape} if port.joined is None else port.joined.outward(shape)
            if seen is None:
                raise ModelFailed(f"{self._plan.name} gives '{port.tensor}' of {list(shape)}, which nothing is made of")
            found |= seen
        return found


def _port(tensor: str, dtype: Dtype, stages: Mapping[str, Joined]) -> Port:
    joined = stages.get(tensor)
    if joined is None:
        return Port(tensor, dtype, {tensor: dtype}, None)
    return Port(tensor, dtype, {name: kind for name, (kind, _) in joined.stage.outside.items()}, joined)
