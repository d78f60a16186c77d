"""Checks an engine against its model's configuration, and words its stamp for log and metadata.

What is loaded of a version is chosen by `headrace.config.serving_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.config.config_completion import contradictions
from headrace.config.onnx_signature import read_signature
from headrace.config.serving_plan import Plan
from headrace.config.stamps import Stamp
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import ModelConfig

__all__ = ["Plan", "check_engine", "engine_parameters", "told_of", "version_parameters"]

# What measurements are called in a stamp -> how people say them.
_MEASURED = {
    "top1_agreement": "top-1 agreement with FP32",
    "accuracy": "accuracy",
    "reference_accuracy": "accuracy in FP32",
}


def check_engine(plan: Plan, config: ModelConfig) -> None:
    """Hold an engine in ONNX against the configuration: it takes and gives what the model does, and nothing from elsewhere.

    Raises:
        ConfigError: it does not.
    """
    if plan.artefact is None or plan.artefact.suffix != ".onnx":
        return
    name = plan.artefact.name
    problems = contradictions(config, read_signature(plan.artefact, name))
    if problems:
        raise ConfigError([Finding(name, None, problem.message, problem.cure) for problem in problems])


def told_of(stamp: Stamp) -> str:
    """Precision and accuracy of an engine for the log, e.g. "int8, top-1 agreement with FP32 99.1 %"."""
    accuracy = stamp.accuracy or {}
    measured = [
        f"{words} {100 * value:.1f} %"
        for name, words in _MEASURED.items()
        if isinstance(value := accuracy.get(name), float | int) and not isinstance(value, bool)
    ]
    return ", ".join([stamp.precision, *measured])


def version_parameters(plan: Plan, devices: Sequence[int]) -> dict[str, str | float | bool]:
    """Metadata of a version: the runtime, device, precision and artefact that serve it, and the facts of its engine.

    Args:
        plan: what is loaded.
        devices: numbers of the GPUs that run it; empty on the CPU.
    """
    numbers = ",".join(map(str, sorted(set(devices))))
    placement: dict[str, str | float | bool] = {
        "headrace.runtime": plan.runtime,
        "headrace.device": f"GPU {numbers}" if devices else "CPU",
        "headrace.precision": plan.served_precision,
        "headrace.artefact": plan.file.name,
    }
    if plan.not_on_gpu:
        placement["headrace.not_on_gpu"] = plan.not_on_gpu
    return placement if plan.stamp is None else {**placement, **engine_parameters(plan.stamp)}


def engine_parameters(stamp: Stamp) -> Mapping[str, str | float | bool]:
    """What the metadata of a model say of the engine that serves it, each under a name that begins with "engine."."""
    accuracy = stamp.accuracy or {}
    found: dict[str, str | float | bool] = {
        "engine.file": stamp.artefact,
        "engine.precision": stamp.precision,
        "engine.below_accuracy_bar": stamp.forced,
    }
    if stamp.forced:
        found["engine.refusal"] = "; ".join(stamp.refusal)
    for name in (*_MEASURED, "cosine"):
        value = accuracy.get(name)
        if isinstance(value, float | int):
            found[f"engine.{name}"] = value
    return found
