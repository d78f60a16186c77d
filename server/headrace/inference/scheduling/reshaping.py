"""Execution that converts between the shapes of callers and of the model (`reshape` in the configuration)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.core.errors import HeadraceError
from headrace.core.tensor import Array
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.runtimes.base import Execution, has_batch_memory
from headrace.runtimes.members import BatchMember, LateResult, MemberOutputs, MemberResult, ResponseSink
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.wrapped_execution import WrappedExecution


class ReshapingExecution(WrappedExecution):
    """Wraps an execution to apply `reshape`; overlapped if the wrapped one is. See `headrace.runtimes.base`.

    Args:
        inner: the wrapped execution.
        inputs: shape in the model by input name, without the batch dimension, at most one size -1.
        outputs: shape for clients by output name, without the batch dimension, at most one size -1.
        batched: True if the first dimension is the batch.
    """

    has_batch_memory = True

    def __init__(
        self, inner: Execution, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]], batched: bool
    ) -> None:
        super().__init__(inner)
        self._inputs = inputs
        self._outputs = outputs
        self._batched = batched
        self.by_member = inner.by_member
        self.reads_device_rows = inner.reads_device_rows
        self._batch: dict[str, tuple[Array, Array]] = {}  # arrays of the next batch, in either shape

    def batch_arrays(self, like: Mapping[str, Array], rows: int) -> dict[str, Array]:
        """Return the wrapped execution's arrays in the clients' shapes."""
        if not has_batch_memory(self.inner):
            return {}
        arrays = self.inner.batch_arrays(self._to_model_shape(like), rows)
        self._batch = {
            name: (array.reshape((rows, *like[name].shape[1:]) if self._batched else like[name].shape), array)
            for name, array in arrays.items()
        }
        return {name: outer for name, (outer, _inner) in self._batch.items()}

    def run_members(self, inputs: dict[str, Array], members: Sequence[BatchMember]) -> list[MemberResult]:
        """Run a batch; return all outputs in the clients' shapes."""
        batch, self._batch = self._batch, {}
        arrays = self._to_model_shape(inputs)
        # The wrapped execution must get the arrays that it has provided, not views of them.
        arrays |= {name: inner for name, (outer, inner) in batch.items() if inputs.get(name) is outer}
        if members[0].inputs:
            members = [member._replace(inputs=self._to_model_shape(member.inputs)) for member in members]
        members = [
            member if member.sink is None else member._replace(sink=_ReshapingSink(member.sink, self._converted))
            for member in members
        ]
        results = self._members().run_members(arrays, members)
        for index, result in enumerate(results):
            if isinstance(result, LateResult):
                results[index] = late = LateResult()
                result.then(partial(self._set_converted, late))
            elif isinstance(result, dict):
                results[index] = self._converted(result)
        return results

    def _set_converted(self, late: LateResult, result: dict[str, Array] | HeadraceError) -> None:
        late.set(self._converted(result))

    def _converted(self, result: dict[str, Array] | HeadraceError) -> dict[str, Array] | HeadraceError:
        """Return the outputs of one member in the clients' shapes, or the error."""
        if not isinstance(result, dict):
            return result
        try:
            outputs = self._to_caller_shape(result)
        except OutputMismatch as error:
            return error
        return MemberOutputs(outputs, result.parameters) if isinstance(result, MemberOutputs) else outputs

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run a batch; return all outputs in the clients' shapes."""
        return self._to_caller_shape(self.inner.run(self._to_model_shape(inputs)))

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Begin a batch whose input buffers are views of the wrapped execution's, in the clients' shapes."""
        inner = self._overlapped().begin(self._to_model_shape(like), rows)
        inputs = {
            name: array.reshape((rows, *like[name].shape[1:]) if rows else like[name].shape)
            for name, array in inner.inputs.items()
        }
        # Rows that are resident have the same bytes in either shape.
        return InFlightBatch(inputs, rows, inner, inner.device, inner.resident_inputs)

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Finish a batch; return all outputs in the clients' shapes."""
        return self._to_caller_shape(self._overlapped().finish(self._inner_batch(batch)))

    def _to_model_shape(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._reshaped(array, self._inputs.get(name)) for name, array in inputs.items()}

    def _to_caller_shape(self, outputs: dict[str, Array]) -> dict[str, Array]:
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


class _ReshapingSink:
    """Passes responses on in the clients' shapes; see `headrace.runtimes.members.ResponseSink`."""

    def __init__(
        self,
        inner: ResponseSink,
        convert: Callable[[dict[str, Array] | HeadraceError], dict[str, Array] | HeadraceError],
    ) -> None:
        self._inner = inner
        self._convert = convert
        self.responses = inner.responses

    def send(self, result: dict[str, Array] | HeadraceError, size_bytes: int, is_final: bool) -> None:
        """Pass a response on; one that has not the declared shape ends the request."""
        converted = self._convert(result)
        if isinstance(converted, HeadraceError) and converted is not result:
            self.end(converted)
        else:
            self._inner.send(converted, size_bytes, is_final)

    def end(self, error: HeadraceError | None) -> None:
        """End the request."""
        self._inner.end(error)
