"""Folders of models: which models there are, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.core.errors import ConfigError, Finding


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


def scan(repositories: Sequence[Path]) -> list[Found]:
    """Every model folder, by name; hidden folders and files are passed over.

    A name that several repositories have is taken from the first; the others are reported with it as a problem.

    Raises:
        ConfigError: a repository is not a folder that can be read.
    """
    found: list[Found] = []
    names: dict[str, Path] = {}
    for repository in repositories:
        if not repository.is_dir():
            cure = "create it, or name another with --model-repository"
            raise ConfigError([Finding(str(repository), None, "the model repository is not a folder", cure)])
        for path in sorted(repository.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            problem = None
            if path.name in names:
                message = f"a model of this name is in {names[path.name]} already"
                problem = Finding(str(path), None, message, "rename one of the folders")
            names.setdefault(path.name, repository)
            found.append(Found(path.name, path, repository, problem))
    return found


def find(repositories: Sequence[Path], name: str) -> Found | None:
    """The folder of one model, in the first repository that has it.

    Args:
        repositories: folders of models.
        name: checked by `name_problem`, so that it leads nowhere else.
    """
    for repository in repositories:
        if (repository / name).is_dir():
            return Found(name, repository / name, repository)
    return None
