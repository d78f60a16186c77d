"""Figures of one version with traffic: totals, and sums over a sliding window that promotion rules read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.config.traffic_config import ALL_SHARES, DEFAULT_WINDOW_S, TrafficRules, share_units
from headrace.core.clock import NS_PER_MS, NS_PER_S

_SLICES = 10
_LATENCIES = 1024


@dataclass(slots=True)
class Sums:
    """Sums over a time.

    Attributes:
        requests: answered requests, and those that failed with an error of the server.
        errors: requests that failed with an error of the server.
        slow: requests that took longer than `max_p99_ms`.
        comparisons: compared shadow answers, failed shadow requests included.
        rows: rows of the comparisons.
        agreeing: rows that agree with the stable version.
        difference: largest absolute difference of two outputs.
        slot: number of the slice of time.
    """

    requests: int = 0
    errors: int = 0
    slow: int = 0
    comparisons: int = 0
    rows: int = 0
    agreeing: int = 0
    difference: float = 0.0
    slot: int = 0

    def add(self, other: Sums) -> None:
        """Add other sums to these."""
        self.requests += other.requests
        self.errors += other.errors
        self.slow += other.slow
        self.comparisons += other.comparisons
        self.rows += other.rows
        self.agreeing += other.agreeing
        self.difference = max(self.difference, other.difference)


class VersionFigures:
    """Figures of a version since it has had traffic. Ownership: the event loop.

    Args:
        rules: of the model; None for none.

    Attributes:
        totals: sums since the start.
    """

    def __init__(self, rules: TrafficRules | None) -> None:
        self.totals = Sums()
        self._slices: deque[Sums] = deque()
        self._latencies_ns: deque[int] = deque(maxlen=_LATENCIES)
        self._slice_ns, self._bound_ns = _slice_and_bound(rules)

    def apply(self, rules: TrafficRules | None) -> None:
        """Use other rules; another window or bound starts the window anew."""
        slice_and_bound = _slice_and_bound(rules)
        if slice_and_bound != (self._slice_ns, self._bound_ns):
            self._slice_ns, self._bound_ns = slice_and_bound
            self._slices.clear()

    def _current(self, now_ns: int) -> Sums:
        slot, slices = now_ns // self._slice_ns, self._slices
        if not slices or slices[-1].slot != slot:
            slices.append(Sums(slot=slot))
            while slices[0].slot <= slot - _SLICES:
                slices.popleft()
        return slices[-1]

    def add_answer(self, duration_ns: int, now_ns: int) -> None:
        """Count an answered request; times are monotonic nanoseconds."""
        slow = int(bool(self._bound_ns) and duration_ns > self._bound_ns)
        for sums in (self._current(now_ns), self.totals):
            sums.requests += 1
            sums.slow += slow
        self._latencies_ns.append(duration_ns)

    def add_error(self, now_ns: int, was_answered: bool) -> None:
        """Count a request that failed with an error of the server; `was_answered`: after `add_answer`."""
        for sums in (self._current(now_ns), self.totals):
            sums.requests += not was_answered
            sums.errors += 1

    def add_comparison(self, rows: int, agreeing: int, difference: float, now_ns: int) -> None:
        """Count a compared shadow answer, or with no agreeing row a failed one."""
        for sums in (self._current(now_ns), self.totals):
            sums.comparisons += 1
            sums.rows += rows
            sums.agreeing += agreeing
            sums.difference = max(sums.difference, difference)

    def window(self, now_ns: int) -> Sums:
        """Return the sums of the window of the rules."""
        first = now_ns // self._slice_ns - _SLICES + 1
        total = Sums()
        for sums in list(self._slices):  # any thread may read
            if sums.slot >= first:
                total.add(sums)
        return total

    def p99_ms(self) -> float | None:
        """Return the 99th percentile of the latest 1024 answers in milliseconds; None without answers."""
        ordered = sorted(self._latencies_ns)
        return ordered[-(-99 * len(ordered) // 100) - 1] / NS_PER_MS if ordered else None


def _slice_and_bound(rules: TrafficRules | None) -> tuple[int, int]:
    """Return the length of a slice and the bound of slow requests, 0 for none; nanoseconds."""
    if rules is None:
        return int(DEFAULT_WINDOW_S * NS_PER_S) // _SLICES, 0
    bound_ns = 0 if rules.max_p99_ms is None else int(rules.max_p99_ms * NS_PER_MS)
    return int(rules.window_s * NS_PER_S) // _SLICES, bound_ns


def broken_rule(rules: TrafficRules, window: Sums) -> tuple[str, str] | None:
    """Return name of a rule that a version breaks, and the reason; None while it breaks none that has enough requests.

    Args:
        rules: of the model.
        window: sums of the version.
    """
    requests, least = window.requests, rules.min_requests
    if requests >= least:
        if (
            rules.max_error_rate is not None
            and window.errors * ALL_SHARES > share_units(rules.max_error_rate) * requests
        ):
            text = f"{window.errors} of {requests} requests failed, {window.errors / requests:.2%}"
            return "max_error_rate", f"{text}: max_error_rate is {rules.max_error_rate}"
        if rules.max_p99_ms is not None and window.slow * 100 > requests:
            text = f"{window.slow} of {requests} requests took longer than {rules.max_p99_ms:g} ms, {window.slow / requests:.2%}"
            return "max_p99_ms", f"{text}: 1% may"
    if rules.min_agreement is None or window.comparisons < least:
        return None
    if window.agreeing * ALL_SHARES >= share_units(rules.min_agreement) * window.rows:
        return None
    text = f"{window.agreeing} of {window.rows} rows agree with the stable version, {window.agreeing / window.rows:.2%}"
    return "min_agreement", f"{text}: min_agreement is {rules.min_agreement}"


def missing_evidence(rules: TrafficRules, window: Sums) -> str:
    """Return which rule has too few requests for a promotion; "" if all have enough."""
    least, seconds = rules.min_requests, f"in the last {rules.window_s:g} s, min_requests is {rules.min_requests}"
    if (rules.max_error_rate is not None or rules.max_p99_ms is not None) and window.requests < least:
        return f"it has answered {window.requests} requests {seconds}"
    if rules.min_agreement is not None and window.comparisons < least:
        return f"{window.comparisons} of its shadow answers were compared {seconds}"
    return ""
