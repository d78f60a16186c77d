"""Pipelines in YAML (`pipeline:`): from the configuration to the same graph that Triton's ensembles have.

A `resize` that alone reads the image of a `decode_image` is joined with it: one call decodes and resizes, and only the small
tensor leaves the decoder's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.config.config_base import Location, Problem, Problems
from headrace.config.model_config import ModelConfig
from headrace.config.pipeline_config import PipelineConfig, PipelineStep
from headrace.core.tensor import BY_CONFIG_NAME, Array, ModelSpec
from headrace.inference.pipelines.conditions import GRAMMAR, InvalidConditionError, parse_condition
from headrace.inference.pipelines.graph import PipelineGraph, Step, field_problems, join_steps, run_rows
from headrace.inference.pipelines.rows import MAX_EACH_ROWS
from headrace.inference.pipelines.steps.options import RESIZE, option_problems, step_settings

_MAPS = ("inputs", "outputs")
BUILTIN_VERSION = "built-in step"
"""First words of the version of a built-in step, which no model version has."""


def build_yaml_graph(config: ModelConfig) -> PipelineGraph:
    """Build the graph of a pipeline from its field `pipeline`.

    Raises:
        Problems: the pipeline breaks a rule.
    """
    pipeline = config.pipeline
    assert pipeline is not None
    problems = [*field_problems(config, "pipeline"), *_pipeline_problems(config, pipeline)]
    if problems:
        raise Problems(problems)
    steps = _steps(pipeline)
    outputs = {tensor.name: pipeline.outputs.get(tensor.name, tensor.name) for tensor in config.output}
    problems = [*_source_problems(config, steps)]
    if problems:
        raise Problems(problems)
    # Checked before steps are joined, so that problems name the fields as they were written.
    graph = join_steps(config, "pipeline", steps, outputs)
    empty, problems = _empty_outputs(config, graph)
    if problems:
        raise Problems(problems)
    return join_steps(config, "pipeline", _join_resize(graph), outputs, empty=empty)


def builtin_spec(step: Step, max_batch_size: int) -> ModelSpec:
    """Return the spec of a built-in step in a pipeline.

    Args:
        step: a built-in step.
        max_batch_size: see `headrace.inference.pipelines.graph.run_rows`.
    """
    settings = step_settings(step.builtin, step.options)
    rows = max_batch_size if settings.batches else 0
    inputs, outputs = (
        {name: replace(spec, shape=(-1, *spec.shape)) if rows else spec for name, spec in specs.items()}
        for specs in (settings.inputs, settings.outputs)
    )
    return ModelSpec(step.builtin, step.version, "headrace", dict(inputs), dict(outputs), rows)


def _steps(pipeline: PipelineConfig) -> tuple[Step, ...]:
    steps: list[Step] = []
    for index, (name, part) in enumerate(pipeline.steps.items()):
        model, _, version = part.model.partition("/")
        steps.append(
            Step(
                index=index,
                name=name,
                model=part.builtin or model,
                version=f"{BUILTIN_VERSION} {name}" if part.builtin else version,
                inputs=tuple(part.inputs.items()),
                outputs=tuple(part.outputs.items()),
                loc=("pipeline", "steps", name),
                maps=_MAPS,
                builtin=part.builtin,
                options=part.options,
                when=parse_condition(part.when) if part.when else None,
                each=part.each,
                fallback=part.fallback,
            )
        )
    return tuple(steps)


def _pipeline_problems(config: ModelConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    outputs = {tensor.name for tensor in config.output}
    for name in pipeline.outputs:
        if name not in outputs:
            message = f'pipeline.outputs has "{name}", which is no output of the model'
            yield Problem(("pipeline", "outputs", name), message, f"write one of {', '.join(outputs)}")
    for name, step in pipeline.steps.items():
        loc: Location = ("pipeline", "steps", name)
        for field in _MAPS:
            if not getattr(step, field):
                yield Problem((*loc, field), f'step "{name}" has no {field}', "map its tensors: {its name: name here}")
        if step.model.partition("/")[0] == config.name:
            message = f'step "{name}" calls "{config.name}", the pipeline itself'
            yield Problem((*loc, "model"), message, "write the name of another model")
        if step.builtin:
            for problem in option_problems(step.builtin, step.options):
                yield problem._replace(loc=(*loc, "options", *problem.loc))
        yield from _control_problems(config, loc, name, step)


def _control_problems(config: ModelConfig, loc: Location, name: str, step: PipelineStep) -> Iterator[Problem]:
    """Check `when`, `each` and `fallback` of a step."""
    if step.when:
        try:
            parse_condition(step.when)
        except InvalidConditionError as error:
            yield Problem((*loc, "when"), f"the condition cannot be read: {error}", f"write {GRAMMAR}")
    if step.each and step.each not in step.inputs.values():
        message = f'each: "{step.each}" is no tensor in inputs of step "{name}"'
        yield Problem((*loc, "each"), message, f"write one of {', '.join(step.inputs.values())}")
    if step.each and config.max_batch_size > MAX_EACH_ROWS:
        message = (
            f"max_batch_size {config.max_batch_size} is more than {MAX_EACH_ROWS}, the most rows of each in a request"
        )
        yield Problem((*loc, "each"), message, f"write max_batch_size: {MAX_EACH_ROWS} at most")
    for field in ("each", "fallback"):
        if step.builtin and getattr(step, field):
            yield Problem((*loc, field), f"{field} is for steps with a model", f"remove {field}")
    if step.fallback and step.fallback.partition("/")[0] == config.name:
        yield Problem((*loc, "fallback"), "the fallback is the pipeline itself", "write the name of another model")


def _source_problems(config: ModelConfig, steps: tuple[Step, ...]) -> Iterator[Problem]:
    """Check that every tensor has one source."""
    sources = {tensor.name: "an input of the pipeline" for tensor in config.input}
    for step in steps:
        for key, tensor in step.outputs:
            if tensor in sources:
                message = f'tensor "{tensor}" is written twice: it is also {sources[tensor]}'
                yield Problem((*step.loc, "outputs", key), message, "write another name, or remove one of them")
            sources[tensor] = f'an output of step "{step.name}"'


def _empty_outputs(config: ModelConfig, graph: PipelineGraph) -> tuple[dict[str, Array], list[Problem]]:
    """Return the empty arrays of outputs that may have no value as a step is skipped, and the problems of such outputs."""
    skipped = _skippable(graph)
    arrays: dict[str, Array] = {}
    problems: list[Problem] = []
    for index, output in enumerate(config.output):
        if graph.outputs[output.name] not in skipped:
            continue
        shape = (0, *output.dims) if run_rows(graph, config) else tuple(output.dims)
        shape = tuple(0 if size == -1 else size for size in shape)
        if 0 not in shape:
            message = (
                f'output "{output.name}" has no value if a step is skipped, and its dims have no free size to say so'
            )
            cure = "write -1 for one of its dims: it is 0 then"
            problems.append(Problem(("output", index, "dims"), message, cure))
            continue
        array: Array = np.empty(shape, BY_CONFIG_NAME[output.data_type].dtype)
        array.setflags(write=False)
        arrays[output.name] = array
    return arrays, problems


def _skippable(graph: PipelineGraph) -> set[str]:
    """Return the tensors that have no value if a step with `when` is skipped."""
    skipped: set[str] = set()
    for index in graph.order(graph.needed(())):
        step = graph.steps[index]
        if step.when is not None or any(tensor in skipped for _, tensor in step.inputs):
            skipped.update(tensor for _, tensor in step.outputs)
    return skipped


def _join_resize(graph: PipelineGraph) -> tuple[Step, ...]:
    """Join each `resize` that alone reads the image of a `decode_image` with it."""
    steps = list(graph.steps)
    removed: set[int] = set()
    for step in graph.steps:
        if step.builtin != RESIZE or step.when is not None:
            continue
        tensor = dict(step.inputs).get("image", "")
        source = graph.steps[graph.producers[tensor]] if tensor in graph.producers else None
        is_alone = graph.consumers[tensor] == (step.index,) and tensor not in graph.outputs.values()
        if source is None or source.builtin != "decode_image" or not is_alone or _color(source) != _color(step):
            continue
        options: dict[str, Any] = {**source.options, RESIZE: step.options}
        steps[source.index] = replace(source, options=options, outputs=step.outputs, joined=step.name)
        removed.add(step.index)
    remaining = [step for step in steps if step.index not in removed]
    return tuple(replace(step, index=index) for index, step in enumerate(remaining))


def _color(step: Step) -> str:
    options: Mapping[str, Any] = step.options
    return str(options.get("color", "rgb")).lower()
