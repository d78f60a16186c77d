"""What each client may ask for: token buckets, of which only a bounded number is kept whatever names clients make up.

A bucket is one number, the time at which it will be full again: the generic cell rate algorithm (ITU-T I.371, 1996), which does
with a comparison and an addition what counting tokens does with a timer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from headrace.core.clock import NS_PER_S
from headrace.core.errors import QuotaExceeded
from headrace.scheduling.policy import Quota, RateLimits

# Clients that are not named in the configuration.
MOST_CLIENTS = 4096


class Quotas:
    """Admits or refuses by client; any thread may call.

    A client that has been quiet until its bucket was full is forgotten without loss. If there is no such client, and no room, all
    that come anew share one bucket: whoever makes up names by the thousand gets no more for it than one client does.

    Ownership: `_lock` guards the buckets.

    Args:
        limits: what clients may ask for.
        most: buckets that are kept of clients without a quota of their own.
    """

    def __init__(self, limits: RateLimits, most: int = MOST_CLIENTS) -> None:
        self._limits = limits
        self._most = most
        self._lock = threading.Lock()
        self._named: dict[str, int] = {}
        self._others: OrderedDict[str, int] = OrderedDict()  # the one that was quiet for longest first
        self._crowd_ns = 0

    def charge(self, client: str, now_ns: int) -> None:
        """A client asks for something; counted whether it is served or not.

        Args:
            client: who asks; "" for all who give no name, who are one client.
            now_ns: monotonic.

        Raises:
            QuotaExceeded: more than it may. Not counted.
        """
        quota = self._limits.clients.get(client)
        if quota is not None:
            with self._lock:
                full_ns = self._named.get(client, 0)
                wait_ns, self._named[client] = _charged(quota, full_ns, now_ns)
        elif self._limits.default is not None:
            quota = self._limits.default
            with self._lock:
                wait_ns = self._charge_other(client, quota, now_ns)
        else:
            return
        if wait_ns:
            message = f"{_title(client)} asks for more than {quota.rate_hz:g} requests a second ({quota.burst} at once)"
            raise QuotaExceeded(message, wait_ns / NS_PER_S, client)

    def _charge_other(self, client: str, quota: Quota, now_ns: int) -> int:
        others = self._others
        full_ns = others.get(client)
        if full_ns is None:
            full_ns = 0
            if len(others) >= self._most:
                oldest, oldest_ns = next(iter(others.items()))
                if oldest_ns > now_ns:  # it would come back with a full bucket that it has not waited for
                    wait_ns, self._crowd_ns = _charged(quota, self._crowd_ns, now_ns)
                    return wait_ns
                del others[oldest]
        wait_ns, others[client] = _charged(quota, full_ns, now_ns)
        others.move_to_end(client)
        return wait_ns


def _charged(quota: Quota, full_ns: int, now_ns: int) -> tuple[int, int]:
    """How long to wait for a token (0: here it is), and when the bucket is full from here on."""
    token_ns = NS_PER_S / quota.rate_hz
    begins_ns = max(full_ns, now_ns)
    wait_ns = begins_ns - now_ns - int((quota.burst - 1) * token_ns)
    return (wait_ns, full_ns) if wait_ns > 0 else (0, begins_ns + max(int(token_ns), 1))


def _title(client: str) -> str:
    return f"client '{client}'" if client else "the clients without a name together"
