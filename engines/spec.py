"""What is to be built of a model: its configuration's `optimization`, with everything that it leaves out filled in.

Triton's own way to ask for TensorRT (`execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } }`) is understood:
`precision_mode` (FP32, FP16, INT8) and `max_workspace_size_bytes` count where Headrace's own fields say nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from engines.errors import BuildError
from engines.quantization import ranges
from engines.targets.base import ShapeRange
from server.core.model_config import ModelConfig
from server.core.optimization_config import (
    CALIBRATED,
    PRECISIONS,
    AccuracyBar,
    Calibration,
    EngineProfile,
    asked_precision,
    tensorrt_accelerator,
)

# Bumped when the same specification makes another artefact than before: what was built by an earlier one is built anew.
RECIPE = 5

# Not a precision of its own, but worth a row in a comparison.
CALIBRATOR = "int8-tensorrt"


@dataclass(frozen=True, slots=True)
class Bar:
    """What an artefact must reach against the FP32 model.

    Attributes:
        min_top1_agreement: share of samples with the same largest output.
        min_cosine: of the outputs, the mean over samples.
        max_drop: of the true accuracy, 0..1; None where none is asked for.
    """

    min_top1_agreement: float
    min_cosine: float
    max_drop: float | None


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """One artefact that is wanted.

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
        """True where ranges are needed."""
        return self.precision in (*CALIBRATED, "best")

    @property
    def bar(self) -> Bar:
        """The accuracy to reach, with the defaults of the precision.

        Without samples random inputs are compared. Among their outputs the largest is often a near tie, which rounding decides:
        then the cosine alone is demanded, unless the configuration asks for an agreement.
        """
        told = self.accuracy
        lossy = self.precision in CALIBRATED
        has_samples = bool(told.data or self.calibration.data)
        default = 0.0 if not has_samples else 0.9 if lossy else 0.98
        agreement = told.min_top1_agreement if told.min_top1_agreement is not None else default
        cosine = told.min_cosine if told.min_cosine is not None else 0.95 if lossy else 0.999
        return Bar(agreement, cosine, told.max_drop)

    def at(self, precision: str) -> BuildSpec:
        """The same in another precision.

        Args:
            precision: one of `PRECISIONS`, or `CALIBRATOR`: INT8 by TensorRT 10's own calibrator.
        """
        if precision == CALIBRATOR:
            calibration = self.calibration.model_copy(update={"method": "tensorrt", "keep": ()})
            return replace(self, precision="int8", calibration=calibration)
        return replace(self, precision=precision)

    def digest(self) -> str:
        """SHA-256, in hex, of all that makes the artefact what it is, less the model and the machine."""
        told = {
            "recipe": [RECIPE, ranges.RECIPE],
            "precision": self.precision,
            "profiles": [asdict(profile) for profile in self.profiles],
            "workspace_bytes": self.workspace_bytes,
            "calibration": self.calibration.model_dump(mode="json") if self.quantized else None,
            "accuracy": self.accuracy.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def spec_of(config: ModelConfig, precision: str = "") -> BuildSpec:
    """What a configuration asks for.

    Args:
        config: complete.
        precision: takes the place of the configuration's.

    Raises:
        BuildError: an accelerator's parameter is not understood, or a free dimension has no profile.
    """
    told = config.optimization
    workspace_bytes = _check_accelerator(config)
    if told.workspace_mb is not None:
        workspace_bytes = told.workspace_mb << 20
    profiles = told.profiles or (EngineProfile(),)
    return BuildSpec(
        precision=precision or asked_precision(told),
        profiles=tuple(_shape_range(config, profile) for profile in profiles),
        workspace_bytes=workspace_bytes,
        calibration=told.calibration,
        accuracy=told.accuracy,
    )


def _check_accelerator(config: ModelConfig) -> int | None:
    """Hold Triton's accelerator to what it can ask for; the scratch memory in bytes that it allows, None: no bound."""
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
    most = max(config.max_batch_size, 1)
    rows = profile.batch or (1, most, most)
    if config.max_batch_size and rows[2] > config.max_batch_size:
        cure = f"raise max_batch_size to {rows[2]}, or write [.., .., {most}]"
        raise BuildError(f"{config.name}: a profile has a batch of {rows[2]}, max_batch_size is {most}: {cure}")
    unknown = sorted(set(profile.shapes) - {tensor.name for tensor in config.input})
    if unknown:
        names = ", ".join(tensor.name for tensor in config.input)
        raise BuildError(f"{config.name}: a profile names {', '.join(unknown)}, the model's inputs are {names}")
    for tensor in config.input:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        given = profile.shapes.get(tensor.name)
        if given is None and any(size < 0 for size in dims):
            cure = f"write optimization.profiles with shapes for it: {{shapes: {{{tensor.name}: [min, opt, max]}}}}"
            raise BuildError(f"{config.name}: input {tensor.name} has free dimensions {list(dims)}: {cure}")
        least, tuned, largest = given or (dims, dims, dims)
        if len(least) != len(dims) or any(
            told not in (-1, a) or told not in (-1, c) for told, a, c in zip(dims, least, largest, strict=True)
        ):
            raise BuildError(f"{config.name}: the profile of input {tensor.name} does not fit its dims {list(dims)}")
        if config.max_batch_size:
            shapes[tensor.name] = ((rows[0], *least), (rows[1], *tuned), (rows[2], *largest))
        else:
            shapes[tensor.name] = (least, tuned, largest)
    return ShapeRange(shapes)
