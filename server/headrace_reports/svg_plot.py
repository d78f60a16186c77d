"""Plots as SVG text: points over batch sizes, curves, and bars. Without scripts, and without external fonts or images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 46
_INSET = 12
LEGEND_HEIGHT = 30
_CURVE_LEGEND_HEIGHT = 20
_BAR_HEIGHT, _BAR_GAP = 18, 8
# Average width of a letter of the labels in pixels, rounded up.
_LETTER = 6.6
_TEXT = "text{font:12px system-ui,sans-serif;fill:var(--ink)}.s{fill:var(--soft)}.t{font-size:13px;font-weight:600}"

# Colours that remain distinct with red-green blindness, one for each precision; plots add a marker or a dash to each.
# For light and dark pages.
_COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#d0d7de", "#353c45"),
    "paper": ("#ffffff", "#0f1318"),
    "fp32": ("#2f6db5", "#6aa8f0"),
    "fp16": ("#0f8b8d", "#3cc4c0"),
    "bf16": ("#7a8b0f", "#b5c94a"),
    "int8": ("#d2601a", "#f3914f"),
    "fp8": ("#a0308f", "#dd7fd0"),
    "other": ("#76808c", "#8b96a3"),
}
_SAME = {"tf32": "fp32", "uint8": "int8"}
# Order of colours for curves that are not named after a precision.
_SEQUENCE = ("fp32", "int8", "fp16", "fp8", "bf16", "other")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "12 4")
_NO_DATA = "no data"


def variables() -> str:
    """Return CSS that defines every colour as a variable, for light and dark pages."""
    light, dark = (";".join(f"--{name}:{pair[page]}" for name, pair in _COLOURS.items()) for page in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def colour(precision: str) -> str:
    """Return the CSS colour of a precision; all other words share one colour."""
    word = _SAME.get(precision, precision)
    return f"var(--{word if word in _SEQUENCE else 'other'})"


def nth_colour(number: int) -> str:
    """Return the CSS colour of curve `number` (from 0); the colours repeat."""
    return colour(_SEQUENCE[number % len(_SEQUENCE)])


def short(value: float) -> str:
    """Format a number with at most three digits, thousands as k and M: 0.25, 7, 42.5, 1.2k, 69k."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A measurement.

    Attributes:
        x: position on a logarithmic axis, above 0.
        y: value.
        high: upper end of an error bar, e.g. a 99th percentile; None for no bar.
    """

    x: float
    y: float
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements of one precision, in the order of x."""

    name: str
    points: Sequence[PlotPoint]


