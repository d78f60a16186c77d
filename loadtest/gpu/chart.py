"""The sweep as a picture: what was answered, and how long it took, against what was offered."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.svg_plot import PlotPoint, Series, line_plot, side_by_side

from loadtest.gpu.findings import PartFindings

_HEIGHT = 300


def sweep_chart(parts: Iterable[PartFindings], title: str) -> str:
    """SVG, empty if no part has swept.

    Args:
        parts: all; those of the sweep have samples with a share.
        title: over all.
    """
    answered, waited, names = [], [], []
    for part in parts:
        precision = part.name.split()[-1]
        rates, latencies = _points(part, "images/s"), _points(part, "p50 ms")
        if not part.name.startswith("f ") or not rates:
            continue
        tails = _points(part, "p99 ms")
        names.append(precision)
        answered.append(Series(precision, [PlotPoint(x, y) for x, y in sorted(rates.items())]))
        waited.append(Series(precision, [PlotPoint(x, y, tails.get(x)) for x, y in sorted(latencies.items())]))
    if not names:
        return ""
    x_title = "offered, % of capacity"
    panels = [
        (line_plot("answered in time", answered, x_title, "images/s"), _HEIGHT),
        (line_plot("latency, p50; the line reaches up to p99", waited, x_title, "ms", log_y=True), _HEIGHT),
    ]
    return side_by_side(panels, names, title) + "\n"


def _points(part: PartFindings, unit: str) -> dict[float, float]:
    """By the share that was offered, in percent."""
    return {
        float(sample.detail["share"]): sample.value
        for sample in part.samples
        if sample.unit == unit and "share" in sample.detail and sample.value > 0
    }
