"""A plan that is deserialised on one GPU: its tensors, the shapes it takes, and contexts to run it.

One engine, and with it one copy of the weights, serves all instances on a GPU. Everything here needs the device current.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.backends.tensorrt.api import Installed, TensorRt, is_full, numpy_type, refusal
from headrace.backends.tensorrt.tuning import Choice
from headrace.core.errors import ConfigError, Finding
from headrace.core.ledger import NoRoom
from headrace.cuda.memory import Allocator

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
