"""Pipelines beside their models called one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench.chained import CALLERS, DEADLINE_S, NAMES, in_fresh_process
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least, at_most
from loadtest.bench.session import Bench, Case
from loadtest.bench.spread import Spread, differences, ratios


@dataclass(frozen=True, slots=True)
class ChainedCase(Case):
    """One kind of `loadtest.bench.chained`, in processes of their own; nothing goes over a network."""

    contenders = 1
    sample_s = 6

    def measured(self, bench: Bench, kind: str) -> dict[str, list[float]]:
        """The quantities of every round, by name."""
        rounds = []
        for _ in range(bench.rounds):
            bench.progress(f"{self.name} in process", bench.seconds(self.sample_s))
            rounds.append(in_fresh_process(kind, bench.seconds(self.sample_s), bench.cores.both))
        return {name: [each[name] for each in rounds] for name in rounds[0]}


@dataclass(frozen=True, slots=True)
class StepCost(ChainedCase):
    """Latency of one caller.

    Attributes:
        extra_us: target of the p50 of a step beyond the model alone in ONNX Runtime.
    """

    extra_us: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"a pipeline of {len(NAMES)} small models in process, one caller"

    def run(self, bench: Bench) -> CaseResult:
        """Measure the pipeline, its models by the same API in turn, and ONNX Runtime alone."""
        values = self.measured(bench, "latency")
        pipeline, in_turn, alone = (values[f"{name}_us"] for name in ("pipeline", "in turn", "alone"))
        figures = (
            Figure("pipeline", "us p50", Spread.of(pipeline)),
            Figure("its models in turn, by the same API", "us p50", Spread.of(in_turn)),
            Figure("ONNX Runtime alone", "us p50", Spread.of(alone)),
        )

        def a_step(ours: list[float], theirs: list[float]) -> Spread:
            return differences([value / len(NAMES) for value in ours], [value / len(NAMES) for value in theirs])

        comparisons = (
            Comparison("a step beyond ONNX Runtime alone, p50", "us", a_step(pipeline, alone), self.extra_us),
            Comparison("a step beyond the model by the same API, p50", "us", a_step(pipeline, in_turn)),
        )
        return CaseResult(self.name, self.title, figures, comparisons)


@dataclass(frozen=True, slots=True)
class StepThroughput(ChainedCase):
    """Throughput beside the slowest step alone.

    Attributes:
        ratio: target of requests a second over those of the slowest step.
    """

    ratio: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"a pipeline of models of about 0.1, 2 and 0.1 ms in process, {CALLERS} callers"

    def run(self, bench: Bench) -> CaseResult:
        """Measure the pipeline and its slowest model."""
        values = self.measured(bench, "throughput")
        figures = (
            Figure("pipeline", "requests/s", Spread.of(values["chain_hz"])),
            Figure("its slowest model", "requests/s", Spread.of(values["second_hz"])),
        )
        compared = ratios(values["chain_hz"], values["second_hz"])
        comparison = Comparison("pipeline / its slowest model, requests/s", "", compared, self.ratio)
        notes = (
            "the other steps need processor time of their own: the bound is min(slowest step, cores / sum of all steps)",
        )
        return CaseResult(self.name, self.title, figures, (comparison,), notes)


@dataclass(frozen=True, slots=True)
class StepOverload(ChainedCase):
    """Twice the capacity, with deadlines.

    Attributes:
        kind: "overload" or "waiting", see `loadtest.bench.chained`.
        goodput: target of requests answered in time over the capacity.
        wasted: target of the share of compute time for requests that got an error.
    """

    kind: str
    goodput: Target
    wasted: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        models = "models that compute on the cores" if self.kind == "overload" else "models that wait, as for a GPU,"
        return f"a pipeline of three {models} at twice its capacity, deadlines of {DEADLINE_S * 1e3:.0f} ms"

    def run(self, bench: Bench) -> CaseResult:
        """Measure the capacity, then offer twice as much."""
        values = self.measured(bench, self.kind)
        figures = (
            Figure("capacity", "requests/s", Spread.of(values["capacity_hz"])),
            Figure("answered in time", "requests/s", Spread.of(values["goodput_hz"])),
        )
        comparisons = (
            Comparison("answered in time / capacity", "", Spread.of(values["goodput"]), self.goodput),
            Comparison("wasted share of compute time", "", Spread.of(values["wasted"]), self.wasted),
        )
        return CaseResult(self.name, self.title, figures, comparisons)


CASES: tuple[Case, ...] = (
    StepCost("pipeline-3-c1", 1, extra_us=at_most(60.0)),
    StepThroughput("pipeline-3-c64", CALLERS, ratio=at_least(0.95)),
    StepOverload("pipeline-overload", CALLERS, "overload", goodput=at_least(0.9), wasted=at_most(0.05)),
    StepOverload("pipeline-overload-waiting", CALLERS, "waiting", goodput=at_least(0.9), wasted=at_most(0.05)),
)
