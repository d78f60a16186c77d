"""Builds engines while their models serve: one `python -m headrace_engines build` at a time, at low priority."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.config.serving_plan import NOT_PUBLISHED, SLOWER_STATUS
from headrace.runtimes.processes.child_process import killed_by, signal_group

logger = logging.getLogger("headrace.builds")

BUILDER: tuple[str, ...] = (sys.executable, "-P", "-m", "headrace_engines", "build", "--progress")
# Serving has priority: a process of this niceness gets a tenth of the CPU time where both compete for a core.
_NICENESS = 10
# Time in seconds for a cancelled builder to remove its temporary files, before SIGKILL.
_GRACE_S = 5.0
_STOPPED = "engines are not built any more: see the server's log for the cause, then restart the server"
_TAIL_BYTES = 16 * 1024
_TAIL_LINES = 3
_MAX_REASON = 400
_MAX_PHASE = 60
PROGRESS = "progress"
"""First word of a builder's progress lines on standard output: "progress SHARE PHASE", share from 0 to 1."""
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"()]+[\\/])*")
_FRAME = re.compile("[\u2500-\u257f]")


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """One engine to build; equal orders give equal engines.

    Attributes:
        name: name of the model.
        version: version number.
        folder: folder of the model in a repository.
        target: runtime that loads the engine.
        digest: digest of everything that the engine is built from.
    """

    name: str
    version: str
    folder: Path
    target: str
    digest: str


