"""How numbers and names are written on pages and in terminals."""

from __future__ import annotations

import math


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
