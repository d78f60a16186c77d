"""Reads the tensors of an untrusted PyTorch checkpoint with NumPy alone.

A checkpoint is a pickle, and a pickle can call any function. The unpickler here maps a few names to functions of this module and
refuses all others, so a hostile file can only raise an error.

`torch.save` writes two formats. Since PyTorch 1.6: a zip archive with `data.pkl` and one file per storage. Before: five pickles
(magic number, protocol, machine, the object, the keys of the storages), then each storage as its element count (int64) and its
raw values.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from headrace_engines.errors import BuildError

Array = npt.NDArray[Any]
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


class _StateDict(dict[str, Any]):
    """Replaces collections.OrderedDict; as a subclass it accepts the attributes that a pickle sets."""


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    length: int


@dataclass(frozen=True, slots=True)
class _TensorView:
    """A tensor before its storage is read; the old format has the values after the pickle."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: _Storage, offset: int, shape: Any, strides: Any, *_ignored: Any) -> _TensorView:
    return _TensorView(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(view: _TensorView, *_ignored: Any) -> _TensorView:
    return view


_ACCEPTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _StateDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "FloatStorage"): "<f4",
    ("torch", "LongStorage"): "<i8",
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the names in a state dict of FP32 and INT64 tensors."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        # Storages read so far, by key.
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of an accepted name.

        Raises:
            BuildError: the name is not accepted.
        """
        if (module, name) not in _ACCEPTED:
            raise BuildError(
                f"the checkpoint uses {module}.{name}, expected only tensors in FloatStorage or LongStorage: "
                "save it anew from PyTorch as torch.save(model.state_dict(), path)"
            )
        return _ACCEPTED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage of a persistent id ("storage", type, key, device, length, ...).

        Raises:
            BuildError: the id has another form.
        """
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or pid[1] not in ("<f4", "<i8"):
            _malformed(f"a persistent id of an unknown form: {str(pid)[:80]!r}")
        storage = _Storage(str(pid[2]), pid[1], int(pid[4]))
        if len(pid) > 5 and pid[5] is not None:
            _malformed(f"storage {storage.key} is a view of another")
        return self.storages.setdefault(storage.key, storage)


def read_state_dict(content: bytes) -> dict[str, Array]:
    """Return the tensors of a checkpoint by name.

    Args:
        content: bytes of the file, in either format.

    Returns:
        FP32 and INT64 arrays in their saved shapes.

    Raises:
        BuildError: the content is not such a checkpoint, or has other objects than tensors.
    """
    try:
        if content[:4] == b"PK\x03\x04":
            state, values = _read_zip(content)
        else:
            state, values = _read_legacy(io.BytesIO(content))
    # A damaged file leads to any of these errors in the unpickler; a BuildError is not caught here.
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        _malformed(f"{type(error).__name__}: {error}")
    except zipfile.BadZipFile as error:
        _malformed(str(error))
    if not isinstance(state, dict):
        _malformed(f"it holds a {type(state).__name__} and not a dict of tensors")
    return {str(name): _materialise(str(name), view, values) for name, view in state.items()}


def _read_legacy(stream: BinaryIO) -> tuple[Any, dict[str, Array]]:
    if RestrictedUnpickler(stream).load() != _LEGACY_MAGIC:
        _malformed("it does not start with PyTorch's magic number")
    if RestrictedUnpickler(stream).load() != _LEGACY_PROTOCOL:
        _malformed(f"its protocol is not {_LEGACY_PROTOCOL}")
    if not RestrictedUnpickler(stream).load()["little_endian"]:
        _malformed("it was saved on a big-endian machine")
    unpickler = RestrictedUnpickler(stream)
    state = unpickler.load()
    keys = RestrictedUnpickler(stream).load()
    values: dict[str, Array] = {}
    for key in keys:
        storage = unpickler.storages[key]
        length = int.from_bytes(stream.read(8), "little")
        values[key] = _to_array(storage, stream.read(length * np.dtype(storage.dtype).itemsize))
    return state, values


def _read_zip(content: bytes) -> tuple[Any, dict[str, Array]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            _malformed(f"the archive has {len(pickles)} files data.pkl and not one")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            _malformed("it was saved on a big-endian machine")
        unpickler = RestrictedUnpickler(io.BytesIO(archive.read(pickles[0])))
        state = unpickler.load()
        values = {
            key: _to_array(storage, archive.read(f"{root}data/{key}")) for key, storage in unpickler.storages.items()
        }
    return state, values


def _to_array(storage: _Storage, raw: bytes) -> Array:
    values = np.frombuffer(raw, storage.dtype)
    if len(values) != storage.length:
        _malformed(f"storage {storage.key} has {len(values)} values and not {storage.length}")
    return values


def _materialise(name: str, view: Any, values: dict[str, Array]) -> Array:
    if not isinstance(view, _TensorView):
        _malformed(f"entry {name!r} is a {type(view).__name__} and not a tensor")
    if len(view.shape) != len(view.strides) or min((*view.shape, *view.strides, view.offset), default=0) < 0:
        _malformed(f"tensor {name!r} has shape {view.shape} and strides {view.strides}")
    # as_strided would read memory outside of the storage.
    storage = values[view.storage.key]
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if 0 not in view.shape and last >= len(storage):
        _malformed(f"tensor {name!r} reaches beyond its storage")
    strides = [stride * storage.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, strides).copy()


def _malformed(fault: str) -> NoReturn:
    raise BuildError(f"the file is not a readable PyTorch checkpoint: {fault}")
