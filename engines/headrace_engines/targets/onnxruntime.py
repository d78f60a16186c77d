"""ONNX Runtime on a CPU as a target: the artefact is an ONNX file that any CPU can load.

ONNX Runtime fuses operators for the instructions of the machine when it loads a file. The fused graph is not stored: a graph with
AVX-512 kernels fails on other machines, and loading the portable one takes only milliseconds more. Q/DQ pairs are not replaced
for the same reason: the session maps them to integer kernels.

Sessions have the server's options for one instance: all cores, threads that do not spin, all optimisations.

The profile is JSON with one event for each kernel and run (ONNX Runtime documentation, "Profile performance"). Its names are
those of nodes in the optimised graph, which the session writes to a file on request. That graph is traced back to the source in
steps (see `Lineage`): fully optimised -> fused, no changes of layout -> artefact -> source.

Optimisers fuse, rename, move and change layouts without a record. Most names of tensors and nodes survive. A node whose output
has a name of the original executes all nodes between that tensor and its own inputs. With a changed layout ONNX Runtime renames
tensors, but puts the former name of the tensor ("X_nchwc") or of the node ("X_token_7", "fused X") into the name of the new node.
Nodes that follow in the original and have no other counterpart belong to that node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from headrace.config.machine import Machine, onnxruntime_machine, usable_cores
from headrace.config.onnx_model import external_files

from headrace_engines import onnx_graph
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report
from headrace_engines.targets.base import Array, BatchTiming, MeasuredLayer, ObservedEngine, TargetSpec
from headrace_engines.targets.onnxruntime_observed import ObservedSession
from headrace_engines.targets.onnxruntime_session import open_session, session_options

_LAYOUT = "_nchwc"
_NUMBERED = re.compile(r"_token_\d+$|/duplicated(_token_\d+)?$")
_FUSED = "fused "
# What optimisers add to bring a tensor into another layout or type: they do no node of the original.
_MOVERS = {"ReorderInput", "ReorderOutput", "Transpose", "Cast"}
Lineage = dict[str, tuple[str, ...]]


def node_label(node: onnx.NodeProto) -> str:
    """Return the name of a node, or of its first output if it has none."""
    return str(node.name or next((name for name in node.output if name), node.op_type))


def name_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with a unique name for every node, its `node_label` if unused."""
    named = onnx_graph.copy_model(model)
    used: set[str] = set()
    for node in named.graph.node:
        base = node_label(node)
        node.name, number = base, 1
        while node.name in used:
            node.name = f"{base}#{number}"
            number += 1
        used.add(node.name)
    return named


def trace_nodes(optimised: onnx.ModelProto, original: onnx.ModelProto) -> Lineage:
    """Return the nodes of the original that each node of the optimised graph executes, in the original's order.

    A node that is executed several times, such as a DequantizeLinear with two readers, is listed with each. A node that only
    computes constants (such as the DequantizeLinear of weights) is not listed, unless it still exists. A removed node is listed
    with the node before it.

    Args:
        optimised: graph with unique names of nodes.
        original: graph with unique names of nodes; see `name_nodes`.
    """
    return _Trace(optimised, original).run()


def compose_lineages(outer: Lineage, inner: Lineage) -> Lineage:
    """Map the nodes of the outer lineage to nodes of the original of the inner lineage."""
    return {
        name: tuple(dict.fromkeys(end for middle in through for end in inner.get(middle, ())))
        for name, through in outer.items()
    }


