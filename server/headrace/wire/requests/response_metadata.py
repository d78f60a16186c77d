"""Metadata of a response: the time of each phase, as headers and as parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.clock import NS_PER_US
from headrace.core.request import InferResponse
from headrace.core.telemetry import PHASES

# --- Timing: the time of each phase, returned on demand ----------------------------------------------------------------
#
# The phases are consecutive and add up to the total (docs/decisions/0006-phases.md):
#
#     decode    read and validate the request
#     queue     wait until an instance takes its batch
#     assemble  gather the rows of the batch
#     compute   run the model, for the whole batch
#     split     divide the outputs among the requests of the batch
#     encode    return to the event loop; ends before the response is written, because these figures are part of it

_PREFIX = "headrace_"


def timing(response: InferResponse, received_ns: int, queued_ns: int, now_ns: int) -> dict[str, int | str]:
    """Return the time of each phase as response parameters.

    Args:
        response: without `times` (a request that was cut into several batches) only the total is returned.
        received_ns: monotonic time at which the whole request had arrived.
        queued_ns: monotonic time at which it was put in the queue.
        now_ns: monotonic.

    Returns:
        `headrace_total_us`; with `times` also `headrace_decode_us` and so on for each phase, `headrace_batch_rows` and
        `headrace_batch_closed` (the reason, as in the metrics).
    """
    parameters: dict[str, int | str] = {}
    times = response.times
    if times is not None:
        begin_ns = received_ns
        for phase, end_ns in zip(PHASES, (queued_ns, *times, now_ns), strict=True):
            parameters[f"{_PREFIX}{phase}_us"] = max(end_ns - begin_ns, 0) // NS_PER_US
            begin_ns = max(end_ns, begin_ns)
        parameters[f"{_PREFIX}batch_rows"] = response.batch_rows
        parameters[f"{_PREFIX}batch_closed"] = response.closed
    parameters[f"{_PREFIX}total_us"] = max(now_ns - received_ns, 0) // NS_PER_US
    return parameters


def timing_headers(parameters: dict[str, int | str]) -> list[tuple[bytes, bytes]]:
    """Return the same as headers: `headrace-timing`, and `server-timing` (W3C Server Timing) for browsers and proxies."""
    values = {name.removeprefix(_PREFIX): value for name, value in parameters.items()}
    headrace_timing = ", ".join(f"{name}={value}" for name, value in values.items())
    server_timing = [
        f"{name.removesuffix('_us')};dur={value / 1000:.3f}"
        for name, value in values.items()
        if isinstance(value, int) and name.endswith("_us")
    ]
    if "batch_rows" in values:
        server_timing.append(f'batch;desc="{values["batch_rows"]} rows, {values["batch_closed"]}"')
    return [(b"headrace-timing", headrace_timing.encode()), (b"server-timing", ", ".join(server_timing).encode())]


# --- Headers -----------------------------------------------------------------------------------------------------------

Header = tuple[bytes, bytes]


class Headers(NamedTuple):
    """Response headers as pairs, and encoded for the wire.

    Attributes:
        pairs: name and value of each header.
        lines: the same headers in HTTP/1.1, each with its line end.
    """

    pairs: tuple[Header, ...]
    lines: bytes

    def with_pairs(self, pairs: list[Header]) -> Headers:
        """Return these headers and others."""
        return Headers((*self.pairs, *pairs), self.lines + header_lines(pairs))


def header_lines(pairs: Sequence[Header]) -> bytes:
    """Headers in their form on the wire, each with its line end."""
    return b"".join([b"%s: %s\r\n" % pair for pair in pairs])
