"""Replays as a picture (SVG): who was answered within which time, and what was answered in time as the trace went on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from server.core.clock import NS_PER_MS, NS_PER_S
from server.simulation.replay import ANSWERED, Replay

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 34, 46
_MARGIN, _LINE = 16, 20
_BINS = 60
# Told apart also by those who see red and green alike; for light and for dark paper.
_COLOURS = (
    ("#2f6db5", "#6aa8f0"),
    ("#d2601a", "#f3914f"),
    ("#0f8b8d", "#3cc4c0"),
    ("#a0308f", "#dd7fd0"),
    ("#7a8b0f", "#b5c94a"),
    ("#76808c", "#8b96a3"),
)
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "12 4")
_PAPER = (("ink", "#1b1f24", "#e6edf3"), ("line", "#d0d7de", "#353c45"), ("paper", "#ffffff", "#0f1318"))


@dataclass(frozen=True, slots=True)
class Curve:
    """A line.

    Attributes:
        name: in the legend; curves of one name have one colour.
        xs, ys: its points; xs ascending.
        step: it stays at a value until the next point.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    step: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot.

    Attributes:
        title: above it.
        curves: in it.
        x_title, y_title: with units.
        log_x: a logarithmic axis; points at 0 or below are left out.
        marks: values of x that get a vertical line.
    """

    title: str
    curves: Sequence[Curve]
    x_title: str
    y_title: str
    log_x: bool = False
    marks: Sequence[float] = ()


def panels(
    done: Sequence[tuple[str, Replay]], slos_ms: Sequence[Sequence[float | None]], overhead_ns: int = 0
) -> list[Panel]:
    """What a picture of some settings shows: latencies, and good answers over time.

    Args:
        done: the same trace, replayed by each setting.
        slos_ms: of each setting, by model; without any every answer is good.
        overhead_ns: added to every latency.
    """
    within: list[Curve] = []
    good: list[Curve] = []
    trace = done[0][1].trace
    edges_s = np.linspace(0, trace.duration_ns / NS_PER_S, _BINS + 1)
    wide_s = float(edges_s[1])
    for (name, replay), slo_ms in zip(done, slos_ms, strict=True):
        latency_ms = (np.array(replay.latency_ns) + overhead_ns) / NS_PER_MS
        answered = np.array([outcome == ANSWERED for outcome in replay.outcomes], dtype=bool)
        served = np.sort(latency_ms[answered])
        places = np.unique(np.linspace(0, len(served) - 1, 200).astype(int)) if len(served) else np.empty(0, int)
        within.append(
            Curve(name, served[places].tolist(), (100 * (places + 1) / max(len(trace), 1)).tolist(), step=True)
        )
        limits = np.array([math.inf if slo is None else slo for slo in slo_ms])[trace.models]
        done_s = trace.times_ns / NS_PER_S + latency_ms / 1000
        counts, _ = np.histogram(done_s[answered & (latency_ms <= limits)], edges_s)
        good.append(Curve(name, edges_s.tolist(), [*(counts / wide_s).tolist(), float(counts[-1] / wide_s)], step=True))
    offered, _ = np.histogram(trace.times_ns / NS_PER_S, edges_s)
    good.append(
        Curve("offered", edges_s.tolist(), [*(offered / wide_s).tolist(), float(offered[-1] / wide_s)], step=True)
    )
    marks = sorted({slo for each in slos_ms for slo in each if slo is not None})
    return [
        Panel("answered within", within, "ms", "% of the requests", log_x=True, marks=marks[:5]),
        Panel("answered in time", good, "s", "a second"),
    ]


def picture(shown: Sequence[Panel], title: str) -> str:
    """Panels side by side, with one legend above."""
    names = list(dict.fromkeys(curve.name for panel in shown for curve in panel.curves))
    width = len(shown) * (WIDTH + _MARGIN) + _MARGIN
    head = 36 + _LINE * len(names)
    height = head + HEIGHT + _MARGIN
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>', _text(title, _MARGIN, 24, "t")]
    for number, name in enumerate(names):
        y = 40 + _LINE * number
        parts.append(f'<path d="M{_MARGIN} {y}h28" {_stroke(number)}/>{_text(name, _MARGIN + 36, y + 4)}')
    for number, panel in enumerate(shown):
        place = _MARGIN + number * (WIDTH + _MARGIN)
        parts.append(f'<g transform="translate({place} {head})">{_drawn(panel, names)}</g>')
    light = ";".join([*(f"--{n}:{a}" for n, a, _ in _PAPER), *(f"--c{k}:{a}" for k, (a, _) in enumerate(_COLOURS))])
    dark = ";".join([*(f"--{n}:{b}" for n, _, b in _PAPER), *(f"--c{k}:{b}" for k, (_, b) in enumerate(_COLOURS))])
    style = (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{font:12px system-ui,sans-serif;fill:var(--ink)}.t{font-size:14px;font-weight:600}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def _drawn(panel: Panel, names: Sequence[str]) -> str:
    parts = [_text(panel.title, _LEFT, 18, "t")]
    points = [
        (x, y) for curve in panel.curves for x, y in zip(curve.xs, curve.ys, strict=True) if x > 0 or not panel.log_x
    ]
    if not points:
        return "".join([*parts, _text("nothing was answered", WIDTH / 2, HEIGHT / 2, anchor="middle")])
    xs = [x for x, _ in points] + list(panel.marks)
    across = _ticks(min(xs), max(xs), panel.log_x)
    up = _ticks(0.0, max(y for _, y in points) or 1.0, False)

    def at(x: float, y: float) -> tuple[float, float]:
        low, high, value = (math.log(v) if panel.log_x else v for v in (across[0], across[-1], max(x, across[0])))
        right = _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)
        return right, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - up[0]) / (up[-1] - up[0])

    for tick in up:
        y = at(across[0], tick)[1]
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="var(--line)"/>')
        parts.append(_text(f"{tick:,g}", _LEFT - 6, y + 4, anchor="end"))
    for tick in across:
        x = at(tick, 0)[0]
        parts.append(f'<path d="M{x:.1f} {HEIGHT - _BOTTOM}v5" stroke="var(--ink)"/>')
        parts.append(_text(f"{tick:,g}", x, HEIGHT - _BOTTOM + 18, anchor="middle"))
    for mark in panel.marks:
        x = at(mark, 0)[0]
        parts.append(f'<path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="var(--ink)" stroke-dasharray="2 2"/>')
    parts.append(_text(panel.x_title, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, anchor="middle"))
    turned = f'transform="translate(13 {HEIGHT / 2:.0f}) rotate(-90)"'
    parts.append(f'<text text-anchor="middle" {turned}>{escape(panel.y_title)}</text>')
    for curve in panel.curves:
        places = [at(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if x > 0 or not panel.log_x]
        if places:
            parts.append(f'<path d="{_path(places, curve.step)}" fill="none" {_stroke(names.index(curve.name))}/>')
    return "".join(parts)


def _path(places: Sequence[tuple[float, float]], step: bool) -> str:
    (x, y), *others = places
    told = f"M{x:.1f} {y:.1f}"
    for x, y in others:
        told += f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}"
    return told


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    if log:
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        marks = [float(f"{factor * 10.0**power:.12g}") for power in decades for factor in (1, 2, 5)]
        first = max(index for index, mark in enumerate(marks) if mark <= low)
        last = min(index for index, mark in enumerate(marks) if mark >= high)
        return marks[first : max(last, first + 1) + 1]
    rough = max(high - low, abs(high) * 1e-3, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _stroke(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="var(--c{number % len(_COLOURS)})" stroke-width="2"{dashed}'


def _text(text: str, x: float, y: float, style: str = "", anchor: str = "") -> str:
    extra = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'
