"""What stands for an instance and its device: the steps of `headrace.scheduling.pipeline` as events in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.request import BatchTimes
from headrace.core.tensor import Array
from headrace.scheduling.answers import Answers
from headrace.scheduling.outlook import UnderWay
from headrace.scheduling.pace import Pace
from headrace.scheduling.queue import Entry
from headrace.scheduling.selection import Batch
from headrace.simulation.profiles import Profile, Variation
from headrace.simulation.virtual_time import VirtualLoop

_NO_OUTPUTS: dict[str, Array] = {}


@dataclass(slots=True)
class Device:
    """Copies in, computes and copies out: one batch at a time each, in the order of launch.

    Attributes:
        copied_in_ns, computed_ns, copied_out_ns: when each will be free.
        busy_ns: how long it has computed.
    """

    copied_in_ns: int = 0
    computed_ns: int = 0
    copied_out_ns: int = 0
    busy_ns: int = 0

    def run(self, now_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> int:
        """Take a batch that is launched now; when it will be done."""
        self.copied_in_ns = max(now_ns, self.copied_in_ns) + copy_in_ns
        self.computed_ns = max(self.copied_in_ns, self.computed_ns) + compute_ns
        self.copied_out_ns = max(self.computed_ns, self.copied_out_ns) + copy_out_ns
        self.busy_ns += compute_ns
        return self.copied_out_ns


class Times:
    """A profile as tables of whole nanoseconds by rows, with what varies.

    Args:
        profile: what batches take.
        max_rows: rows in the largest batch.
        variation: of the compute time.
    """

    def __init__(self, profile: Profile, max_rows: int, variation: Variation) -> None:
        self.fill = profile.fill.table(max_rows)
        self.copy_in = profile.copy_in.table(max_rows)
        self.compute = profile.compute.table(max_rows)
        self.copy_out = profile.copy_out.table(max_rows)
        self.varied = variation.apply

    def on_device_ns(self, rows: int) -> int:
        """What a batch that is alone keeps a device busy, on average."""
        return self.copy_in[rows] + self.compute[rows] + self.copy_out[rows]


@dataclass(slots=True, eq=False)
class _Run:
    """A batch on its way."""

    entries: list[Entry]
    batch: Batch
    rows: int
    assembled_ns: int = 0


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """An instance that takes time and no processor.

    As in a `Pipeline`: the thread pulls while fewer than `depth` flights are open, held back by `pace`; it fills and launches one
    after the other; flights land in the order of launch. With a depth of 1 it is a `SerialRunner`.

    Attributes:
        loop: virtual time.
        device: where it computes; instances may share one.
        times: what batches take.
        answers: settles what has landed.
        pull: has the instances look at the queue.
        waiting_rows: rows in the queue.
        depth: flights that may be open.
        pace: when to pull while flights are open; None: at once.
        asks: the thread is in `Scheduler.next_batch`: a batch would be taken.
        open: flights that are launched, or about to be.
    """

    loop: VirtualLoop
    device: Device
    times: Times
    answers: Answers
    pull: Callable[[], None]
    waiting_rows: Callable[[], int]
    depth: int = 1
    pace: Pace | None = None
    asks: bool = True
    open: int = 0
    _filling: _Run | None = None
    _flying: deque[_Run] = field(default_factory=deque)
    _holds: int = 0  # counts waits of the thread, so that an alarm knows whether its own is over
    _last_ns: int = 0

    @property
    def begins_ns(self) -> int:
        """When a batch that is taken now would begin to be computed, 0 if at once."""
        return self.pace.free_ns if self.pace is not None and self.open else 0

    def fly(self, batch: Batch) -> None:
        """The thread has pulled a batch: fill, and launch."""
        rows = 0
        for entry in batch.entries:
            rows += entry.rows
        run = _Run(batch.entries, batch, rows)
        self.answers.begin(self)
        self.open += 1
        fill_ns = self.times.fill[rows]
        if fill_ns:
            self.asks, self._filling = False, run
            self.loop.at(self.loop.now_ns + fill_ns, self._filled)
        else:
            self._launch(run)

    def under_way(self) -> UnderWay:
        """What it has pulled and not answered."""
        runs = [*self._flying, self._filling] if self._filling else self._flying
        return UnderWay(self._last_ns, [(run.batch.taken_ns, run.rows) for run in runs])

    def _filled(self) -> None:
        run, self._filling = self._filling, None
        assert run is not None, "it is filled once"
        self._launch(run)
        if self.asks:
            self.pull()

    def _launch(self, run: _Run) -> None:
        times, rows = self.times, run.rows
        run.assembled_ns = now_ns = self.loop.now_ns
        compute_ns = times.varied(times.compute[rows])
        done_ns = self.device.run(now_ns, times.copy_in[rows], compute_ns, times.copy_out[rows])
        if self.pace is not None:
            self.pace.launched(rows, run.batch.taken_ns, now_ns)
        self._flying.append(run)
        self.loop.at(done_ns, self._land)
        self._look()

    def _land(self) -> None:
        run = self._flying.popleft()
        now_ns, batch = self.loop.now_ns, run.batch
        times = BatchTimes(batch.taken_ns, run.assembled_ns, now_ns, now_ns)
        busy_ns = now_ns - max(batch.taken_ns, self._last_ns)
        self._last_ns = now_ns
        self.answers.settle(run.entries, batch.reason, times, [_NO_OUTPUTS] * len(run.entries), busy_ns)
        self.open -= 1
        if not self.open:
            self.answers.at_work.discard(self)
        if self.pace is not None:
            self.pace.landed(now_ns)
        if not self.asks and self._filling is None:
            self._look()
            if self.asks:
                self.pull()

    def _look(self) -> None:
        """The thread decides whether to ask for the next batch: now, later, or once a flight has landed."""
        self._holds += 1
        self.asks = False
        if self.open >= self.depth:
            return
        if self.pace is not None and self.open:
            pull_ns = self.pace.pull_ns(self.waiting_rows())
            if pull_ns > self.loop.now_ns:
                holds = self._holds
                self.loop.at(pull_ns, lambda: self._held_long_enough(holds))
                return
        self.asks = True

    def _held_long_enough(self, holds: int) -> None:
        if holds == self._holds:
            self.asks = True
            self.pull()
