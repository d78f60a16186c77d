"""Store of built engines, keyed by the digest of their inputs, and publishing from it. Entries are complete or absent.

<root>/<key>/model.<key12>.onnx | .plan, stamp.json    an entry; created by one rename
<root>/locks/<key>.lock                                file lock of a running build; released when its process ends
<root>/scratch/<random>/, <random>.lock                work in progress; removed after its builder has ended
<root>/tables/, <root>/timing/                         calibration tables, TensorRT's timing caches

Two builders of one engine, in threads or processes: the second waits in `building` and then reads the first builder's entry.

Publishing puts an artefact beside its model. A reader of the folder sees the old or the new one, always complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.digests import onnx_digest
from headrace.config.files import is_temporary, locked, locked_folder, sync, temporary_name, write_durably
from headrace.config.machine import Machine
from headrace.config.manifest import Stamp, add_stamp, artefact_name, artefact_problem, is_artefact_name, read_stamps
from headrace.config.serving_plan import engine_folder
from headrace.core.errors import ConfigError

from headrace_engines.errors import BuildError
from headrace_engines.project import Project
from headrace_engines.report import size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
# A disk with fewer free bytes counts as full.
_MIN_FREE_BYTES = 1 << 20
CURE = "name another folder with --cache"


def disk_error(error: OSError, path: Path, needed_bytes: int = 0, cure: str = CURE) -> BuildError:
    """Return the error to raise for an OSError of a write.

    Args:
        error: error of the write.
        path: the written file, used if the error names none.
        needed_bytes: bytes that the write needs; 0 if unknown.
        cure: alternative remedy, for the message.
    """
    path_named = next(reversed(_error_paths(error)), path)
    if error.errno in _FULL:
        return BuildError(_full(path_named, needed_bytes, cure))
    if error.errno == errno.EFBIG:
        needed = f", {size(needed_bytes)} are needed" if needed_bytes else ""
        return BuildError(f"{path_named} would be larger than a file may be here{needed}: raise `ulimit -f`, or {cure}")
    if error.errno in _FORBIDDEN:
        return BuildError(f"{path_named} cannot be written ({error.strerror}): check its permissions, or {cure}")
    return BuildError(f"{path_named} cannot be used ({error.strerror or error}): check the disk, or {cure}")


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn an error in this block into a BuildError if the folder's file system causes it.

    Libraries report a full disk in different messages, or write short files. So the free space is measured.

    Raises:
        BuildError: the disk is full, or a file in the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if any(path.is_relative_to(folder) for path in _error_paths(error)) or error.errno in (*_FULL, errno.EFBIG):
            raise disk_error(error, folder) from error
        raise
    except Exception as error:
        if free_bytes(folder) < _MIN_FREE_BYTES:
            raise BuildError(_full(folder, 0, CURE)) from error
        raise


def free_bytes(folder: Path) -> int:
    """Return the free bytes on a folder's disk for this user; 2**62 if they cannot be read."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except OSError:
            continue
    return 1 << 62


def _error_paths(error: OSError) -> list[Path]:
    """Return the files of an error: the read or renamed file, then the written one."""
    return [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]


def _full(path: Path, needed_bytes: int, cure: str) -> str:
    needed = f"{size(needed_bytes)} are needed, " if needed_bytes else ""
    free = size(free_bytes(path))
    return f"{path}: the disk is full ({needed}{free} are free): make room, e.g. by `headrace engines gc`, or {cure}"


DEFAULT_ROOT = Path("~/.cache/headrace/engines")
ENTRY_FILE = "stamp.json"
FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_ENTRY_BYTES = 4 << 20
# Read-only: a published artefact may be the same file.
_ARTEFACT_MODE = 0o444


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """An artefact in the store.

    Attributes:
        key: key in the store, 64 hex digits.
        path: file of the artefact.
        sha256: digest of the artefact, in hex.
        size_bytes: size of the artefact.
        facts: facts passed to `add`, with artefact_sha256 and size_bytes.
        used_s: time of the last `find` or `add`, in seconds since the epoch.
    """

    key: str
    path: Path
    sha256: str
    size_bytes: int
    facts: Mapping[str, Any]
    used_s: float = field(compare=False)


