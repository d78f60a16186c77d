"""Reads the tensors of a PyTorch checkpoint with NumPy alone, in the format before PyTorch 1.6.

A checkpoint is a pickle, and a pickle can call any function. The unpickler here maps a few names to functions of this module and
refuses all others. The format is five pickles (magic number, protocol, machine, the object, the keys of the storages), then each
storage as its element count (int64) and its raw values, little-endian.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_engines.errors import BuildError

Array = npt.NDArray[Any]
_MAGIC = 0x1950A86A20F9469CFC6C


class _StateDict(dict[str, Any]):
    """Replaces collections.OrderedDict; as a subclass it accepts the attributes that a pickle sets."""


class _Storage(NamedTuple):
    """A storage, whose values follow the pickles."""

    key: str
    dtype: str


class _TensorView(NamedTuple):
    """A tensor before its storage is read; offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_ACCEPTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _StateDict,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _TensorView(*arguments[:4]),
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
        """Return the storage of a persistent id ("storage", type, key, device, length, ...)."""
        return self.storages.setdefault(str(pid[2]), _Storage(str(pid[2]), pid[1]))


def read_state_dict(content: bytes) -> dict[str, Array]:
    """Return the tensors of a checkpoint by name.

    Args:
        content: bytes of the file.

    Returns:
        FP32 and INT64 arrays in their saved shapes.

    Raises:
        BuildError: the content is not such a checkpoint, or has other objects than tensors.
    """
    stream = io.BytesIO(content)
    try:
        if RestrictedUnpickler(stream).load() != _MAGIC:
            raise ValueError("it does not start with PyTorch's magic number")
        for _ in ("protocol", "machine"):
            RestrictedUnpickler(stream).load()
        unpickler = RestrictedUnpickler(stream)
        state = unpickler.load()
        values: dict[str, Array] = {}
        for key in RestrictedUnpickler(stream).load():
            dtype = np.dtype(unpickler.storages[key].dtype)
            size = int.from_bytes(stream.read(8), "little") * dtype.itemsize
            values[key] = np.frombuffer(stream.read(size), dtype)
        return {str(name): _materialise(view, values[view.storage.key]) for name, view in state.items()}
    # A damaged file leads to any of these errors in the unpickler; a BuildError is not caught here.
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise BuildError(f"the file is not a readable PyTorch checkpoint: {type(error).__name__}: {error}") from error


def _materialise(view: _TensorView, values: Array) -> Array:
    """Copy a tensor out of its storage; NumPy raises ValueError for one that reaches beyond it."""
    strides = [stride * values.itemsize for stride in view.strides]
    return np.ndarray(view.shape, values.dtype, values.data, view.offset * values.itemsize, strides).copy()