class _Trace:
    def __init__(self, optimised: onnx.ModelProto, original: onnx.ModelProto) -> None:
        self._optimised = optimised.graph
        self._graph = onnx_graph.OnnxGraph(_skeleton(original))
        self._by_name = {node.name: node for node in self._graph.nodes}
        self._order = {node.name: index for index, node in enumerate(self._graph.nodes)}
        # Node of the original -> node of the optimised graph with its name or output.
        self._anchors: dict[str, str] = {}
        # Optimised node -> tensor of the original, True if it is its output.
        self._ends: dict[str, tuple[str, bool]] = {}
        # Node of the original -> the only optimised node that executes it.
        self._owner: dict[str, str] = {}
        self._alias: dict[str, str] = {name: name for name in self._graph.inputs}
        self._known_tensors = set(self._graph.inputs)  # values of `_alias`
        self._folded: set[str] = set()  # tensors computed from constants alone
        for node in self._graph.nodes:
            if all(self._is_folded(name) for name in node.input if name):
                self._folded.update(node.output)
        self._nodes_of: dict[str, set[str]] = {node.name: set() for node in self._optimised.node}

    def run(self) -> Lineage:
        for node in self._optimised.node:
            self._anchor(node)
        for node in self._optimised.node:
            self._claim(node)
        self._assign_remaining()
        return {name: tuple(sorted(names, key=self._order.__getitem__)) for name, names in self._nodes_of.items()}

    def _anchor(self, node: onnx.NodeProto) -> None:
        if node.op_type in _MOVERS and node.name not in self._by_name:
            return
        tensor = next((name for name in node.output if self._graph.producer(name) is not None), None)
        if tensor is not None:
            self._set_anchor(node, tensor, True)
            for hint, is_tensor in _hints(node.name):
                if not is_tensor and hint in self._by_name:
                    self._anchors.setdefault(hint, node.name)
            return
        for hint, is_tensor in _hints(node.name):
            producer = self._graph.producer(hint) if is_tensor else self._by_name.get(hint)
            if producer is not None and producer.name not in self._anchors:
                self._set_anchor(node, hint if is_tensor else producer.output[0], False)
                return

    def _set_anchor(self, node: onnx.NodeProto, tensor: str, whole: bool) -> None:
        producer = self._graph.producer(tensor)
        assert producer is not None
        self._anchors[producer.name] = node.name
        self._ends[node.name] = (tensor, whole)

    def _claim(self, node: onnx.NodeProto) -> None:
        if node.name not in self._ends:
            source = next((self._alias[name] for name in node.input if name in self._alias), None)
            for name in node.output if source is not None else ():
                self._alias.setdefault(name, source or "")
            return
        tensor, whole = self._ends[node.name]
        reads = {self._alias[name] for name in node.input if name in self._alias}
        end = tensor if whole else self._follow(node.name, tensor, reads)
        self._walk_back(node.name, end)
        for name in node.output:
            self._alias[name] = name if self._graph.producer(name) is not None else end
            self._known_tensors.add(self._alias[name])

    def _follow(self, name: str, tensor: str, reads: set[str]) -> str:
        """Return the last tensor of an optimised node, from `tensor` on over single readers without another counterpart."""
        while tensor not in self._graph.outputs:
            readers = self._graph.consumers(tensor)
            if len(readers) != 1 or readers[0].name in self._anchors or readers[0].op_type == "DequantizeLinear":
                return tensor
            others = [t for t in readers[0].input if t and t != tensor and not self._is_folded(t)]
            if any(other not in reads for other in others) or not readers[0].output:
                return tensor
            self._assign(name, readers[0])
            tensor = readers[0].output[0]
        return tensor

    def _walk_back(self, name: str, end: str) -> None:
        waiting = [end]
        visited: set[str] = set()
        while waiting:
            tensor = waiting.pop()
            producer = self._graph.producer(tensor)
            if producer is None or tensor in visited or (tensor in self._known_tensors and tensor != end):
                continue
            visited.add(tensor)
            if self._anchors.get(producer.name, name) != name or self._owner.get(producer.name, name) != name:
                continue
            if tensor in self._folded and producer.name not in self._anchors:
                continue
            is_shared = sum(len(self._graph.consumers(output)) for output in producer.output) > 1
            if is_shared and producer.name not in self._anchors:
                self._nodes_of[name].add(producer.name)
            else:
                self._assign(name, producer)
            waiting.extend(t for t in producer.input if t)

    def _is_folded(self, tensor: str) -> bool:
        return self._graph.is_constant(tensor) or tensor in self._folded

    def _assign(self, name: str, node: onnx.NodeProto) -> None:
        self._owner[node.name] = name
        self._nodes_of[name].add(node.name)

    def _assign_remaining(self) -> None:
        done = {name for names in self._nodes_of.values() for name in names}
        for node in self._graph.nodes:
            if node.name in done or all(self._is_folded(name) for name in node.input if name):
                continue
            producers = (self._graph.producer(name) for name in node.input)
            owner = next(
                (self._owner[producer.name] for producer in producers if producer and producer.name in self._owner),
                None,
            )
            if owner is not None:
                self._assign(owner, node)


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph without its weights, which may be large."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    for name in ("node", "input", "output"):
        getattr(bare.graph, name).extend(getattr(model.graph, name))
    for tensor in model.graph.initializer:
        bare.graph.initializer.add(name=tensor.name, data_type=tensor.data_type)
    return bare


