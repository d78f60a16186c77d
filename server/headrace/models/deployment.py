"""Deploys, replaces and removes the versions of a model; closes replaced versions in the background.

Each load runs on a thread of its own, loads of one model one after the other. Each replaced version is closed in the background
(`VersionCloser`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.config.documents import Document, refuse
from headrace.config.files import SharedFolder
from headrace.config.model_folder import ModelFolder, read_model_folder, served_versions
from headrace.config.serving_plan import (
    NOT_PUBLISHED,
    ServingPlan,
    failed_build_text,
    requests_tensorrt,
    sample_fingerprints,
)
from headrace.config.triton_json import to_triton_json
from headrace.core.cancellation import current_cancellation
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.ledger import NoRoom
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.builds import BuildOrder, EngineBuilds
from headrace.models.dependencies import DependencyGraph
from headrace.models.folders import ABSENT, Fingerprint, fingerprint_version, fingerprint_versions, without_builds
from headrace.models.integrity.verified_copy import VerifiedCopy
from headrace.models.loader import Loader, describe_stamp
from headrace.models.pipelines import called_models, open_pipeline, pipeline_plan, served_config
from headrace.models.registry import Registry, Serving, State
from headrace.models.uploads import PrivateFolder
from headrace.models.version_closer import VersionCloser
from headrace.observability.labelled_counter import BUILDS, LOADS
from headrace.python.auto_complete import check_client_source, complete_python
from headrace.python.environments import EnvironmentPending

logger = logging.getLogger("headrace.control")


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Source of a model: its folder and an optional replacement of its configuration.

    Attributes:
        name: name of the model.
        path: folder of the model.
        repository: links must not lead out of this folder.
        config: replaces the configuration of the folder.
        private: temporary folder of uploaded files, or verified copy of the model; removed with the last version loaded from it.
        is_lazy: under a budget of host memory, the first request loads the model, unless a version of it is in memory.
    """

    name: str
    path: Path
    repository: Path
    config: Document | None = None
    private: SharedFolder | None = None
    is_lazy: bool = False

    @property
    def is_upload(self) -> bool:
        """True for the files of a load request."""
        return isinstance(self.private, PrivateFolder)


@dataclass(frozen=True, slots=True)
class _Signature:
    """Inputs of a loaded version; equal signatures give equal versions."""

    files: Fingerprint
    config: str  # digest of the configuration and the labels
    samples: tuple[tuple[str, int, int], ...]  # of the calibration from which its engine would be built
    engines: Fingerprint  # in the state folder, used if the version's own folder is read-only


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    handle: VersionHandle
    signature: _Signature
    plan: ServingPlan
    private: SharedFolder | None

    def release_files(self) -> None:
        """Drop the reference to the files of the version; called when the handle is closed."""
        if self.private is not None:
            self.private.release()


@dataclass(frozen=True, slots=True, eq=False)
class _PendingVersion:
    """A version that stays LOADING until its engine is built."""

    signature: _Signature
    plan: ServingPlan


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """Serving and pending versions of a model, and the source of both."""

    source: ModelSource
    folder: ModelFolder
    versions: dict[str, _Version]
    pending: dict[str, _PendingVersion]

    def acquire_files(self) -> None:
        """Hold the files of the source: an engine build and the next load read them."""
        if self.source.private is not None:
            self.source.private.acquire()

    def release_files(self) -> None:
        """Drop the reference of `acquire_files`."""
        if self.source.private is not None:
            self.source.private.release()

    def plan(self, number: str) -> ServingPlan:
        """Return the plan of a serving or pending version."""
        pending = self.pending.get(number)
        return self.versions[number].plan if pending is None else pending.plan

    def order(self, number: str) -> BuildOrder | None:
        """Return the build order of a version; None if nothing is built, or the source is a client's upload."""
        if number not in self.versions and number not in self.pending:
            return None
        return _order(self.source, number, self.plan(number))


