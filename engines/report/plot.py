"""Plots as SVG: lines with markers over batch sizes, and bars. No script, no font and no picture from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from engines.report.style import colour, short, variables

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 46
_INSET = 12
LEGEND_HEIGHT = 30
_BAR_HEIGHT, _BAR_GAP = 18, 8
# Width of a letter of the labels, on average, with some to spare.
_LETTER = 6.6
_TEXT = "text{font:12px system-ui,sans-serif;fill:var(--ink)}.s{fill:var(--soft)}.t{font-size:13px;font-weight:600}"


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement.

    Attributes:
        x: above 0; drawn on a logarithmic axis.
        y: its value.
        high: how far a line reaches up from it (a 99th percentile), None: there is none.
    """

    x: float
    y: float
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements of one precision, in the order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value from 0 to 1 of one precision, and how it is written."""

    name: str
    label: str
    value: float
    text: str


def line_plot(title: str, series: Sequence[Series], x_title: str, y_title: str, *, log_y: bool = False) -> str:
    """A panel of `WIDTH` x `HEIGHT`: SVG elements without the frame that `svg` gives.

    Args:
        title: above it.
        series: those without points are left out.
        x_title: with the unit.
        y_title: with the unit.
        log_y: a logarithmic axis, which has no zero; values must be above 0.
    """
    drawn = [one for one in series if one.points]
    points = [point for one in drawn for point in one.points]
    parts = [_text(title, _LEFT, 18, "t")]
    if not points:
        return "".join([*parts, _text("nothing was measured", WIDTH / 2, HEIGHT / 2, "s", "middle")])
    xs = sorted({point.x for point in points})
    tops = [max(point.y, point.high or 0.0) for point in points]
    y_ticks = log_ticks(min(p.y for p in points), max(tops)) if log_y else ticks(max(tops))
    across = _Axis(xs[0], xs[-1], _LEFT + _INSET, WIDTH - _RIGHT - _INSET, True)
    up = _Axis(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP, log_y)
    for tick in y_ticks:
        y = up.at(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="var(--line)"/>')
        parts.append(_text(short(tick), _LEFT - 6, y + 4, "s", "end"))
    parts += [_text(short(x), across.at(x), HEIGHT - _BOTTOM + 16, "s", "middle") for x in _thinned(xs, across)]
    parts.append(_text(x_title, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, "s", "middle"))
    turned = f'transform="translate(12 {HEIGHT / 2 - 6:.0f}) rotate(-90)"'
    parts.append(f'<text class="s" text-anchor="middle" {turned}>{escape(y_title)}</text>')
    for number, one in enumerate(drawn):
        parts.append(_line(number, one, across, up, y_title))
    return "".join(parts)


def bar_plot(title: str, bars: Sequence[Bar]) -> str:
    """A panel of horizontal bars from 0 to 1 with their values behind them; as high as `bars_height`."""
    start = max([150, *(round(_LETTER * len(bar.label)) for bar in bars)])
    parts = [_text(title, 0, 18, "t")]
    if not bars:
        parts.append(_text("nothing was measured", 0, 44, "s"))
    room = WIDTH - start - 64
    for number, bar in enumerate(bars):
        y = _TOP + number * (_BAR_HEIGHT + _BAR_GAP)
        width = room * min(max(bar.value, 0.0), 1.0)
        parts.append(_text(bar.label, 0, y + 13))
        parts.append(
            f'<rect x="{start}" y="{y}" width="{room}" height="{_BAR_HEIGHT}" rx="3" fill="var(--line)" opacity=".5"/>'
        )
        parts.append(
            f'<rect x="{start}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="3" fill="{colour(bar.name)}"/>'
        )
        parts.append(_text(bar.text, start + room + 6, y + 13))
    return "".join(parts)


def bars_height(count: int) -> int:
    """Of a `bar_plot` of so many bars."""
    return _TOP + max(count, 1) * (_BAR_HEIGHT + _BAR_GAP)


def svg(content: str, width: int, height: int, label: str) -> str:
    """A picture that scales with the room it is given; `label` tells those who cannot see it what is shown."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"<style>{variables()}{_TEXT}</style>{content}</svg>"
    )


