"""Decides which requests run on the event loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock
from headrace.core.completion import Mailbox
from headrace.core.limits import BodyMemory
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.queue import FAR_NS, Entry
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution
from headrace.runtimes.overlapped import is_overlapped

logger = logging.getLogger("headrace.instance")

# A longer run on the event loop disables such runs for INLINE_PAUSE times its duration, at most INLINE_MAX_PAUSE_NS: so they
# block the loop for 1 / INLINE_PAUSE of the time at most. On a busy machine most of them are fast runs that another program
# interrupted.
INLINE_MAX_RUN_NS = 2 * NS_PER_MS
INLINE_PAUSE = 200
# A longer run of a brief batch, unless such runs are usual, disables them for so many times the limit, however long it was: the
# driver pins the memory of a new front end in 0.1 s, and lets no call through meanwhile.
INLINE_BATCH_PAUSE = 20
INLINE_MAX_PAUSE_NS = 60 * NS_PER_S
# No runs on the event loop so long after two requests of the model were in flight: together they run faster, as a batch.
INLINE_QUIET_NS = 10 * NS_PER_MS
_SMOOTHING = 3  # a run counts 1/8
# Bound of GPU models: a thread that waits for a GPU takes no processor time from other threads.
INLINE_DEVICE_BOUND_NS = 2 * NS_PER_MS


@dataclass(eq=False, repr=False)
class InlineGate:
    """Decides whether a lone request runs on the event loop; see docs/decisions/0008-inline-runs.md.

    Ownership: the event loop. An instance's thread calls `support` before it serves, and `is_open`, which only reads.

    Attributes:
        name: name of the version, for log lines.
        bound_ns: largest allowed 95th percentile of the compute time for the rows of the request; 0 disables runs on the loop.
        mailbox: delivers completions to the event loop.
        recorder: counters of the version.
        bodies: counts requests in the front ends; None without front ends.
        clock: returns monotonic nanoseconds.
        quiet_ns: monotonic time before which no request runs on the loop: two were in flight together.
    """

    name: str
    bound_ns: int
    latency_table: LatencyTable
    mailbox: Mailbox
    recorder: Recorder
    bodies: BodyMemory | None
    clock: Clock

    def __post_init__(self) -> None:
        self._supported = self._on_device = False
        self._usual_ns = 0  # smoothed duration of a run
        self._iteration_open = False  # a request has run in this iteration of the loop
        self._handled_stalls = 0  # `latency_table.stalls` of which a pause is over or runs
        self.quiet_ns = self._enabled_ns = -FAR_NS

    def support(self, execution: Execution) -> None:
        """Allow runs on the event loop if the execution runs on any thread; with the bound of GPUs if it is overlapped."""
        self._supported = self.bound_ns > 0 and execution.any_thread
        self._on_device = self._supported and is_overlapped(execution)
        if self._on_device:
            self.bound_ns = self.latency_table.tail_bound_ns = max(self.bound_ns, INLINE_DEVICE_BOUND_NS)

    def allows(self, entry: Entry) -> bool:
        """Return True if a request may run before the loop reads others that arrived with it; also sets `entry.inline`.

        At most one request does so in an iteration of the loop. A second one shows that requests arrive together: it is queued,
        and runs with those behind it, or on the loop if there is none.

        Args:
            entry: the only entry of the request, which is the only one of the version between lease and release.
        """
        now_ns, bodies = entry.enqueued_ns, self.bodies
        entry.inline = (
            self._is_enabled(now_ns)
            and now_ns >= self.quiet_ns
            and (bodies is None or bodies.cells[BodyMemory.REQUESTS] <= 1)
            and entry.deadline_ns - now_ns > self.bound_ns
            and self.latency_table.is_fast(entry.rows)
        )
        return entry.inline and not self._iteration_open

    def crowd(self, now_ns: int) -> None:
        """Record that several requests are in flight at `now_ns` (monotonic): none of them runs on the loop alone for a while."""
        self.quiet_ns = now_ns + INLINE_QUIET_NS
        if self.mailbox.latest is not self.name:
            self._note(now_ns)

    def allows_batch(self) -> bool:
        """Return True if a batch of several requests, which its device computes in a short time, may run on the loop.

        Threads that take turns under the interpreter's lock would cost more than such a batch. That another program uses the
        device shows in the smoothed time of such runs.
        """
        return self._on_device and self._is_enabled(self.clock())

    def is_open(self, now_ns: int) -> bool:
        """Return True if no pause holds at `now_ns` (monotonic); any thread may call. `allows_batch` decides, on the loop."""
        return self._on_device and now_ns >= self._enabled_ns and now_ns >= self.mailbox.mixed_ns

    def _note(self, now_ns: int) -> None:
        """Record that the latest request is of this version."""
        mailbox = self.mailbox
        mailbox.mixed_ns = now_ns + INLINE_QUIET_NS if mailbox.latest else 0
        mailbox.latest = self.name

    def _is_enabled(self, now_ns: int) -> bool:
        mailbox, stalls = self.mailbox, self.latency_table.stalls
        if mailbox.latest is not self.name:
            self._note(now_ns)
        if stalls != self._handled_stalls:
            # A run on an instance was that slow: the time may depend on the values in the request.
            self._handled_stalls = stalls
            self._enabled_ns = max(self._enabled_ns, now_ns + _inline_pause_ns(self.latency_table.stall_ns))
        is_mixed = self._on_device and now_ns < mailbox.mixed_ns
        return self._supported and now_ns >= self._enabled_ns and not is_mixed

    def begin(self) -> None:
        """Begin a run: completions are collected until its end."""
        self.mailbox.is_armed = True
        self._iteration_open = True

    def end(self, begun_ns: int, is_lone: bool = True) -> None:
        """Resume the callers after a run, and disable such runs for a while if it took too long.

        Args:
            begun_ns: monotonic start of the run.
            is_lone: it was of one request.
        """
        run_ns = self.clock() - begun_ns
        self.mailbox.deliver()
        self.mailbox.loop.call_soon(self._end_iteration)  # after the batch is recorded
        limit_ns = max(INLINE_MAX_RUN_NS, 2 * self.bound_ns)
        self._usual_ns += (min(run_ns, limit_ns) - self._usual_ns) >> _SMOOTHING  # one stall alone is not usual
        is_usual = self._on_device and self._usual_ns > self.bound_ns
        disables = run_ns > limit_ns or is_usual
        self.recorder.record_inline_run(disables)
        if disables:
            pause_ns = INLINE_BATCH_PAUSE * limit_ns
            if is_lone or is_usual:
                pause_ns, self._usual_ns = _inline_pause_ns(run_ns), 0
            self._enabled_ns = begun_ns + run_ns + pause_ns
            logger.log(
                logging.INFO if is_lone or is_usual else logging.DEBUG,
                "model %s: a run on the event loop took %d us, more than %d us: its requests run on instances for %.1f s",
                self.name,
                run_ns // NS_PER_US,
                limit_ns // NS_PER_US,
                pause_ns / NS_PER_S,
            )

    def _end_iteration(self) -> None:
        self._iteration_open = False
        self._handled_stalls = self.latency_table.stalls


def _inline_pause_ns(run_ns: int) -> int:
    """Return how long no request runs on the event loop after a slow run of a model."""
    return min(INLINE_PAUSE * run_ns, INLINE_MAX_PAUSE_NS)
