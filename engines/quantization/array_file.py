"""Samples from an .npz: an array an input, the samples along the first dimension, and perhaps their labels.

Only the samples that are taken are held: the file may be larger than the memory.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.errors import BuildError
from engines.quantization.model_inputs import InputLayout, check_labels
from engines.quantization.samples import SEED, Sample, Samples, content_digest
from server.core.model_config import ModelConfig

Array = npt.NDArray[Any]

LABELS = ("labels", "label")

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_SKIP_BYTES = 1 << 20


class _Header(NamedTuple):
    """What stands before the values of an array."""

    shape: tuple[int, ...]
    column_major: bool
    dtype: np.dtype[Any]


def open_arrays(path: Path, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int) -> Samples:
    """Samples from a file that `numpy.savez` wrote.

    Args:
        path: the file. It has an array for every input by its name; for a model with a single input that array may have any
            name. `labels` or `label`, if it is there, has the number of every sample's class.
        layouts: of the inputs.
        config: complete.
        limit: how many samples are taken at most, a random choice that is always the same.

    Raises:
        BuildError: it cannot be read, an input is missing, or an array does not fit.
    """
    where = f"{config.name}: {path.name}"
    try:
        with zipfile.ZipFile(path) as archive:
            return _ArrayFile(archive, layouts, config, where).samples(path.name, limit)
    # What a broken archive makes of the readers.
    except (OSError, ValueError, EOFError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        cure = "write it with numpy.savez, without object arrays"
        raise BuildError(f"{where} is no .npz that can be read ({error}): {cure}") from error


class _ArrayFile:
    """One archive that is being read."""

    def __init__(
        self, archive: zipfile.ZipFile, layouts: Mapping[str, InputLayout], config: ModelConfig, where: str
    ) -> None:
        self._archive = archive
        self._layouts = layouts
        self._config = config
        self._where = where
        self._headers = {name.removesuffix(".npy"): self._header(name) for name in archive.namelist()}

    def samples(self, name: str, limit: int) -> Samples:
        arrays = self._assigned()
        count = self._count(arrays)
        chosen = [int(number) for number in np.random.default_rng(SEED).permutation(count)[:limit]]
        labels = self._labels(count)
        samples: list[Sample] = [{} for _ in chosen]
        for tensor, array in arrays.items():
            layout = self._layouts[tensor]
            keeps_row = layout.keeps_row(len(self._headers[array].shape))
            rows = self._rows(array, chosen)
            for number, row, sample in zip(chosen, rows, samples, strict=True):
                values = row[None] if keeps_row else row
                sample[tensor] = layout.sample(values, f"{self._where}: sample {number} of '{array}'")
        return Samples(
            samples.__getitem__,
            [content_digest(sample) for sample in samples],
            name,
            labels=None if labels is None else labels[chosen],
            batched=self._config.max_batch_size > 0,
        )

    def _assigned(self) -> dict[str, str]:
        """By input the name of its array."""
        arrays = {tensor: tensor for tensor in self._layouts if tensor in self._headers}
        missing = [name for name, layout in self._layouts.items() if name not in arrays and not layout.optional]
        others = [name for name in self._headers if name not in LABELS and name not in arrays]
        if len(self._layouts) == len(missing) == len(others) == 1:
            return {missing[0]: others[0]}
        if missing:
            found = ", ".join(self._headers) or "nothing"
            raise BuildError(
                f"{self._where} has no array for {', '.join(missing)} (it holds {found}): add one of that name"
            )
        return arrays

    def _count(self, arrays: Mapping[str, str]) -> int:
        counts = {}
        for tensor, array in arrays.items():
            header = self._headers[array]
            counts[array] = self._layouts[tensor].count(header.dtype, header.shape, f"{self._where}: array '{array}'")
        if len(set(counts.values())) != 1:
            told = ", ".join(f"'{array}' {count}" for array, count in counts.items()) or "none"
            raise BuildError(
                f"{self._where}: the arrays differ in their number of samples ({told}): write as many of each"
            )
        count = next(iter(counts.values()))
        if not count:
            raise BuildError(f"{self._where} holds no samples: its arrays are empty")
        return count

    def _labels(self, count: int) -> Array | None:
        name = next((name for name in LABELS if name in self._headers and name not in self._layouts), "")
        if not name:
            return None
        shape = self._headers[name].shape
        if shape[:1] != (count,) or len(shape) > 2 or shape[1:] not in ((), (1,)):
            cure = f"write one number a sample, [{count}]"
            raise BuildError(f"{self._where}: array '{name}' has the shape {list(shape)} for {count} samples: {cure}")
        labels = np.stack(self._rows(name, range(count)))
        return check_labels(labels, self._config, f"{self._where}: array '{name}'")

    def _header(self, member: str) -> _Header:
        with self._archive.open(member) as stream:
            return self._read_header(stream)

    def _read_header(self, stream: IO[bytes]) -> _Header:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"version {version} of the array format")
        header = _Header(*_HEADERS[version](stream))
        if header.dtype.hasobject:
            raise ValueError("an array of Python objects")
        return header

    def _rows(self, array: str, numbers: Sequence[int]) -> list[Array]:
        """The rows of these numbers, in their order; the file is read once, from its start to the last of them."""
        with self._archive.open(f"{array}.npy") as stream:
            header = self._read_header(stream)
            if header.column_major:
                # Rows do not lie together: no way around the whole.
                values = np.frombuffer(stream.read(), header.dtype).reshape(header.shape, order="F")
                return [np.ascontiguousarray(values[number]) for number in numbers]
            shape = header.shape[1:]
            row_bytes = header.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            rows: dict[int, Array] = {}
            position = 0
            for number in sorted(set(numbers)):
                _read(stream, (number - position) * row_bytes, keep=False)
                rows[number] = np.frombuffer(_read(stream, row_bytes), header.dtype).reshape(shape)
                position = number + 1
            return [rows[number] for number in numbers]


def _read(stream: IO[bytes], size_bytes: int, keep: bool = True) -> bytes:
    """So many bytes, or none of them where they are only passed over."""
    kept = bytearray()
    while size_bytes:
        piece = stream.read(min(size_bytes, _SKIP_BYTES))
        if not piece:
            raise EOFError("it ends too early")
        size_bytes -= len(piece)
        if keep:
            kept += piece
    return bytes(kept)
