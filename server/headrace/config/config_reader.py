"""From a model's folder to its configuration: read, checked, completed from the model, with every problem found.

    config.pbtxt -> pbtxt_reader -\\
                                   Document -> config_binding -> config_completion <- onnx_signature <- 1/model.onnx
    config.yaml  -> yaml_reader  -/           (screen, schema)   (complete, compare)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from headrace.config.config_binding import bind, problems_of
from headrace.config.config_completion import (
    complete_from_model,
    complete_identity,
    complete_instances,
    contradictions,
    incomplete,
)
from headrace.config.document import MAX_CONFIG_BYTES, Document, refuse
from headrace.config.model_files import (
    check_model_file,
    decoded,
    filename_problem,
    find_model_file,
    find_versions,
    label_remarks,
    read_labels,
    sample_folders,
    sample_remarks,
    shown,
    within,
)
from headrace.config.onnx_signature import OnnxSignature, read_signature
from headrace.config.pbtxt_reader import read_pbtxt
from headrace.config.triton_json import to_triton_json
from headrace.config.warmup_check import warmup_problems
from headrace.config.yaml_reader import read_yaml
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import ModelConfig, Problem, name_problem

__all__ = ["CONFIG_FILES", "ModelFolder", "read_model_folder", "served_versions", "to_triton_json"]

# What an engine is built from, where the model's own file is the engine.
SOURCE = "model.onnx"
CONFIG_FILES = {"config.pbtxt": read_pbtxt, "config.yaml": read_yaml, "config.yml": read_yaml}


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder that can be served.

    Attributes:
        name: the model's name.
        path: the folder.
        versions: version numbers on disk, ascending.
        config: complete and in agreement with the model's file.
        findings: warnings; a fatal finding would have been raised.
        labels: class names by output name, for outputs with a label file.
    """

    name: str
    path: Path
    versions: tuple[int, ...]
    config: ModelConfig
    findings: tuple[Finding, ...]
    labels: dict[str, tuple[str, ...]]

    def model_file(self, version: int) -> Path:
        """Where the model of one version is."""
        return find_model_file(self.path, version, self.config.default_model_filename)

    def source_file(self, version: int) -> Path:
        """The ONNX file of one version: the model itself, or what its engine is built from."""
        if self.config.backend == "onnxruntime":
            return self.model_file(version)
        return self.path / str(version) / SOURCE


def served_versions(config: ModelConfig, versions: Sequence[int]) -> tuple[int, ...]:
    """Which of the versions on disk the configuration's policy serves, ascending."""
    policy = config.version_policy
    ascending = sorted(versions)
    if policy.specific is not None:
        return tuple(version for version in ascending if version in policy.specific.versions)
    if policy.latest is not None:
        return tuple(ascending[-policy.latest.num_versions :])
    return tuple(ascending)


def read_model_folder(path: Path, repository: Path, instead: Document | None = None) -> ModelFolder:
    """Reads everything about a model but the model itself.

    Args:
        path: the model's folder, directly in `repository`.
        repository: the folder that nothing may lead out of.
        instead: a configuration that takes the place of the folder's own.

    Raises:
        ConfigError: the model cannot be served; with all findings, fatal ones and warnings.
    """
    reader = _FolderReader(path, repository, instead)
    try:
        return reader.read()
    except ConfigError as error:
        findings = [*reader.findings, *error.findings]
        raise ConfigError(sorted(findings, key=lambda f: (f.path, f.line or 0))) from error.__cause__
    except OSError as error:
        where = shown(Path(error.filename), repository) if _below(error.filename, repository) else path.name
        raise refuse(
            where, None, f"cannot be read: {error.strerror}", "check the files and their permissions"
        ) from None


def _below(filename: object, repository: Path) -> bool:
    return isinstance(filename, str) and Path(filename).is_relative_to(repository)