def _hints(name: str) -> Iterator[tuple[str, bool]]:
    """Yield names of the original in the name of a new node, and whether the name is that of a tensor."""
    yield name, False
    plain = name.removeprefix(_FUSED)
    while shorter := _NUMBERED.sub("", plain):
        if shorter.endswith(_LAYOUT):
            tensor = shorter.removesuffix(_LAYOUT)
            yield tensor, True
            # The optimiser writes normalisations and multiplications by constants as convolutions.
            yield tensor.removesuffix("_bn").removesuffix("_mul"), True
        yield shorter, False
        if shorter == plain:
            return
        plain = shorter


_WARM_UP_RUNS = 3
_WARM_UP_SHARE = 0.2
_MIN_RUNS = 3
_MEMORY_TIMEOUT_S = 300.0


class OnnxRuntimeEngine:
    """A loaded ONNX file; see `headrace_engines.targets.base.Engine`.

    Args:
        path: path of the file.
        source: ONNX model that it was built from; None for the file itself.
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
        """Run a batch and return all outputs by name.

        Raises:
            BuildError: the model rejects the inputs, or memory ran out.
        """
        self._note_shapes(inputs)
        try:
            return dict(zip(self._outputs, self._session.run(self._outputs, dict(inputs)), strict=True))
        except Exception as error:
            raise BuildError(f"{self._path.name} does not run on ONNX Runtime: {_first_line(error)}") from error

    def time(self, inputs: Mapping[str, Array], seconds: float) -> BatchTiming:
        """Time consecutive executions after a warm-up; the rows are the first dimension of the first input."""
        arrays = dict(inputs)
        started_ns = time.perf_counter_ns()
        for _ in range(_WARM_UP_RUNS):
            self.run(arrays)
            if time.perf_counter_ns() - started_ns > _WARM_UP_SHARE * seconds * 1e9:
                break
        durations_ns: list[int] = []
        started_ns = now_ns = time.perf_counter_ns()
        while len(durations_ns) < _MIN_RUNS or now_ns - started_ns < seconds * 1e9:
            self._session.run(self._outputs, arrays)
            end_ns = time.perf_counter_ns()
            durations_ns.append(end_ns - now_ns)
            now_ns = end_ns
        median_us, p99_us = np.percentile(np.array(durations_ns) / 1e3, (50, 99))
        rows = rows_of(arrays)
        return BatchTiming(
            rows, float(median_us), float(p99_us), rows * len(durations_ns) / ((now_ns - started_ns) / 1e9)
        )

    def layers(self, inputs: Mapping[str, Array]) -> list[MeasuredLayer]:
        """Return the kernels of ONNX Runtime in order, timed on this batch by its profiler."""
        self._note_shapes(inputs)
        return profile_layers(self._path, self._source, inputs)

    @property
    def memory_bytes(self) -> int:
        """Growth in bytes of a fresh process that loads the file and runs the largest batch so far.

        Raises:
            BuildError: that process failed.
        """
        shapes = self._largest or {name: tuple(_fixed(size) for size in sizes) for name, sizes in self._inputs.items()}
        request = json.dumps({"path": str(self._path), "threads": usable_cores(), "shapes": shapes})
        if request not in self._memory_bytes:
            # Run as a file: the child imports ONNX Runtime and no Headrace package. -P: no imports from the file's folder.
            command = [sys.executable, "-P", str(Path(__file__).with_name("onnxruntime_memory.py"))]
            try:
                done = subprocess.run(
                    command, input=request, capture_output=True, text=True, timeout=_MEMORY_TIMEOUT_S, check=True
                )
            except (subprocess.SubprocessError, OSError) as error:
                last_line = (getattr(error, "stderr", "") or "").strip().rpartition("\n")[2]
                raise BuildError(f"the memory of {self._path.name} cannot be measured: {last_line or error}") from error
            self._memory_bytes[request] = int(done.stdout)
        return self._memory_bytes[request]

    def close(self) -> None:
        """Close the session."""
        del self._session

    def _note_shapes(self, inputs: Mapping[str, Array]) -> None:
        if rows_of(inputs) > max((shape[0] for shape in self._largest.values() if shape), default=0):
            self._largest = {name: tuple(array.shape) for name, array in inputs.items()}


def rows_of(inputs: Mapping[str, Array]) -> int:
    """Return the first dimension of the first input; 1 for a scalar."""
    first = next(iter(inputs.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def _fixed(size: object) -> int:
    return size if isinstance(size, int) and size > 0 else 1


def _first_line(error: Exception) -> str:
    return (str(error).partition(" : ")[2] or str(error)).strip().partition("\n")[0]


_SUFFIX = "_kernel_time"
_PROFILE_WARM_UP_RUNS = 2
_PROFILE_MIN_RUNS = 4
_MAX_PROFILE_RUNS = 300
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
    """One node of the optimised graph in the profile; times in microseconds."""

    kind: str
    provider: str
    precision: str
    times_us: list[float] = field(default_factory=list)


def profile_layers(path: Path, source: onnx.ModelProto | None, inputs: Mapping[str, Array]) -> list[MeasuredLayer]:
    """Run an ONNX file under ONNX Runtime's profiler.

    Args:
        path: the file.
        source: ONNX model for the names of nodes; None for the file itself.
        inputs: one batch by input name.

    Returns:
        The kernels in the order of their execution; the shares add up to 1.

    Raises:
        BuildError: the file cannot be loaded or run, or the disk for temporary files is full.
    """
    artefact = name_nodes(onnx_graph.read_onnx(path))
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-profile-") as name:
            folder = Path(name)
            named = folder / "model.onnx"
            onnx_graph.write_onnx(artefact, named)
            events = _events(named, folder, inputs)
            optimised = onnx.load_model(folder / "all.onnx", load_external_data=False)
            _optimize(named, folder / "fused.onnx", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
            fused = name_nodes(onnx.load_model(folder / "fused.onnx", load_external_data=False))
    except OSError as error:
        raise BuildError(f"the profile of {path.name} cannot be written: {error.strerror or error}") from error
    lineage = compose_lineages(trace_nodes(name_nodes(optimised), fused), trace_nodes(fused, artefact))
    if source is not None:
        lineage = compose_lineages(lineage, trace_nodes(artefact, name_nodes(source)))
    return _layers(_kernels(events, optimised), optimised, lineage)


def profile_unfused(path: Path, inputs: Mapping[str, Array]) -> list[MeasuredLayer]:
    """Run an ONNX file node by node, without ONNX Runtime's optimiser, and return the time of each node.

    For models whose optimised graph does not fit into one file: the weights are read where they are.

    Args:
        path: the file.
        inputs: a batch of inputs.

    Raises:
        BuildError: the file cannot be loaded or run, or the disk for temporary files is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-profile-") as name:
            folder = Path(name)
            named = name_nodes(onnx.load_model(path, load_external_data=False))
            onnx.save_model(named, folder / "model.onnx")
            for location in external_files(path, path.name):
                (folder / location).parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(path.parent / location, folder / location)
            options = session_options()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            events = _profile(folder / "model.onnx", folder, inputs, options)
    except OSError as error:
        raise BuildError(f"the profile of {path.name} cannot be written: {error.strerror or error}") from error
    lineage: Lineage = {node.name: (node.name,) for node in named.graph.node}
    return _layers(_kernels(events, named), named, lineage)


