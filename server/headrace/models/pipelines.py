"""Opens pipelines: from a folder and the serving versions of its models to a `PipelineHandle`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from headrace.config.binding import bind
from headrace.config.config_base import Location, Problem, Problems
from headrace.config.documents import MAX_CONFIG_BYTES, Document, open_regular_file
from headrace.config.model_config import ModelConfig, ModelTransactionPolicy
from headrace.config.model_folder import CONFIG_FILES, ModelFolder, read_document
from headrace.config.serving_plan import ServingPlan
from headrace.core.errors import ConfigError, Finding, HeadraceError
from headrace.core.tensor import ModelSpec
from headrace.inference.pipelines.decoupled_rules import decoupled_step, decoupled_step_problems
from headrace.inference.pipelines.graph import (
    MAX_LEVELS,
    MAX_STEPS,
    PipelineGraph,
    Step,
    build_graph,
    check_members,
    run_rows,
)
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.pipelines.yaml_steps import build_yaml_graph, builtin_spec
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.builtin_steps import PipelineMembers, open_builtin_steps
from headrace.models.dependencies import load_order
from headrace.models.folders import RepositoryModel
from headrace.models.loader import Loader
from headrace.models.registry import Registry
from headrace.models.version_policies import handle_policy, model_spec
from headrace.observability.counters import Recorder
from headrace.python.python_models import files_digest

RUNTIME = "ensemble"
"""Runtime in the plan and in the metadata of a pipeline."""


def pipeline_plan(folder: ModelFolder, version: int) -> ServingPlan:
    """Return the plan of a pipeline, which has no file."""
    return ServingPlan(RUNTIME, folder.path / str(version))


def called_models(path: Path, repository: Path, override: Document | None = None) -> frozenset[str]:
    """Return the models that the configuration in a folder calls; empty for a model, and for a broken configuration.

    Args:
        path: the model's folder.
        repository: links must not lead out of this folder.
        override: configuration that replaces the folder's own.
    """
    try:
        if override is not None:  # `bind` changes its document
            document = replace(override, data=deepcopy(override.data))
        else:
            files = [path / name for name in CONFIG_FILES if _may_have_steps(path / name)]
            if not files:
                return frozenset()
            document = read_document(files[0], repository)
        config = bind(document)[0]
    except (ConfigError, OSError):
        return frozenset()  # the load reports it
    return frozenset() if config is None else _called(config)


def in_load_order(selected: Sequence[RepositoryModel], models: Mapping[str, RepositoryModel]) -> list[RepositoryModel]:
    """Return models so that those that a pipeline calls come before it; adds the ones that are not selected.

    Args:
        selected: models to load.
        models: by name, models that may be added.
    """
    by_name = {**models, **{model.name: model for model in selected}}
    called: dict[str, frozenset[str]] = {}
    names = [model.name for model in selected]
    for name in names:
        if name in by_name and name not in called:
            model = by_name[name]
            called[name] = called_models(model.path, model.repository)
            names += sorted(called[name])
    return [by_name[name] for name in load_order(called)]


def _may_have_steps(file: Path) -> bool:
    """True if a configuration may have steps: most do not, and reading a file is faster than parsing it."""
    try:
        with open_regular_file(file) as stream:  # a pipe would block the control thread
            text = stream.read(MAX_CONFIG_BYTES)
    except OSError:
        return False
    return b"ensemble_scheduling" in text or b"pipeline" in text


def _called(config: ModelConfig) -> frozenset[str]:
    steps = () if config.ensemble_scheduling is None else config.ensemble_scheduling.step
    names = [step.model_name for step in steps]
    for part in () if config.pipeline is None else config.pipeline.steps.values():
        names += [part.model.partition("/")[0], part.fallback.partition("/")[0]]
    return frozenset(filter(None, names))


def open_pipeline(folder: ModelFolder, version: int, registry: Registry, loader: Loader) -> PipelineHandle:
    """Check a pipeline against the models that serve, and create its handle.

    Args:
        folder: folder of the pipeline.
        version: version number.
        registry: registry of the models that it calls.
        loader: has the mailbox and the settings of handles.

    Raises:
        ConfigError: the configuration breaks a rule, a model is not served, or does not fit.
    """
    config = folder.config
    try:
        graph = build_graph(config) if config.pipeline is None else build_yaml_graph(config)
    except Problems as error:
        raise ConfigError([folder.finding(problem) for problem in error.problems]) from None
    specs = _specs(graph, folder, registry)
    has_cache = config.response_cache is not None and config.response_cache.enable
    problems = [
        *check_members(graph, config, specs),
        *decoupled_step_problems(graph, specs, has_cache),
        *_fallback_problems(graph, config, specs, registry),
        *_size_problems(graph, registry),
    ]
    if problems:
        raise ConfigError([folder.finding(problem) for problem in problems])
    decoupled = decoupled_step(specs)
    spec = model_spec(folder, version)
    spec = replace(spec, parameters={"headrace.runtime": RUNTIME}, decoupled=decoupled is not None)
    spec = _with_labels(spec, graph, specs)
    builtins = open_builtin_steps(graph, folder, loader)
    handle = PipelineHandle(
        spec=spec,
        graph=graph,
        members=PipelineMembers(registry, builtins) if builtins else registry,
        builtins=tuple(builtins.values()),
        policy=handle_policy(config),
        mailbox=loader.mailbox,
        recorder=Recorder(loader.histograms),
        check=partial(check_members, graph, config),
        decoupled=decoupled,
    )
    for builtin in builtins.values():
        builtin.digest = "built-in"  # the configuration and the files of the pipeline decide its outputs
    # Its files are, for instance, those of tokenizers and labels.
    loader.open_cache(handle, folder, lambda: files_digest(folder.path, sorted(folder.path.rglob("*"))))
    return handle


def served_config(config: ModelConfig, handles: Mapping[str, VersionHandle]) -> ModelConfig:
    """Return the configuration that clients read; whether a pipeline is decoupled depends on its models.

    Args:
        config: configuration of a model or a pipeline.
        handles: its versions by number.
    """
    is_decoupled = any(handle.spec.decoupled for handle in handles.values())
    if not config.is_pipeline or is_decoupled is config.is_decoupled:
        return config
    return config.model_copy(update={"model_transaction_policy": ModelTransactionPolicy(decoupled=is_decoupled)})


def _specs(graph: PipelineGraph, folder: ModelFolder, registry: Registry) -> dict[int, ModelSpec]:
    """Return the specs of the serving models by index of the step; raises ConfigError if one is not served."""
    specs: dict[int, ModelSpec] = {}
    findings: dict[str, Finding] = {}
    for step in graph.steps:
        if step.builtin:
            specs[step.index] = builtin_spec(step, run_rows(graph, folder.config))
            continue
        try:
            handle = registry.lease(step.model, step.version)
        except HeadraceError as error:
            version = f" version {step.version}" if step.version else ""
            message = f"needs model '{step.model}'{version}, which is not served: {error}"
            cure = "load the model, or correct its name"
            findings.setdefault(
                message,
                folder.finding(
                    Problem((*step.loc, "model" if graph.kind == "pipeline" else "model_name"), message, cure)
                ),
            )
            continue
        specs[step.index] = handle.spec
        handle.release()
    if findings:
        raise ConfigError(list(findings.values()))
    return specs


def _fallback_problems(
    graph: PipelineGraph, config: ModelConfig, specs: Mapping[int, ModelSpec], registry: Registry
) -> Iterator[Problem]:
    """Compare the fallbacks of the steps with the pipeline."""
    for step in graph.steps:
        if not step.fallback:
            continue
        loc: Location = (*step.loc, "fallback")
        member = registry.serving(*step.fallback_model)
        if member is None:
            yield Problem(
                loc, f"needs model '{step.fallback}', which is not served", "load the model, or correct its name"
            )
            continue
        spec = member.spec
        replaced = {**specs, step.index: spec}
        for problem in check_members(graph, config, replaced):
            yield Problem(loc, f"the fallback does not fit: {problem.message}", problem.cure)
        if spec.decoupled:
            message = f"the fallback {step.fallback} is decoupled, and a fallback has one response"
            yield Problem(loc, message, "write a model with one response")
        if (spec.max_batch_size > 0) != (specs[step.index].max_batch_size > 0):
            message = f"only one of model {step.model} and its fallback {step.fallback} has batches"
            yield Problem(loc, message, "write max_batch_size in both, or in none")


def _size_problems(graph: PipelineGraph, registry: Registry) -> Iterator[Problem]:
    """Count the steps of a request of a pipeline, and of those that call it, without following any pipeline twice."""
    sizes: dict[str, tuple[int, int]] = {}

    def size(name: str, steps: Sequence[Step]) -> tuple[int, int]:
        """Return the number of steps with those of called pipelines, and the number of levels."""
        if name not in sizes:
            sizes[name] = 0, MAX_LEVELS  # for a pipeline that calls itself
            count, levels = len(steps), 0
            for model, version in [each for s in steps for each in ((s.model, s.version), s.fallback_model)]:
                member = registry.serving(model, version)
                if model == graph.name or isinstance(member, PipelineHandle):
                    called = graph if model == graph.name else cast(PipelineHandle, member).graph
                    below = size(f"{model}/{version}", called.steps)
                    count, levels = count + below[0], max(levels, below[1])
            sizes[name] = count, levels + 1
        return sizes[name]

    callers = {name: serving.handles.values() for name, serving in registry.pipelines.items() if name != graph.name}
    graphs = [graph, *(each.graph for all_ in callers.values() for each in all_ if isinstance(each, PipelineHandle))]
    for each in graphs:
        count, levels = size(each.name, each.steps)
        if count > MAX_STEPS or levels > MAX_LEVELS:
            subject = "one request" if each is graph else f"with it, one request of '{each.name}'"
            message = f"{subject} runs {count} steps in {levels} levels of pipelines"
            loc: Location = ("ensemble_scheduling" if graph.kind == "ensemble" else "pipeline",)
            limits = f"at most {MAX_STEPS} in {MAX_LEVELS} are allowed"
            yield Problem(loc, f"{message}, {limits}", "call fewer models, or join pipelines")
            return


def _with_labels(spec: ModelSpec, graph: PipelineGraph, specs: Mapping[int, ModelSpec]) -> ModelSpec:
    """Add the labels of the models' outputs to those outputs of the pipeline that have none of their own."""
    outputs = dict(spec.outputs)
    for name, tensor in outputs.items():
        step = graph.steps[graph.producers[graph.outputs[name]]]
        keys = [key for key, written in step.outputs if written == graph.outputs[name]]
        labels = specs[step.index].outputs[keys[0]].labels
        if labels and not tensor.labels:
            outputs[name] = replace(tensor, labels=labels)
    return replace(spec, outputs=outputs)
