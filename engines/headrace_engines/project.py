"""Inputs of a build: the version of a model, the specification of the artefact, and the samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import (
    ModelFolder,
    check_model_file,
    find_model_folder,
    read_model_folder,
    served_versions,
)
from headrace.config.optimization_config import (
    CALIBRATED,
    PRECISIONS,
    AccuracyBar,
    Calibration,
    EngineProfile,
    requested_precision,
    tensorrt_accelerator,
)
from headrace.config.ragged_rules import is_ragged
from headrace.core.errors import ConfigError, NotFound
from headrace_lab.kernels.plugin import sources_digest

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import file_digest
from headrace_engines.quantization import calibration as ranges
from headrace_engines.quantization.ragged import input_sizes, ragged_range, ragged_samples
from headrace_engines.quantization.sample_sources import open_samples
from headrace_engines.quantization.samples import Samples, class_output, random_samples
from headrace_engines.targets.base import ShapeRange

SOURCE = "model.onnx"
# Digests by path, inode, size and modification time. External data are read once per process.
_DIGESTS: dict[tuple[str, int, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Project:
    """Version of a model with its folder, configuration and ONNX file.

    Attributes:
        folder: folder of the model, with its completed configuration.
        version: number of the version.
        source: the ONNX file.
    """

    folder: ModelFolder
    version: int
    source: Path

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.folder.name

    @property
    def config(self) -> ModelConfig:
        """Completed configuration of the model."""
        return self.folder.config

    @property
    def batched(self) -> bool:
        """True if the first dimension of the model's tensors is the batch; False for ragged batches, whose inputs are joined."""
        return self.config.max_batch_size > 0 and not is_ragged(self.config)

    @property
    def version_folder(self) -> Path:
        """Folder of the version, in which artefacts are published."""
        return self.folder.path / str(self.version)

    def digest(self) -> str:
        """Return the SHA-256, in hex, of the ONNX file and its external data; cached until the file changes."""
        state = self.source.stat()
        state_key = (str(self.source), state.st_ino, state.st_size, state.st_mtime_ns)
        if state_key not in _DIGESTS:
            _DIGESTS[state_key] = file_digest(self.source)
        return _DIGESTS[state_key]


def open_project(model: str, repository: Path, version: int | None = None) -> Project:
    """Find a model and read its configuration.

    Args:
        model: name in the repository, or path of the model's folder.
        repository: folder of the model repository.
        version: number of the version; None for the newest served one.

    Raises:
        BuildError: the model or version does not exist, or its configuration is invalid.
    """
    try:
        path = find_model_folder(model, repository)
    except NotFound as error:
        raise BuildError(str(error)) from error
    if path.name.isdecimal() and (path / SOURCE).is_file():
        raise BuildError(f"{model} is a version of a model: write {path.parent.name} --version {path.name}")
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
    """Return every model of a repository, or the error of those that cannot be read, sorted by name.

    Raises:
        BuildError: the repository does not exist or is empty.
    """
    if not repository.is_dir():
        cure = "name a repository with --model-repository DIR; `headrace models build` builds a demo"
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


# Increased when equal specifications lead to another artefact than before; stored artefacts are then built again.
BUILD_RECIPE = 5


@dataclass(frozen=True, slots=True)
class AccuracyLimits:
    """Accuracy that an artefact must reach against the FP32 model.

    Attributes:
        min_top1_agreement: share of samples with the same top class, 0..1.
        min_cosine: cosine similarity of the outputs, mean over samples.
        max_drop: largest loss of accuracy against labels, 0..1; None without a limit.
    """

    min_top1_agreement: float
    min_cosine: float
    max_drop: float | None


