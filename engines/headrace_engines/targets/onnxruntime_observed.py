"""Inner tensors of a model on ONNX Runtime, by additional outputs.

An output between two operators prevents their fusion. So the graph is optimised once without additional outputs, and only tensors
that exist in the fused graph become outputs. Values in 8 bits are read as such and dequantised here: an additional reader after
the DequantizeLinear would also stop the integer kernel. The optimisation level is "extended": it has all fusions; the last level
only changes layouts.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort

from headrace_engines.errors import BuildError
from headrace_engines.layers.tensors import Counterpart, add_outputs, counterparts, dequantized
from headrace_engines.onnx_graph import OnnxGraph, copy_model, write_onnx
from headrace_engines.targets.base import Array
from headrace_engines.targets.onnxruntime_session import open_session, session_options

# ONNX Runtime computes operators without a kernel of 16 bits in FP32; their outputs have this before the name.
_CAST = "InsertedPrecisionFreeCast_"
# Operators that do not compute: conversions at the border of kernels.
_CONVERSIONS = frozenset(("Cast", "QuantizeLinear", "DequantizeLinear"))


class ObservedSession:
    """A session that returns inner tensors; see `headrace_engines.targets.base.ObservedEngine`.

    Args:
        model: lowered model; not changed.
        names: names of tensors of the FP32 model.

    Raises:
        BuildError: ONNX Runtime cannot load the model, or the disk for temporary files is full.
    """

    def __init__(self, model: onnx.ModelProto, names: Sequence[str]) -> None:
        self._graph = OnnxGraph(copy_model(model))
        with tempfile.TemporaryDirectory(prefix="headrace-observed-") as folder:
            fused = _fused(model, Path(folder))
            existing = {name.removeprefix(_CAST) for node in fused.graph.node for name in node.output}
            self._matches: dict[str, Counterpart] = {}
            self._sources: dict[str, str] = {}
            for name, match in counterparts(names, self._graph).items():
                tensor = next((one for one in (match.stored, match.tensor) if one in existing), "")
                if tensor:
                    self._matches[name], self._sources[name] = match, tensor
            observed = copy_model(model)
            outputs = add_outputs(observed, self._graph, list(self._sources.values()))
            self._outputs = dict(zip(self._sources, outputs, strict=True))
            self.names = tuple(self._outputs)
            self.remark = _change(fused, _fused(observed, Path(folder)))
            self._session = open_session(_written(observed, Path(folder)), _options())
        self._inputs = {node.name for node in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return the inner tensors by the name of the FP32 model's tensor.

        Raises:
            BuildError: the model rejects the inputs.
        """
        wanted = list(dict.fromkeys(self._outputs.values()))
        try:
            values = self._session.run(wanted, {name: inputs[name] for name in self._inputs})
        except Exception as error:  # the binding's exceptions share no other base
            first = str(error).strip().partition("\n")[0]
            raise BuildError(f"the model does not run on ONNX Runtime: {first}: check the samples") from error
        by_output = dict(zip(wanted, values, strict=True))
        results = {}
        for name, output in self._outputs.items():
            match, array = self._matches[name], by_output[output]
            results[name] = dequantized(self._graph, match, array) if output == match.stored else array
        return results

    def close(self) -> None:
        """Close the session."""
        del self._session


def _options() -> ort.SessionOptions:
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return options


def _written(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    try:
        write_onnx(model, path)
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written: {error.strerror or error}: make room for temporary files"
        ) from error
    return path


def _fused(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Return the graph with ONNX Runtime's fusions, without weights."""
    options = _options()
    options.optimized_model_filepath = str(folder / "fused.onnx")
    open_session(_written(model, folder), options)
    return onnx.load_model(folder / "fused.onnx", load_external_data=False)


def _change(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Return a sentence on the operators of the fused graph that additional outputs changed; "" if there are none."""
    counts = [
        Counter(node.op_type for node in model.graph.node if node.op_type not in _CONVERSIONS)
        for model in (before, after)
    ]
    if counts[0] == counts[1]:
        return ""
    lost = sum((counts[0] - counts[1]).values())
    return f"reading its tensors undid the fusion of {lost} of {sum(counts[0].values())} operators"
