"""Model repositories on disk: models in them, models given as single files, and fingerprints that show changes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path

from headrace.config.auto_complete import BACKEND_OF_SUFFIX
from headrace.config.documents import open_regular_file, refuse
from headrace.config.files import create_process_folder
from headrace.config.manifest import LAYERS_FILE, RECIPE_FILE, STAMP_FILE, is_artefact_name
from headrace.config.model_config import name_problem
from headrace.config.model_folder import CONFIG_FILES, DATA_FOLDERS, SOURCE
from headrace.config.onnx_model import external_files
from headrace.core.clock import NS_PER_S
from headrace.core.errors import ConfigError, Finding
from headrace.models.integrity.checksums import CHECKSUMS

# Folders that file systems and interpreters create.
_IGNORED_FOLDERS = {"lost+found": "it belongs to the file system", "__pycache__": "it is a cache of Python"}
# Suffix that other files have too -> begin of a model without blanks.
_BEGINS = {".json": b'{"learner"', ".txt": b"treeversion="}
_BEGIN_BYTES = 4096
# Suffixes of files that are served without a folder.
_SERVED_SUFFIXES = [f".{suffix}" for suffix in BACKEND_OF_SUFFIX if suffix not in ("plan", "engine", "py")]
# A folder with such a file and without a version folder is a misplaced model: an error, not a skipped folder.
_MODEL_SUFFIXES = {".plan", ".engine", ".pb", ".graphdef", ".savedmodel"}.union(_SERVED_SUFFIXES) - {".pkl", *_BEGINS}


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model's folder in a repository.

    Attributes:
        name: name of the folder and of the model.
        path: the folder.
        repository: the repository that has it.
        problem: reason why it cannot be served, or None.
    """

    name: str
    path: Path
    repository: Path
    problem: Finding | None = None


@dataclass(frozen=True, slots=True)
class SkippedFolder:
    """A folder of a repository that cannot be a model.

    Attributes:
        path: the folder.
        reason: why it is skipped.
        warn: True if it may contain a model, because it cannot be read.
    """

    path: Path
    reason: str
    warn: bool = False

    def __str__(self) -> str:
        return f"{self.path} is skipped: {self.reason}"


def scan(
    repositories: Sequence[Path],
    model_names: Collection[str] = (),
    on_skipped: Callable[[SkippedFolder], None] = lambda _check_folder: None,
    cache: ScanCache | None = None,
) -> list[RepositoryModel]:
    """Return every model folder, sorted by name; files, and folders that cannot be models, are skipped.

    A name that several repositories have is served from the first; the others are returned with a problem.

    Args:
        repositories: folders of models.
        model_names: models in the index; a folder of such a name stays a model while its files are replaced.
        on_skipped: called with every skipped folder.
        cache: results of earlier scans; None reads every folder.

    Raises:
        ConfigError: a repository is not a readable folder.
    """
    models: list[RepositoryModel] = []
    names: dict[str, Path] = {}
    for repository in repositories:
        if not os.path.isdir(repository):
            cure = "create it, or name another with --model-repository"
            raise refuse(str(repository), None, "the model repository is not a folder", cure)
        paths, skipped = folders(repository, cache)
        changing = [folder.path for folder in skipped if folder.path.name in model_names]
        for folder in skipped:
            if folder.path not in changing:
                on_skipped(folder)
        for path in sorted([*paths, *changing], key=attrgetter("name")):
            problem = None
            if path.name in names:
                message = f"a model of this name is in {names[path.name]} already"
                problem = Finding(str(path), None, message, "rename one of the folders")
            names.setdefault(path.name, repository)
            models.append(RepositoryModel(path.name, path, repository, problem))
    return models


def folders(repository: Path, cache: ScanCache | None = None) -> tuple[list[Path], list[SkippedFolder]]:
    """Return the folders of a repository that are models, and those that cannot be, both sorted by name.

    Args:
        repository: folder of models.
        cache: results of earlier scans; None reads every folder.

    Raises:
        ConfigError: the repository cannot be read.
    """
    try:
        with os.scandir(repository) as scanned:
            entries = [repository / name for name in sorted(entry.name for entry in scanned if _may_be_folder(entry))]
    except OSError as error:
        message = f"the model repository cannot be read: {error.strerror}"
        cure = "give the server's user read and execute permission on the folder"
        raise refuse(str(repository), None, message, cure) from None
    check_folder = _check_folder if cache is None else cache.check_folder
    skipped = [folder for entry in entries if (folder := check_folder(entry)) is not None]
    skipped_paths = {folder.path for folder in skipped}
    return [entry for entry in entries if entry not in skipped_paths], skipped