@dataclass(frozen=True, slots=True)
class PlotCurve:
    """A line without markers.

    Attributes:
        name: name in the legend; curves of one name share colour and dash.
        xs: x coordinates, ascending.
        ys: y coordinates.
        step: True for a step function.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    step: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot of curves.

    Attributes:
        title: title above the plot.
        curves: the curves.
        x_title: title of the x axis, with the unit.
        y_title: title of the y axis, with the unit.
        log_x: True for a logarithmic axis; points at 0 or below are left out.
        log_y: the same for the y axis.
        marks: values of x with a vertical line.
        empty: text of a plot without points.
    """

    title: str
    curves: Sequence[PlotCurve]
    x_title: str
    y_title: str
    log_x: bool = False
    marks: Sequence[float] = ()
    empty: str = _NO_DATA
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A value from 0 to 1 of one precision, with its label and text."""

    name: str
    label: str
    value: float
    text: str


def line_plot(title: str, series: Sequence[Series], x_title: str, y_title: str, *, log_y: bool = False) -> str:
    """Draw series of points as SVG elements of `WIDTH` x `HEIGHT`, for `svg` or `side_by_side`.

    Args:
        title: title above the plot.
        series: the series; those without points are left out.
        x_title: title of the x axis, with the unit.
        y_title: title of the y axis, with the unit.
        log_y: True for a logarithmic y axis; values must be above 0.
    """
    filled = [one for one in series if one.points]
    points = [point for one in filled for point in one.points]
    parts = [text_element(title, _LEFT, 18, "t")]
    if not points:
        return "".join([*parts, text_element(_NO_DATA, WIDTH / 2, HEIGHT / 2, "s", "middle")])
    xs = sorted({point.x for point in points})
    tops = [max(point.y, point.high or 0.0) for point in points]
    y_ticks = log_ticks(min(p.y for p in points), max(tops)) if log_y else ticks(max(tops))
    across = _Axis(xs[0], xs[-1], _LEFT + _INSET, WIDTH - _RIGHT - _INSET, True)
    up = _Axis(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP, log_y)
    parts.append(_grid(y_ticks, up, x_title, y_title))
    parts += [text_element(short(x), across.at(x), HEIGHT - _BOTTOM + 16, "s", "middle") for x in _thinned(xs, across)]
    for number, one in enumerate(filled):
        parts.append(_line(number, one, across, up, y_title))
    return "".join(parts)


def curve_plot(panel: Panel, names: Sequence[str]) -> str:
    """Draw curves as SVG elements of `WIDTH` x `HEIGHT`, for `curve_picture`.

    Args:
        panel: the plot.
        names: names of all curves, in the order of their colours and dashes; see `curve_legend`.
    """
    parts = [text_element(panel.title, _LEFT, 18, "t")]
    points = [point for curve in panel.curves for point in _shown_points(panel, curve)]
    if not points:
        return "".join([*parts, text_element(panel.empty, WIDTH / 2, HEIGHT / 2, "s", "middle")])
    xs = [x for x, _ in points] + list(panel.marks)
    x_ticks = log_ticks(min(xs), max(xs)) if panel.log_x else ticks(max(xs))
    heights = [y for _, y in points]
    y_ticks = log_ticks(min(heights), max(heights)) if panel.log_y else ticks(max(heights))
    across = _Axis(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT, panel.log_x)
    up = _Axis(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP, panel.log_y)
    parts.append(_grid(y_ticks, up, panel.x_title, panel.y_title))
    for tick in x_ticks:
        x = across.at(tick)
        parts.append(f'<path d="M{x:.1f} {HEIGHT - _BOTTOM}v5" stroke="var(--ink)"/>')
    parts += [
        text_element(short(x), across.at(x), HEIGHT - _BOTTOM + 18, "s", "middle") for x in _thinned(x_ticks, across)
    ]
    for mark in panel.marks:
        x = across.at(mark)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="var(--ink)" stroke-dasharray="2 2"/>')
    for curve in panel.curves:
        coordinates = [(across.at(x), up.at(y)) for x, y in _shown_points(panel, curve)]
        if coordinates:
            parts.append(f'<path d="{_path(coordinates, curve.step)}" fill="none" {_stroke(names.index(curve.name))}/>')
    return "".join(parts)


def _shown_points(panel: Panel, curve: PlotCurve) -> list[tuple[float, float]]:
    """Return the points of a curve that its axes can show."""
    points = zip(curve.xs, curve.ys, strict=True)
    return [(x, y) for x, y in points if (x > 0 or not panel.log_x) and (y > 0 or not panel.log_y)]


def curve_picture(panels: Sequence[Panel], title: str) -> str:
    """Return an SVG document with panels of curves in a row and one legend above."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    legend_height = _CURVE_LEGEND_HEIGHT * len(names)
    panels_drawn = [(curve_plot(panel, names), HEIGHT) for panel in panels]
    return _framed(panels_drawn, curve_legend(names), legend_height, title) + "\n"


def curve_legend(names: Sequence[str]) -> str:
    """Draw a legend: one line for each name, with the colour and dash of its curves."""
    parts = []
    for number, name in enumerate(names):
        y = _CURVE_LEGEND_HEIGHT * number + _CURVE_LEGEND_HEIGHT / 2
        parts.append(f'<path d="M0 {y:.1f}h28" {_stroke(number)}/>{text_element(name, 36, y + 4)}')
    return "".join(parts)


def bar_plot(title: str, bars: Sequence[Bar]) -> str:
    """Draw horizontal bars from 0 to 1, each followed by its text; `bars_height` has the height."""
    start = max([150, *(round(_LETTER * len(bar.label)) for bar in bars)])
    parts = [text_element(title, 0, 18, "t")]
    if not bars:
        parts.append(text_element(_NO_DATA, 0, 44, "s"))
    room = WIDTH - start - 64
    for number, bar in enumerate(bars):
        y = _TOP + number * (_BAR_HEIGHT + _BAR_GAP)
        width = room * min(max(bar.value, 0.0), 1.0)
        parts.append(text_element(bar.label, 0, y + 13))
        parts.append(
            f'<rect x="{start}" y="{y}" width="{room}" height="{_BAR_HEIGHT}" rx="3" fill="var(--line)" opacity=".5"/>'
        )
        parts.append(
            f'<rect x="{start}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="3" fill="{colour(bar.name)}"/>'
        )
        parts.append(text_element(bar.text, start + room + 6, y + 13))
    return "".join(parts)


def bars_height(count: int) -> int:
    """Return the height of a `bar_plot` of `count` bars."""
    return _TOP + max(count, 1) * (_BAR_HEIGHT + _BAR_GAP)


