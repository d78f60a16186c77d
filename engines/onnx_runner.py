"""Running an ONNX model as it is on ONNX Runtime, to calibrate, to compare and to search; not to serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort

from engines.errors import BuildError
from engines.onnx_graph import copy_model

Array = npt.NDArray[Any]

_FP8 = (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2)


class OnnxRunner:
    """A session of a model that may also give what is inside of it.

    Args:
        model: is not changed.
        tensors: names of inner tensors to give besides the model's outputs.
        optimize: let ONNX Runtime fuse; off where inner tensors must be what the graph says.

    Raises:
        BuildError: ONNX Runtime cannot load it; names the cause.
    """

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[str] = (), *, optimize: bool = True) -> None:
        if tensors:
            model = copy_model(model)
            known = {value.name for value in model.graph.output}
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in known)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        levels = ort.GraphOptimizationLevel
        # The optimiser does not know the types of FP8 and refuses such models; the kernels run them.
        plain = not optimize or any(tensor.data_type in _FP8 for tensor in model.graph.initializer)
        options.graph_optimization_level = levels.ORT_DISABLE_ALL if plain else levels.ORT_ENABLE_ALL
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the binding's exceptions share no other base
            raise BuildError(f"ONNX Runtime cannot load the model: {error}") from error
        self.outputs = [node.name for node in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs, and the inner tensors asked for, by name.

        Raises:
            BuildError: the model refuses the inputs, or fails on them.
        """
        try:
            found = self._session.run(self.outputs, dict(inputs))
        except Exception as error:  # the binding's exceptions share no other base
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            first = " ".join(str(error).split())[:300]
            raise BuildError(f"the model fails on samples of {shapes}: {first}: check the samples") from error
        return dict(zip(self.outputs, found, strict=True))
