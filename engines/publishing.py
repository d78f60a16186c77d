"""Laying an artefact beside its model, so that whoever reads the folder meanwhile finds the old one or the new one, whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engines.errors import BuildError
from engines.project import Project
from engines.store_errors import disk_error, free_bytes
from server.config.durable import is_temporary, locked_folder, sync, temporary_name
from server.config.serving_plan import engine_folder
from server.config.stamps import Stamp, artefact_problem, is_artefact_name, put_stamp, read_stamps
from server.core.errors import ConfigError

DEFAULT_STATE = Path("~/.cache/headrace/state")
_CURE = "build into a copy of the repository; the engine stays in the store, building again takes seconds"
# Another file system, or one without hard links, or a file of somebody else's.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def publishing_folder(project: Project, state: Path = DEFAULT_STATE) -> Path:
    """Where a version's engine is published: beside its model, or in the state folder if the model's folder cannot be written.

    The server looks into both.

    Args:
        project: the version.
        state: the state folder; "~" is the user's.

    Raises:
        BuildError: neither can be written.
    """
    beside = project.version_folder
    if os.access(beside, os.W_OK | os.X_OK):
        return beside
    folder = engine_folder(state.expanduser(), project.folder.path, project.version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cure = "name another folder with --state-dir (HEADRACE_STATE_DIR), the same for the server"
        raise BuildError(
            f"neither {beside} nor the state folder {state} can be written: {error.strerror}: {cure}"
        ) from error
    return folder


def publish(artefact: Path, version_folder: Path, stamp: Stamp) -> None:
    """Put the artefact there, then its stamp; then remove the artefacts that no stamp names.

    The folder's lock is held, so that two builders follow one another and what a killed one left can be swept.

    Args:
        artefact: the file, in the store.
        version_folder: <model>/<version>.
        stamp: of the artefact.

    Raises:
        BuildError: the folder cannot be written, or the artefact is not the one of the stamp.
    """
    try:
        with locked_folder(version_folder):
            _remove(version_folder, is_temporary)
            try:
                _place(artefact, version_folder / stamp.artefact, stamp)
                put_stamp(version_folder, stamp)
            finally:
                # Also where the stamp could not be written: its artefact must not stay behind.
                with suppress(ConfigError):
                    named = {one.artefact for one in read_stamps(version_folder)}
                    _remove(version_folder, lambda name: is_artefact_name(name) and name not in named)
    except ConfigError as error:
        raise BuildError(str(error)) from error
    except FileNotFoundError as error:
        gone = version_folder if artefact.exists() else "the store"
        raise BuildError(f"the engine cannot be published, {gone} has changed meanwhile: build again") from error
    except OSError as error:
        # The file's passing name, which the error has, tells nobody anything.
        raise disk_error(OSError(error.errno, error.strerror), version_folder, stamp.size_bytes, _CURE) from error


def _place(artefact: Path, path: Path, stamp: Stamp) -> None:
    """Make `path` the artefact; left alone if it is that already, so that no watcher wakes."""
    if not artefact_problem(path, stamp.size_bytes, stamp.artefact_sha256):
        return
    temporary = temporary_name(path)
    try:
        _link_or_copy(artefact, temporary, stamp.size_bytes)
        wrong = artefact_problem(temporary, stamp.size_bytes, stamp.artefact_sha256)
        if wrong:
            raise BuildError(f"the engine in the store is damaged: {artefact}: build it again with --rebuild")
        temporary.replace(path)
    finally:
        # Renaming one name of a file to another of the same file leaves both.
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _link_or_copy(artefact: Path, path: Path, size_bytes: int) -> None:
    try:
        os.link(artefact, path)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    if free_bytes(path.parent) < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    shutil.copyfile(artefact, path)
    shutil.copymode(artefact, path)
    sync(path)


def _remove(folder: Path, which: Callable[[str], bool]) -> None:
    for path in folder.iterdir():
        if which(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)
