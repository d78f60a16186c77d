r"""Reads a model's folder: version folders, labels, warm-up data and the configuration, and reports every problem.

    config.pbtxt -> read_pbtxt -\
                                 Document -> bind -> complete <- read_signature <- 1/model.onnx
    config.yaml  -> read_yaml  -/

Nothing outside of the repository is read. Problems of `model_warmup` are found before anything is loaded;
`headrace.models.warmup` creates and runs the requests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from headrace_reports.command_line import did_you_mean
from pydantic import ValidationError

from headrace.config import auto_complete
from headrace.config.binding import bind, problems_of
from headrace.config.config_base import Location, Problem, is_version_number
from headrace.config.documents import (
    MAX_CONFIG_BYTES,
    Document,
    open_regular_file,
    read_pbtxt,
    read_yaml,
    refuse,
    within,
)
from headrace.config.model_config import ModelConfig, name_problem
from headrace.config.onnx_model import OnnxSignature, read_signature
from headrace.config.optimization_config import CALIBRATED, requested_precision
from headrace.config.python_rules import decoupled_problems, python_problems
from headrace.config.ragged_rules import is_ragged
from headrace.config.sequence_rules import iterative_problems, state_backend_problems
from headrace.config.tensor_config import ModelInput, WarmupInput
from headrace.config.traffic_config import own_traffic_problems
from headrace.core.errors import ConfigError, Finding, NotFound
from headrace.core.store_url import is_store_url
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Datatype, fits_shape

# ImageNet's labels take 30 KB; the largest vocabularies some megabytes.
MAX_LABELS_BYTES = 16 * 1024 * 1024

_LEADS_OUT = "is a link that leads out of the repository"
_COPY_FILE = "copy the file into the repository"


def relative_name(path: Path, repository: Path) -> str:
    """Return the name of `path` in findings: relative to the repository."""
    return path.relative_to(repository).as_posix()


def find_versions(
    folder: Path, repository: Path, ignored: Collection[str] = ()
) -> tuple[tuple[int, ...], list[Finding]]:
    """Return the version numbers on disk, ascending, and remarks on folders that look like a version and are none.

    Files, hidden folders, those of `DATA_FOLDERS` and the folders in `ignored` are skipped without a remark.

    Args:
        folder: the model's folder.
        repository: links must not lead out of this folder.
        ignored: names of other folders of the model, e.g. of samples.
    """
    ignored_names = {*ignored, *DATA_FOLDERS, "__pycache__"}
    versions = []
    findings = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        name = relative_name(entry, repository)
        if not is_version_number(entry.name):
            cure = f"name a version's folder by a number from 1 to {2**63 - 1}, without leading zeros"
            if entry.name not in ignored_names:
                findings.append(Finding(name, None, "is not a version and is ignored", cure, fatal=False))
        elif not within(entry, repository):
            findings.append(Finding(name, None, _LEADS_OUT, "copy the files into the repository"))
        else:
            versions.append(int(entry.name))
    return tuple(sorted(versions)), findings


def find_model_folder(model: str, repository: Path) -> Path:
    """Return the folder of a model in a command line.

    Args:
        model: name in the repository, or path of a model's folder.
        repository: repository in which names are looked up.

    Returns:
        The absolute folder. A name in the repository wins over a folder of that name elsewhere.

    Raises:
        NotFound: there is no such model; the text has the available models.
    """
    in_repository, direct = repository / model, Path(model)
    for path in (in_repository, direct):
        is_named = path is in_repository or "/" in model or not in_repository.parent.is_dir()
        if is_named and path.is_dir() and not _has_models(path):
            return path.resolve()
    names = _model_names(repository)
    if direct.is_dir() and _has_models(direct):
        models = _model_names(direct)
        cure = f"name one of its models ({', '.join(models)}), e.g. {direct / models[0]}"
        raise NotFound(f"{model} is a repository of models, not a model: {cure}")
    if direct.is_file():
        raise NotFound(f"{model} is a file, a model is a folder: move it to MODEL/1/model.onnx and name MODEL")
    if is_store_url(model):
        raise NotFound(f"{model} is a URL: write the name of the model, and its repository as --model-repository URL")
    if "/" in model:
        cure = "name the folder of a model, or its name with --model-repository DIR"
        raise NotFound(f"there is no folder {model}: {cure}")
    if not repository.is_dir():
        cure = "name a repository with --model-repository DIR, or the model's folder; `headrace models build` builds a demo"
        raise NotFound(f"there is no model '{model}': there is no model repository {repository} here: {cure}")
    suggestion = did_you_mean(model, names)
    guess = f" ({suggestion})" if suggestion else ""
    contents = f"it has {', '.join(names)}" if names else "it is empty"
    cure = "name one of them, a model's folder, or another repository with --model-repository DIR"
    raise NotFound(f"there is no model '{model}' in {repository}{guess}: {contents}: {cure}")


def _has_models(path: Path) -> bool:
    """True for a folder without versions whose folders have versions."""
    return not _has_version(path) and any(_has_version(path / name) for name in _model_names(path))


def _has_version(path: Path) -> bool:
    try:
        return any(is_version_number(entry.name) for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return False


def _model_names(repository: Path) -> list[str]:
    try:
        return sorted(path.name for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def find_model_file(folder: Path, version: int, filename: str) -> Path:
    """Return the model file of a version; if that is a folder, `model.onnx` in it, as in Triton, or a file of its own name."""
    path = folder / str(version) / filename
    if not path.is_dir():
        return path
    inside = path / "model.onnx"
    return inside if inside.is_file() else path / path.name


def check_model_file(path: Path, repository: Path) -> list[Finding]:
    """Return findings on a model's file: missing, or outside of the repository."""
    name = relative_name(path, repository)
    if not path.is_file():
        entries = path.parent.iterdir() if path.parent.is_dir() else ()
        siblings = sorted(p.name for p in entries if p.is_file() and not p.name.startswith("."))
        contents = f"the folder has {', '.join(siblings[:5])}; " if siblings else ""
        others = [each for each in siblings if each.rpartition(".")[2] in auto_complete.BACKEND_OF_SUFFIX]
        cure = f"{contents}name the file {path.name}, or set default_model_filename"
        if others and path.suffix not in [Path(each).suffix for each in others]:
            backend = auto_complete.BACKEND_OF_SUFFIX[others[0].rpartition(".")[2]]
            cure = f'{contents}write backend: "{backend}" and default_model_filename: "{others[0]}"'
        return [Finding(name, None, "the model's file is missing", cure)]
    if not within(path, repository):
        return [Finding(name, None, _LEADS_OUT, _COPY_FILE)]
    return []


