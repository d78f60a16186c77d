"""A plan that is deserialised on one GPU: its tensors, the shapes it takes, and contexts to run it.

One engine, and with it one copy of the weights, serves all instances on a GPU. Everything here needs the device current.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.backends.tensorrt.api import Choice, Installed, TensorRt, is_full, numpy_type, refusal
from headrace.core.errors import ConfigError, Finding, ModelFailed
from headrace.core.ledger import NoRoom
from headrace.cuda.driver import Stream
from headrace.cuda.memory import Allocator

# What a GPU does between a model's callers and its plan: pixels to a tensor, scores to classes.
#
# A stage stands before one input of the plan or behind one output. Callers see something else in its place (`outside`), of as
# many
# rows; the plan's own tensor never leaves the GPU.


# Below, a batch takes about as long with one row more.
_FINE_FROM = 8
# Of more plans a process forgets what it has found out first.
_CHOICES_KEPT = 256

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output.

    Attributes:
        name: of the tensor.
        dtype: how NumPy holds it.
        shape: -1 where free.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape


class Range(NamedTuple):
    """The shapes that a profile takes of one input.

    Attributes:
        least: smallest sizes.
        tuned: those that it is fastest for.
        most: largest sizes.
    """

    least: Shape
    tuned: Shape
    most: Shape


class Plan:
    """A plan on one GPU.

    Args:
        api: TensorRT.
        content: of the plan's file.
        digest: of the content.
        name: of the file, for messages.
        here: the machine.
        allocator: for what its instances need on this GPU.

    Attributes:
        name: of the file.
        allocator: as given.
        inputs: in the plan's order.
        outputs: likewise.
        profiles: by profile and input what is taken.
        scratch_bytes: GPU memory that a context needs while it runs.
        tuning: held by whoever measures how batches are best run, or asks.
        choice: what has been found; None before.

    Raises:
        ConfigError: it was built for another machine, is broken, or has tensors that cannot be served.
    """

    def __init__(
        self, api: TensorRt, content: bytes, digest: bytes, name: str, here: Installed, allocator: Allocator
    ) -> None:
        self._trt = api.trt
        self._api = api
        self._digest = digest
        self.name = name
        self.allocator = allocator
        # TensorRT makes no promise for contexts that are made by several threads at once.
        self._lock = threading.Lock()
        # Guards `choice`, and keeps instances from disturbing the one that measures.
        self.tuning = threading.Lock()
        self.choice: Choice | None = None
        with api.collecting() as errors:
            self._runtime = api.runtime()
            self._engine: Any = None if self._runtime is None else self._runtime.deserialize_cuda_engine(content)
            if self._engine is None:
                raise self._full(*refusal(errors, here)) if is_full(errors) else refused(name, *refusal(errors, here))
        tensors = [self._read(index) for index in range(self._engine.num_io_tensors)]
        self.inputs = [tensor for tensor, given in tensors if given]
        self.outputs = [tensor for tensor, given in tensors if not given]
        self.profiles = [
            {tensor.name: self._range(tensor, number) for tensor in self.inputs}
            for number in range(self._engine.num_optimization_profiles)
        ]
        self.scratch_bytes = int(self._engine.device_memory_size_v2)

    def context(self, scratch: int) -> Any:
        """An IExecutionContext that works in memory of the caller's.

        Args:
            scratch: its address; `scratch_bytes` long, and no two contexts that share it may run at the same time.

        Raises:
            ConfigError: there is no memory for it.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with self._lock, self._api.collecting() as errors:
            context = self._engine.create_execution_context(strategy)
        if context is None:
            told = f" ({errors[-1].strip()})" if errors else ""
            raise self._full(f"finds no memory on the GPU for an instance{told}", "serve fewer models or instances")
        if self.scratch_bytes:
            context.set_device_memory(scratch, self.scratch_bytes)
        return context

    def recall(self, how: Hashable) -> Choice | None:
        """What was found earlier in this process for the same content on this GPU, run the same way.

        Args:
            how: it is run.
        """
        return self._api.choices.get((self._digest, self.allocator.gpu, how))

    def remember(self, how: Hashable, choice: Choice) -> None:
        """Let those who load the same content later `recall` what has been found."""
        choices = self._api.choices
        choices[self._digest, self.allocator.gpu, how] = choice
        for oldest in list(choices)[:-_CHOICES_KEPT]:
            choices.pop(oldest, None)  # another instance's thread may have

    def _full(self, message: str, cure: str) -> NoRoom:
        return NoRoom(self.name, message, cure, self.allocator.gpu)

    def collecting(self) -> AbstractContextManager[Collection[str]]:
        """The errors that TensorRT logs in this thread from here on."""
        return self._api.collecting()

    def close(self) -> None:
        """Give the GPU's memory back; all contexts are gone."""
        # In this order: each holds what comes after it.
        self._engine = None
        self._runtime = None

    def _read(self, index: int) -> tuple[Tensor, bool]:
        engine = self._engine
        name = engine.get_tensor_name(index)
        shape = tuple(int(size) for size in engine.get_tensor_shape(name))
        dtype = numpy_type(engine.get_tensor_dtype(name))
        if dtype is None:
            kind = engine.get_tensor_dtype(name).name
            raise refused(self.name, f"has the tensor '{name}' of type {kind}", "let it take and give another type")
        if engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:
            cure = "make them constants of the ONNX model"
            raise refused(self.name, f"has shapes that the values of '{name}' decide on", cure)
        return Tensor(name, dtype, shape), engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT

    def _range(self, tensor: Tensor, profile: int) -> Range:
        if -1 not in tensor.shape:
            return Range(tensor.shape, tensor.shape, tensor.shape)
        told = self._engine.get_tensor_profile_shape(tensor.name, profile)
        return Range(*(tuple(int(size) for size in shape) for shape in told))


