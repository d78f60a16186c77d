"""Pipelines in a simulation: their graphs without the parts that depend on values, and the tensors between their steps.

The run of a pipeline is the server's own code (`PipelineHandle`). Its tensors have one number a row:
only their rows matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headrace.core.errors import NotFound
from headrace.core.tensor import FP32, Array, ModelSpec, TensorSpec
from headrace.inference.pipelines.graph import PipelineGraph
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.observability.totals import StepTotal


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """A pipeline of the simulation.

    Attributes:
        graph: its steps, by `plain_graph`.
        max_rows: most rows of a request.
        policy: its objective and quotas.
    """

    graph: PipelineGraph
    max_rows: int
    policy: HandlePolicy


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """Figures of one pipeline in a replay.

    Attributes:
        graph: its steps.
        steps: counts and times by name of the step.
        wasted: share of the compute time of all models that was spent on its requests without a response.
    """

    graph: PipelineGraph
    steps: Mapping[str, StepTotal]
    wasted: float


def plain_graph(graph: PipelineGraph) -> PipelineGraph:
    """Return a graph whose steps all run once: values are not simulated, so conditions hold and `each` has one row.

    A built-in step becomes a model named PIPELINE.STEP.
    """
    steps = [replace(step, when=None, each="") for step in graph.steps]
    plain = (
        replace(step, model=f"{graph.name}.{step.name}", version="", builtin="") if step.builtin else step
        for step in steps
    )
    return replace(graph, steps=tuple(plain))


def called_by(graph: PipelineGraph) -> tuple[str, ...]:
    """Return the names of the models that the steps of a plain graph call, fallbacks included, without repetition."""
    names = [name for step in graph.steps for name in (step.model, step.fallback_model[0])]
    return tuple(dict.fromkeys(filter(None, names)))


def simulated_specs(pipelines: Iterable[SimulatedPipeline], max_rows: Mapping[str, int]) -> dict[str, ModelSpec]:
    """Return specs of pipelines and of the models that they call, by name.

    Args:
        pipelines: the pipelines.
        max_rows: rows of the largest batch by name of the model; names of pipelines may be missing.
    """
    inputs: dict[str, dict[str, TensorSpec]] = {}
    outputs: dict[str, dict[str, TensorSpec]] = {}
    rows = dict(max_rows)
    for pipeline in pipelines:
        graph = pipeline.graph
        rows[graph.name] = pipeline.max_rows
        inputs.setdefault(graph.name, {}).update({name: _tensor(name) for name in graph.inputs})
        outputs.setdefault(graph.name, {}).update({name: _tensor(name) for name in graph.outputs})
        for step in graph.steps:
            for model in filter(None, (step.model, step.fallback_model[0])):
                inputs.setdefault(model, {}).update({name: _tensor(name) for name, _ in step.inputs})
                outputs.setdefault(model, {}).update({name: _tensor(name) for name, _ in step.outputs})
    return {
        name: ModelSpec(name, "1", "simulated", inputs[name], outputs[name], rows[name])
        for name in inputs
        if name in rows
    }


def _tensor(name: str) -> TensorSpec:
    return TensorSpec(name, FP32, (-1, 1), optional=True)


@lru_cache(4096)
def tensors(names: tuple[str, ...], rows: int) -> dict[str, Array]:
    """Return arrays of shape (rows, 1) by name; shared, so they must not be changed."""
    array = np.zeros((rows, 1), np.float32)
    return dict.fromkeys(names, array)


class SimulatedMembers:
    """The simulated versions that pipelines call, by name; see `headrace.inference.pipelines.pipeline_handle.Members`.

    Args:
        handles: handles by name; handles that are added later are found too.
    """

    def __init__(self, handles: Mapping[str, VersionHandle]) -> None:
        self._handles = handles

    def lease(self, name: str, version: str) -> VersionHandle:
        """Lease a version; raises NotFound if it is not simulated."""
        handle = self._handles.get(name)
        if handle is None or not handle.lease():
            raise NotFound(f"model '{name}' is not simulated")
        return handle

    def serving(self, name: str, version: str) -> VersionHandle | None:
        """Return a version without a lease; None if it is not simulated."""
        return self._handles.get(name)
