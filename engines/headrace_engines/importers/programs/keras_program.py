"""Keras models (.keras, .h5) to ONNX by `keras.Model.export(format="onnx")`."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import onnx

from .exchange import ImportFault, Json, Report, Source, check_names, fitting_sizes, load_file

_FREE_SIZE = 32
_BATCH = 2


def open_source(request: Json, report: Report) -> Source:
    """Return the model of a file.

    Raises:
        ImportFault: the file cannot be loaded, or the model has no fixed inputs.
    """
    report(0.05, "loads the model")
    custom: dict[str, Any] = {}
    if request["custom_objects"]:
        module = load_file(request["custom_objects"])
        # Registered classes are found by keras itself.
        custom = {name: value for name, value in vars(module).items() if isinstance(value, type) or callable(value)}
    model = keras.saving.load_model(
        request["path"], custom_objects=custom, compile=False, safe_mode=not request["allow_code"]
    )
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        fault = f"{os.path.basename(request['path'])} is a {type(model).__name__} without symbolic inputs and outputs"
        cure = "build it with the functional API, or write it with model.export(DIR) and use `headrace import savedmodel DIR`"
        raise ImportFault(fault, cure)
    return KerasSource(model, request)


class KerasSource(Source):
    """A functional or sequential model.

    Args:
        model: the model.
        request: the request.
    """

    def __init__(self, model: Any, request: Json) -> None:
        self._model = model
        self._request = request
        self._names = [str(tensor.name) for tensor in model.inputs]
        self._dtypes = [np.dtype(str(tensor.dtype)) for tensor in model.inputs]
        self._outputs = _unique(_output_names(model), self._names)

    def export(self, path: str, report: Report) -> Json:
        """Write the ONNX file and return the description."""
        check_names(self._request, self._names)
        sizes = [self._example_size(tensor) for tensor in self._model.inputs]
        report(0.2, "runs the model once")
        self.run({n: np.zeros(size, dtype) for n, size, dtype in zip(self._names, sizes, self._dtypes)})
        report(0.3, "exports to ONNX")
        options: Json = {} if self._request["opset"] is None else {"opset_version": self._request["opset"]}
        if not self._request["dynamic_batch"]:
            options["input_signature"] = self._static_signature(sizes)
        self._model.export(path, format="onnx", verbose=False, **options)
        graph = onnx.load_model(path, load_external_data=False).graph
        weights = {tensor.name for tensor in graph.initializer}  # inputs too in old versions of the format
        inputs = _match([value.name for value in graph.input if value.name not in weights], self._names)
        outputs = _match([value.name for value in graph.output], self._outputs)
        return {
            "framework": f"keras {keras.__version__} on {keras.backend.backend()}",
            "inputs": [{"name": n, "onnx": inputs[n], "dims": list(s)} for n, s in zip(self._names, sizes)],
            "outputs": [{"name": name, "onnx": outputs[name]} for name in self._outputs],
        }

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the model in evaluation mode and return its outputs by name."""
        tensors = [keras.ops.convert_to_tensor(inputs[name]) for name in self._names]
        structure = getattr(self._model, "_inputs_struct", None)
        if structure is None:
            structure = self._model.inputs if len(tensors) > 1 else self._model.inputs[0]
        result = self._model(keras.tree.pack_sequence_as(structure, tensors), training=False)
        arrays = [keras.ops.convert_to_numpy(tensor) for tensor in keras.tree.flatten(result)]
        return dict(zip(self._outputs, arrays))

    def _example_size(self, tensor: Any) -> list[int]:
        given = self._request["shapes"].get(str(tensor.name))
        batch = _BATCH if self._request["dynamic_batch"] else 1
        if given is None:
            return [batch, *(_FREE_SIZE if size is None else int(size) for size in tensor.shape[1:])]
        shown = ["batch" if size is None and axis == 0 else size for axis, size in enumerate(tensor.shape)]
        sizes = fitting_sizes(str(tensor.name), given, list(tensor.shape), shown)
        return [max(sizes[0], batch), *sizes[1:]] if self._request["dynamic_batch"] else sizes

    def _static_signature(self, sizes: list[list[int]]) -> list[Any]:
        specs = [
            keras.InputSpec(shape=tuple(size), dtype=str(tensor.dtype), name=name)
            for name, size, tensor in zip(self._names, sizes, self._model.inputs)
        ]
        return [specs] if len(specs) > 1 else specs


def _output_names(model: Any) -> list[str]:
    names = [str(name) for name in getattr(model, "output_names", [])]
    if not names and len(model.outputs) == 1 and model.layers:
        names = [str(model.layers[-1].name)]
    if len(names) == len(model.outputs):
        return names
    return [f"output_{number}" for number in range(len(model.outputs))]


def _unique(names: list[str], taken: list[str]) -> list[str]:
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in result or candidate in taken:
            candidate, number = f"{name}_{number}", number + 1
        result.append(candidate)
    return result


def _match(actual: list[str], expected: list[str]) -> dict[str, str]:
    """Return the name in the file for each expected name: the same, or the one at the same position."""
    if set(actual) == set(expected):
        return {name: name for name in expected}
    if len(actual) != len(expected):
        fault = f"the exported file has the tensors {', '.join(actual)}, the model {', '.join(expected)}"
        raise ImportFault(fault, "remove inputs and outputs that the model does not use")
    return dict(zip(expected, actual))
