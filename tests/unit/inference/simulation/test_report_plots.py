"""Pictures of replays: axes that hold what they show, lines that say what was answered."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from headrace.inference.simulation.replay import ANSWERED, BatchHistory, Replay
from headrace.inference.simulation.report import panels
from headrace.inference.simulation.traces import Trace
from headrace_reports.svg_plot import Panel, PlotCurve, curve_picture, log_ticks, ticks
from hypothesis import given
from hypothesis import strategies as st

MS = 1_000_000


def replayed(latencies_ms: list[int], outcomes: list[str]) -> Replay:
    nothing = np.zeros(len(outcomes), np.int64)
    times_ns = np.arange(len(outcomes), dtype=np.int64) * 100 * MS
    trace = Trace(times_ns, nothing, nothing + 1, nothing, nothing, 1000 * MS, ("m",))
    return Replay(trace, [ms * MS for ms in latencies_ms], outcomes, [BatchHistory()])


def test_curves_count_responses_over_time() -> None:
    done = replayed([10, 60, 20, 5], [ANSWERED, ANSWERED, ANSWERED, "would_miss"])
    within, over_time = panels([("a", done)], [[50.0]])
    (curve,) = within.curves
    assert (list(curve.xs), list(curve.ys)) == ([10, 20, 60], [25, 50, 75])
    assert within.marks == [50.0]
    good, offered = over_time.curves
    second_bin_s = good.xs[1]
    assert sum(good.ys[:-1]) * second_bin_s == pytest.approx(2), "one was late, one refused"
    assert sum(offered.ys[:-1]) * second_bin_s == pytest.approx(4)


def test_a_run_without_responses_is_noted_and_names_are_escaped() -> None:
    text = curve_picture(panels([("a<b>", replayed([0], ["overloaded"]))], [[None]]), "t & u")
    root = ElementTree.fromstring(text)
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "no response" in texts
    assert "a<b>" in texts
    assert root.get("aria-label") == "t & u"


@given(st.floats(1e-3, 1e6), st.floats(1, 1e6), st.booleans())
def test_axes_hold_their_values(low: float, factor: float, log: bool) -> None:
    high = low * factor
    marks = log_ticks(low, high) if log else ticks(high)
    assert marks[0] <= low * (1 + 1e-6)
    assert marks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(marks) <= 60
    assert marks == sorted(set(marks))


def test_a_value_below_a_logarithmic_axis_is_omitted() -> None:
    panel = Panel("p", [PlotCurve("a", [0, 1, 10], [1, 2, 3])], "x", "y", log_x=True)
    assert curve_picture([panel], "t").count("L") == 1