def filename_problem(value: str) -> tuple[str, str] | None:
    """Return message and cure if `value` is not a file name inside of a model's folder; else None."""
    inside = PurePosixPath(value)
    if "\0" in value or "\\" in value or inside.is_absolute() or ".." in inside.parts or not inside.parts:
        return f"{value!r:.120} leads out of the model's folder", "write a path below it, with '/' and without '..'"
    return None


def read_labels(path: Path, repository: Path) -> tuple[str, ...]:
    """Read the class names in a label file, one a line; blank lines at its end are dropped.

    Raises:
        ConfigError: the file is missing, outside of the repository, too large, or not UTF-8.
    """
    name = relative_name(path, repository)
    if not path.is_file():
        raise refuse(name, None, "the label file is missing", "add it to the model's folder, or remove label_filename")
    try:
        text = _read_text(path, repository, MAX_LABELS_BYTES, "write one short name a line")
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    # Not splitlines(): it also splits at characters that a name may contain.
    return tuple(line.rstrip("\r") for line in text.rstrip("\r\n").split("\n")) if text.strip() else ()


def label_remarks(
    config: ModelConfig, labels: dict[str, tuple[str, ...]], folder: Path, repository: Path
) -> list[Finding]:
    """Return warnings for label files with fewer names than the output has classes."""
    findings = []
    for output in config.output:
        classes = output.dims[-1] if output.dims else -1
        names = labels.get(output.name)
        if names is not None and len(names) < classes:
            message = f'has {len(names)} names, output "{output.name}" has {classes} classes'
            name = relative_name(folder / output.label_filename, repository)
            findings.append(Finding(name, None, message, "add the missing names, one a line", fatal=False))
    return findings


