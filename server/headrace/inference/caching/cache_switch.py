"""Measures whether the response cache of a model saves more time than it costs, and switches it off and on.

Every miss costs the time to hash the inputs, to look the key up and to store the response. A hit saves the compute time of its
request. While misses cost more than hits save, the cache is switched off and most requests pass it by. After `OFF_REQUESTS`
requests, or a minute, `TRIAL_REQUESTS` consecutive ones are looked up again. Entries stay meanwhile, so that a trial measures
repeats over longer distances than its own length.
"""

from __future__ import annotations

import logging
from typing import Literal

from headrace.core.clock import NS_PER_S, NS_PER_US

logger = logging.getLogger("headrace.cache")

FIRST_REQUESTS = 2048
"""Requests before the first decision: the cache is empty at first."""
WINDOW_REQUESTS = 1024
"""Requests between two decisions while the cache is on."""
OFF_REQUESTS = 16_384
"""Requests that pass by between two trials."""
TRIAL_REQUESTS = 256
"""Requests of a trial: 1/64 of `OFF_REQUESTS`."""
_OFF_NS = 60 * NS_PER_S
# Time of the scheduler for a request that a hit saves besides its compute time: on an idle machine a request of a 6 us model
# takes 36 us from `infer` to its response.
QUEUE_NS = 15 * NS_PER_US

State = Literal["on", "off", "trial"]


class CacheBenefit:
    """Decides whether requests of one version are looked up. Called on the event loop.

    Costs and savings of other threads may be lost in a race of two additions; a decision does not depend on single requests.

    Args:
        name: of the version, for the log.

    Attributes:
        state: "on"; "off": requests pass by; "trial": it was off, and requests are looked up.
        passing: True while requests pass by; then call `passes` for each.
        switches: number of times that it was switched off.
        rest: requests before the next decision, or while `passing` before the next trial.
        trial_ns: monotonic time of the next trial, if the requests do not suffice before.
    """

    def __init__(self, name: str) -> None:
        self.state: State = "on"
        self.passing = False
        self.switches = 0
        self._name = name
        self._saved_ns = self._cost_ns = 0.0
        self._hits = self._lookups = 0
        self.rest = FIRST_REQUESTS
        self.trial_ns = 0
        self._last = (0.0, 0.0, 0.0)  # hit rate, time saved and cost a request when it was last decided

    def begin_trial(self) -> None:
        """Look the next `TRIAL_REQUESTS` requests up."""
        self.state, self.passing, self.rest = "trial", False, TRIAL_REQUESTS
        self._hits = self._lookups = 0
        self._saved_ns = self._cost_ns = 0.0

    def count_hit(self, saved_ns: int) -> None:
        """Count a request that was served without computing it.

        Args:
            saved_ns: its compute time minus its time in the cache.
        """
        self._hits += 1
        self._saved_ns += saved_ns

    def add_cost(self, cost_ns: int) -> None:
        """Add time that a miss spent in the cache; any thread may call."""
        self._cost_ns += cost_ns

    def count_lookup(self, received_ns: int) -> None:
        """Count a lookup, after the hit or miss; decides at the end of a window.

        Args:
            received_ns: monotonic time at which the request arrived.
        """
        self._lookups += 1
        self.rest -= 1
        if self.rest <= 0:
            self._decide(received_ns)

    def _decide(self, now_ns: int) -> None:
        lookups, was_on = self._lookups, self.state == "on"
        self._last = (self._hits / lookups, self._saved_ns / lookups, self._cost_ns / lookups)
        if self._saved_ns >= self._cost_ns:
            self.state, self.rest = "on", WINDOW_REQUESTS
            if not was_on:
                logger.info("model %s: response cache switched on again: %s", self._name, self.reason())
        else:
            self.state, self.passing, self.rest = "off", True, OFF_REQUESTS
            self.trial_ns = now_ns + _OFF_NS
            if was_on:
                self.switches += 1
                logger.info("model %s: response cache switched off: %s", self._name, self.reason())
        # Half of the past counts on, so that one window of unusual requests decides nothing.
        self._hits, self._lookups = self._hits // 2, lookups // 2
        self._saved_ns, self._cost_ns = self._saved_ns / 2, self._cost_ns / 2

    def reason(self) -> str:
        """Return the figures of the last decision as a sentence."""
        rate, saved_ns, cost_ns = self._last
        if self.state == "on" and not (rate or cost_ns or saved_ns):
            return f"it is first judged after {FIRST_REQUESTS} requests"
        return (
            f"at {100 * rate:.1f} % hits a request saved {saved_ns / NS_PER_US:.1f} us of compute time on average and cost "
            f"{cost_ns / NS_PER_US:.1f} us of hashing and copying"
        )
