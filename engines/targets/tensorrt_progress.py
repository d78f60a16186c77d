"""How far TensorRT's builder is, and how it is stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engines.progress import Report


@dataclass(slots=True)
class _Phase:
    parent: str
    steps: int
    done: int = 0


class Stop:
    """What has stopped work in TensorRT, kept until it is back in Python: an exception cannot pass through TensorRT.

    Attributes:
        raised: what stopped the work, None if nothing did.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Let the work end as soon as it can; the first to say so is what it ends with."""
        self.raised = self.raised or error

    def check(self) -> None:
        """Raise what has stopped the work, if anything has."""
        if self.raised is not None:
            raise self.raised


class Progress(Stop):
    """Turns the builder's phases, which nest, into one share that only grows.

    TensorRT calls from threads of its own, hence the lock. What is raised meanwhile (an interrupt, most of all) stops the build.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._share = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """A phase begins, within its parent's current step."""
        with self._catching():
            self._phases[phase] = _Phase(parent or "", max(steps, 1))
            self._tell(phase)

    def step(self, phase: str, number: int) -> bool:
        """Step `number`, from 0, of a phase is done. Returns False if the build is to stop."""
        with self._catching():
            if phase in self._phases:
                self._phases[phase].done = number + 1
                self._tell(phase)
        return self.raised is None

    def finish(self, phase: str) -> None:
        """A phase is over."""
        with self._catching():
            self._phases.pop(phase, None)

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except BaseException as error:
            self.stop(error)

    def _tell(self, phase: str) -> None:
        roots = [name for name, found in self._phases.items() if found.parent not in self._phases]
        share = max((self._done(name) for name in roots), default=0.0)
        self._share = max(self._share, min(share, 1.0))
        if self.raised is None:
            self._report(self._share, phase)

    def _done(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._done(child) for child, found in self._phases.items() if found.parent == name), default=0.0)
        return (phase.done + min(inner, 1.0)) / phase.steps


@contextlib.contextmanager
def signals_stop(stop: Stop) -> Iterator[None]:
    """Meanwhile a signal's handler raises nothing: what it would have raised goes to `stop`, and is raised at the end.

    Python handles a signal on entering the next function of the main thread. In a call of TensorRT, that is a callback (the
    logger's, most often), which TensorRT's bindings let no exception out of: Ctrl-C and SIGTERM would be lost.
    """
    before: dict[int, Callable[[int, Any], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            handler = signal.getsignal(number)
            if callable(handler):  # else it is ignored, or ends the process
                before[number] = handler

    def keep(number: int, frame: Any) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            stop.stop(error)

    try:
        try:
            for number in before:
                signal.signal(number, keep)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    finally:
        # Also if something else went wrong: whoever pressed Ctrl-C wants no advice on his model.
        stop.check()


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """The IProgressMonitor that TensorRT is handed."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