class _FolderReader:
    """One reading of one folder; collects findings on the way."""

    def __init__(self, path: Path, repository: Path, instead: Document | None) -> None:
        self._path = path
        self._repository = repository
        self._instead = instead
        self._document = Document(path.name)
        self.findings: list[Finding] = []

    def read(self) -> ModelFolder:
        self._check_folder()
        config = self._read_config()
        versions, findings = find_versions(self._path, self._repository, sample_folders(config))
        self.findings += findings
        if not versions and not any(finding.fatal for finding in findings):
            self._fail("has no version folder", f"put the model in {self._path.name}/1/model.onnx")
        self._stop_if_fatal()
        config = complete_identity(config, self._path.name)
        served = self._served(config, versions)
        self._check_filenames(config)
        self._stop_if_fatal()
        config = complete_instances(self._complete(config, served))
        self._tell(warmup_problems(config, self._path, self._repository))
        self._tell(sample_remarks(config, self._path), fatal=False)
        labels = self._read_labels(config)
        self.findings += label_remarks(config, labels, self._path, self._repository)
        self._stop_if_fatal()
        return ModelFolder(self._path.name, self._path, versions, config, tuple(self.findings), labels)

    def _fail(self, message: str, cure: str) -> None:
        self.findings.append(Finding(shown(self._path, self._repository), None, message, cure))

    def _stop_if_fatal(self) -> None:
        if any(finding.fatal for finding in self.findings):
            raise ConfigError([])

    def _tell(self, problems: list[Problem], fatal: bool = True) -> None:
        self.findings += [self._document.finding(problem, fatal) for problem in problems]

    def _check_folder(self) -> None:
        problem = name_problem(self._path.name)
        if problem is not None:
            self._fail(problem.message, problem.cure)
        elif not self._path.is_dir():
            self._fail("is not a folder", "a model is a folder with its versions in it")
        elif not within(self._path, self._repository):
            self._fail("is a link that leads out of the repository", "copy the folder into the repository")
        self._stop_if_fatal()

    def _read_config(self) -> ModelConfig:
        if self._instead is not None:
            self._document = self._instead
        elif not self._read_document():
            return ModelConfig()
        config, findings = bind(self._document)
        self.findings += findings
        if config is not None and config.name not in ("", self._path.name):
            message = f'the name "{config.name}" is not the folder\'s'
            self._tell([Problem(("name",), message, f'write "{self._path.name}", remove name, or rename the folder')])
        return ModelConfig() if config is None else config

    def _read_document(self) -> bool:
        """Reads the folder's configuration; False if it has none (or two, which is told)."""
        present = [name for name in CONFIG_FILES if os.path.lexists(self._path / name)]
        if len(present) > 1:
            self._fail(f"has both {' and '.join(present)}", "keep one of them")
        if len(present) != 1:
            return False
        file = self._path / present[0]
        name = shown(file, self._repository)
        if not within(file, self._repository):
            raise refuse(name, None, "is a link that leads out of the repository", "copy the file into the repository")
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise refuse(name, None, f"is larger than {MAX_CONFIG_BYTES} bytes", "a configuration is a page of text")
        self._document = CONFIG_FILES[present[0]](decoded(content, name), name)
        return True

    def _served(self, config: ModelConfig, versions: tuple[int, ...]) -> tuple[int, ...]:
        served = served_versions(config, versions)
        loc = ("version_policy", "specific", "versions")
        wanted = config.version_policy.specific.versions if config.version_policy.specific else ()
        absent = [version for version in wanted if version not in versions]
        if absent:
            message = f"version {', '.join(map(str, absent))} of version_policy is not there"
            there = ", ".join(map(str, versions))
            self._tell([Problem(loc, message, f"add the folder, or choose from {there}")], fatal=not served)
        for label, version in config.labels.items():
            if version not in served:
                message = f'label "{label}" names version {version}, which is not served'
                there = ", ".join(map(str, served)) or "none"
                self._tell([Problem(("labels", label), message, f"served here: {there}")], fatal=False)
        return served

    def _check_filenames(self, config: ModelConfig) -> None:
        problem = filename_problem(config.default_model_filename)
        if problem is not None or "/" in config.default_model_filename:
            message = f'default_model_filename "{config.default_model_filename}" is no file name'
            self._tell(
                [Problem(("default_model_filename",), message, "write the name of a file in the version's folder")]
            )
        for index, output in enumerate(config.output):
            problem = filename_problem(output.label_filename) if output.label_filename else None
            if problem is not None:
                self._tell([Problem(("output", index, "label_filename"), *problem)])
        for index, warmup in enumerate(config.model_warmup):
            for name, feed in warmup.inputs.items():
                problem = filename_problem(feed.input_data_file) if feed.input_data_file else None
                if problem is not None:
                    self._tell([Problem(("model_warmup", index, "inputs", name, "input_data_file"), *problem)])

    def _complete(self, config: ModelConfig, served: tuple[int, ...]) -> ModelConfig:
        """Completes from the newest version served, then compares with every other one."""
        signatures = self._read_signatures(config, served)
        self._stop_if_fatal()
        if not signatures:
            self._tell(incomplete(config))
            self._stop_if_fatal()
            # No ONNX file to complete from: the checks that wait for a complete configuration run here.
            try:
                return ModelConfig.model_validate({name: getattr(config, name) for name in ModelConfig.model_fields})
            except ValidationError as error:
                self._tell(problems_of(error, self._document.own_prefix))
                raise ConfigError([]) from None
        (file, newest), *older = signatures
        if not self._document.data:
            self._document = Document(file)
        completed, problems, remarks = complete_from_model(config, newest)
        self._tell(problems)
        self._tell(remarks, fatal=False)
        if completed is None:
            raise ConfigError([])
        for file, signature in older:
            told = [p._replace(message=f"{p.message} ({file})") for p in contradictions(completed, signature)]
            self._tell(told)
        self._stop_if_fatal()
        return completed

    def _read_signatures(self, config: ModelConfig, served: tuple[int, ...]) -> list[tuple[str, OnnxSignature]]:
        """File names and signatures of the versions served, newest first; nothing for a backend whose files cannot be read."""
        signatures: list[tuple[str, OnnxSignature]] = []
        for version in reversed(served):
            file = find_model_file(self._path, version, config.default_model_filename)
            if config.backend == "onnxruntime":
                signatures += self._signature(file)
                continue
            # An engine file tells nothing without its runtime; the ONNX file it was built from, if there, tells everything,
            # and whether an engine of it fits this machine is seen when it is loaded.
            source = self._path / str(version) / SOURCE
            if source.is_file():
                signatures += self._signature(source)
            else:
                self.findings += check_model_file(file, self._repository)
        return signatures

    def _signature(self, file: Path) -> list[tuple[str, OnnxSignature]]:
        findings = check_model_file(file, self._repository)
        if not findings:
            name = shown(file, self._repository)
            try:
                return [(name, read_signature(file, name))]
            except ConfigError as error:
                findings = error.findings
        self.findings += findings
        return []

    def _read_labels(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        labels = {}
        for output in config.output:
            if output.label_filename:
                try:
                    labels[output.name] = read_labels(self._path / output.label_filename, self._repository)
                except ConfigError as error:
                    self.findings += error.findings
        return labels
