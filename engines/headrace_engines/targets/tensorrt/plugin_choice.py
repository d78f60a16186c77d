"""Chooses the convolutions of an engine that our kernels run, by measurement: `headrace build --plugins`.

    the engine without plug-ins -> time of each layer (TensorRT's profiler)
    all convolutions            -> time of our fastest kernel alone, the longest layers first, within a budget of seconds
    promising ones              -> engine with all of them as plug-ins -> time of each layer
    those faster there          -> final engine; both engines in interleaved rounds: kept only if the whole is faster

At most three engines are built. An engine that misses the accuracy limits is not kept either. Each measurement is reported as
soon as it is known, in phases that begin with `PLUGIN_PHASES`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from headrace.core.tensor import Array
from headrace.runtimes.cuda.convolution_plugin import PLUGIN
from headrace_lab.kernels.plugin import VERSION, PluginLayer, plugin_digest
from headrace_lab.kernels.resources import Algorithm
from headrace_reports.command_line import plural

from headrace_engines.errors import BuildError
from headrace_engines.progress import PLUGIN_PHASES, Report, part
from headrace_engines.targets.base import Engine, MeasuredLayer, TargetSpec
from headrace_engines.targets.tensorrt.convolutions import FusedConvolution, find_convolutions, replace_convolutions
from headrace_engines.targets.tensorrt.kernel_times import KernelTimes
from headrace_engines.targets.tensorrt.target import TensorRtTarget

OFF, AUTO = "off", "auto"
# A plug-in's layer must take at most this share of the time of TensorRT's layer.
_SHARE = 0.97
# Engines with plug-ins: all promising layers, those that are faster there, and one more try.
_BUILDS = 3
# Share of the budget for our kernels alone; the rest is for engines.
_KERNELS_SHARE = 0.5
_ROUNDS = 11
_ROUND_S = 0.12
# Two standard errors: 95 % of normally distributed means.
_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One measured convolution.

    Attributes:
        layer: name of the ONNX node.
        shape: its shape, for the measured batch.
        tensorrt_us: microseconds of its layer in TensorRT's engine, in the profiler; 0 if it has no layer of its own.
        kernel_us: microseconds of our fastest kernel alone; 0 if none supports the shape.
        plugin_us: microseconds of the plug-in's layer in the engine with plug-ins, in the profiler; 0 if it was not built.
        algorithm: name and variant of the kernel.
        kept: True if the plug-in runs it.
        reason: why the plug-in does not run it; "" if it does.
        ratio: time of TensorRT's layer over ours, in the engine if it was built, else alone; 0 without one of them.
    """

    layer: str
    shape: str
    tensorrt_us: float
    kernel_us: float = 0.0
    plugin_us: float = 0.0
    algorithm: str = ""
    kept: bool = False
    reason: str = ""
    ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class PluginReport:
    """Result of a choice.

    Attributes:
        mode: value of `--plugins`.
        rows: batch of the measurements.
        table: the measured convolutions, the longest first.
        engine_us: microseconds of the engine without plug-ins, the median of the rounds.
        plugin_engine_us: microseconds of the last engine with plug-ins; 0 if none was built.
        speedup: mean of the rounds' speed-ups, 1 without one.
        error: standard error of the speed-up.
        verdict: result in a sentence.
        seconds: duration of the choice.
        budget_s: its budget.
    """

    mode: str
    rows: int
    table: tuple[PluginRow, ...]
    engine_us: float = 0.0
    plugin_engine_us: float = 0.0
    speedup: float = 1.0
    error: float = 0.0
    verdict: str = ""
    seconds: float = 0.0
    budget_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """The chosen engine.

    Attributes:
        model: ONNX model of the engine, with nodes of the plug-in.
        layers: layers of the plug-in by name of the ONNX node; empty if nothing is replaced.
        report: the measurements.
    """

    model: onnx.ModelProto
    layers: Mapping[str, PluginLayer]
    report: PluginReport

    def uses(self) -> list[dict[str, object]]:
        """Return the plug-ins of the engine for its stamp."""
        if not self.layers:
            return []
        layers = {name: layer.parameters for name, layer in self.layers.items()}
        return [{"name": PLUGIN, "version": VERSION, "digest": plugin_digest(layers), "layers": layers}]


