"""Copies one row in so many, with its batch, so that it can be run again alone while the model is idle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.scattered_rows import ScatteredRows
from headrace.core.tensor import Array, ResidentRows
from headrace.inference.scheduling.selector import Batch

logger = logging.getLogger("headrace.proof")

# Samples of the whole server, and the most bytes of one: 16 MB together.
MAX_SAMPLES = 4
MAX_SAMPLE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RowSample:
    """A row that has run in a batch.

    Attributes:
        size: rows of the batch.
        place: index of the row in the batch.
        inputs: arrays by name: all rows of the batch, or this row alone if they are too large or of different shapes.
        outputs: arrays by name of this row, of shape (1, ...).
        is_shared: True if inputs are copies of memory that a client or another model could change meanwhile.
    """

    size: int
    place: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    is_shared: bool = False

    @property
    def row(self) -> dict[str, Array]:
        """Inputs of the row, each of shape (1, ...)."""
        first = self.place if self._is_whole else 0
        return {name: values[first : first + 1] for name, values in self.inputs.items()}

    def batch(self) -> dict[str, Array]:
        """Return the inputs of the batch; if only the row was copied, of equal rows."""
        if self._is_whole:
            return dict(self.inputs)
        return {name: values.repeat(self.size, axis=0) for name, values in self.inputs.items()}

    @property
    def _is_whole(self) -> bool:
        return len(next(iter(self.inputs.values()))) == self.size


class RowSampler:
    """Takes samples of one version; instances call `take` once `left` is used up. A race loses a sample at most.

    Args:
        every: a row in so many is taken.
        slots: samples of the server; a sample that finds none is dropped.

    Attributes:
        left: rows until the next sample; the caller subtracts those of each batch.
        sample: the sample that has not been checked; further ones are dropped meanwhile.
        on_taken: called on the thread of an instance when there is a sample.
    """

    def __init__(self, every: int, slots: threading.Semaphore) -> None:
        self.left = self._every = every
        self.sample: RowSample | None = None
        self.on_taken: Callable[[], None] = lambda: None
        self._slots, self._count = slots, 0

    def take(self, batch: Batch, results: Sequence[object]) -> None:
        """Copy a row of a batch whose requests are not settled yet.

        Args:
            batch: the batch.
            results: outputs of each entry.
        """
        self.left = self._every
        if self.sample is None and self._slots.acquire(blocking=False):
            try:
                self.sample = self._copy(batch, results)
            except Exception:  # no request fails for it
                logger.exception("no row of a batch of %d could be copied", batch.rows)
            if self.sample is None:
                self._slots.release()
        if self.sample is not None:
            self.on_taken()

    def clear(self) -> None:
        """Drop the sample."""
        sample, self.sample = self.sample, None
        if sample is not None:
            self._slots.release()

    def _copy(self, batch: Batch, results: Sequence[object]) -> RowSample | None:
        """Return the sample, of rows in GPU memory or in pieces as host copies; None for rows that are too large."""
        self._count += 1
        place = first = self._count % batch.rows
        index = 0
        while first >= batch.entries[index].rows:
            first -= batch.entries[index].rows
            index += 1
        outputs = results[index]
        arrays = [values for entry in batch.entries for values in entry.inputs.values()]
        kinds = (np.ndarray, ResidentRows, ScatteredRows)
        if type(outputs) is not dict or not all(isinstance(values, kinds) for values in outputs.values()):
            return None
        own = batch.entries[index].inputs
        parts = {name: [entry.inputs[name] for entry in batch.entries] for name in own}
        is_uneven = any(piece.shape[1:] != own[name].shape[1:] for name, pieces in parts.items() for piece in pieces)
        if is_uneven or sum(map(_size_bytes, (*arrays, *outputs.values()))) > MAX_SAMPLE_BYTES:
            parts = {name: [values[first : first + 1]] for name, values in own.items()}
        rows = {name: values[first : first + 1] for name, values in outputs.items()}
        copied = [piece for each in (*parts.values(), rows.values()) for piece in each]
        if sum(map(_size_bytes, copied)) > MAX_SAMPLE_BYTES:
            return None
        is_shared = any(type(values) is not np.ndarray for values in arrays)
        inputs = {name: np.concatenate([np.asarray(piece) for piece in pieces]) for name, pieces in parts.items()}
        return RowSample(
            batch.rows, place, inputs, {name: np.array(values) for name, values in rows.items()}, is_shared
        )


def _size_bytes(values: Array) -> int:
    size_bytes: int = values.nbytes
    return size_bytes + sum(map(len, values.ravel().tolist())) if values.dtype.hasobject else size_bytes
