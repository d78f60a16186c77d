"""A repository of demo models, each built once for all tests, and checkpoints in PyTorch's old format, without PyTorch."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace_engines.demo.build import CATALOGUE, build_demo_model

SaveCheckpoint = Callable[..., bytes]


@pytest.fixture(scope="session")
def demo_repository(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds a demo model unless a test has done so, and returns the repository."""
    output = tmp_path_factory.mktemp("demo_repository")

    @cache
    def with_model(name: str) -> Path:
        outcome = build_demo_model(CATALOGUE[name], output, False, lambda *_: None)
        assert outcome.built, outcome.error
        return output

    return with_model


class _Storage:
    def __init__(self, key: str, values: np.ndarray) -> None:
        self.key, self.values = key, values


class _Tensor:
    """A tensor over a storage; `strides` in elements."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> None:
        self.arguments = (storage, offset, shape, strides, False, collections.OrderedDict())

    def __reduce__(self) -> Any:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = {"<f4": "FloatStorage", "<i8": "LongStorage"}[obj.values.dtype.str]
        return "storage", getattr(sys.modules["torch"], kind), obj.key, "cpu", len(obj.values), None


def _fake_torch() -> dict[str, types.ModuleType]:
    torch, inner = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch._utils = inner
    for name in ("FloatStorage", "LongStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild() -> None: ...

    rebuild.__module__, rebuild.__name__, rebuild.__qualname__ = "torch._utils", *["_rebuild_tensor_v2"] * 2
    inner._rebuild_tensor_v2 = rebuild
    return {"torch": torch, "torch._utils": inner}


@pytest.fixture
def save_checkpoint(monkeypatch: pytest.MonkeyPatch) -> SaveCheckpoint:
    """save(state): entries are arrays, (array, shape, strides, offset) for views, or anything picklable."""

    def save(state: dict[str, Any]) -> bytes:
        storages: list[_Storage] = []

        def tensor(entry: Any) -> Any:
            if isinstance(entry, np.ndarray):
                entry = (entry.ravel(), entry.shape, tuple(s // entry.itemsize for s in entry.strides), 0)
            if not isinstance(entry, tuple):
                return entry
            values, shape, strides, offset = entry
            storages.append(_Storage(str(1000 + len(storages)), values))
            return _Tensor(storages[-1], shape, strides, offset)

        stream = io.BytesIO()
        info = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
        for header in (0x1950A86A20F9469CFC6C, 1001, info):
            pickle.dump(header, stream, 2)
        with monkeypatch.context() as patch:
            for name, module in _fake_torch().items():
                patch.setitem(sys.modules, name, module)
            _Pickler(stream, 2).dump(collections.OrderedDict((name, tensor(entry)) for name, entry in state.items()))
        pickle.dump([storage.key for storage in storages], stream, 2)
        for storage in storages:
            stream.write(struct.pack("<q", len(storage.values)) + storage.values.tobytes())
        return stream.getvalue()

    return save
