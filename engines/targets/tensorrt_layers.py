"""What a plan consists of: the engine inspector's JSON and the profiler's times, put together."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from engines.errors import BuildError
from engines.targets.base import Layer

# How the inspector names element types, e.g. "Half", "Row major linear FP32", "Channel major INT8 format where
# channel % 32 == 0"; the first that is found counts.
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
# From the narrowest arithmetic to the widest, then what is not arithmetic.
_ORDER = {name: place for place, (name, _) in enumerate(_TYPES)}
_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f\[\s]|$)")


class LayerTimes:
    """Times of layers, summed over executions, in the order of the first."""

    def __init__(self) -> None:
        self._sums_ms: dict[str, float] = {}

    def add(self, layer: str, ms: float) -> None:
        """One layer took so long."""
        self._sums_ms[layer] = self._sums_ms.get(layer, 0.0) + ms

    def mean_us(self, executions: int) -> dict[str, float]:
        """By layer the microseconds of one execution."""
        return {layer: total * 1000 / executions for layer, total in self._sums_ms.items()}


def layer_profiler(trt: Any, times: LayerTimes) -> Any:
    """The IProfiler that TensorRT is handed."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times.add(layer_name, ms)

    return Profiler()


def read_layers(information: str, times_us: Mapping[str, float], nodes: Collection[str] | None) -> list[Layer]:
    """Layers in the order of the engine; those that only the profiler knows come last.

    Args:
        information: the engine inspector's JSON (`{"Layers": [...]}`; a layer is an object, or its name in plans that were built
            without details).
        times_us: by layer the microseconds of one execution.
        nodes: names of the ONNX model's nodes; other names (of constants, say) are left out. None: all are taken.

    Raises:
        BuildError: the JSON cannot be read.
    """
    try:
        # Metadata holds control characters.
        entries = json.loads(information, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"TensorRT's engine inspector tells nothing that can be read ({error})") from error
    described = [{"Name": entry} if isinstance(entry, str) else entry for entry in entries]
    total = sum(times_us.values()) or 1.0
    known = set(nodes) if nodes is not None else None
    layers = [_layer(entry, times_us, total, known) for entry in described]
    told = {layer.name for layer in layers}
    extra = [{"Name": name} for name in times_us if name not in told]
    return layers + [_layer(entry, times_us, total, known) for entry in extra]


def _layer(entry: Mapping[str, Any], times_us: Mapping[str, float], total: float, known: set[str] | None) -> Layer:
    name = str(entry.get("Name", ""))
    time_us = times_us.get(name, 0.0)
    return Layer(
        name=name,
        kind=str(entry.get("LayerType", "")),
        nodes=_nodes(entry, name, known),
        precision=_precision(entry),
        tactic=str(entry.get("TacticName", "")),
        time_us=time_us,
        share=time_us / total,
    )


def _nodes(entry: Mapping[str, Any], name: str, known: set[str] | None) -> tuple[str, ...]:
    told = entry.get("Metadata")
    if told is None:
        # Without details a layer's name is all there is: that of its one node, or several joined by " + ".
        found: Iterable[str] = name.split(" + ") if known is not None else ()
    else:
        found = _ONNX_LAYER.findall(str(told))
    return tuple(node for node in dict.fromkeys(found) if known is None or node in known)


def _precision(entry: Mapping[str, Any]) -> str:
    """The narrowest type of arithmetic that goes in, which decides on the kernel; of what comes out where nothing goes in."""
    for side in ("Inputs", "Outputs"):
        types = [_type(tensor) for tensor in entry.get(side) or () if isinstance(tensor, Mapping)]
        numbers = [kind for kind in types if kind and _ORDER[kind] <= _ORDER["fp32"]]
        if numbers or any(types):
            return min(numbers or [kind for kind in types if kind], key=_ORDER.__getitem__)
    return ""


def _type(tensor: Mapping[str, Any]) -> str:
    told = str(tensor.get("Format/Datatype", tensor.get("Datatype", "")))
    return next((name for name, pattern in _TYPES if re.search(pattern, told, re.IGNORECASE)), "")
