"""`python -m tests.support.small_frames_server serve ...`: a Headrace that announces the default SETTINGS_MAX_FRAME_SIZE.

h2spec sends DATA frames of the announced size without regard to flow control, and takes 17 KiB for larger than any frame. Both
hold for the default of 16 KiB and not for the 1 MiB that Headrace announces.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.__main__ import main
from headrace.core.limits import ClientLimits
from headrace.wire.grpc import server as grpc_server
from headrace.wire.http2.frames import DEFAULT_FRAME_BYTES
from headrace.wire.http2.stream import Http2Limits

_HTTP2_LIMITS = grpc_server._http2_limits


def http2_limits(client_limits: ClientLimits) -> Http2Limits:
    """Limits of the server with the default frame size."""
    return replace(_HTTP2_LIMITS(client_limits), frame_bytes=DEFAULT_FRAME_BYTES)


if __name__ == "__main__":
    grpc_server._http2_limits = http2_limits
    main()
