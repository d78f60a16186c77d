"""Pipelines with a decoupled step, which are decoupled themselves: their rules, and the steps before and behind that step.

As in Triton, the models decide: a pipeline is decoupled if one of its steps is, whatever its own configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.config.config_base import Problem
from headrace.core.tensor import ModelSpec
from headrace.inference.pipelines.graph import PipelineGraph, Step
from headrace.inference.pipelines.run import PipelineRoute


def decoupled_step(specs: Mapping[int, ModelSpec]) -> int | None:
    """Return the index of the first decoupled step; None if every step has one response.

    Args:
        specs: spec of the model by index of the step.
    """
    return next((index for index in sorted(specs) if specs[index].decoupled), None)


def decoupled_step_problems(graph: PipelineGraph, specs: Mapping[int, ModelSpec], has_cache: bool) -> Iterator[Problem]:
    """Yield the problems of the decoupled steps of a pipeline.

    Args:
        graph: graph of the pipeline.
        specs: spec of the model by index of the step; steps without one are not checked.
        has_cache: the pipeline has a response cache.
    """
    streamed = [graph.steps[index] for index in sorted(specs) if specs[index].decoupled]
    if not streamed:
        return
    step = streamed[0]
    if len(streamed) > 1:
        message = (
            f"steps '{step.name}' and '{streamed[1].name}' are decoupled, and {_a(graph)} has at most one such step"
        )
        yield Problem(streamed[1].loc, message, "call models with one response in all other steps")
    if not step.is_plain:
        message = f"step '{step.name}' is decoupled, and when, each and fallback are for steps with one response"
        yield Problem(step.loc, message, "remove them from the step")
    if graph.rows_run_alone:
        message = f"step '{step.name}' is decoupled, and with each and max_batch_size every row runs alone"
        yield Problem(("max_batch_size",), message, "remove max_batch_size, or each")
    if has_cache:
        message = (
            f"response_cache is for {_a(graph)} with one response to a request, and step '{step.name}' is decoupled"
        )
        yield Problem(
            ("response_cache",), message, "remove response_cache, or write it in the models of the other steps"
        )
    behind = steps_behind(graph, step.index)
    for other in graph.steps:
        if other.when is not None and other.index not in behind and other is not step:
            message = f"step '{other.name}' has a condition, and does not run behind the decoupled step '{step.name}'"
            yield Problem((*other.loc, "when"), message, f"remove when; steps behind '{step.name}' may have conditions")


def changed_step_problem(step: Step | None, specs: Mapping[int, ModelSpec]) -> Problem | None:
    """Return the problem of a pipeline whose models have become decoupled, or are so no longer; None without one.

    Args:
        step: the decoupled step when the pipeline was loaded; None for none.
        specs: spec of the model by index of the step; steps without one are not checked.
    """
    for index, spec in specs.items():
        was_decoupled = step is not None and step.index == index
        if spec.decoupled is not was_decoupled:
            state = "decoupled" if spec.decoupled else "no longer decoupled"
            return Problem((), f"model {spec.name} is {state} since the pipeline was loaded", "load the pipeline again")
    return None


def steps_behind(graph: PipelineGraph, index: int) -> frozenset[int]:
    """Return the steps that read, directly or not, an output of a step."""
    behind: set[int] = set()
    tensors = [tensor for _, tensor in graph.steps[index].outputs]
    while tensors:
        for follower in graph.consumers.get(tensors.pop(), ()):
            if follower not in behind:
                behind.add(follower)
                tensors += [tensor for _, tensor in graph.steps[follower].outputs]
    return frozenset(behind)


@dataclass(frozen=True, slots=True)
class DecoupledRoute:
    """The steps of a route before and behind the decoupled step.

    Attributes:
        head: steps that run once for a request. Its outputs are the tensors that later steps or the client read.
        step: index of the decoupled step; None if the requested outputs need none.
        tail: steps that run once for each response of that step; may be empty.
        kept: tensors of the request and of the head that the tail or the client reads.
    """

    head: PipelineRoute
    step: int | None
    tail: PipelineRoute
    kept: frozenset[str]


def split_route(graph: PipelineGraph, route: PipelineRoute, step: int) -> DecoupledRoute:
    """Split a route at the decoupled step.

    Args:
        graph: graph of the pipeline.
        route: steps that a set of requested outputs needs.
        step: index of the decoupled step.
    """
    if step not in route.order:
        return DecoupledRoute(route, None, _part(graph, route, frozenset(), ()), frozenset())
    behind = steps_behind(graph, step).intersection(route.order)
    before = frozenset(route.order) - behind - {step}
    tail = _part(graph, route, behind, route.outputs)
    read = {*graph.steps[step].reads, *tail.readers}
    written = [tensor for tensor, index in graph.producers.items() if index in before and tensor in read]
    head = _part(graph, route, before, tuple((tensor, tensor) for tensor in written))
    streamed = {tensor for _, tensor in graph.steps[step].outputs}
    kept = {tensor for tensor in tail.readers if graph.producers.get(tensor) not in behind} - streamed
    return DecoupledRoute(head, step, tail, frozenset(kept))


def _part(
    graph: PipelineGraph, route: PipelineRoute, steps: frozenset[int], outputs: tuple[tuple[str, str], ...]
) -> PipelineRoute:
    """Return the route of some of the steps of a route, whose other tensors are there from the start."""
    order = tuple(index for index in route.order if index in steps)
    sources = {index: route.sources[index] & steps for index in order}
    readers = {tensor: len(steps.intersection(users)) for tensor, users in graph.consumers.items()}
    for _, tensor in outputs:
        readers[tensor] = readers.get(tensor, 0) + 1
    return PipelineRoute(
        order=order,
        first=tuple(index for index in order if not sources[index]),
        followers={index: tuple(each for each in route.followers[index] if each in steps) for index in order},
        sources=sources,
        waits={index: len(others) for index, others in sources.items()},
        readers={tensor: count for tensor, count in readers.items() if count},
        outputs=outputs,
    )


def _a(graph: PipelineGraph) -> str:
    return "an ensemble" if graph.kind == "ensemble" else "a pipeline"
