"""Figures of a replay: per model and client, in all, and of pipelines; as JSON and as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace_reports.svg_plot import Panel, PlotCurve
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.inference.simulation.pipelines import PipelineOutcome
from headrace.inference.simulation.replay import ANSWERED, Replay

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one model, one client, or all models, after the warm-up.

    Attributes:
        name: name of the model or client.
        requests: number of requests.
        answered: number of responses.
        errors: number of errors by reason.
        mean_us: mean latency of the responses, NaN without any.
        percentiles_us: percentiles of that latency, in the order of `PERCENTILES`.
        throughput_hz: responses per second.
        goodput_hz: responses per second within the objective; None without one.
        slo_ms: latency objective; None without one, or with different ones.
        batches: number of batches.
        mean_rows: mean rows of a batch, NaN without any.
        reasons: number of batches by close reason.
    """

    name: str
    requests: int
    answered: int
    errors: dict[str, int]
    mean_us: float
    percentiles_us: tuple[float, ...]
    throughput_hz: float
    goodput_hz: float | None
    slo_ms: float | None
    batches: int
    mean_rows: float
    reasons: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object; missing figures are null."""
        return {
            "name": self.name,
            "requests": self.requests,
            "answered": self.answered,
            "errors": self.errors,
            "latency_us": {"mean": rounded(self.mean_us), **_named(self.percentiles_us)},
            "throughput": rounded(self.throughput_hz),
            "goodput": None if self.goodput_hz is None else rounded(self.goodput_hz),
            "slo_ms": self.slo_ms,
            "batches": self.batches,
            "mean_batch": rounded(self.mean_rows),
            "close_reasons": self.reasons,
        }


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step of a pipeline, without a warm-up.

    Attributes:
        name: name of the step.
        model: model that it calls.
        requests: requests with a result.
        failures: requests that the step ended with an error.
        mean_us: mean time from its queue to its result, NaN without requests.
        p99_us: 99th percentile of that time, NaN without requests.
    """

    name: str
    model: str
    requests: int
    failures: int
    mean_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Figures of one pipeline.

    Attributes:
        name: name of the pipeline.
        steps: its steps.
        limiting: name of the step with the longest mean time; "" without requests.
        wasted: share of the compute time of all models that was spent on its requests without a response.
    """

    name: str
    steps: tuple[StepReport, ...]
    limiting: str
    wasted: float

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object; missing figures are null."""
        steps = [
            {**asdict(step), "mean_us": rounded(step.mean_us), "p99_us": rounded(step.p99_us)} for step in self.steps
        ]
        return {"name": self.name, "limiting_step": self.limiting, "wasted": round(self.wasted, 4), "steps": steps}


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one replay.

    Attributes:
        total: figures of all models together.
        models: figures of each model.
        busy: share of the time in which a device computed, averaged over the devices.
        clients: figures of each named client, without batches.
        pipelines: figures of each pipeline's steps.
    """

    total: Figures
    models: tuple[Figures, ...]
    busy: float
    clients: tuple[Figures, ...] = ()
    pipelines: tuple[PipelineReport, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "all": self.total.as_json(),
            "devices_busy": rounded(self.busy),
            "models": [figures.as_json() for figures in self.models],
            "clients": [figures.as_json() for figures in self.clients],
            **({"pipelines": [each.as_json() for each in self.pipelines]} if self.pipelines else {}),
        }


def report(replay: Replay, slos_ms: Sequence[float | None], warm_up_ns: int = 0, overhead_ns: int = 0) -> Report:
    """Compute the figures of a replay.

    Args:
        replay: the replay.
        slos_ms: latency objective of each model, None for none.
        warm_up_ns: requests that arrived and batches that closed earlier are left out.
        overhead_ns: added to every latency, for network and codec.
    """
    trace = replay.trace
    latency_ns = np.array(replay.latency_ns, dtype=np.int64) + overhead_ns
    answered = np.array([outcome == ANSWERED for outcome in replay.outcomes], dtype=bool)
    slo_ns = np.array([-1 if slo is None else slo * NS_PER_MS for slo in slos_ms])[trace.models]
    window_s = (trace.duration_ns - warm_up_ns) / NS_PER_S
    done_ns = trace.times_ns + np.array(replay.latency_ns, dtype=np.int64)
    in_time = answered & (done_ns >= warm_up_ns) & (done_ns < trace.duration_ns)
    counted = trace.times_ns >= warm_up_ns
    good = in_time & (latency_ns <= slo_ns)

    def figures(name: str, among: npt.NDArray[np.int64], slo_ms: float | None, models: Sequence[int]) -> Figures:
        counted_requests = among[counted[among]]
        latencies = latency_ns[counted_requests[answered[counted_requests]]] / NS_PER_US
        failed = [replay.outcomes[number] for number in counted_requests[~answered[counted_requests]].tolist()]
        rows, reasons = _batches(replay, models, warm_up_ns)
        promised = any(slos_ms[model] is not None for model in models or all_models)
        return Figures(
            name=name,
            requests=len(counted_requests),
            answered=len(latencies),
            errors=dict(sorted(Counter(failed).items())),
            mean_us=_mean(latencies),
            percentiles_us=_percentiles(latencies),
            throughput_hz=float(in_time[among].sum() / window_s),
            goodput_hz=float(good[among].sum() / window_s) if promised else None,
            slo_ms=slo_ms,
            batches=len(rows),
            mean_rows=_mean(rows),
            reasons=reasons,
        )

    all_models = range(len(trace.names))
    order = np.argsort(trace.models, kind="stable")
    bounds = np.searchsorted(trace.models[order], np.arange(len(trace.names) + 1))
    each = tuple(
        figures(name, order[bounds[model] : bounds[model + 1]], slos_ms[model], [model])
        for model, name in enumerate(trace.names)
    )
    common = slos_ms[0] if len(set(slos_ms)) == 1 else None
    total = figures("all", np.arange(len(trace)), common, all_models) if len(each) > 1 else each[0]
    clients = tuple(
        figures(name, np.flatnonzero(trace.clients == client), common, ())
        for client, name in enumerate(trace.client_names)
    )
    busy = sum(replay.busy_ns) / len(replay.busy_ns) / max(replay.end_ns, trace.duration_ns)
    return Report(total, each, busy, clients, tuple(_pipeline(*pair) for pair in replay.pipelines.items()))


def _pipeline(name: str, outcome: PipelineOutcome) -> PipelineReport:
    steps = []
    for step in outcome.graph.steps:
        total = outcome.steps[step.name]
        latency = total.latency
        mean_us = latency.sum_ns / latency.count / NS_PER_US if latency.count else float("nan")
        p99_s = latency.quantile_s(0.99)
        p99_us = float("nan") if p99_s is None else p99_s * 1e6
        steps.append(StepReport(step.name, step.model, total.requests, total.failures, mean_us, p99_us))
    limiting = max((step for step in steps if step.requests), key=lambda step: step.mean_us, default=None)
    return PipelineReport(name, tuple(steps), "" if limiting is None else limiting.name, outcome.wasted)


def _batches(replay: Replay, models: Sequence[int], warm_up_ns: int) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
    """Return the rows of each batch after the warm-up, and the close reasons of all batches."""
    rows = [np.empty(0, np.int64)]
    reasons: Counter[str] = Counter()
    for model in models:
        batches = replay.batches[model]
        taken_ns = np.frombuffer(batches.taken_ns, dtype=np.int64) if batches.taken_ns else np.empty(0, np.int64)
        sizes = np.frombuffer(batches.rows, dtype=np.int64) if batches.rows else np.empty(0, np.int64)
        rows.append(sizes[taken_ns >= warm_up_ns])
        reasons.update(batches.reasons)
    return np.concatenate(rows), dict(sorted(reasons.items()))


def _ms(time_us: float) -> str:
    return "-" if time_us != time_us else f"{time_us / 1000:,.2f}"


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentiles(times_us: npt.NDArray[np.float64]) -> tuple[float, ...]:
    if not len(times_us):
        return (float("nan"),) * len(PERCENTILES)
    values: Sequence[float] = np.percentile(times_us, PERCENTILES).tolist()
    return tuple(values)


def _named(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percentile:g}": rounded(value) for percentile, value in zip(PERCENTILES, values, strict=True)}


def rounded(value: float) -> float | None:
    """Return a figure for JSON; None for a missing one."""
    return None if value != value else round(value, 3)


# Models or clients that a table lists: those with the most requests.
_MOST_MODELS = 10

# Name, figures, and the busy share of the devices if it is known.
_Line = tuple[str, Figures, float | None]


def print_reports(reports: Sequence[tuple[str, Report]], console: Console) -> None:
    """Print tables: one line for each model and client of a single setting, else one line for each setting.

    Args:
        reports: pairs of a setting's label and its report.
        console: terminal to print to.
    """
    if len(reports) == 1:
        report = reports[0][1]
        listed = sorted(report.models, key=lambda each: -each.requests)[:_MOST_MODELS] if len(report.models) > 1 else []
        lines: list[_Line] = [(figures.name, figures, None) for figures in listed]
        lines += [*_clients(report), (report.total.name, report.total, report.busy)]
        if len(report.models) > len(listed) > 0:
            console.print(f"the {len(listed)} models of {len(report.models)} with the most requests, and all")
    else:
        lines = []
        for label, report in reports:
            lines += [(label, report.total, report.busy), *_clients(report)]
    first = "setting" if len(reports) > 1 else "model"
    console.print(_latency_table(first, lines))
    console.print(_batch_table(first, lines))
    for label, report in reports:
        for pipeline in report.pipelines:
            _print_pipeline(label if len(reports) > 1 else "", pipeline, console)


def _print_pipeline(label: str, pipeline: PipelineReport, console: Console) -> None:
    table = empty_table("step", ("mean ms", "p99 ms", "requests", "failed"))
    for step in pipeline.steps:
        table.add_row(step.name, _ms(step.mean_us), _ms(step.p99_us), f"{step.requests:,}", f"{step.failures:,}")
    where = f"{label}: " if label else ""
    limit = f"step '{pipeline.limiting}' takes the longest" if pipeline.limiting else "no request has run through it"
    console.print(f"{where}pipeline {pipeline.name}: {limit}; {pipeline.wasted:.1%} of the compute time was wasted")
    console.print(table)


def _clients(report: Report) -> list[_Line]:
    busiest = sorted(report.clients, key=lambda each: -each.requests)[:_MOST_MODELS]
    return [(f"  client {figures.name}", figures, None) for figures in busiest]


def _latency_table(first: str, lines: Sequence[_Line]) -> Table:
    heads = ("requests/s", "goodput/s", *[f"p{percentile:g} ms" for percentile in PERCENTILES])
    table = empty_table(first, heads)
    for name, figures, _ in lines:
        table.add_row(
            name,
            f"{figures.throughput_hz:,.0f}",
            "-" if figures.goodput_hz is None else f"{figures.goodput_hz:,.0f}",
            *map(_ms, figures.percentiles_us),
        )
    return table


def _batch_table(first: str, lines: Sequence[_Line]) -> Table:
    table = empty_table(first, ("batch", "busy"))
    table.add_column("closed because")
    table.add_column("errors")
    for name, figures, busy in lines:
        table.add_row(
            name,
            f"{figures.mean_rows:.1f}" if figures.batches else "-",
            "" if busy is None else f"{busy:.0%}",
            shares(figures.reasons, sum(figures.reasons.values())),
            shares(figures.errors, figures.requests) or "none",
        )
    return table


def empty_table(first: str, heads: Sequence[str]) -> Table:
    """Return a table with a column of names and columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def shares(counts: dict[str, int], of: int) -> str:
    """Return counts as shares of a number, the largest first."""
    return ", ".join(f"{name} {count / of:.1%}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))


_BINS = 60
EMPTY = "no response"


def panels(
    done: Sequence[tuple[str, Replay]], slos_ms: Sequence[Sequence[float | None]], overhead_ns: int = 0
) -> list[Panel]:
    """Return the panels of a plot: distribution of latency, and goodput over time, a curve for each setting.

    Args:
        done: pairs of a setting's label and its replay of the same trace.
        slos_ms: latency objectives of each setting, by model; without one every response counts as good.
        overhead_ns: added to every latency, for network and codec.
    """
    within: list[PlotCurve] = []
    good: list[PlotCurve] = []
    trace = done[0][1].trace
    edges_s = np.linspace(0, trace.duration_ns / NS_PER_S, _BINS + 1)

    def per_second(name: str, times_s: npt.NDArray[np.float64]) -> PlotCurve:
        rates_hz = np.histogram(times_s, edges_s)[0] / float(edges_s[1])
        return PlotCurve(name, edges_s.tolist(), [*rates_hz.tolist(), float(rates_hz[-1])], step=True)

    for (name, replay), slo_ms in zip(done, slos_ms, strict=True):
        latency_ms = (np.array(replay.latency_ns) + overhead_ns) / NS_PER_MS
        answered = np.array([outcome == ANSWERED for outcome in replay.outcomes], dtype=bool)
        latencies = np.sort(latency_ms[answered])
        indices = np.unique(np.linspace(0, len(latencies) - 1, 200).astype(int)) if len(latencies) else np.empty(0, int)
        within.append(
            PlotCurve(name, latencies[indices].tolist(), (100 * (indices + 1) / max(len(trace), 1)).tolist(), step=True)
        )
        limits = np.array([math.inf if slo is None else slo for slo in slo_ms])[trace.models]
        done_s = trace.times_ns / NS_PER_S + latency_ms / 1000
        good.append(per_second(name, done_s[answered & (latency_ms <= limits)]))
    good.append(per_second("offered", trace.times_ns / NS_PER_S))
    marks = sorted({slo for each in slos_ms for slo in each if slo is not None})
    return [
        Panel("answered within", within, "ms", "% of the requests", log_x=True, marks=marks[:5], empty=EMPTY),
        Panel("answered in time", good, "s", "a second", empty=EMPTY),
    ]
