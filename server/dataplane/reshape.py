"""Between the shape callers see and the shape the model has (`reshape` of the configuration)."""

from __future__ import annotations

from server.backends.base import Execution
from server.core.tensor import Array


class ReshapingExecution:
    """An execution behind `reshape`; see `server.backends.base.Execution`.

    Args:
        inner: the model's own execution.
        inputs: by input name, the model's shape without the batch dimension, at most one size -1.
        outputs: by output name, the shape callers see, likewise.
        batched: True if there is a batch dimension in front.
    """

    def __init__(
        self, inner: Execution, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]], batched: bool
    ) -> None:
        self._inner = inner
        self._inputs = inputs
        self._outputs = outputs
        self._batched = batched

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs in the callers' shape."""
        results = self._inner.run(
            {name: self._reshaped(array, self._inputs.get(name)) for name, array in inputs.items()}
        )
        return {name: self._reshaped(array, self._outputs.get(name)) for name, array in results.items()}

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()

    def _reshaped(self, array: Array, shape: tuple[int, ...] | None) -> Array:
        if shape is None:
            return array
        return array.reshape((array.shape[0], *shape) if self._batched else shape)
