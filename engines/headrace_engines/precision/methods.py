"""Ways to a precision other than casts and calibrated ranges, by the model and the target.

explicit    the model carries Q/DQ: it is built as it is, in the precision that they give it
stripped    the model carries Q/DQ, and another precision is requested: they are removed first
dynamic     INT8 on ONNX Runtime without samples: activations are rounded while the model runs
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from headrace.config.optimization_config import CALIBRATED, tensorrt_accelerator
from headrace.config.ragged_rules import is_ragged

from headrace_engines.errors import BuildError
from headrace_engines.project import BuildSpec, Project
from headrace_engines.quantization.dynamic import has_large_products
from headrace_engines.quantization.explicit import explicit_precision

EXPLICIT, STRIPPED, DYNAMIC = "explicit", "stripped", "dynamic"
# Description of each method behind a precision in tables.
REMARKS = {
    EXPLICIT: "built from the model's own Q/DQ",
    STRIPPED: "the model's Q/DQ are removed",
    DYNAMIC: "activations are rounded while the model runs, with a scale for each row",
}


def with_method(project: Project, spec: BuildSpec, target: str) -> BuildSpec:
    """Return the specification with the method for the model; unchanged for "best" and the usual way.

    Args:
        project: version of the model.
        spec: specification of the artefact.
        target: "onnxruntime" or "tensorrt".

    Raises:
        BuildError: the file cannot be read, or its Q/DQ have another 8-bit format than the specification.
    """
    if spec.precision == "best" or spec.method:
        return spec
    source = _structure(project.source)
    explicit = explicit_precision(source)
    if explicit and spec.precision in CALIBRATED:
        if explicit != spec.precision:
            cure = f"write precision: {explicit}, or leave it out"
            raise BuildError(f"{project.name}: the model carries Q/DQ of {explicit}, not of {spec.precision}: {cure}")
        return replace(spec, method=EXPLICIT)
    if explicit:
        return replace(spec, method=STRIPPED)
    without_samples = not spec.calibration.data and not is_ragged(project.config)
    if spec.precision == "int8" and target == "onnxruntime" and without_samples and has_large_products(source):
        return replace(spec, method=DYNAMIC)
    return spec


def stored_precision(project: Project) -> str:
    """Return the precision of a model that carries Q/DQ and whose configuration names none; "" for any other model.

    Raises:
        BuildError: the file cannot be read.
    """
    options = project.config.optimization
    accelerator = tensorrt_accelerator(options)
    if options.precision is not None or (accelerator is not None and "precision_mode" in accelerator.parameters):
        return ""
    return explicit_precision(_structure(project.source))


def precisions_without_samples(project: Project, spec: BuildSpec, target: str) -> list[str]:
    """Return the 8-bit precisions that can be built without samples.

    Raises:
        BuildError: the file cannot be read.
    """
    offered = []
    for precision in CALIBRATED:
        try:
            offered += [precision] if with_method(project, spec.at(precision), target).method else []
        except BuildError:
            if not explicit_precision(_structure(project.source)):
                raise
    return offered


def _structure(path: Path) -> onnx.ModelProto:
    """Read a model without its external data."""
    try:
        return onnx.load_model(path, load_external_data=False)
    except (OSError, DecodeError, ValueError) as error:
        raise BuildError(f"{path} is not a readable ONNX model: check it with onnx.checker") from error
