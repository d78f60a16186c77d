"""Layers of an engine: read from the JSON of the engine inspector, with their times from TensorRT's profiler."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headrace_engines.errors import BuildError
from headrace_engines.targets.base import MeasuredLayer

# Patterns of element types in the inspector's JSON, e.g. "Half", "Row major linear FP32", "Channel major INT8 format where
# channel % 32 == 0"; the first match counts.
_TYPES = (
    ("int4", r"int4"),
    ("fp4", r"fp4"),
    ("fp8", r"fp8|float8"),
    ("int8", r"\bint8"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|half|float16"),
    ("fp32", r"fp32|float32|\bfloat\b|tf32"),
    ("int64", r"int64"),
    ("int32", r"int32"),
    ("bool", r"bool"),
    ("uint8", r"\buint8"),
)
# From the narrowest arithmetic type to the widest, then the others.
_ORDER = {name: rank for rank, (name, _) in enumerate(_TYPES)}
_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f\[\s]|$)")


class LayerTimer:
    """Sums of layer times over executions, in the order of the first execution."""

    def __init__(self) -> None:
        self._sums_ms: dict[str, float] = {}

    def add(self, layer: str, ms: float) -> None:
        """Add a time of a layer, in milliseconds."""
        self._sums_ms[layer] = self._sums_ms.get(layer, 0.0) + ms

    def mean_us(self, executions: int) -> dict[str, float]:
        """Return the mean microseconds of one execution, by layer."""
        return {layer: total * 1000 / executions for layer, total in self._sums_ms.items()}


def layer_profiler(trt: Any, times: LayerTimer) -> Any:
    """Return an IProfiler that adds to `times`."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times.add(layer_name, ms)

    return Profiler()


def inspected_layers(information: str) -> list[Any]:
    """Return the layers in the JSON of TensorRT's engine inspector: objects, or names in plans built without details.

    Raises:
        BuildError: the JSON cannot be read.
    """
    try:
        # Metadata contains control characters.
        entries: list[Any] = json.loads(information, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"the JSON of TensorRT's engine inspector cannot be read ({error}): update TensorRT"
        ) from error
    return entries


def read_layers(information: str, times_us: Mapping[str, float], nodes: Collection[str] | None) -> list[MeasuredLayer]:
    """Return layers in the order of the engine; layers that only the profiler lists are last.

    Args:
        information: JSON of the engine inspector (`{"Layers": [...]}`; a layer is an object, or its name in plans built without
            details).
        times_us: microseconds of one execution by layer.
        nodes: names of the ONNX model's nodes; other names, e.g. of constants, are left out. None for all names.

    Raises:
        BuildError: the JSON cannot be read.
    """
    described = [{"Name": entry} if isinstance(entry, str) else entry for entry in inspected_layers(information)]
    total = sum(times_us.values()) or 1.0
    node_names = set(nodes) if nodes is not None else None
    layers = [_layer(entry, times_us, total, node_names) for entry in described]
    described_names = {layer.name for layer in layers}
    extra = [{"Name": name} for name in times_us if name not in described_names]
    return layers + [_layer(entry, times_us, total, node_names) for entry in extra]


def _layer(
    entry: Mapping[str, Any], times_us: Mapping[str, float], total: float, node_names: set[str] | None
) -> MeasuredLayer:
    name = str(entry.get("Name", ""))
    time_us = times_us.get(name, 0.0)
    return MeasuredLayer(
        name=name,
        kind=str(entry.get("LayerType", "")),
        nodes=_nodes(entry, name, node_names),
        precision=_precision(entry),
        tactic=str(entry.get("TacticName", "")),
        time_us=time_us,
        share=time_us / total,
    )


def _nodes(entry: Mapping[str, Any], name: str, node_names: set[str] | None) -> tuple[str, ...]:
    metadata = entry.get("Metadata")
    if metadata is None:
        # Without details only the name of a layer is known: that of its node, or several joined by " + ".
        names: Iterable[str] = name.split(" + ") if node_names is not None else ()
    else:
        names = _ONNX_LAYER.findall(str(metadata))
    return tuple(node for node in dict.fromkeys(names) if node_names is None or node in node_names)


def _precision(entry: Mapping[str, Any]) -> str:
    """Return the narrowest arithmetic type of the inputs, which defines the kernel; else of the outputs."""
    for side in ("Inputs", "Outputs"):
        types = [_type(tensor) for tensor in entry.get(side) or () if isinstance(tensor, Mapping)]
        numbers = [kind for kind in types if kind and _ORDER[kind] <= _ORDER["fp32"]]
        if numbers or any(types):
            return min(numbers or [kind for kind in types if kind], key=_ORDER.__getitem__)
    return ""


def _type(tensor: Mapping[str, Any]) -> str:
    text = str(tensor.get("Format/Datatype", tensor.get("Datatype", "")))
    return next((name for name, pattern in _TYPES if re.search(pattern, text, re.IGNORECASE)), "")
