"""An ONNX file on ONNX Runtime's CPU: run, timed, measured; `onnxruntime_layers` looks into it.

Sessions are opened as the server opens them, all cores for one instance: threads that do not spin, everything fused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from engines.errors import BuildError
from engines.targets.base import Array, Layer, Timing

_WARM_UP_RUNS = 3
_WARM_UP_SHARE = 0.2
_FEWEST_RUNS = 3
_MEMORY_TIMEOUT_S = 300.0
_NODE = re.compile(
    r"implementation for (?P<op>\S+)\(\d+\) node with name '(?P<node>[^']*)'"
    r"|operator \((?P<op2>\S+)\) in node \((?P<node2>[^)]*)\)"
    r'|In Node, \("(?P<node3>[^"]*)", (?P<op3>[^,]+),'
    r"|Fatal error: (?P<op4>\S+?)\(-?\d+\) is not a registered"
)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def session_options() -> ort.SessionOptions:
    """As the server opens a model of one instance."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = cores()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4
    return options


def open_session(model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on the CPU.

    Raises:
        BuildError: ONNX Runtime cannot load the model; names the node where one is to blame, and what to do.
    """
    try:
        return ort.InferenceSession(
            str(model) if isinstance(model, Path) else model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the binding's exceptions share no other base
        raise BuildError(_load_failure(str(error))) from error


def _load_failure(text: str) -> str:
    found = _NODE.search(text)
    reason = text.partition(" : ")[2] or text
    if "serialization failed" in text:
        return f"ONNX Runtime cannot write the optimised model: {reason}: is the disk full?"
    if not found:
        return f"ONNX Runtime cannot load the model: {reason}: check it with onnx.checker"
    operator = next(value for name, value in found.groupdict().items() if name.startswith("op") and value)
    node = next((value for name, value in found.groupdict().items() if name.startswith("node") and value), "")
    place = f"node '{node}' ({operator})" if node else f"operator {operator}"
    cure = "keep it in FP32, or write it with operators that ONNX Runtime has on CPUs"
    return f"{place} cannot run on ONNX Runtime's CPU: {reason}: {cure}"


class OnnxRuntimeEngine:
    """A loaded ONNX file; see `engines.targets.base.Engine`.

    Args:
        path: of the file.
        source: the model it was built from, None: the file itself.
    """

    def __init__(self, path: Path, source: onnx.ModelProto | None = None) -> None:
        self._path = path
        self._source = source
        self._session = open_session(path, session_options())
        self._inputs = {node.name: list(node.shape) for node in self._session.get_inputs()}
        self._outputs = [node.name for node in self._session.get_outputs()]
        self._largest: dict[str, tuple[int, ...]] = {}
        self._memory_bytes: dict[str, int] = {}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name.

        Raises:
            BuildError: the model refuses the inputs, or memory ran out.
        """
        self._note_shapes(inputs)
        try:
            return dict(zip(self._outputs, self._session.run(self._outputs, dict(inputs)), strict=True))
        except Exception as error:
            raise BuildError(f"{self._path.name} does not run on ONNX Runtime: {_first_line(error)}") from error

    def time(self, inputs: Mapping[str, Array], seconds: float) -> Timing:
        """Time executions back to back, after a warm-up; a batch's rows are the first dimension of its first input."""
        fed = dict(inputs)
        started_ns = time.perf_counter_ns()
        for _ in range(_WARM_UP_RUNS):
            self.run(fed)
            if time.perf_counter_ns() - started_ns > _WARM_UP_SHARE * seconds * 1e9:
                break
        taken_ns: list[int] = []
        started_ns = now_ns = time.perf_counter_ns()
        while len(taken_ns) < _FEWEST_RUNS or now_ns - started_ns < seconds * 1e9:
            self._session.run(self._outputs, fed)
            done_ns = time.perf_counter_ns()
            taken_ns.append(done_ns - now_ns)
            now_ns = done_ns
        median_us, p99_us = np.percentile(np.array(taken_ns) / 1e3, (50, 99))
        rows = rows_of(fed)
        return Timing(rows, float(median_us), float(p99_us), rows * len(taken_ns) / ((now_ns - started_ns) / 1e9))

    def layers(self, inputs: Mapping[str, Array]) -> list[Layer]:
        """The kernels that ONNX Runtime runs, in order, timed on this batch by its own profiler."""
        from engines.targets.onnxruntime_layers import profile

        self._note_shapes(inputs)
        return profile(self._path, self._source, inputs)

    @property
    def memory_bytes(self) -> int:
        """By how much a fresh process grows that loads the file and runs the largest batch that was run here so far.

        Raises:
            BuildError: that process did not live to tell.
        """
        shapes = self._largest or {name: tuple(_fixed(size) for size in sizes) for name, sizes in self._inputs.items()}
        asked = json.dumps({"path": str(self._path), "threads": cores(), "shapes": shapes})
        if asked not in self._memory_bytes:
            # As a file, so that the child imports ONNX Runtime and nothing of ours; -P: nor what lies beside the file.
            command = [sys.executable, "-P", str(Path(__file__).with_name("onnxruntime_memory.py"))]
            try:
                done = subprocess.run(
                    command, input=asked, capture_output=True, text=True, timeout=_MEMORY_TIMEOUT_S, check=True
                )
            except (subprocess.SubprocessError, OSError) as error:
                told = (getattr(error, "stderr", "") or "").strip().rpartition("\n")[2]
                raise BuildError(f"the memory of {self._path.name} cannot be measured: {told or error}") from error
            self._memory_bytes[asked] = int(done.stdout)
        return self._memory_bytes[asked]

    def close(self) -> None:
        """Drop the session."""
        del self._session

    def _note_shapes(self, inputs: Mapping[str, Array]) -> None:
        if rows_of(inputs) > max((shape[0] for shape in self._largest.values() if shape), default=0):
            self._largest = {name: tuple(array.shape) for name, array in inputs.items()}


def rows_of(inputs: Mapping[str, Array]) -> int:
    """The first dimension of the first input."""
    first = next(iter(inputs.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def _fixed(size: object) -> int:
    return size if isinstance(size, int) and size > 0 else 1


def _first_line(error: Exception) -> str:
    return (str(error).partition(" : ")[2] or str(error)).strip().partition("\n")[0]
