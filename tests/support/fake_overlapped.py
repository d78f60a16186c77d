"""An overlapped model under the test's control: y = 2x; the test decides when batches in flight end.

It holds the data plane to the contract of `headrace.runtimes.overlapped.OverlappedExecution`: `depth`, threads, order, and
ownership of memory at each step. Nothing in it sleeps; `wait_for` waits for something to be written into `log`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from headrace.core.tensor import NOWHERE, Array, is_resident
from headrace.runtimes.base import Execution, ExecutionLost, LoadedModel
from headrace.runtimes.overlapped import InFlightBatch

from tests.support.fakes import InstanceKilledError
from tests.support.resident_rows import read

# A row that starts with one of these makes the call of that name do it.
RAISES = {"begin": -11.0, "launch": -12.0, "finish": -13.0}
DIES = {"begin": -21.0, "launch": -22.0, "finish": -23.0}
LOST = {"begin": -31.0, "launch": -32.0, "finish": -33.0}


@dataclass
class _Batch:
    number: int
    buffer: Array
    launched: bool = False


@dataclass
class FakeOverlapped(Execution, LoadedModel):
    """One execution (and its model).

    Attributes:
        depth: largest number of batches in flight.
        device: number of the simulated GPU, which reads resident rows at the end of a batch; None for no resident rows.
        manual: True if a batch ends only by a call of `land`.
        prompt: another thread may begin and launch in place of the instance, and finish in place of the finisher.
        brief_rows: its batches of up to so many rows are brief.
        finishers: threads that called finish.
        log: "begin 0", "launch 0", "finish 0", "discard 0", "run", "close" in order; the number is that of the `begin`.
        batches: first column of the values of each batch.
        resident_outputs: outputs of each launched batch that may stay on the GPU.
        most_open: largest number of batches in flight so far.
        during_fill: called at the end of `begin`.
        hanging: name of the call that blocks until `let_go`.
        violations: violations of the interface by the caller.
    """

    depth: int = 2
    device: int | None = None
    manual: bool = False
    prompt: bool = False
    brief_rows: int = 0
    finishers: list[threading.Thread] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    batches: list[list[float]] = field(default_factory=list)
    resident_outputs: list[frozenset[str]] = field(default_factory=list)
    most_open: int = 0
    during_fill: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = threading.Semaphore(0)
        self._count = 0
        self._open: set[int] = set()
        self._in_the_air: list[int] = []
        self._threads: dict[str, int] = {}
        self._finishing = threading.Lock()
        self.hanging: str | None = None
        self._released = threading.Event()
        self.violations: list[str] = []

    # What the test calls

    def land(self, count: int = 1) -> None:
        """Let `count` batches in flight end."""
        self._permits.release(count)

    def let_go(self) -> None:
        """Land everything from now on; what hangs goes on."""
        self.manual = False
        self.hanging = None
        self._released.set()
        self._permits.release(10_000)

    def wait_for(self, *events: str) -> None:
        """Until all of `events` are in the log."""
        with self._changed:
            done = self._changed.wait_for(lambda: all(event in self.log for event in events), 10)
        assert done, f"{events} did not all happen: {self.log}"

    # What the data plane calls

    def execution(self, index: int) -> FakeOverlapped:
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self._expect(not self._open, "run with batches in flight")
        self._on("instance")
        self.note("run")
        self.batches.append(_firsts(inputs["x"]))
        self._misbehave("finish", inputs["x"])
        return {"y": np.asarray(inputs["x"]) * 2}

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        self._on("instance")
        if not is_resident(like["x"]):
            self._misbehave("begin", like["x"])
        number, self._count = self._count, self._count + 1
        with self._changed:
            self._open.add(number)
            self.most_open = max(self.most_open, len(self._open))
            self._expect(len(self._open) <= self.depth, "more batches in flight than depth")
        shape = (rows, *like["x"].shape[1:]) if rows else like["x"].shape  # 0: a model without a batch dimension
        buffer = np.full(shape, np.nan, like["x"].dtype)
        self.note(f"begin {number}")
        self.during_fill()
        return InFlightBatch({"x": buffer}, rows or 1, _Batch(number, buffer), self.device)

    def launch(self, in_flight: InFlightBatch) -> None:
        self._on("instance")
        batch = self._batch(in_flight)
        unread = np.isnan(batch.buffer)  # type: ignore[call-overload]
        for name, row, rows in in_flight.resident_inputs:
            self._expect(name == "x" and rows.device != NOWHERE, "residents that this GPU cannot read")
            self._expect(bool(unread[row : row + len(rows)].all()), "residents that were copied too")
            unread[row : row + len(rows)] = False
        self._expect(not unread.any(), "launched before it was full")
        try:
            self._misbehave("launch", _values(in_flight, batch))
        except BaseException:
            self._give_back(batch)
            raise
        batch.launched = True
        self.resident_outputs.append(in_flight.resident_outputs)
        self._in_the_air.append(batch.number)
        self.note(f"launch {batch.number}")

    def finish(self, in_flight: InFlightBatch) -> dict[str, Array]:
        self.finishers.append(threading.current_thread())
        self._expect(self._finishing.acquire(blocking=False), "two finish at the same time")
        try:
            return self._finish(in_flight)
        finally:
            self._finishing.release()

    def _finish(self, in_flight: InFlightBatch) -> dict[str, Array]:
        self._on("finisher")
        batch = self._batch(in_flight)
        self._expect(batch.launched, "finished before it was launched")
        self.note(f"finishing {batch.number}")
        if self.manual:
            self._permits.acquire()
        self._expect(self._in_the_air.pop(0) == batch.number, "finished out of turn")
        x = _values(in_flight, batch)  # read at the end: detects changes of the inputs after the launch
        batch.buffer.fill(np.nan)
        self._give_back(batch)
        self.batches.append(_firsts(x))
        self.note(f"finish {batch.number}")
        self._misbehave("finish", x)
        return {"y": x * 2}

    def discard(self, in_flight: InFlightBatch) -> None:
        self._on("instance")
        batch = self._batch(in_flight)
        self._expect(not batch.launched, "discarded after the launch")
        self._give_back(batch)
        self.note(f"discard {batch.number}")

    def close(self) -> None:
        self._expect(not self._finishing.locked(), "closed while somebody finishes")
        self.note("close")

    # Within

    def note(self, event: str) -> None:
        """Write something into the log."""
        with self._changed:
            self.log.append(event)
            self._changed.notify_all()

    def _on(self, role: str) -> None:
        if self.prompt:
            finishes = threading.current_thread().name.endswith("finisher")
            self._expect(role == "finisher" or not finishes, "not on the instance's thread")
            return
        ident = self._threads.setdefault(role, threading.get_ident())
        other = [thread for name, thread in self._threads.items() if name != role]
        self._expect(ident == threading.get_ident() and ident not in other, f"not on the {role}'s thread")

    def _batch(self, in_flight: InFlightBatch) -> _Batch:
        assert isinstance(in_flight.state, _Batch)
        self._expect(in_flight.state.number in self._open, "a batch that is not in flight")
        return in_flight.state

    def _give_back(self, batch: _Batch) -> None:
        with self._changed:
            self._open.remove(batch.number)

    def _misbehave(self, call: str, x: Array) -> None:
        if self.hanging == call:
            self.note(f"{call} hangs")
            assert self._released.wait(20), "the test forgot to let go"
        values = _firsts(x)
        if DIES[call] in values:
            raise InstanceKilledError
        if LOST[call] in values:
            raise ExecutionLost("sticky: /secret/path")
        if RAISES[call] in values:
            raise RuntimeError("poisoned: /secret/path")

    def _expect(self, right: bool, what: str) -> None:
        if not right:
            self.violations.append(what)


def _firsts(x: Array) -> list[float]:
    """The first column; all there is of a single number or row."""
    values = np.asarray(x)
    return [float(row) for row in (values.reshape(len(values), -1)[:, 0] if values.ndim > 1 else values.reshape(-1))]  # type: ignore[arg-type]


def _values(in_flight: InFlightBatch, batch: _Batch) -> Array:
    """Return the values that the GPU computes on."""
    x = np.array(batch.buffer)
    for _, row, rows in in_flight.resident_inputs:
        x[row : row + len(rows)] = read(rows).reshape(-1, *x.shape[1:])
    return x
