"""Inputs that `headrace tune` runs a model on: arrays of a file, the model's own warm-up request, or random values."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config.config_reader import ModelFolder
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import ModelInput
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Array, Datatype
from headrace.repository.measuring import MAX_INPUT_BYTES, unmeasurable
from headrace.repository.warmup import make_warmups, one_row


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """Inputs for batches of any number of rows.

    Attributes:
        origin: Where they come from, in words.
        arrays: By input name; with a batch dimension of one row or more where the model has one.
        batched: Whether the model has a batch dimension.
    """

    origin: str
    arrays: Mapping[str, Array]
    batched: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all inputs. Text counts as its references."""
        return sum(array.nbytes // (len(array) if self.batched else 1) for array in self.arrays.values())

    def batch(self, rows: int) -> dict[str, Array]:
        """Return arrays of `rows` rows, repeated from the first where there are fewer. A model without batches has one."""
        if not self.batched:
            return dict(self.arrays)
        return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in self.arrays.items()}


def tuning_inputs(folder: ModelFolder, file: Path | None = None) -> TuningInputs:
    """Choose the inputs of a model: those of `file`, else its first complete `model_warmup`, else random values.

    Args:
        folder: The model's, configuration complete.
        file: An .npz with one array for each input.

    Raises:
        ConfigError: The file does not fit the model, or there are no inputs and none can be made up.
    """
    config, batched = folder.config, folder.config.max_batch_size > 0
    needed = [tensor for tensor in config.served_input if not tensor.optional]
    if file is not None:
        return TuningInputs(f"of {file}", _from_file(file, config.served_input, batched), batched)
    for warmup in make_warmups(config, folder.path):
        if all(tensor.name in warmup.inputs for tensor in needed):
            return TuningInputs(f"of model_warmup {warmup.name!r}", warmup.inputs, batched)
    problem = unmeasurable(config)
    if problem:
        cure = "give some: --input FILE.npz with an array for each input, or model_warmup in the configuration"
        raise ConfigError([Finding(folder.name, None, f"no inputs can be made up: {problem}", cure)])
    rows = {tensor.name: one_row(tensor) for tensor in config.served_input}
    return TuningInputs("random values", rows if batched else {name: row[0] for name, row in rows.items()}, batched)


def _from_file(file: Path, tensors: tuple[ModelInput, ...], batched: bool) -> dict[str, Array]:
    cure = "write it with numpy.savez(file, input_name=array)"
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise _refused(file, "has one array without a name", cure)
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise _refused(file, f"cannot be read: {error.strerror or error}", "name an .npz file") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _refused(file, f"is no .npz of plain arrays ({error})", cure) from None
    names = ", ".join(tensor.name for tensor in tensors)
    unknown = sorted(arrays.keys() - {tensor.name for tensor in tensors})
    if unknown:
        raise _refused(file, f"has the array {unknown[0]!r}, the model has the inputs {names}", "rename or remove it")
    absent = [tensor.name for tensor in tensors if tensor.name not in arrays and not tensor.optional]
    if absent:
        raise _refused(file, f"has no array for the input {absent[0]!r}", f"add one; the model needs {names}")
    return {
        tensor.name: _fitted(file, arrays[tensor.name], tensor, batched) for tensor in tensors if tensor.name in arrays
    }


def _fitted(file: Path, array: Array, tensor: ModelInput, batched: bool) -> Array:
    """The array as the model takes it: text as bytes.

    Raises:
        ConfigError: Its datatype or shape is not the input's.
    """
    kind = BY_CONFIG_NAME[tensor.data_type]
    if kind is BYTES and array.dtype.kind in "US":
        values = np.empty(array.shape, dtype=object)
        values.reshape(-1)[:] = [
            text if isinstance(text, bytes) else text.encode() for text in array.reshape(-1).tolist()
        ]
        array = values
    elif kind is BYTES or array.dtype != kind.dtype:
        raise _refused(
            file, f"array {tensor.name!r} has the type {array.dtype}, the input takes {_words(kind)}", _cast(kind)
        )
    sizes = array.shape[1:] if batched else array.shape
    fits = len(sizes) == len(tensor.dims) and all(
        told in (-1, size) for told, size in zip(tensor.dims, sizes, strict=True)
    )
    if not fits or (batched and not len(array)):
        wanted = [*(["rows"] if batched else []), *tensor.dims]
        shown = f"[{', '.join(map(str, wanted))}]"
        raise _refused(
            file, f"array {tensor.name!r} has the shape {list(array.shape)}, the input takes {shown}", "reshape it"
        )
    if array.nbytes > MAX_INPUT_BYTES:
        raise _refused(
            file, f"array {tensor.name!r} has {array.nbytes} bytes, {MAX_INPUT_BYTES} are run", "keep fewer rows"
        )
    return np.ascontiguousarray(array)


def _words(kind: Datatype) -> str:
    return "text" if kind is BYTES else f"{kind.name} ({kind.dtype})"


def _cast(kind: Datatype) -> str:
    return "write an array of text" if kind is BYTES else f"write array.astype('{kind.dtype}')"


def _refused(file: Path, message: str, cure: str) -> ConfigError:
    return ConfigError([Finding(str(file), None, message, cure)])
