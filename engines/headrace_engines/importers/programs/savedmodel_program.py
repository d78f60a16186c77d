"""TensorFlow SavedModels to ONNX by tf2onnx."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import onnx
import tensorflow as tf

from .exchange import ImportFault, Json, Report, Source, check_names, fitting_sizes

_DEFAULT = "serving_default"
_FREE_SIZE = 32
_BATCH = 2


def open_source(request: Json, report: Report) -> Source:
    """Return a signature of a SavedModel.

    Raises:
        ImportFault: there is no such signature.
    """
    path = request["path"]
    report(0.05, "loads the model")
    if not any(os.path.isfile(os.path.join(path, name)) for name in ("saved_model.pb", "saved_model.pbtxt")):
        fault = f"{path} has no saved_model.pb"
        raise ImportFault(fault, "name the folder that tf.saved_model.save or model.export wrote")
    model = tf.saved_model.load(path)
    signatures = [str(name) for name in model.signatures]
    name = request["signature"] or (signatures[0] if len(signatures) == 1 else _DEFAULT)
    if name not in signatures:
        there = ", ".join(signatures) or "none"
        cure = "choose one with --signature NAME" if signatures else "save the model with signatures"
        raise ImportFault(f"{path} has no signature {name} (signatures: {there})", cure)
    return SignatureSource(model, name, request, signatures)


class SignatureSource(Source):
    """One signature of a SavedModel.

    Args:
        model: the loaded object; it must live as long as its signature.
        name: name of the signature.
        request: the request.
        signatures: names of all signatures.
    """

    def __init__(self, model: Any, name: str, request: Json, signatures: list[str]) -> None:
        self._model = model
        self._function = model.signatures[name]
        self._name = name
        self._request = request
        self._signatures = signatures
        self._specs: dict[str, Any] = dict(self._function.structured_input_signature[1])
        self._outputs = [str(name) for name in self._function.structured_outputs]

    def export(self, path: str, report: Report) -> Json:
        """Write the ONNX file and return the description."""
        check_names(self._request, self._specs)
        report(0.3, "exports to ONNX")
        self._convert(path)
        graph = onnx.load_model(path, load_external_data=False).graph
        inputs = {value.name for value in graph.input}
        outputs = {value.name for value in graph.output}
        notes = []
        unused = [name for name in self._specs if _node_name(name, inputs) is None]
        if unused:
            notes.append(f"inputs that the signature does not use are left out: {', '.join(unused)}")
        lost = [name for name in self._outputs if _node_name(name, outputs) is None]
        if lost:
            fault = f"the exported file has no output {', '.join(lost)}"
            raise ImportFault(fault, "give each output of the signature a tensor of its own")
        if len(self._signatures) > 1:
            others = ", ".join(name for name in self._signatures if name != self._name)
            notes.append(f"the signature {self._name} is imported; others: {others} (--signature NAME)")
        used = {name: spec for name, spec in self._specs.items() if name not in unused}
        return {
            "framework": f"tensorflow {tf.__version__}",
            "inputs": [
                {"name": n, "onnx": _node_name(n, inputs), "dims": self._example_size(n, spec)}
                for n, spec in used.items()
            ],
            "outputs": [{"name": name, "onnx": _node_name(name, outputs)} for name in self._outputs],
            "notes": notes,
        }

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the signature and return its outputs by name."""
        first = next(iter(inputs.values()))
        tensors = {}
        for name, spec in self._specs.items():
            if name in inputs:
                tensors[name] = tf.constant(inputs[name], dtype=spec.dtype)
            else:  # not used by the signature
                size = [
                    first.shape[0] if s is None and axis == 0 else s or _FREE_SIZE for axis, s in enumerate(spec.shape)
                ]
                tensors[name] = tf.zeros(size, spec.dtype)
        return {name: tensor.numpy() for name, tensor in self._function(**tensors).items()}

    def _convert(self, path: str) -> None:
        """Run tf2onnx's command in this process."""
        from tf2onnx import convert

        words = [
            "--saved-model",
            self._request["path"],
            "--output",
            path,
            "--signature_def",
            self._name,
            "--tag",
            "serve",
        ]
        if self._request["opset"] is not None:
            words += ["--opset", str(self._request["opset"])]
        before = sys.argv
        sys.argv = ["tf2onnx", *words]
        try:
            convert.main()
        except SystemExit as error:
            if error.code:
                raise ImportFault(f"tf2onnx ends with status {error.code}", "its output is above") from error
        finally:
            sys.argv = before

    def _example_size(self, name: str, spec: Any) -> list[int]:
        given = self._request["shapes"].get(name)
        if spec.shape.rank is None:
            if given is None:
                raise ImportFault(
                    f"input {name} has no known rank", f"write --input-shape {name}=1,... with an example's sizes"
                )
            return [int(size) for _, size in given]
        shape = list(spec.shape)
        if given is None:
            return [
                size if size is not None else _BATCH if axis == 0 else _FREE_SIZE for axis, size in enumerate(shape)
            ]
        return fitting_sizes(name, given, shape, shape)


def _node_name(name: str, names: set[str]) -> Any:
    """Return the name of a tensor in the file; tf2onnx keeps the name, or appends ":0"."""
    return next((candidate for candidate in (name, f"{name}:0") if candidate in names), None)
