"""Splits the objects of a store into units: a version of a model, or the other files of a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headrace.config.model_config import name_problem
from headrace.config.model_folder import CONFIG_FILES
from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import StoredObject, StoreError

MODEL_FILES = ""
"""Version of the unit with all files of a model that are in no version."""

logger = logging.getLogger("headrace.stores")

# Objects that cannot be files, of one listing, in the log.
_MAX_REPORTED = 20
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True, order=True)
class UnitName:
    """Place of a unit.

    Attributes:
        model: folder of the model.
        version: folder of the version in it, or `MODEL_FILES`.
    """

    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.model}/{self.version}" if self.version else self.model


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that appear in the repository together, or not at all.

    Attributes:
        name: place.
        objects: by path below the unit's folder; may be empty for the version of a pipeline.
        key: digest of all paths, sizes and ETags.
    """

    name: UnitName
    objects: Mapping[str, StoredObject]
    key: str


def split_units(url: StoreUrl, objects: Sequence[StoredObject]) -> dict[UnitName, Unit]:
    """Return the units of all folders that can be models.

    A URL with version folders or a configuration at its root is one model, named like the last part of its path.

    Args:
        url: of the repository.
        objects: the listing.

    Raises:
        StoreError: there is no model. An object whose path could lead out of the repository is left out, with a line in the log.
    """
    if not objects:
        raise StoreError(f"{url} has no objects: check the folder in the URL")
    refused = [item.path for item in objects if not _is_file(item.path.split("/"))]
    for path in refused[:_MAX_REPORTED]:
        _report(f"{url} has an object {path[:128]!r}, which cannot be a file and is left out: rename or remove it")
    objects = [item for item in objects if _is_file(item.path.split("/"))] if refused else objects
    if not objects:
        raise StoreError(f"{url} has an object {refused[0][:128]!r}, which cannot be a file: rename or remove it")
    folders = {path for item in objects for path in _parents(item.path)}
    paths = [(item.path.split("/"), item) for item in objects]
    if any(parts[0] in CONFIG_FILES if len(parts) == 1 else _is_version(parts[0]) for parts, _ in paths):
        name = url.base_name
        if name_problem(name) is not None:
            raise StoreError(f"{url} is one model, and '{name}' cannot be its name: put it into a folder with a name")
        paths = [([name, *parts], item) for parts, item in paths]
        folders = {path for parts, _ in paths for path in _parents("/".join(parts))}
    found: dict[UnitName, dict[str, StoredObject]] = defaultdict(dict)
    for parts, item in paths:
        _place(parts, item, folders, found)
    models = {name.model for name, files in found.items() if name.version or CONFIG_FILES.keys() & files.keys()}
    if not models:
        cure = "name a folder with one folder for each model"
        raise StoreError(f"{url} has no model: no folder has a configuration or a version folder such as 1: {cure}")
    for model in models:
        found.setdefault(UnitName(model, MODEL_FILES), {})
    return {name: _unit(url, name, files) for name, files in sorted(found.items()) if name.model in models}


def _is_file(parts: Sequence[str]) -> bool:
    return len(parts) <= _MAX_DEPTH and not any(
        part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts
    )


@lru_cache(maxsize=1024)  # a repository is listed every few seconds
def _report(text: str) -> None:
    logger.error("%s", text)


def _place(
    parts: Sequence[str],
    item: StoredObject,
    folders: Collection[str],
    found: Mapping[UnitName, dict[str, StoredObject]],
) -> None:
    """Add an object to its unit; hidden folders and files beside the models belong to none."""
    if parts[0].startswith("."):
        return
    is_version = len(parts) > 1 and _is_version(parts[1])
    # An empty object in place of a folder is what consoles create for an empty folder.
    is_folder = "/".join(parts) in folders or (item.size == 0 and is_version and len(parts) == 2)
    name = UnitName(parts[0], parts[1] if is_version else MODEL_FILES)
    path = "/".join(parts[2:] if is_version else parts[1:])
    if is_folder:
        if is_version:
            found[name].update()  # creates the unit
    elif path:
        found[name][path] = item


def _is_version(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _unit(url: StoreUrl, name: UnitName, objects: Mapping[str, StoredObject]) -> Unit:
    content = [str(url), name.model, name.version, sorted((path, o.size, o.etag) for path, o in objects.items())]
    return Unit(name, objects, hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32])
