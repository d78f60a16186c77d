"""What a folder looks like from the outside: names, sizes, times of change. Nothing is read, so looking often costs little.

Two looks that are equal mean files that nobody has touched in between; a look that stays the same for a while means that nobody
is still copying.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from headrace.config.layer_report import LAYERS_FILE
from headrace.config.stamps import RECIPE_FILE, STAMP_FILE, is_artefact_name

Look = tuple[tuple[str, int, int, int], ...]
"""(relative path, size in bytes, time of the last change in ns, inode) of every entry, sorted."""

GONE: Look = ()

# A model has a handful of files; whoever keeps a data set beside it shall not have it walked over again and again.
MAX_ENTRIES = 10_000
_MAX_DEPTH = 8


def look_at_version(path: Path) -> Look:
    """Everything in a version's folder, and the folder itself; links to files are followed, links to folders are not.

    A folder that cannot be seen looks like `GONE`.
    """
    return _look([path], [(path, "")])


def look_at_versions(path: Path) -> dict[str, Look]:
    """`look_at_version` of every version in a model's folder, by number."""
    return {entry.name: look_at_version(entry) for entry in _folders(path) if entry.name.isdecimal()}


def without_builds(look: Look, model_file: str) -> Look:
    """A look at a version less what builders put beside the model: engines and their stamps come and go while it serves.

    Args:
        look: of the version's folder.
        model_file: name of the model's own file, which stays whatever it is called.
    """
    return tuple(entry for entry in look if entry[0] == model_file or not _is_built(entry[0]))


def _is_built(name: str) -> bool:
    return name in (STAMP_FILE, RECIPE_FILE, LAYERS_FILE) or is_artefact_name(name.removesuffix(".data"))


def look_at_model(path: Path) -> Look:
    """A model's folder: its own files, the version folders and the data for warm-ups with all that is in them.

    A folder that cannot be seen looks like `GONE`.
    """
    below = [(entry, entry.name + "/") for entry in _folders(path) if entry.name.isdecimal() or entry.name == "warmup"]
    return _look([path, *(entry for entry, _ in below)], [(path, ""), *below], recurse=False)


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []


def _look(roots: list[Path], folders: list[tuple[Path, str]], recurse: bool = True) -> Look:
    found: list[tuple[str, int, int, int]] = []
    for root in roots:
        try:
            state = root.stat()
        except OSError:
            continue
        # The folder's own time changes with every file that comes or goes, which the entries tell already.
        found.append((f"{root.name}/", 0, 0, state.st_ino))
    if not found:
        return GONE
    for folder, prefix in folders:
        depth = _MAX_DEPTH if recurse or prefix else 0
        for entry in _walk(folder, prefix, depth):
            found.append(entry)
            if len(found) >= MAX_ENTRIES:
                return tuple(sorted(found))
    return tuple(sorted(found))


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Every file below `folder`; what vanishes on the way is passed over, the next look tells."""
    try:
        with os.scandir(folder) as scanned:
            entries = list(scanned)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
                continue
            state = entry.stat()
        except OSError:
            continue
        yield f"{prefix}{entry.name}", state.st_size, state.st_mtime_ns, state.st_ino
