"""Compares the shapes of a model's outputs with their declaration, once a batch and before any caller gets rows of it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.errors import ModelFailed
from headrace.core.tensor import Array, ModelSpec

_UNTIL_RELOADED = "Its requests run alone until it is loaded again"


class OutputMismatch(ModelFailed):
    """The model returned outputs that are not those of the rows it was given: no caller's rows can be cut out of them."""


class OutputCheck:
    """Checks the outputs of one version of a model; used by all its instances at once.

    A check compares a few whole numbers for each output of a batch. Its cost does not depend on the rows.

    Args:
        spec: of the model, with the declared outputs.

    Attributes:
        names: of the declared outputs, in the order of the configuration; callers get these and no others.
    """

    __slots__ = ("_batched", "_declared", "_name", "names")

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._batched = spec.max_batch_size > 0
        self._declared = tuple(
            (tensor.name, tensor.shape, tensor.shape[1:], -1 not in tensor.shape[1:])
            for tensor in spec.outputs.values()
        )
        self.names = tuple(spec.outputs)

    def check(self, outputs: Mapping[str, Array], rows: int) -> None:
        """Compare the shapes of all declared outputs with what was sent.

        Args:
            outputs: by name, as the execution returned them.
            rows: sent to the model, of all requests of the batch together; not used for a model without a batch dimension.

        Raises:
            OutputMismatch: an output is missing, has another number of rows, or differs from its declared dimensions.
        """
        batched = self._batched
        for name, declared, row_dims, fixed in self._declared:
            array = outputs.get(name)
            if array is None:
                raise OutputMismatch(
                    f"model '{self._name}' returned no output '{name}', which its configuration declares. The model is at "
                    "fault, not the request: remove the output from the configuration, or export the model again"
                )
            shape = array.shape
            if batched:
                # As for nearly every batch: the rows sent, and fixed dimensions behind them.
                if shape and shape[0] == rows and (shape[1:] == row_dims or (not fixed and _fits(shape[1:], row_dims))):
                    continue
                raise self._mismatch(name, shape, (rows, *row_dims), rows)
            if shape != declared and not _fits(shape, declared):
                raise self._mismatch(name, shape, declared, 0)

    def _mismatch(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...], rows: int) -> OutputMismatch:
        came = f"model '{self._name}' returned output '{name}' with the shape {list(shape)}"
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


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    if len(shape) != len(declared):
        return False
    # The lengths are equal. A loop takes half of the time of `all` with a generator.
    for size, expected in zip(shape, declared):  # noqa: B905, SIM110
        if size != expected and expected != -1:
            return False
    return True
