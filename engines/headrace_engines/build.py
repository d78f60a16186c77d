"""Builds an artefact from a model's configuration, or returns the stored one.

project -> spec -> data -> key -> in the store? -> BuildResult
                              \\-> simplify -> lower -> target.build -> compare with FP32 -> time -> store -> BuildResult
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from headrace.config.digests import config_digest
from headrace.config.machine import Machine
from headrace.config.manifest import Stamp, artefact_name
from headrace_reports.command_line import plural

from headrace_engines.accuracy import Accuracy, judge, measure
from headrace_engines.errors import BuildError, NoKernelError
from headrace_engines.onnx_graph import OnnxRunner, read_onnx
from headrace_engines.precision.lowering import ROWS, LoweredModel, lower_model
from headrace_engines.precision.methods import EXPLICIT, STRIPPED, precisions_without_samples, with_method
from headrace_engines.progress import Report, part, silent
from headrace_engines.project import BuildData, BuildSpec, Project, open_data
from headrace_engines.quantization.explicit import refused_by_tensorrt, without_qdq
from headrace_engines.quantization.refinement import PatternTimes, Refinement
from headrace_engines.simplify import simplify
from headrace_engines.store import Store, StoreEntry
from headrace_engines.targets.base import BatchTiming, Engine, ModelRunner, Target, TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeEngine, name_nodes

logger = logging.getLogger("headrace.build")
Array = npt.NDArray[Any]
# Time for each batch size, for the stamp; `headrace compare` measures longer.
_TIMING_S = 0.3
# A CPU needs seconds for the largest batches of a large model; its rows a second are the same from a few rows on.
_CPU_ROWS = 8
# Number of builds of a model, each with fewer layers in 8 bits, before the error is raised.
_TRIES = 6
# Speed-up over the next higher precision that a lower precision needs to be chosen.
_WORTH = 1.05
_SOURCES = ("onnx", "onnxruntime", "numpy")
# Facts of the store that stamps do not have; stores of earlier versions have `sparsity_report`.
_NOT_IN_STAMPS = ("model", "version", "baseline", "sparsity_report", "refinement_report", "plugin_report")


@dataclass(frozen=True, slots=True)
class BuildResult:
    """An artefact in the store.

    Attributes:
        path: file of the artefact.
        spec: specification that it was built from.
        machine: machine that it was built for.
        key: key in the store.
        accuracy: measured against the FP32 model; None if the store has none.
        refusal: a sentence for each missed accuracy limit; empty if the artefact may be published.
        float_nodes: names of the nodes in a higher precision.
        timings: one for each batch size.
        size_bytes: size of the file.
        seconds: duration of the build.
        cached: True if the artefact was in the store.
        baseline: timing of `model.onnx` on ONNX Runtime's CPU at one batch size; None if it does not run there.
        refinement: measurements of layers in floating point, as in `PatternResult`; empty without `--refine`.
        plugins: measurements of the choice of plug-in layers, as in `PluginReport`; None without `--plugins`.
    """

    path: Path
    spec: BuildSpec
    machine: Machine
    key: str
    accuracy: Accuracy | None
    refusal: list[str]
    float_nodes: tuple[str, ...]
    timings: tuple[BatchTiming, ...]
    size_bytes: int
    seconds: float
    cached: bool
    baseline: BatchTiming | None = None
    refinement: tuple[Mapping[str, Any], ...] = ()
    plugins: Mapping[str, Any] | None = None

    @property
    def rows_per_s(self) -> float:
        """Rows per second at the fastest batch size."""
        return max((timing.rows_per_s for timing in self.timings), default=0.0)


def build_engine(
    project: Project, spec: BuildSpec, target: Target, store: Store, report: Report, *, rebuild: bool = False
) -> BuildResult:
    """Build an artefact, or find it in the store; nothing is published.

    Args:
        project: version of the model.
        spec: specification; not of precision "best", see `build_best_engine`.
        target: target to build for.
        store: store that receives the artefact.
        report: called with the progress.
        rebuild: build even if the store has the artefact.

    Raises:
        BuildError: the artefact cannot be built; the message has the reason.
    """
    refused = target.refuses(spec.precision, version_compatible=spec.version_compatible)
    if refused:
        raise BuildError(
            f"{project.name}: {spec.precision} cannot be built for {target.name} on this machine: {refused}"
        )
    if spec.plugins != "off" and target.name != "tensorrt":
        raise BuildError(
            f"{project.name}: --plugins {spec.plugins} is given for {target.name}, plug-ins run in TensorRT engines only: build "
            "with --target tensorrt on a machine with a GPU, or leave out --plugins"
        )
    if spec.plugins != "off" and spec.version_compatible:
        raise BuildError(
            f"{project.name}: both --plugins {spec.plugins} and --version-compatible are given, an engine has one of them: leave "
            "one of them out"
        )
    machine = target.describe()
    spec = with_method(project, spec, target.name)
    data = open_data(project, spec)
    digest = project.digest()
    key = _key(project, spec, data, machine, store)
    if not rebuild and (entry := store.find(key)) is not None:
        return _result_from_entry(entry, spec, machine, cached=True)
    with store.building(key, on_wait=lambda note: report(0.0, note)):
        # Another builder may have finished it while this one waited for the lock.
        if not rebuild and (entry := store.find(key)) is not None:
            return _result_from_entry(entry, spec, machine, cached=True)
        entry = _Builder(project, spec, target, store, data, key, digest, machine).run(report)
    return _result_from_entry(entry, spec, machine, cached=False)


def build_best_engine(
    project: Project, spec: BuildSpec, target: Target, store: Store, report: Report, *, rebuild: bool
) -> BuildResult:
    """Build the precision that is fastest at the largest batch size and holds the accuracy limits; FP32 if none does.

    A lower precision must be clearly faster: timings of the same engine differ by a few percent.

    Raises:
        BuildError: not even FP32 can be built.
    """
    without_samples = precisions_without_samples(project, spec, target.name)
    candidates = ["fp32", "fp16", *(without_samples or (["int8"] if spec.calibration.data else []))]
    candidates = [precision for precision in candidates if not target.refuses(precision)]
    built = []
    for index, precision in enumerate(candidates):
        share = part(report, index / len(candidates), (index + 1) / len(candidates))
        try:
            built.append(build_engine(project, spec.at(precision), target, store, share, rebuild=rebuild))
        except BuildError as error:
            if precision == "fp32":
                raise
            logger.warning("%s: %s is left out: %s", project.name, precision, error)
    best, *others = [result for result in built if not result.refusal] or built[:1]
    for result in others:
        if _rows_per_s(result) > _WORTH * _rows_per_s(best):
            best = result
    return best


def find_fp32_engine(project: Project, spec: BuildSpec, target: Target, store: Store) -> BuildResult | None:
    """Return the stored FP32 engine of the same target, model and shapes; None if there is none."""
    plain = replace(with_method(project, spec.at("fp32"), target.name), version_compatible=False, plugins="off")
    machine = target.describe()
    entry = store.find(_key(project, plain, open_data(project, plain), machine, store))
    return None if entry is None else _result_from_entry(entry, plain, machine, cached=True)


def _key(project: Project, spec: BuildSpec, data: BuildData, machine: Machine, store: Store) -> str:
    """Return the key of an artefact in the store."""
    parts = {"onnx": project.digest(), "spec": spec.digest(), "data": data.digest, "machine": asdict(machine)}
    return store.key(parts)


def _rows_per_s(built: BuildResult) -> float:
    """Return rows per second at the largest batch size."""
    return max(built.timings, key=lambda timing: timing.rows).rows_per_s


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds one artefact that the store does not have."""

    project: Project
    spec: BuildSpec
    target: Target
    store: Store
    data: BuildData
    key: str
    digest: str
    machine: Machine

    def run(self, report: Report) -> StoreEntry:
        started_s = time.monotonic()
        report(0.0, "reading the model")
        source, reference = self._source()
        lowered = lower_model(
            source if self.spec.method == EXPLICIT else simplify(source),
            self.spec,
            self.target.name,
            self.data,
            self.store.tables,
            part(report, 0.0, 0.45),
            self.target.refuses_fp8_convolutions() if self.spec.precision == "fp8" else "",
        )
        with self.store.scratch() as scratch:
            artefact = scratch / f"model{self.target.suffix}"
            lowered = self._build_artefact(lowered, artefact, part(report, 0.45, 0.6))
            lowered, refinement = self._refine(lowered, artefact, part(report, 0.6, 0.7))
            model, plugins = self._choose_plugins(lowered, artefact, reference, part(report, 0.7, 0.9))
            with closing(self._open(artefact, model)) as engine:
                accuracy = self._compare(OnnxRunner(reference), engine, part(report, 0.9, 0.95))
                timings = self._timings(engine, part(report, 0.95, 1.0))
            seconds = time.monotonic() - started_s
            facts = {
                **self._facts(lowered, accuracy, timings, seconds),
                "baseline": self._baseline(timings),
                **refinement,
                **plugins,
            }
            return self.store.add(self.key, artefact, facts)

    def _source(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the model to build, and the FP32 model to compare with.

        Raises:
            BuildError: the target does not take the Q/DQ of the model.
        """
        source = read_onnx(self.project.source)
        if self.spec.method not in (EXPLICIT, STRIPPED):
            return source, source
        plain = without_qdq(source)
        if self.spec.method == STRIPPED:
            return plain, plain
        refused = refused_by_tensorrt(source) if self.target.name == "tensorrt" else ""
        if refused:
            cure = "export it with symmetric INT8 activations, or build for the CPU: --target onnxruntime"
            raise BuildError(f"{self.project.name}: {refused}: {cure}")
        return name_nodes(source), plain

    def _build_artefact(self, lowered: LoweredModel, artefact: Path, report: Report) -> LoweredModel:
        """Build, with layers for which the target has no 8-bit kernel in floating point; return the built model."""
        order = self._order()
        for attempt in range(_TRIES):
            try:
                self.target.build(lowered.model, order, artefact, report)
                break
            except NoKernelError as error:
                other = lowered.without(error.nodes) if lowered.without and attempt < _TRIES - 1 else None
                if other is None:
                    raise
                logger.warning("%s: %s; building again with these nodes in floating point", self.project.name, error)
                lowered = other
        return lowered

    def _order(self) -> TargetSpec:
        return TargetSpec(
            precision=self.spec.precision,
            profiles=self.spec.profiles,
            workspace_bytes=self.spec.workspace_bytes,
            timing_cache=self.store.timing_cache(self.machine),
            version_compatible=self.spec.version_compatible,
            optimization_level=self.spec.optimization_level,
        )

    def _refine(
        self, lowered: LoweredModel, artefact: Path, report: Report
    ) -> tuple[LoweredModel, Mapping[str, object]]:
        """Replace the artefact by one without Q/DQ where that is faster; return its model, and facts."""
        if not self.spec.refined or lowered.without is None:
            return lowered, {}
        rows = self.spec.profiles[0].rows[1] if self.project.batched else 1
        times = PatternTimes(
            self.store.timing_cache(self.machine).with_suffix(".patterns.json"), f"{self.spec.precision}/{rows}"
        )

        def build(model: LoweredModel, path: Path) -> None:
            self.target.build(model.model, self._order(), path, silent)

        def open_engine(path: Path, model: LoweredModel) -> Engine:
            return self._open(path, model.model)

        refinement = Refinement(build, open_engine, sample_batch(self.data, rows, self.project), times)
        refined = refinement.run(lowered, artefact, report)
        return refined, {"refinement_report": [asdict(result) for result in refinement.results]}

    def _open(self, artefact: Path, model: onnx.ModelProto) -> Engine:
        return self.target.open(artefact, model, host_code=self.spec.version_compatible)

    def _choose_plugins(
        self, lowered: LoweredModel, artefact: Path, reference: onnx.ModelProto, report: Report
    ) -> tuple[onnx.ModelProto, Mapping[str, object]]:
        """Replace the artefact by one with plug-in layers if the specification requests it.

        Returns:
            The model of the artefact, and facts for the store.
        """
        if self.spec.plugins == "off":
            return lowered.model, {}
        from headrace_engines.targets.tensorrt.plugin_choice import PluginChooser
        from headrace_engines.targets.tensorrt.target import TensorRtTarget

        assert isinstance(self.target, TensorRtTarget), "build_engine has checked the target"
        sizes = self.spec.profiles[0].rows if self.project.batched else (1, 1, 1)
        max_rows = max((profile.rows[2] for profile in self.spec.profiles), default=1) if self.project.batched else 1

        def refusal(engine: Engine) -> list[str]:
            return judge(
                self._compare(OnnxRunner(reference), engine, silent), self.spec.bar, quantized=self.spec.quantized
            )

        batch = sample_batch(self.data, sizes[1], self.project)
        budget_s = self.spec.plugins_budget_s
        chooser = PluginChooser(
            self.target, lowered.model, self._order(), artefact, max_rows, batch, refusal, report, budget_s=budget_s
        )
        choice = chooser.choose(self.spec.plugins)
        return choice.model, {"plugins": choice.uses(), "plugin_report": asdict(choice.report)}

    def _compare(self, reference: OnnxRunner, engine: Engine, report: Report) -> Accuracy:
        """Compare on batches that fit the profile with the fewest rows."""
        held_out, output = self.data.held_out, self.data.output
        if not self.project.batched:
            return measure(reference, engine, held_out, 1, report, output=output)
        min_rows, max_rows = min((profile.rows[0], profile.rows[2]) for profile in self.spec.profiles)
        rows = max(min(ROWS, max_rows), min_rows)
        return measure(reference, PaddedEngine(engine, min_rows), held_out, rows, report, output=output)

    def _timings(self, engine: Engine, report: Report) -> list[BatchTiming]:
        sizes = batch_sizes(self.project, self.spec)
        timings = []
        for index, rows in enumerate(sizes):
            report(index / len(sizes), f"timing {plural(rows, 'row')}")
            timings.append(per_row(engine.time(sample_batch(self.data, rows, self.project), _TIMING_S), self.project))
        return timings

    def _baseline(self, timings: list[BatchTiming]) -> Mapping[str, object] | None:
        """Time `model.onnx` on ONNX Runtime, which serves a model without an engine."""
        best = max(timings, key=lambda timing: timing.rows_per_s)
        rows = best.rows if self.target.name == "onnxruntime" else min(best.rows, _CPU_ROWS)
        try:
            with closing(OnnxRuntimeEngine(self.project.source)) as engine:
                timing = engine.time(sample_batch(self.data, rows, self.project), _TIMING_S)
        except BuildError as error:
            logger.info("%s: model.onnx is not timed on ONNX Runtime: %s", self.project.name, error)
            return None
        return asdict(per_row(timing, self.project))

    def _facts(
        self, lowered: LoweredModel, accuracy: Accuracy, timings: list[BatchTiming], seconds: float
    ) -> Mapping[str, object]:
        return {
            "model": self.project.name,
            "version": self.project.version,
            "onnx_sha256": self.digest,
            "spec_digest": self.spec.digest(),
            "precision": self.spec.precision,
            "machine": asdict(self.machine),
            "accuracy": accuracy.to_json(),
            "refusal": judge(accuracy, self.spec.bar, quantized=self.spec.quantized),
            "kept": list(lowered.float_nodes),
            "timings": [asdict(timing) for timing in timings],
            "seconds": round(seconds, 3),
            **({"version_compatible": True} if self.spec.version_compatible else {}),
            "built_with": {**_versions(), self.machine.target: self.machine.version},
        }


def per_row(timing: BatchTiming, project: Project) -> BatchTiming:
    """Correct the timing of a model without a batch dimension, whose first dimension the engine counts as rows."""
    if project.batched:
        return timing
    return replace(timing, rows=1, rows_per_s=timing.rows_per_s / max(timing.rows, 1))


@dataclass(frozen=True, slots=True)
class PaddedEngine:
    """Runs smaller batches than an engine was built for: repeats rows and drops their outputs.

    Attributes:
        engine: engine with a batch dimension.
        min_rows: smallest batch of the engine.
    """

    engine: ModelRunner
    min_rows: int

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch of any number of rows up to the largest one of the engine and return its outputs."""
        rows = len(next(iter(inputs.values())))
        if rows >= self.min_rows:
            return self.engine.run(inputs)
        answers = self.engine.run({name: resized(array, self.min_rows) for name, array in inputs.items()})
        return {name: array[:rows] if array.shape[:1] == (self.min_rows,) else array for name, array in answers.items()}


def resized(array: Array, rows: int) -> Array:
    """Return a batch of `rows` rows, repeated from its start."""
    return np.resize(array, (rows, *array.shape[1:]))


def batch_sizes(project: Project, spec: BuildSpec) -> list[int]:
    """Return the smallest, tuned and largest number of rows of the first profile, ascending; [1] without a batch dimension."""
    if not project.batched:
        return [1]
    return sorted(set(spec.profiles[0].rows))


def sample_batch(data: BuildData, rows: int, project: Project) -> dict[str, Array]:
    """Return a batch of `rows` held-out samples by input name, repeated if there are fewer."""
    batch = next(iter(data.held_out.batches(rows)))
    if not project.batched:
        return batch
    return {name: resized(array, rows) for name, array in batch.items()}


def make_stamp(
    built: BuildResult, entry: StoreEntry, project: Project, requested: str, overridden: bool, forced: bool
) -> Stamp:
    """Return the stamp of a published artefact for `build.json`.

    Args:
        built: the artefact.
        entry: its entry in the store.
        project: the version, with the configuration of its folder.
        requested: requested precision, possibly "best".
        overridden: the precision comes from the command line, not from the configuration.
        forced: it is published although it misses an accuracy limit.
    """
    facts: dict[str, Any] = dict(entry.facts)
    return Stamp.from_json(
        {
            **{name: value for name, value in facts.items() if name not in _NOT_IN_STAMPS},
            "key": built.key,
            "artefact": artefact_name(built.key, built.path.suffix),
            "config_digest": config_digest(project.config),
            "asked": requested,
            "overridden": overridden,
            "forced": forced,
        }
    )


def _result_from_entry(entry: StoreEntry, spec: BuildSpec, machine: Machine, cached: bool) -> BuildResult:
    facts: dict[str, Any] = dict(entry.facts)
    accuracy = facts.get("accuracy")
    return BuildResult(
        path=entry.path,
        spec=spec,
        machine=machine,
        key=entry.key,
        accuracy=None if accuracy is None else Accuracy.from_json(accuracy),
        refusal=list(facts.get("refusal", [])),
        float_nodes=tuple(facts.get("kept", ())),
        timings=tuple(BatchTiming(**timing) for timing in facts.get("timings", ())),
        size_bytes=entry.size_bytes,
        seconds=float(facts.get("seconds", 0.0)),
        cached=cached,
        baseline=BatchTiming(**facts["baseline"]) if facts.get("baseline") else None,
        refinement=tuple(facts.get("refinement_report", ())),
        plugins=facts.get("plugin_report"),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in _SOURCES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # not installed as a distribution
            continue
    return versions
