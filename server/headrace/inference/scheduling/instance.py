"""Instances of a model version: threads that open an execution, warm it up and serve batches.

`ModelInstances` starts, evicts, restores and ends the instances of one version together with their model. A failed instance is
restarted after a pause, unless its device has failed permanently (`ExecutionLost`).

    start -> serving -> evict -> evicted -> restore -> serving -> close
                 |                                       ^
                 +-------------- close ------------------+--> closed

While a version is evicted its model is closed and no instance pulls from the queue; queued requests wait for `restore`.

`RestartTimers` doubles the pause of an instance with each failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass
from typing import Protocol

from headrace.core.clock import NS_PER_S, Clock
from headrace.core.completion import settle_all
from headrace.core.errors import ConfigError, Finding, HeadraceError, ModelFailed, Unavailable
from headrace.core.request import Probe
from headrace.inference.scheduling.admission import InFlightWork
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.runtimes.base import Execution, ExecutionLost, HasProcessStatus, LoadedModel, ProcessStatus

logger = logging.getLogger("headrace.instance")

# A batch that takes longer runs on; its instance keeps its execution.
_REOPEN_S = 10.0

WarmUp = Callable[[Execution], None]
OnDeath = Callable[[BaseException], None]


class BatchRunner(Protocol):
    """Runs batches on an execution: `SerialRunner` or `OverlappedRunner`."""

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty and all are settled; called on the instance's thread."""

    def give_up(self, error: Exception) -> None:
        """Settle every running request with `error`, because the backend does not return; any thread may call."""

    def end(self, error: Exception) -> None:
        """End the instance with `error` before it pulls another batch, if it can; any thread may call."""

    def in_flight_work(self) -> InFlightWork:
        """Return the running batches; any thread may call."""


MakeRunner = Callable[[Execution, OnDeath], BatchRunner]


@dataclass(eq=False, repr=False)
class Instance:
    """Serves one model version on its own thread until the scheduler is closed and empty.

    Attributes:
        name: name of the thread, for logs and profilers.
        open_execution: creates the execution, on the instance's thread.
        make_runner: creates the runner for the execution. A runner with additional threads calls the second argument from a
            thread that fails.
        on_exit: callback for the end of the instance, with its error or None; called once, from the first thread that ends.
        opened: done once the execution is open and warm; holds the error if that failed.
    """

    name: str
    open_execution: Callable[[], Execution]
    make_runner: MakeRunner
    on_exit: Callable[[BaseException | None], None]

    def __post_init__(self) -> None:
        self._runner: BatchRunner | None = None
        self._lock = threading.Lock()  # guards _dead; `on_exit` is called under it
        self._dead = False
        self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
        self._warm_up: WarmUp | None = None
        self.opened: Future[None] = Future()

    def start(self, warm_up: WarmUp | None = None) -> None:
        """Start the thread; if the system starts no more threads, the instance fails as by an error on its thread.

        Args:
            warm_up: called on the thread with the execution, before the first batch is pulled.
        """
        self._warm_up = warm_up
        try:
            self._thread.start()
        except RuntimeError as error:
            cure = "lower the count of instance_group, or raise the limit of threads"
            self._died(Unavailable(f"the system starts no more threads ({error}): {cure}"))

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the end of the thread; False if it still runs after `timeout_s` seconds (None: no limit)."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def dead(self) -> bool:
        """True once the instance has failed."""
        return self._dead

    @property
    def ended_normally(self) -> bool:
        """True once the thread has ended without a failure."""
        return not self._dead and not self._thread.is_alive()

    def give_up(self, error: Exception) -> None:
        """Settle every running request with `error`, because the backend does not return; any thread may call."""
        runner = self._runner
        if runner is not None:
            runner.give_up(error)

    def end(self, error: Exception) -> None:
        """End with `error` before another batch; any thread may call."""
        runner = self._runner
        if runner is not None:
            runner.end(error)

    @property
    def in_flight_work(self) -> InFlightWork | None:
        """The running batches; None before the instance is open and after its end."""
        runner = self._runner
        return None if runner is None or self._dead else runner.in_flight_work()

    def _main(self) -> None:
        try:
            execution = self.open_execution()
            try:
                self._prepare(execution)
                self._runner = runner = self.make_runner(execution, self._died)
                self.opened.set_result(None)
                runner.serve()
            finally:
                execution.close()
        except BaseException as error:  # every failure of the thread is reported
            self._died(error)
        else:
            self.on_exit(None)
        finally:
            self._runner = None  # breaks a reference cycle, so that the memory is freed at once

    def _died(self, cause: BaseException) -> None:
        """Report the failure once, and settle the running requests on every call: more may have been pulled meanwhile."""
        # First the count, then the errors: a caller that gets the error must find the model not ready.
        try:
            with self._lock:
                first, self._dead = not self._dead, True
                if first:
                    self.on_exit(cause)
        finally:
            if not self.opened.done():
                self.opened.set_exception(cause)
            else:
                self.give_up(ModelFailed("the instance that ran the request died: retry, and see the server log"))
                if first:
                    logger.error("instance %s died", self.name, exc_info=cause)

    def _prepare(self, execution: Execution) -> None:
        warm_up, self._warm_up = self._warm_up, None  # its arrays may be large
        if warm_up is not None:
            warm_up(execution)


