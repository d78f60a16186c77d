"""A replay in figures: for each model, and for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.simulation.replay import ANSWERED, Replay

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a model, or all of them, did in the time that counts.

    Attributes:
        name: of the model.
        requests: that came.
        answered: of those.
        errors: the others, by reason.
        mean_us: latency of those answered, NaN if none was.
        percentiles_us: the same, by `PERCENTILES`.
        throughput_hz: requests answered a second.
        goodput_hz: those within the SLO; None without one.
        slo_ms: the latency promised; None if none is, or several are.
        batches: that were closed.
        mean_rows: rows of a batch, NaN if there was none.
        reasons: why they were closed.
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
        """For `json`; what there is none of is null."""
        percentiles = zip(PERCENTILES, self.percentiles_us, strict=True)
        return {
            "name": self.name,
            "requests": self.requests,
            "answered": self.answered,
            "errors": self.errors,
            "latency_us": {"mean": _rounded(self.mean_us), **{f"p{p:g}": _rounded(us) for p, us in percentiles}},
            "throughput": _rounded(self.throughput_hz),
            "goodput": None if self.goodput_hz is None else _rounded(self.goodput_hz),
            "slo_ms": self.slo_ms,
            "batches": self.batches,
            "mean_batch": _rounded(self.mean_rows),
            "close_reasons": self.reasons,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one replay.

    Attributes:
        total: of all models.
        models: of each.
        busy: share of the time in which a device computed, the mean of all devices.
        clients: of each that has a name, without batches.
    """

    total: Figures
    models: tuple[Figures, ...]
    busy: float
    clients: tuple[Figures, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For `json`."""
        return {
            "all": self.total.as_json(),
            "devices_busy": _rounded(self.busy),
            "models": [figures.as_json() for figures in self.models],
            "clients": [figures.as_json() for figures in self.clients],
        }


def report(replay: Replay, slos_ms: Sequence[float | None], warm_up_ns: int = 0, overhead_ns: int = 0) -> Report:
    """Add up a replay.

    Args:
        replay: what became of a trace.
        slos_ms: latency promised, by model.
        warm_up_ns: requests that came, and batches that were closed, before do not count.
        overhead_ns: what a request takes besides (network, codec), added to every latency.
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
        mine = among[counted[among]]
        served = latency_ns[mine[answered[mine]]] / NS_PER_US
        failed = [replay.outcomes[number] for number in mine[~answered[mine]].tolist()]
        rows, reasons = _batches(replay, models, warm_up_ns)
        promised = any(slos_ms[model] is not None for model in models or everybody)
        return Figures(
            name=name,
            requests=len(mine),
            answered=len(served),
            errors=dict(sorted(Counter(failed).items())),
            mean_us=float(served.mean()) if len(served) else float("nan"),
            percentiles_us=tuple(np.percentile(served, PERCENTILES).tolist() if len(served) else [float("nan")] * 4),
            throughput_hz=float(in_time[among].sum() / window_s),
            goodput_hz=float(good[among].sum() / window_s) if promised else None,
            slo_ms=slo_ms,
            batches=len(rows),
            mean_rows=float(rows.mean()) if len(rows) else float("nan"),
            reasons=reasons,
        )

    everybody = range(len(trace.names))
    order = np.argsort(trace.models, kind="stable")
    bounds = np.searchsorted(trace.models[order], np.arange(len(trace.names) + 1))
    each = tuple(
        figures(name, order[bounds[model] : bounds[model + 1]], slos_ms[model], [model])
        for model, name in enumerate(trace.names)
    )
    common = slos_ms[0] if len(set(slos_ms)) == 1 else None
    total = figures("all", np.arange(len(trace)), common, everybody) if len(each) > 1 else each[0]
    clients = tuple(
        figures(name, np.flatnonzero(trace.clients == client), common, ())
        for client, name in enumerate(trace.client_names)
    )
    busy = sum(replay.busy_ns) / len(replay.busy_ns) / max(replay.end_ns, trace.duration_ns)
    return Report(total, each, busy, clients)


def _batches(replay: Replay, models: Sequence[int], warm_up_ns: int) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
    """Rows of the batches that count, and why they were closed (all of them)."""
    rows = [np.empty(0, np.int64)]
    reasons: Counter[str] = Counter()
    for model in models:
        batches = replay.batches[model]
        taken_ns = np.frombuffer(batches.taken_ns, dtype=np.int64) if batches.taken_ns else np.empty(0, np.int64)
        sizes = np.frombuffer(batches.rows, dtype=np.int64) if batches.rows else np.empty(0, np.int64)
        rows.append(sizes[taken_ns >= warm_up_ns])
        reasons.update(batches.reasons)
    return np.concatenate(rows), dict(sorted(reasons.items()))


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)
