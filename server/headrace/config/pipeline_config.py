"""Configuration of pipelines: Triton's `ensemble_scheduling`, and Headrace's `pipeline` for what Triton's form lacks.

These classes check single fields. Rules over the whole graph are in `headrace.inference.pipelines.graph`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.config.config_base import ConfigPart, Count, Int64, OneOf, Problem, Text, option
from headrace.config.tensor_config import TensorName

BuiltinName = Literal["", "decode_image", "resize", "tokenize", "softmax", "top_k", "nms"]

StepName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class EnsembleStep(ConfigPart):
    """One step of an ensemble: a model, and the names that its tensors have in the ensemble."""

    model_name: Text = option("", "Name of the model that the step calls.")
    model_version: Int64 = option(-1, "Version of the model; -1: the latest.")
    model_namespace: Text = option("", "Namespace of the model; only the empty one exists here.")
    input_map: dict[TensorName, TensorName] = option({}, "Tensors of the ensemble by the model's input names.")
    output_map: dict[TensorName, TensorName] = option({}, "Tensors of the ensemble by the model's output names.")


class EnsembleScheduling(ConfigPart):
    """The steps of an ensemble. A step runs as soon as its inputs are ready."""

    step: tuple[EnsembleStep, ...] = option((), "The steps, in any order.")
    max_inflight_requests: Count = option(0, "Maximum requests of each step that run at once; 0: no limit.")


class PipelineStep(ConfigPart):
    """One step of a pipeline: a model or a built-in step."""

    model: Text = option("", "Name of the model that the step calls, `name/version` for a version.")
    builtin: Annotated[BuiltinName, OneOf()] = option("", "Built-in step instead of a model.")
    options: dict[str, Any] = option({}, "Options of the built-in step.")
    inputs: dict[TensorName, TensorName] = option({}, "Tensors of the pipeline by the step's input names.")
    outputs: dict[TensorName, TensorName] = option({}, "Tensors of the pipeline by the step's output names.")
    when: Text = option("", "Condition on tensors, e.g. `scores.max > 0.5`; the step is skipped if it is false.")
    each: Text = option("", "Tensor whose rows the step computes one by one; the results are gathered again.")
    fallback: Text = option("", "Model that is called if the step fails or would be late.")

    def _problems(self) -> Iterator[Problem]:
        if bool(self.model) == bool(self.builtin):
            yield Problem((), "a step needs either model or builtin", "write exactly one of them")
        if self.options and not self.builtin:
            yield Problem(("options",), "options are for built-in steps", "remove options, or write builtin")


class PipelineConfig(ConfigPart):
    """Steps by name, and the tensors that become outputs."""

    steps: dict[StepName, PipelineStep] = option({}, "The steps by name.")
    outputs: dict[TensorName, TensorName] = option({}, "Tensors of the pipeline by the name of the model's output.")
