"""Compares the output shapes of a batch with their declaration once a batch, before any caller gets rows."""

from __future__ import annotations

from collections.abc import Container, Mapping

from headrace.core.errors import ModelFailed
from headrace.core.tensor import Array, ModelSpec, fits_shape

ANY_ROWS = -1
"""Rows of outputs that may have any number of them."""
_UNTIL_RELOADED = "Its requests run alone until it is loaded again"


class OutputMismatch(ModelFailed):
    """Rows cannot be split out of a batch: its outputs have other shapes, or other values than those of the rows alone."""


class OutputCheck:
    """Checks the outputs of one version of a model; used by all its instances at once.

    A check compares a few whole numbers for each output of a batch. Its cost does not depend on the rows.

    Args:
        spec: spec of the model, with the declared outputs.
        unchecked: names of outputs that are not split by rows, and are checked where they are split.

    Attributes:
        names: names of the declared outputs, in the order of the configuration; clients get only these.
    """

    __slots__ = ("_batched", "_declared", "_name", "names")

    def __init__(self, spec: ModelSpec, unchecked: Container[str] = ()) -> None:
        self._name = spec.name
        self._batched = spec.max_batch_size > 0
        self._declared = tuple(
            (tensor.name, tensor.shape, tensor.shape[1:], -1 not in tensor.shape[1:])
            for tensor in spec.outputs.values()
            if tensor.name not in unchecked
        )
        self.names = tuple(spec.outputs)

    def check(
        self, outputs: Mapping[str, Array], rows: int, requested: tuple[str, ...] = (), by_member: bool = False
    ) -> None:
        """Compare the shapes of all declared outputs with the batch.

        Args:
            outputs: arrays by name, as the execution returned them.
            rows: rows of the batch, or `ANY_ROWS`; ignored for a model without a batch dimension.
            requested: names of the outputs that must be there; () for all.
            by_member: the outputs are those of one request: an error does not concern the others of its batch.

        Raises:
            OutputMismatch: an output is missing, has another number of rows, or differs from its declared dimensions.
        """
        batched = self._batched
        for name, declared, row_dims, fixed in self._declared:
            array = outputs.get(name)
            if array is None:
                if requested and name not in requested:
                    continue
                cure = "return it in its code" if by_member else "export the model again"
                raise OutputMismatch(
                    f"model '{self._name}' returned no output '{name}', which its configuration declares. The model is at "
                    f"fault, not the request: remove the output from the configuration, or {cure}"
                )
            shape = array.shape
            if batched:
                # The fast path of nearly every batch: its rows, then fixed dimensions.
                if (
                    shape
                    and shape[0] == rows
                    and (shape[1:] == row_dims or (not fixed and fits_shape(shape[1:], row_dims)))
                ):
                    continue
                if rows == ANY_ROWS and fits_shape(shape, declared):
                    continue
                raise self._mismatch(name, shape, (rows, *row_dims), max(rows, 0), by_member)
            if shape != declared and not fits_shape(shape, declared):
                raise self._mismatch(name, shape, declared, 0, by_member)

    def _mismatch(
        self, name: str, shape: tuple[int, ...], expected: tuple[int, ...], rows: int, by_member: bool
    ) -> OutputMismatch:
        came = f"model '{self._name}' returned output '{name}' with the shape {list(shape)}"
        if by_member:
            for_rows = f" for {rows} rows" if rows else ""
            return OutputMismatch(
                f"{came}{for_rows}, its configuration declares {list(expected)} (-1: any size). The model is at fault, not the "
                "request: correct its code, or the dims and max_batch_size of its configuration"
            )
        if not rows:
            return OutputMismatch(
                f"{came}, its configuration declares {list(expected)} (-1: any size). The model is at fault, not the request: "
                "write the dims that the model returns, or export it again"
            )
        if shape and shape[0] == rows:
            return OutputMismatch(
                f"{came} for {rows} rows, its configuration declares {list(expected)} (-1: any size). The model is at fault, "
                f"not the request. {_UNTIL_RELOADED}: write the dims that the model returns, or export it again"
            )
        return OutputMismatch(
            f"{came} for {rows} rows, expected {list(expected)}: the first dimension of '{name}' is not the batch dimension. The "
            f"model is at fault, not the request. {_UNTIL_RELOADED}: write max_batch_size: 0 in its configuration"
        )
