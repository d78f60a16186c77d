"""The control thread: brings what is served in line with what is wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from server.control.config_reader import ModelFolder, read_model_folder, served_versions
from server.control.lifecycle import State
from server.control.loader import Loader
from server.control.registry import Registry, Serving
from server.control.repository import Found, scan
from server.control.triton_json import to_triton_json
from server.core.errors import HeadraceError
from server.dataplane.handle import ModelHandle

logger = logging.getLogger("headrace.control")


@dataclass(frozen=True, slots=True)
class Desired:
    """What should be served.

    Attributes:
        repositories: folders of models.
        names: the models wanted, None for all.
    """

    repositories: Sequence[Path]
    names: frozenset[str] | None = None


class Reconciler:
    """Loads at start and closes at the end, on a thread of its own.

    Args:
        desired: what should be served.
        loader: makes handles.
        registry: where they are published.
        on_loaded: called from the control thread when the first loading is over, with an error if that failed as a whole.
    """

    def __init__(
        self,
        desired: Desired,
        loader: Loader,
        registry: Registry,
        on_loaded: Callable[[BaseException | None], None],
    ) -> None:
        self._desired = desired
        self._loader = loader
        self._registry = registry
        self._on_loaded = on_loaded
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="control", daemon=True)
        self._close_timeout_s = 0.0
        self._clean = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close every model, serving what is queued; True if all of it ended within `timeout_s`."""
        self._close_timeout_s = timeout_s
        self._stop.set()
        self._thread.join()
        return self._clean

    def _main(self) -> None:
        try:
            self._load_all()
        except BaseException as error:  # the owner must learn that nothing will be loaded
            self._on_loaded(error)
        else:
            self._registry.set_complete(True)
            self._on_loaded(None)
        self._stop.wait()
        self._registry.set_complete(False)
        self._close_all()

    def _load_all(self) -> None:
        wanted = self._desired.names
        found = [model for model in scan(self._desired.repositories) if wanted is None or model.name in wanted]
        for name in sorted((wanted or frozenset()) - {model.name for model in found}):
            self._quarantine(name, "", "the model repository has no folder of this name")
        for model in found:
            if model.problem is None:
                self._registry.mark(model.name, "", State.UNKNOWN)
        for model in found:
            if self._stop.is_set():
                return
            if model.problem is not None:
                logger.error("%s", model.problem)
                continue
            self._load(model)

    def _load(self, model: Found) -> None:
        try:
            folder = read_model_folder(model.path, model.repository)
        except HeadraceError as error:
            self._quarantine(model.name, "", str(error))
            return
        except Exception as error:  # one model must not take the others down
            logger.exception("model %s could not be read", model.name)
            self._quarantine(model.name, "", f"could not be read: {type(error).__name__}")
            return
        for finding in folder.findings:
            logger.warning("%s", finding)
        handles: dict[str, ModelHandle] = {}
        versions = served_versions(folder.config, folder.versions)
        if not versions:
            self._quarantine(model.name, "", f"no version on disk is served: there are {list(folder.versions)}")
            return
        self._registry.forget(model.name, "")
        for version in versions:
            handle = self._load_version(folder, version)
            if handle is not None:
                handles[str(version)] = handle
        labels = {label: str(version) for label, version in folder.config.labels.items()}
        self._registry.publish(model.name, Serving(handles, labels, to_triton_json(folder.config)))
        for number in handles:
            self._registry.mark(model.name, number, State.READY)

    def _load_version(self, folder: ModelFolder, version: int) -> ModelHandle | None:
        name, number = folder.name, str(version)
        self._registry.mark(name, number, State.LOADING)
        try:
            return self._loader.load(folder, version)
        except HeadraceError as error:
            self._quarantine(name, number, str(error))
        except Exception as error:  # one model must not take the others down
            logger.exception("model %s version %s could not be loaded", name, number)
            self._quarantine(name, number, f"could not be loaded: {type(error).__name__}")
        return None

    def _quarantine(self, name: str, version: str, reason: str) -> None:
        logger.error("model %s%s is not served: %s", name, f" version {version}" if version else "", reason)
        self._registry.mark(name, version, State.UNAVAILABLE, reason)

    def _close_all(self) -> None:
        rows = list(self._registry.sources())
        if not rows:
            return
        # Side by side: one model that hangs must not eat the time of the others.
        with ThreadPoolExecutor(len(rows), thread_name_prefix="close") as pool:
            self._clean = all(pool.map(self._close, rows))
        for name in {name for name, _, _ in rows}:
            self._registry.publish(name, None)

    def _close(self, row: tuple[str, str, ModelHandle]) -> bool:
        name, version, handle = row
        self._registry.mark(name, version, State.UNLOADING)
        clean = handle.close(self._close_timeout_s)
        if clean:
            self._registry.mark(name, version, State.UNLOADED)
        else:
            self._registry.mark(name, version, State.UNAVAILABLE, "it did not stop in time")
            logger.error("model %s version %s did not stop within %g s", name, version, self._close_timeout_s)
        return clean
