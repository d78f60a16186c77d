"""Inputs of a build: a version of a model, the specification of the artefact, and the samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headrace.config.model_folder import (
    ModelFolder,
    check_model_file,
    find_model_folder,
    read_model_folder,
    served_versions,
)
from headrace.core.errors import ConfigError, NotFound
from headrace.core.model_config import ModelConfig
from headrace.core.optimization_config import (
    CALIBRATED,
    PRECISIONS,
    AccuracyBar,
    Calibration,
    EngineProfile,
    requested_precision,
    tensorrt_accelerator,
)

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import file_digest
from headrace_engines.quantization import calibration as ranges
from headrace_engines.quantization.sample_sources import open_samples
from headrace_engines.quantization.samples import Samples, class_output, random_samples
from headrace_engines.targets.base import ShapeRange

SOURCE = "model.onnx"
# By path, inode, size and time of change. External data are read once in a process.
_DIGESTS: dict[tuple[str, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Project:
    """A version of a model: its folder, its configuration, its ONNX file.
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
        """Folder in which artefacts are published."""
        return self.folder.path / str(self.version)

    def digest(self) -> str:
        """SHA-256 of the ONNX file and its data; read again only after the file has changed."""
        state = self.source.stat()
        state_key = (str(self.source), state.st_ino, state.st_size, state.st_mtime_ns)
        if state_key not in _DIGESTS:
            _DIGESTS[state_key] = file_digest(self.source)
        return _DIGESTS[state_key]


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


# Bumped when the same specification makes another artefact than before: what was built by an earlier one is built anew.
BUILD_RECIPE = 5


