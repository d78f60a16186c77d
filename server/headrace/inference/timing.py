"""Where the time of one answer has gone, told with it to who asks: as parameters of the answer, and as headers over HTTP.

The parts follow one another from the request's arrival to the encoding of its answer, and add up to the total:

    queue     until its batch was closed: decoding, waiting
    assemble  gathering the batch's rows
    compute   running the model, for the whole batch
    split     handing its rows to each member
    answer    until the event loop took them up
"""

from __future__ import annotations

from headrace.core.clock import NS_PER_US
from headrace.core.request import InferResponse

_PREFIX = "headrace_"
_PARTS = ("queue", "assemble", "compute", "split", "answer")


def timing(response: InferResponse, received_ns: int, now_ns: int) -> dict[str, int | str]:
    """The timing of an answer as parameters.

    Args:
        response: of a request that was cut into several, only the total is known.
        received_ns: monotonic, when the whole request had arrived.
        now_ns: monotonic.

    Returns:
        `headrace_total_us`, and where it is known `headrace_queue_us` and so on for each part, `headrace_batch_rows` and
        `headrace_batch_closed` (the metrics' word for why).
    """
    parameters: dict[str, int | str] = {}
    times = response.times
    if times is not None:
        before_ns = received_ns
        for part, end_ns in zip(_PARTS, (*times, now_ns), strict=True):
            parameters[f"{_PREFIX}{part}_us"] = max(end_ns - before_ns, 0) // NS_PER_US
            before_ns = end_ns
        parameters[f"{_PREFIX}batch_rows"] = response.batch_rows
        parameters[f"{_PREFIX}batch_closed"] = response.closed
    parameters[f"{_PREFIX}total_us"] = max(now_ns - received_ns, 0) // NS_PER_US
    return parameters


def timing_headers(parameters: dict[str, int | str]) -> list[tuple[bytes, bytes]]:
    """The same as headers: `headrace-timing`, and `server-timing` as browsers and proxies read it (W3C Server Timing)."""
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
