"""Writes a smaller model into the repository: a new model, or a new version of one. It appears complete or not at all."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import write_onnx
from headrace_engines.project import SOURCE, Project, open_project
from headrace_engines.store import disk_error

REPORT_FILE = "optimize.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# The model's name at the start of a line; JSON is YAML.
_CONFIG_NAME = r"""(?m)^((?:\{{\s*)?"?name"?\s*:\s*)["']?{name}["']?(?=\s|,|$)"""
_CURE = "name another repository with --model-repository, or make room"


class StagedModel:
    """A model that is complete in a hidden folder of the repository and not yet published.

    Attributes:
        project: the staged version.
        final: folder of the version after `publish`.
        is_new: True for a new model, False for a new version of an existing one.
    """

    def __init__(self, project: Project, final: Path, is_new: bool) -> None:
        self.project = project
        self.final = final
        self.is_new = is_new

    def publish(self, report: Mapping[str, Any]) -> None:
        """Write the report beside the model and move the model to its place.

        Raises:
            BuildError: the repository cannot be written, or the place is taken meanwhile.
        """
        staged = self.project.version_folder
        try:
            text = json.dumps(report, indent=2, allow_nan=False) + "\n"
            (staged / REPORT_FILE).write_text(text, encoding="utf-8")
            if self.is_new:
                staged.parent.rename(self.final.parent)
            else:
                staged.rename(self.final)
        except OSError as error:
            raise disk_error(error, self.final, cure=_CURE) from error


@contextmanager
def staged_model(original: Project, model: onnx.ModelProto, name: str, repository: Path) -> Iterator[StagedModel]:
    """Yield a smaller model with the configuration and files of the original one; what is not published is removed.

    Args:
        original: the model that it comes from.
        model: the smaller model.
        name: name of the new model; if it exists, the smaller model is its next version.
        repository: folder of the repository.

    Raises:
        BuildError: the name is invalid, the repository cannot be written, or the model does not fit the configuration.
    """
    if not _NAME.fullmatch(name):
        raise BuildError(f"--name is {name!r}: write letters, digits, dots, dashes and underscores")
    existing = repository / name
    is_new = not existing.exists()
    version = (
        1 if is_new else 1 + max((int(path.name) for path in existing.iterdir() if path.name.isdecimal()), default=0)
    )
    stage = repository / f".optimize-{secrets.token_hex(6)}"
    try:
        try:
            folder = stage / name
            repository.mkdir(parents=True, exist_ok=True)
            _copy_files(original.folder.path if is_new else existing, folder)
            if is_new:
                _rename_config(folder, original.name, name)
            (folder / str(version)).mkdir()
            write_onnx(model, folder / str(version) / SOURCE)
        except OSError as error:
            raise disk_error(error, stage, cure=_CURE) from error
        yield StagedModel(open_project(str(folder), stage, version), existing / str(version), is_new)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _copy_files(source: Path, target: Path) -> None:
    """Copy a model's folder without its versions."""
    versions = {path.name for path in source.iterdir() if path.is_dir() and path.name.isdecimal()}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return versions & set(names) if Path(folder) == source else set()

    shutil.copytree(source, target, ignore=ignored)


def _rename_config(folder: Path, old: str, new: str) -> None:
    pattern = _CONFIG_NAME.format(name=re.escape(old))
    for file in ("config.yaml", "config.pbtxt"):
        path = folder / file
        if path.exists():
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(pattern, rf'\1"{new}"', text, count=1), encoding="utf-8")
