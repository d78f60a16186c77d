"""Headrace's own form of a Python model: a class with `predict`, or a decorated function.

A class gets the batch as a dict of arrays; its tensors come from the configuration, or from the attributes `inputs` and
`outputs`. A decorated function gets its inputs as arguments; its tensors come from the annotations. Both run once for each batch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace_model import protocol

_SPELLINGS = {name.lower(): name for name in protocol.CODES}
_SPELLINGS["string"] = "BYTES"


class TensorType:
    """Datatype and shape of a tensor in an annotation, e.g. `Tensor["fp32", 3, -1]`, without the batch dimension; -1 is any size.

    Args:
        datatype: name of the datatype, e.g. "FP32".
        dims: shape of one row.
    """

    def __init__(self, datatype: str, dims: tuple[int, ...]) -> None:
        self.datatype = datatype
        self.dims = dims

    def __class_getitem__(cls, item: Any) -> Any:
        """Return a tensor type, e.g. of `Tensor["fp32", 4]`; raises TypeError for a wrong datatype or dimension."""
        name, *dims = item if isinstance(item, tuple) else (item,)
        datatype = _SPELLINGS.get(str(name).lower().replace("type_", ""))
        if datatype is None:
            raise TypeError("{!r} is not a datatype: write one of {}".format(name, ", ".join(sorted(_SPELLINGS))))
        for size in dims:
            if type(size) is not int or size == 0 or size < -1:
                raise TypeError(f"a dimension is a positive number, or -1 for any size, not {size!r}")
        return cls(datatype, tuple(dims))

    def __repr__(self) -> str:
        return "Tensor[{}]".format(", ".join([repr(self.datatype.lower()), *map(str, self.dims)]))

    def config(self, name: str) -> dict[str, Any]:
        """Return the tensor in Triton's JSON form."""
        data_type = "TYPE_STRING" if self.datatype == "BYTES" else "TYPE_" + self.datatype
        return {"name": name, "data_type": data_type, "dims": list(self.dims)}


class ModelFunction:
    """A decorated function; stays callable, e.g. in tests.

    Args:
        function: the function.
        max_batch_size: maximum rows of a batch; 0: the function gets the inputs of one request.
    """

    def __init__(self, function: Callable[..., Any], max_batch_size: int) -> None:
        self.function = function
        self.max_batch_size = max_batch_size
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "model")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        return self.function(*arguments, **named)

    def tensors(self) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """Return inputs and outputs by name, from the annotations.

        Raises:
            TypeError: an annotation is missing or is no Tensor.
        """
        annotations = _annotations(self.function)
        inputs: dict[str, TensorType] = {}
        for name in inspect.signature(self.function).parameters:
            inputs[name] = _tensor_type(annotations.get(name), f"argument {name!r} of {self.__name__}")
        result = annotations.get("return")
        if not isinstance(result, dict) or not result:
            raise TypeError(f'{self.__name__} needs the annotation -> {{"NAME": Tensor[...]}} of its outputs')
        outputs = {name: _tensor_type(value, f"output {name!r} of {self.__name__}") for name, value in result.items()}
        return inputs, outputs