def sample_remarks(config: ModelConfig, folder: Path) -> list[Problem]:
    """Return warnings for samples that a build will not find; the model serves without them."""
    remarks = []
    for block, data in _samples(config).items():
        file = _file_of(data)
        loc = ("optimization", block, "data")
        if filename_problem(file) is not None or not within(folder / file, folder):
            message = f"{block}.data {data!r:.120} leads out of the model's folder, no engine is built from it"
            cure = "copy the samples into the model's folder, and write the path from there"
            remarks.append(Problem(loc, message, cure))
        elif not (folder / file).exists():
            remarks.append(Problem(loc, f"{block}.data {data!r:.120} does not exist", "add it to the model's folder"))
    precision = requested_precision(config.optimization)
    if precision in CALIBRATED and not config.optimization.calibration.data:
        cure = "write optimization.calibration.data: samples in the model's folder"
        others = " other than a transformer on a CPU" if precision == "int8" else ""
        message = f"{precision} cannot be built without samples, from a model{others} that carries no Q/DQ"
        remarks.append(Problem(("optimization", "precision"), message, cure))
    return remarks


def sample_folders(config: ModelConfig) -> set[str]:
    """Return the folders in a model's folder that the configuration names as samples."""
    parts = [PurePosixPath(_file_of(data)).parts for data in _samples(config).values()]
    return {part[0] for part in parts if part}


def sample_paths(config: ModelConfig, folder: Path) -> list[Path]:
    """Return the files and folders that the configuration names as samples, existing or not."""
    return [folder / _file_of(data) for data in _samples(config).values() if filename_problem(_file_of(data)) is None]


def _samples(config: ModelConfig) -> dict[str, str]:
    options = config.optimization
    paths = {"calibration": options.calibration.data, "accuracy": options.accuracy.data}
    return {block: data for block, data in paths.items() if data}


def _file_of(data: str) -> str:
    """Return the file or folder of samples; "samples.py:held_out" is a function in a file."""
    return data.rpartition(":")[0] if ".py:" in data else data


def _read_text(path: Path, repository: Path, max_bytes: int, cure: str) -> str:
    """Read a text file, without its byte order mark.

    Args:
        path: the file.
        repository: links must not lead out of this folder.
        max_bytes: largest size.
        cure: of a larger file.

    Raises:
        ConfigError: the file is outside of the repository, too large, or not UTF-8.
        OSError: it cannot be read, or is not a regular file.
    """
    name = relative_name(path, repository)
    if not within(path, repository):
        raise refuse(name, None, _LEADS_OUT, _COPY_FILE)
    with open_regular_file(path) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise refuse(name, None, f"is larger than {max_bytes} bytes", cure)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refuse(name, line, "is not UTF-8", "save the file as UTF-8") from None


FOLDER = "warmup"
INITIAL_STATE_FOLDER = "initial_state"
DATA_FOLDERS = (FOLDER, INITIAL_STATE_FOLDER)
"""Folders with data files beside the versions of a model."""
# Maximum bytes of one input of one warm-up, or of an initial state: a configuration may come from a client and must not
# exhaust memory.
MAX_INPUT_BYTES = 1 << 30
MAX_RUNS = 10_000
# Approximate bytes of a Python object with its content.
_BYTES_ELEMENT_SIZE = 64


def warmup_problems(config: ModelConfig, folder: Path, repository: Path) -> list[Problem]:
    """Return the problems that prevent warm-ups.

    Args:
        config: complete configuration.
        folder: the model's folder.
        repository: links must not lead out of this folder.
    """
    problems: list[Problem] = []
    tensors = {tensor.name: tensor for tensor in config.served_input}
    for index, warmup in enumerate(config.model_warmup):
        loc: Location = ("model_warmup", index)
        if warmup.batch_size > max(config.max_batch_size, 1):
            message = f"the warm-up has {warmup.batch_size} rows, max_batch_size is {config.max_batch_size}"
            problems.append(Problem((*loc, "batch_size"), message, "lower batch_size"))
        if warmup.count > MAX_RUNS:
            problems.append(Problem((*loc, "count"), f"count is {warmup.count}", f"write {MAX_RUNS} at most"))
        missing = [t.name for t in config.input if not t.optional and t.name not in warmup.inputs]
        if missing:
            message = f"the warm-up does not feed input {', '.join(missing)}"
            problems.append(Problem((*loc, "inputs"), message, "add the missing inputs"))
        for name, feed in warmup.inputs.items():
            if name in tensors:
                input_loc: Location = (*loc, "inputs", name)
                feed_problems = _feed_problems(feed, tensors[name], warmup.batch_size, folder, repository)
                problems += [problem._replace(loc=(*input_loc, *problem.loc)) for problem in feed_problems]
    return problems