def _events(named: Path, folder: Path, inputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    options = session_options()
    options.optimized_model_filepath = str(folder / "all.onnx")
    return _profile(named, folder, inputs, options)


def _link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link; a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _profile(
    file: Path, folder: Path, inputs: Mapping[str, Array], options: ort.SessionOptions
) -> list[dict[str, Any]]:
    """Run a file under the profiler and return the events; the profile is written to the folder."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = open_session(file, options)
    names = [node.name for node in session.get_outputs()]
    started_s = time.monotonic()
    runs = 0
    while runs < _PROFILE_MIN_RUNS + _PROFILE_WARM_UP_RUNS or (
        time.monotonic() - started_s < _SECONDS and runs < _MAX_PROFILE_RUNS
    ):
        try:
            session.run(names, dict(inputs))
        except Exception as error:
            raise BuildError(f"ONNX Runtime cannot run the model: {str(error).partition(' : ')[2] or error}") from error
        runs += 1
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return events


def _optimize(model: Path | bytes, file: Path, level: ort.GraphOptimizationLevel) -> None:
    """Write the graph that ONNX Runtime loads at an optimisation level."""
    options = session_options()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(file)
    open_session(model, options)


def _kernels(events: list[dict[str, Any]], optimised: onnx.ModelProto) -> dict[str, _Kernel]:
    """Return kernels of the main graph by name, in order of execution; the time of an If includes its branch."""
    names = {node.name for node in optimised.graph.node}
    kernels: dict[str, _Kernel] = {}
    for run in list(_runs(events))[_PROFILE_WARM_UP_RUNS:]:
        spent_us: dict[str, float] = defaultdict(float)
        for event in run:
            name = event["name"].removesuffix(_SUFFIX)
            if name not in names:
                continue
            spent_us[name] += event["dur"]
            if name not in kernels:
                args = event.get("args", {})
                kernels[name] = _Kernel(args.get("op_name", ""), args.get("provider", ""), _precision(args))
        for name, time_us in spent_us.items():
            kernels[name].times_us.append(time_us)
    return kernels


def _runs(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of the kernels of each run; the event of a run follows those of its kernels."""
    run: list[dict[str, Any]] = []
    for event in events:
        if event.get("cat") == "Node" and event.get("name", "").endswith(_SUFFIX):
            run.append(event)
        elif event.get("name") == "model_run":
            yield run
            run = []


def _precision(args: dict[str, Any]) -> str:
    """Return the precision of a kernel: "int8" if its first input has 8-bit integers, else the first floating type."""
    types = [kind for kinds in (args.get("input_type_shape"), args.get("output_type_shape")) for kind in _types(kinds)]
    if not types:
        return ""
    if types[0] in ("int8", "uint8") and args.get("op_name") != "Cast":
        return "int8"
    chosen = next((kind for kind in types if kind in _FLOATING), types[0])
    return _PRECISIONS.get(chosen, chosen) if chosen in _FLOATING else chosen


def _types(kinds: Any) -> list[str]:
    return [kind for entry in kinds or () if isinstance(entry, dict) for kind in entry]


def _layers(kernels: dict[str, _Kernel], optimised: onnx.ModelProto, lineage: Lineage) -> list[MeasuredLayer]:
    nodes = {node.name: node for node in optimised.graph.node}
    means_us = {name: _middle_mean(kernel.times_us) for name, kernel in kernels.items()}
    total_us = sum(means_us.values())
    return [
        MeasuredLayer(
            name=name,
            kind=kernel.kind,
            nodes=lineage.get(name, ()),
            precision=kernel.precision,
            tactic=_tactic(kernel.provider, nodes[name]),
            time_us=means_us[name],
            # The profiler counts whole microseconds: the sum may be 0 for a graph of a few additions.
            share=means_us[name] / total_us if total_us else 1 / len(kernels),
        )
        for name, kernel in kernels.items()
    ]


def _middle_mean(times_us: list[float]) -> float:
    """Return the mean without the fastest and slowest quarter, which excludes interruptions by other processes."""
    cut = len(times_us) // 4
    return float(np.mean(sorted(times_us)[cut : len(times_us) - cut]))


def _tactic(provider: str, node: onnx.NodeProto) -> str:
    """Return the execution provider and the layout of a kernel, e.g. "CPU NCHWc"."""
    device = provider.removesuffix("ExecutionProvider")
    if node.domain == "com.microsoft.nchwc":
        return f"{device} NCHWc"
    last = node.op_type.startswith("Nhwc") or any(a.name == "channels_last" and a.i for a in node.attribute)
    return f"{device} NHWC" if last else device


# ONNX Runtime writes its optimised graph as one protobuf of at most 2 GiB; the difference is room for its additions.
_MAX_REWRITTEN_BYTES = 2**31 - 2**24


def is_rewritable(model: onnx.ModelProto) -> bool:
    """Return True if ONNX Runtime can write the optimised graph of a model, in which FP16 weights are FP32.

    Args:
        model: its weights need not be loaded.
    """
    halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    sizes = (onnx_graph.tensor_bytes(t) * (2 if t.data_type in halves else 1) for t in model.graph.initializer)
    return sum(sizes) <= _MAX_REWRITTEN_BYTES


# Remark on precision "fp16" in comparisons.
FP16_REMARK = "most CPUs compute FP16 by way of FP32: smaller, not faster"


class OnnxRuntimeTarget:
    """Builds for the CPU of this machine; see `headrace_engines.targets.base.Target`."""

    name = "onnxruntime"
    suffix = ".onnx"

    def describe(self) -> Machine:
        """Describe this machine."""
        return onnxruntime_machine()

    def refuses(self, precision: str, *, version_compatible: bool = False) -> str:
        """Return a reason for FP8, and for BF16 if ONNX Runtime has no kernels for it; "" for other precisions."""
        if version_compatible:
            cure = "build with --target tensorrt on a machine with a GPU, or leave --version-compatible out"
            return f"files of ONNX Runtime fit any version: {cure}"
        if precision == "fp8":
            return "ONNX Runtime has no FP8 kernels for CPUs: use int8, or build on a GPU that has FP8"
        if precision == "bf16" and (missing := _missing_bf16()):
            return f"ONNX Runtime has no BF16 kernels for this CPU ({missing}): use int8 or fp32"
        return ""

    def refuses_fp8_convolutions(self) -> str:
        """Return a reason: nothing runs in FP8 on CPUs."""
        return self.refuses("fp8")

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        """Write the artefact; a failure leaves no files.

        Raises:
            BuildError: an operator is not supported (the message has its node), or the disk is full.
        """
        try:
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as name:
                folder = Path(name)
                report(0.0, "optimising for ONNX Runtime")
                written = _optimised(model, folder) if order.precision == "fp32" else model
                artefact = folder / path.name
                onnx_graph.write_onnx(written, artefact)
                report(0.6, "loading the artefact")
                open_session(artefact, session_options())
                # The external data before the model that refers to it.
                for file in sorted(folder.glob(f"{path.name}*"), reverse=True):
                    with file.open("rb") as stream:
                        os.fsync(stream.fileno())
                    file.replace(path.with_name(file.name))
        except OSError as error:
            reason = error.strerror or str(error)
            needs = f"it takes about {model.ByteSize() / 1e6:.0f} MB in {path.parent}"
            raise BuildError(f"the artefact cannot be written: {reason}: {needs}") from error
        report(1.0, "built")

    def open(self, path: Path, source: onnx.ModelProto | None = None, *, host_code: bool = False) -> OnnxRuntimeEngine:
        """Load an artefact; ONNX files have no code, so `host_code` has no effect.

        Raises:
            BuildError: the file cannot be loaded.
        """
        return OnnxRuntimeEngine(path, source)

    def observe(
        self, model: onnx.ModelProto, order: TargetSpec, names: Sequence[str], folder: Path, report: Report
    ) -> ObservedEngine:
        """Load a lowered model so that its inner tensors can be read; see `Target.observe`.

        Raises:
            BuildError: the model cannot be loaded.
        """
        report(0.0, "loading the model with additional outputs")
        return ObservedSession(model, names)


def _optimised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Apply ONNX Runtime's optimisations that do not depend on the hardware: fold constants, remove dead nodes."""
    if model.ByteSize() > _MAX_REWRITTEN_BYTES:
        return model
    file = folder / "optimised.onnx"
    _optimize(model.SerializeToString(), file, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    optimised = onnx_graph.read_onnx(file)
    file.unlink()
    onnx_graph.drop_unused_domains(optimised)
    return optimised


def _missing_bf16() -> str:
    """Return the first common operator without a BF16 kernel on this CPU; "" if all have one."""
    for operator, inputs in (("MatMul", "x, x"), ("Add", "x, x"), ("Relu", "x")):
        probe = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            probe (bfloat16[4, 4] x) => (bfloat16[4, 4] y) {{ y = {operator}({inputs}) }}"""
        )
        try:
            open_session(probe.SerializeToString(), session_options())
        except BuildError:
            return operator
    return ""
