"""The soak as a page with plots, as one picture, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

import numpy as np
from headrace_engines.report import page, table
from headrace_reports.svg_plot import HEIGHT, WIDTH, Panel, PlotCurve, curve_picture, svg

from loadtest.soak.judge import Run, Verdict, phase_p99s
from loadtest.soak.ledger import BAD, Line, Outcome, times_between
from loadtest.soak.models import UNDISTURBED

_MIB = 1 << 20
_POINTS = 120
_COLUMNS, _HEAD = 3, 36
_CSS = """
.verdicts{list-style:none;padding:0}.verdicts li{margin:.25rem 0;padding-left:3.6rem;position:relative}
.verdicts b{position:absolute;left:0}.pass{color:#1a7f37}.fail{color:#cf222e}
@media (prefers-color-scheme:dark){.pass{color:#3fb950}.fail{color:#ff7b72}}
pre{white-space:pre-wrap;font-size:.8rem}
"""


def to_html(run: Run, verdicts: Sequence[Verdict], title: str, about: Sequence[str]) -> str:
    """The page.

    Args:
        run: what was written down.
        verdicts: on it.
        title: of the page.
        about: machine, command, date: a line each.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f'<p class="soft">{escape(line)}</p>' for line in about)]
    parts.append('<ul class="verdicts">')
    for verdict in verdicts:
        word = "pass" if verdict.passed else "fail"
        parts.append(f'<li><b class="{word}">{word.upper()}</b>{escape(verdict.name)}: {escape(verdict.found)}</li>')
    parts.append("</ul>")
    if run.details:
        parts.append(f"<h2>What went wrong first</h2><pre>{escape(chr(10).join(run.details))}</pre>")
    parts.append("<h2>Over time</h2>")
    parts.append(f'<div class="plots">{"".join(plots(run))}</div>')
    parts.append("<h2>Phases</h2>" + _phases(run) + "<h2>Requests</h2>" + _requests(run.lines))
    return page(title, "\n".join(parts), _CSS)


def to_json(run: Run, verdicts: Sequence[Verdict], about: Sequence[str]) -> str:
    """Verdicts, phases and counts, for programs."""
    lines = [
        {
            "way": line.way,
            "model": line.model,
            "counts": {str(outcome): count for outcome, count in line.counts.items()},
            "ms": _percentiles_ms([line]),
        }
        for line in run.lines
    ]
    whole = {
        "about": list(about),
        "passed": all(verdict.passed for verdict in verdicts),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "phases": [asdict(phase) for phase in run.phases],
        "p99_s": phase_p99s(run),
        "requests": lines,
        "details": list(run.details),
        "counted": asdict(run.counted),
    }
    return json.dumps(whole, indent=1) + "\n"


def plots(run: Run) -> list[str]:
    """Draw all plots, the time on their x axis in seconds since the first phase."""
    if not run.phases or not run.samples:
        return []
    start_s, end_s = run.phases[0].start_s, run.phases[-1].end_s
    length_s = end_s - start_s
    at_s = [sample.at_s - start_s for sample in run.samples]

    def held(name: str, values: Sequence[float]) -> list[PlotCurve]:
        return [PlotCurve(name, at_s, values)]

    quiet = ([phase.held.at_s - start_s for phase in run.phases], [p.held.memory_bytes / _MIB for p in run.phases])
    memory = [*held("at work", [sample.memory_bytes / _MIB for sample in run.samples]), PlotCurve("quiet", *quiet)]
    drawn = {
        "Latency of undisturbed models": (_latencies(run, start_s, length_s), "ms"),
        "Answers": (_rates(run, start_s, length_s), "1/s"),
        "Resident memory": (memory, "MiB"),
        "Descriptors": (held("all", [sample.descriptors for sample in run.samples]), "open"),
        "Threads": (held("all", [sample.threads for sample in run.samples]), "number"),
        "Processor of the server": (_cores(run, start_s), "cores"),
        "Done to the server": (_events(run, start_s), "times"),
    }
    return [curve_picture([Panel("", curves, "s", unit)], title) for title, (curves, unit) in drawn.items()]


def picture(run: Run, title: str) -> str:
    """All plots as one SVG, for a document; empty if there are none."""
    drawn = plots(run)
    if not drawn:
        return ""
    rows = -(-len(drawn) // _COLUMNS)
    width, height = _COLUMNS * WIDTH, rows * HEIGHT + _HEAD
    parts = [
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>',
        f'<text x="16" y="26" style="font-size:16px;font-weight:600">{escape(title)}</text>',
    ]
    for number, one in enumerate(drawn):
        row, column = divmod(number, _COLUMNS)
        place = f'x="{column * WIDTH}" y="{row * HEIGHT + _HEAD}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(one.replace("<svg ", f"<svg {place} ", 1))
    return svg("".join(parts), width, height, title) + "\n"


def _latencies(run: Run, start_s: float, length_s: float) -> list[PlotCurve]:
    curves = []
    for way in ("HTTP", "gRPC"):
        lines = [line for line in run.lines if line.way == way and line.model in UNDISTURBED]
        for quantile in (50, 99):
            middles, values = [], []
            for low_s, high_s in _spans(length_s):
                times = times_between(lines, start_s + low_s, start_s + high_s)
                if len(times):
                    middles.append((low_s + high_s) / 2)
                    values.append(float(np.percentile(times, quantile)) * 1e3)
            curves.append(PlotCurve(f"{way} p{quantile}", middles, values))
    return curves


def _rates(run: Run, start_s: float, length_s: float) -> list[PlotCurve]:
    curves = []
    for way in ("HTTP", "gRPC", "stream"):
        lines = [line for line in run.lines if line.way == way]
        spans = _spans(length_s)
        rates = [len(times_between(lines, start_s + low, start_s + high)) / (high - low) for low, high in spans]
        curves.append(PlotCurve(way, [(low + high) / 2 for low, high in spans], rates))
    return curves


def _cores(run: Run, start_s: float) -> list[PlotCurve]:
    pairs = list(zip(run.samples, run.samples[4:], strict=False))
    return [
        PlotCurve(
            "server",
            [(first.at_s + last.at_s) / 2 - start_s for first, last in pairs],
            [(last.cpu_s - first.cpu_s) / (last.at_s - first.at_s) for first, last in pairs],
        )
    ]


def _events(run: Run, start_s: float) -> list[PlotCurve]:
    times: dict[str, list[float]] = {}
    for event in run.events:
        times.setdefault(event.name, []).append(event.at_s - start_s)
    return [PlotCurve(name, at_s, range(1, len(at_s) + 1), step=True) for name, at_s in times.items()]


def _spans(length_s: float) -> list[tuple[float, float]]:
    """A second long at least."""
    width_s = max(length_s / _POINTS, 1.0)
    return [(number * width_s, (number + 1) * width_s) for number in range(int(length_s / width_s))]


def _phases(run: Run) -> str:
    rows = []
    for number, (phase, p99_s) in enumerate(zip(run.phases, phase_p99s(run), strict=True)):
        held = phase.held
        cells = [f"{phase.end_s - phase.start_s:.0f}", f"{p99_s * 1e3:.1f}", f"{held.memory_bytes / _MIB:,.1f}"]
        cells += [str(held.descriptors), str(held.threads), str(held.processes), str(phase.in_flight + phase.queued)]
        rows.append([f"phase {number}" if number else "warm-up", *cells])
    headings = ["", "s", "p99 ms", "MiB, quiet", "descriptors", "threads", "processes", "left behind"]
    return table(headings, rows)


def _requests(lines: Sequence[Line]) -> str:
    headings = ["", "model", *(outcome.value for outcome in Outcome), "p50 ms", "p99 ms", "max ms"]
    rows = []
    for line in lines:
        counts = [
            f'<b class="fail">{count:,}</b>' if count and outcome in BAD else f"{count:,}"
            for outcome, count in ((outcome, line.counts[outcome]) for outcome in Outcome)
        ]
        times = [f"{value:.1f}" for value in _percentiles_ms([line])] or ["", "", ""]
        rows.append([escape(line.way), escape(line.model), *counts, *times])
    return table(headings, rows)


def _percentiles_ms(lines: Sequence[Line]) -> list[float]:
    """p50, p99 and the longest; nothing where nothing was timed."""
    times = times_between(lines, float("-inf"), float("inf"))
    if not len(times) or not times.any():
        return []
    return [float(value) * 1e3 for value in (*np.percentile(times, (50, 99)), times.max())]
