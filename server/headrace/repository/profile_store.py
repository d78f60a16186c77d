"""Profiles that outlive their process: how long batches took, kept by what decides it, so that a restart plans well at once.

<folder>/<key>.json     one version on one machine; the key is a digest of the model's file, its configuration and the machine

It is a cache: what cannot be read counts as not there, what cannot be written is told once, and the oldest go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.durable import is_temporary, write_durably
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.core.model_config import ModelConfig
from headrace.scheduling.latency_table import Profile, Times

logger = logging.getLogger("headrace.profile")

_FORMAT = 1
_MOST_FILES = 512
_MAX_BYTES = 4 << 20
_MAX_TIME_NS = 3600 * 10**9
# Of each number of rows: enough for a 95th percentile.
_TIMES = 32
# What of a configuration changes how long a batch takes, beside the model's file.
_FIELDS = {
    "max_batch_size", "cpu_max_batch_size", "backend", "instance_group", "parameters", "optimization", "input", "output",
    "preprocess", "postprocess", "isolation",
}  # fmt: skip


class Kept(NamedTuple):
    """What is kept of a version.

    Attributes:
        times_ns: by instances and rows.
        idle_ns: how long its smallest batch took before it served; 0: not known.
    """

    times_ns: Mapping[int, Times]
    idle_ns: int


NOTHING_KEPT = Kept({}, 0)


class ProfileStore:
    """Profiles in a folder, which is made when one is written. Any thread may call any method.

    Args:
        folder: where; "~" is the user's.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(RuntimeError):  # no such user: then it cannot be written, which is told
            folder = folder.expanduser()
        self._folder = folder.absolute()
        self._told = False

    def kept(self, config: ModelConfig, digest: str, runtime: str, instances: int) -> KeptProfile:
        """The place of a version's profile, by all that decides how long its batches take.

        Args:
            config: of the model, complete.
            digest: of the file that is loaded.
            runtime: that runs it.
            instances: how many.

        Raises:
            Unsupported: the machine cannot be told.
        """
        machine = _machine(runtime)
        parts = {
            "format": _FORMAT,
            "digest": digest,
            "runtime": runtime,
            "instances": instances,
            "machine": str(machine),
            "cores": cores(),
            "config": config.model_dump(mode="json", exclude_defaults=True, include=_FIELDS),
        }
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return KeptProfile(self, key, config.name, str(machine))

    def read(self, key: str) -> Kept:
        """What is kept under a key, if anything."""
        path = self._path(key)
        try:
            with path.open("rb") as stream:
                content = stream.read(_MAX_BYTES + 1)
            document: Any = json.loads(content) if len(content) <= _MAX_BYTES else None
            with suppress(OSError):  # what is read is not old
                os.utime(path)
            return _checked(document)
        except FileNotFoundError:
            return NOTHING_KEPT
        except (OSError, ValueError, RecursionError) as error:
            logger.info("the profile kept in %s is of no use: %s", path.name, error)
            return NOTHING_KEPT

    def write(self, key: str, name: str, machine: str, profile: Profile, idle_ns: int) -> None:
        """Keep a profile, if anything is known.

        Args:
            key: of the version.
            name: of the model, for people who look into the folder.
            machine: the same.
            profile: what is to be kept.
            idle_ns: as of `Kept`.
        """
        times_ns = {instances: table for instances, table in profile.times(_TIMES).items() if table}
        if not times_ns:
            return
        document = {"format": _FORMAT, "model": name, "machine": machine, "idle_ns": idle_ns, "times_ns": times_ns}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._path(key), json.dumps(document, separators=(",", ":")).encode())
            self._sweep()
        except OSError as error:
            if not self._told:
                self._told = True
                cure = "name a folder that can be written with --state-dir, or none"
                logger.warning("profiles cannot be kept in %s: %s (%s)", self._folder, error.strerror, cure)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _sweep(self) -> None:
        """Remove those used longest ago, if there are too many."""
        with os.scandir(self._folder) as entries:
            files = [entry for entry in entries if entry.name.endswith(".json") and not is_temporary(entry.name)]
        if len(files) <= _MOST_FILES:
            return
        with suppress(OSError):  # another server sweeps, too
            for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[:-_MOST_FILES]:
                Path(entry.path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """Where the profile of one version is kept.

    Attributes:
        store: the folder.
        key: in it.
        name: of the model.
        machine: in words.
    """

    store: ProfileStore
    key: str
    name: str
    machine: str

    def read(self) -> Kept:
        """As `ProfileStore.read`."""
        return self.store.read(self.key)

    def write(self, profile: Profile, idle_ns: int) -> None:
        """As `ProfileStore.write`."""
        self.store.write(self.key, self.name, self.machine, profile, idle_ns)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine(runtime: str) -> Machine:
    if runtime == "tensorrt":
        from headrace.repository.gpus import tensorrt_machine

        return tensorrt_machine()
    return onnxruntime_machine()


def _checked(document: object) -> Kept:
    """What is in a file.

    Raises:
        ValueError: it is no profile.
    """
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ValueError("it is no profile of this format")
    tables, idle_ns = document.get("times_ns"), document.get("idle_ns")
    if not isinstance(tables, Mapping) or type(idle_ns) is not int or not 0 <= idle_ns <= _MAX_TIME_NS:
        raise ValueError("it has no times")
    return Kept({_count(instances): _table(table) for instances, table in tables.items()}, idle_ns)


def _table(table: object) -> dict[int, list[int]]:
    if not isinstance(table, Mapping):
        raise ValueError("its times are not by rows")
    found: dict[int, list[int]] = {}
    for rows, times_ns in table.items():
        if not (isinstance(times_ns, list) and times_ns):
            raise ValueError("a number of rows has no times")
        if not all(type(time_ns) is int and 0 < time_ns <= _MAX_TIME_NS for time_ns in times_ns):
            raise ValueError("a time is no number of nanoseconds")
        found[_count(rows)] = times_ns
    return found


def _count(text: object) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise ValueError("a number of rows or instances is none")
    return int(text)
