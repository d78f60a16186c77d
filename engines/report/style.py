"""Colours of pages and plots, one a precision, for light and dark screens; how numbers are written."""

from __future__ import annotations

import math

# Told apart also by those who see red and green alike; the plots add a shape to each.
_LIGHT = {
    "ink": "#1b1f24",
    "soft": "#57606a",
    "line": "#d0d7de",
    "paper": "#ffffff",
    "fp32": "#2f6db5",
    "fp16": "#0f8b8d",
    "bf16": "#7a8b0f",
    "int8": "#d2601a",
    "fp8": "#a0308f",
    "other": "#76808c",
}
_DARK = {
    "ink": "#e6edf3",
    "soft": "#9aa4af",
    "line": "#353c45",
    "paper": "#0f1318",
    "fp32": "#6aa8f0",
    "fp16": "#3cc4c0",
    "bf16": "#b5c94a",
    "int8": "#f3914f",
    "fp8": "#dd7fd0",
    "other": "#8b96a3",
}
_SAME = {"tf32": "fp32", "uint8": "int8"}


def variables() -> str:
    """CSS that defines every colour as a variable; the root is the page, or the SVG where it stands alone."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in theme.items()) for theme in (_LIGHT, _DARK))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def colour(precision: str) -> str:
    """CSS for the colour of a precision; words that are none have one colour together."""
    word = _SAME.get(precision, precision)
    return f"var(--{word if word in _LIGHT and word not in ('ink', 'soft', 'line', 'paper') else 'other'})"


def short(value: float) -> str:
    """Three digits at most, thousands as k and M: 0.25, 7, 42.5, 1.2k, 69k."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def milliseconds(time_us: float) -> str:
    """A time for people: "0.043 ms", "12.3 ms", "1,520 ms"."""
    if not math.isfinite(time_us):
        return "-"
    time_ms = time_us / 1e3
    return f"{time_ms:,.0f} ms" if time_ms >= 1000 else f"{time_ms:.3g} ms" if time_ms >= 0.1 else f"{time_ms:.3f} ms"


def rate(rows_per_s: float) -> str:
    """A throughput for people: "19.4", "41,200"."""
    return f"{rows_per_s:,.0f}" if rows_per_s >= 100 else f"{rows_per_s:.3g}"


def size(size_bytes: int) -> str:
    """Decimal megabytes or kilobytes: "102.0 MB", "154 kB", "1.5 kB"."""
    if size_bytes >= 1e6:
        return f"{size_bytes / 1e6:,.1f} MB"
    return f"{size_bytes / 1e3:.0f} kB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def plain(text: str) -> str:
    """Without what a terminal would obey: names in a model may hold anything."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
