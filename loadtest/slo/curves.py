"""Chart of goodput and latency over the offered load, from the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.core.svg_plot import Panel, PlotCurve, curve_picture

from loadtest.slo.subject import USUAL, LoadFigures, Setting, arrivals, fixed, judged, promising, simulated

LOADS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0)
SLO_MS = 100.0
_SECONDS = 12.0


def draw() -> str:
    """SVG: a promise beside two fixed settings."""
    by_setting = {setting.name: _swept(setting) for setting in (promising(SLO_MS), fixed(), fixed(delay_ms=20))}

    def panel(title: str, y_title: str, value: Callable[[LoadFigures], float]) -> Panel:
        curves = [PlotCurve(name, LOADS, list(map(value, line))) for name, line in by_setting.items()]
        return Panel(title, curves, "load over capacity", y_title)

    panels = [
        panel(f"answered within {SLO_MS:g} ms", "of the capacity", lambda each: each.goodput_hz / USUAL.capacity_hz),
        panel(
            "p99 of what is answered",
            f"ms (above {4 * SLO_MS:g}: cut off)",
            lambda each: min(each.p99_ms, 4 * SLO_MS),
        ),
        panel("refused", "% of the requests", lambda each: 100 * each.refused),
    ]
    return curve_picture(panels, "What a promise does under load (simulated)")


def _swept(setting: Setting) -> Sequence[LoadFigures]:
    return [judged(simulated(arrivals(load, _SECONDS, 3), setting), SLO_MS) for load in LOADS]
