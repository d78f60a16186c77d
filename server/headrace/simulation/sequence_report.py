"""Reports of a replay of sequences: figures, and tables for terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.simulation.report import PERCENTILES, empty_table, rounded, shares
from headrace.simulation.sequences import Integers, SequenceReplay


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """Figures of a replay, after the warm-up.

    Attributes:
        started: sequences that arrived.
        completed: sequences whose last request was answered.
        errors: sequences that got an error, by its reason.
        requests_hz: responses a second, within the length of the arrivals.
        goodput_hz: those within the objective; None without one.
        latency_us, backlog_us: percentiles of the latency of responses, and of the time from START to the slot.
        waited: share of the sequences with a slot that waited for it.
        slots: slots of all instances.
        used: mean share of the slots in use.
        max_backlog: most sequences that waited for a slot.
        mean_rows: mean requests of a batch, NaN without any.
        reasons: batches by close reason.
        busy: share of the time in which a device computed.
        ends: sequences that ended in the server, by reason, warm-up included.
    """

    started: int
    completed: int
    errors: dict[str, int]
    requests_hz: float
    goodput_hz: float | None
    latency_us: tuple[float, ...]
    backlog_us: tuple[float, ...]
    waited: float
    slots: int
    used: float
    max_backlog: int
    mean_rows: float
    reasons: dict[str, int]
    busy: float
    ends: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object; missing figures are null."""
        return {
            "sequences": self.started,
            "completed": self.completed,
            "errors": self.errors,
            "ends": {reason: count for reason, count in self.ends.items() if count},
            "throughput": rounded(self.requests_hz),
            "goodput": None if self.goodput_hz is None else rounded(self.goodput_hz),
            "latency_us": _named(self.latency_us),
            "backlog_us": {**_named(self.backlog_us), "share": rounded(self.waited)},
            "slots": self.slots,
            "slots_used": rounded(self.used),
            "max_backlog": self.max_backlog,
            "mean_batch": rounded(self.mean_rows),
            "close_reasons": self.reasons,
            "devices_busy": rounded(self.busy),
        }


def sequence_report(
    replay: SequenceReplay, slo_ms: float | None, warm_up_ns: int = 0, overhead_ns: int = 0
) -> SequenceReport:
    """Compute the figures of a replay.

    Args:
        replay: the replay.
        slo_ms: latency objective of a request; None for none.
        warm_up_ns: sequences that arrived and batches that closed earlier are left out.
        overhead_ns: added to every latency, for network and codec.
    """
    load = replay.load
    counted = load.starts_ns >= warm_up_ns
    outcomes = [outcome for outcome, is_counted in zip(replay.outcomes, counted.tolist(), strict=True) if is_counted]
    arrived_ns, latency_ns = np.array(replay.arrived_ns, np.int64), np.array(replay.latency_ns, np.int64)
    of_counted = counted[np.array(replay.sequence, np.int64)]
    done_ns = arrived_ns + latency_ns
    in_time = (done_ns >= warm_up_ns) & (done_ns < load.duration_ns)
    window_s = (load.duration_ns - warm_up_ns) / NS_PER_S
    with_overhead_ns = latency_ns + overhead_ns
    good = in_time & (with_overhead_ns <= (slo_ms or 0) * NS_PER_MS)
    backlog_ns = replay.backlog_ns[counted & (replay.backlog_ns >= 0)]
    taken_ns = np.array(replay.batches.taken_ns, np.int64)
    rows = np.array(replay.batches.rows, np.int64)[taken_ns >= warm_up_ns]
    return SequenceReport(
        started=len(outcomes),
        completed=outcomes.count(""),
        errors=dict(sorted(Counter(outcome for outcome in outcomes if outcome).items())),
        requests_hz=float(in_time.sum() / window_s),
        goodput_hz=float(good.sum() / window_s) if slo_ms else None,
        latency_us=_percentiles(with_overhead_ns[of_counted]),
        backlog_us=_percentiles(backlog_ns),
        waited=float((backlog_ns > 0).mean()) if len(backlog_ns) else float("nan"),
        slots=replay.slots,
        used=replay.used_ns / (replay.slots * load.duration_ns),
        max_backlog=replay.max_backlog,
        mean_rows=float(rows.mean()) if len(rows) else float("nan"),
        reasons=dict(replay.batches.reasons),
        busy=sum(replay.busy_ns) / len(replay.busy_ns) / max(replay.end_ns, load.duration_ns),
        ends=replay.ends,
    )


def print_sequence_reports(reports: Sequence[tuple[str, SequenceReport]], console: Console) -> None:
    """Print tables with one line for each setting.

    Args:
        reports: pairs of a setting's label and its report.
        console: terminal to print to.
    """
    names = [f"p{percentile:g}" for percentile in PERCENTILES]
    latency = empty_table("setting", ("requests/s", "goodput/s", *[f"{name} ms" for name in names]))
    slots = empty_table(
        "setting", ("sequences", "completed", "slots used", "waited", "wait p50 ms", "p99 ms", "backlog")
    )
    batches = empty_table("setting", ("batch", "busy"))
    batches.add_column("closed because")
    batches.add_column("errors")
    for label, report in reports:
        goodput = "-" if report.goodput_hz is None else f"{report.goodput_hz:,.0f}"
        latency.add_row(label, f"{report.requests_hz:,.0f}", goodput, *map(_ms, report.latency_us))
        slots.add_row(
            label,
            f"{report.started:,}",
            f"{report.completed:,}",
            f"{report.used:.0%} of {report.slots:,}",
            "-" if report.waited != report.waited else f"{report.waited:.1%}",
            _ms(report.backlog_us[0]),
            _ms(report.backlog_us[2]),
            f"{report.max_backlog:,}",
        )
        closed = shares(report.reasons, sum(report.reasons.values()))
        rows = "-" if report.mean_rows != report.mean_rows else f"{report.mean_rows:.1f}"
        batches.add_row(label, rows, f"{report.busy:.0%}", closed, shares(report.errors, report.started) or "none")
    for table in (slots, latency, batches):
        console.print(table)


def _ms(time_us: float) -> str:
    return "-" if time_us != time_us else f"{time_us / 1000:,.2f}"


def _percentiles(times_ns: Integers) -> tuple[float, ...]:
    if not len(times_ns):
        return (float("nan"),) * len(PERCENTILES)
    values: Sequence[float] = np.percentile(times_ns / NS_PER_US, PERCENTILES).tolist()
    return tuple(values)


def _named(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percentile:g}": rounded(value) for percentile, value in zip(PERCENTILES, values, strict=True)}