def is_model_folder(path: Path) -> bool:
    """True for a folder with a configuration file or with folders named by numbers."""
    try:
        return any(os.path.lexists(path / name) for name in CONFIG_FILES) or any(
            entry.name.isdecimal() and os.path.isdir(entry) for entry in path.iterdir()
        )
    except OSError:
        return False


def folder_names(path: Path) -> list[str]:
    """Return the names of the folders in `path`, for suggestions; empty if it cannot be read."""
    return [entry.name for entry in _folders(path)]


def _check_folder(path: Path) -> SkippedFolder | None:
    """Return the reason why a folder cannot be a model; None for a model, also for a broken one."""
    if path.name.startswith("."):
        return SkippedFolder(path, "it is hidden")
    if path.name in _IGNORED_FOLDERS:
        return SkippedFolder(path, _IGNORED_FOLDERS[path.name])
    try:
        entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        return SkippedFolder(path, f"it cannot be read: {error.strerror}", warn=True)
    if not entries:
        return SkippedFolder(path, "it is empty")
    if is_model_folder(path) or any(_has_model_file(entry) for entry in entries):
        return None
    return SkippedFolder(path, "it has neither a configuration nor a version folder such as 1")


def _has_model_file(entry: Path) -> bool:
    """True for a model file, and for a folder with one directly in it."""
    if entry.suffix in _MODEL_SUFFIXES:
        return True
    try:
        return os.path.isdir(entry) and any(file.suffix in _MODEL_SUFFIXES for file in entry.iterdir())
    except OSError:
        return False


def find(repositories: Sequence[Path], name: str) -> RepositoryModel | None:
    """Return the folder of one model in the first repository that has it, or None.

    Args:
        repositories: folders of models.
        name: checked by `name_problem`, so that it cannot leave the repository.
    """
    for repository in repositories:
        if os.path.isdir(repository / name):
            return RepositoryModel(name, repository / name, repository)
    return None


logger = logging.getLogger("headrace.control")

_PREFIX = "headrace-files-"
# Copies of larger files are logged, as they take time and disk space.
_LARGE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServedPaths:
    """Repositories behind the paths of a command line.

    Attributes:
        repositories: folders of models, in the order of the paths.
        model_filter: names of the served models, for each repository that is served in part.
        first_model: name of the first model given as a file or renamed; "" if there is none.
    """

    repositories: tuple[Path, ...] = ()
    model_filter: Mapping[Path, frozenset[str]] | None = None
    first_model: str = ""


_ModelWriter = Callable[[Path, bool], None]
"""Creates the folder of a model at a path; True for links to its files, False for copies."""


@contextmanager
def open_paths(paths: Sequence[Path], state_dir: str = "", name: str = "") -> Iterator[ServedPaths]:
    """Find or create a repository for each path; created ones are removed on exit.

    Args:
        paths: each a model file, a folder with one model file, the folder of one model, or a repository.
        state_dir: links to the files are created here if the file system allows; "" for the folder of temporary files.
        name: name of the model, if one path is a model; "" for that of the file or folder.

    Raises:
        ConfigError: a path is none of these, two have the same name, or the files cannot be linked or copied.
    """
    repositories: list[Path] = []
    model_filter: dict[Path, frozenset[str]] = {}
    models: dict[str, tuple[Path, _ModelWriter]] = {}
    if name and not paths:
        cure = "write headrace serve PATH --model-name NAME, or leave the option out"
        raise refuse(f"--model-name {name}", None, "names the model of a PATH, and there is none", cure)
    for path in paths:
        file = _model_file(path)
        absolute = Path(os.path.abspath(path))
        if file is None and not is_model_folder(path):
            repositories.append(path)
            continue
        if file is None and name in ("", absolute.name):
            repositories.append(absolute.parent)
            model_filter[absolute.parent] = model_filter.get(absolute.parent, frozenset()) | {absolute.name}
            continue
        if file is not None and os.path.lexists(file.parent / CHECKSUMS):
            cure = f"put the model into MODEL/1/{SOURCE}, write {CHECKSUMS} in MODEL, and serve MODEL"
            message = f"has {CHECKSUMS}, which is only checked in a model's folder with version folders"
            raise refuse(str(file.parent), None, message, cure)
        model_name = name if file is None else name or _model_name(path, file)
        if model_name in models:
            cure = "rename one of them, or serve a repository: headrace serve FOLDER"
            message = f"a model of the name '{model_name}' is served from {models[model_name][0]} already"
            raise refuse(str(path), None, message, cure)
        if file is None:
            models[model_name] = absolute, partial(_create_folder, absolute)
        else:
            models[model_name] = file, partial(_create_model, file, path.is_dir())
    with ExitStack() as resources:
        for model_name, (source, writer) in models.items():
            repositories.append(_repository(model_name, source, writer, state_dir, resources))
        yield ServedPaths(tuple(dict.fromkeys(repositories)), model_filter, next(iter(models), ""))


