"""The control thread: brings the served models in line with the requested ones at start, on request and as folders change.

It starts loads, which run side by side on threads of their own, and never waits for one: an unload ends the loads of its model.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config.documents import Document
from headrace.config.model_config import name_problem
from headrace.config.triton_json import read_config_json
from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import (
    Aborted,
    BadRequest,
    Conflict,
    Forbidden,
    HeadraceError,
    NotFound,
    Unavailable,
)
from headrace.core.threads import start_thread
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models import folders
from headrace.models.builds import BUILDER, EngineBuilds
from headrace.models.command_queue import STOPPING, Command
from headrace.models.control_policy import ControlPolicy, ModelSelection
from headrace.models.deployment import Deployments, ModelSource
from headrace.models.load_queue import LoadQueue, OnEnd
from headrace.models.loader import Loader
from headrace.models.pipelines import called_models, in_load_order
from headrace.models.registry import Registry, State
from headrace.models.stores.sync import RepositoryStores
from headrace.models.uploads import PrivateFolder, check_files
from headrace.models.version_closer import VersionCloser
from headrace.models.watcher import Watcher
from headrace.python.environments import EnvironmentPending

logger = logging.getLogger("headrace.control")

_NOT_LOADED = "not loaded"
# At start, models that are still being copied delay the others by at most this many settle times.
_START_SETTLES = 3
# Between model and version in the key of a load on demand; no name of a model has it.
_ON_DEMAND = "/"
# Loads that are cancelled at the end close what they have loaded; one that hangs in a library ends with the process.
_LOADS_STOP_S = 2.0
# A request to a store that does not answer takes longer; its thread ends with the process.
_STORES_STOP_S = 2.0


@dataclass(eq=False, repr=False)
class Reconciler:
    """The control thread: starts loads at start, runs load and unload commands or watches folders, and closes all models at the
    end.

    `load` and `unload` are called on the event loop, `start` and `stop` by the server. Ownership: `requested` and
    `_pending` are changed within `Deployments.changing`; everything else belongs to the control thread.

    Attributes:
        selection: the models to serve.
        loader: creates handles.
        registry: publishes handles.
        on_loaded: called from the control thread after the initial load, with an error if it failed as a whole. Called again
            with the error that ends the control thread, if there is one.
        control: policy for changes while the server runs.
        builder: command that builds engines, without the model's folder.
        stores: repositories that mirror a store; None without any.
        clock: returns monotonic nanoseconds, for scans and the settle time.
        requested: by model that a client has loaded or unloaded: its configuration in the request, None for its own, and whether
            it had files; None if it is unloaded. Set before `start`, it takes the place of such requests.
        on_requested: called after a change of `requested`, on the thread that has made it.
    """

    selection: ModelSelection
    loader: Loader
    registry: Registry
    on_loaded: Callable[[BaseException | None], object]
    control: InitVar[ControlPolicy | None] = None
    builder: InitVar[Sequence[str]] = BUILDER
    stores: RepositoryStores | None = None
    clock: Clock = monotonic_ns

    def __post_init__(self, control: ControlPolicy | None, builder: Sequence[str]) -> None:
        self._control = control or ControlPolicy()
        self._gpu_model_cache = self.loader.gpu_model_cache
        self._commands = self.loader.commands
        self._closer = VersionCloser(self.registry, self._gpu_model_cache.remove)
        if self.loader.state is not None:
            builder = (*builder, "--state-dir", str(self.loader.state))
        self._builds = EngineBuilds(
            builder,
            lambda order, failure: self._start_load(
                order.name, lambda: self._deployments.finish_build(order, failure), partial(_log_failure, order.name)
            ),
            lambda order: self._commands.post(lambda: self._deployments.update_progress(order)),
        )
        self._deployments = Deployments(self.loader, self.registry, self._closer, self._builds)
        end_helper = (lambda: "") if self.loader.trials is None else self.loader.trials.end_helper
        self._loads = LoadQueue(self._control.load_threads, end_helper, self.clock)
        self._watcher = Watcher(int(self._control.settle_s * NS_PER_S))
        self._repositories_unreadable = False
        self._skipped: set[folders.SkippedFolder] = set()
        self._scan_cache = folders.ScanCache()
        self._next_scan_ns = 0
        self.requested: dict[str, Sequence[Any] | None] = {}
        self.on_requested: Callable[[], None] = lambda: None
        self._pending: dict[str, object] = {}  # models that wait for the installation of their Python environments
        self._initial: set[object] = set()  # initial loads that have not ended
        self._has_started = self._is_complete = False  # the initial loads are queued; they have ended
        self._is_draining = False
        self._memory_ns: int | None = None  # next `load_requested` of the GPU model cache
        self._evict_ns: int | None = None  # next `evict_idle` of it
        self._idle_ns: int | None = None  # next `look` for tasks of idle models
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="control", daemon=True)
        self._close_timeout_s = 0.0
        self._clean = True

    def start(self) -> None:
        """Start the thread; raises Unavailable if the system starts no further thread."""
        start_thread(self._thread)

    def drain(self) -> None:
        """End all loads and start no more, because the server stops; loads on demand go on, for requests in flight."""
        self._is_draining = True
        for key in self._loads.keys():  # noqa: SIM118  # a method of the queue
            if _ON_DEMAND not in key:
                self._loads.drop(key, Unavailable(STOPPING))

    def stop(self, timeout_s: float) -> bool:
        """Close every model after its queued requests have completed.

        Args:
            timeout_s: maximum wait in seconds for the requests of all models.

        Returns:
            True if all requests completed in time.
        """
        self._close_timeout_s = timeout_s
        self._stop.set()
        self._commands.stop()
        self._builds.stop()
        if self.loader.trials is not None:
            self.loader.trials.stop()
        if self.stores is not None:
            self.stores.stop()
        # Its cancelled loads have timeouts, and so has the thread.
        self._thread.join(2 * timeout_s + 1)
        self._builds.join()
        if self.stores is not None:
            self.stores.join(min(timeout_s, _STORES_STOP_S))
        return self._clean and not self._thread.is_alive()

    # On the event loop: the interface `Repository` of the protocols

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model; returns when the new versions serve. Old versions serve until then.

        Args:
            name: name of the model.
            config: configuration in Triton's JSON that replaces the model's own, or None.
            files: content by path in the model's folder, for a model that consists of these files only; needs `config`.

        Raises:
            Forbidden: model control or overrides are switched off.
            NotFound: no repository has the model.
            BadRequest: the name or a file is invalid.
            ConfigError: the model cannot be served; versions that served before still serve.
            Overloaded: too many commands wait.
            Unavailable: the server is stopping, or the store of the model cannot be read.
            Aborted: the model was unloaded before the load had ended.
        """
        self.check_control(name)
        if (config is not None or files) and not self._control.allow_override:
            option = "--allow-model-override"
            raise Forbidden(f"a load request must not contain a configuration or files: start the server with {option}")
        if files and config is None:
            raise BadRequest(
                "a load request with files needs the parameter 'config' too: send '{}' to complete it from the files"
            )
        errors = await self.stores.refresh() if self.stores is not None and not files else {}
        while True:
            outcome: Future[None] = Future()
            action = partial(self._load, name, config, files, errors, partial(self._commands.settle, outcome))
            try:
                await self._run_command(action, outcome, name)
                return
            except EnvironmentPending as pending:
                # The control thread is free meanwhile. The next load has the environment, or the error of its installation.
                await asyncio.wait([asyncio.wrap_future(pending.done)])

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model; returns when no new request is accepted. Its loads fail at once, its queued requests complete later.

        Args:
            name: name of the model.
            dependents: also unload the models that only this pipeline calls.

        Raises:
            Forbidden: model control is switched off.
            NotFound: no such model.
            BadRequest: the name is invalid.
            Overloaded: too many commands wait, and no load of the model that this would end.
            Unavailable: the server is stopping.
        """
        self.check_control(name)
        await self._run_command(lambda: self._unload(name, dependents), name=name)

    @property
    def allows_files(self) -> bool:
        """True if a load request may contain a configuration and files."""
        return self._control.allow_override

    def check_control(self, name: str) -> None:
        """Check a load or unload before its request is read.

        Raises:
            Forbidden: model control is switched off.
            BadRequest: the name is invalid.
        """
        if self._control.mode != "explicit":
            raise Forbidden(
                "explicit model load / unload is not allowed: start the server with --model-control explicit"
            )
        problem = name_problem(name)
        if problem is not None:
            raise BadRequest(f"{problem.message}: {problem.cure}")

    def check_caller(self, name: str) -> None:
        """Check a load or unload that a Python model has started.

        Args:
            name: the model that made the call.

        Raises:
            Conflict: this model is being loaded: it would wait for a model that may wait for it.
        """
        if self._loads.is_running(name):
            raise Conflict(
                f"model '{name}' is being loaded itself: `initialize` and `model_warmup` must not load or unload models, load "
                "them before this one or from `execute`"
            )

    async def _run_command(
        self, action: Callable[[], None], settled: Future[None] | None = None, name: str = ""
    ) -> None:
        """Run a command and wait for its end.

        Args:
            action: runs on the control thread.
            settled: outcome of a load, which the action settles later by `_settle`; None if it has ended when it returns.
            name: name of the model. A command that is no load is taken in any case while a load of its model waits or runs.
        """
        outcome: Future[None] = settled or Future()
        outcome.set_running_or_notify_cancel()  # a cancelled caller does not cancel the command
        if self._stop.is_set():
            raise Unavailable(STOPPING)
        is_load = settled is not None
        self._commands.add(
            Command(action, outcome, is_load),
            name if is_load else "",
            lambda loading: not is_load and self._is_loading(name, loading),
        )
        await asyncio.wrap_future(outcome)

    # On any thread

    def _is_loading(self, name: str, waiting: Collection[str]) -> bool:
        """Return True if a load of a model runs or waits; `waiting`: models of the commands that wait."""
        keys = *waiting, *self._loads.keys()
        return name in {key.partition(_ON_DEMAND)[0] for key in keys}

    def _is_at_work(self) -> bool:
        """Return True while models are loaded, or the server stops."""
        return self._is_draining or self._stop.is_set() or not self._loads.is_empty

    def _start_load(self, name: str, action: Callable[[], None], on_end: OnEnd, after: Collection[str] = ()) -> None:
        """Queue a load of a model.

        Args:
            name: name of the model.
            action: loads it, on a thread of its own.
            on_end: called with its error, after the loads of the pipelines that could not be served without the model.
            after: models that it calls; their loads end first.
        """
        if self._is_draining:
            on_end(Unavailable(STOPPING))
            return
        if not self._has_started:
            self._initial.add(initial := object())
            on_end = partial(self._end_initial, initial, on_end)

        def ended(error: BaseException | None) -> None:
            if error is None:
                self._retry(self._deployments.callers(name), on_end)
            else:
                on_end(error)
            self._commands.wake()  # for models that wait for memory

        self._loads.add(name, action, ended, after)

    def _retry(self, names: Sequence[str], on_end: OnEnd) -> None:
        """Load pipelines again that could not be served, one after the other; their errors are in the log and in the index."""
        if not names:
            on_end(None)
            return
        name, *others = names
        self._start_load(name, partial(self._deployments.retry, name), lambda _error: self._retry(others, on_end))

    def _start_load_on_demand(self, handle: VersionHandle, load: Callable[[], None]) -> None:
        """Run a load of a version, or its eviction, after those of it that wait or run."""
        key = f"{handle.spec.name}{_ON_DEMAND}{handle.spec.version}"  # beside the loads of other versions

        def ended(error: BaseException | None) -> None:
            _log_failure(key, error)
            self._commands.wake()  # for versions that wait for it

        self._loads.add(key, load, ended)

    def _end_initial(self, initial: object, on_end: OnEnd, error: BaseException | None) -> None:
        on_end(error)
        self._commands.post(lambda: self._complete(initial))

    # On the control thread

    def _main(self) -> None:
        try:
            if self.stores is not None:
                self.stores.load_initial()
            self._load_initial()
            self._has_started = True
            if self.stores is not None and self._control.mode != "none":
                self.stores.start()
            self._next_scan_ns = self.clock() + self._pause_ns()
            self._complete(None)
            while self._serve_one():
                self._loads.start_threads()
                for name in self._gpu_model_cache.take_lost():  # on other GPUs or the CPU, as its configuration allows
                    self._start_load(name, partial(self._deployments.reload, name), partial(_log_failure, name))
                self._memory_ns = self._gpu_model_cache.load_requested(self._start_load_on_demand)
                self._evict_ns = self._gpu_model_cache.evict_idle(self._start_load_on_demand)
                self._idle_ns = self.loader.idle_tasks.look(self.registry, self._is_at_work)
        except BaseException as error:  # reported to the caller: no model is loaded after this
            self._refuse_commands()
            self.on_loaded(error)
            self._stop.wait()
        self._clean = False  # until all is closed
        self._refuse_commands()
        self.registry.set_complete(False)
        self._loads.stop(Unavailable(STOPPING))
        are_loads_ended = self._loads.join(min(self._close_timeout_s, _LOADS_STOP_S))
        self._deployments.unload_all()
        self._clean = self._closer.wait(self._close_timeout_s) and are_loads_ended

    def _complete(self, initial: object) -> None:
        """Report the end of the initial loads with the last one."""
        self._initial.discard(initial)
        if self._is_complete or self._initial or not self._has_started or self._is_draining:
            return
        self._is_complete = True
        self._builds.start()
        self.registry.set_complete(True)
        self.on_loaded(None)

    def _serve_one(self) -> bool:
        """Wait for a command or the next scan; returns False when the thread must stop."""
        try:
            command = self._commands.get(self._wait_s())
        except queue.Empty:
            if self._control.mode == "poll" and self.clock() >= self._next_scan_ns:
                self._rescan()
                self._next_scan_ns = self.clock() + self._pause_ns()
            return True
        if command is None:
            return False
        try:
            command.action()
        except Exception as error:
            self._commands.settle(command.outcome, error)
        except BaseException as error:
            self._commands.settle(command.outcome, error)
            raise
        else:
            if not command.settles:
                self._commands.settle(command.outcome, None)
        return True

    def _refuse_commands(self) -> None:
        self._gpu_model_cache.stop(Unavailable(STOPPING))
        self._commands.refuse()

    def _load_initial(self) -> None:
        models = self._scan()
        names = self.selection.names
        for model in models:
            if model.problem is not None:
                logger.error("%s", model.problem)
        if self._control.mode == "poll":
            self._load_settled(models)
            return
        if self._control.mode == "explicit":
            self._update_index(models)
        selected = [m for m in models if m.problem is None and (names is None or m.name in names)]
        for name in sorted((names or frozenset()) - {model.name for model in selected}):
            reason = "the model repository has no folder of this name"
            logger.error("model %s is not served: %s", name, reason)
            self.registry.mark(name, "", State.UNAVAILABLE, reason)
        selected = [model for model in selected if model.name not in self.requested]
        selected += [m for m in models if m.problem is None and self.requested.get(m.name) == [None, False]]
        ordered = in_load_order(selected, _served(models))
        for model in ordered:
            self.registry.forget(model.name, "")
            self.registry.mark(model.name, "", State.UNKNOWN)
        self._load_all(ordered)
        for name, request in sorted(self.requested.items()):
            if request is not None and request[1]:
                reason = "it was loaded from the files of a request, which the engine process has lost: load it again"
                logger.error("model %s is not served: %s", name, reason)
                self.registry.mark(name, "", State.UNAVAILABLE, reason)
            elif request is not None and request[0] is not None:
                self._load_again(name, request[0])

    def _load_again(self, name: str, config: str) -> None:
        """Load a model with a configuration that a client has sent to an earlier process."""

        def ended(error: BaseException | None) -> None:
            if isinstance(error, EnvironmentPending):
                error.done.add_done_callback(lambda _: self._commands.post(lambda: self._load_again(name, config)))
            elif error is not None:
                logger.error("model %s could not be loaded again: %s", name, error)

        try:
            self._load(name, config, {}, {}, ended)
        except HeadraceError as error:
            ended(error)

    def _load_all(self, models: Sequence[folders.RepositoryModel]) -> None:
        """Start the loads of models in this order: a pipeline comes after the models that it calls."""
        for model in models:
            called = called_models(model.path, model.repository) - {model.name}
            self._start_load(
                model.name, partial(self._load_model, model), partial(_log_failure, model.name), after=called
            )

    def _scan(self) -> list[folders.RepositoryModel]:
        """Return the models of all repositories; each folder that cannot be a model is logged once."""
        skipped: set[folders.SkippedFolder] = set()
        models = folders.scan(self.selection.repositories, self.registry.names(), skipped.add, self._scan_cache)
        for folder in sorted(skipped - self._skipped, key=lambda folder: folder.path):
            logger.log(logging.WARNING if folder.warn else logging.INFO, "%s", folder)
        self._skipped = skipped
        return [model for model in models if self.selection.includes(model.repository, model.name)]

    def _load_model(self, model: folders.RepositoryModel) -> None:
        """Load a model, on the thread of its load; again once its Python environment is installed."""
        try:
            self._deployments.load(ModelSource(model.name, model.path, model.repository, is_lazy=True))
        except EnvironmentPending as pending:
            with self._deployments.changing():
                self._pending[model.name] = pending.done
            pending.done.add_done_callback(lambda done: self._commands.post(lambda: self._load_pending(model, done)))
            raise

    def _load_pending(self, model: folders.RepositoryModel, done: object) -> None:
        """Load a model whose Python environment has been installed; ignored if it was unloaded or loaded again meanwhile."""
        with self._deployments.changing():
            is_pending = self._pending.get(model.name) is done
            if is_pending:
                del self._pending[model.name]
        if is_pending:
            self._load_all([model])

    def _load(
        self,
        name: str,
        config: str | None,
        files: Mapping[str, bytes],
        store_errors: Mapping[Path, str],
        on_end: OnEnd,
    ) -> None:
        if self.stores is not None:
            self.stores.apply()
        self._refresh_index()
        document = None if config is None else read_config_json(config)
        if document is not None and files:
            check_files(files, document)
            called = called_models(Path(), Path(), document)
            self._start_load(name, partial(self._load_files, name, files, document), on_end, called)
            return
        model = folders.find(self.selection.repositories, name)
        # The store may have a newer one, or the model that is missing here.
        if store_errors and (model is None or model.repository in store_errors):
            error = next(iter(store_errors.values())) if model is None else store_errors[model.repository]
            raise Unavailable(f"model '{name}' is not loaded: {error}")
        if model is None or not self.selection.includes(model.repository, name):
            raise NotFound(f"no model repository has a folder '{name}'{self.registry.suggestion(name)}")
        source = ModelSource(name, model.path, model.repository, document)
        called = self._load_called(source)
        self._start_load(name, partial(self._load_source, source, [config, False]), on_end, called)

    def _load_files(self, name: str, files: Mapping[str, bytes], document: Document) -> None:
        private = PrivateFolder(name, files)
        try:
            self._load_source(ModelSource(name, private.path, private.repository, document, private), [None, True])
        finally:
            private.release()

    def _load_source(self, source: ModelSource, request: Sequence[Any]) -> None:
        self._deployments.load(source)
        with self._deployments.changing():
            self._set_requested({source.name: request})

    def _set_requested(self, requests: Mapping[str, Sequence[Any] | None]) -> None:
        self.requested.update(requests)
        self.on_requested()

    def _load_called(self, source: ModelSource) -> frozenset[str]:
        """Start the loads of the models that a pipeline calls and that do not serve yet; returns the models that it calls.

        The errors of these loads are in the log and in the index.
        """
        called = called_models(source.path, source.repository, source.config) - {source.name}
        models = _served(self._scan()) if called else {}
        ordered = in_load_order([models[name] for name in sorted(called) if name in models], models)
        others = [each for each in ordered if each.name != source.name and not self._loads.has(each.name)]
        self._load_all([each for each in others if self.registry.serving(each.name, "") is None])
        return called

    def _unload(self, name: str, dependents: bool) -> None:
        self._refresh_index()
        if name not in self.registry.names() and not self._loads.has(name):
            raise NotFound(f"model '{name}' is not found{self.registry.suggestion(name)}")
        with self._deployments.changing():
            unused = self._deployments.dependencies.unused_without(name) if dependents else []
        for each in (name, *unused):
            self._unload_model(each)
        with self._deployments.changing():
            self._set_requested(dict.fromkeys((name, *unused)))

    def _unload_model(self, name: str) -> None:
        """Unload a model, and end its loads."""
        error = Aborted(f"model '{name}' was unloaded before its load had ended: load it again")
        for key in (name, *(f"{name}{_ON_DEMAND}{version}" for version in self.registry.versions(name))):
            self._loads.drop(key, error)
        with self._deployments.changing():
            self._pending.pop(name, None)
            self._deployments.unload(name)

    def _refresh_index(self) -> None:
        try:
            self._update_index(self._scan())
        except (HeadraceError, OSError) as error:
            logger.warning("a model repository cannot be read: %s", error)

    def _update_index(self, models: Sequence[folders.RepositoryModel]) -> None:
        """Add the models to the index and remove all others."""
        names = {model.name for model in models}
        indexed = self.registry.names()
        for name in indexed - names:
            self.registry.prune(name)
        for name in names - indexed:
            if name_problem(name) is None:
                self.registry.mark(name, "", State.UNLOADED, _NOT_LOADED)

    # Polling

    def _wait_s(self) -> float | None:
        """Return the seconds until the next scan or the next start of a load; None waits for a command only."""
        times = (self._memory_ns, self._evict_ns, self._idle_ns, self._loads.next_start_ns())
        times_ns = [time_ns for time_ns in times if time_ns is not None]
        if self._control.mode == "poll":
            times_ns.append(self._next_scan_ns)
        return max(min(times_ns) - self.clock(), 0) / NS_PER_S if times_ns else None

    def _pause_ns(self) -> int:
        control, pause_s = self._control, self._control.poll_interval_s
        return int((max(min(control.settle_s, pause_s), 0.05) if self._watcher.is_changing else pause_s) * NS_PER_S)

    def _load_settled(self, models: Sequence[folders.RepositoryModel]) -> None:
        """Load models at start in poll mode; models that are still being copied are loaded later."""
        pause_s = max(self._control.settle_s / 2, 0.05)
        self._apply(models)
        for _ in range(2 * _START_SETTLES):
            if not self._watcher.is_changing or self._stop.wait(pause_s):
                return
            self._rescan()

    def _rescan(self) -> None:
        try:
            if self.stores is not None:
                self.stores.apply()
            models = self._scan()
        except (HeadraceError, OSError) as error:
            # An unreadable repository, e.g. on a disconnected disk, must not unload every model.
            if not self._repositories_unreadable:
                logger.error("a model repository cannot be watched: %s", error)
            self._repositories_unreadable = True
            return
        self._repositories_unreadable = False
        self._apply(models)

    def _apply(self, scanned: Sequence[folders.RepositoryModel]) -> None:
        models = {model.name: model for model in scanned if model.problem is None}
        fingerprints = {
            name: fingerprint
            for name, model in models.items()
            if (fingerprint := self._scan_cache.fingerprint(model.path)) != folders.ABSENT
        }
        self._scan_cache.keep({str(model.path) for model in models.values()})
        for name in fingerprints.keys() - self.registry.names():
            self.registry.mark(name, "", State.UNKNOWN)
        due = self._watcher.update(fingerprints, self.clock())
        for name in due:
            if name not in fingerprints:
                self._unload_model(name)
            else:  # a load of the files before the change would fail
                self._loads.drop(name, Aborted(f"the files of model '{name}' have changed since its load began"))
        # A pipeline that is due waits for the models that are due.
        self._load_all(in_load_order([models[name] for name in due if name in fingerprints], {}))
        for name in self.registry.names() - self._watcher.names:
            self.registry.prune(name)


def _log_failure(name: str, error: BaseException | None) -> None:
    """Log an unexpected error of a load; any other is in the log and in the index already."""
    if error is not None and not isinstance(error, HeadraceError):
        logger.error("model %s could not be loaded", name, exc_info=error)


def _served(models: Sequence[folders.RepositoryModel]) -> dict[str, folders.RepositoryModel]:
    """Return the models by name that have no problem."""
    return {model.name: model for model in models if model.problem is None}
