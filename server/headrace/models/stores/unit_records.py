"""Records beside the files of a unit: from which objects they came, so that only changed ones are downloaded."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.models.stores.base import StoredObject
from headrace.models.stores.sync_units import Unit

RECORD = ".headrace-source.json"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a unit and the object that it is a copy of.

    Attributes:
        size: bytes.
        etag: of the object.
        modified_ns: time of the file's last change when it was complete, ns.
    """

    size: int
    etag: str
    modified_ns: int


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """Files of a whole unit on disk.

    Attributes:
        key: of the unit.
        files: by path.
    """

    key: str
    files: dict[str, LocalFile] = field(default_factory=dict)


def read_record(folder: Path) -> UnitRecord | None:
    """Return the record of a folder; None if there is none, or a file of it has been changed or removed since."""
    try:
        document = json.loads((folder / RECORD).read_text())
        record = UnitRecord(document["key"], {path: LocalFile(*values) for path, values in document["files"].items()})
        is_intact = re.fullmatch("[0-9a-f]{32}", record.key) and all(
            is_copy(folder / path, file) for path, file in record.files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if is_intact else None


def write_record(folder: Path, unit: Unit) -> UnitRecord:
    """Write the record of a folder whose files are complete."""
    files = {
        path: LocalFile(item.size, item.etag, (folder / path).stat().st_mtime_ns) for path, item in unit.objects.items()
    }
    document = {
        "key": unit.key,
        "files": {path: [file.size, file.etag, file.modified_ns] for path, file in files.items()},
    }
    temporary = folder / f"{RECORD}.new"
    temporary.write_text(json.dumps(document))
    temporary.replace(folder / RECORD)
    return UnitRecord(unit.key, files)


def is_copy(path: Path, file: LocalFile) -> bool:
    """True if a file is as it was when it was complete."""
    with suppress(OSError):
        status = os.stat(path)
        return (status.st_size, status.st_mtime_ns) == (file.size, file.modified_ns)
    return False


def matches(item: StoredObject, file: LocalFile) -> bool:
    """True if a local file is a copy of an object."""
    return (item.size, item.etag) == (file.size, file.etag)
