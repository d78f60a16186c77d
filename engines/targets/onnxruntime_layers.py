"""Into an ONNX Runtime session: its kernels, their times from its profiler, and the ONNX nodes that each does.

The profile is JSON, one event a kernel and run (documented under "Profile performance" of ONNX Runtime). The names of its
events are those of the nodes of the optimised graph, which the session writes to a file when asked. That graph is traced back
to the source in steps (see `engines.lineage`): fully optimised -> fused, but without changes of layout -> artefact -> source.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from engines.errors import BuildError
from engines.lineage import Lineage, compose, name_nodes, trace
from engines.onnx_graph import read_onnx, write_onnx
from engines.targets.base import Array, Layer
from engines.targets.onnxruntime_engine import open_session, session_options

_SUFFIX = "_kernel_time"
_WARM_UP_RUNS = 2
_FEWEST_RUNS = 4
_MOST_RUNS = 300
_SECONDS = 0.6
_PRECISIONS = {
    "float": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "double": "fp64",
    "int8": "int8",
    "uint8": "int8",
}
_FLOATING = ("bfloat16", "float16", "float", "double")


@dataclass(slots=True)
class _Kernel:
    """One node of the optimised graph as the profile tells it; times in us."""

    kind: str
    provider: str
    precision: str
    times_us: list[float] = field(default_factory=list)


def profile(path: Path, source: onnx.ModelProto | None, inputs: Mapping[str, Array]) -> list[Layer]:
    """Run an ONNX file under ONNX Runtime's profiler.

    Args:
        path: the file.
        source: the model whose nodes are named; None: the file's own.
        inputs: one batch.

    Returns:
        The kernels in the order in which they ran; the shares add up to 1.

    Raises:
        BuildError: it cannot be loaded or run, or the disk for temporary files is full.
    """
    artefact = name_nodes(read_onnx(path))
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-profile-") as name:
            folder = Path(name)
            named = folder / "model.onnx"
            write_onnx(artefact, named)
            events = _events(named, folder, inputs)
            optimised = onnx.load_model(folder / "all.onnx", load_external_data=False)
            fused = name_nodes(_fused(named, folder))
    except OSError as error:
        raise BuildError(f"the profile of {path.name} cannot be written: {error.strerror or error}") from error
    lineage = compose(trace(name_nodes(optimised), fused), trace(fused, artefact))
    if source is not None:
        lineage = compose(lineage, trace(artefact, name_nodes(source)))
    return _layers(_kernels(events, optimised), optimised, lineage)


def _events(named: Path, folder: Path, inputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    options = session_options()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "all.onnx")
    session = open_session(named, options)
    names = [node.name for node in session.get_outputs()]
    started_s = time.monotonic()
    runs = 0
    while runs < _FEWEST_RUNS + _WARM_UP_RUNS or (time.monotonic() - started_s < _SECONDS and runs < _MOST_RUNS):
        try:
            session.run(names, dict(inputs))
        except Exception as error:
            raise BuildError(f"ONNX Runtime cannot run the model: {str(error).partition(' : ')[2] or error}") from error
        runs += 1
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return events


def _fused(named: Path, folder: Path) -> onnx.ModelProto:
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "fused.onnx")
    open_session(named, options)
    return onnx.load_model(folder / "fused.onnx", load_external_data=False)


def _kernels(events: list[dict[str, Any]], optimised: onnx.ModelProto) -> dict[str, _Kernel]:
    """By name, in the order of the last run; the main graph's alone: the time of an If is that of its branch."""
    known = {node.name for node in optimised.graph.node}
    kernels: dict[str, _Kernel] = {}
    for run in list(_runs(events))[_WARM_UP_RUNS:]:
        spent_us: dict[str, float] = defaultdict(float)
        for event in run:
            name = event["name"].removesuffix(_SUFFIX)
            if name not in known:
                continue
            spent_us[name] += event["dur"]
            if name not in kernels:
                told = event.get("args", {})
                kernels[name] = _Kernel(told.get("op_name", ""), told.get("provider", ""), _precision(told))
        for name, time_us in spent_us.items():
            kernels[name].times_us.append(time_us)
    return kernels


def _runs(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The kernels' events, run by run: a run's own event comes behind those of its kernels."""
    run: list[dict[str, Any]] = []
    for event in events:
        if event.get("cat") == "Node" and event.get("name", "").endswith(_SUFFIX):
            run.append(event)
        elif event.get("name") == "model_run":
            yield run
            run = []


def _precision(told: dict[str, Any]) -> str:
    """Of what a kernel computes with: 8-bit integers where its first input has them, else the first floating type."""
    types = [kind for kinds in (told.get("input_type_shape"), told.get("output_type_shape")) for kind in _types(kinds)]
    if not types:
        return ""
    if types[0] in ("int8", "uint8") and told.get("op_name") != "Cast":
        return "int8"
    chosen = next((kind for kind in types if kind in _FLOATING), types[0])
    return _PRECISIONS.get(chosen, chosen) if chosen in _FLOATING else chosen


def _types(kinds: Any) -> list[str]:
    return [kind for entry in kinds or () if isinstance(entry, dict) for kind in entry]


def _layers(kernels: dict[str, _Kernel], optimised: onnx.ModelProto, lineage: Lineage) -> list[Layer]:
    nodes = {node.name: node for node in optimised.graph.node}
    means_us = {name: _middle_mean(kernel.times_us) for name, kernel in kernels.items()}
    total_us = sum(means_us.values())
    return [
        Layer(
            name=name,
            kind=kernel.kind,
            nodes=lineage.get(name, ()),
            precision=kernel.precision,
            tactic=_tactic(kernel.provider, nodes[name]),
            time_us=means_us[name],
            # The profiler counts whole microseconds: a graph of a few additions may take none.
            share=means_us[name] / total_us if total_us else 1 / len(kernels),
        )
        for name, kernel in kernels.items()
    ]


def _middle_mean(times_us: list[float]) -> float:
    """The mean without the fastest and the slowest quarter: a neighbour that took the core for a moment is not the kernel's."""
    cut = len(times_us) // 4
    return float(np.mean(sorted(times_us)[cut : len(times_us) - cut]))


def _tactic(provider: str, node: onnx.NodeProto) -> str:
    """Whose kernel it is and in which layout it works, e.g. "CPU NCHWc"."""
    where = provider.removesuffix("ExecutionProvider")
    if node.domain == "com.microsoft.nchwc":
        return f"{where} NCHWc"
    last = node.op_type.startswith("Nhwc") or any(a.name == "channels_last" and a.i for a in node.attribute)
    return f"{where} NHWC" if last else where