def _model_file(path: Path) -> Path | None:
    """Return the model file of a path: the file, or the only one in a folder without version folders; None for other folders.

    Raises:
        ConfigError: the path does not exist, or the file is in no format that is known.
    """
    if not path.exists():
        raise refuse(
            str(path), None, "does not exist", "name an ONNX file, the folder of a model, or a model repository"
        )
    if path.is_dir():
        try:
            if any(entry.name.isdecimal() and entry.is_dir() for entry in path.iterdir()):
                return None
            files = sorted(file for file in path.iterdir() if _is_served(file))
            files = [file for file in files if file.suffix == ".onnx"] or files
        except OSError as error:
            raise refuse(str(path), None, f"cannot be read: {error.strerror}", "check its permissions") from None
        if len(files) > 1:
            cure = f"name those to serve: headrace serve {' '.join(str(file) for file in files[:3])}"
            raise refuse(str(path), None, f"has {len(files)} model files and no version folders", cure)
        return files[0] if files else None
    if not path.is_file():
        raise refuse(str(path), None, "is not a regular file", "name an ONNX file, or a folder")
    if path.suffix in (".plan", ".engine"):
        cure = "put it in FOLDER/NAME/1/model.plan with a config.pbtxt that lists inputs and outputs, and serve FOLDER"
        raise refuse(str(path), None, "an engine cannot be served without a configuration", cure)
    if not _is_served(path):
        cure = "docs/frameworks.md has the formats; convert any other to ONNX, or put model.py into FOLDER/1 and serve FOLDER"
        raise refuse(str(path), None, f"is no model in a format that is known: {', '.join(_SERVED_SUFFIXES)}", cure)
    return path


def _is_served(file: Path) -> bool:
    """True for a model file that is served as it is, by its suffix, and for JSON and text by its begin."""
    if file.suffix not in _SERVED_SUFFIXES or not file.is_file():
        return False
    if file.suffix not in _BEGINS:
        return True
    with open_regular_file(file) as stream:
        return stream.read(_BEGIN_BYTES).translate(None, b" \t\r\n").startswith(_BEGINS[file.suffix])


def _model_name(path: Path, file: Path) -> str:
    """Return the file's name without suffix, or the folder's name if that is "model", reduced to allowed characters."""
    stem = Path(os.path.abspath(path)).name if path.is_dir() and file.stem == "model" else file.stem
    name = re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.)", "_", stem).lstrip(".-")[:128]
    return name if name and name_problem(name) is None else "model"


def _repository(name: str, source: Path, writer: _ModelWriter, state_dir: str, resources: ExitStack) -> Path:
    """Create a repository with one model.

    Args:
        name: name of the model.
        source: the ONNX file or the model's folder, for errors.
        writer: creates the model's folder.
        state_dir: as in `open_paths`.
        resources: removes the folder and closes its lock.

    Raises:
        ConfigError: no folder is writable, or the disk is full.
    """
    parents = [Path(parent) for parent in (os.path.expanduser(state_dir), tempfile.gettempdir()) if parent]
    problem: OSError | None = None
    for link in (True, False):
        for parent in parents:
            try:
                repository, lock = create_process_folder(parent, _PREFIX)
            except OSError as error:
                problem = error
                continue
            # Called in reverse: removed under its lock, or a server that starts would remove it, too.
            resources.callback(os.close, lock)
            resources.callback(shutil.rmtree, repository, ignore_errors=True)
            try:
                writer(repository / name, link)
                return repository
            except OSError as error:
                problem = error
                shutil.rmtree(repository, ignore_errors=True)
    detail = "" if problem is None else f": {problem.strerror or problem}"
    cure = "free some space, or name a folder on the same disk with --state-dir"
    raise refuse(str(source), None, f"cannot be linked or copied to {' or '.join(map(str, parents))}{detail}", cure)


