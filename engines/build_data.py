"""The samples of a build: what ranges are found on, and what is held out to compare the artefact with the FP32 model."""

from __future__ import annotations

from dataclasses import dataclass

from engines.errors import BuildError
from engines.project import Project
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
    """

    calibration: Samples | None
    held_out: Samples

    @property
    def digest(self) -> str:
        """Of both."""
        return f"{self.calibration.digest if self.calibration else ''}/{self.held_out.digest}"


def open_data(project: Project, spec: BuildSpec) -> BuildData:
    """Find the samples that a configuration names; without any, noise is compared.

    Raises:
        BuildError: they cannot be read, or the precision needs some and the configuration names none.
    """
    config, folder = project.config, project.folder.path
    told, bar = spec.calibration, spec.accuracy
    calibration = open_samples(told.data, folder, config, told.samples) if told.data else None
    if calibration is None and spec.quantized and spec.precision != "best":
        cure = "write optimization.calibration.data: a folder of pictures, an .npz or file.py:function in the model's folder"
        raise BuildError(f"{project.name}: {spec.precision} needs samples to calibrate with: {cure}")
    if bar.data:
        return BuildData(calibration, open_samples(bar.data, folder, config, bar.samples))
    if calibration is not None and len(calibration) > 1:
        return BuildData(*calibration.split(HELD_OUT_SHARE))
    return BuildData(calibration, random_samples(config, RANDOM_SAMPLES))
