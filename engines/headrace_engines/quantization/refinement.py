"""Q/DQ pairs removed where the built engine is faster without them: `headrace build --refine`.

Rules place the pairs (`placement`). They assume that a layer in 8 bits is faster, which does not always hold for small layers and
beside layers in floating point. So the ten longest layers of the built engine are measured: the engine is built again with a
layer in floating point, and both are timed in turns. The faster one is kept; the gate on its accuracy follows as for any build.

Layers with one pattern (operator, attributes, shapes, neighbours) are moved together and measured once. The ratio is stored for
the machine by pattern, precision and rows, so that later builds, of other models too, do not measure it again. A choice that
rests on stored ratios is timed once as a whole: the refined engine must be faster than the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import onnx
from headrace.config.files import write_durably

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model
from headrace_engines.precision.lowering import LoweredModel
from headrace_engines.progress import Report
from headrace_engines.targets.base import Array, Engine

LONGEST = 10
# Speed-up of the whole engine that a layer in floating point needs: timings of one engine differ by up to a percent.
WORTH = 1.01
_ROUNDS = 5
_ROUND_S = 0.1
_QUANTIZED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NEIGHBOURS = 3
logger = logging.getLogger("headrace.build")


@dataclass(frozen=True, slots=True)
class PatternResult:
    """Measurement of one pattern.

    Attributes:
        nodes: names of the layers with the pattern.
        ratio: time of the engine with the layers in 8 bits over that with them in floating point; above 1, 8 bits are slower.
        in_float: the layers are in floating point in the refined engine.
        stored: the ratio was measured in an earlier build.
    """

    nodes: tuple[str, ...]
    ratio: float
    in_float: bool
    stored: bool


def quantized_layers(model: onnx.ModelProto) -> dict[str, str]:
    """Return the pattern of each layer that runs in 8 bits, by name of the node.

    Args:
        model: lowered model with Q/DQ.
    """
    graph = OnnxGraph(copy_model(model))
    graph.sort()
    patterns = {}
    for node in graph.nodes:
        producers = [graph.producer(name) for name in node.input[:1]]
        if node.op_type in _QUANTIZED and any(p is not None and p.op_type == "DequantizeLinear" for p in producers):
            patterns[node.name] = _pattern(graph, node)
    return patterns


def _pattern(graph: OnnxGraph, node: onnx.NodeProto) -> str:
    attributes = {a.name: str(onnx.helper.get_attribute_value(a)) for a in node.attribute}
    shapes = [graph.shape(name) for name in (*node.input, *node.output) if name]
    after: list[str] = []
    tensor = node.output[0]
    while len(after) < _NEIGHBOURS and (readers := graph.consumers(tensor)):
        after.append("+".join(sorted(reader.op_type for reader in readers)))
        if len(readers) > 1:
            break
        tensor = readers[0].output[0]
    before = graph.producer(node.input[0])
    behind = graph.producer(before.input[0]) if before is not None else None
    source = graph.producer(behind.input[0]) if behind is not None else None
    parts = [node.op_type, attributes, shapes, after, "" if source is None else source.op_type]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class PatternTimes:
    """Stored ratios of patterns of one machine.

    Args:
        path: the file; created when a ratio is added. An unreadable file counts as empty.
        context: what else a ratio depends on: precision and rows.
    """

    def __init__(self, path: Path, context: str) -> None:
        self._path, self._context = path, context
        self._ratios: dict[str, float] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):
            document = json.loads(path.read_text(encoding="utf-8"))
            self._ratios = {str(key): float(value) for key, value in document.items()}

    def get(self, pattern: str) -> float | None:
        """Return the ratio of a pattern; None if it was not measured."""
        return self._ratios.get(f"{self._context}/{pattern}")

    def put(self, pattern: str, ratio: float) -> None:
        """Store a ratio; a failure only costs the next build time."""
        self._ratios[f"{self._context}/{pattern}"] = ratio
        try:
            write_durably(self._path, json.dumps(self._ratios, indent=1).encode())
        except OSError as error:
            logger.warning("the times of layers are not stored: %s", error.strerror)


class Refinement:
    """Refines one built engine.

    Args:
        build: writes the artefact of a model to a path.
        open_engine: loads an artefact with its model.
        batch: the tuned batch by input name.
        times: stored ratios.
    """

    def __init__(
        self,
        build: Callable[[LoweredModel, Path], None],
        open_engine: Callable[[Path, LoweredModel], Engine],
        batch: Mapping[str, Array],
        times: PatternTimes,
    ) -> None:
        self._build, self._open, self._batch, self._times = build, open_engine, dict(batch), times
        self.results: list[PatternResult] = []

    def run(self, lowered: LoweredModel, artefact: Path, report: Report) -> LoweredModel:
        """Refine an artefact in place and return its model; `results` has the measurements.

        Args:
            lowered: model of the artefact.
            artefact: file of the engine; replaced by a faster one.
            report: called with the progress.

        Raises:
            BuildError: an engine cannot be loaded or run.
        """
        groups = self._longest(lowered, artefact)
        # Model of the artefact, and the model that stored ratios chose on top of it.
        built = chosen = lowered
        for number, (pattern, nodes) in enumerate(groups.items()):
            report(number / len(groups), f"timing {nodes[0]} in floating point")
            ratio = self._times.get(pattern)
            stored = ratio is not None
            if ratio is None:
                # The candidate must differ from the artefact by these layers alone.
                built = chosen = self._settle(built, chosen, artefact)
            other = chosen.without(nodes) if chosen.without is not None else None
            if other is None:
                break
            if ratio is None:
                ratio = self._measure(built, other, artefact)
                self._times.put(pattern, ratio)
            in_float = ratio >= WORTH
            self.results.append(PatternResult(tuple(nodes), ratio, in_float, stored))
            if in_float:
                chosen, built = other, built if stored else other
        report(1.0, "refined")
        return self._settle(built, chosen, artefact)

    def _longest(self, lowered: LoweredModel, artefact: Path) -> dict[str, list[str]]:
        """Return the layers to measure by pattern, the longest first; equal layers of the model belong to their pattern."""
        patterns = quantized_layers(lowered.model)
        engine = self._open(artefact, lowered)
        try:
            layers = sorted(engine.layers(self._batch), key=lambda layer: -layer.time_us)
        finally:
            engine.close()
        longest: dict[str, None] = {}
        for layer in layers:
            longest.update(dict.fromkeys(name for name in layer.nodes if name in patterns))
        chosen = dict.fromkeys(patterns[name] for name in list(longest)[:LONGEST])
        return {pattern: [name for name, other in patterns.items() if other == pattern] for pattern in chosen}

    def _measure(self, current: LoweredModel, other: LoweredModel, artefact: Path) -> float:
        """Return the ratio of the times of two engines; the second one becomes the artefact if it is worth it."""
        candidate = artefact.with_name(f"refined{artefact.suffix}")
        try:
            self._build(other, candidate)
        except BuildError as error:
            logger.info("an engine with a layer in floating point cannot be built: %s", error)
            return 0.0
        ratio = self._ratio([(artefact, current), (candidate, other)])
        if ratio >= WORTH:
            candidate.replace(artefact)
        else:
            candidate.unlink()
        return ratio

    def _settle(self, built: LoweredModel, chosen: LoweredModel, artefact: Path) -> LoweredModel:
        """Build the model that stored ratios chose, if any; return it if its engine is faster, else that of the artefact."""
        return chosen if chosen is built or self._measure(built, chosen, artefact) >= WORTH else built

    def _ratio(self, files: Sequence[tuple[Path, LoweredModel]]) -> float:
        with ExitStack() as stack:
            engines = []
            for path, model in files:
                engines.append(self._open(path, model))
                stack.callback(engines[-1].close)
            times: list[list[float]] = [[], []]
            for number in range(_ROUNDS):
                # Each engine is first in about half of the rounds.
                for index in ((0, 1), (1, 0))[number % 2]:
                    times[index].append(engines[index].time(self._batch, _ROUND_S).median_us)
        return median(times[0]) / median(times[1])
