"""Quotas of clients: requests per second of each, on one model version.

Token buckets exist for a bounded number of clients, even if clients invent names. A bucket is one number, the time at
which it is full again: the generic cell rate algorithm (ITU-T I.371, 1996). It needs a comparison and an addition, no timer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from headrace.core.clock import NS_PER_S
from headrace.core.errors import QuotaExceeded
from headrace.core.quota import Quota, charge
from headrace.inference.scheduling.policy import RateLimits

MAX_CLIENTS = 4096
"""Clients with a bucket of their own, besides those that the configuration names."""


class Quotas:
    """Admits or rejects requests by client; any thread may call.

    A full bucket is equal to none, so the bucket of an idle client is removed once it is full. While there is no such bucket
    and no room, all new clients share one bucket: thousands of invented names get no more than one client.

    Ownership: `_lock` guards the buckets.

    Args:
        limits: quotas by client.
        max_clients: number of buckets for clients without a configured quota.
    """

    def __init__(self, limits: RateLimits, max_clients: int = MAX_CLIENTS) -> None:
        self._limits = limits
        self._max_clients = max_clients
        self._lock = threading.Lock()
        self._named: dict[str, int] = {}
        self._others: OrderedDict[str, int] = OrderedDict()  # the longest idle first
        self._shared_bucket_ns = 0

    def charge(self, client: str, now_ns: int) -> None:
        """Charge one request to its client's bucket, whether or not it is admitted later.

        Args:
            client: name of the client; all requests without a name ("") count as one client.
            now_ns: monotonic.

        Raises:
            QuotaExceeded: the bucket is empty. The request is not charged.
        """
        quota = self._limits.clients.get(client)
        if quota is not None:
            with self._lock:
                full_ns = self._named.get(client, 0)
                wait_ns, self._named[client] = charge(quota, full_ns, now_ns)
        elif self._limits.default is not None:
            quota = self._limits.default
            with self._lock:
                wait_ns = self._charge_other(client, quota, now_ns)
        else:
            return
        if wait_ns:
            label = f"client '{client}'" if client else "clients without a name (counted together)"
            message = (
                f"{label} exceeded the quota of {quota.rate_hz:g} requests/s (burst {quota.burst}): "
                "retry later, or raise rate_limits in the model configuration"
            )
            raise QuotaExceeded(message, wait_ns / NS_PER_S, client)

    def _charge_other(self, client: str, quota: Quota, now_ns: int) -> int:
        others = self._others
        full_ns = others.get(client)
        if full_ns is None:
            full_ns = 0
            if len(others) >= self._max_clients:
                oldest, oldest_ns = next(iter(others.items()))
                if oldest_ns > now_ns:  # not full yet: removing it would refill it early
                    wait_ns, self._shared_bucket_ns = charge(quota, self._shared_bucket_ns, now_ns)
                    return wait_ns
                del others[oldest]
        wait_ns, others[client] = charge(quota, full_ns, now_ns)
        others.move_to_end(client)
        return wait_ns
