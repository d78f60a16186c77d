"""Ragged batches as Triton defines them: requests of different shapes are joined without padding.

`RaggedLayout` joins the elements of ragged inputs to one dimension, computes inputs from the shapes of the requests
(`batch_input`), and splits outputs by the shapes of an input (`batch_output`). It divides a batch whose joined inputs are larger
than the engine supports. See docs/ragged-batches.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.core.ragged import ShapeRanges, SourceSizes, computed_values, fits_ranges
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.scheduling.assembly import Division, Staging, aligned
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import RaggedPolicy
from headrace.inference.scheduling.queue import Entry

Check = Callable[[Mapping[str, Array], int], None]
_NO_REQUESTS = SourceSizes()


class RaggedLayout:
    """Joins requests of different shapes without padding.

    Args:
        policy: ragged inputs, computed inputs and scattered outputs.
        spec: spec of the model.

    Attributes:
        policy: as in the argument.
        outputs: names of the declared outputs.
        model: name of the model, for messages.
        ranges: shapes that the engine supports, one item for each optimisation profile; empty without bounds. Set before the
            first batch.
    """

    def __init__(self, policy: RaggedPolicy, spec: ModelSpec) -> None:
        self.policy = policy
        self.outputs = tuple(spec.outputs)
        self.model = spec.name
        self.ranges: Sequence[ShapeRanges] = ()

    def divide(self, entries: list[Entry]) -> Division:
        """Divide the entries in their order into groups whose joined inputs the engine supports.

        An entry that does not fit alone is a group of its own, for which the execution raises the error.
        """
        if not self.ranges or len(entries) == 1:
            return Division([entries])
        groups: list[list[Entry]] = []
        sizes: dict[str, SourceSizes] = {}
        is_open = False  # the last group fits, and may take more entries
        for entry in entries:
            together = self._sizes(sizes, entry.inputs)
            if is_open and fits_ranges(self._shapes(together), self.ranges):
                groups[-1].append(entry)
                sizes = together
                continue
            groups.append([entry])
            sizes = self._sizes({}, entry.inputs)
            is_open = fits_ranges(self._shapes(sizes), self.ranges)
        return Division(groups)

    def record_division(self, division: Division, elapsed_ns: int, cpu_ns: int) -> None:
        """Record nothing."""

    def queue_key(self, shape_key: object) -> object:
        """Return the key as it is."""
        return shape_key

    def is_plain(self, entries: list[Entry], now_ns: int) -> bool:
        """Return False: even a lone request is joined, and has computed inputs."""
        return False

    def runs_in_groups(self, entries: list[Entry]) -> bool:
        """Return False: the groups of a batch can be in flight together."""
        return False

    def arrange(self, requests: Sequence[Mapping[str, Array]]) -> RaggedArrangement:
        """Return the arrangement of the requests of one batch, by their inputs."""
        return RaggedArrangement(self, requests)

    def _sizes(self, sizes: Mapping[str, SourceSizes], inputs: Mapping[str, Array]) -> dict[str, SourceSizes]:
        """Return the sizes of a group with another request."""
        return {name: sizes.get(name, _NO_REQUESTS).plus(array.shape) for name, array in inputs.items()}

    def _shapes(self, sizes: Mapping[str, SourceSizes]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's inputs for a group."""
        ragged = self.policy.inputs
        shapes = {
            name: (source.elements,) if name in ragged else (source.rows, *source.item)
            for name, source in sizes.items()
        }
        for computed in self.policy.computed:
            if computed.source in sizes:  # else the request lacks it, for which the run raises the error
                shape = sizes[computed.source].computed_shape(computed.kind)
                shapes.update((name, shape) for name in computed.names)
        return shapes


