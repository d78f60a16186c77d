"""A store mirrored into a local repository: downloads on one thread, changes of the repository on another.

`Mirror.sync` downloads the units that are missing and leaves them beside the repository. `Mirror.apply` moves them into it by
renames. So a version folder appears whole, and never while a model is loaded: the control thread calls `apply`.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import ModelStore, StoredObject, StoreError
from headrace.models.stores.cache import PARTIAL, VERSIONS, make_room
from headrace.models.stores.download import Downloader
from headrace.models.stores.sync_units import MODEL_FILES, Unit, UnitName, split_units
from headrace.models.stores.unit_records import RECORD, UnitRecord, is_copy, matches, read_record, write_record

# Listings that differ from the one before, during downloads, before a repository counts as changing for ever.
_ROUNDS = 5
_UNKNOWN = UnitRecord("")


@dataclass(eq=False, repr=False)
class Mirror:
    """Mirror of one URL.

    Ownership: one thread at a time calls `sync`; `apply` may run on another. `_lock` guards `_local`, `_target`, `_staged` and
    every rename in the mirror's folder; no request to the store is made while it is held.

    Attributes:
        url: of the repository.
        repository: local folder of models; the mirror's folder is the one above it.
        bound_bytes: largest size of all mirrors in the cache.
        stop: ends a download.
        connect: opens the store.
    """

    url: StoreUrl
    repository: Path
    bound_bytes: int
    stop: threading.Event
    connect: Callable[[StoreUrl], ModelStore]

    def __post_init__(self) -> None:
        self._folder = self.repository.parent
        self._store: ModelStore | None = None
        self._downloader: Downloader | None = None
        self._lock = threading.Lock()
        self._staged = _staged_units(self._folder / VERSIONS)
        self._local = _local_units(self.repository)
        self._target: Mapping[UnitName, str] | None = None

    def sync(self) -> bool:
        """Download what is missing; returns True if `apply` has changes to make.

        Units that cannot be downloaded stay as they are, all others are ready for `apply`.

        Raises:
            StoreError: the store cannot be read, or a unit of it, or the mirror cannot be written.
            Stopped: the server stops.
        """
        try:
            return self._sync()
        except OSError as error:
            cure = "free some space, or name another --repository-cache-dir"
            raise StoreError(f"{self.url} cannot be written to {self._folder}: {error.strerror}: {cure}") from error

    def _sync(self) -> bool:
        if self._store is None or self._downloader is None:
            self._store = self.connect(self.url)
            self._downloader = Downloader(self._store, self.url, self._folder / PARTIAL, self.stop)
        failures: dict[UnitName, StoreError] = {}
        rounds = 0
        while True:
            # The listing after the downloads confirms them: a version is complete once nothing of it has changed meanwhile.
            units = split_units(self.url, self._store.list_objects(self.stop))
            missing = [unit for name, unit in units.items() if name not in failures and not self._is_here(unit)]
            if not missing:
                break
            if rounds == _ROUNDS:
                names = ", ".join(str(unit.name) for unit in missing[:3])
                raise StoreError(f"{self.url} keeps changing while it is downloaded ({names}): upload whole versions")
            before = len(failures)
            kept = {*(self._target or {}).values(), *(unit.key for unit in units.values())}
            self._download(self._downloader, missing, kept, failures)
            rounds += len(failures) == before
        has_changes = self._set_target(units, failures)
        for error in failures.values():
            raise error
        for path in (self._folder / PARTIAL).iterdir():  # of objects that have been replaced meanwhile
            _remove(path)
        return has_changes

    def apply(self) -> bool:
        """Bring the repository in line with the last `sync`; returns True if it has changed."""
        with self._lock:
            if self._target is None:
                return False
            target, present = self._target, {name: record.key for name, record in self._local.items()}
            for name in present.keys() - target.keys():
                if name.version:
                    self._take_out(name)
            for name in sorted(target):  # the files of a model come before its versions
                if present.get(name) != target[name] and target[name] in self._staged:
                    self._put_in(name, target[name])
            for model in {name.model for name in present} - {name.model for name in target}:
                _remove(self.repository / model)
                self._local.pop(UnitName(model, MODEL_FILES), None)
            return present != {name: record.key for name, record in self._local.items()}

    def _is_here(self, unit: Unit) -> bool:
        with self._lock:
            return unit.key in (self._local.get(unit.name, _UNKNOWN).key, *self._staged)

    def _set_target(self, units: Mapping[UnitName, Unit], failures: Mapping[UnitName, StoreError]) -> bool:
        with self._lock:
            target: dict[UnitName, str] = {}
            for name, unit in units.items():
                # New versions do not appear beside old files of their model.
                is_held = name in failures or UnitName(name.model, MODEL_FILES) in failures
                if not is_held:
                    target[name] = unit.key
                elif name in self._local:
                    target[name] = self._local[name].key
            self._target = target
            return target != {name: record.key for name, record in self._local.items()}

    # Downloads

    def _download(
        self,
        downloader: Downloader,
        missing: Sequence[Unit],
        kept: Collection[str],
        failures: dict[UnitName, StoreError],
    ) -> None:
        """Download units beside the repository; those that have changed meanwhile are left out.

        Args:
            downloader: of the store.
            missing: units.
            kept: keys of staged units that may not be evicted.
            failures: receives the units that cannot be downloaded.
        """
        present = {unit.name: self._present_files(unit) for unit in missing}
        objects = [item for unit in missing for path, item in unit.objects.items() if path not in present[unit.name]]
        make_room(self._folder, downloader.missing_bytes(objects), self.bound_bytes, kept)
        with self._lock:
            self._staged.intersection_update({entry.name for entry in (self._folder / VERSIONS).iterdir()})
        complete, errors = downloader.fetch(objects) if objects else (set[StoredObject](), {})
        for unit in missing:
            needed = [item for path, item in unit.objects.items() if path not in present[unit.name]]
            if complete.issuperset(needed):
                self._stage(downloader, unit, present[unit.name])
            for item in needed:
                if item in errors:
                    failures[unit.name] = errors[item]

    def _present_files(self, unit: Unit) -> dict[str, Path]:
        """Return the files of a unit that the served one has already, by path."""
        folder = self._place(unit.name)
        with self._lock:
            files = self._local.get(unit.name, _UNKNOWN).files
        return {
            path: folder / path
            for path, item in unit.objects.items()
            if path in files and matches(item, files[path]) and is_copy(folder / path, files[path])
        }

    def _stage(self, downloader: Downloader, unit: Unit, present: Mapping[str, Path]) -> None:
        """Collect the files of a unit in a folder of its own."""
        final = self._folder / VERSIONS / unit.key
        new = final.with_suffix(".new")
        with self._lock:
            _remove(new)
            new.mkdir()
            for path, item in unit.objects.items():
                (new / path).parent.mkdir(parents=True, exist_ok=True)
                if path in present:
                    _link_or_copy(present[path], new / path)
                else:
                    downloader.file(item).rename(new / path)
            write_record(new, unit)
            _remove(final)
            new.rename(final)
            self._staged.add(unit.key)

    # Changes of the repository, with the lock

    def _place(self, name: UnitName) -> Path:
        return self.repository / name.model / name.version if name.version else self.repository / name.model

    def _take_out(self, name: UnitName) -> None:
        """Move a version out of the repository; it stays in the cache until the room is needed."""
        record, folder = self._local.pop(name), self._place(name)
        if not record.key:
            _remove(folder)
            return
        final = self._folder / VERSIONS / record.key
        _remove(final)
        with suppress(FileNotFoundError):  # removed by hand
            folder.rename(final)
            os.utime(final)  # the time of its last use
            self._staged.add(record.key)

    def _put_in(self, name: UnitName, key: str) -> None:
        """Move a staged unit into the repository."""
        staged, place = self._folder / VERSIONS / key, self._place(name)
        record = read_record(staged)
        if record is None:  # changed by hand: the next `sync` downloads it
            self._staged.discard(key)
            _remove(staged)
            return
        if name.version:
            if name in self._local:
                self._take_out(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            _remove(place)
            staged.rename(place)
        else:
            place.mkdir(parents=True, exist_ok=True)
            for entry in list(place.iterdir()):
                if UnitName(name.model, entry.name) not in self._local or not entry.is_dir():
                    _remove(entry)
            for entry in [*(each for each in staged.iterdir() if each.name != RECORD), staged / RECORD]:
                entry.rename(place / entry.name)
            _remove(staged)
        self._staged.discard(key)
        self._local[name] = record


def _local_units(repository: Path) -> dict[UnitName, UnitRecord]:
    """Return the units of a repository that an earlier server has left; those without a valid record have the key ""."""
    units: dict[UnitName, UnitRecord] = {}
    for model in repository.iterdir():
        if not model.is_dir():
            _remove(model)
            continue
        units[UnitName(model.name, MODEL_FILES)] = read_record(model) or _UNKNOWN
        for entry in model.iterdir():
            if entry.is_dir() and entry.name.isdecimal():
                units[UnitName(model.name, entry.name)] = read_record(entry) or _UNKNOWN
    return units


def _staged_units(versions: Path) -> set[str]:
    """Return the keys of the whole units beside a repository; others are removed."""
    keys: set[str] = set()
    for folder in versions.iterdir():
        record = read_record(folder)
        if record is not None and record.key == folder.name:
            keys.add(record.key)
        else:
            _remove(folder)
    return keys


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
