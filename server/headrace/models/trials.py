"""First load and first run of a model file in a helper process, so that a crash or a hang there does not end the server.

Each thread that loads models has a helper, `python -m headrace.models.trials PARENT CONTROL`, which tries them one after the
other, until one ends it. It has released a model before the server loads it. Outcomes are stored in the state folder:
`headrace.config.tried_files`.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace_model.channel import Messages
from headrace_model.process import exit_process, limit_memory

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.config.ragged_rules import is_ragged
from headrace.config.serving_plan import ServingPlan
from headrace.config.tried_files import TrialOutcome, TriedFiles
from headrace.core.cancellation import current_cancellation
from headrace.core.clock import NS_PER_S
from headrace.core.errors import ConfigError, Finding
from headrace.core.heap import trim_heap
from headrace.core.ledger import MemoryAccount, NoRoom, format_bytes
from headrace.inference.pipelines.execution import steps_of
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.models.accounted_model import AccountedModel, free_bytes
from headrace.models.warmup import LatencyMeasurement, WarmupRunner, machine_of, make_warmups
from headrace.runtimes.isolated.backend import memory_terms
from headrace.runtimes.isolated.child import (
    exit_on_error,
    inherited_sockets,
    load_failure,
    load_model,
    memory_limit_reached,
)
from headrace.runtimes.processes.child_process import ChildProcess, Message, ProcessReader, start_process

logger = logging.getLogger("headrace.trials")

COMMAND = (sys.executable, "-P", "-m", "headrace.models.trials")
# The helper imports its libraries in this time, also on a busy machine.
_START_LIMIT_S = 60.0
# A process whose socket is closed gets this time to end before it is killed.
_EXIT_S = 1.0
# A server measures each model for longer before it serves it; a few runs show whether it fails.
_MEASURE_S = 0.02


def trial_order(
    folder: ModelFolder, max_rows: int, backend: Mapping[str, object], account: MemoryAccount | None
) -> Message:
    """Return the request for the helper: a file as the server is about to load it.

    Args:
        folder: the model's folder.
        max_rows: largest batch on the device.
        backend: `factory`, `file`, `instances` and `parameters` of the load; see `headrace.runtimes.isolated.child.load_model`.
        account: of GPU memory; None for a backend without one.
    """
    config = folder.config.model_copy(update={"max_batch_size": max_rows})
    return {
        **backend,
        "memory": None if account is None else memory_terms(account),
        # The CUDA driver reserves more than it uses, so only the CPU's memory is limited.
        "memory_bytes": 0 if account is not None else free_bytes() or 0,
        "config": config.model_dump_json(),
        "labels": folder.labels,
        "folder": str(folder.path),
    }


class _Helper:
    """A helper process; used by the thread that has started it, and killed by any other."""

    def __init__(self) -> None:
        self.child: ChildProcess  # the process
        self.child, _ = start_process(COMMAND, ())
        self.is_fresh = True  # it has not tried any model yet
        self._reader = ProcessReader(self.child, _log_message, lambda text: logger.debug("helper: %s", text))

    def listen(self, limit_s: float) -> Message | None:
        """Return the next answer; None if the process has ended, or was killed at the limit."""
        try:
            answer = self._reader.listen(limit_s)
        except TimeoutError:
            self.child.kill(f"it did not end within {limit_s:g} s")
            answer = self._reader.listen()
        if answer is None:  # it has a status of its own, unless it only closed its socket
            self._reader.wait_end(_EXIT_S)
        return answer

    def try_model(self, message: Message, limit_s: float) -> Message | None:
        """Send a request and return its answer, as `listen`."""
        try:
            self.child.control.send(message)
        except OSError:
            return None
        with current_cancellation().calling(lambda: self.child.kill("the load was cancelled")):
            answer = self.listen(limit_s)
        self.is_fresh = False
        return answer

    def end(self) -> str:
        """End the process and return the cause of its end."""
        self.child.signal(signal.SIGKILL)
        cause = self.child.reap()
        self._reader.drain()
        self._reader.__exit__()
        self.child.control.close()
        return cause


def _log_message(message: Message) -> None:
    name, level, text = message["log"]
    logging.getLogger(name).log(min(level, logging.INFO), "%s", text)


class ModelTrials:
    """Tries the files that have not run on this machine. Any thread may call any method.

    Ownership: each thread has a helper of its own, in `_local`. `_lock` guards `_helpers`, all of them, and `_stopping`.

    Args:
        state: state folder with the outcomes of earlier trials.
        limit_s: time limit of a trial in seconds.
    """

    def __init__(self, state: Path, limit_s: float) -> None:
        self._files = TriedFiles(state)
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._local = threading.local()
        self._helpers: set[_Helper] = set()
        self._stopping = False

    def check(self, config: ModelConfig, plan: ServingPlan, digest: str, order: Callable[[], Message]) -> None:
        """Try a file, unless its record says how a trial ended.

        Args:
            config: the complete configuration.
            plan: the file and its runtime.
            digest: of the file.
            order: returns the request for the helper; see `trial_order`.

        Raises:
            NoRoom: it does not fit into the memory of a GPU.
            ConfigError: the file ends its process, or exceeds the limit of time or memory.
        """
        key, name = self._key(config, plan, digest), config.name
        trial = self._files.read(key)
        if trial is None or 0 < trial.limit_s < self._limit_s:
            trial = self._try(name, order())
            if trial is not None:
                self._files.write(key, name, trial)
        if trial is not None and trial.failure:
            cure = "check the file and the libraries of its runtime; `headrace validate` tries it again"
            raise ConfigError([Finding(name, None, f"{plan.file.name} {trial.failure}", cure)])

    def end_helper(self) -> str:
        """End the helper process of this thread, if there is one, and return the cause of its end."""
        helper: _Helper | None = getattr(self._local, "helper", None)
        self._local.helper = None
        if helper is None:
            return ""
        with self._lock:
            self._helpers.discard(helper)
        return helper.end()

    def stop(self) -> None:
        """End the trials that run, and refuse all others."""
        with self._lock:
            self._stopping = True
            for helper in self._helpers:
                helper.child.kill("the server is stopping")

    def _key(self, config: ModelConfig, plan: ServingPlan, digest: str) -> str:
        return self._files.key(digest, machine_of(plan.runtime), config.parameters)

    def _try(self, name: str, order: Message) -> TrialOutcome | None:
        """Run a trial; return None if it says nothing, and the server loads the model as it is."""
        while True:
            helper = getattr(self._local, "helper", None) or self._start()
            if helper is None:
                return None
            is_fresh = helper.is_fresh
            answer = helper.try_model(order, self._limit_s)
            if answer is not None:
                outcome = _outcome(name, answer)
                if outcome is None:  # also where a GPU takes one process only
                    text = "model %s runs for the first time in the server itself: the helper process answered %s"
                    logger.info(text, name, answer)
                return outcome
            is_late, process = bool(helper.child.blame), helper.child.process
            cause = self.end_helper()
            current_cancellation().check()
            if self._stopping:
                raise ConfigError([Finding(name, None, "was not loaded: the server is stopping")])
            if is_late:
                text = f"was not loaded within {self._limit_s:g} s in a helper process"
                return TrialOutcome(f"{text}, the limit of --trial-limit-s", self._limit_s)
            if process.returncode == -signal.SIGKILL:
                text = "model %s runs for the first time in the server itself: its helper process was %s"
                logger.warning(text, name, cause)
                return None
            if is_fresh:
                return TrialOutcome(f"ends its process when it is loaded and first run: {cause}")
            # A model before may have damaged the helper: a new one decides.

    def _start(self) -> _Helper | None:
        """Start a helper; return None if the system starts none."""
        try:
            helper = _Helper()
        except OSError as error:
            logger.warning("models run for the first time in the server itself: no helper process (%s)", error.strerror)
            return None
        self._local.helper = helper
        with self._lock:
            self._helpers.add(helper)
            if self._stopping:
                helper.child.kill("the server is stopping")
        if helper.listen(_START_LIMIT_S) is not None or self._stopping:
            return helper
        logger.warning("models run for the first time in the server itself: the helper process %s", self.end_helper())
        return None


class OwnTrials(ModelTrials):
    """Runs files in this process, which is not a server, and records those that have run.

    Args:
        state: state folder.
    """

    def __init__(self, state: Path) -> None:
        super().__init__(state, 0.0)
        self._loaded: list[tuple[str, str]] = []

    def check(self, config: ModelConfig, plan: ServingPlan, digest: str, order: Callable[[], Message]) -> None:
        """Let the file be loaded at once."""
        self._loaded.append((self._key(config, plan, digest), config.name))

    def record(self) -> None:
        """Record that the files run."""
        for key, name in self._loaded:
            self._files.write(key, name)


def _outcome(name: str, answer: Message) -> TrialOutcome | None:
    """Return the outcome of a trial that its helper survived.

    Raises:
        NoRoom: the model does not fit into the memory of a GPU.
        ConfigError: it needs more memory than is free.
    """
    if "no_room" in answer:
        raise NoRoom(*answer["no_room"])
    if "limit_bytes" in answer:
        text = f"needs more memory than is free ({format_bytes(answer['limit_bytes'])})"
        raise ConfigError([Finding(name, None, text, "use a smaller model or batch, or a machine with more memory")])
    # Any other error is found, and reported, by the load that follows.
    return TrialOutcome() if "loaded" in answer else None


# In the helper process


def _run(control: Messages) -> None:
    """Try the models that the server names, until it closes the control socket."""
    control.send({"described": []})
    while True:
        try:
            order = control.receive()
        except EOFError:
            return
        limit_memory(order["memory_bytes"])
        answer = _try_model(order)
        gc.collect()
        trim_heap()
        control.send(answer)


def _try_model(order: Message) -> Message:
    config = ModelConfig.model_validate_json(order["config"])
    try:
        model, account = load_model(order, order["instances"])
        steps = steps_of(config, {name: tuple(texts) for name, texts in order["labels"].items()})
        accounted = AccountedModel(model, account, order["instances"], frozenset(), (), config, steps)
        try:
            _first_run(accounted, config, Path(order["folder"]))
        finally:
            accounted.close()
    except Exception as error:
        limit_bytes = memory_limit_reached(error)
        if limit_bytes:
            return {"broken": type(error).__name__, "limit_bytes": limit_bytes}
        return load_failure(error, order["file"])
    return {"loaded": []}


def _first_run(model: AccountedModel, config: ModelConfig, folder: Path) -> None:
    """Run the warm-up requests and a short measurement on the first instance, as a server does before it serves."""
    measure: Callable[[Any], None] = LatencyMeasurement(config, model, 1, LatencyTable(), int(_MEASURE_S * NS_PER_S))
    # Requests of different shapes are arranged by the scheduler; the load itself has run the model once.
    is_joined = is_ragged(config) or config.pad is not None
    execution = model.execution(0)
    try:
        WarmupRunner(config.name, [] if is_joined else make_warmups(config, folder), measure)(execution)
    finally:
        execution.close()


def main(arguments: list[str]) -> None:
    """Run the helper process."""
    sockets = inherited_sockets(arguments)
    if sockets:
        exit_on_error(_run, Messages(sockets[0]))
        exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1:])
