"""Folders of models: which models there are, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config.config_reader import CONFIG_FILES
from headrace.core.errors import ConfigError, Finding

# Folders that file systems and interpreters make.
_NOT_MODELS = {"lost+found": "it belongs to the file system", "__pycache__": "it is a cache of Python"}
# A folder with such a file but without a version folder is a model put in the wrong place, which is an error with a cure.
_MODEL_SUFFIXES = (".onnx", ".plan", ".engine", ".pt", ".pb", ".graphdef", ".savedmodel")


@dataclass(frozen=True, slots=True)
class Found:
    """A model's folder in a repository.

    Attributes:
        name: of the folder, which is the model's.
        path: of the folder.
        repository: in which it lies.
        problem: why it cannot be taken, or None.
    """

    name: str
    path: Path
    repository: Path
    problem: Finding | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A folder of a repository that cannot be a model.

    Attributes:
        path: of the folder.
        reason: why it is skipped.
        warn: True if it may hide a model: it cannot be read.
    """

    path: Path
    reason: str
    warn: bool = False

    def __str__(self) -> str:
        return f"{self.path} is skipped: {self.reason}"


def scan(
    repositories: Sequence[Path],
    known: Collection[str] = (),
    on_skipped: Callable[[Skipped], None] = lambda _skipped: None,
) -> list[Found]:
    """Every model folder, by name; files, and folders that cannot be models, are passed over.

    A name that several repositories have is taken from the first; the others are reported with it as a problem.

    Args:
        repositories: folders of models.
        known: names of models; a folder of such a name stays a model while its files are being replaced.
        on_skipped: called with every folder that is passed over.

    Raises:
        ConfigError: a repository is not a folder that can be read.
    """
    found: list[Found] = []
    names: dict[str, Path] = {}
    for repository in repositories:
        if not os.path.isdir(repository):
            cure = "create it, or name another with --model-repository"
            raise ConfigError([Finding(str(repository), None, "the model repository is not a folder", cure)])
        models, skipped = folders(repository)
        back = [folder.path for folder in skipped if folder.path.name in known]
        for folder in skipped:
            if folder.path not in back:
                on_skipped(folder)
        for path in sorted([*models, *back]):
            problem = None
            if path.name in names:
                message = f"a model of this name is in {names[path.name]} already"
                problem = Finding(str(path), None, message, "rename one of the folders")
            names.setdefault(path.name, repository)
            found.append(Found(path.name, path, repository, problem))
    return found


def folders(repository: Path) -> tuple[list[Path], list[Skipped]]:
    """The folders of a repository that are models, and those that cannot be, both by name.

    Raises:
        ConfigError: the repository cannot be read.
    """
    try:
        entries = sorted(entry for entry in repository.iterdir() if os.path.isdir(entry))
    except OSError as error:
        message = f"the model repository cannot be read: {error.strerror}"
        cure = "let the user that the server runs as read and enter the folder"
        raise ConfigError([Finding(str(repository), None, message, cure)]) from None
    skipped = [folder for entry in entries if (folder := _skipped(entry)) is not None]
    passed = {folder.path for folder in skipped}
    return [entry for entry in entries if entry not in passed], skipped


def is_model_folder(path: Path) -> bool:
    """True for a folder with a configuration or with folders named by numbers."""
    try:
        return any(os.path.lexists(path / name) for name in CONFIG_FILES) or any(
            entry.name.isdecimal() and os.path.isdir(entry) for entry in path.iterdir()
        )
    except OSError:
        return False


def folder_names(path: Path) -> list[str]:
    """The names of the folders in `path`, for suggestions; none if it cannot be read."""
    try:
        return [entry.name for entry in path.iterdir() if os.path.isdir(entry)]
    except OSError:
        return []


def _skipped(path: Path) -> Skipped | None:
    """Why a folder cannot be a model; None for one that is, or that its owner takes for one."""
    if path.name.startswith("."):
        return Skipped(path, "it is hidden")
    if path.name in _NOT_MODELS:
        return Skipped(path, _NOT_MODELS[path.name])
    try:
        entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        return Skipped(path, f"it cannot be read: {error.strerror}", warn=True)
    if not entries:
        return Skipped(path, "it is empty")
    if is_model_folder(path) or any(_holds_model_file(entry) for entry in entries):
        return None
    return Skipped(path, "it has neither a configuration nor a version folder such as 1")


def _holds_model_file(entry: Path) -> bool:
    """True for a model's file, and for a folder with one directly in it."""
    if entry.suffix in _MODEL_SUFFIXES:
        return True
    try:
        return os.path.isdir(entry) and any(file.suffix in _MODEL_SUFFIXES for file in entry.iterdir())
    except OSError:
        return False


def find(repositories: Sequence[Path], name: str) -> Found | None:
    """The folder of one model, in the first repository that has it.

    Args:
        repositories: folders of models.
        name: checked by `name_problem`, so that it leads nowhere else.
    """
    for repository in repositories:
        if os.path.isdir(repository / name):
            return Found(name, repository / name, repository)
    return None
