"""Checks that a model may be padded, and measures its compute times by rows and length, before it serves."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator

import numpy as np

from headrace.config.model_folder import MAX_INPUT_BYTES
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.tensor import BF16, BYTES, Array, ModelSpec, TensorSpec
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.models.warmup import random_values
from headrace.runtimes.base import Execution, ExecutionLost

logger = logging.getLogger("headrace.warmup")

# Lengths are measured up to this multiple of the smallest padded length, rows up to `_MAX_ROWS`.
_MAX_MULTIPLE = 8
_MAX_ROWS = 32
_ROUNDS = 3


class LengthMeasurement:
    """Measures on one instance; called by each on its own thread with its own execution, after the warm-up.

    Two requests of different length run alone and then padded in one batch. If the outputs differ, the model does not mask the
    padding, and nothing is padded. An error of the model on random inputs does not prevent serving.

    Args:
        spec: spec of the model.
        layout: layout to check and to fill.
        max_rows: rows of the largest batch.
        limit_ns: time limit in nanoseconds; 0 measures nothing.
    """

    def __init__(self, spec: ModelSpec, layout: PaddedLayout, max_rows: int, limit_ns: int) -> None:
        self._spec = spec
        self._layout = layout
        self._max_rows = max_rows
        self._limit_ns = limit_ns
        self._lock = threading.Lock()  # guards _is_claimed
        self._is_claimed = False
        self._random = np.random.default_rng(0)

    def __call__(self, execution: Execution) -> None:
        """Check and measure, unless another instance does or has done.

        Args:
            execution: execution of the calling instance.

        Raises:
            ExecutionLost: nothing can be run any more.
        """
        with self._lock:
            is_claimed, self._is_claimed = self._is_claimed, True
        if is_claimed or not self._limit_ns or self._layout.lengths or self._layout.policy.inputs.multiple_of == 1:
            return
        problem = self._unmeasurable()
        if problem:
            logger.info("model %s is not measured by length before it serves: %s", self._spec.name, problem)
            return
        begun_ns = monotonic_ns()
        try:
            longest = self._layout.policy.inputs.multiple_of
            self._layout.check(execution, [self._feed(1, longest // 2), self._feed(1, longest)])
            if not self._layout.problem and not self._layout.always:
                self._measure(execution, begun_ns + self._limit_ns)
        except ExecutionLost:
            raise
        except Exception as error:
            name, error_name = self._spec.name, type(error).__name__
            logger.info("model %s is not measured by length: it failed on random inputs (%s)", name, error_name)
        logger.debug("model %s took %d ms by length", self._spec.name, (monotonic_ns() - begun_ns) // NS_PER_MS)

    def _unmeasurable(self) -> str:
        for tensor in self._spec.inputs.values():
            free = [axis for axis, size in enumerate(tensor.shape) if size == -1 and axis > 0]
            if tensor.datatype is BYTES:
                return f"input {tensor.name} is text"
            if free and (tensor.name not in self._layout.policy.values or free != [self._layout.policy.inputs.axis]):
                return f"input {tensor.name} has free dimensions that are not padded"
        size_bytes = self._size_bytes(2, self._layout.policy.inputs.multiple_of)
        return "" if size_bytes <= MAX_INPUT_BYTES else f"two rows have {size_bytes} bytes"

    def _size_bytes(self, rows: int, length: int) -> int:
        """Return the bytes of the inputs and outputs of a batch."""
        tensors = (*self._spec.inputs.values(), *self._spec.outputs.values())
        return sum(
            rows * tensor.datatype.size_bytes * math.prod(length if size == -1 else size for size in tensor.shape[1:])
            for tensor in tensors
        )

    def _feed(self, rows: int, length: int) -> dict[str, Array]:
        return {name: self._values(tensor, rows, length) for name, tensor in self._spec.inputs.items()}

    def _values(self, tensor: TensorSpec, rows: int, length: int) -> Array:
        """Return values that are no padding: a mask of them covers every position, and tokens are in any vocabulary."""
        shape = (rows, *(length if size == -1 else size for size in tensor.shape[1:]))
        if tensor.datatype is BF16 or tensor.datatype.dtype.kind == "f":
            return random_values(tensor.datatype, shape, self._random)
        padding = self._layout.policy.values.get(tensor.name, 0)
        return np.full(shape, 0 if padding else 1, tensor.datatype.dtype)

    def _measure(self, execution: Execution, end_ns: int) -> None:
        """Run all sizes several times until the time limit; the shortest time of each counts."""
        times_ns: dict[tuple[int, int], int] = {}
        try:
            for _ in range(_ROUNDS):
                for rows, length in self._sizes():
                    if monotonic_ns() + times_ns.get((rows, length), 0) > end_ns:
                        break
                    inputs = self._feed(rows, length)
                    begun_ns = monotonic_ns()
                    execution.run(inputs)
                    time_ns = monotonic_ns() - begun_ns
                    times_ns[rows, length] = min(times_ns.get((rows, length), time_ns), time_ns)
        finally:  # a model may fail on long inputs: the times of the others count
            self._layout.lengths.seed(times_ns)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Return rows and lengths, both powers of two, by the number of elements."""
        longest = self._layout.policy.inputs.multiple_of * _MAX_MULTIPLE
        rows = [1 << power for power in range(min(self._max_rows, _MAX_ROWS).bit_length())]
        first = (self._layout.policy.inputs.multiple_of // 2).bit_length()
        lengths = [1 << power for power in range(max(first - 1, 0), longest.bit_length())]
        pairs = [(r, n) for r in rows for n in lengths if self._size_bytes(r, n) <= MAX_INPUT_BYTES]
        return iter(sorted(pairs, key=lambda size: (size[0] * size[1], size)))
