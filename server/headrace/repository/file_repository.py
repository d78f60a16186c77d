"""`headrace serve PATH...`: turns model files and folders that were named into repositories.

A model file is served from a repository of its own, which exists as long as the server: `NAME/1/model.onnx` is a hard link to
the file, or a copy where the file system allows no link. Latency tables outlive it: they are kept by the content of the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.config.config_reader import CONFIG_FILES, SOURCE
from headrace.config.onnx_signature import external_files
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import name_problem
from headrace.repository.repository import is_model_folder

logger = logging.getLogger("headrace.control")

_PREFIX = "headrace-files-"
_LOCK = "lock"
# Copies of larger files are announced, as they take time and room.
_LARGE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Named:
    """The repositories behind the paths of a command line.

    Attributes:
        repositories: folders of models, in the order of the paths.
        only: the models served of a repository that is not served as a whole.
        first: name of the first model that was named by a file, "" without one.
    """

    repositories: tuple[Path, ...] = ()
    only: Mapping[Path, frozenset[str]] | None = None
    first: str = ""


@contextmanager
def open_paths(paths: Sequence[Path], state_dir: str = "") -> Iterator[Named]:
    """Find or make a repository for each path, and remove those that were made.

    Args:
        paths: each a model file (ONNX), a folder with one model file, the folder of one model, or a repository.
        state_dir: where links to the files are made if the file system allows; "" for the folder of temporary files.

    Raises:
        ConfigError: a path is none of these; two have the same name; the files cannot be linked or copied.
    """
    repositories: list[Path] = []
    only: dict[Path, frozenset[str]] = {}
    files: dict[str, tuple[Path, bool]] = {}
    for path in paths:
        file = _model_file(path)
        if file is not None:
            name = _model_name(path, file)
            if name in files:
                cure = "rename one of them, or serve a repository: headrace serve FOLDER"
                raise _refused(path, f"a model of the name '{name}' is served from {files[name][0]} already", cure)
            files[name] = file, path.is_dir()
        elif is_model_folder(path):
            absolute = Path(os.path.abspath(path))
            repositories.append(absolute.parent)
            only[absolute.parent] = only.get(absolute.parent, frozenset()) | {absolute.name}
        else:
            repositories.append(path)
    made: list[Path] = []
    locks: list[int] = []
    try:
        for name, (file, whole) in files.items():
            repositories.append(_repository(name, file, whole, state_dir, made, locks))
        yield Named(tuple(dict.fromkeys(repositories)), only, next(iter(files), ""))
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in locks:
            os.close(lock)


def _refused(path: Path, message: str, cure: str) -> ConfigError:
    return ConfigError([Finding(str(path), None, message, cure)])


def _model_file(path: Path) -> Path | None:
    """The model file that a path names: itself, or the only one in a folder without version folders; None for a folder.

    Raises:
        ConfigError: nothing is there, or a file that is no ONNX model.
    """
    if not path.exists():
        raise _refused(path, "does not exist", "name an ONNX file, the folder of a model, or a model repository")
    if path.is_dir():
        try:
            if any(entry.name.isdecimal() and entry.is_dir() for entry in path.iterdir()):
                return None
            found = sorted(file for file in path.iterdir() if file.suffix == ".onnx" and file.is_file())
        except OSError as error:
            raise _refused(path, f"cannot be read: {error.strerror}", "check its permissions") from None
        if len(found) > 1:
            cure = f"name those to serve: headrace serve {' '.join(str(file) for file in found[:3])}"
            raise _refused(path, f"has {len(found)} ONNX files and no version folders", cure)
        return found[0] if found else None
    if path.suffix in (".plan", ".engine"):
        cure = "put it in FOLDER/NAME/1/model.plan with a config.pbtxt that lists inputs and outputs, and serve FOLDER"
        raise _refused(path, "an engine cannot be served without a configuration", cure)
    if path.suffix != ".onnx":
        raise _refused(path, "is not an ONNX file, which ends in .onnx", "export the model to ONNX")
    return path


def _model_name(path: Path, file: Path) -> str:
    """The file's name without its suffix, or the folder's where the file is called model.onnx; with a model's characters."""
    stem = Path(os.path.abspath(path)).name if path.is_dir() and file.name == SOURCE else file.stem
    name = re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.)", "_", stem).lstrip(".-")[:128]
    return name if name and name_problem(name) is None else "model"


def _repository(name: str, file: Path, whole: bool, state_dir: str, made: list[Path], locks: list[int]) -> Path:
    """A repository with one model; adds what is to be removed and closed to `made` and `locks`.

    Args:
        name: of the model.
        file: the ONNX file.
        whole: the folder of the file was named, so that its configuration and labels belong to the model.
        state_dir, made, locks: as `open_paths` has them.

    Raises:
        ConfigError: no folder can be written to, or the disk is full.
    """
    places = [Path(place) for place in (os.path.expanduser(state_dir), tempfile.gettempdir()) if place]
    problem: OSError | None = None
    for link in (True, False):
        for place in places:
            try:
                place.mkdir(parents=True, exist_ok=True)
                _remove_leftovers(place)
                repository = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            except OSError as error:
                problem = error
                continue
            made.append(repository)
            locks.append(os.open(repository / _LOCK, os.O_CREAT | os.O_RDWR))
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
            try:
                _fill(repository / name, file, whole, link)
                return repository
            except OSError as error:
                problem = error
                shutil.rmtree(repository, ignore_errors=True)
    detail = "" if problem is None else f": {problem.strerror}"
    cure = "free some space, or name a folder on the same disk with --state-dir"
    raise _refused(file, f"cannot be linked or copied to {' or '.join(map(str, places))}{detail}", cure)


def _fill(model: Path, file: Path, whole: bool, link: bool) -> None:
    """Put a file and its external weights, with `whole` also configuration and labels, where a repository has them."""
    version = model / "1"
    version.mkdir(parents=True)
    beside = [entry for entry in file.parent.iterdir() if entry.is_file()] if whole else []
    is_configured = any(entry.name in CONFIG_FILES for entry in beside)
    # A configuration may name the file.
    _put(file, version / (file.name if is_configured else SOURCE), link)
    with suppress(ConfigError):  # a file that is no model is reported when it is loaded
        for place in external_files(file, file.name):
            (version / place).parent.mkdir(parents=True, exist_ok=True)
            _put(file.parent / place, version / place, link)
    for entry in beside:
        if entry.name in CONFIG_FILES or entry.suffix == ".txt":
            _put(entry, model / entry.name, link)


def _put(source: Path, target: Path, link: bool) -> None:
    source = source.resolve()
    if link:
        os.link(source, target)
        return
    size = source.stat().st_size
    if size > _LARGE_BYTES:
        logger.info("%s is copied to %s: %d MB", source, target.parent, size // 1_000_000)
    shutil.copy2(source, target)


def _remove_leftovers(place: Path) -> None:
    """Remove the repositories of servers that were killed: nobody holds their locks."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
