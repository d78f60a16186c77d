"""W3C Trace Context: what is taken, and that everything else is as good as nothing."""

from __future__ import annotations

import pytest
from headrace.core.telemetry import TraceContext, trace_context
from hypothesis import given
from hypothesis import strategies as st

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f" 00-{TRACE}-{SPAN}-01\t", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_valid_trace_contexts(header: str, sampled: bool) -> None:
    assert trace_context(header) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_invalid_trace_contexts(header: str) -> None:
    assert trace_context(header) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("a=\x1b", ""), ("a=\u00e9", "")],
)
def test_tracestate_is_unchanged_or_dropped(state: str, expected: str) -> None:
    assert trace_context(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True, expected)


@given(st.text(), st.text())
def test_nothing_raises(traceparent: str, tracestate: str) -> None:
    trace_context(traceparent, tracestate)