def feed_dims(feed: WarmupInput, tensor: ModelInput) -> tuple[int, ...]:
    """Return the sizes of a warm-up input without the batch dimension."""
    return feed.dims if "dims" in feed.model_fields_set else tensor.dims


def _feed_problems(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path, repository: Path) -> list[Problem]:
    if feed.data_type and feed.data_type != tensor.data_type:
        message = f"the warm-up has {feed.data_type} for input {tensor.name}, which is {tensor.data_type}"
        return [Problem(("data_type",), message, "remove data_type")]
    dims = feed_dims(feed, tensor)
    if any(size < 0 for size in dims):
        return [Problem(("dims",), f"dims {list(dims)} of the warm-up leave a size open", "write every size")]
    if not fits_shape(dims, tensor.dims):
        message = f"dims {list(dims)} of the warm-up do not match input {tensor.name}: {list(tensor.dims)}"
        return [Problem(("dims",), message, "leave out the batch dimension, and write every other size")]
    kind = BY_CONFIG_NAME[tensor.data_type]
    element_bytes = kind.size_bytes or _BYTES_ELEMENT_SIZE
    if math.prod(dims) * rows * element_bytes > MAX_INPUT_BYTES:
        return [Problem(("dims",), f"the warm-up takes more than {MAX_INPUT_BYTES} bytes", "lower batch_size or dims")]
    if not feed.input_data_file:
        return []
    found = _file_problems(folder / FOLDER / feed.input_data_file, kind, math.prod(dims), rows, repository)
    return [Problem(("input_data_file",), message, cure) for message, cure in found]