class Deployments:
    """The deployed versions of each model, and the steps that change them.

    A load either succeeds as a whole or changes nothing. Only a model without a serving version may be loaded in part.

    Ownership: `_lock` guards all attributes, and makes a change here and in the registry one step. It is not held while files are
    read, processes are started or models are opened, so `unload` does not wait for a load.

    Args:
        loader: creates handles.
        registry: publishes handles.
        closer: closes handles in the background.
        builds: builds engines for versions that serve without one.

    Attributes:
        dependencies: models that the loaded pipelines call, and those that wait for a model.
    """

    def __init__(self, loader: Loader, registry: Registry, closer: VersionCloser, builds: EngineBuilds) -> None:
        self._loader = loader
        self._registry = registry
        self._closer = closer
        self._builds = builds
        self._lock = threading.RLock()
        self._live: dict[str, _Model] = {}
        self.dependencies = DependencyGraph()
        self._waiting: dict[str, ModelSource] = {}  # pipelines that cannot be served until a model of theirs is
        self._logged_progress: tuple[BuildOrder, int] | None = (
            None  # build of the last progress log line, and its quarter
        )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock for a change by the load on this thread.

        Raises:
            HeadraceError: the load is cancelled, and must change nothing any more.
        """
        with self._lock:
            current_cancellation().check()
            yield

    def load(self, source: ModelSource) -> None:
        """Load a model from its current files: changed versions are loaded beside the old ones, then swapped.

        Args:
            source: the model's folder and configuration.

        Raises:
            EnvironmentPending: the model's Python environment is being installed; it stays LOADING until it is loaded again.
            ConfigError: a version or the whole model cannot be served; the registry has the reason.
            HeadraceError: the load was cancelled; nothing is changed.
        """
        LOADS.declare_each((source.name, result) for result in ("loaded", "reloaded", "unloaded", "failed"))
        called = called_models(source.path, source.repository, source.config)
        with self.changing():
            self.dependencies.set(source.name, called)
            self._waiting.pop(source.name, None)
            is_serving = any(version.handle.ready for version in self._versions(source.name).values())
            if not is_serving and self._registry.state(source.name, "") is not State.LOADING:
                self._registry.mark(source.name, "", State.LOADING)
        try:
            self._load(source, is_serving)
        except EnvironmentPending:
            raise
        except Exception as error:
            with self.changing():
                LOADS.count(source.name, "failed")
                if source.private is None and self.dependencies.members(source.name):
                    self._waiting[source.name] = source
                if self._registry.state(source.name, "") is State.LOADING:
                    self._registry.mark(source.name, "", State.UNAVAILABLE, str(error) or type(error).__name__)
            raise

    def callers(self, name: str) -> list[str]:
        """Return the pipelines that call a model, directly or by another pipeline, the nearest first."""
        with self._lock:
            return self.dependencies.dependents(name)

    def retry(self, name: str) -> None:
        """Load a pipeline again that could not be served without a model; no-op for any other. Raises the errors of `load`."""
        with self.changing():
            source = self._waiting.get(name)
        if source is not None:
            self.load(source)

    def reload(self, name: str) -> None:
        """Load a model again whose instances have died; no-op for one that is not loaded. Raises the errors of `load`.

        If the load fails, the dead version stays: the server is not ready then.
        """
        with self.changing():
            model = self._live.get(name)
        if model is not None:
            self._load(model.source, is_serving=True)

    def _load(self, source: ModelSource, is_serving: bool) -> None:
        try:
            verified = _as_config_error(lambda: self._verify(source), source.name)
        except ConfigError as error:
            self._refuse(source.name, error, is_serving)
            raise
        try:
            self._load_files(verified, is_serving)
        finally:
            if verified.private is not None and not verified.is_upload:
                verified.private.release()

    def _verify(self, source: ModelSource) -> ModelSource:
        """Check the files of a model, and return the source of what is loaded: a verified copy, with a reference of the caller.

        Raises:
            ConfigError: a file differs from the checksums of the model, or they are not signed.
        """
        verifier = self._loader.verifier
        if verifier.keys is not None and (source.is_upload or source.config is not None):
            message = "a load request contains files or a configuration, which are not signed"
            raise refuse(source.name, None, message, "load the signed model of the repository")
        if source.is_upload:
            return source
        with self._lock:
            live = self._live.get(source.name)
        present = None if live is None else live.source.private
        present = present if isinstance(present, VerifiedCopy) else None
        copy = verifier.copy(source.path, source.repository, present)
        return source if copy is None else replace(source, path=copy.path, repository=copy.repository, private=copy)

    def _refuse(self, name: str, error: ConfigError, is_serving: bool) -> None:
        """Record that a model cannot be loaded as a whole."""
        with self.changing():
            if is_serving:
                self._record_failed_load(name, error)
            else:
                self._mark_unavailable(name, "", error)
                self._registry.prune(name, keep=[""])

    def _load_files(self, source: ModelSource, is_serving: bool) -> None:
        name, fingerprints = source.name, fingerprint_versions(source.path)
        with self.changing():
            cycle, live = self.dependencies.cycle(name), self._versions(name)
        try:
            folder = _as_config_error(lambda: _read(source, self._loader, cycle), name)
            self._loader.check_interpreters(folder, served_versions(folder.config, folder.versions))
        except EnvironmentPending as error:
            with self.changing():
                self._registry.mark_waiting(name, error.findings[0].message, is_serving)
            raise
        except ConfigError as error:
            self._refuse(name, error, is_serving)
            raise
        numbers = [str(version) for version in served_versions(folder.config, folder.versions)]
        with self.changing():
            self._registry.mark_loading(name, [number for number in numbers if number not in live])
        versions: dict[str, _Version] = {}
        pending: dict[str, _PendingVersion] = {}
        failures: list[ConfigError] = []
        with self._closing_unless_published(name, versions, live):
            for number in numbers:
                try:
                    files = fingerprints.get(number, ABSENT)
                    result = self._load_version(source, folder, number, files, live.get(number))
                except ConfigError as error:
                    failures.append(error)
                    continue
                if isinstance(result, _Version):
                    versions[number] = result
                elif number in live and live[number].handle.ready:
                    # The present version serves until the engine is built.
                    versions[number] = replace(live[number], signature=result.signature, plan=result.plan)
                else:
                    pending[number] = result
            with self.changing():
                if failures and is_serving:
                    self._discard(name, versions, live)
                    self._record_failed_load(name, failures[0])
                else:
                    self._swap(source, folder, numbers, versions, pending)
        if failures:
            raise ConfigError([finding for failure in failures for finding in failure.findings])

    @contextmanager
    def _closing_unless_published(
        self, name: str, versions: Mapping[str, _Version], live: Mapping[str, _Version]
    ) -> Iterator[None]:
        """Close the versions that a load has opened, if the block fails because the load is cancelled."""
        try:
            yield
        except BaseException:
            served = {version.handle for version in (*live.values(), *self._versions(name).values())}
            for version in versions.values():
                if version.handle not in served:
                    self._closer.begin(version.handle, version.release_files)
            raise

    def finish_build(self, order: BuildOrder, failure: str) -> None:
        """Load a built engine into its version, or record the build's error; ignored if the version has changed since the order.

        Args:
            order: the build order.
            failure: error of the build; "" if it succeeded.
        """
        name, number = order.name, order.version
        with self.changing():
            model = self._live.get(name)
            if model is None or model.order(number) != order:
                return
            is_slower = failure.startswith(NOT_PUBLISHED)
            BUILDS.count(name, "slower" if is_slower else "failed" if failure else "built")
            version = model.versions.get(number)
            if failure:
                level = logging.WARNING if is_slower else logging.ERROR
                logger.log(level, "model %s version %s: %s", name, number, model.plan(number).failed_build(failure))
                self._update_remark(model, number)
                return
            old = model.pending[number].signature if version is None else version.signature
            files, model_file = fingerprint_version(order.folder / number), model.folder.config.default_model_filename
            is_ready = version is None or version.handle.ready
            if not is_ready or without_builds(files, model_file) != without_builds(old.files, model_file):
                # A load request for the present files also loads the engine if it fits.
                self._update_remark(
                    model, number, "an engine is built, but the model's files have changed since: load the model again"
                )
                return
        versions = dict(model.versions)
        with self._closing_unless_published(name, versions, model.versions):
            try:
                new = self._load_version(model.source, model.folder, number, files, version)
            except ConfigError as error:
                with self.changing():
                    self._record_failed_load(name, error)
                return
            if isinstance(new, _Version):
                versions[number] = new
            with self.changing():
                if isinstance(new, _PendingVersion):
                    reason = new.plan.remark.partition(": ")[2]
                    text = f"its engine was built, but does not fit: {reason} ({new.plan.cure})"
                    self._update_remark(model, number, text)
                    return
                numbers = [str(version) for version in served_versions(model.folder.config, model.folder.versions)]
                pending = {other: one for other, one in model.pending.items() if other != number}
                self._swap(model.source, model.folder, numbers, versions, pending)

    def update_progress(self, order: BuildOrder) -> None:
        """Show the progress of a build in the index and log each quarter.

        Args:
            order: the build order.
        """
        with self._lock:
            model = self._live.get(order.name)
            if model is None or model.order(order.version) != order:
                return
            self._update_remark(model, order.version)
            quarter = self._builds.quarter(order)
            if self._logged_progress != (order, quarter):
                self._logged_progress = order, quarter
                logger.info("model %s version %s: %s", order.name, order.version, self._remark(model, order.version))

    def _update_remark(self, model: _Model, number: str, reason: str = "") -> None:
        """Update the index and the metadata of a version.

        Args:
            model: the model.
            number: version number.
            reason: why a built engine cannot be used; "" if none was built.
        """
        name, version = model.source.name, model.versions.get(number)
        text = reason or self._remark(model, number)
        if version is not None:
            self._registry.set_reason(name, text, number)
            _set_reasons(version, model.plan(number).placement_reasons(self._failure(model, number), reason))
        elif reason or self._failure(model, number):
            self._registry.mark(name, number, State.UNAVAILABLE, text)
        else:
            self._registry.set_reason(name, text, number, State.LOADING)

    def _failure(self, model: _Model, number: str) -> str:
        """Return the error of a version's engine build; "" while it runs or if it succeeded."""
        order = model.order(number)
        return "" if order is None else self._builds.failure(order) or ""

    def unload(self, name: str) -> None:
        """Accept no new requests for a model; its queued requests complete in the background.

        Args:
            name: name of the model, whose loads have ended or are cancelled.
        """
        with self._lock:
            self._builds.set_orders(name, ())
            self.dependencies.set(name, ())
            self._waiting.pop(name, None)
            self._registry.publish(name, None)
            for number, version in self._versions(name).items():
                self._registry.mark(name, number, State.UNLOADING)
                self._closer.begin(version.handle, version.release_files)
            model = self._live.pop(name, None)
            if model is not None:
                model.release_files()
                LOADS.count(name, "unloaded")
                if self._loader.metrics is not None:
                    self._loader.metrics.forget(name)
            self._registry.mark_all_unloaded(name)

    def unload_all(self) -> None:
        """`unload` of every model."""
        for name in list(self._live):
            self.unload(name)

    def _versions(self, name: str) -> dict[str, _Version]:
        model = self._live.get(name)
        return {} if model is None else model.versions

    def _reusable(
        self, folder: ModelFolder, number: str, signature: _Signature, version: _Version | None
    ) -> _Version | None:
        """Return the serving version if a new load would give the same version, else None."""
        if version is None or not version.handle.ready or signature.config != version.signature.config:
            return None
        if signature == version.signature:
            return version
        model_file = folder.config.default_model_filename
        if without_builds(signature.files, model_file) != without_builds(version.signature.files, model_file):
            return None
        if folder.config.is_pipeline:  # it has no file
            return replace(version, signature=signature)
        plan = _as_config_error(lambda: self._loader.plan(folder, int(number)), f"{folder.name} version {number}")
        return replace(version, signature=signature, plan=plan) if plan.loads_same_as(version.plan) else None

    def _load_version(
        self, source: ModelSource, folder: ModelFolder, number: str, files: Fingerprint, live: _Version | None
    ) -> _Version | _PendingVersion:
        """Load a version without publishing it, unless the serving one is the same.

        Args:
            source, folder: source of the model and its content.
            number: version number.
            files: fingerprint of the version's folder.
            live: the serving version.

        Returns:
            The serving version, a new one, or a pending one if its engine must be built first.
        """
        engines = self._loader.engines(source.path, int(number))
        engine_files = ABSENT if engines is None else fingerprint_version(engines)
        signature = _Signature(files, _digest(folder), sample_fingerprints(folder), engine_files)
        reusable = self._reusable(folder, number, signature, live)
        if reusable is not None:
            return reusable
        name = source.name
        with self.changing():
            if self._registry.state(name, number) not in (State.READY, State.LOADING):
                self._registry.mark(name, number, State.LOADING)
        try:
            plan, handle = self._open(folder, number, source.is_lazy and (live is None or live.handle.evicted))
            if handle is None:
                self._check_order(source, number, plan)
                return _PendingVersion(signature, plan)
            current, model_file = fingerprint_version(source.path / number), folder.config.default_model_filename
            if without_builds(current, model_file) != without_builds(signature.files, model_file):
                self._closer.begin(handle)
                # A load from a half-written file has an undefined result.
                raise refuse(f"{name}/{number}", None, "has changed during the load", "load the model again")
        except ConfigError as error:
            with self.changing():
                if self._registry.state(name, number) is not State.READY:
                    self._mark_unavailable(name, number, error)
            raise
        if source.private is not None:
            source.private.acquire()
        return _Version(handle, signature, plan, source.private)

    def _check_order(self, source: ModelSource, number: str, plan: ServingPlan) -> None:
        """Check that the engine of a pending version will be built.

        Raises:
            ConfigError: no engine is built from a client's files or configuration.
        """
        order = _order(source, number, plan)
        if order is None:
            message = "has no engine for this machine's GPU, and none is built from the files or configuration of a load request"
            raise refuse(f"{source.name}/{number}", None, message, "write fallback: onnxruntime, or KIND_AUTO")
        if self._builds.failure(order) is not None:
            self._builds.forget(order)

    def _open(self, folder: ModelFolder, number: str, is_lazy: bool) -> tuple[ServingPlan, VersionHandle | None]:
        """Load the engine, or the model's own file if there is no engine or it is broken; the handle is None if the version is
        pending.
        """
        version, subject = int(number), f"{folder.name} version {number}"
        if folder.config.is_pipeline:
            pipeline = _as_config_error(lambda: open_pipeline(folder, version, self._registry, self._loader), subject)
            return pipeline_plan(folder, version), pipeline
        plan = _as_config_error(lambda: self._loader.plan(folder, version), subject)
        if plan.is_pending:
            return plan, None
        if plan.remark and plan.stamp is None:
            cure = f" ({plan.cure})" if plan.cure and not plan.build else ""
            level = logging.INFO if plan.build else logging.WARNING
            logger.log(level, "model %s: %s%s", subject, plan.remark, cure)
        while True:
            try:
                lazy = is_lazy and self._loader.is_lazy(folder.config, plan)
                handle = _as_config_error(
                    partial(self._loader.load, folder, version, plan, lazy, self._cache_changed), subject
                )
                break
            except ConfigError as error:
                # An engine that does not fit into GPU memory is not broken: the CPU replaces it only if the configuration
                # allows that.
                gpu_only = folder.config.fallback is None and requests_tensorrt(folder.config)
                out_of_memory = isinstance(error, NoRoom) and gpu_only
                fallback_plan = None if out_of_memory else plan.fallback_plan(error)
                if fallback_plan is None:
                    raise plan.with_cure(error) from error
                logger.error("model %s: %s (%s)", subject, fallback_plan.remark, fallback_plan.cure)
                plan = fallback_plan
                if plan.is_pending:
                    return plan, None
        if plan.stamp is not None:
            logger.info("model %s runs the engine %s: %s", subject, plan.file.name, describe_stamp(plan.stamp))
            if plan.remark:
                logger.warning("model %s: %s", subject, plan.remark)
        elif plan.not_on_gpu and not plan.remark:
            logger.info("model %s runs on the CPU: %s", subject, plan.not_on_gpu)
        return plan, handle

    def _remark(self, model: _Model, number: str) -> str:
        """Return the index text of a version: beside READY, or beside LOADING while the version waits for its engine."""
        build, version = self._build_remark(model, number), model.versions.get(number)
        if version is None or not version.handle.evicted:
            return build
        state = self._loader.gpu_model_cache.describe(version.handle)
        return f"{state}; {build}" if build else state

    def _build_remark(self, model: _Model, number: str) -> str:
        plan, order = model.plan(number), model.order(number)
        if plan.stamp is not None or not plan.remark:
            return plan.remark
        remark = f"{plan.remark} ({plan.cure})" if plan.cure else plan.remark
        if order is None:
            return remark
        failure = self._builds.failure(order)
        if failure is not None:
            return f"{plan.remark}; {failed_build_text('it', failure)}" if failure else remark
        version = model.versions.get(number)
        if version is None:
            meanwhile = "requests are refused until then (KIND_GPU)"
        else:
            device = str(version.handle.spec.parameters.get("headrace.device", "CPU"))
            meanwhile = f"{device if device != 'CPU' else 'the CPU'} serves meanwhile"
        return f"{self._builds.describe(order, plan.engine)}; {meanwhile}"

    def _cache_changed(self, handle: VersionHandle) -> None:
        """Update the index after a version was evicted or loaded again, or could not be loaded."""
        name, number = handle.spec.name, handle.spec.version
        with self._lock:
            model = self._live.get(name)
            if model is not None and number in model.versions and model.versions[number].handle is handle:
                self._registry.set_reason(name, self._remark(model, number), number)

    def _swap(
        self,
        source: ModelSource,
        folder: ModelFolder,
        numbers: list[str],
        versions: dict[str, _Version],
        pending: dict[str, _PendingVersion],
    ) -> None:
        name = folder.name
        handles = {number: version.handle for number, version in versions.items()}
        labels = {label: str(version) for label, version in folder.config.labels.items()}
        before = self._versions(name)
        model = _Model(source, folder, versions, pending)
        orders = [order for number in (*versions, *pending) if (order := model.order(number)) is not None]
        if orders:
            BUILDS.declare_each((name, result) for result in ("built", "failed", "slower"))
        self._builds.set_orders(name, orders)
        remarks = {number: self._remark(model, number) for number in versions}
        substitutes = {n: version.plan.not_on_gpu for n, version in versions.items() if version.plan.substitutes}
        config = to_triton_json(served_config(folder.config, handles))
        self._registry.publish(name, Serving(handles, labels, config, remarks, substitutes, folder.config.traffic))
        former = self._live.pop(name, None)
        if versions or pending:
            self._live[name] = model
            model.acquire_files()
        if former is not None:
            former.release_files()
        for number in pending:
            self._registry.set_reason(name, self._remark(model, number), number, State.LOADING)
        for number, version in before.items():
            if number in versions and versions[number].handle is version.handle:
                continue
            if number not in numbers:
                self._registry.mark(name, number, State.UNLOADING)
            self._closer.begin(version.handle, version.release_files)
        self._registry.prune(name, keep=numbers)
        if versions and handles != {number: version.handle for number, version in before.items()}:
            logger.info("model %s serves version %s", name, ", ".join(versions))
            LOADS.count(name, "reloaded" if before else "loaded")

    def _discard(self, name: str, versions: Mapping[str, _Version], live: Mapping[str, _Version]) -> None:
        """Close the versions of a load that failed in another version."""
        for number, version in versions.items():
            if number in live and live[number].handle is version.handle:
                continue
            if self._registry.state(name, number) is State.LOADING:
                self._registry.mark(name, number, State.UNAVAILABLE, "another version of the model failed to load")
            self._closer.begin(version.handle, version.release_files)

    def _record_failed_load(self, name: str, error: ConfigError) -> None:
        logger.error("model %s keeps its versions, the load failed: %s", name, error)
        self._registry.set_reason(name, f"the last load failed: {error}")

    def _mark_unavailable(self, name: str, number: str, error: ConfigError) -> None:
        logger.error("model %s%s is not served: %s", name, f" version {number}" if number else "", error)
        if self._registry.state(name, number) not in (None, State.UNKNOWN, State.LOADING):
            self._registry.mark(name, number, State.LOADING)
        self._registry.mark(name, number, State.UNAVAILABLE, str(error))