def _tensor_type(value: Any, subject: str) -> TensorType:
    if not isinstance(value, TensorType):
        raise TypeError(f'{subject} needs the annotation Tensor["DATATYPE", SIZE, ...], not {value!r}')
    return value


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations as values; a file with `from __future__ import annotations` has them as text."""
    scope = dict(vars(sys.modules.get(function.__module__, sys)), **getattr(function, "__globals__", {}))
    return {
        name: eval(value, scope)
        if isinstance(value, str)
        else value  # the model's own code, in the model's own process
        for name, value in getattr(function, "__annotations__", {}).items()
    }


def model(function: Callable[..., Any] | None = None, *, max_batch_size: int = 0) -> Any:
    """Make a function the model of its file.

    Args:
        function: the function, for `@model` without arguments.
        max_batch_size: maximum rows of a batch. Arrays have a first dimension for the rows if it is not 0.
    """
    if type(max_batch_size) is not int or max_batch_size < 0:
        raise TypeError(f"max_batch_size is a number from 0 on, not {max_batch_size!r}")
    if function is not None:
        return ModelFunction(function, max_batch_size)
    return lambda decorated: ModelFunction(decorated, max_batch_size)


class ModelContext:
    """Facts about the running model, for `load`.

    Args:
        args: arguments of Triton's `initialize`, and the model's file.

    Attributes:
        args: see above.
        name: name of the model.
        version: number of the version.
        file: path of the model's file.
        config: configuration in Triton's JSON form.
    """

    def __init__(self, args: dict[str, str]) -> None:
        self.args = args
        self.name = args.get("model_name", "")
        self.version = args.get("model_version", "")
        self.file = args.get("model_file", "")
        self.config: dict[str, Any] = json.loads(args.get("model_config") or "{}")


class PredictForm:
    """A model in Headrace's own form, see `headrace_model.forms.Form` for the methods.

    Args:
        target: instance of a class with `predict`, or a decorated function.
        file: path of the model's file.
    """

    name = "predict"
    by_request = False

    def __init__(self, target: Any, file: str = "") -> None:
        self._target = target
        self._file = file
        if isinstance(target, ModelFunction):
            names = list(inspect.signature(target.function).parameters)
            self._predict: Callable[[dict[str, Any]], Any] = lambda batch: target.function(*[batch[n] for n in names])
        else:
            self._predict = target.predict

    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Complete a configuration from annotations or attributes, or from the model's file; values of the file stay."""
        target, config = self._target, dict(config)
        if hasattr(target, "complete"):
            return target.complete(config, self._file)  # type: ignore[no-any-return]
        inputs: Mapping[str, Any] = getattr(target, "inputs", None) or {}
        outputs: Mapping[str, Any] = getattr(target, "outputs", None) or {}
        if isinstance(target, ModelFunction):
            inputs, outputs = target.tensors()
        rows = getattr(target, "max_batch_size", None)
        if rows is not None:
            config.setdefault("max_batch_size", rows)
        for field, tensors in (("input", inputs), ("output", outputs)):
            if tensors and not config.get(field):
                config[field] = [
                    _tensor_type(value, f"{field} {name!r}").config(name) for name, value in tensors.items()
                ]
        if config.get("max_batch_size", 0) > 1:
            config.setdefault("dynamic_batching", {})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Call `load` of the class with a `ModelContext`, if it has one."""
        load = getattr(self._target, "load", None)
        if load is not None:
            load(ModelContext(args))

    def predict(self, batch: dict[str, Any]) -> Any:
        """Run a batch.

        Args:
            batch: arrays of all rows by input name.
        """
        return self._predict(batch)

    @property
    def has_probe(self) -> bool:
        """True if the class has `is_ready`."""
        return getattr(self._target, "is_ready", None) is not None

    def is_ready(self) -> bool:
        """Return the result of `is_ready` of the class; True without one."""
        return probe_result(getattr(self._target, "is_ready", None))

    def finalize(self) -> None:
        """Call `close` of the class, if it has one."""
        close = getattr(self._target, "close", None)
        if close is not None:
            close()


def probe_result(probe: Callable[[], Any] | None) -> bool:
    """Call a model's `is_ready`, a function or a coroutine function; True without one.

    Raises:
        TypeError: its result is no bool.
    """
    if probe is None:
        return True
    result = probe()
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if not isinstance(result, (bool, np.bool_)):
        raise TypeError("is_ready returned " + type(result).__name__ + ", not a bool")
    return bool(result)


def own_models(module: Any) -> list[tuple[str, Any, int | None]]:
    """Return name, object and line of everything in a module that is a model in this form, without base classes of others."""
    result: dict[int, tuple[str, Any, int | None]] = {}  # by id: a second name of a model is no other model
    bases: set[int] = set()
    for name, value in vars(module).items():
        if isinstance(value, ModelFunction):
            if value.function.__module__ == module.__name__:
                result.setdefault(id(value), (name, value, value.function.__code__.co_firstlineno))
        elif (
            isinstance(value, type)
            and value.__module__ == module.__name__
            and callable(getattr(value, "predict", None))
        ):
            result.setdefault(id(value), (name, value, None))
            bases.update(map(id, value.__mro__[1:]))
    return [model for key, model in result.items() if key not in bases]
