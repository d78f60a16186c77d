"""The files of one model's folder: version folders, the model in each, labels; nothing outside of the repository is followed."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from headrace.config.document import refuse
from headrace.core.command_line import did_you_mean
from headrace.core.errors import Finding, NotFound
from headrace.core.model_config import ModelConfig, Problem
from headrace.core.optimization_config import CALIBRATED, asked_precision

# ImageNet's labels take 30 KB; the largest vocabularies some megabytes.
MAX_LABELS_BYTES = 16 * 1024 * 1024

_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def within(path: Path, root: Path) -> bool:
    """True if `path`, with all links followed, lies in `root`."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def shown(path: Path, repository: Path) -> str:
    """How a finding names `path`: relative to where the repository was named."""
    return path.relative_to(repository).as_posix()


def find_versions(
    folder: Path, repository: Path, others: Collection[str] = ()
) -> tuple[tuple[int, ...], list[Finding]]:
    """The version numbers on disk, ascending, and remarks on folders that look like a version and are none.

    Files beside them (labels, notes), hidden folders, `warmup` and those among `others` are passed over in silence.
    """
    passed = {*others, "warmup", "__pycache__"}
    versions = []
    findings = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        if not _VERSION.fullmatch(entry.name):
            if entry.name in passed:
                continue
            cure = "name a version's folder by a positive number without leading zeros"
            findings.append(Finding(shown(entry, repository), None, "is no version and is ignored", cure, fatal=False))
        elif not within(entry, repository):
            cure = "copy the files into the repository"
            findings.append(Finding(shown(entry, repository), None, "is a link that leads out of the repository", cure))
        else:
            versions.append(int(entry.name))
    return tuple(sorted(versions)), findings


def find_model_folder(model: str, repository: Path) -> Path:
    """Return the folder of a model that a command line names.

    Args:
        model: A name in the repository, or the path of a model's folder.
        repository: Where names are looked up.

    Returns:
        The folder, absolute. A name in the repository wins over a folder of that name elsewhere.

    Raises:
        NotFound: There is none; the text says what there is and what to write.
    """
    named, direct = repository / model, Path(model)
    for path in (named, direct):
        if path.is_dir() and (path is named or "/" in model or not named.parent.is_dir()) and not _holds_models(path):
            return path.resolve()
    names = _model_names(repository)
    if direct.is_dir() and _holds_models(direct):
        inside = _model_names(direct)
        cure = f"name one of its models ({', '.join(inside)}), e.g. {direct / inside[0]}"
        raise NotFound(f"{model} is a repository of models, not a model: {cure}")
    if direct.is_file():
        raise NotFound(f"{model} is a file, a model is a folder: put it into MODEL/1/model.onnx and name MODEL")
    if "/" in model:
        raise NotFound(
            f"there is no folder {model}: name the folder of a model, or its name with --model-repository DIR"
        )
    if not repository.is_dir():
        cure = "name yours with --model-repository DIR, or the model's folder; `headrace models build` makes one to try"
        raise NotFound(f"there is no model '{model}': there is no model repository {repository} here: {cure}")
    suggestion = did_you_mean(model, names)
    guess = f" ({suggestion})" if suggestion else ""
    has = f"it has {', '.join(names)}" if names else "it is empty"
    cure = "name one of them, a model's folder, or another repository with --model-repository DIR"
    raise NotFound(f"there is no model '{model}' in {repository}{guess}: {has}: {cure}")


def _holds_models(path: Path) -> bool:
    """True for a folder without versions whose folders have some."""
    return not _has_version(path) and any(_has_version(path / name) for name in _model_names(path))