def refused(name: str, message: str, cure: str) -> ConfigError:
    """The error for a plan that is not served."""
    return ConfigError([Finding(name, None, message, cure)])


def choose_profile(profiles: Sequence[Mapping[str, Range]], shapes: Shapes) -> int | None:
    """Number of the profile that serves these shapes best: tuned for them, else the one with the least room; None without one."""
    fitting = []
    for number, profile in enumerate(profiles):
        if all(_within(shapes[name], known) for name, known in profile.items()):
            tuned = all(shapes[name] == known.tuned for name, known in profile.items())
            fitting.append((not tuned, sum(math.prod(known.most) for known in profile.values()), number))
    return min(fitting)[2] if fitting else None


def buckets(profiles: Sequence[Mapping[str, Range]], max_rows: int, fine: bool = False) -> tuple[int, ...]:
    """Numbers of rows that batches are padded to: powers of two and the largest, as far as a profile takes them; ascending.

    Args:
        profiles: of the plan.
        max_rows: rows in the largest batch that is asked for.
        fine: from 8 on, also what is half way to the next power.
    """
    spans = [
        (max(known.least[0] for known in profile.values()), min(known.most[0] for known in profile.values()))
        for profile in profiles
        if profile and all(known.least for known in profile.values())
    ]
    wanted = {1 << power for power in range(max_rows.bit_length())} | {max_rows}
    if fine:
        wanted |= {rows + rows // 2 for rows in wanted if rows >= _FINE_FROM and rows + rows // 2 <= max_rows}
    # The largest below what is asked for, and the smallest above nothing, where profiles have other bounds.
    wanted |= {bound for span in spans for bound in span if bound <= max_rows}
    wanted |= {least for least, _ in spans if least > max_rows}
    taken = sorted(rows for rows in wanted if any(low <= rows <= high for low, high in spans))
    enough = next((number for number, rows in enumerate(taken, 1) if rows >= max_rows), len(taken))
    return tuple(taken[:enough])


def largest(profiles: Sequence[Mapping[str, Range]], rows: int) -> list[tuple[int, dict[str, Shape]]]:
    """By profile its number and the largest shapes that are served.

    Args:
        profiles: of the plan.
        rows: of the largest bucket; 0 where there is no batch dimension.
    """
    found = []
    for number, profile in enumerate(profiles):
        if rows and any(known.least[0] > rows for known in profile.values()):
            continue
        shapes = {name: (min(k.most[0], rows), *k.most[1:]) if rows else k.most for name, k in profile.items()}
        found.append((number, shapes))
    return found


def _within(shape: Sequence[int], known: Range) -> bool:
    return len(shape) == len(known.most) and all(
        low <= size <= high for low, size, high in zip(known.least, shape, known.most, strict=True)
    )


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
