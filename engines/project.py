"""One version of a model that something is to be built from: its folder, its configuration, its ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.errors import BuildError
from engines.onnx_graph import file_digest
from server.config.config_reader import ModelFolder, read_model_folder, served_versions
from server.config.model_files import check_model_file, find_model_folder
from server.core.errors import ConfigError, NotFound
from server.core.model_config import ModelConfig

SOURCE = "model.onnx"

# By path, inode, size and time of change. External data are not looked at twice in one process.
_DIGESTS: dict[tuple[str, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Project:
    """What a build starts from.

    Attributes:
        folder: the model's, configuration complete.
        version: number of the version.
        source: the ONNX file.
    """

    folder: ModelFolder
    version: int
    source: Path

    @property
    def name(self) -> str:
        """Of the model."""
        return self.folder.name

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.folder.config

    @property
    def version_folder(self) -> Path:
        """Where artefacts are published."""
        return self.folder.path / str(self.version)

    def digest(self) -> str:
        """Of the ONNX file and its data; read once as long as the file stays as it is."""
        state = self.source.stat()
        known = (str(self.source), state.st_ino, state.st_size, state.st_mtime_ns)
        if known not in _DIGESTS:
            _DIGESTS[known] = file_digest(self.source)
        return _DIGESTS[known]


def open_project(model: str, repository: Path, version: int | None = None) -> Project:
    """Find a model and read its configuration.

    Args:
        model: its name in the repository, or the path of its folder.
        repository: where names are looked up.
        version: which one, the newest that is served if None.

    Raises:
        BuildError: no such model or version, or its configuration cannot be used; says why.
    """
    path = _folder(model, repository)
    if path.name.isdecimal() and (path / SOURCE).is_file():
        raise BuildError(f"{model} is a version of a model: name {path.parent.name}, with --version {path.name}")
    try:
        folder = read_model_folder(path, path.parent)
    except ConfigError as error:
        raise BuildError(f"{path.name} cannot be used: {error}") from error
    served = served_versions(folder.config, folder.versions)
    chosen = max(served, default=0) if version is None else version
    if chosen not in folder.versions:
        there = ", ".join(map(str, folder.versions))
        raise BuildError(f"{folder.name} has no version {chosen}: choose from {there}")
    source = folder.source_file(chosen)
    findings = check_model_file(source, path.parent)
    if findings:
        raise BuildError(str(findings[0]))
    return Project(folder, chosen, source)


def all_projects(repository: Path) -> list[Project | BuildError]:
    """Every model of a repository, those that cannot be read as the reason why.

    Raises:
        BuildError: there is no such repository, or nothing in it.
    """
    if not repository.is_dir():
        cure = "name yours with --model-repository DIR; `headrace models build` makes one to try"
        raise BuildError(f"there is no model repository {repository} here: {cure}")
    names = sorted(path.name for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise BuildError(f"the model repository {repository} is empty: `headrace models build` fills one")
    projects: list[Project | BuildError] = []
    for name in names:
        try:
            projects.append(open_project(name, repository))
        except BuildError as error:
            projects.append(error)
    return projects


def _folder(model: str, repository: Path) -> Path:
    try:
        return find_model_folder(model, repository)
    except NotFound as error:
        raise BuildError(str(error)) from error
