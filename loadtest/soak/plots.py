"""Figures over time as SVG: lines without markers, and a tick for everything that was done to the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from headrace.core.svg_plot import HEIGHT, WIDTH, nth_colour, short, svg, text_element, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 52, 46
_EVENT_HEIGHT = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A name, and values by time in seconds; nan where there is none."""

    name: str
    at_s: Sequence[float]
    values: Sequence[float]


def time_plot(
    title: str, unit: str, curves: Sequence[Curve], end_s: float, events: Sequence[tuple[float, str]] = ()
) -> str:
    """A whole picture.

    Args:
        title: above it.
        unit: of the values.
        curves: from 0 to end_s.
        end_s: where the axis of time ends, in seconds.
        events: when, and what was done; ticks along the bottom.
    """
    highest = max((value for curve in curves for value in curve.values if math.isfinite(value)), default=0.0)
    up = ticks(highest)
    parts = [text_element(f"{title}, {unit}", _LEFT, 18, "t"), _legend(curves)]
    for tick in up:
        y = _y(tick, up[-1])
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="var(--line)"/>')
        parts.append(text_element(short(tick), _LEFT - 6, y + 4, "s", "end"))
    seconds = [tick for tick in ticks(end_s) if tick <= end_s]
    parts += [text_element(short(tick), _x(tick, end_s), HEIGHT - _BOTTOM + 18, "s", "middle") for tick in seconds]
    parts.append(text_element("s", WIDTH - _RIGHT, HEIGHT - _BOTTOM + 34, "s", "end"))
    for at_s, name in events:
        x = _x(at_s, end_s)
        mark = f'<path d="M{x:.1f} {HEIGHT - _BOTTOM}v-{_EVENT_HEIGHT}" stroke="var(--soft)" stroke-width="1.5"/>'
        parts.append(f"<g><title>{escape(name)}, {at_s:.1f} s</title>{mark}</g>")
    for number, curve in enumerate(curves):
        path = _path(curve, end_s, up[-1])
        parts.append(f'<path d="{path}" fill="none" stroke="{nth_colour(number)}" stroke-width="1.6"/>')
    label = f"{title}, {unit}, over {end_s:.0f} s: {', '.join(curve.name for curve in curves)}"
    return svg("".join(parts), WIDTH, HEIGHT, label)


def _path(curve: Curve, end_s: float, top: float) -> str:
    """Interrupted where there is no value."""
    words, draws = [], False
    for at_s, value in zip(curve.at_s, curve.values, strict=True):
        if not math.isfinite(value):
            draws = False
            continue
        words.append(f"{'L' if draws else 'M'}{_x(at_s, end_s):.1f} {_y(value, top):.1f}")
        draws = True
    return "".join(words)


def _legend(curves: Sequence[Curve]) -> str:
    parts, x = [], float(_LEFT)
    for number, curve in enumerate(curves):
        parts.append(f'<path d="M{x:.0f} 36h16" stroke="{nth_colour(number)}" stroke-width="3"/>')
        parts.append(text_element(curve.name, x + 21, 40))
        x += 38 + 6.6 * len(curve.name)
    return "".join(parts)


def _x(at_s: float, end_s: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * at_s / max(end_s, 1e-9)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top
