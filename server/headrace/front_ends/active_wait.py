"""Active wait of a front end for the answer to its only request.

A process that sleeps continues tens of microseconds after its data has arrived. While one request is in flight, a front end with
a core of its own reads the stream again and again for a short time before it returns to its event loop. With more in flight
it never does: their connections have work for it.
"""

from __future__ import annotations

from headrace.core.clock import NS_PER_US

_MAX_PAUSE = 256  # requests


class ActiveWait:
    """Decides before which requests a front end waits actively.

    After a wait without an answer the next ones are left out, twice as many each time: the answers of a slow model are not waited
    for.

    Args:
        limit_us: longest wait in microseconds; 0 for none.

    Attributes:
        limit_ns: the same in nanoseconds.
    """

    def __init__(self, limit_us: float) -> None:
        self.limit_ns = round(limit_us * NS_PER_US)
        self._pause = self._left_out = 0

    def begins(self) -> bool:
        """Return True if the answer to the request that was just sent is waited for."""
        if not self.limit_ns:
            return False
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def end(self, has_answer: bool) -> None:
        """Count the outcome of a wait."""
        if has_answer:
            self._pause = 0
        else:
            self._left_out = self._pause = min(2 * self._pause + 1, _MAX_PAUSE)


def wait_limit_us(setting_us: float, cores: float, front_ends: int) -> float:
    """Return the limit of a front end: 0 without a core for each front end, the engine and a client.

    Args:
        setting_us: value of --front-end-spin-us.
        cores: processor cores that the server may use.
        front_ends: number of front ends.
    """
    return setting_us if cores >= front_ends + 2 else 0.0
