"""Token buckets: the generic cell rate algorithm (ITU-T I.371, 1996). A bucket is one number, the time at which it is full."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.clock import NS_PER_S


@dataclass(frozen=True, slots=True)
class Quota:
    """Token bucket of one client.

    Attributes:
        rate_hz: sustained requests per second.
        burst: bucket size in requests, at least 1.
    """

    rate_hz: float
    burst: int = 1


def charge(quota: Quota, full_ns: int, now_ns: int) -> tuple[int, int]:
    """Take a token from a bucket.

    Args:
        quota: rate and size of the bucket.
        full_ns: monotonic time at which the bucket is full.
        now_ns: monotonic.

    Returns:
        The wait for a token in nanoseconds (0 if there is one), and the new time at which the bucket is full.
    """
    token_ns = NS_PER_S / quota.rate_hz
    begins_ns = max(full_ns, now_ns)
    wait_ns = begins_ns - now_ns - int((quota.burst - 1) * token_ns)
    return (wait_ns, full_ns) if wait_ns > 0 else (0, begins_ns + max(int(token_ns), 1))
