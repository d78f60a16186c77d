"""Between the shape callers see and the shape the model has (`reshape` of the configuration)."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.backends.base import Execution, Flight, PipelinedExecution, is_pipelined, is_prompt
from headrace.core.tensor import Array
from headrace.scheduling.output_check import OutputMismatch


class ReshapingExecution:
    """An execution behind `reshape`, pipelined if that one is; see `headrace.backends.base`.

    Args:
        inner: the model's own execution.
        inputs: by input name, the model's shape without the batch dimension, at most one size -1.
        outputs: by output name, the shape callers see, likewise.
        batched: True if there is a batch dimension in front.

    Attributes:
        depth: the inner one's; 1 if it is not pipelined.
    """

    def __init__(
        self, inner: Execution, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]], batched: bool
    ) -> None:
        self._inner = inner
        self._inputs = inputs
        self._outputs = outputs
        self._batched = batched
        self.depth = inner.depth if is_pipelined(inner) else 1
        self.prompt = is_prompt(inner)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs in the callers' shape."""
        return self._seen(self._inner.run(self._wanted(inputs)))

    def begin(self, like: Mapping[str, Array], rows: int) -> Flight:
        """A flight whose inputs are the inner one's memory in the callers' shape."""
        inner = self._pipelined().begin(self._wanted(like), rows)
        inputs = {
            name: array.reshape((rows, *like[name].shape[1:]) if rows else like[name].shape)
            for name, array in inner.inputs.items()
        }
        # Rows that are resident have the same bytes in either shape.
        return Flight(inputs, rows, inner, inner.device, inner.residents)

    def launch(self, flight: Flight) -> None:
        """Launch the inner flight."""
        self._pipelined().launch(_inner(flight))

    def finish(self, flight: Flight) -> dict[str, Array]:
        """All outputs in the callers' shape."""
        return self._seen(self._pipelined().finish(_inner(flight)))

    def discard(self, flight: Flight) -> None:
        """Discard the inner flight."""
        self._pipelined().discard(_inner(flight))

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()

    def _pipelined(self) -> PipelinedExecution:
        if not is_pipelined(self._inner):
            raise TypeError("the execution behind this one takes one batch at a time")
        return self._inner

    def _wanted(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._reshaped(array, self._inputs.get(name)) for name, array in inputs.items()}

    def _seen(self, outputs: dict[str, Array]) -> dict[str, Array]:
        try:
            return {name: self._reshaped(array, self._outputs.get(name)) for name, array in outputs.items()}
        except (IndexError, ValueError) as error:
            shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in outputs.items())
            raise OutputMismatch(
                f"the model returned outputs that do not have the shapes of its configuration's reshape: {shapes}. The model is "
                "at fault, not the request: write the reshape and dims that the model returns, or max_batch_size: 0"
            ) from error

    def _reshaped(self, array: Array, shape: tuple[int, ...] | None) -> Array:
        if shape is None:
            return array
        return array.reshape((array.shape[0], *shape) if self._batched else shape)


def _inner(flight: Flight) -> Flight:
    assert isinstance(flight.handle, Flight), "a flight of ours carries the inner one"
    return flight.handle