def in_flight_work(instances: list[Instance]) -> list[InFlightWork]:
    """Return the running batches of each live instance."""
    return [work for instance in list(instances) if (work := instance.in_flight_work) is not None]


model_logger = logging.getLogger("headrace.model")

MakeNamedRunner = Callable[[str, Execution, OnDeath], BatchRunner]


@dataclass(eq=False, repr=False)
class ModelInstances:
    """Starts, evicts, restarts and ends the instances of one model version.

    Ownership: `_lifecycle_lock` is held while instances start, are evicted or end; `instances`, `_model`, `_warm_up` and
    `_closed` are written under it. `_lock` guards `alive`, `_live_indices`, `_began_ns`, `_opening`, `_startup_deaths` and
    `_ending`, for short sections. Lock order: `_lifecycle_lock`, `_lock`, the scheduler's lock. `evicted`, `alive` and
    `isolated` are read without a lock.

    Attributes:
        name: name of the version for threads and messages, e.g. "resnet50/1".
        size: number of instances.
        model: the loaded model; owned by this object, closed with it. None: the version begins evicted.
        scheduler: source of batches.
        instances: filled by this object; any thread may read it.
        make_runner: creates the runner of a named instance.
        on_dead: callback with the number of live instances after a failure; called from the thread that failed.
        on_back: callback with the number of live instances after a restart; called from a timer's thread.
        clock: returns monotonic nanoseconds.
        alive: number of live instances.
        restarts: number of restarted instances.
        evicted: True while the model is closed until `restore`.
        isolated: `LoadedModel.process` of the model.
    """

    name: str
    size: int
    model: InitVar[LoadedModel | None]
    scheduler: Scheduler
    instances: list[Instance]
    make_runner: MakeNamedRunner
    on_dead: Callable[[int], None]
    on_back: Callable[[int], None]
    clock: Clock

    def __post_init__(self, model: LoadedModel | None) -> None:
        self._model: LoadedModel | None = model
        self.isolated: HasProcessStatus | None = None if model is None else model.process
        self._restarts = RestartTimers(self._restart)
        self._warm_up: WarmUp | None = None
        self._lifecycle_lock = threading.Lock()
        self._lock = threading.Lock()
        self._live_indices: set[int] = set()
        self._began_ns: dict[int, int] = {}
        self._opening = True  # failures are handled by `_start` meanwhile
        self._startup_deaths: dict[int, BaseException] = {}  # failures while opening, by index
        self._reopening: threading.Thread | None = None
        self._ending = False
        self._closed = False
        self.evicted = model is None
        self.alive = 0 if self.evicted else self.size
        self.restarts = 0
        if self.evicted:
            self.scheduler.pause()

    def start(self, warm_up: WarmUp | None) -> None:
        """Start the instances and wait until each is open and warm.

        Raises:
            ConfigError: an instance failed to start; the others have ended and the model is closed.
        """
        with self._lifecycle_lock:
            self._start(warm_up)

    def evict(self, timeout_s: float) -> bool:
        """End the instances after their running batches and close the model; a no-op if it is evicted already.

        Returns:
            False if the version is closed, has failed, or still ran a batch after `timeout_s`: it is served as before.
        """
        if not self._lifecycle_lock.acquire(timeout=timeout_s):
            return False
        try:
            if self._closed or self.evicted or not self.alive:
                return self.evicted
            # Set before any instance ends: a caller that queues a request from now on must see that no instance may pull it.
            self.evicted = True
            self.scheduler.pause()
            ended = self._join(self.instances, timeout_s)
            if not ended or not self.alive:
                self.evicted = False
                self.scheduler.resume()
                self._replace_ended()
                return False
            self._close_model()
            return True
        finally:
            self._lifecycle_lock.release()

    def restore(self, model: LoadedModel, warm_up: WarmUp | None) -> bool:
        """Start the instances again after `evict`.

        Args:
            model: the loaded model; owned by this object.
            warm_up: as in `start`.

        Returns:
            False if the version is closed or not evicted; `model` is closed then.

        Raises:
            ConfigError: an instance failed to start; the version stays evicted, and the model is closed.
        """
        with self._lifecycle_lock:
            if self._closed or not self.evicted:
                model.close()
                return False
            self._model, self.isolated = model, model.process
            self.size = len(model.devices) or self.size  # fewer, if a GPU has failed meanwhile
            self.scheduler.resume()
            self._start(warm_up)
            self.evicted = False
        return True

    def reopen(self) -> None:
        """Replace the executions of the loaded model by new ones; returns at once, and no batch begins on the old ones.

        Any thread may call, one of an instance, too. Requests wait until the running batches have ended.
        """
        self.scheduler.pause()
        self._reopening = thread = threading.Thread(target=self._reopen, name=f"{self.name} executions", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._reopening = None
            self.scheduler.resume()
            model_logger.error("model %s keeps its executions, load it again: no thread (%s)", self.name, error)

    def _reopen(self) -> None:
        with self._lifecycle_lock:
            if not self._closed and not self.evicted:
                self._join(self.instances, _REOPEN_S)
                self.scheduler.resume()
                self._replace_ended(self._warm_up)

    def end_on(self, gpus: Collection[int]) -> None:
        """End the instances on GPUs that have failed; the others take the queue. Any thread may call."""
        model = self._model
        devices = () if model is None else model.devices
        for instance, gpu in zip(list(self.instances), devices, strict=False):
            if gpu in gpus:
                instance.end(ExecutionLost(f"GPU {gpu} has failed"))

    @property
    def process_status(self) -> ProcessStatus | None:
        """Status of the child process of the model; None without one, and while the model is evicted."""
        isolated = self.isolated
        return None if isolated is None else isolated.process_status

    def probes(self) -> Sequence[Probe]:
        """Start the readiness checks of the model's code; empty if it has none."""
        model = self._model
        return () if model is None else model.probes()

    def admit(self) -> None:
        """Reject requests while the child process of the model does not run.

        Raises:
            Unavailable: the process does not run and will not restart soon.
        """
        process_status = self.process_status
        if process_status is not None and process_status.refusal:
            raise Unavailable(process_status.refusal)

    def disable_death_callbacks(self) -> None:
        """Disable death callbacks during shutdown."""
        with self._lock:
            self._ending = True
        self._restarts.stop()

    def close(self, timeout_s: float | None, error: HeadraceError) -> bool:
        """Wait for the end of the instances and close the model; the scheduler must be closed.

        Args:
            timeout_s: limit of the wait in seconds; None for no limit.
            error: error of requests that are not settled by then.

        Returns:
            False if a batch still ran after `timeout_s`: its requests are settled with `error`, and its memory is not freed.
        """
        deadline_ns = None if timeout_s is None else self.clock() + int(timeout_s * NS_PER_S)
        if not self._lifecycle_lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._abandon(error)
            return False
        try:
            left_s = None if deadline_ns is None else max((deadline_ns - self.clock()) / NS_PER_S, 0.0)
            if not self._join(self.instances, left_s):
                self._abandon(error)
                return False
            if not self._closed:
                self._closed = True
                self.evicted = False
                self._close_model()
        finally:
            self._lifecycle_lock.release()
        if self._reopening is not None:
            self._reopening.join()
        self.give_up(error)  # requests in the queue of an evicted version
        return True

    def give_up(self, error: HeadraceError) -> None:
        """Accept no more requests, and settle the queued ones with `error`."""
        settle_all([(entry.completion, error) for entry in self.scheduler.fail(error)])

    def all_dead_error(self) -> Unavailable:
        """Error for callers when no instance is alive."""
        return Unavailable(
            f"all instances of model '{self.name.rpartition('/')[0]}' have died: retry later, and see the server log"
        )

    # With `_lifecycle_lock` held

    def _start(self, warm_up: WarmUp | None) -> None:
        instances = [self._instance(index) for index in range(self.size)]
        with self._lock:
            self.alive, self._opening, self._startup_deaths = self.size, True, {}
            self._live_indices = set(range(self.size))
            self._began_ns = dict.fromkeys(self._live_indices, self.clock())
        self.instances[:], self._warm_up = instances, warm_up
        self.scheduler.set_instances(self.size)
        for instance in instances:
            instance.start(warm_up)
        failures = [error for instance in instances if (error := instance.opened.exception()) is not None]
        if failures:
            self.scheduler.pause()
            self._join(instances, None)
            self._close_model()
            raise self._startup_error(failures[0]) from failures[0]
        with self._lock:
            self._opening, remaining, notify = False, self.alive, not self._ending
        if remaining < self.size:
            self._report_deaths(remaining, notify)
        for index, cause in self._startup_deaths.items():
            self._schedule_restart(index, cause)

    def _close_model(self) -> None:
        """Close the model, once all instances have ended."""
        with self._lock:
            self.alive = 0
            self._live_indices = set()
        self.instances.clear()  # breaks a reference cycle, so that the memory is freed at once
        self._warm_up = None
        model, self._model, self.isolated = self._model, None, None
        if model is not None:
            model.close()

    def _replace_ended(self, warm_up: WarmUp | None = None) -> None:
        """Start the instances again that ended for new executions, or for an eviction that failed."""
        for index, instance in enumerate(self.instances):
            if instance.ended_normally:
                self.instances[index] = replacement = self._instance(index)
                replacement.start(warm_up)

    def _join(self, instances: Sequence[Instance], timeout_s: float | None) -> bool:
        deadline_ns = None if timeout_s is None else self.clock() + int(timeout_s * NS_PER_S)
        ended = True
        for instance in instances:
            left_s = None if deadline_ns is None else max((deadline_ns - self.clock()) / NS_PER_S, 0.0)
            ended = instance.join(left_s) and ended
        return ended

    # From any thread

    def _instance(self, index: int) -> Instance:
        model, name = self._model, f"{self.name}#{index}"
        assert model is not None, "instances are created only while a model is loaded"
        return Instance(
            name=name,
            open_execution=lambda: model.execution(index),
            make_runner=lambda execution, on_death: self.make_runner(name, execution, on_death),
            on_exit=lambda cause: self._instance_ended(index, cause),
        )

    def _instance_ended(self, index: int, cause: BaseException | None) -> None:
        if cause is None:
            return
        with self._lock:
            if index not in self._live_indices:
                return  # a restart that failed, which `_restart_instance` handles
            self._live_indices.discard(index)
            self.alive -= 1
            remaining, notify, opening = self.alive, not self._ending, self._opening
            if opening:
                self._startup_deaths[index] = cause
            uptime_s = (self.clock() - self._began_ns[index]) / NS_PER_S
        self.scheduler.set_instances(remaining)
        if not opening:
            self._report_deaths(remaining, notify)
            self._schedule_restart(index, cause, uptime_s)

    def _schedule_restart(self, index: int, cause: BaseException | None, uptime_s: float = 0.0) -> None:
        name = f"{self.name}#{index}"
        if isinstance(cause, ExecutionLost):
            model_logger.error(
                "instance %s is not restarted: its device has failed permanently, until the server is restarted", name
            )
            return
        pause_s = self._restarts.schedule(name, index, uptime_s)
        if pause_s is not None:
            model_logger.warning("instance %s restarts in %g s", name, pause_s)

    def _restart(self, index: int) -> None:
        """Restart a failed instance; called on a timer's thread."""
        try:
            with self._lifecycle_lock:
                self._restart_instance(index)
        except Exception as error:  # for example no more threads: retried later
            model_logger.error("instance %s#%d could not be restarted, retrying", self.name, index, exc_info=error)
            self._schedule_restart(index, None)

    def _restart_instance(self, index: int) -> None:
        with self._lock:
            # Evicted, closed, or restarted meanwhile.
            if self._ending or self.evicted or index in self._live_indices or not self.instances:
                return
        if not self.instances[index].join(0):
            self._schedule_restart(index, None)  # the failed thread still holds the memory that the next one needs
            return
        self.instances[index] = replacement = self._instance(index)
        with self._lock:
            if self._ending:
                return
            self.scheduler.reopen()  # under the lock, so that it cannot follow a `close`
        replacement.start(self._warm_up)
        error = replacement.opened.exception()
        with self._lock:
            is_back = error is None and not replacement.dead
            if is_back:
                self._live_indices.add(index)
                self._began_ns[index] = self.clock()
                self.alive += 1
                self.restarts += 1
            live, notify = self.alive, not self._ending
        if is_back:
            self.scheduler.set_instances(live)
            if notify:
                self.on_back(live)
            return
        if not live:
            self.give_up(self.all_dead_error())
        self._schedule_restart(index, error)

    def _report_deaths(self, remaining: int, notify: bool) -> None:
        try:
            if notify:
                self.on_dead(remaining)
        finally:
            if remaining == 0:
                self.give_up(self.all_dead_error())

    def _abandon(self, error: HeadraceError) -> None:
        self.give_up(error)
        for instance in self.instances:
            instance.give_up(error)

    def _startup_error(self, cause: BaseException) -> ConfigError:
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, HeadraceError):
            return ConfigError([Finding(self.name, None, f"an instance could not be started: {cause}")])
        # The message of a backend may hold paths, so only the log gets it.
        model_logger.error("an instance of %s could not be started", self.name, exc_info=cause)
        cure = "see the server log for the cause"
        message = f"an instance could not be started ({type(cause).__name__})"
        return ConfigError([Finding(self.name, None, message, cure)])


FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartTimers:
    """Timers of the restarts of failed instances.

    Ownership: `_lock` guards every attribute; no callback runs under it.

    Args:
        restart: callback with the index of an instance, called on a timer's thread; must not raise.
    """

    def __init__(self, restart: Callable[[int], None]) -> None:
        self._restart = restart
        self._lock = threading.Lock()
        self._pauses_s: dict[int, float] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._stopped = False

    def schedule(self, name: str, index: int, uptime_s: float) -> float | None:
        """Start the timer of a failed instance; each pause is twice the one before, up to `LONGEST_PAUSE_S`.

        Args:
            name: name of the instance, for the timer's thread.
            index: index of the instance.
            uptime_s: seconds from its start to its failure; above `LONGEST_PAUSE_S` the pauses start again.

        Returns:
            The pause in seconds; None if there is no restart: `stop` was called, or the system starts no more threads.
        """
        with self._lock:
            if self._stopped:
                return None
            before_s = 0.0 if uptime_s > LONGEST_PAUSE_S else self._pauses_s.get(index, 0.0)
            pause_s = self._pauses_s[index] = min(2 * before_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            timer = self._timers[index] = threading.Timer(pause_s, self._restart, (index,))
            timer.name = f"restart of {name}"
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError as error:
                logger.error("instance %s is not restarted (%s): load the model again", name, error)
                return None
            return pause_s

    def stop(self) -> None:
        """Cancel all timers; a restart that is running now is not interrupted."""
        with self._lock:
            self._stopped = True
            timers = list(self._timers.values())
            self._timers.clear()
        for timer in timers:
            timer.cancel()