def _order(source: ModelSource, number: str, plan: ServingPlan) -> BuildOrder | None:
    """Return the build order of a plan; None if nothing is built, or if a client has sent files or a configuration."""
    if not plan.build or source.is_upload or source.config is not None:
        return None
    return BuildOrder(source.name, number, source.path.absolute(), plan.target, plan.build)


def _set_reasons(version: _Version, reasons: Mapping[str, str]) -> None:
    """Update the metadata of a version. One thread at a time writes; a reader sees the old value or the new one."""
    parameters = version.handle.spec.parameters
    if not isinstance(parameters, dict):
        return
    for name, reason in reasons.items():
        if reason:
            parameters[f"headrace.{name}"] = reason
        else:
            parameters.pop(f"headrace.{name}", None)


def _as_config_error(call: Callable[[], _T], subject: str) -> _T:
    """Call `call` and turn every error into a ConfigError, so that one model cannot affect the others.

    Raises:
        ConfigError: the call failed.
    """
    try:
        return call()
    except ConfigError:
        raise
    except HeadraceError as error:
        raise refuse(subject, None, str(error)) from error
    except Exception as error:
        logger.exception("%s could not be loaded", subject)
        raise refuse(
            subject, None, f"could not be loaded ({type(error).__name__})", "the server's log has more"
        ) from error


def _read(source: ModelSource, loader: Loader, cycle: Sequence[str]) -> ModelFolder:
    if cycle:
        raise refuse(source.name, None, f"it calls itself: {' -> '.join(cycle)}", "remove one of the steps")
    folder = read_model_folder(source.path, source.repository, source.config)
    if source.config is not None and not loader.allow_python_uploads:
        check_client_source(folder, is_upload=source.is_upload)
    for finding in folder.findings:
        logger.warning("%s", finding)
    if not served_versions(folder.config, folder.versions):
        available = ", ".join(map(str, folder.versions))
        raise refuse(
            source.name, None, f"no version on disk is served: the folder has {available}", "change version_policy"
        )
    return complete_python(folder, loader.interpreters)


def _digest(folder: ModelFolder) -> str:
    """Digest of the configuration and labels of a version, without `labels` of versions, `version_policy` and `traffic`."""
    config = folder.config.model_dump_json(exclude={"labels", "version_policy", "traffic"})
    return hashlib.sha256(f"{config}\n{sorted(folder.labels.items())}".encode("utf-8", "surrogatepass")).hexdigest()
