"""The table of served versions that the engine sends to its front ends: names, numbers and tensor specs.

A front end looks up the name and version of a request in it, decodes by the specs, and names the version by its number. A name
that the table does not have is passed to the engine, which answers with the error of the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headrace.core.tensor import BY_NAME, ModelSpec, PaddedInputs, TensorSpec


class TensorRow(msgspec.Struct, array_like=True, frozen=True):
    """See `headrace.core.tensor.TensorSpec`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool
    labels: tuple[str, ...]


class PaddedRow(msgspec.Struct, array_like=True, frozen=True):
    """See `headrace.core.tensor.PaddedInputs`."""

    names: tuple[str, ...]
    axis: int
    multiple_of: int
    longest: int


class VersionRow(msgspec.Struct, array_like=True, frozen=True):
    """One served version; see `headrace.core.tensor.ModelSpec`.

    Attributes:
        number: of the version, unique in the engine process.
        requested_as: version texts that select it: its number, labels, "" for the latest.
        has_cache: responses may come from a response cache.
        has_details: it reads ids and requested outputs of requests.
        max_group_rows: most rows of a group of requests; 1 for requests alone.
        histograms: codec times are counted.
        sticky_header: header that the engine routes requests of the model by; "" for none.
    """

    number: int
    name: str
    version: str
    platform: str
    requested_as: tuple[str, ...]
    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]
    max_batch_size: int
    parameters: dict[str, str | int | float | bool]
    resident_devices: tuple[int, ...] = ()
    ragged: tuple[str, ...] = ()
    padded: PaddedRow | None = None
    has_cache: bool = False
    has_details: bool = True
    max_group_rows: int = 1
    histograms: bool = True
    decoupled: bool = False
    sticky_header: str = ""


_decoder = msgspec.msgpack.Decoder(list[VersionRow])


def encode_table(rows: Iterable[VersionRow]) -> bytes:
    """Encode the table."""
    return msgspec.msgpack.encode(list(rows))


def decode_table(content: bytes) -> list[VersionRow]:
    """Decode the table; raises ValueError for other content."""
    return _decoder.decode(content)


def sticky_headers(content: bytes) -> frozenset[str]:
    """Return the sticky headers of all models in the table; raises ValueError for other content."""
    return frozenset(row.sticky_header for row in decode_table(content)) - {""}


def _tensor_rows(specs: Mapping[str, TensorSpec]) -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(spec.name, spec.datatype.name, spec.shape, spec.optional, spec.labels) for spec in specs.values()
    )


def _tensor_specs(rows: Iterable[TensorRow]) -> dict[str, TensorSpec]:
    return {row.name: TensorSpec(row.name, BY_NAME[row.datatype], row.shape, row.optional, row.labels) for row in rows}


def version_row(
    spec: ModelSpec,
    number: int,
    requested_as: Iterable[str],
    has_cache: bool,
    has_details: bool,
    max_group_rows: int,
    histograms: bool,
    sticky_header: str = "",
) -> VersionRow:
    """Return the row of a version; arguments as in `VersionRow`."""
    padded = spec.padded
    return VersionRow(
        number,
        spec.name,
        spec.version,
        spec.platform,
        tuple(requested_as),
        _tensor_rows(spec.inputs),
        _tensor_rows(spec.outputs),
        spec.max_batch_size,
        dict(spec.parameters),
        tuple(sorted(spec.resident_devices)),
        tuple(sorted(spec.ragged)),
        None
        if padded is None
        else PaddedRow(tuple(sorted(padded.names)), padded.axis, padded.multiple_of, padded.longest),
        has_cache,
        has_details,
        max_group_rows,
        histograms,
        spec.decoupled,
        sticky_header,
    )


def model_spec(row: VersionRow) -> ModelSpec:
    """Return the spec of a version."""
    padded = row.padded
    return ModelSpec(
        row.name,
        row.version,
        row.platform,
        _tensor_specs(row.inputs),
        _tensor_specs(row.outputs),
        row.max_batch_size,
        row.parameters,
        frozenset(row.resident_devices),
        frozenset(row.ragged),
        None
        if padded is None
        else PaddedInputs(frozenset(padded.names), padded.axis, padded.multiple_of, padded.longest),
        row.decoupled,
    )