@dataclass(eq=False, repr=False)
class EngineBuilds:
    """Queue of requested engine builds and their outcomes.

    A completed order is not built again, whatever its outcome, until it changes or is forgotten.

    Ownership: `_lock` guards everything. `on_end` is called without it, on the build thread.

    Attributes:
        command: builder command; the model's folder, version and target are appended.
        on_end: called with an order and its error ("" if it succeeded); not called for cancelled orders.
        on_progress: called with an order when its build begins and when its progress changes.
    """

    command: Sequence[str]
    on_end: Callable[[BuildOrder, str], None]
    on_progress: Callable[[BuildOrder], None] = lambda _order: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[BuildOrder] = []
        self._current: BuildOrder | None = None
        self._progress = ""  # progress of the current build as text
        self._share = 0.0  # completed share of the current build, 0 to 1
        self._process: subprocess.Popen[bytes] | None = None
        self._outcomes: dict[BuildOrder, str] = {}
        self._started = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._kill_timer: threading.Timer | None = None

    def start(self) -> None:
        """Start building; orders that arrive earlier are queued."""
        with self._lock:
            self._started = True
            self._ensure_thread()

    def set_orders(self, name: str, orders: Sequence[BuildOrder]) -> None:
        """Set the engines requested for a model; its other builds are cancelled."""
        with self._lock:
            self._waiting = [order for order in self._waiting if order.name != name or order in orders]
            if self._current is not None and self._current.name == name and self._current not in orders:
                self._cancel_current()
            self._outcomes = {o: failure for o, failure in self._outcomes.items() if o.name != name or o in orders}
            busy = {*self._waiting, self._current, *self._outcomes}
            new = [order for order in orders if order not in busy]
            if self._stopping:
                self._outcomes |= dict.fromkeys(new, _STOPPED)
                return
            self._waiting += new
            self._ensure_thread()
            self._changed.notify()

    def failure(self, order: BuildOrder) -> str | None:
        """Error of a completed order, "" if it succeeded; None while it is queued or running."""
        with self._lock:
            return self._outcomes.get(order)

    def forget(self, order: BuildOrder) -> None:
        """Drop the outcome of an order, so that it is built again if it is requested again."""
        with self._lock:
            self._outcomes.pop(order, None)

    def describe(self, order: BuildOrder, engine: str) -> str:
        """Describe the progress of an order that has not ended.

        Args:
            order: a requested order.
            engine: name of the engine, e.g. "TensorRT FP16".
        """
        with self._lock:
            if order in self._waiting:
                return f"{engine} is queued to be built"
            progress = f" ({self._progress})" if self._current == order and self._progress else ""
            return f"building {engine}{progress}, usually a minute or two"

    def quarter(self, order: BuildOrder) -> int:
        """Return the number of completed quarters of an order's build; 0 if it is not being built."""
        with self._lock:
            return int(4 * self._share) if self._current == order else 0

    def stop(self) -> None:
        """Cancel all builds and accept no new ones; returns at once, see `join`."""
        with self._lock:
            self._stopping = True
            self._waiting.clear()
            self._cancel_current()
            self._changed.notify()

    def join(self) -> bool:
        """Wait for the end of the builder after `stop`.

        Returns:
            False if the builder survives SIGKILL.
        """
        thread = self._thread
        if thread is not None:
            thread.join(2 * _GRACE_S)
        return thread is None or not thread.is_alive()

    # With the lock held

    def _ensure_thread(self) -> None:
        if self._started and self._waiting and self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._main, name="builds", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.error("no thread for engine builds (%s): they wait for the next load of a model", error)
                return
            self._thread = thread

    def _cancel_current(self) -> None:
        self._current = None
        process, self._process = self._process, None
        if process is not None:
            signal_group(process, signal.SIGTERM)
            self._kill_timer = threading.Timer(_GRACE_S, signal_group, (process, signal.SIGKILL))
            self._kill_timer.daemon = True
            self._kill_timer.start()

    # On the thread that builds

    def _main(self) -> None:
        try:
            while (order := self._next_order()) is not None:
                failure = self._build(order)
                self._settle(order, failure)
        except BaseException:
            logger.exception("engines are not built any more")
            self._abort()

    def _next_order(self) -> BuildOrder | None:
        with self._lock:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._current, self._progress, self._share = self._waiting.pop(0), "", 0.0
            return self._current

    def _settle(self, order: BuildOrder, failure: str) -> None:
        with self._lock:
            self._process = None
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            if self._current != order:
                return  # cancelled
            self._current = None
            self._outcomes[order] = failure
        self.on_end(order, failure)

    def _abort(self) -> None:
        with self._lock:
            self._stopping = True
            orders = [*([self._current] if self._current else []), *self._waiting]
            self._waiting.clear()
            self._cancel_current()
            self._outcomes |= dict.fromkeys(orders, _STOPPED)
        for order in orders:
            self.on_end(order, _STOPPED)

    def _build(self, order: BuildOrder) -> str:
        """Run the builder; returns its error, "" if it succeeded."""
        self.on_progress(order)
        command = [*self.command, str(order.folder), "--version", order.version, "--target", order.target]
        try:
            with tempfile.TemporaryFile() as output:
                # Its own process group, so that Ctrl-C reaches the server only. The same session: the scheduler applies
                # niceness within one session.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, process_group=0
                )
                _lower_priority(process)
                with self._lock:
                    self._process = process
                    if self._current != order:
                        self._cancel_current()
                with process:
                    for line in process.stdout or ():
                        self._read_progress(order, line)
                status = process.returncode
                reason = "" if status == 0 else _reason(status, output, order)
                return (
                    NOT_PUBLISHED + reason.rpartition("was not published: ")[2] if status == SLOWER_STATUS else reason
                )
        except OSError as error:
            return f"the builder cannot be started: {error.strerror}"

    def _read_progress(self, order: BuildOrder, line: bytes) -> None:
        """Read a line such as "progress 0.45 timing 8 rows"; other lines are ignored."""
        word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
        number, _, phase = rest.partition(" ")
        try:
            share = float(number) if word == PROGRESS else -1.0
        except ValueError:
            return
        if not 0 <= share <= 1:
            return
        phase = "".join(c for c in phase if c.isprintable())[:_MAX_PHASE]
        with self._lock:
            if self._current != order:
                return
            progress = f"{share:.0%}, {phase}" if phase else f"{share:.0%}"
            changed, self._progress, self._share = progress != self._progress, progress, share
        if changed:
            logger.debug("model %s version %s: engine build at %s", order.name, order.version, progress)
            self.on_progress(order)


def _lower_priority(process: subprocess.Popen[bytes]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    except OSError as error:
        logger.debug("a builder runs at normal priority: %s", error)


def _reason(status: int, output: IO[bytes], order: BuildOrder) -> str:
    """Return the last output lines of a failed builder, without paths of this machine."""
    if status < 0:
        return f"the builder was {killed_by(status)}"
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - _TAIL_BYTES, 0))
    lines = output.read().decode("utf-8", "replace").splitlines()
    messages = [line.strip() for line in lines if line.strip() and not _FRAME.search(line)]
    text = " ".join(messages[-_TAIL_LINES:]) or f"the builder ended with status {status} without output"
    text = _PATH.sub("", "".join(c if c.isprintable() else " " for c in text.replace(str(order.folder), order.name)))
    return text if len(text) <= _MAX_REASON else f"...{text[-_MAX_REASON:]}"
