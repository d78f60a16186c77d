"""The table of served versions that the engine sends to its front ends: names, numbers and tensor specs.

A front end looks up the name and version of a request in it, decodes by the specs, and names the version by its number. A name
that the table does not have is passed to the engine, which answers with the error of the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec


class VersionRow(msgspec.Struct, array_like=True, frozen=True):
    """One served version.

    Attributes:
        spec: of the version.
        number: of the version, unique in the engine process.
        requested_as: version texts that select it: its number, labels, "" for the latest.
        has_cache: responses may come from a response cache.
        has_details: it reads ids and requested outputs of requests.
        max_group_rows: most rows of a group of requests; 1 for requests alone.
        histograms: codec times are counted.
        sticky_header: header that the engine routes requests of the model by; "" for none.
    """

    spec: ModelSpec
    number: int
    requested_as: tuple[str, ...]
    has_cache: bool = False
    has_details: bool = True
    max_group_rows: int = 1
    histograms: bool = True
    sticky_header: str = ""


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # of the NumPy dtype of a datatype
_decoder = msgspec.msgpack.Decoder(list[VersionRow], dec_hook=lambda _, name: np.dtype(name))


def encode_table(rows: Iterable[VersionRow]) -> bytes:
    """Encode the table."""
    return _encoder.encode(list(rows))


def decode_table(content: bytes) -> list[VersionRow]:
    """Decode the table; raises ValueError for other content."""
    return [msgspec.structs.replace(row, spec=_with_datatypes(row.spec)) for row in _decoder.decode(content)]


def sticky_headers(content: bytes) -> frozenset[str]:
    """Return the sticky headers of all models in the table; raises ValueError for other content."""
    return frozenset(row.sticky_header for row in _decoder.decode(content)) - {""}


def _with_datatypes(spec: ModelSpec) -> ModelSpec:
    """Return a decoded spec with the datatypes of this process, which are compared by identity."""

    def tensors(decoded: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {name: replace(tensor, datatype=BY_NAME[tensor.datatype.name]) for name, tensor in decoded.items()}

    return replace(spec, inputs=tensors(spec.inputs), outputs=tensors(spec.outputs))
