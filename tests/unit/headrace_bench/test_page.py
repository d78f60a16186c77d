"""Pages and tables of runs: every figure is there, names are escaped, a run without an answer is reported too."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import orjson
import pytest
from headrace.core.errors import BadRequest
from headrace_bench.command import read_document
from headrace_bench.compare import compare, show_comparison
from headrace_bench.page import comparison_page, run_page
from headrace_bench.processes import Outcomes
from headrace_bench.report import show
from headrace_bench.results import summarize
from headrace_bench.session import read_arrivals
from rich.console import Console

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def point(label: str, latencies_ms: list[float], codes: list[int], **fields: Any) -> dict[str, Any]:
    due_s = np.linspace(0.0, 0.99, len(latencies_ms))
    done_s = due_s + np.array(latencies_ms) / 1e3
    examples = {"503": f"full {HOSTILE}"}
    outcomes = Outcomes(
        0.0, 1.0, due_s, due_s, done_s, np.array(codes, np.uint16), ["", "503"], examples, [0.95], 0.1, 1
    )
    figures = summarize(outcomes, 0.0, 1.0, is_open=True, slo_ms=5.0, rows=1)
    return {"label": label, "mode": "closed", "value": 8.0, **figures, "server": None, "interrupted": False, **fields}


def document(*points: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": "headrace-bench",
        "format_version": 1,
        "headrace": "1",
        "time": "now",
        "url": "http://h",
        "protocol": "http",
        "model": HOSTILE,
        "server": {"name": "s", "version": "1"},
        "inputs": [{"name": HOSTILE, "datatype": "FP32", "shape": [1]}],
        "request_bytes": 4,
        "rows": 1,
        "distinct_requests": 1,
        "source": "random, body",
        "client": {"processes": 1, "cores": 2, "machine": "m"},
        "duration_s": 1.0,
        "warm_up_s": 0.0,
        "repeats": 1,
        "slo_ms": 5.0,
        "interrupted": True,
        "points": list(points),
    }


SERVER = {
    "requests": 20,
    "mean_batch": 2.5,
    "batch_sizes": {str(size): size for size in range(1, 20)},
    "phases_us": {"queue": 1500.0, "compute_infer": 250.0},
}
RUN = document(
    point("concurrency 8", [float(n) for n in range(1, 21)], [0] * 18 + [1, 1], server=SERVER),
    point("concurrency 9", [1.0] * 20, [0] * 20, value=9.0),
)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_page_has_all_figures_and_no_scripts() -> None:
    page = run_page(RUN)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for text in ("18.0", "concurrency 9", "2.50", "1.500", "0.250", "2 x 503", "interrupted", "Sweep", "goodput/s"):
        assert text in page, text
    assert "19: 19" in page
    assert "1: 1," not in page  # the rarest of 19 sizes
    assert len(svgs(page)) == 2
    assert "default-src 'none'" in page


def test_a_run_without_an_answer_or_a_load_has_a_page() -> None:
    empty = document(point("concurrency 8", [1.0], [1]))
    for run in (empty, document()):
        assert svgs(run_page(run))
        show(Console(file=io.StringIO(), width=1_000_000), run)


def test_the_table_names_errors_and_limits() -> None:
    out = io.StringIO()
    show(Console(file=out, width=1_000_000), RUN)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "concurrency 8: 2 x 503: full " in text
    assert "a client process used 95% of its core and may be the limit: add --processes" in text
    assert "interrupted: the figures are those measured so far" in text
    row = next(line for line in text.splitlines() if line.startswith("concurrency 8 "))
    assert row.split()[-3:] == ["2.50", "1.500", "0.250"]


def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers() -> None:
    for width in (60, 80, 100):
        out = io.StringIO()
        show(Console(file=out, width=width), RUN)
        text = out.getvalue()
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        row = next(line for line in text.splitlines() if line.startswith("concurrency 8 "))
        assert "18.0" in row
    out = io.StringIO()
    show_comparison(Console(file=out, width=80), compare(RUN, RUN, ["a", "b"]))
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()


def test_a_comparison_has_a_table_and_a_page() -> None:
    comparison = compare(RUN, RUN, ["a", HOSTILE])
    assert {row["verdict"] for row in comparison["rows"]} == {"no difference"}
    out = io.StringIO()
    show_comparison(Console(file=out, width=1_000_000), comparison)
    assert "+0.0 %" in out.getvalue()
    page = comparison_page(comparison, RUN, RUN)
    assert "<script" not in page
    assert len(svgs(page)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "holds no results"),
        (b'{"format": "other"}', "holds no results"),
        (orjson.dumps({"format": "headrace-bench", "format_version": 2}), "holds no results"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadRequest, match=rf"a\.json: {message}.*: name a file that --json wrote"):
        read_document(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5\n3.5\n4\n", [0.0, 0.5, 1.5]),
        ("seconds\n1\n2\n", [0.0, 1.0]),
        ("model,seconds,rows\nnet,1,1\nother,2,1\n,3,\n", [0.0, 2.0]),
    ],
)
def test_arrival_times(text: str, expected: list[float], tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    assert read_arrivals(tmp_path / "t", "net").tolist() == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no arrival"),
        (b"1\nnan\n", "not finite"),
        (b"1\nx\n", r"t:2: 'x' is no time: write one arrival"),
        (b"model,seconds\nnet\n", r"t:2: 'net' is no time"),
        (b"seconds,rows\n1,4\n", r"t:2: the request has 4 rows"),
        (b"\xff\xfe", "is no text"),
    ],
)
def test_wrong_arrival_times_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadRequest, match=message):
        read_arrivals(tmp_path / "t", "net")