def _create_folder(folder: Path, model: Path, link: bool) -> None:
    """Link or copy the folder of a model; links in it stay links, which must not lead out of it when it is loaded."""
    shutil.copytree(
        folder,
        model,
        symlinks=True,
        copy_function=lambda source, target: _link_or_copy(Path(source), Path(target), link),
    )


def _create_model(file: Path, with_folder: bool, model: Path, link: bool) -> None:
    """Link or copy a file and its external weights into a model folder; `with_folder` adds configuration and labels."""
    version = model / "1"
    version.mkdir(parents=True)
    siblings = [entry for entry in file.parent.iterdir() if entry.is_file()] if with_folder else []
    is_configured = any(entry.name in CONFIG_FILES for entry in siblings)
    # A configuration may name the file.
    _link_or_copy(file, version / (file.name if is_configured else f"model{file.suffix}"), link)
    if file.suffix != ".onnx" and not is_configured:
        (model / "config.yaml").write_text(f"default_model_filename: model{file.suffix}\n")
    with suppress(ConfigError):  # an invalid file is reported when it is loaded
        for location in external_files(file, file.name) if file.suffix == ".onnx" else ():
            (version / location).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(file.parent / location, version / location, link)
    for entry in siblings:
        if entry.name in CONFIG_FILES or entry.suffix == ".txt":
            _link_or_copy(entry, model / entry.name, link)


