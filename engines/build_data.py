"""The samples of a build: what ranges are found on, and what is held out to compare the artefact with the FP32 model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.errors import BuildError
from engines.project import Project
from engines.quantization.model_inputs import class_output
from engines.quantization.samples import Samples, open_samples, random_samples
from engines.spec import BuildSpec

HELD_OUT_SHARE = 0.25
# Nobody knows what answers to noise mean; it shows a broken artefact, not a slightly worse one.
RANDOM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class BuildData:
    """What a build is measured on.

    Attributes:
        calibration: for ranges; None where the configuration names none.
        held_out: for the comparison; never seen by the calibration.
        output: the one that classifies, "" where the configuration does not tell.
    """

    calibration: Samples | None
    held_out: Samples
    output: str = ""

    @property
    def digest(self) -> str:
        """Of all of it."""
        return f"{self.calibration.digest if self.calibration else ''}/{self.held_out.digest}/{self.output}"


def open_data(project: Project, spec: BuildSpec) -> BuildData:
    """Find the samples that a configuration names; without any, noise is compared.

    Raises:
        BuildError: they cannot be read, none is left to compare with, one has a shape that the artefact is not built for, or the
            precision needs some and the configuration names none.
    """
    config, folder = project.config, project.folder.path
    told, bar = spec.calibration, spec.accuracy
    output = class_output(config)
    calibration = open_samples(told.data, folder, config, told.samples) if told.data else None
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
    """By input the shape of one row that the first profile is tuned for."""
    first = 1 if project.config.max_batch_size else 0
    return {name: tuned[first:] for name, (_, tuned, _) in spec.profiles[0].shapes.items()}


def _check_shapes(project: Project, spec: BuildSpec, samples: Samples) -> None:
    """Hold samples against the profiles, where inputs have free dimensions.

    Raises:
        BuildError: a sample is in no profile.
    """
    first = 1 if project.config.max_batch_size else 0
    ranges = [
        {name: (least[first:], most[first:]) for name, (least, _, most) in profile.shapes.items()}
        for profile in spec.profiles
    ]
    if all(least == most for profile in ranges for least, most in profile.values()):
        return
    for batch in samples.batches(1):
        shapes = {name: array.shape[first:] for name, array in batch.items()}
        if not any(_within(shapes, profile) for profile in ranges):
            found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            cure = "widen optimization.profiles, or take such samples out"
            raise BuildError(
                f"{project.name}: {samples.origin} has a sample of {found}, which is in no profile: {cure}"
            )


def _within(shapes: Mapping[str, tuple[int, ...]], profile: Mapping[str, tuple[tuple[int, ...], ...]]) -> bool:
    return all(
        low <= size <= high
        for name, shape in shapes.items()
        for size, low, high in zip(shape, *profile[name], strict=True)
    )
