"""Several batches of one instance under way at the same time: while one computes, the next is pulled, filled and launched.

Two threads: the instance's own pulls, begins, fills and launches; its finisher waits for each flight in the order of launch,
splits and settles. They talk through two queues: `_launched` one way, `_landed` back. A batch that fails as a whole comes back
that way, and its members take the road again one by one, ahead of what waits, while later flights go on.

A caller that waits anyway may do both threads' work for its own flight while they sleep (`run`): no thread is woken for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from headrace.backends.base import ExecutionLost, Flight, PipelinedExecution, is_prompt
from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.scheduling.answers import Answers
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.filling import Filler
from headrace.scheduling.instance import OnDeath
from headrace.scheduling.outlook import UnderWay
from headrace.scheduling.pace import Pace
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.selection import Batch
from headrace.scheduling.serial import SerialRunner

# A request that is larger is copied by the instance's thread: the event loop has other callers.
_SHORT_BYTES = 1 << 18


class _Run:
    """A batch, or one member of a batch that failed, on its way.

    Ownership: the instance's thread until it is put into `_launched`, the finisher from then on.
    """

    __slots__ = ("assembled_ns", "entries", "flight", "instances", "reason", "rows", "taken_ns")

    def __init__(self, entries: list[Entry], reason: CloseReason, taken_ns: int) -> None:
        self.entries = entries
        self.rows = sum([entry.rows for entry in entries])
        self.reason = reason
        self.taken_ns = taken_ns
        self.assembled_ns = 0
        self.instances = 1  # at work when it was launched
        self.flight: Flight | None = None


class _Landing(NamedTuple):
    """A flight is over.

    Attributes:
        done_ns: monotonic, when its outputs were there; 0 if it failed.
        again: its members, to be run singly, if it failed.
    """

    done_ns: int
    again: list[_Run]


class Pipeline:
    """Runs an execution that overlaps batches; see `headrace.scheduling.instance.Runner`.

    Batches go through the execution's `run`, with nothing else under way, if they lack an optional input. Of a model without a
    batch dimension a batch is one request.

    Ownership: `_open`, `_again`, `_pace` and `_last_ns` belong to one thread each, as said below, or to whoever takes its place.
    `_turn` is held by a caller from before its flight is launched until it has landed. `_held` has no lock: each change and the
    copy that `give_up` takes is one step of the interpreter.

    Args:
        name: of the instance.
        execution: what runs.
        scheduler: where batches come from.
        inputs: how many inputs the model has.
        serial: runs on the same execution what cannot be pipelined.
        answers: settles what came of the batches.
        on_death: called from the thread that dies, before anything else is waited for.
        pace: when to pull while flights are open; None: at once.
        clock: monotonic nanoseconds.
        fill_threads: that copy a large batch's rows at the same time at most.
        batched: False if the model has no batch dimension.
    """

    def __init__(
        self,
        name: str,
        execution: PipelinedExecution,
        scheduler: Scheduler,
        inputs: int,
        serial: SerialRunner,
        answers: Answers,
        on_death: OnDeath,
        pace: Pace | None = None,
        clock: Clock = monotonic_ns,
        fill_threads: int = 1,
        batched: bool = True,
    ) -> None:
        self._execution = execution
        self._scheduler = scheduler
        self._inputs = inputs
        self._batched = batched
        self._serial = serial
        self._answers = answers
        self._on_death = on_death
        self._pace = pace
        self._clock = clock
        self._filler = Filler(name, fill_threads)
        self._held: set[_Run] = set()
        self._launched: SimpleQueue[_Run | None] = SimpleQueue()
        self._landed: SimpleQueue[_Landing | BaseException] = SimpleQueue()
        self._prompt = is_prompt(execution)
        self._flew = False  # the instance's, as what follows: the event loop has launched a flight in its place
        self._fell: BaseException | None = None  # and what it died of there
        self._open = 0  # flights that were launched and have not come back through _landed
        self._again: deque[_Run] = deque()  # members to run singly
        self._last_ns = 0  # the finisher's: when the flight before was done
        self._turn = threading.Lock()
        self._sleeper = threading.Lock()
        self._sleeper.acquire()
        self._finisher = threading.Thread(target=self._finish_all, name=name + " finisher", daemon=True)

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty and all flights have come back."""
        self._finisher.start()
        try:
            self._pull()
        except BaseException as error:
            self._on_death(error)  # now: the flights that are still open may take as long as the device does
            raise
        finally:
            self._filler.close()
            self._launched.put(None)
            self._finisher.join()
            self._await_turn()
            self._answers.at_work.discard(self)

    def give_up(self, error: Exception) -> None:
        """From any thread: answer everything that was pulled and is not settled with an error."""
        self._answers.give_up([entry for run in list(self._held) for entry in run.entries], error)

    def under_way(self) -> UnderWay:
        """From any thread: what was pulled and is not settled."""
        held = list(self._held)
        return UnderWay(self._last_ns, sorted([(run.taken_ns, run.rows) for run in held]))

    # On the instance's thread

    def _pull(self) -> None:
        depth = self._execution.depth
        while self._fell is None:
            self._flew = False
            while self._open >= depth or not self._landed.empty():
                self._land()
            if self._held_back():
                continue
            run = self._next()
            if run is not None:
                if self._fly(run):
                    self._launched.put(run)
                del run  # it may hold a client's memory, and the next may be long in coming
            elif self._flew or self._news():
                continue
            elif self._open:
                self._land()
            else:
                return
        raise self._fell

    def _news(self) -> bool:
        return not self._landed.empty() or bool(self._again) or self._fell is not None

    def _land(self, timeout_s: float | None = None) -> None:
        """Wait for the finisher to be done with a flight.

        Raises:
            Empty: none has come back after `timeout_s`.
        """
        landed = self._landed.get(timeout=timeout_s)
        if isinstance(landed, BaseException):
            raise RuntimeError("the finisher died") from landed
        self._open -= 1
        if self._pace is not None:
            self._pace.landed(landed.done_ns)
        self._again.extend(landed.again)

    def _held_back(self) -> bool:
        """Wait until it is time to pull; True if a flight has landed first, which changes that time."""
        if self._pace is None or not self._open or self._again:
            return False
        wait_ns = self._pace.pull_ns(self._scheduler.waiting_rows) - self._clock()
        if wait_ns <= 0:
            return False
        try:
            self._land(wait_ns / NS_PER_S)
        except Empty:
            return False
        return True

    def _next(self) -> _Run | None:
        """What to launch next; None if there is nothing more, or if there is news."""
        if self._again:
            run = self._again.popleft()
            run.taken_ns = self._clock()
            return run
        shortcut = self if self._prompt else None
        begins_ns = self._pace.free_ns if self._pace is not None and self._open else 0
        batch = self._scheduler.next_batch(self._sleeper, self._news, self._open > 0, shortcut, begins_ns)
        return None if batch is None else self._hold(batch)

    def _hold(self, batch: Batch) -> _Run:
        run = _Run(batch.entries, batch.reason, batch.taken_ns)
        self._held.add(run)
        self._answers.begin(self)
        return run

    def _fly(self, run: _Run) -> bool:
        """Launch a batch, or do with it what else is to be done; True if it is in the air and must be finished."""
        entries = [entry for entry in run.entries if not entry.completion.done]
        if len(entries) != len(run.entries):
            run.entries, run.rows = entries, sum([entry.rows for entry in entries])
        if not entries:
            self._let_go(run)
        elif len(entries[0].inputs) != self._inputs:
            while self._open:
                self._land()
            self._serial.execute(Batch(entries, run.reason, run.taken_ns))
            self._let_go(run)
        else:
            try:
                launched = self._launch(run)
            except ExecutionLost:
                raise
            except Exception as error:  # whatever else a backend raises belongs to this batch alone
                self._again.extend(self._failed(run, error))
                return False
            if launched:
                self._open += 1
                if self._pace is not None:
                    self._pace.launched(run.rows, run.taken_ns, run.assembled_ns)
                return True
            self._let_go(run)
        return False

    def _launch(self, run: _Run) -> bool:
        """Begin, fill and launch; False if all callers have left meanwhile."""
        execution, entries = self._execution, run.entries
        flight = execution.begin(entries[0].inputs, run.rows if self._batched else 0)
        try:
            self._filler.fill(flight, entries)
        except Exception:
            execution.discard(flight)
            raise
        if all(entry.completion.done for entry in entries):
            execution.discard(flight)
            return False
        run.flight = flight
        run.instances = len(self._answers.at_work)
        run.assembled_ns = self._clock()
        execution.launch(flight)
        return True

    # In the place of the instance's thread, while that sleeps in `next_batch`; see `headrace.scheduling.scheduler.Shortcut`

    def takes(self, entry: Entry, stays: bool) -> bool:
        """True if nothing is under way, and the entry needs nothing but a flight, and is small or its caller stays with it."""
        try:
            while not self._landed.empty():
                self._land()
        except RuntimeError as error:
            self._fell = error
        busy = self._open or self._again or self._fell is not None
        return not busy and len(entry.inputs) == self._inputs and (stays or entry.size_bytes <= _SHORT_BYTES)

    def take(self, batch: Batch) -> None:
        """Launch it from here: the thread need not wake up for it."""
        run = self._take_off(batch)
        if run is not None:
            self._launched.put(run)

    def run(self, batch: Batch, go_on: Callable[[], None]) -> None:
        """Launch it from here and see to its landing too: neither thread need wake up for it."""
        with self._turn:  # it is free while nothing is under way
            try:
                run = self._take_off(batch)
            finally:
                go_on()
            if run is None:
                return
            try:
                self._complete(run)
            except BaseException as error:  # as on the finisher's own thread
                self._fail(error)
                if isinstance(error, KeyboardInterrupt):  # it is the caller's own
                    raise

    def _take_off(self, batch: Batch) -> _Run | None:
        """The batch, if it is in the air now."""
        run = self._hold(batch)
        try:
            aloft = self._fly(run)
            self._flew = True
            return run if aloft else None
        except BaseException as error:  # as on the instance's own thread: it dies of it, and is woken to do so
            self._fell = error
            self._on_death(error)
            return None

    def calls(self) -> bool:
        """True if the thread has something to do."""
        return self._news()

    # On the finisher's thread

    def _finish_all(self) -> None:
        try:
            while (run := self._launched.get()) is not None:
                self._await_turn()
                self._complete(run)
                del run  # its arrays may be large, and the next may be long in coming
        except BaseException as error:  # a dying thread says so, whatever it dies of
            self._fail(error)

    # There, or in its place on the thread of a caller that waits for its own flight

    def _complete(self, run: _Run) -> None:
        """Finish a flight and tell the instance's thread."""
        landing = self._finish(run)
        self._landed.put(landing)
        if landing.again:
            self._scheduler.interrupt(self._sleeper)

    def _fail(self, error: BaseException) -> None:
        """Nothing will be finished any more."""
        try:
            self._on_death(error)
        finally:
            self._landed.put(error)
            self._scheduler.interrupt(self._sleeper)

    def _finish(self, run: _Run) -> _Landing:
        """Wait for a flight and settle its members."""
        flight, run.flight = run.flight, None
        assert flight is not None, "a run is launched with its flight"
        try:
            outputs = self._execution.finish(flight)
            computed_ns = self._clock()
            results = self._answers.split(outputs, run.entries)
        except ExecutionLost:
            raise
        except Exception as error:
            return _Landing(0, self._failed(run, error))
        times = BatchTimes(run.taken_ns, run.assembled_ns, computed_ns, self._clock())
        # The time for which it kept the instance from others is what does not overlap with the flight before.
        busy_ns = times.split_ns - max(run.taken_ns, self._last_ns)
        self._last_ns = times.split_ns
        if len(self._held) == 1:  # first: who has the answer may ask again before this thread goes on
            self._answers.at_work.discard(self)
        self._answers.settle(run.entries, run.reason, times, results, busy_ns, run.instances)
        self._let_go(run)
        return _Landing(computed_ns, [])

    # On either

    def _await_turn(self) -> None:
        """Return once no caller sees to a flight of its own, which was launched before all others."""
        with self._turn:
            pass

    def _let_go(self, run: _Run) -> None:
        """A batch is done with."""
        self._held.discard(run)
        if not self._held:  # what is pulled in this moment counts as no work: the next one will
            self._answers.at_work.discard(self)

    def _failed(self, run: _Run, error: Exception) -> list[_Run]:
        singly = self._answers.failed(run.entries, run.reason, error)
        runs = [_Run([entry], run.reason, run.taken_ns) for entry in singly]
        self._held.update(runs)
        self._let_go(run)
        return runs