def _link_or_copy(source: Path, target: Path, link: bool) -> None:
    source = source.resolve()
    if link:
        os.link(source, target)
        return
    size = source.stat().st_size
    if size > _LARGE_BYTES:
        logger.info("%s is copied to %s: %d MB", source, target.parent, size // 1_000_000)
    shutil.copy2(source, target)


Fingerprint = tuple[tuple[str, int, int, int], ...]
"""(relative path, size in bytes, time of the last change in ns, inode) of every entry, sorted.

No file is read, so frequent scans cost little. Equal fingerprints mean that no file has changed in between. A fingerprint that
stays the same for a while means that no file is still being copied.
"""

ABSENT: Fingerprint = ()

# A model has a handful of files. The limit bounds the scan of a model folder that also contains a data set.
MAX_ENTRIES = 10_000
_MAX_DEPTH = 8


def fingerprint_version(path: Path) -> Fingerprint:
    """Fingerprint a version's folder and everything in it; links to files are followed, links to folders are not.

    A folder that cannot be read gives `ABSENT`.
    """
    return _fingerprint((path, "", _MAX_DEPTH))


def fingerprint_versions(path: Path) -> dict[str, Fingerprint]:
    """Return `fingerprint_version` of every version in a model's folder, by version number."""
    return {entry.name: fingerprint_version(entry) for entry in _folders(path) if entry.name.isdecimal()}


def without_builds(fingerprint: Fingerprint, model_file: str) -> Fingerprint:
    """Remove the files that builders write from a fingerprint: engines and their stamps change while the model serves.

    Args:
        fingerprint: fingerprint of the version's folder.
        model_file: name of the model's own file, which is never removed.
    """
    return tuple(entry for entry in fingerprint if entry[0] == model_file or not _is_built(entry[0]))


def _is_built(name: str) -> bool:
    return name in (STAMP_FILE, RECIPE_FILE, LAYERS_FILE) or is_artefact_name(name.removesuffix(".data"))


def fingerprint_model(path: Path) -> Fingerprint:
    """Fingerprint a model's folder: its own files, and everything in the folders of versions and data.

    A folder that cannot be read gives `ABSENT`.
    """
    return _fingerprint((path, "", 0), *_folders_of_model(path))


def _folders_of_model(path: Path) -> list[tuple[Path, str, int]]:
    below = [entry for entry in _folders(path) if entry.name.isdecimal() or entry.name in DATA_FOLDERS]
    return [(entry, entry.name + "/", _MAX_DEPTH) for entry in below]


# A folder that changed less than this before it was listed may change again without another modification time: its listing is
# not reused. Covers the resolution of file systems, and clocks of a network file system that differ a little.
_SETTLED_NS = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _Listing:
    """A fingerprint of a model's folder with all that it depends on."""

    fingerprint: Fingerprint
    # Path, modification time in nanoseconds and inode of every folder that was listed.
    folders: list[tuple[str, int, int]]
    files: list[tuple[str, int, int, int]]  # path, size, modification time and inode of every file in it


class ScanCache:
    """Results of scans of model folders, reused while no folder and no file in them has changed. One thread uses it.

    A folder is listed again only if its modification time or inode differs; each file is looked at in every scan. With
    thousands of models, a scan takes a fifth of the time.
    """

    def __init__(self) -> None:
        self._listings: dict[str, _Listing] = {}
        self._models: dict[str, tuple[int, int]] = {}  # modification time and inode of folders that are models

    def check_folder(self, path: Path) -> SkippedFolder | None:
        """Return the reason why a folder cannot be a model; None for a model."""
        name = str(path)
        try:
            status = os.stat(name)
        except OSError:
            status = None
        if status is not None and self._models.get(name) == (status.st_mtime_ns, status.st_ino):
            return None
        skipped = _check_folder(path)
        if skipped is None and status is not None and _is_settled(status.st_mtime_ns) and is_model_folder(path):
            self._models[name] = status.st_mtime_ns, status.st_ino
        else:
            self._models.pop(name, None)
        return skipped

    def fingerprint(self, path: Path) -> Fingerprint:
        """Return `fingerprint_model` of a model's folder."""
        name = str(path)
        listing = self._listings.get(name)
        if listing is not None and _is_current(listing):
            return listing.fingerprint
        self._listings.pop(name, None)
        paths = _listed_folders(path)
        if paths is None:
            return fingerprint_model(path)
        fingerprint = fingerprint_model(path)
        if len(fingerprint) < MAX_ENTRIES:
            files = [(f"{name}/{entry[0]}", *entry[1:]) for entry in fingerprint if not entry[0].endswith("/")]
            self._listings[name] = _Listing(fingerprint, paths, files)
        return fingerprint

    def keep(self, paths: Collection[str]) -> None:
        """Drop the results of all folders but these."""
        for results in (self._listings, self._models):
            for name in results.keys() - paths:
                del results[name]


def _listed_folders(path: Path) -> list[tuple[str, int, int]] | None:
    """Return the folders of a model with their modification times and inodes; None if their listings cannot be reused.

    That is: one has changed just now, cannot be read, or has a link whose target does not exist yet. Call it before the
    folders are listed: a change in between differs from the result.
    """
    result: list[tuple[str, int, int]] = []
    try:
        for folder in (str(path), *(str(below) for below, _, _ in _folders_of_model(path))):
            for parent, names, files in os.walk(folder, onerror=_raise):
                status = os.stat(parent)
                if not _is_settled(status.st_mtime_ns) or not all(os.path.exists(f"{parent}/{name}") for name in files):
                    return None
                result.append((parent, status.st_mtime_ns, status.st_ino))
                if folder == str(path):
                    names.clear()  # of its folders only those of versions and data belong to the model
    except OSError:
        return None
    return result


def _raise(error: OSError) -> None:
    raise error


def _is_settled(mtime_ns: int) -> bool:
    return mtime_ns < time.time_ns() - _SETTLED_NS


def _is_current(listing: _Listing) -> bool:
    stat = os.stat
    try:
        for name, mtime_ns, inode in listing.folders:
            status = stat(name)
            if status.st_mtime_ns != mtime_ns or status.st_ino != inode:
                return False
        for name, size_bytes, mtime_ns, inode in listing.files:
            status = stat(name)
            if status.st_mtime_ns != mtime_ns or status.st_size != size_bytes or status.st_ino != inode:
                return False
    except OSError:
        return False
    return True


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if _may_be_folder(entry))
    except OSError:
        return []


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, and for a link that cannot be followed, such as one to itself: listing it gives the error."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _fingerprint(*folders: tuple[Path, str, int]) -> Fingerprint:
    """Fingerprint folders; each is given with the prefix of its entries and the depth of the folders in it."""
    roots: list[tuple[str, int, int, int]] = []
    for folder, _, _ in folders:
        with suppress(OSError):
            # The folder's own modification time repeats what the entries show, so it is left out.
            roots.append((f"{folder.name}/", 0, 0, folder.stat().st_ino))
    if not roots:
        return ABSENT
    entries = chain.from_iterable(_walk(*folder) for folder in folders)
    return tuple(sorted([*roots, *islice(entries, max(MAX_ENTRIES - len(roots), 0))]))


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield every file below `folder`; files that vanish during the scan are skipped and found missing by the next scan."""
    try:
        with os.scandir(folder) as scanned:
            entries = list(scanned)
    except OSError:
        return
    for entry in entries:
        # Python writes __pycache__ beside the files of a model that it imports.
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
                continue
            status = entry.stat()
        except OSError:
            continue
        yield f"{prefix}{entry.name}", status.st_size, status.st_mtime_ns, status.st_ino