@dataclass(frozen=True, slots=True)
class AccuracyLimits:
    """Accuracy that an artefact must reach against the FP32 model.

    Attributes:
        min_top1_agreement: share of samples with the same largest output.
        min_cosine: of the outputs, the mean over samples.
        max_drop: of the true accuracy, 0..1; None where none is required.
    """

    min_top1_agreement: float
    min_cosine: float
    max_drop: float | None


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """Specification of one artefact.

    Attributes:
        precision: one of `PRECISIONS`.
        profiles: ranges of shapes, batch dimension included; at least one.
        workspace_bytes: scratch memory for TensorRT, None: no bound.
        calibration: how ranges are found.
        accuracy: where the held-out samples are and what must be reached.
    """

    precision: str
    profiles: tuple[ShapeRange, ...]
    workspace_bytes: int | None
    calibration: Calibration
    accuracy: AccuracyBar

    @property
    def quantized(self) -> bool:
        """True if calibrated ranges are needed."""
        return self.precision in (*CALIBRATED, "best")

    @property
    def bar(self) -> AccuracyLimits:
        """The accuracy to reach, with the defaults of the precision.

        Without samples random inputs are compared. Among their outputs the largest is often a near tie, which rounding decides:
        then the cosine alone is required, unless the configuration sets an agreement.
        """
        config = self.accuracy
        lossy = self.precision in CALIBRATED
        has_samples = bool(config.data or self.calibration.data)
        default = 0.0 if not has_samples else 0.9 if lossy else 0.98
        agreement = config.min_top1_agreement if config.min_top1_agreement is not None else default
        cosine = config.min_cosine if config.min_cosine is not None else 0.95 if lossy else 0.999
        return AccuracyLimits(agreement, cosine, config.max_drop)

    def at(self, precision: str) -> BuildSpec:
        """Return the same specification in another precision.

        Args:
            precision: one of `PRECISIONS`.
        """
        return replace(self, precision=precision)

    def digest(self) -> str:
        """SHA-256, in hex, of all that makes the artefact what it is, less the model and the machine."""
        document = {
            "recipe": [BUILD_RECIPE, ranges.RANGES_RECIPE],
            "precision": self.precision,
            "profiles": [asdict(profile) for profile in self.profiles],
            "workspace_bytes": self.workspace_bytes,
            "calibration": self.calibration.model_dump(mode="json") if self.quantized else None,
            "accuracy": self.accuracy.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_spec(config: ModelConfig, precision: str = "") -> BuildSpec:
    """Read the specification of a build from a configuration.

    Args:
        config: complete.
        precision: takes the place of the configuration's.

    Raises:
        BuildError: an accelerator's parameter is not understood, or a free dimension has no profile.
    """
    options = config.optimization
    workspace_bytes = _check_accelerator(config)
    if options.workspace_mb is not None:
        workspace_bytes = options.workspace_mb << 20
    profiles = options.profiles or (EngineProfile(),)
    return BuildSpec(
        precision=precision or requested_precision(options),
        profiles=tuple(_shape_range(config, profile) for profile in profiles),
        workspace_bytes=workspace_bytes,
        calibration=options.calibration,
        accuracy=options.accuracy,
    )


def _check_accelerator(config: ModelConfig) -> int | None:
    """Check the parameters of Triton's accelerator; return its scratch memory in bytes, None: no bound."""
    accelerator = tensorrt_accelerator(config.optimization)
    if accelerator is None:
        return None
    mode = accelerator.parameters.get("precision_mode", "fp32")
    if mode.lower() not in PRECISIONS:
        words = ", ".join(word.upper() for word in PRECISIONS[:-1])
        raise BuildError(f"{config.name}: precision_mode '{mode}' of the tensorrt accelerator: write one of {words}")
    size = accelerator.parameters.get("max_workspace_size_bytes", "0")
    if not size.isdecimal():
        raise BuildError(f"{config.name}: max_workspace_size_bytes is '{size}': write a number of bytes")
    return int(size) or None


def _shape_range(config: ModelConfig, profile: EngineProfile) -> ShapeRange:
    shapes = {}
    max_rows = max(config.max_batch_size, 1)
    rows = profile.batch or (1, max_rows, max_rows)
    if config.max_batch_size and rows[2] > config.max_batch_size:
        cure = f"raise max_batch_size to {rows[2]}, or write [.., .., {max_rows}]"
        raise BuildError(f"{config.name}: a profile has a batch of {rows[2]}, max_batch_size is {max_rows}: {cure}")
    unknown = sorted(set(profile.shapes) - {tensor.name for tensor in config.input})
    if unknown:
        names = ", ".join(tensor.name for tensor in config.input)
        raise BuildError(f"{config.name}: a profile names {', '.join(unknown)}, the model's inputs are {names}")
    for tensor in config.input:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        shapes_of_input = profile.shapes.get(tensor.name)
        if shapes_of_input is None and any(size < 0 for size in dims):
            cure = f"write optimization.profiles with shapes for it: {{shapes: {{{tensor.name}: [min, opt, max]}}}}"
            raise BuildError(f"{config.name}: input {tensor.name} has free dimensions {list(dims)}: {cure}")
        smallest, tuned, largest = shapes_of_input or (dims, dims, dims)
        if len(smallest) != len(dims) or any(
            dim not in (-1, a) or dim not in (-1, c) for dim, a, c in zip(dims, smallest, largest, strict=True)
        ):
            raise BuildError(f"{config.name}: the profile of input {tensor.name} does not fit its dims {list(dims)}")
        if config.max_batch_size:
            shapes[tensor.name] = ((rows[0], *smallest), (rows[1], *tuned), (rows[2], *largest))
        else:
            shapes[tensor.name] = (smallest, tuned, largest)
    return ShapeRange(shapes)


HELD_OUT_SHARE = 0.25
# Random inputs have no meaningful outputs; they show a broken artefact, not a slightly worse one.
RANDOM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class BuildData:
    """Samples that a build calibrates with and is measured on.

    Attributes:
        calibration: for ranges; None where the configuration names none.
        held_out: for the comparison; never seen by the calibration.
        output: the one that classifies, "" where the configuration names none.
    """

    calibration: Samples | None
    held_out: Samples
    output: str = ""

    @property
    def digest(self) -> str:
        """Digest of all samples and of the output's name."""
        return f"{self.calibration.digest if self.calibration else ''}/{self.held_out.digest}/{self.output}"


def open_data(project: Project, spec: BuildSpec) -> BuildData:
    """Find the samples that a configuration names; without any, noise is compared.

    Raises:
        BuildError: they cannot be read, none is left to compare with, one has a shape that the artefact is not built for, or the
            precision needs some and the configuration names none.
    """
    config, folder = project.config, project.folder.path
    options, bar = spec.calibration, spec.accuracy
    output = class_output(config)
    calibration = open_samples(options.data, folder, config, options.samples) if options.data else None
    if calibration is None and spec.quantized and spec.precision != "best":
        cure = "write optimization.calibration.data: a folder of pictures, an .npz or file.py:function in the model's folder"
        raise BuildError(f"{project.name}: {spec.precision} needs samples to calibrate with: {cure}")
    if bar.data:
        held_out = open_samples(bar.data, folder, config, bar.samples)
        if calibration is not None and not len(held_out := held_out.without(calibration)):
            cure = "name others, or leave it out: then the last quarter is held out"
            raise BuildError(f"{project.name}: accuracy.data has only samples that are calibrated with: {cure}")
    elif calibration is not None and len(calibration) > 1:
        calibration, held_out = calibration.split(HELD_OUT_SHARE)
    else:
        held_out = random_samples(config, RANDOM_SAMPLES, _tuned_shapes(project, spec))
    for samples in filter(None, (calibration, held_out)):
        _check_shapes(project, spec, samples)
    return BuildData(calibration, held_out, output)


def _tuned_shapes(project: Project, spec: BuildSpec) -> dict[str, tuple[int, ...]]:
    """Return, by input, the shape of one row that the first profile is tuned for."""
    first = 1 if project.config.max_batch_size else 0
    return {name: tuned[first:] for name, (_, tuned, _) in spec.profiles[0].shapes.items()}


def _check_shapes(project: Project, spec: BuildSpec, samples: Samples) -> None:
    """Hold samples against the profiles, where inputs have free dimensions.

    Raises:
        BuildError: a sample is in no profile.
    """
    first = 1 if project.config.max_batch_size else 0
    ranges = [
        {name: (smallest[first:], largest[first:]) for name, (smallest, _, largest) in profile.shapes.items()}
        for profile in spec.profiles
    ]
    if all(smallest == largest for profile in ranges for smallest, largest in profile.values()):
        return
    for batch in samples.batches(1):
        shapes = {name: array.shape[first:] for name, array in batch.items()}
        if not any(_within(shapes, profile) for profile in ranges):
            shape_text = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            cure = "widen optimization.profiles, or take such samples out"
            raise BuildError(
                f"{project.name}: {samples.origin} has a sample of {shape_text}, which is in no profile: {cure}"
            )


def _within(shapes: Mapping[str, tuple[int, ...]], profile: Mapping[str, tuple[tuple[int, ...], ...]]) -> bool:
    return all(
        low <= size <= high
        for name, shape in shapes.items()
        for size, low, high in zip(shape, *profile[name], strict=True)
    )