def _file_problems(path: Path, kind: Datatype, elements: int, rows: int, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield a problem of a data file and its cure.

    Args:
        path: file in one of `DATA_FOLDERS`.
        kind: datatype of its values.
        elements: of one row.
        rows: the file has the values of one row, or of so many.
        repository: links must not lead out of this folder.
    """
    name = relative_name(path, repository)
    if not path.is_file():
        yield f"{name} is missing", f"put the file into the model's folder {path.parent.name}/"
        return
    if not within(path, repository):
        yield f"{name} {_LEADS_OUT}", _COPY_FILE
        return
    size, row_bytes = path.stat().st_size, elements * kind.size_bytes
    if size > MAX_INPUT_BYTES:
        yield f"{name} has {size} bytes", f"write {MAX_INPUT_BYTES} bytes at most"
    elif kind is not BYTES and size not in (row_bytes, row_bytes * rows):
        all_rows = ", or those of all rows" if rows > 1 else ""
        yield (
            f"{name} has {size} bytes, one row takes {row_bytes}",
            f"write the values of one row, little-endian{all_rows}",
        )


def initial_state_problems(config: ModelConfig, folder: Path, repository: Path) -> Iterator[Problem]:
    """Yield the problems of the sizes and the files of initial states; arguments as for `warmup_problems`."""
    sequences = config.sequence_batching
    for index, state in enumerate(() if sequences is None else sequences.state):
        loc: Location = ("sequence_batching", "state", index)
        kind, elements = BY_CONFIG_NAME[state.data_type], math.prod(state.initial_dims)
        if elements * (kind.size_bytes or _BYTES_ELEMENT_SIZE) > MAX_INPUT_BYTES:
            message = f'state "{state.input_name}" has more than {MAX_INPUT_BYTES} bytes at START'
            yield Problem((*loc, "dims"), message, "lower dims")
            continue
        for initial in state.initial_state:
            if initial.data_file:
                path = folder / INITIAL_STATE_FOLDER / initial.data_file
                for message, cure in _file_problems(path, kind, elements, 1, repository):
                    yield Problem((*loc, "initial_state", 0, "data_file"), message, cure)


# Source of an engine if the model's own file is the engine.
SOURCE = "model.onnx"
# The file of a Python model.
CODE = "model.py"
CONFIG_FILES = {"config.pbtxt": read_pbtxt, "config.yaml": read_yaml, "config.yml": read_yaml}


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder that can be served.

    Attributes:
        name: name of the model.
        path: the folder.
        versions: version numbers on disk, ascending.
        config: complete configuration that agrees with the model's file.
        findings: warnings; fatal findings are raised.
        labels: class names by output name, for outputs with a label file.
        missing: fields of a Python model or a pipeline that only its code or its steps can complete.
        document: the configuration as it was read, for findings of its steps.
    """

    name: str
    path: Path
    versions: tuple[int, ...]
    config: ModelConfig
    findings: tuple[Finding, ...]
    labels: dict[str, tuple[str, ...]]
    missing: tuple[Finding, ...] = ()
    document: Document = field(default_factory=lambda: Document("config"), compare=False, repr=False)

    def finding(self, problem: Problem) -> Finding:
        """Return an error with the file and line of a problem in the configuration."""
        return self.document.finding(problem)

    def model_file(self, version: int) -> Path:
        """Return the model file of a version."""
        return find_model_file(self.path, version, self.config.default_model_filename)

    def source_file(self, version: int) -> Path:
        """Return the ONNX file of a version: the model itself, or the source of its engine."""
        if self.config.kind != "plan":
            return self.model_file(version)
        return self.path / str(version) / SOURCE


def served_versions(config: ModelConfig, versions: Sequence[int]) -> tuple[int, ...]:
    """Return the versions on disk that the configuration's policy serves, and those that `traffic` names, ascending."""
    policy, ascending = config.version_policy, sorted(versions)
    named = frozenset() if config.traffic is None else config.traffic.named
    routed = [version for version in ascending if str(version) in named]
    others = [version for version in ascending if str(version) not in named]
    if policy.specific is not None:
        others = [version for version in others if version in policy.specific.versions]
    elif policy.latest is not None:
        others = others[-policy.latest.num_versions :]
    return tuple(sorted((*routed, *others)))


def read_model_folder(path: Path, repository: Path, override: Document | None = None) -> ModelFolder:
    """Read a model's folder, without loading the model.

    Args:
        path: the model's folder, directly in `repository`.
        repository: links must not lead out of this folder.
        override: configuration that replaces the folder's own.

    Raises:
        ConfigError: the model cannot be served; has all findings, fatal ones and warnings.
    """
    reader = _FolderReader(path, repository, override)
    try:
        return reader.read()
    except ConfigError as error:
        findings = [*reader.findings, *error.findings]
        raise ConfigError(sorted(findings, key=lambda f: (f.path, f.line or 0))) from error.__cause__
    except OSError as error:
        file = Path(error.filename) if isinstance(error.filename, str) else path
        name = relative_name(file, repository) if file.is_relative_to(repository) else path.name
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the files and their permissions") from None


def read_document(file: Path, repository: Path) -> Document:
    """Read a configuration file, one of `CONFIG_FILES`; raises ConfigError or OSError."""
    text = _read_text(file, repository, MAX_CONFIG_BYTES, "a configuration is a page of text")
    return CONFIG_FILES[file.name](text, relative_name(file, repository))


class _FolderReader:
    """Reads one folder and collects findings."""

    def __init__(self, path: Path, repository: Path, override: Document | None) -> None:
        self._path = path
        self._repository = repository
        self._override = override
        self._document = Document(path.name)
        self._missing: tuple[Finding, ...] = ()
        self.findings: list[Finding] = []

    def read(self) -> ModelFolder:
        self._check_folder()
        config = self._read_config()
        versions, findings = find_versions(self._path, self._repository, sample_folders(config))
        self.findings += findings
        if not versions and config.is_pipeline:
            versions = (1,)  # it has no file, and git and buckets keep no empty folder
        if not versions and not any(finding.fatal for finding in findings):
            self._fail("has no version folder", f"put the model's file into {self._path.name}/1/")
        self._stop_if_fatal()
        served = self._served(config, versions)
        config = auto_complete.complete_identity(config, self._path.name, self._has_code(served), self._files(served))
        self._check_filenames(config)
        self._stop_if_fatal()
        config = auto_complete.complete_instances(self._complete(config, served))
        self._report(warmup_problems(config, self._path, self._repository))
        self._report(list(initial_state_problems(config, self._path, self._repository)))
        self._report(sample_remarks(config, self._path), fatal=False)
        labels = self._read_labels(config)
        self.findings += label_remarks(config, labels, self._path, self._repository)
        self._stop_if_fatal()
        path, all_findings, document = self._path, tuple(self.findings), self._document
        return ModelFolder(path.name, path, versions, config, all_findings, labels, self._missing, document)

    def _fail(self, message: str, cure: str) -> None:
        self.findings.append(Finding(relative_name(self._path, self._repository), None, message, cure))

    def _stop_if_fatal(self) -> None:
        if any(finding.fatal for finding in self.findings):
            raise ConfigError([])

    def _report(self, problems: list[Problem], fatal: bool = True) -> None:
        self.findings += [self._document.finding(problem, fatal) for problem in problems]

    def _check_folder(self) -> None:
        problem = name_problem(self._path.name)
        if problem is not None:
            self._fail(problem.message, problem.cure)
        elif not self._path.is_dir():
            self._fail("is not a folder", "name a folder with a version folder such as 1 in it")
        elif not within(self._path, self._repository):
            self._fail(_LEADS_OUT, "copy the folder into the repository")
        self._stop_if_fatal()

    def _read_config(self) -> ModelConfig:
        if self._override is not None:
            self._document = self._override
        elif not self._read_document():
            return ModelConfig()
        config, findings = bind(self._document)
        self.findings += findings
        if config is not None and config.name not in ("", self._path.name):
            message = f'the name "{config.name}" is not the folder\'s'
            self._report([Problem(("name",), message, f'write "{self._path.name}", remove name, or rename the folder')])
        if config is not None and not config.name:
            self._report(own_traffic_problems(config.traffic, self._path.name))
        return ModelConfig() if config is None else config

    def _read_document(self) -> bool:
        """Read the folder's configuration; returns False if it has none, or two, which is reported."""
        present = [name for name in CONFIG_FILES if os.path.lexists(self._path / name)]
        if len(present) > 1:
            self._fail(f"has both {' and '.join(present)}", "keep one of them")
        if len(present) != 1:
            return False
        self._document = read_document(self._path / present[0], self._repository)
        return True

    def _served(self, config: ModelConfig, versions: tuple[int, ...]) -> tuple[int, ...]:
        served = served_versions(config, versions)
        loc = ("version_policy", "specific", "versions")
        requested = config.version_policy.specific.versions if config.version_policy.specific else ()
        missing = [version for version in requested if version not in versions]
        if missing:
            message = f"version {', '.join(map(str, missing))} of version_policy is not on disk"
            listing = ", ".join(map(str, versions))
            self._report([Problem(loc, message, f"add the folder, or choose from {listing}")], fatal=not served)
        for number in sorted(map(int, config.traffic.named)) if config.traffic is not None else ():
            if number not in served:
                message = f"version {number} of traffic is not on disk: it gets no traffic"
                self._report([Problem(("traffic",), message, "add its folder, or remove it")], fatal=False)
        for label, version in config.labels.items():
            if version not in served:
                message = f'label "{label}" names version {version}, which is not served'
                listing = ", ".join(map(str, served)) or "none"
                self._report([Problem(("labels", label), message, f"served here: {listing}")], fatal=False)
        return served

    def _has_code(self, served: tuple[int, ...]) -> bool:
        """True if the newest served version has a `model.py` and no ONNX file."""
        newest = self._path / str(served[-1]) if served else self._path
        return (newest / CODE).is_file() and not (newest / SOURCE).exists()

    def _files(self, served: tuple[int, ...]) -> frozenset[str]:
        """Return the names in the folder of the newest served version."""
        newest = self._path / str(served[-1]) if served else self._path
        return frozenset(os.listdir(newest)) if served and newest.is_dir() else frozenset()

    def _check_filenames(self, config: ModelConfig) -> None:
        is_named = not config.is_pipeline
        if (
            is_named and filename_problem(config.default_model_filename) is not None
        ) or "/" in config.default_model_filename:
            message = f'default_model_filename "{config.default_model_filename}" is not a file name'
            cure = "write the name of a file in the version's folder"
            self._report([Problem(("default_model_filename",), message, cure)])
        files: dict[Location, str] = {
            ("output", index, "label_filename"): output.label_filename for index, output in enumerate(config.output)
        }
        for index, warmup in enumerate(config.model_warmup):
            for name, feed in warmup.inputs.items():
                files["model_warmup", index, "inputs", name, "input_data_file"] = feed.input_data_file
        sequences = config.sequence_batching
        for index, state in enumerate(() if sequences is None else sequences.state):
            for number, initial in enumerate(state.initial_state):
                files["sequence_batching", "state", index, "initial_state", number, "data_file"] = initial.data_file
        for loc, file in files.items():
            if file and (problem := filename_problem(file)) is not None:
                self._report([Problem(loc, *problem)])

    def _complete(self, config: ModelConfig, served: tuple[int, ...]) -> ModelConfig:
        """Complete the configuration from the newest served version, then compare it with the others."""
        signatures = self._read_signatures(config, served)
        self._stop_if_fatal()
        self._report([*decoupled_problems(config), *iterative_problems(config), *state_backend_problems(config)])
        if config.kind in ("python", "pipeline"):
            if config.kind == "python":
                self._report(list(python_problems(config)))
                self._stop_if_fatal()
            # A configuration without inputs or outputs is not checked as a whole until its code has completed it.
            self._missing = tuple(self._document.finding(problem) for problem in auto_complete.incomplete(config))
            if self._missing:
                return config
        if not signatures:
            self._report(auto_complete.incomplete(config))
            self._stop_if_fatal()
            # No ONNX file to complete from: the checks of a complete configuration run here.
            values = {name: getattr(config, name) for name in ModelConfig.model_fields}
            if config.kind == "plan" and is_ragged(config) and "oversize" not in config.model_fields_set:
                values["oversize"] = (
                    "reject"  # parts of a request would be requests of their own for the computed inputs
                )
            try:
                return ModelConfig.model_validate(values)
            except ValidationError as error:
                self._report(problems_of(error, self._document.headrace_prefix))
                raise ConfigError([]) from None
        (file, newest), *older = signatures
        if not self._document.data:
            self._document = Document(file)
        completed, problems, remarks = auto_complete.complete_from_model(config, newest)
        self._report(problems)
        self._report(remarks, fatal=False)
        if completed is None:
            raise ConfigError([])
        for file, signature in older:
            mismatches = [
                p._replace(message=f"{p.message} ({file})") for p in auto_complete.contradictions(completed, signature)
            ]
            self._report(mismatches)
        self._stop_if_fatal()
        return completed

    def _read_signatures(self, config: ModelConfig, served: tuple[int, ...]) -> list[tuple[str, OnnxSignature]]:
        """Return file names and signatures of the served versions, newest first; empty for a backend with unreadable files."""
        signatures: list[tuple[str, OnnxSignature]] = []
        for version in reversed(served if config.kind != "pipeline" else ()):
            file = find_model_file(self._path, version, config.default_model_filename)
            if config.backend == "onnxruntime":
                signatures += self._signature(file)
                continue
            # An engine file cannot be read without its runtime. The ONNX file that it was built from, if it exists, has
            # everything; whether an engine of it fits this machine is checked on load.
            source = self._path / str(version) / SOURCE
            if config.kind == "plan" and source.is_file():
                signatures += self._signature(source)
            else:
                self.findings += check_model_file(file, self._repository)
        return signatures

    def _signature(self, file: Path) -> list[tuple[str, OnnxSignature]]:
        findings = check_model_file(file, self._repository)
        if not findings:
            name = relative_name(file, self._repository)
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
