"""Imitates the part of PyTorch that the backend uses, for machines without it: copied as `torch.py` onto the path of a model.

A model's file is text: names of the arguments, and an expression over them whose value is a tensor, a tuple or a dict.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

bfloat16 = "bfloat16"


class Tensor:
    """An array on a device."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype = array.dtype

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self._array + getattr(other, "_array", other))

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self._array * getattr(other, "_array", other))

    def to(self, device: str) -> Tensor:
        """Refuse every device but the CPU."""
        assert device == "cpu"
        return self

    def detach(self) -> Tensor:
        """Return the tensor."""
        return self

    def cpu(self) -> Tensor:
        """Return the tensor."""
        return self

    def numpy(self) -> Any:
        """Return the array."""
        return self._array


class _Module:
    def __init__(self, file: str, is_script: bool) -> None:
        document = json.loads(Path(file).read_text())
        names, code = document["arguments"], compile(document["expression"], file, "eval")

        def forward(*values: Tensor) -> Any:
            return eval(code, dict(zip(names, values, strict=True)))

        self.forward: Callable[..., Any] = forward
        if is_script:
            arguments = [SimpleNamespace(name=name) for name in ["self", *names]]
            forward.schema = SimpleNamespace(arguments=arguments)  # type: ignore[attr-defined]
        else:
            parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
            forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __call__(self, *values: Tensor) -> Any:
        return self.forward(*values)

    def eval(self) -> _Module:
        """Return the module."""
        return self

    def to(self, device: str) -> _Module:
        """Refuse every device but the CPU."""
        assert device == "cpu"
        return self


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    """Do nothing."""
    yield


def from_numpy(array: Any) -> Tensor:
    """Return a tensor of an array."""
    if array.dtype == np.object_:
        raise TypeError("can't convert np.ndarray of type numpy.object_")
    return Tensor(array)


def set_num_threads(count: int) -> None:
    """Print the number."""
    print(f"torch runs {count} threads", flush=True)


def _load_script(file: str, map_location: str) -> _Module:
    assert map_location == "cpu"
    return _Module(file, is_script=True)


jit = SimpleNamespace(load=_load_script)
export = SimpleNamespace(load=lambda file: SimpleNamespace(module=lambda: _Module(file, is_script=False)))
cuda = SimpleNamespace(is_available=lambda: False)