class PluginChooser:
    """Chooses the plug-in layers of one engine.

    Args:
        target: builds and opens engines.
        model: ONNX model of the engine, in its precision.
        order: parameters of the build.
        artefact: the engine without plug-ins; replaced by the chosen one.
        max_rows: largest batch of all profiles.
        batch: inputs of the measurements.
        refusal: returns the missed accuracy limits of an engine.
        report: called with the progress.
        budget_s: seconds after which no further kernel is timed and no further engine is built.
    """

    def __init__(
        self,
        target: TensorRtTarget,
        model: onnx.ModelProto,
        order: TargetSpec,
        artefact: Path,
        max_rows: int,
        batch: Mapping[str, Array],
        refusal: Callable[[Engine], list[str]],
        report: Report,
        *,
        budget_s: float,
    ) -> None:
        self._target = target
        self._model = model
        self._order = order
        self._artefact = artefact
        self._candidate = artefact.with_name(f"plugins-{artefact.name}")
        self._batch = batch
        self._rows = len(next(iter(batch.values())))
        self._refusal = refusal
        self._report = report
        self._convolutions = {one.name: one for one in find_convolutions(model, max_rows)}
        self._times = KernelTimes(0, self._rows)
        self._budget_s = budget_s
        self._started_s = time.monotonic()

    def choose(self, mode: str) -> PluginChoice:
        """Choose the layers; the artefact is then the chosen engine.

        Args:
            mode: "auto", or the names of ONNX nodes, separated by commas, which are replaced in any case.

        Raises:
            BuildError: a name is unknown or unsupported, or the engine cannot be built.
        """
        return self._automatic() if mode == AUTO else self._forced(mode)

    def _forced(self, names: str) -> PluginChoice:
        chosen, algorithms = [], {}
        for name in dict.fromkeys(filter(None, map(str.strip, names.split(",")))):
            convolution = self._convolutions.get(name)
            if convolution is None:
                listed = ", ".join(self._convolutions) or "none"
                raise BuildError(
                    f"--plugins names '{name}', the plug-in can run these convolutions of the model: {listed}: name some of them"
                )
            self._say(0.1, f"timing our kernels for {name}")
            fastest = self._times.fastest(convolution)
            if fastest is None:
                raise BuildError(f"--plugins names '{name}' ({convolution.shape}), no kernel supports it: leave it out")
            chosen.append(convolution)
            algorithms[name] = fastest[0]
        with closing(self._target.open(self._artefact, self._model)) as engine:
            before = layer_times(engine.layers(self._batch, graph=True), self._convolutions)
            self._say(0.6, f"building with {plural(len(chosen), 'plug-in layer')}")
            model, layers = self._build(chosen, algorithms)
            with closing(self._target.open(self._candidate, model)) as other:
                after = layer_times(other.layers(self._batch, graph=True), self._convolutions)
                result = compare_engines(engine, other, self._batch)
        self._candidate.replace(self._artefact)
        table = [self._row(one, before, after, kept=True) for one in chosen]
        verdict = f"{plural(len(chosen), 'layer')} replaced as requested"
        return PluginChoice(model, layers, self._summary("requested", table, result, verdict))

    def _automatic(self) -> PluginChoice:
        with closing(self._target.open(self._artefact, self._model)) as engine:
            self._say(0.05, "timing TensorRT's layers")
            before = layer_times(engine.layers(self._batch, graph=True), self._convolutions)
            if not before:
                verdict = "the engine has no FP16 convolution that the plug-in can run: nothing is replaced"
                return PluginChoice(self._model, {}, self._summary(AUTO, [], EngineComparison(), verdict))
            rows = self._timed_rows(before)
            promising = [self._convolutions[row.layer] for row in rows if not row.reason]
            return self._built(engine, before, rows, promising)

    def _timed_rows(self, before: Mapping[str, float]) -> list[PluginRow]:
        """Time our kernels alone, for the longest layers first, while the budget lasts."""
        rows: list[PluginRow] = []
        for index, name in enumerate(sorted(before, key=lambda name: -before[name])):
            number = f"layer {index + 1} of {len(before)}, {name}: TensorRT {before[name]:.1f} us"
            # The first layer is measured in any case.
            if index and self._spent() >= _KERNELS_SHARE * self._budget_s:
                shape = replace(self._convolutions[name].shape, n=self._rows)
                reason = f"not measured: the budget of {self._budget_s:.0f} s is spent"
                rows.append(PluginRow(name, str(shape), before[name], reason=reason))
                continue
            row = self._row(self._convolutions[name], before, {})
            rows.append(row)
            ours = (
                f"ours {row.kernel_us:.1f} us ({row.algorithm}), ratio {row.ratio:.2f}" if row.kernel_us else row.reason
            )
            self._say(0.1 + 0.4 * index / len(before), f"{number}, {ours}")
        unmeasured = sum(not row.kernel_us and row.reason.startswith("not measured") for row in rows)
        if unmeasured:
            self._say(0.5, f"the budget is spent before {plural(unmeasured, 'layer')} of {len(before)}")
        return rows

    def _built(
        self, engine: Engine, before: Mapping[str, float], rows: list[PluginRow], chosen: list[FusedConvolution]
    ) -> PluginChoice:
        """Build engines with fewer and fewer plug-in layers, until one is faster or none is left."""
        result, verdict = (
            EngineComparison(),
            "TensorRT's kernels are faster in every measured layer: nothing is replaced",
        )
        for number in range(_BUILDS if chosen else 0):
            if not chosen:
                break
            if number and self._spent() >= self._budget_s:
                verdict = f"{verdict} (the budget of {self._budget_s:.0f} s is spent)"
                break
            try:
                attempt = self._attempt(engine, before, chosen, is_last=number == _BUILDS - 1)
            except BuildError as error:
                verdict = f"the engine with our kernels cannot be built: nothing is replaced ({error})"
                break
            rows = [self._after(row, attempt.layers, attempt.after) for row in rows]
            if len(attempt.faster) < len(chosen):
                verdict = "our kernels are not 3 % faster in every layer of a built engine: nothing is replaced"
                chosen = attempt.faster
                continue
            result, names = attempt.result, set(attempt.layers)
            if attempt.is_better:
                self._candidate.replace(self._artefact)
                rows = [replace(row, kept=True, reason="") if row.layer in names else row for row in rows]
                verdict = f"{plural(len(chosen), 'layer')} of {len(before)} replaced by our kernels"
                return PluginChoice(attempt.model, attempt.layers, self._summary(AUTO, rows, result, verdict))
            reason = f"accuracy: {attempt.refusal[0]}" if attempt.refusal else "the whole engine is not faster"
            rows = [replace(row, reason=reason) if row.layer in names else row for row in rows]
            verdict = f"the engine with our kernels is not kept ({reason}): nothing is replaced"
            # The half with the largest gain may win alone.
            gains = {one.name: before[one.name] - attempt.after[one.name] for one in chosen}
            chosen = sorted(chosen, key=lambda one: -gains[one.name])[: len(chosen) // 2]
        self._candidate.unlink(missing_ok=True)
        return PluginChoice(self._model, {}, self._summary(AUTO, rows, result, verdict))

    def _attempt(
        self, engine: Engine, before: Mapping[str, float], chosen: list[FusedConvolution], *, is_last: bool
    ) -> _Attempt:
        """Build an engine with these plug-in layers and measure it."""
        self._say(0.6, f"building with {plural(len(chosen), 'plug-in layer')}, {self._spent():.0f} s so far")
        model, layers = self._build(chosen, {one.name: self._algorithm(one) for one in chosen})
        with closing(self._target.open(self._candidate, model)) as other:
            after = layer_times(other.layers(self._batch, graph=True), self._convolutions)
            for one in chosen:
                times = f"TensorRT {before[one.name]:.1f} us, plug-in {after.get(one.name, 0.0):.1f} us"
                self._say(0.9, f"in the engine, {one.name}: {times}")
            faster = [one for one in chosen if after.get(one.name, math.inf) <= _SHARE * before[one.name]]
            if len(faster) < len(chosen):
                left = "no engine is built any more" if is_last else f"{len(faster)} of {len(chosen)} are 3 % faster"
                self._say(0.9, left)
                return _Attempt(model, layers, after, faster, EngineComparison(), [])
            result = compare_engines(engine, other, self._batch)
            self._say(0.95, f"whole engine: {result}")
            return _Attempt(model, layers, after, faster, result, self._refusal(other) if result.is_faster else [])

    def _say(self, share: float, text: str) -> None:
        self._report(share, f"{PLUGIN_PHASES}{text}")

    def _spent(self) -> float:
        return time.monotonic() - self._started_s

    def _algorithm(self, convolution: FusedConvolution) -> Algorithm:
        fastest = self._times.fastest(convolution)
        assert fastest is not None, "only convolutions with a kernel are built"
        return fastest[0]

    def _build(
        self, chosen: Sequence[FusedConvolution], algorithms: Mapping[str, Algorithm]
    ) -> tuple[onnx.ModelProto, dict[str, PluginLayer]]:
        model, layers = replace_convolutions(self._model, chosen, algorithms)
        order = replace(self._order, plugin_layers=layers)
        self._target.build(model, order, self._candidate, part(self._report, 0.6, 0.9))
        return model, {one.name: layer for one, layer in zip(chosen, layers, strict=True)}

    def _row(
        self, convolution: FusedConvolution, before: Mapping[str, float], after: Mapping[str, float], kept: bool = False
    ) -> PluginRow:
        shape, tensorrt_us = replace(convolution.shape, n=self._rows), before.get(convolution.name, 0.0)
        row = PluginRow(
            convolution.name, str(shape), tensorrt_us, plugin_us=after.get(convolution.name, 0.0), kept=kept
        )
        fastest = self._times.fastest(convolution)
        if fastest is None:
            return replace(row, reason="no kernel supports the shape")
        algorithm, kernel_us = fastest
        row = replace(row, kernel_us=kernel_us, algorithm=" ".join(filter(None, (algorithm.name, algorithm.variant))))
        row = replace(row, ratio=tensorrt_us / (row.plugin_us or kernel_us))
        return row if kept or kernel_us <= _SHARE * tensorrt_us else replace(row, reason="our kernel is not 3 % faster")

    def _after(self, row: PluginRow, names: Collection[str], after: Mapping[str, float]) -> PluginRow:
        """Return a row with the time of its plug-in layer, if it is one of the built ones."""
        if row.layer not in names or row.layer not in after:
            return row
        row = replace(row, plugin_us=after[row.layer], ratio=row.tensorrt_us / max(after[row.layer], 1e-3))
        if row.plugin_us > _SHARE * row.tensorrt_us:
            return replace(row, reason="the plug-in is not 3 % faster in the engine")
        return row

    def _summary(self, mode: str, table: Sequence[PluginRow], result: EngineComparison, verdict: str) -> PluginReport:
        return PluginReport(
            mode,
            self._rows,
            tuple(table),
            result.first_us,
            result.second_us,
            result.speedup,
            result.error,
            verdict,
            round(self._spent(), 1),
            self._budget_s,
        )


def layer_times(layers: Sequence[MeasuredLayer], convolutions: Mapping[str, FusedConvolution]) -> dict[str, float]:
    """Return the microseconds of each convolution that has layers of its own, by name.

    A layer with nodes of several convolutions is left out, with all of them.
    """
    owner = {node: one.name for one in convolutions.values() for node in one.nodes}
    times: dict[str, float] = {}
    mixed: set[str] = set()
    for layer in layers:
        names = {owner[node] for node in layer.nodes if node in owner}
        for name in names:
            times[name] = times.get(name, 0.0) + layer.time_us
        if len(names) > 1:
            mixed |= names
    return {name: time_us for name, time_us in times.items() if name not in mixed and time_us > 0}


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Times of two engines in interleaved rounds.

    Attributes:
        first_us, second_us: medians of the rounds' median times of an execution.
        speedup: mean over the rounds of first / second.
        error: standard error of the speed-up.
    """

    first_us: float = 0.0
    second_us: float = 0.0
    speedup: float = 1.0
    error: float = 0.0

    @property
    def is_faster(self) -> bool:
        """True if the second engine is faster, beyond two standard errors."""
        return self.speedup - _ERRORS * self.error > 1

    def __str__(self) -> str:
        times = f"{self.first_us:.1f} us without plug-ins, {self.second_us:.1f} us with"
        return f"{times}, speed-up {self.speedup:.3f} +- {self.error:.3f}"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An engine with plug-in layers; the comparison is made only if all layers are faster."""

    model: onnx.ModelProto
    layers: Mapping[str, PluginLayer]
    after: Mapping[str, float]
    faster: list[FusedConvolution]
    result: EngineComparison
    refusal: list[str]

    @property
    def is_better(self) -> bool:
        """True if it is faster, and accurate."""
        return self.result.is_faster and not self.refusal


def compare_engines(first: Engine, second: Engine, batch: Mapping[str, Array]) -> EngineComparison:
    """Time two engines in turns: both see the same clocks and temperature."""
    times_us: list[tuple[float, float]] = []
    for number in range(_ROUNDS + 1):
        pair = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            pair[index] = (first, second)[index].time(batch, _ROUND_S).median_us
        times_us.append((pair[0], pair[1]))
    rounds = np.array(times_us[1:])  # the first one warms up
    ratios = rounds[:, 0] / np.maximum(rounds[:, 1], 1e-3)
    first_us, second_us = np.median(rounds, axis=0)
    return EngineComparison(
        float(first_us), float(second_us), float(ratios.mean()), float(ratios.std(ddof=1) / math.sqrt(len(ratios)))
    )