PLUGINS_BUDGET_S = 120.0
"""Budget of `headrace build --plugins auto`, in seconds, without an option."""


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """Specification of one artefact.

    Attributes:
        precision: one of `PRECISIONS`.
        profiles: ranges of shapes, batch dimension included; at least one.
        workspace_bytes: scratch memory for TensorRT; None without a limit.
        calibration: method and samples of the calibration.
        accuracy: held-out samples and required accuracy.
        keep_fp32: names of nodes, `*` allowed, that stay FP32 among FP16 or BF16.
        method: way to the precision, see `headrace_engines.precision.methods`; "" for the usual one.
        version_compatible: the TensorRT engine runs with later versions of TensorRT too.
        refined: layers that are slower in 8 bits in the built engine are built in floating point.
        optimization_level: TensorRT's builder optimization level, 0 (fastest build) to 5; None for TensorRT's default, 3.
        plugins: "off", "auto", or names of ONNX nodes, separated by commas, that our plug-in runs in a TensorRT engine.
        plugins_budget_s: "auto": seconds after which no further kernel is timed and no further engine is built.
    """

    precision: str
    profiles: tuple[ShapeRange, ...]
    workspace_bytes: int | None
    calibration: Calibration
    accuracy: AccuracyBar
    keep_fp32: tuple[str, ...] = ()
    method: str = ""
    version_compatible: bool = False
    refined: bool = False
    optimization_level: int | None = None
    plugins: str = "off"
    plugins_budget_s: float = PLUGINS_BUDGET_S

    @property
    def quantized(self) -> bool:
        """True if the precision needs calibrated ranges."""
        return self.precision in (*CALIBRATED, "best") and not self.method

    @property
    def bar(self) -> AccuracyLimits:
        """Required accuracy, with the defaults of the precision.

        Without samples random inputs are compared. Their largest outputs are often nearly equal, and rounding decides the top
        class. Then only the cosine is required, or the agreement of the configuration.
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
        return replace(self, precision=precision, method="")

    def digest(self) -> str:
        """Return the SHA-256, in hex, of everything that defines the artefact except the model and the machine."""
        document: dict[str, object] = {
            "recipe": [BUILD_RECIPE, ranges.RANGES_RECIPE],
            "precision": self.precision,
            "profiles": [asdict(profile) for profile in self.profiles],
            "workspace_bytes": self.workspace_bytes,
            "calibration": self.calibration.model_dump(mode="json") if self.quantized else None,
            "accuracy": self.accuracy.model_dump(mode="json"),
        }
        # Fields that are not set are left out, so that stored engines keep their keys.
        if self.keep_fp32 and self.precision != "fp32":
            document["keep_fp32"] = list(self.keep_fp32)
        if self.method:
            document |= {"method": self.method, "keep": list(self.calibration.keep)}
        if self.version_compatible:
            document["version_compatible"] = True
        if self.refined and self.quantized:
            document["refined"] = True
        if self.optimization_level is not None:
            document["optimization_level"] = self.optimization_level
        if self.plugins != "off":
            # Engines without plug-ins keep their digests. Other kernels may be chosen with other sources.
            document["plugins"] = [self.plugins, sources_digest(), self.plugins_budget_s]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_spec(config: ModelConfig, precision: str = "") -> BuildSpec:
    """Read the specification of a build from a configuration.

    Args:
        config: completed configuration.
        precision: replaces the precision of the configuration; "" keeps it.

    Raises:
        BuildError: a parameter of an accelerator is invalid, or a free dimension has no profile.
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
        keep_fp32=options.keep_fp32,
    )


def _check_accelerator(config: ModelConfig) -> int | None:
    """Check the parameters of Triton's accelerator; return its scratch memory in bytes, None without a limit."""
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
    if is_ragged(config):
        return ragged_range(config, profile)
    shapes = {}
    max_rows = max(config.max_batch_size, 1)
    rows = profile.batch or (1, max_rows, max_rows)
    if config.max_batch_size and rows[2] > config.max_batch_size:
        cure = f"raise max_batch_size to {rows[2]}, or write [.., .., {max_rows}]"
        raise BuildError(f"{config.name}: a profile has a batch of {rows[2]}, max_batch_size is {max_rows}: {cure}")
    unknown = sorted(set(profile.shapes) - {tensor.name for tensor in config.model_input})
    if unknown:
        names = ", ".join(tensor.name for tensor in config.model_input)
        raise BuildError(f"{config.name}: a profile names {', '.join(unknown)}, the model's inputs are {names}")
    for tensor in config.model_input:
        smallest, tuned, largest = input_sizes(config, profile, tensor)
        if config.max_batch_size:
            shapes[tensor.name] = ((rows[0], *smallest), (rows[1], *tuned), (rows[2], *largest))
        else:
            shapes[tensor.name] = (smallest, tuned, largest)
    return ShapeRange(shapes)


