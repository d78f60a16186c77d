"""Graph of a pipeline: steps, the tensors between them, and the rules that both must keep.

`build_graph` checks what a configuration says by itself, `check_members` compares it with the models that it calls. The rules of
`ensemble_scheduling` are Triton's. Nothing here runs a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any, NamedTuple

from headrace.config.config_base import Location, Problem, Problems
from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.core.tensor import BY_CONFIG_NAME, Array, Datatype, ModelSpec, TensorSpec
from headrace.inference.pipelines.conditions import Condition

MAX_STEPS, MAX_LEVELS = 1024, 16
"""Most steps of one request, with those of the pipelines that it calls, and most levels of pipelines that call each other."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a pipeline: a model, and the tensors of the pipeline that it reads and writes.

    Attributes:
        index: position in `PipelineGraph.steps`.
        name: name of the step in messages and metrics, unique in its pipeline.
        model: name of the model.
        version: version number; "" for the latest.
        inputs: (name of the model's input, name of the tensor).
        outputs: (name of the model's output, name of the tensor).
        loc: location in the configuration.
        maps: names of the fields with `inputs` and `outputs` in the configuration.
        builtin: name of a built-in step, whose `model` is that name and whose `version` is private; "" for a model.
        options: options of the built-in step.
        when: the step runs if this holds; None: always.
        each: tensor whose rows become the rows of the model's request; "" for none.
        fallback: name of the model that is called if the step fails or would be late; "" for none.
        joined: name of the step that runs in the same call; "" for none.
    """

    index: int
    name: str
    model: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    loc: Location = ()
    maps: tuple[str, str] = ("input_map", "output_map")
    builtin: str = ""
    options: Mapping[str, Any] = attribute(default_factory=dict)
    when: Condition | None = None
    each: str = ""
    fallback: str = ""
    joined: str = ""

    @property
    def fallback_model(self) -> tuple[str, str]:
        """Name and version of the fallback; "" for none, and for the latest version."""
        model, _, version = self.fallback.partition("/")
        return model, version

    @property
    def is_plain(self) -> bool:
        """True for a step that always runs once: without `when`, `each` and `fallback`."""
        return self.when is None and not self.each and not self.fallback

    @property
    def subject(self) -> str:
        """Model or built-in step, for messages."""
        return f"built-in step {self.builtin}" if self.builtin else f"model {self.model}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that must be ready before the step runs, without repetition: its inputs, and those of `when`."""
        conditions = () if self.when is None else self.when.tensors
        return tuple(dict.fromkeys([*(tensor for _, tensor in self.inputs), *conditions]))


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """Steps of a pipeline without cycles; every tensor has one source.

    Attributes:
        name: name of the pipeline.
        kind: "ensemble" or "pipeline", for messages.
        steps: the steps, in the order of the configuration.
        inputs: names of the pipeline's inputs, which are tensors of the same names.
        outputs: tensor by name of the pipeline's output.
        producers: index of the step by the tensor that it writes.
        consumers: indices of the steps that read a tensor, by tensor.
        max_inflight: maximum requests of each step that run at once; 0 for no limit.
        empty: empty arrays by name of the outputs that a step with `when` may leave out.
        rows_run_alone: True for a pipeline with `each` and `max_batch_size`: each row of a request is a run of its own, whose
            tensors have no batch dimension.
    """

    name: str
    kind: str
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]
    producers: Mapping[str, int]
    consumers: Mapping[str, tuple[int, ...]]
    max_inflight: int = 0
    empty: Mapping[str, Array] = attribute(default_factory=dict)
    rows_run_alone: bool = False

    def needed(self, outputs: Sequence[str]) -> frozenset[int]:
        """Return the steps that the outputs depend on.

        Args:
            outputs: names of outputs of the pipeline; empty for all.
        """
        needed: set[int] = set()
        tensors = [self.outputs[name] for name in outputs or self.outputs]
        while tensors:
            index = self.producers.get(tensors.pop())
            if index is not None and index not in needed:
                needed.add(index)
                tensors += self.steps[index].reads
        return frozenset(needed)

    def order(self, needed: frozenset[int]) -> list[int]:
        """Return the steps in an order in which each follows the steps that it reads from."""
        waits = {
            index: {self.producers[tensor] for tensor in self.steps[index].reads if tensor in self.producers}
            for index in sorted(needed)
        }
        order: list[int] = []
        while waits:
            ready = [index for index, others in waits.items() if not others - set(order)]
            order += ready
            for index in ready:
                del waits[index]
        return order


def build_graph(config: ModelConfig) -> PipelineGraph:
    """Build the graph of a pipeline from its configuration.

    Raises:
        Problems: the graph breaks a rule.
    """
    problems = [*field_problems(config, "ensemble")]
    steps = _ensemble_steps(config)
    if not problems:
        problems += _step_problems(config, steps)
    if problems:
        raise Problems(problems)
    scheduling = config.ensemble_scheduling
    max_inflight = 0 if scheduling is None else scheduling.max_inflight_requests
    return join_steps(config, "ensemble", steps, {tensor.name: tensor.name for tensor in config.output}, max_inflight)


def join_steps(
    config: ModelConfig,
    kind: str,
    steps: tuple[Step, ...],
    outputs: Mapping[str, str],
    max_inflight: int = 0,
    empty: Mapping[str, Array] | None = None,
) -> PipelineGraph:
    """Return the graph of steps of which each is right by itself.

    Args:
        config: configuration of the pipeline.
        kind, steps, outputs, max_inflight, empty: as in `PipelineGraph`.

    Raises:
        Problems: a tensor is never ready, or not used.
    """
    consumers: dict[str, list[int]] = {}
    for step in steps:
        for tensor in step.reads:
            consumers.setdefault(tensor, []).append(step.index)
    graph = PipelineGraph(
        name=config.name,
        kind=kind,
        steps=steps,
        inputs=tuple(tensor.name for tensor in config.input),
        outputs=outputs,
        producers={tensor: step.index for step in steps for _, tensor in step.outputs},
        consumers={tensor: tuple(readers) for tensor, readers in consumers.items()},
        max_inflight=max_inflight,
        empty=empty or {},
        rows_run_alone=config.max_batch_size > 0 and any(step.each for step in steps),
    )
    problems = [*_flow_problems(graph, config)]
    if problems:
        raise Problems(problems)
    return graph


# Fields of a model that runs on instances. Triton refuses those in the first row, except with their defaults.
_FORBIDDEN = (
    "instance_group", "optimization", "model_warmup", "dynamic_batching", "sequence_batching",
    "preprocess", "postprocess", "batch_input", "batch_output", "pad", "runtime", "build_on_load", "fallback",
    "cpu_max_batch_size", "gpu_memory_budget", "keep_loaded", "unload_after_s", "isolation", "oversize",
    "fair_sharing",
)  # fmt: skip


def field_problems(config: ModelConfig, kind: str) -> Iterator[Problem]:
    """Yield the problems of the fields beside the steps; `kind` is "ensemble" or "pipeline"."""
    source = "ensemble_scheduling" if kind == "ensemble" else "pipeline"
    scheduling, pipeline = config.ensemble_scheduling, config.pipeline
    if scheduling is not None and pipeline is not None:
        message = "ensemble_scheduling and pipeline are two forms of the same"
        yield Problem(("pipeline",), message, "keep one of them")
    if config.platform and config.platform != "ensemble":
        message = f'{source} is for platform "ensemble", not "{config.platform}"'
        yield Problem(("platform",), message, f'write platform: "ensemble", or remove {source}')
    if kind == "ensemble" and (scheduling is None or not scheduling.step):
        yield Problem(("ensemble_scheduling",), "an ensemble has no steps", "write ensemble_scheduling.step")
    if kind == "pipeline" and (pipeline is None or not pipeline.steps):
        yield Problem(("pipeline",), "a pipeline has no steps", "write pipeline.steps")
    steps = len(scheduling.step if scheduling is not None else pipeline.steps if pipeline is not None else ())
    if steps > MAX_STEPS:
        yield Problem((source,), f"it has {steps} steps, at most {MAX_STEPS} are allowed", "remove steps")
    defaults = ModelConfig.model_fields
    article = "an ensemble" if kind == "ensemble" else "a pipeline"
    for field in _FORBIDDEN:
        if field in config.model_fields_set and getattr(config, field) != defaults[field].default:
            message = f"{field} is not for {article}, which runs nothing itself"
            yield Problem((field,), message, f"remove it, or write {field} in the models that the {kind} calls")
    for field in ("input", "output"):
        if not getattr(config, field):
            yield Problem((field,), f"{field} is missing", f"list the tensors of the {kind}: name, data_type and dims")


def _ensemble_steps(config: ModelConfig) -> tuple[Step, ...]:
    steps: list[Step] = []
    used: dict[str, int] = {}
    for index, step in enumerate(config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()):
        number = used[step.model_name] = used.get(step.model_name, 0) + 1
        name = step.model_name if number == 1 else f"{step.model_name}#{number}"
        version = str(step.model_version) if step.model_version > 0 else ""
        inputs, outputs = tuple(step.input_map.items()), tuple(step.output_map.items())
        loc: Location = ("ensemble_scheduling", "step", index)
        steps.append(Step(index, name, step.model_name, version, inputs, outputs, loc))
    return tuple(steps)


def _step_problems(config: ModelConfig, steps: tuple[Step, ...]) -> Iterator[Problem]:
    """Check each step by itself, and that every tensor has one source."""
    scheduling = config.ensemble_scheduling
    assert scheduling is not None
    sources = {tensor.name: "an input of the ensemble" for tensor in config.input}
    for step, part in zip(steps, scheduling.step, strict=True):
        if not step.model:
            yield Problem(
                (*step.loc, "model_name"), f"step {step.index} has no model_name", "write the name of a model"
            )
        elif step.model == config.name:
            message = f'step {step.index} calls "{step.model}", the ensemble itself'
            yield Problem((*step.loc, "model_name"), message, "write the name of another model")
        if part.model_version == 0 or part.model_version < -1:
            message = f"model_version {part.model_version} is no version"
            yield Problem((*step.loc, "model_version"), message, "write a version number, or -1 for the latest")
        for field, pairs in (("input_map", step.inputs), ("output_map", step.outputs)):
            if not pairs:
                yield Problem(
                    (*step.loc, field), f"step {step.index} has no {field}", f"map the tensors of {step.model}"
                )
        for key, tensor in step.outputs:
            if tensor in sources:
                message = f'tensor "{tensor}" is written twice: it is also {sources[tensor]}'
                yield Problem((*step.loc, "output_map", key), message, "write another name, or remove one of them")
            sources[tensor] = f"an output of step {step.index} ({step.model})"


def _flow_problems(graph: PipelineGraph, config: ModelConfig) -> Iterator[Problem]:
    """Check that every tensor becomes ready and is used."""
    reads, writes = ("inputs", "outputs") if graph.kind == "pipeline" else ("input_map", "output_map")
    for index, tensor in enumerate(config.input):
        if tensor.name not in graph.consumers:
            message = f'input "{tensor.name}" is not read by any step'
            yield Problem(("input", index, "name"), message, f"map it in {reads} of a step, or remove the input")
    ready = _ready_tensors(graph)
    for index, output in enumerate(config.output):
        tensor_name = graph.outputs[output.name]
        if tensor_name not in graph.producers:
            message = f'output "{output.name}" is not written by any step'
            yield Problem(("output", index, "name"), message, f"map it in {writes} of a step, or remove the output")
        elif tensor_name not in ready:
            message = f'output "{output.name}" is never ready: its steps wait for each other'
            yield Problem(("output", index, "name"), message, "remove the cycle from the maps of the steps")
    written = set(graph.outputs.values())
    for step in graph.steps:
        for key, name in (*step.inputs, *(("when", tensor) for tensor in (step.when.tensors if step.when else ()))):
            if name not in graph.producers and name not in graph.inputs:
                message = f'tensor "{name}" is neither an input of the {graph.kind} nor an output of a step'
                loc: Location = (*step.loc, reads, key) if (key, name) in step.inputs else (*step.loc, "when")
                yield Problem(loc, message, f"map it in {writes} of a step, or correct its name")
        for key, name in step.outputs:
            loc = (*step.loc, writes, key)
            if name not in ready and name not in written:
                message = f'tensor "{name}" is never ready: step {step.index} ({step.model}) waits for itself'
                yield Problem(loc, message, "remove the cycle from the maps of the steps")
            elif name not in graph.consumers and name not in written:
                message = f'tensor "{name}" is not used: it is no output of the {graph.kind}, and no step reads it'
                yield Problem(loc, message, f"remove it from {writes}, or add an output")


def _ready_tensors(graph: PipelineGraph) -> set[str]:
    """Return the tensors that become ready if the inputs of the pipeline are."""
    ready: set[str] = set()
    queue = deque(graph.inputs)
    while queue:
        name = queue.popleft()
        if name in ready:
            continue
        ready.add(name)
        for index in graph.consumers.get(name, ()):
            step = graph.steps[index]
            if all(tensor in ready for tensor in step.reads):
                queue.extend(tensor for _, tensor in step.outputs)
    return ready


class _Use(NamedTuple):
    """A tensor of the pipeline as one model, or the pipeline itself, declares it."""

    user: str  # model and tensor, for messages
    datatype: Datatype  # element type
    dims: tuple[int, ...]  # shape without the batch dimension
    shape: tuple[int, ...]  # shape with the batch dimension, which is -1; equal to `dims` without one
    has_rows: bool = False  # True if the user is a step with `each`, whose batch may be the rows of one tensor

    @property
    def dims_text(self) -> str:
        """The dims that the tensor may have in the pipeline, for messages."""
        return f"{list(self.dims)} or {list(self.shape)}" if self.has_rows else str(list(self.dims))


def check_members(graph: PipelineGraph, config: ModelConfig, specs: Mapping[int, ModelSpec]) -> Iterator[Problem]:
    """Compare a pipeline with the models that it calls.

    Args:
        graph: graph of the pipeline.
        config: configuration of the pipeline.
        specs: spec of the model by index of the step; steps without one are not checked.
    """
    first: dict[str, _Use] = {}
    max_rows = run_rows(graph, config)
    declared: tuple[tuple[str, ModelInput | ModelOutput], ...] = (
        *(("input", tensor) for tensor in config.input),
        *(("output", tensor) for tensor in config.output),
    )
    for side, tensor in declared:
        user = f'{side} "{tensor.name}" of the {graph.kind}'
        shape = (-1, *tensor.dims) if max_rows else tensor.dims
        first[graph.outputs[tensor.name] if side == "output" else tensor.name] = _Use(
            user, BY_CONFIG_NAME[tensor.data_type], tensor.dims, shape
        )
    for step in graph.steps:
        spec = specs.get(step.index)
        if spec is None:
            continue
        if 0 < spec.max_batch_size < max_rows:
            message = f"max_batch_size {max_rows} is more than {spec.max_batch_size} of model {step.model}"
            yield Problem(("max_batch_size",), message, f"write {spec.max_batch_size} at most, or raise the model's")
        yield from _mapping_problems(step, spec)
        sides = ((step.maps[0], step.inputs, spec.inputs), (step.maps[1], step.outputs, spec.outputs))
        for field, pairs, tensors in sides:
            for key, name in pairs:
                if key in tensors:
                    use = _use_of(field, step, spec, tensors[key])
                    loc = (*step.loc, field, key)
                    yield from _contradiction(loc, name, first.setdefault(name, use), use)


def _use_of(field: str, step: Step, spec: ModelSpec, tensor: TensorSpec) -> _Use:
    side = "input" if field == step.maps[0] else "output"
    dims = tensor.shape[1:] if spec.max_batch_size else tensor.shape
    has_rows = bool(step.each) and spec.max_batch_size > 0
    return _Use(f'{side} "{tensor.name}" of {step.subject}', tensor.datatype, dims, tensor.shape, has_rows)


def _mapping_problems(step: Step, spec: ModelSpec) -> Iterator[Problem]:
    sides = (("input", step.maps[0], step.inputs, spec.inputs), ("output", step.maps[1], step.outputs, spec.outputs))
    for side, field_name, pairs, tensors in sides:
        for key, _ in pairs:
            if key not in tensors:
                message = f'{step.subject} has no {side} "{key}"'
                yield Problem((*step.loc, field_name, key), message, f"its {side}s are {', '.join(tensors)}")
    mapped = {key for key, _ in step.inputs}
    for name, tensor in spec.inputs.items():
        if name not in mapped and not tensor.optional:
            message = f'input "{name}" of {step.subject} is not mapped'
            yield Problem((*step.loc, step.maps[0]), message, "map it: the model needs it")


def _contradiction(loc: Location, name: str, one: _Use, other: _Use) -> Iterator[Problem]:
    if one.datatype is not other.datatype:
        message = (
            f'tensor "{name}" is {one.datatype.config_name} as {one.user}, {other.datatype.config_name} as {other.user}'
        )
        yield Problem(loc, message, "map a tensor of the same type, or correct data_type")
    # A tensor of a model with batches may go to one without: then the full shapes agree. Free sizes are checked in service.
    elif not (
        same_shape(one.dims, other.dims)
        or same_shape(one.shape, other.shape)
        or (one.has_rows and same_shape(one.shape, other.dims))
        or (other.has_rows and same_shape(one.dims, other.shape))
    ):
        message = f'tensor "{name}" has dims {one.dims_text} as {one.user}, {other.dims_text} as {other.user}'
        yield Problem(loc, message, "map a tensor of the same shape, or correct dims")


def run_rows(graph: PipelineGraph, config: ModelConfig) -> int:
    """Return the most rows of one run through the steps of a pipeline; 0 if its tensors have no batch dimension there."""
    return 0 if graph.rows_run_alone else config.max_batch_size


def same_shape(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two shapes agree; -1 agrees with any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