def _has_version(path: Path) -> bool:
    try:
        return any(_VERSION.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return False


def _model_names(repository: Path) -> list[str]:
    try:
        return sorted(path.name for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def find_model_file(folder: Path, version: int, filename: str) -> Path:
    """Where the model of one version is; a folder of that name holds `model.onnx`, as in Triton, or a file of its own name."""
    path = folder / str(version) / filename
    if not path.is_dir():
        return path
    inside = path / "model.onnx"
    return inside if inside.is_file() else path / path.name


def check_model_file(path: Path, repository: Path) -> list[Finding]:
    """What is wrong with a model's file from the outside; nothing if it is there and inside of the repository."""
    name = shown(path, repository)
    if not path.is_file():
        others = (
            sorted(p.name for p in path.parent.iterdir() if p.is_file() and not p.name.startswith("."))
            if path.parent.is_dir()
            else []
        )
        there = f"the folder has {', '.join(others[:5])}; " if others else ""
        cure = f"{there}name the file {path.name}, or set default_model_filename; other formats: export to ONNX"
        return [Finding(name, None, "the model's file is missing", cure)]
    if not within(path, repository):
        return [Finding(name, None, "is a link that leads out of the repository", "copy the file into the repository")]
    return []


def filename_problem(value: str) -> tuple[str, str] | None:
    """Message and cure if `value` cannot name a file inside of a model's folder; None if it can."""
    inside = PurePosixPath(value)
    if "\0" in value or "\\" in value or inside.is_absolute() or ".." in inside.parts or not inside.parts:
        return f"{value!r:.120} leads out of the model's folder", "write a path below it, with '/' and without '..'"
    return None


def read_labels(path: Path, repository: Path) -> tuple[str, ...]:
    """The class names in a label file, one a line, blank lines at its end left out.

    Raises:
        ConfigError: missing, outside of the repository, too large, or not UTF-8.
    """
    name = shown(path, repository)
    if not path.is_file():
        raise refuse(name, None, "the label file is missing", "add it to the model's folder, or remove label_filename")
    if not within(path, repository):
        raise refuse(name, None, "is a link that leads out of the repository", "copy the file into the repository")
    try:
        content = path.read_bytes() if path.stat().st_size <= MAX_LABELS_BYTES else None
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    if content is None:
        raise refuse(name, None, f"is larger than {MAX_LABELS_BYTES} bytes", "write one short name a line")
    text = decoded(content, name)
    # Not splitlines(): that also splits at characters which may stand in a name.
    return tuple(line.rstrip("\r") for line in text.rstrip("\r\n").split("\n")) if text.strip() else ()


def label_remarks(
    config: ModelConfig, labels: dict[str, tuple[str, ...]], folder: Path, repository: Path
) -> list[Finding]:
    """Warns of label files with fewer names than the output has classes."""
    findings = []
    for output in config.output:
        classes = output.dims[-1] if output.dims else -1
        names = labels.get(output.name)
        if names is not None and len(names) < classes:
            message = f'has {len(names)} names, output "{output.name}" has {classes} classes'
            name = shown(folder / output.label_filename, repository)
            findings.append(Finding(name, None, message, "add the missing names, one a line", fatal=False))
    return findings


def sample_remarks(config: ModelConfig, folder: Path) -> list[Problem]:
    """Warns of samples that a build will not find: a model serves without them."""
    remarks = []
    for block, data in _samples(config).items():
        file = _file_of(data)
        loc = ("optimization", block, "data")
        if filename_problem(file) is not None or not within(folder / file, folder):
            message = f"{block}.data {data!r:.120} leads out of the model's folder, so nothing is built from it"
            remarks.append(
                Problem(loc, message, "copy the samples into the model's folder, and write the path from there")
            )
        elif not (folder / file).exists():
            remarks.append(Problem(loc, f"{block}.data {data!r:.120} is not there", "add it to the model's folder"))
    precision = asked_precision(config.optimization)
    if precision in CALIBRATED and not config.optimization.calibration.data:
        cure = "write optimization.calibration.data: samples in the model's folder"
        remarks.append(Problem(("optimization", "precision"), f"{precision} cannot be built without samples", cure))
    return remarks


def sample_folders(config: ModelConfig) -> set[str]:
    """The folders of a model's folder that are told of as samples."""
    parts = [PurePosixPath(_file_of(data)).parts for data in _samples(config).values()]
    return {part[0] for part in parts if part}


def sample_paths(config: ModelConfig, folder: Path) -> list[Path]:
    """The files and folders that are told of as samples, whether they are there or not."""
    return [folder / _file_of(data) for data in _samples(config).values() if filename_problem(_file_of(data)) is None]


def _samples(config: ModelConfig) -> dict[str, str]:
    told = config.optimization
    found = {"calibration": told.calibration.data, "accuracy": told.accuracy.data}
    return {block: data for block, data in found.items() if data}


def _file_of(data: str) -> str:
    """The file or folder of samples; "samples.py:held_out" is a function in a file."""
    return data.rpartition(":")[0] if ".py:" in data else data


def decoded(content: bytes, name: str) -> str:
    """The text of a file, without a byte order mark.

    Args:
        content: all of the file.
        name: of the file, for the message.

    Raises:
        ConfigError: it is not UTF-8; with the line.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refuse(name, line, "is not UTF-8", "save the file as UTF-8") from None