HELD_OUT_SHARE = 0.25
# Number of random inputs. Their outputs have no meaning: they detect a broken artefact, not a small loss of accuracy.
RANDOM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class BuildData:
    """Samples of a build.

    Attributes:
        calibration: samples for ranges; None if the configuration names none.
        held_out: samples for the comparison; never used for calibration.
        output: name of the output with classes; "" if the configuration names none.
    """

    calibration: Samples | None
    held_out: Samples
    output: str = ""

    @property
    def digest(self) -> str:
        """Digest of all samples and of the output's name."""
        return f"{self.calibration.digest if self.calibration else ''}/{self.held_out.digest}/{self.output}"


def open_data(project: Project, spec: BuildSpec) -> BuildData:
    """Open the samples that a configuration names; random ones for the comparison if it names none.

    Raises:
        BuildError: samples cannot be read, none remains for the comparison, a shape is in no profile, or the precision needs
            samples and the configuration names none.
    """
    config, folder = project.config, project.folder.path
    options, bar = spec.calibration, spec.accuracy
    output = class_output(config)
    if is_ragged(config):
        return BuildData(None, _ragged_samples(project, spec), output)
    calibration = open_samples(options.data, folder, config, options.samples) if options.data else None
    if calibration is None and spec.quantized and spec.precision != "best":
        cure = "write optimization.calibration.data: a folder of pictures, an .npz or file.py:function in the model's folder"
        without = "; without samples int8 is built for a CPU, from models of large matrix products"
        text = f"{project.name}: {spec.precision} needs samples to calibrate with: {cure}"
        raise BuildError(text + (without if spec.precision == "int8" else ""))
    if bar.data:
        held_out = open_samples(bar.data, folder, config, bar.samples)
        if calibration is not None and not len(held_out := held_out.without(calibration)):
            cure = "name others, or leave it out: then the last quarter is held out"
            raise BuildError(f"{project.name}: accuracy.data has only samples of the calibration: {cure}")
    elif calibration is not None and len(calibration) > 1:
        calibration, held_out = calibration.split(HELD_OUT_SHARE)
    else:
        held_out = random_samples(config, RANDOM_SAMPLES, _tuned_shapes(project, spec))
    for samples in filter(None, (calibration, held_out)):
        _check_shapes(project, spec, samples)
    return BuildData(calibration, held_out, output)


def _ragged_samples(project: Project, spec: BuildSpec) -> Samples:
    """Return random ragged batches.

    Raises:
        BuildError: the specification names samples, or needs them.
    """
    if spec.calibration.data or spec.accuracy.data:
        cure = "remove data from optimization.calibration and optimization.accuracy: random batches are compared"
        raise BuildError(f"{project.name}: a build for ragged batches takes no samples: {cure}")
    if spec.quantized and spec.precision != "best":
        cure = "write precision: fp16, bf16 or fp32"
        raise BuildError(f"{project.name}: {spec.precision} needs samples, which ragged batches have none of: {cure}")
    return ragged_samples(project.config, RANDOM_SAMPLES, spec.profiles[0])


def _tuned_shapes(project: Project, spec: BuildSpec) -> dict[str, tuple[int, ...]]:
    """Return the tuned shape of the first profile for one row, by input."""
    first = 1 if project.batched else 0
    return {name: tuned[first:] for name, (_, tuned, _) in spec.profiles[0].shapes.items()}


def _check_shapes(project: Project, spec: BuildSpec, samples: Samples) -> None:
    """Check the shapes of samples against the profiles of inputs with free dimensions.

    Raises:
        BuildError: a sample is in no profile.
    """
    first = 1 if project.batched else 0
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
