"""Plots: round ticks, everything inside of the frame, well-formed whatever names hold."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from headrace_engines.report import milliseconds, rate, size
from headrace_reports.command_line import printable
from headrace_reports.svg_plot import (
    HEIGHT,
    WIDTH,
    Bar,
    PlotPoint,
    Series,
    bar_plot,
    bars_height,
    colour,
    legend,
    line_plot,
    log_ticks,
    short,
    side_by_side,
    svg,
    ticks,
)
from hypothesis import given
from hypothesis import strategies as st

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>\"&'"
MAGNITUDES = st.floats(min_value=1e-6, max_value=1e9)


def picture(content: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg(content, WIDTH, HEIGHT, "a plot"))


@given(high=MAGNITUDES)
def test_ticks_are_round_few_and_up_to_the_largest(high: float) -> None:
    result = ticks(high)
    assert result[0] == 0
    assert result[-1] >= high * (1 - 1e-6)
    assert result[-2] < high
    assert 4 <= len(result) <= 7
    assert f"{result[1]:e}"[0] in "125"


@given(low=MAGNITUDES, factor=st.floats(1, 1e6))
def test_logarithmic_ticks_are_round_ascending_and_around_the_values(low: float, factor: float) -> None:
    result = log_ticks(low, low * factor)
    assert result[0] <= low
    assert result[-1] >= low * factor * (1 - 1e-12)
    assert len(result) == len(set(result)) >= 2
    assert result == sorted(result)
    assert all(f"{mark:e}"[0] in "125" for mark in result)


def test_long_labels_end_before_their_bars() -> None:
    bars = [
        Bar("int8-tensorrt", "int8-tensorrt same as FP32", 0.5, "50.0%"),
        Bar("fp32", "fp32 same as FP32", 1.0, "1"),
    ]
    drawn = picture(bar_plot("Accuracy", bars))
    starts = {float(bar.attrib["x"]) for bar in drawn.iter(SVG + "rect")}
    ends = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in drawn.iter(SVG + "rect")]
    assert len(starts) == 1
    assert starts.pop() >= 6.5 * len(bars[0].label)
    assert max(ends) < WIDTH - 40, "the value stands behind"


def test_known_ticks() -> None:
    assert ticks(68_324) == [0, 20_000, 40_000, 60_000, 80_000]
    assert ticks(0) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert log_ticks(0.52, 18.3) == [0.5, 1, 2, 5, 10, 20]
    assert log_ticks(3, 3) == [2, 5]
    assert log_ticks(10, 10) == [10, 20]


@given(
    points=st.lists(
        st.tuples(st.integers(1, 4096), MAGNITUDES, st.one_of(st.none(), st.floats(1, 50))), min_size=1, max_size=6
    ),
    log_y=st.booleans(),
)
def test_every_marker_is_inside_the_frame(points: list[tuple[int, float, float | None]], log_y: bool) -> None:
    series = Series("int8", [PlotPoint(x, y, more and y * more) for x, y, more in points])
    drawn = picture(line_plot("Throughput", [series], "rows", "rows/s", log_y=log_y))
    markers = drawn.findall(f".//{SVG}circle")
    assert len(markers) == len(points)
    for marker in markers:
        assert 0 <= float(marker.get("cx", "nan")) <= WIDTH
        assert 0 <= float(marker.get("cy", "nan")) <= HEIGHT


def test_larger_is_higher_and_more_rows_are_further_right() -> None:
    series = [
        Series("fp32", [PlotPoint(1, 10), PlotPoint(8, 40)]),
        Series("int8", [PlotPoint(1, 20), PlotPoint(8, 80)]),
    ]
    drawn = picture(line_plot("t", series, "x", "y"))
    (x1, y1), (x2, y2) = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in drawn.iter(f"{SVG}circle")]
    squares = [float(r.get("y", "")) + 4 for r in drawn.iter(f"{SVG}rect")]
    assert x1 < x2
    assert y1 > y2
    assert squares[0] < y1
    assert squares[1] < y2


def test_the_line_above_a_point_ends_at_its_p99() -> None:
    content = line_plot("t", [Series("fp32", [PlotPoint(1, 5, 10)])], "x", "y")
    top = re.search(r"V([\d.]+)M", content)
    assert top is not None
    assert float(top.group(1)) == pytest.approx(34, abs=0.1)  # 10 is the highest tick, 34 the top of the frame
    assert "p99 10" in content


def test_bars_are_as_long_as_their_values() -> None:
    drawn = picture(bar_plot("Accuracy", [Bar("fp32", "all", 1.0, "100%"), Bar("int8", "half", 0.5, "50%")]))
    full, half = [float(r.get("width", "")) for r in drawn.iter(f"{SVG}rect")][1::2]
    assert half == pytest.approx(full / 2, abs=0.1)
    assert bars_height(2) > bars_height(1)


def test_an_empty_plot_has_a_note() -> None:
    assert "no data" in line_plot("t", [Series("fp32", [])], "x", "y")
    assert "no data" in bar_plot("t", [])


def test_names_are_text_and_nothing_else() -> None:
    panel = line_plot(HOSTILE, [Series(HOSTILE, [PlotPoint(1, 1)])], HOSTILE, HOSTILE)
    bars = bar_plot(HOSTILE, [Bar(HOSTILE, HOSTILE, 0.5, HOSTILE)])
    whole = side_by_side([(panel, HEIGHT), (bars, bars_height(1))], [HOSTILE], HOSTILE)
    assert "<script" not in whole
    texts = [element.text for element in ElementTree.fromstring(whole).iter(f"{SVG}text")]
    assert texts.count(HOSTILE) >= 5


def test_each_precision_has_a_colour_and_a_shape_of_its_own() -> None:
    names = ["fp32", "fp16", "bf16", "int8", "fp8"]
    assert len({colour(name) for name in names}) == 5
    assert colour("int64") == colour("ink") == "var(--other)"
    assert len(set(re.findall(r"<(circle|rect|path)", legend(names[:3])))) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (short(69_000), "69k"),
        (short(1_234_000), "1.23M"),
        (short(0.25), "0.25"),
        (milliseconds(43.2), "0.043 ms"),
        (milliseconds(12_340), "12.3 ms"),
        (milliseconds(1_520_000), "1,520 ms"),
        (milliseconds(math.nan), "-"),
        (rate(19.44), "19.4"),
        (rate(41_200.4), "41,200"),
        (size(1500), "1.5 kB"),
        (size(102_000_000), "102.0 MB"),
        (printable("a\x1b[2Jb\nc"), "a\ufffd[2Jb\ufffdc"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected
