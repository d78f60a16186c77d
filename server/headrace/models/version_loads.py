"""Loads one version: before it serves or on its first request, and again after each eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from headrace.config.documents import refuse
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.ledger import MemoryAccount
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.models.accounted_model import AccountedModel, file_id
from headrace.models.idle_tasks import IdleTasks
from headrace.models.length_measurement import LengthMeasurement
from headrace.models.measuring import MeasuringTurns
from headrace.models.warmup import (
    NO_LATENCIES,
    LatencyFile,
    LatencyMeasurement,
    Warmup,
    WarmupRunner,
    arrange_warmups,
    make_warmups,
    unmeasurable,
)
from headrace.runtimes.base import Execution

# Minimum time between two writes of the latency table of a version that is loaded on demand.
_WRITE_INTERVAL_NS = 60 * NS_PER_S


@dataclass(slots=True, eq=False)
class VersionLoads:
    """Loads of one version. They do not overlap: each method is called by the load that runs.

    Attributes:
        folder: the model's folder.
        file: file that serves the version.
        handle: handle of the version.
        open_model: reads the file and returns the model.
        find_latency_file: returns the stored latency table of the version; None if none is stored.
        measured: configuration with the largest batch on its device, for the measurement.
        limit_ns: maximum time of the measurement of the first load, in nanoseconds; 0 measures nothing.
        original: `file_id` of the file when the handle was created.
        turns: turns of measurements.
        idle_tasks: tests the batch sizes that are left while the server is idle.
        latency_file: stored latency table; None before the first load, or if none is stored.
        measurement: measurement of the first load; None before it.
        written_ns: time of the last write of the latency table, monotonic nanoseconds.
    """

    folder: ModelFolder
    file: Path
    handle: ModelHandle
    open_model: Callable[[], AccountedModel]
    find_latency_file: Callable[[], LatencyFile | None]
    measured: ModelConfig
    limit_ns: int
    original: tuple[int, int, int]
    turns: MeasuringTurns
    idle_tasks: IdleTasks
    latency_file: LatencyFile | None = None
    measurement: LatencyMeasurement | None = field(default=None, init=False)
    written_ns: int = field(default=0, init=False)
    _unproven: OutputMismatch | None = field(default=None, init=False)  # while requests run alone for the verdict

    def start(self, model: AccountedModel, warmups: list[Warmup]) -> None:
        """Start the instances of a version before it serves, and store its latency table.

        Args:
            model: the loaded model.
            warmups: warm-up requests.

        Raises:
            ConfigError: an instance failed to start; the model is closed.
        """
        self._serve(model)
        self._first_load(model, lambda: self.handle.start(self._first_runner(model, warmups)))
        if self.latency_file is not None:
            self.latency_file.write(self.handle.latency_table, self._idle_ns())

    def reopen(self) -> MemoryAccount:
        """Load an evicted version and return the account of its memory.

        Raises:
            NoRoom: it does not fit into memory.
            ConfigError: the file has changed since the handle was created, or cannot be loaded.
        """
        name, handle = self.folder.config.name, self.handle
        if file_id(self.file) != self.original:
            message = f"{self.file.name} has changed since the load"
            raise refuse(f"{name}/{handle.spec.version}", None, message, "load the model again")
        warmups = make_warmups(self.folder.config, self.folder.path)
        model = self.open_model()
        self._serve(model)
        if self.measurement is None:
            self._first_load(model, lambda: handle.restore(model, self._first_runner(model, warmups)))
        else:
            measurement = self._new_measurement(model, None)
            handle.restore(model, WarmupRunner(name, arrange_warmups(warmups, handle.layout), measurement))
            self._loaded(model)
        return model.account

    def _serve(self, model: AccountedModel) -> None:
        sampler = model.sampler
        if sampler is not None:
            sampler.on_taken = lambda: self.idle_tasks.set(self.handle, partial(self._prove, model))
            model.on_closed += [sampler.clear, lambda: self.handle.set_sampler(None)]
        model.on_closed.append(lambda: self.idle_tasks.set(self.handle, None))
        self._apply(model)

    def _apply(self, model: AccountedModel) -> None:
        """Serve as the proof of the batch sizes allows; metadata, explanation and metrics have the verdict."""
        handle, verdict = self.handle, model.verdict
        before, handle.batch_verdict = handle.batch_verdict, verdict
        if verdict.alone and verdict != before:
            self._unproven = OutputMismatch(f"batches are not proven: {verdict.reason}")
            handle.stop_batching(self._unproven)
        elif not verdict.alone and self._unproven is not None:
            handle.resume_batching(self._unproven)
            self._unproven = None
        parameters = {name: text for name, text in handle.spec.parameters.items() if name not in before.parameters()}
        handle.spec = replace(handle.spec, parameters=parameters | verdict.parameters())
        if model.prove is not None:
            # Rows of one request that runs alone and whole may influence each other.
            handle.set_sampler(None if verdict.alone else model.sampler)
            handle.row_differences = model.row_differences if model.sampler else None
        is_due = model.has_left or (model.sampler is not None and model.sampler.sample is not None)
        self.idle_tasks.set(handle, partial(self._prove, model) if is_due else None)

    def _prove(self, model: AccountedModel, execution: Execution, is_busy: Callable[[], bool]) -> None:
        """Test the sizes that are left, and a row of a batch, on the thread of an idle instance."""
        if model.prove is not None and model.prove(execution, is_busy):
            self.handle.reopen_executions()
        self._apply(model)

    def _first_load(self, model: AccountedModel, start: Callable[[], object]) -> None:
        """Start the instances for the first time; their times are stored if no other load has worked meanwhile."""
        if self.limit_ns and (model.devices or not unmeasurable(self.measured)):
            with self.turns.measuring() as turn:
                start()
            if not turn.is_quiet:
                self.latency_file = None
        else:
            with self.turns.working():
                start()
        self._loaded(model)

    def _loaded(self, model: AccountedModel) -> None:
        if self.latency_file is not None:
            model.on_closed.append(self._write)

    def _write(self) -> None:
        """Store the latency table when the model is closed; seldom for a version that is loaded and evicted all the time."""
        now_ns = monotonic_ns()
        if self.latency_file is None or (not self.limit_ns and now_ns < self.written_ns + _WRITE_INTERVAL_NS):
            return
        self.written_ns = now_ns
        self.latency_file.write(self.handle.latency_table, self._idle_ns())

    def _idle_ns(self) -> int:
        return 0 if self.measurement is None else self.measurement.idle_ns

    def _new_measurement(self, model: AccountedModel, latency_file: LatencyFile | None) -> LatencyMeasurement:
        stored = NO_LATENCIES if latency_file is None else latency_file.read()
        table = self.handle.latency_table
        return LatencyMeasurement(self.measured, model, model.instances, table, self.limit_ns, stored=stored)

    def _first_runner(self, model: AccountedModel, warmups: list[Warmup]) -> WarmupRunner:
        """Return what prepares the instances of the first load: warm-up, then measurement by rows, and by length with `pad`."""
        self.latency_file = self.find_latency_file()
        self.measurement = measurement = self._new_measurement(model, self.latency_file)
        layout = self.handle.layout
        measure: Callable[[Execution], None] = measurement
        if isinstance(layout, PaddedLayout):
            layout.always = bool(model.devices)
            max_rows = self.handle.policy.batch.max_rows
            by_length = LengthMeasurement(self.handle.spec, layout, max_rows, self.limit_ns)

            def measure_both(execution: Execution) -> None:
                measurement(execution)
                by_length(execution)

            measure = measure_both

        return WarmupRunner(self.folder.config.name, arrange_warmups(warmups, layout), measure)