class RaggedArrangement:
    """Joined inputs of one batch, and the way back from its outputs to the requests; see `Arrangement`.

    Args:
        layout: of the model.
        requests: inputs of each request.
    """

    def __init__(self, layout: RaggedLayout, requests: Sequence[Mapping[str, Array]]) -> None:
        self._layout = layout
        self._requests: Sequence[Mapping[str, Array]] = requests
        self._rows = [next(iter(request.values())).shape[0] for request in requests]
        # The inputs of a cancelled request are released while its batch runs: their shapes are stored.
        self._shapes = {name: [request[name].shape for request in requests] for name in requests[0]}
        self._computed: dict[str, Array] = {}

    def stack(self, staging: Staging) -> dict[str, Array]:
        """Return the inputs of the batch: ragged ones as one dimension, then the computed ones."""
        policy, requests, rows = self._layout.policy, self._requests, sum(self._rows)
        inputs: dict[str, Array] = {}
        for name in requests[0]:
            parts = [aligned(request[name]) for request in requests]
            if name in policy.inputs:
                flat = [part.reshape(-1) for part in parts]
                inputs[name] = flat[0] if len(flat) == 1 else np.concatenate(flat)
            else:
                inputs[name] = parts[0] if len(parts) == 1 else staging.join(name, parts, rows)
        inputs |= self._computed_inputs()
        self._requests = ()
        return inputs

    def like(self) -> Mapping[str, Array]:
        """Return arrays with the shapes and dtypes of the batch, for `OverlappedExecution.begin` without rows."""
        policy, first = self._layout.policy, self._requests[0]
        self._computed = self._computed_inputs()
        shapes = {
            name: (sum(map(math.prod, self._shapes[name])),)
            if name in policy.inputs
            else (sum(self._rows), *array.shape[1:])
            for name, array in first.items()
        }
        joined = {name: np.broadcast_to(array.dtype.type(0), shapes[name]) for name, array in first.items()}
        return joined | self._computed

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Copy the inputs of all requests into the buffers of a batch.

        Args:
            buffers: arrays by input name, with the shapes of `like`.
        """
        ragged, computed = self._layout.policy.inputs, self._computed
        for name, buffer in buffers.items():
            if name in computed:
                np.copyto(buffer, computed[name], casting="equiv")
                continue
            parts = [np.asarray(request[name]) for request in self._requests]
            if name in ragged:
                parts = [part.reshape(-1) for part in parts]
            np.concatenate(parts, out=buffer, casting="equiv")
        self._requests, self._computed = (), {}

    def _computed_inputs(self) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for computed in self._layout.policy.computed:
            values = computed_values(computed.kind, self._shapes[computed.source], computed.datatype.dtype)
            inputs.update((name, values) for name in computed.names)
        return inputs

    def split(self, outputs: dict[str, Array], check: Check) -> list[dict[str, Array]]:
        """Return the outputs of each request: by rows, or by the shapes of the source input."""
        layout, scattered = self._layout, self._layout.policy.scattered
        check(outputs, sum(self._rows))
        results: list[dict[str, Array]] = [{} for _ in self._rows]
        for name in layout.outputs:
            array = outputs.get(name)
            if array is None:
                raise OutputMismatch(f"model '{layout.model}' returned no output '{name}', which batch_output names")
            source = scattered.get(name)
            if source is None:
                start = 0
                for result, rows in zip(results, self._rows, strict=True):
                    result[name] = array[start : start + rows]
                    start += rows
            else:
                parts = self._scatter(name, array, source)
                for result, part in zip(results, parts, strict=True):
                    result[name] = part
        return results

    def _scatter(self, name: str, array: Array, source: str) -> list[Array]:
        shapes = self._shapes[source]
        counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        total = sum(counts)
        inner: tuple[int, ...] = ()
        if array.size != total:
            if array.ndim < 2 or array.shape[0] != total:
                raise OutputMismatch(
                    f"model '{self._layout.model}' returned output '{name}' with the shape {list(array.shape)}, expected {total} "
                    f"elements: those of input '{source}' (batch_output). The model is at fault, not the request"
                )
            inner = array.shape[1:]
        flat = array.reshape(total, *inner)
        parts, start = [], 0
        for shape, count in zip(shapes, counts, strict=True):
            parts.append(flat[start : start + count].reshape(*shape, *inner))
            start += count
        return parts

    def record(self, outputs: Mapping[str, Array], compute_ns: int, overhead_ns: int) -> None:
        """Record nothing."""
