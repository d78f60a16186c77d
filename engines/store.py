"""The store of built engines: each under the digest of all that makes it what it is, whole or not there.

<root>/<key>/model.<key12>.onnx | .plan, stamp.json    an entry; appears by one rename
<root>/locks/<key>.lock                                held while the entry is built, and gone with the process that holds it
<root>/scratch/<random>/, <random>.lock                work in progress; swept once its builder is dead
<root>/tables/, <root>/timing/                         calibration tables, TensorRT's timing caches

Two builders of one engine, in threads or processes: the second waits in `building` and then finds the first one's entry.
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

from engines.errors import BuildError
from engines.store_errors import disk_error, told_if_full
from server.config.durable import locked, sync, write_durably
from server.config.machine import Machine
from server.config.stamps import artefact_name, artefact_problem, onnx_digest
from server.core.errors import ConfigError

DEFAULT_ROOT = Path("~/.cache/headrace/engines")
ENTRY_FILE = "stamp.json"
FORMAT = 1

_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_ENTRY_BYTES = 4 << 20
# Not to be changed by anybody: a published artefact may be the same file.
_ARTEFACT_MODE = 0o444


@dataclass(frozen=True, slots=True)
class Entry:
    """An artefact in the store.

    Attributes:
        key: of the store.
        path: of the artefact.
        sha256: of the artefact.
        size_bytes: of the artefact.
        facts: what was given to `add`, and artefact_sha256 and size_bytes.
        used_s: when it was last found or added, seconds since the epoch.
    """

    key: str
    path: Path
    sha256: str
    size_bytes: int
    facts: Mapping[str, Any]
    used_s: float = field(compare=False)


class Store:
    """The store in a folder, which is made when something is written.

    Threads may share one; `self._lock` guards what is remembered of keys and files.

    Args:
        root: the folder; "~" is the user's.

    Raises:
        BuildError: there is no such user.
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
        """SHA-256, in hex, of what makes an artefact what it is.

        Args:
            parts: plain data by name, in any order.
        """
        return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()

    @property
    def tables(self) -> Path:
        """The folder of calibration tables."""
        return self._folder("tables")

    def timing_cache(self, machine: Machine) -> Path:
        """Where kernels measured on a machine are remembered; the file may not be there yet."""
        parts = (machine.target, machine.version, machine.device, machine.capability, str(machine.driver))
        return self._folder("timing") / (re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts)) + ".cache")

    def keys(self) -> list[str]:
        """Of everything that has a place in the store, sound or not; sorted."""
        try:
            return sorted(name for name in os.listdir(self.root) if _KEY.fullmatch(name))
        except OSError:
            return []

    def find(self, key: str) -> Entry | None:
        """The entry of a key if it is there and as it was built; the first time the whole artefact is read for that."""
        try:
            entry = self.read(key)
        except BuildError:
            return None
        state = entry.path.stat(follow_symlinks=False) if entry.path.exists() else None
        known = None if state is None else (entry.sha256, state.st_ino, state.st_mtime_ns, state.st_size)
        with self._lock:
            checked = known in self._checked
        if artefact_problem(entry.path, entry.size_bytes, "" if checked else entry.sha256):
            return None
        if known is not None:
            with self._lock:
                self._checked.add(known)
        with suppress(OSError):  # a store that is only read has nothing to sweep by age either
            os.utime(entry.path.with_name(ENTRY_FILE))
        return entry

    def read(self, key: str) -> Entry:
        """What is noted of an entry; the artefact itself is not looked at.

        Raises:
            BuildError: nothing is there, or it cannot be read.
        """
        path = self._place(key) / ENTRY_FILE
        try:
            with path.open("rb") as stream:
                used_s = os.fstat(stream.fileno()).st_mtime
                content = stream.read(_MAX_ENTRY_BYTES + 1)
            told: Any = json.loads(content) if len(content) <= _MAX_ENTRY_BYTES else None
        except OSError as error:
            raise BuildError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            told = None
        match told:
            case {
                "format": 1,
                "artefact": str(name),
                "artefact_sha256": str(sha256),
                "size_bytes": int(size_bytes),
            } if isinstance(told.get("facts"), dict) and name == artefact_name(key, Path(name).suffix):
                facts = {**told["facts"], "artefact_sha256": sha256, "size_bytes": size_bytes}
                return Entry(key, path.with_name(name), sha256, size_bytes, facts, used_s)
        raise BuildError(f"{path} is not what a builder writes: remove {path.parent}")

    @contextmanager
    def building(self, key: str, waits: Callable[[str], None] | None = None) -> Iterator[None]:
        """Be the only builder of a key; who had to wait finds the entry now. May be nested in one thread.

        Args:
            key: of what is built.
            waits: told, in words, if another builder is at it.

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
                descriptor = stack.enter_context(locked(path, lambda: _tell(waits, path)))
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
                with suppress(OSError):  # still held: who waits for it finds that it has gone, and makes a new one
                    path.unlink()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the store's file system, gone afterwards; those of dead builders are swept first.

        Raises:
            BuildError: the store cannot be written, or the disk got full meanwhile, whoever noticed.
        """
        place = self._folder("scratch")
        self.sweep()
        folder = place / secrets.token_hex(8)
        lock = folder.with_suffix(".lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock))
                stack.callback(lock.unlink, missing_ok=True)
                folder.mkdir()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            except OSError as error:
                raise disk_error(error, folder) from error
            with told_if_full(self.root):
                yield folder

    def add(self, key: str, artefact: Path, facts: Mapping[str, object]) -> Entry:
        """Take an artefact in, in place of what may be there.

        Args:
            key: of the artefact.
            artefact: its file; moved if it lies in a scratch folder of this store, else copied.
            facts: plain data, for `Entry.facts`.

        Raises:
            BuildError: the disk is full, the store cannot be written, or the artefact is spread over several files.
        """
        name = artefact_name(key, artefact.suffix)
        if not name:
            raise ValueError(f"an artefact is called .onnx or .plan, not {artefact.name}")
        if artefact.with_name(artefact.name + ".data").exists():
            raise BuildError(f"{artefact.name} is larger than the 2 GB of one ONNX file: build for TensorRT instead")
        with self.building(key), self.scratch() as scratch:
            entry = scratch / "entry"
            entry.mkdir()
            self._take(artefact, entry / name)
            try:
                sha256 = onnx_digest(entry / name)
            except ConfigError as error:
                raise BuildError(f"the artefact is not whole: {error}") from error
            told = {
                "format": FORMAT,
                "key": key,
                "artefact": name,
                "artefact_sha256": sha256,
                "size_bytes": (entry / name).stat().st_size,
                "facts": dict(facts),
            }
            write_durably(entry / ENTRY_FILE, (json.dumps(told, indent=2) + "\n").encode())
            place = self._place(key)
            # A folder that holds something cannot be replaced: what is there is damaged, or unwanted.
            if place.exists():
                place.rename(scratch / "old")
            entry.rename(place)
            sync(self.root)
        return self.read(key)

    def remove(self, key: str, dry_run: bool = False) -> int | None:
        """Remove an entry, sound or not, unless somebody builds it.

        Args:
            key: of the entry.
            dry_run: only tell.

        Returns:
            Bytes that this gives back, those of files that a repository publishes too left out; None if it is being built.

        Raises:
            BuildError: the store cannot be written.
        """
        place, lock = self._place(key), self._lock_file(key)
        try:
            with locked(lock, block=False):
                freed_bytes = sum(state.st_size for state in _states(place) if state.st_nlink == 1)
                if not dry_run:
                    with self.scratch() as scratch:
                        place.rename(scratch / "old")
                lock.unlink(missing_ok=True)
                return freed_bytes
        except BlockingIOError:
            return None
        except OSError as error:
            raise disk_error(error, place) from error

    def sweep(self) -> None:
        """Remove what builders have left that were killed."""
        for lock in sorted((self.root / "scratch").glob("*.lock")):
            # Who lives holds the lock; what cannot be removed, the next one may remove.
            with suppress(OSError), locked(lock, block=False):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()

    def _take(self, artefact: Path, path: Path) -> None:
        if artefact.resolve().is_relative_to((self.root / "scratch").resolve()):
            artefact.replace(path)
        else:
            shutil.copyfile(artefact, path)
        path.chmod(_ARTEFACT_MODE)
        sync(path)

    def _place(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r:.80} is no key")
        return self.root / key

    def _lock_file(self, key: str) -> Path:
        return self._folder("locks") / (self._place(key).name + ".lock")

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, folder) from error
        return folder


def _tell(waits: Callable[[str], None] | None, lock: Path) -> None:
    if waits is not None:
        try:
            builder = f" (process {int(lock.read_bytes()[:20])})"
        except (OSError, ValueError):
            builder = ""
        waits(f"waits for another builder of the same engine{builder}")


def _states(folder: Path) -> list[os.stat_result]:
    try:
        return [path.lstat() for path in folder.iterdir()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