def svg(content: str, width: int, height: int, label: str) -> str:
    """Return a scalable SVG document; `label` is its text for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"<style>{variables()}{_TEXT}</style>{content}</svg>"
    )


def side_by_side(panels: Sequence[tuple[str, int]], names: Sequence[str], title: str) -> str:
    """Return an SVG document with panels in a row on a background, and one legend above.

    Args:
        panels: pairs of SVG elements and height, each `WIDTH` wide.
        names: names of the series, for the legend.
        title: title of the document.
    """
    return _framed(panels, legend(names), LEGEND_HEIGHT, title)


def _framed(panels: Sequence[tuple[str, int]], key: str, key_height: int, title: str) -> str:
    margin, head = 16, 34 + key_height
    width = len(panels) * (WIDTH + margin) + margin
    height = max(height for _, height in panels) + head + margin
    parts = [
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>',
        f'<text x="{margin}" y="26" style="font-size:16px;font-weight:600">{escape(title)}</text>',
        f'<g transform="translate({margin} 34)">{key}</g>',
    ]
    for number, (content, _) in enumerate(panels):
        parts.append(f'<g transform="translate({margin + number * (WIDTH + margin)} {head})">{content}</g>')
    return svg("".join(parts), width, height, title)


def legend(names: Sequence[str]) -> str:
    """Draw a legend: a row of markers with names, `LEGEND_HEIGHT` high."""
    parts = []
    x = 8
    for number, name in enumerate(names):
        parts.append(_marker(number, x, LEGEND_HEIGHT / 2, colour(name)))
        parts.append(text_element(name, x + 10, LEGEND_HEIGHT / 2 + 4))
        x += 34 + 8 * len(name)
    return "".join(parts)


def ticks(high: float, count: int = 5) -> list[float]:
    """Return about `count` ticks from 0 to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > 0:
        high = 1.0
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0, 20.0) if factor * power >= rough * (1 - 1e-9))
    return [float(f"{number * step:.12g}") for number in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of 1, 2 and 5 times powers of ten (only powers over many decades) that enclose `low` to `high`."""
    low = max(low, 1e-12)
    high = max(high, low)
    # One more decade at each end, because logarithms are not exact.
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    factors = (1.0, 2.0, 5.0) if last - first <= 5 else (1.0,)
    marks = [float(f"{factor * 10.0**power:.12g}") for power in range(first, last + 1) for factor in factors]
    start = max(index for index, mark in enumerate(marks) if mark <= low)
    end = min(index for index, mark in enumerate(marks) if mark >= high)
    return marks[start : max(end, start + 1) + 1]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if high == low:
            return (self.start + self.end) / 2
        offset = (math.log(value) if self.log else value) - low
        return self.start + (self.end - self.start) * offset / (high - low)


def _grid(y_ticks: Sequence[float], up: _Axis, x_title: str, y_title: str) -> str:
    """Draw horizontal lines with their values, and the titles of both axes."""
    parts = []
    for tick in y_ticks:
        y = up.at(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="var(--line)"/>')
        parts.append(text_element(short(tick), _LEFT - 6, y + 4, "s", "end"))
    parts.append(text_element(x_title, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, "s", "middle"))
    turned = f'transform="translate(12 {HEIGHT / 2 - 6:.0f}) rotate(-90)"'
    parts.append(f'<text class="s" text-anchor="middle" {turned}>{escape(y_title)}</text>')
    return "".join(parts)


def _path(coordinates: Sequence[tuple[float, float]], step: bool) -> str:
    (x, y), *others = coordinates
    lines = (f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}" for x, y in others)
    return f"M{x:.1f} {y:.1f}" + "".join(lines)


def _stroke(number: int) -> str:
    """Return the SVG attributes of the line of curve `number`."""
    dash = _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{nth_colour(number)}" stroke-width="2"{dashed}'


def _line(number: int, series: Series, across: _Axis, up: _Axis, unit: str) -> str:
    ink = colour(series.name)
    coordinates = [(across.at(point.x), up.at(point.y)) for point in series.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in coordinates)
    parts = [f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="2"/>']
    for point, (x, y) in zip(series.points, coordinates, strict=True):
        label = f"{series.name}, {short(point.x)}: {short(point.y)} {unit}"
        if point.high is not None:
            top = up.at(point.high)
            parts.append(f'<path d="M{x:.1f} {y:.1f}V{top:.1f}M{x - 4:.1f} {top:.1f}h8" stroke="{ink}" fill="none"/>')
            label += f", p99 {short(point.high)}"
        parts.append(f"<g><title>{escape(label)}</title>{_marker(number, x, y, ink)}</g>")
    return "".join(parts)


def _marker(number: int, x: float, y: float, ink: str) -> str:
    """Draw a circle, square, triangle or diamond, so that series differ not by colour alone."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"',
        f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"',
    )
    return f'{shapes[number % len(shapes)]} fill="{ink}"/>'


def _thinned(xs: Sequence[float], across: _Axis) -> list[float]:
    """Return the values whose labels do not overlap, always including the last."""
    ticks: list[float] = []
    for x in reversed(xs):
        if not ticks or across.at(ticks[-1]) - across.at(x) >= 26:
            ticks.append(x)
    return ticks


def text_element(text: str, x: float, y: float, style: str = "", anchor: str = "") -> str:
    """Return an SVG text at (x, y) in pixels; `style` is its CSS class, `anchor` its text-anchor."""
    extra = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'