class Store:
    """Store of engines in a folder, created by the first write.

    Threads may share one. `self._lock` guards `_builders` and `_checked`.

    Args:
        root: folder of the store; "~" is expanded.

    Raises:
        BuildError: the user of "~user" does not exist.
    """

    def __init__(self, root: Path) -> None:
        try:
            self.root = root.expanduser().absolute()
        except RuntimeError:
            raise BuildError(f"{root} cannot be found: name the folder of the store with --cache") from None
        self._lock = threading.Lock()
        self._builders: dict[str, int] = {}
        self._checked: set[tuple[str, int, int, int]] = set()

    @staticmethod
    def key(parts: Mapping[str, object]) -> str:
        """Return the key of an artefact: the SHA-256, in hex, of everything that defines it.

        Args:
            parts: JSON values by name, in any order.
        """
        return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()

    @property
    def tables(self) -> Path:
        """Folder of calibration tables; created if missing."""
        return self._folder("tables")

    def timing_cache(self, machine: Machine) -> Path:
        """Return the timing cache file of a machine; it may not exist yet."""
        parts = (machine.target, machine.version, machine.device, machine.capability, str(machine.driver))
        return self._folder("timing") / (re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts)) + ".cache")

    def keys(self) -> list[str]:
        """Return the keys of all entries, valid or not; sorted."""
        try:
            return sorted(name for name in os.listdir(self.root) if _KEY.fullmatch(name))
        except OSError:
            return []

    def find(self, key: str) -> StoreEntry | None:
        """Return the entry of a key if its artefact is intact, else None; the first call reads the whole artefact."""
        try:
            entry = self.read(key)
        except BuildError:
            return None
        state = entry.path.stat(follow_symlinks=False) if entry.path.exists() else None
        state_key = None if state is None else (entry.sha256, state.st_ino, state.st_mtime_ns, state.st_size)
        with self._lock:
            checked = state_key in self._checked
        if artefact_problem(entry.path, entry.size_bytes, "" if checked else entry.sha256):
            return None
        if state_key is not None:
            with self._lock:
                self._checked.add(state_key)
        with suppress(OSError):  # a read-only store has no removal by age
            os.utime(entry.path.with_name(ENTRY_FILE))
        return entry

    def read(self, key: str) -> StoreEntry:
        """Read the record of an entry, without its artefact.

        Raises:
            BuildError: the entry does not exist or cannot be read.
        """
        path = self._entry_folder(key) / ENTRY_FILE
        try:
            with path.open("rb") as stream:
                used_s = os.fstat(stream.fileno()).st_mtime
                content = stream.read(_MAX_ENTRY_BYTES + 1)
            document: Any = json.loads(content) if len(content) <= _MAX_ENTRY_BYTES else None
        except OSError as error:
            raise BuildError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            document = None
        match document:
            case {
                "format": 1,
                "artefact": str(name),
                "artefact_sha256": str(sha256),
                "size_bytes": int(size_bytes),
            } if isinstance(document.get("facts"), dict) and name == artefact_name(key, Path(name).suffix):
                facts = {**document["facts"], "artefact_sha256": sha256, "size_bytes": size_bytes}
                return StoreEntry(key, path.with_name(name), sha256, size_bytes, facts, used_s)
        raise BuildError(f"{path} was not written by a builder: remove {path.parent}")

    @contextmanager
    def building(self, key: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the lock of a key during a build. After a wait the entry may exist. May be nested in one thread.

        Args:
            key: key of the artefact.
            on_wait: called with a text if another builder holds the lock.

        Raises:
            BuildError: the store cannot be written or locked.
        """
        with self._lock:
            nested = self._builders.get(key) == threading.get_ident()
        if nested:
            yield
            return
        path = self._lock_file(key)
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(locked(path, lambda: _report_waiting(on_wait, path)))
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            except OSError as error:
                raise disk_error(error, path) from error
            with self._lock:
                self._builders[key] = threading.get_ident()
            try:
                yield
            finally:
                with self._lock:
                    del self._builders[key]
                with suppress(OSError):  # still held: a waiting builder notices the removal and creates a new file
                    path.unlink()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield an empty folder on the store's file system, removed at the end; remove those of dead builders first.

        Raises:
            BuildError: the store cannot be written, or the disk becomes full within the block.
        """
        parent = self._folder("scratch")
        self.sweep()
        folder = parent / secrets.token_hex(8)
        lock = folder.with_suffix(".lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock))
                stack.callback(lock.unlink, missing_ok=True)
                folder.mkdir()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            except OSError as error:
                raise disk_error(error, folder) from error
            with full_disk_explained(self.root):
                yield folder

    def add(self, key: str, artefact: Path, facts: Mapping[str, object]) -> StoreEntry:
        """Add an artefact; replace an entry of the same key.

        Args:
            key: key of the artefact.
            artefact: its file; moved from a scratch folder of this store, else copied.
            facts: JSON values by name, for `StoreEntry.facts`.

        Raises:
            BuildError: the disk is full, the store cannot be written, or the artefact has several files.
        """
        name = artefact_name(key, artefact.suffix)
        if not name:
            raise ValueError(f"the artefact is {artefact.name}: its suffix must be .onnx or .plan")
        if artefact.with_name(artefact.name + ".data").exists():
            raise BuildError(f"{artefact.name} is larger than the 2 GB of one ONNX file: build for TensorRT instead")
        with self.building(key), self.scratch() as scratch:
            entry = scratch / "entry"
            entry.mkdir()
            self._move_in(artefact, entry / name)
            try:
                sha256 = onnx_digest(entry / name)
            except ConfigError as error:
                raise BuildError(f"the artefact is not whole: {error}") from error
            document = {
                "format": FORMAT,
                "key": key,
                "artefact": name,
                "artefact_sha256": sha256,
                "size_bytes": (entry / name).stat().st_size,
                "facts": dict(facts),
            }
            write_durably(entry / ENTRY_FILE, (json.dumps(document, indent=2) + "\n").encode())
            final = self._entry_folder(key)
            # A folder with files cannot be replaced by a rename. The old entry is damaged or replaced on request.
            if final.exists():
                final.rename(scratch / "old")
            entry.rename(final)
            sync(self.root)
        return self.read(key)

    def remove(self, key: str, dry_run: bool = False) -> int | None:
        """Remove an entry, valid or not, except during its build.

        Args:
            key: key of the entry.
            dry_run: return the bytes without removing.

        Returns:
            Freed bytes, without files that are also published by a hard link; None if the entry is being built.

        Raises:
            BuildError: the store cannot be written.
        """
        folder, lock = self._entry_folder(key), self._lock_file(key)
        try:
            with locked(lock, block=False):
                freed_bytes = sum(state.st_size for state in _states(folder) if state.st_nlink == 1)
                if not dry_run:
                    with self.scratch() as scratch:
                        folder.rename(scratch / "old")
                lock.unlink(missing_ok=True)
                return freed_bytes
        except BlockingIOError:
            return None
        except OSError as error:
            raise disk_error(error, folder) from error

    def sweep(self) -> None:
        """Remove the scratch folders of killed builders."""
        for lock in sorted((self.root / "scratch").glob("*.lock")):
            # A running builder holds the lock. The next sweep retries what cannot be removed.
            with suppress(OSError), locked(lock, block=False):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()

    def _move_in(self, artefact: Path, path: Path) -> None:
        if artefact.resolve().is_relative_to((self.root / "scratch").resolve()):
            artefact.replace(path)
        else:
            shutil.copyfile(artefact, path)
        path.chmod(_ARTEFACT_MODE)
        sync(path)

    def _entry_folder(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"the key is {key!r:.80}: it must be 64 hex digits")
        return self.root / key

    def _lock_file(self, key: str) -> Path:
        return self._folder("locks") / (self._entry_folder(key).name + ".lock")

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, folder) from error
        return folder


def _report_waiting(on_wait: Callable[[str], None] | None, lock: Path) -> None:
    if on_wait is not None:
        try:
            builder = f" (process {int(lock.read_bytes()[:20])})"
        except (OSError, ValueError):
            builder = ""
        on_wait(f"waits for another builder of the same engine{builder}")


def _states(folder: Path) -> list[os.stat_result]:
    try:
        return [path.lstat() for path in folder.iterdir()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise


DEFAULT_STATE = Path("~/.cache/headrace/state")
_CURE = "build into a copy of the repository; the engine stays in the store, building again takes seconds"
# Errors of a hard link: another file system, one without hard links, or a file of another user.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def publishing_folder(project: Project, state: Path = DEFAULT_STATE) -> Path:
    """Return the folder for a version's engine: the version's folder, or one in the state folder if that is read-only.

    The server searches both.

    Args:
        project: the version.
        state: state folder of the server; "~" is expanded.

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
    """Publish an artefact: write it, then its stamp, then remove artefacts that no stamp names.

    The lock of the folder serialises builders and allows the removal of temporary files of killed ones.

    Args:
        artefact: file in the store.
        version_folder: <model>/<version>, or its folder in the state folder.
        stamp: stamp of the artefact.

    Raises:
        BuildError: the folder cannot be written, or the artefact differs from its stamp.
    """
    try:
        with locked_folder(version_folder):
            _remove(version_folder, is_temporary)
            try:
                _put_artefact(artefact, version_folder / stamp.artefact, stamp)
                add_stamp(version_folder, stamp)
            finally:
                # Also after a failed write of the stamp: an artefact without a stamp must not remain.
                with suppress(ConfigError):
                    named = {published.artefact for published in read_stamps(version_folder)}
                    _remove(version_folder, lambda name: is_artefact_name(name) and name not in named)
    except ConfigError as error:
        raise BuildError(str(error)) from error
    except FileNotFoundError as error:
        changed = version_folder if artefact.exists() else "the store"
        raise BuildError(f"the engine cannot be published, {changed} has changed meanwhile: build again") from error
    except OSError as error:
        # The error names a temporary file, which means nothing to users.
        raise disk_error(OSError(error.errno, error.strerror), version_folder, stamp.size_bytes, _CURE) from error


def _put_artefact(artefact: Path, path: Path, stamp: Stamp) -> None:
    """Create the artefact at `path`; an identical file is not touched, so that file watchers do not fire."""
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