def side_by_side(panels: Sequence[tuple[str, int]], names: Sequence[str], title: str) -> str:
    """One picture for a document: panels (content, height) in a row, on paper of its own, with one legend above.

    Args:
        panels: contents and heights, each `WIDTH` wide.
        names: of the series, for the legend.
        title: over all.
    """
    margin, head = 16, 34 + LEGEND_HEIGHT
    width = len(panels) * (WIDTH + margin) + margin
    height = max(height for _, height in panels) + head + margin
    parts = [
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>',
        f'<text x="{margin}" y="26" style="font-size:16px;font-weight:600">{escape(title)}</text>',
        f'<g transform="translate({margin} 34)">{legend(names)}</g>',
    ]
    for number, (content, _) in enumerate(panels):
        parts.append(f'<g transform="translate({margin + number * (WIDTH + margin)} {head})">{content}</g>')
    return svg("".join(parts), width, height, title)


def legend(names: Sequence[str]) -> str:
    """A row of markers with names, `LEGEND_HEIGHT` high."""
    parts = []
    x = 8
    for number, name in enumerate(names):
        parts.append(_marker(number, x, LEGEND_HEIGHT / 2, colour(name)))
        parts.append(_text(name, x + 10, LEGEND_HEIGHT / 2 + 4))
        x += 34 + 8 * len(name)
    return "".join(parts)


def ticks(high: float, count: int = 5) -> list[float]:
    """About `count` round numbers, steps of 1, 2 or 5 times a power of ten, from 0 to at least `high`."""
    if not high > 0:
        high = 1.0
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0, 20.0) if factor * power >= rough * (1 - 1e-9))
    return [float(f"{number * step:.12g}") for number in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten (over many decades the powers alone) from at most `low` to at least `high`."""
    low = max(low, 1e-12)
    high = max(high, low)
    # A decade more at each end: logarithms are not exact.
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    factors = (1.0, 2.0, 5.0) if last - first <= 5 else (1.0,)
    marks = [float(f"{factor * 10.0**power:.12g}") for power in range(first, last + 1) for factor in factors]
    start = max(index for index, mark in enumerate(marks) if mark <= low)
    end = min(index for index, mark in enumerate(marks) if mark >= high)
    return marks[start : max(end, start + 1) + 1]


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to places on the paper."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if high == low:
            return (self.start + self.end) / 2
        place = (math.log(value) if self.log else value) - low
        return self.start + (self.end - self.start) * place / (high - low)


def _line(number: int, series: Series, across: _Axis, up: _Axis, unit: str) -> str:
    ink = colour(series.name)
    places = [(across.at(point.x), up.at(point.y)) for point in series.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="2"/>']
    for point, (x, y) in zip(series.points, places, strict=True):
        told = f"{series.name}, {short(point.x)}: {short(point.y)} {unit}"
        if point.high is not None:
            top = up.at(point.high)
            parts.append(f'<path d="M{x:.1f} {y:.1f}V{top:.1f}M{x - 4:.1f} {top:.1f}h8" stroke="{ink}" fill="none"/>')
            told += f", p99 {short(point.high)}"
        parts.append(f"<g><title>{escape(told)}</title>{_marker(number, x, y, ink)}</g>")
    return "".join(parts)


def _marker(number: int, x: float, y: float, ink: str) -> str:
    """A circle, a square, a triangle, a diamond: colours are not the only difference."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"',
        f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"',
    )
    return f'{shapes[number % len(shapes)]} fill="{ink}"/>'


def _thinned(xs: Sequence[float], across: _Axis) -> list[float]:
    """Those whose labels do not touch; the last one always."""
    kept: list[float] = []
    for x in reversed(xs):
        if not kept or across.at(kept[-1]) - across.at(x) >= 26:
            kept.append(x)
    return kept


def _text(text: str, x: float, y: float, style: str = "", anchor: str = "") -> str:
    extra = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'
