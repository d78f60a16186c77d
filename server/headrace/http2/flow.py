"""What a peer may still send: grants for bodies larger than a stream's window, and the allowance for frames that carry no work.

Memory is bounded by the streams' windows. Each stream starts with a small one; the application tells how much more a body
needs as soon as it knows (`Grants.ask`), and a connection has one budget for all that is granted beyond the first windows. A
grant covers the rest of a whole body, so granted bodies always get finished and the waiting ones come to their turn. The
window of the connection is kept open: it would only add a second bound over the same bytes, and a way to deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.http2.frames import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from headrace.http2.stream import Stream


def _nobody(_limit: str) -> None:
    """Counts nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take.

    Attributes:
        streams: open at once; a stream that was reset counts until its work has ended.
        stream_window_bytes: what a stream may send before anything was granted.
        connection_window_bytes: in flight to us, all streams together.
        frame_bytes: of one DATA frame.
        header_bytes: of one header block as it comes.
        header_list_bytes: of one header block, decoded.
        grant_bytes: all grants of a connection at once; at least the largest body.
        held_bytes: answers that the peer does not read; above, new streams are refused.
        control_bytes: of frames other than DATA while the peer does not read at all; above, the connection is cut.
        burst: frames without work at once, and `per_s` more each second.
        per_s: see `burst`.
        handshake_s: from the connection to the first SETTINGS frame (and, before that, for TLS).
        frame_s: to complete a frame, or a header block with its CONTINUATIONs.
        message_s: to complete a body that is wanted.
        stall_s: without progress while there is something to read for the peer.
        keepalive_s: silence after which a PING asks whether the peer lives.
        keepalive_timeout_s: for anything to come after that.
        idle_s: without a stream until the connection is shut down.
        drain_s: for the PING that parts the two GOAWAYs of a shutdown.
        linger_s: for a peer to read the last bytes of a closed connection.
        reached: called with the name in `headrace.core.limits.Limits` of one that a peer has reached, for the metrics.
    """

    streams: int = 1024
    stream_window_bytes: int = 128 << 10
    connection_window_bytes: int = 16 << 20
    frame_bytes: int = 1 << 20
    header_bytes: int = 32 << 10
    header_list_bytes: int = 16 << 10
    grant_bytes: int = 64 << 20
    held_bytes: int = 64 << 20
    control_bytes: int = 1 << 20
    burst: int = 50_000
    per_s: int = 10_000
    handshake_s: float = 10.0
    frame_s: float = 20.0
    message_s: float = 300.0
    stall_s: float = 120.0
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    idle_s: float = 3600.0
    drain_s: float = 1.0
    linger_s: float = 2.0
    reached: Callable[[str], None] = _nobody


class Allowance:
    """How many frames without work a peer may still send: PING, RST_STREAM, crumbs of DATA and the like.

    Work earns allowance and so does time, so a connection may live for ever and do any number of calls, while a flood of
    cheap frames (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2025-8671) uses it up.

    Attributes:
        left: what is left; whoever does work adds to it.
    """

    __slots__ = ("_burst", "_filled_ns", "_per_s", "left")

    def __init__(self, burst: int, per_s: int) -> None:
        self._burst, self._per_s = burst, per_s
        self._filled_ns = monotonic_ns()
        self.left = burst

    def spend(self, cost: int) -> None:
        """Take `cost` off; raises ConnectionFault when nothing is left."""
        self.left -= cost
        if self.left < 0:
            now_ns = monotonic_ns()
            self.left += (now_ns - self._filled_ns) * self._per_s // NS_PER_S
            self._filled_ns = now_ns
            if self.left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a flood of frames that carry no work")

    def cap(self) -> None:
        """Forget what was saved up beyond a burst; to be called now and then."""
        self.left = min(self.left, self._burst)


class Grants:
    """The budget of a connection for bodies larger than a stream's first window.

    Args:
        size_bytes: of the budget.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._waiting: deque[tuple[Stream, int]] = deque()

    def ask(self, stream: Stream, size_bytes: int) -> None:
        """Open the window of `stream` by `size_bytes` (at most the budget), now or when its turn comes."""
        self._waiting.append((stream, size_bytes))
        self._serve()

    def give_back(self, stream: Stream) -> None:
        """Whatever `stream` was granted has been used up, or will never be."""
        if stream.granted_bytes:
            self._free_bytes += stream.granted_bytes
            stream.granted_bytes = 0
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        waiting = self._waiting
        while waiting:
            stream, size_bytes = waiting[0]
            if stream.gone:
                waiting.popleft()
            elif size_bytes <= self._free_bytes:
                waiting.popleft()
                self._free_bytes -= size_bytes
                stream.granted_bytes += size_bytes
                stream.open_window(size_bytes)
            else:
                return
