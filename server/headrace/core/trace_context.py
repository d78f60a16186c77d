"""Where a request stands in its caller's trace, as the caller tells (W3C Trace Context, level 1)."""

from __future__ import annotations

import re
from typing import NamedTuple

TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"

# Later versions may append fields behind another dash; version ff is forbidden.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_STATE = 512
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """The caller's trace.

    Attributes:
        trace_id: 32 hexadecimal digits, lower case.
        span_id: of the caller's span, 16 hexadecimal digits.
        sampled: the caller records its spans.
        state: what vendors have put there, the header `tracestate` as it came; "" if there is none.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""


def trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that the two headers tell, None if they tell none.

    Headers that are wrong are as good as none (section 3.2 of the recommendation): a request does not fail by its tracing.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)
