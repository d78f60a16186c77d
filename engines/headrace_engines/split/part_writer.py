"""Writes the parts of a model and the pipeline that joins them into the repository; all of them appear, or none.

NAME_part1/config.yaml, NAME_part1/1/model.onnx     a model of its own, on its GPU
NAME_part2/...
NAME_split/config.yaml                              the pipeline: an ensemble of the parts
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import yaml
from headrace.config.model_config import ModelConfig
from headrace.config.optimization_config import CALIBRATED, EngineProfile, requested_precision
from headrace.core.tensor import BY_ONNX_NUMBER

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import write_onnx
from headrace_engines.project import SOURCE, Project
from headrace_engines.split.cuts import Part
from headrace_engines.split.models import SplitModel
from headrace_engines.split.tensors import CrossingTensor
from headrace_engines.store import disk_error

_CURE = "name another repository with --model-repository, or make room"
# Instances of a part on its GPU: two keep it busy, as with any TensorRT model.
_INSTANCES = 2
# Fields that each part has from the whole.
_COPIED = (
    "parameters", "cpu_max_batch_size", "gpu_memory_budget", "keep_loaded", "oversize", "build_on_load", "runtime",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedSplit:
    """Folders of a split model.

    Attributes:
        parts: names of the parts.
        pipeline: name of the pipeline.
        notes: remarks for the user.
    """

    parts: tuple[str, ...]
    pipeline: str
    notes: tuple[str, ...] = ()


def check_config(project: Project) -> None:
    """Refuse models whose configuration does not fit a pipeline.

    Raises:
        BuildError: the model does something beside its graph.
    """
    config = project.config
    features = {
        "sequence_batching": config.sequence_batching is not None,
        "batch_input": bool(config.batch_input),
        "batch_output": bool(config.batch_output),
        "allow_ragged_batch": any(tensor.allow_ragged_batch for tensor in config.input),
        "an optional input": any(tensor.optional for tensor in config.input),
        "pad": config.pad is not None,
        "preprocess.by: server": config.preprocess is not None and config.preprocess.by == "server",
        "postprocess": config.postprocess is not None,
        "reshape": any(each.reshape is not None for each in config.input)
        or any(each.reshape is not None for each in config.output),
    }
    present = [name for name, is_there in features.items() if is_there]
    if present:
        cure = "remove it from a copy of the model, and split that"
        raise BuildError(f"{project.name} has {', '.join(present)}, which a pipeline of parts does not have: {cure}")


@contextmanager
def staged_split(
    project: Project, split: SplitModel, repository: Path, gpus: Sequence[int], *, replace: bool
) -> Iterator[tuple[Path, PublishedSplit]]:
    """Write everything into a hidden folder of the repository, yield it, and move it to its place at the end.

    Args:
        project: the whole.
        split: its parts.
        repository: folder of the repository.
        gpus: GPU number of each part; empty for parts on the CPU.
        replace: replace models of these names.

    Raises:
        BuildError: a name is taken, or the repository cannot be written.
    """
    names = tuple(f"{project.name}_part{number}" for number in range(1, len(split.parts) + 1))
    pipeline = f"{project.name}_split"
    taken = [name for name in (*names, pipeline) if (repository / name).exists()]
    if taken and not replace:
        raise BuildError(f"{repository} has {', '.join(taken)} already: add --replace, or remove them")
    stage = repository / f".split-{secrets.token_hex(6)}"
    notes: list[str] = []
    try:
        try:
            for number, name in enumerate(names):
                config = _part_config(project, split, number, gpus, notes)
                _write(stage / name, config)
                write_onnx(split.models[number], stage / name / "1" / SOURCE)
                _copy_labels(project, config, stage / name)
            _write(stage / pipeline, _pipeline_config(project, split, names, pipeline))
        except OSError as error:
            raise disk_error(error, stage, cure=_CURE) from error
        yield stage, PublishedSplit(names, pipeline, tuple(dict.fromkeys(notes)))
        _move(stage, repository, (*names, pipeline))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move(stage: Path, repository: Path, names: Sequence[str]) -> None:
    """Move the folders; the pipeline is the last, since it needs the others."""
    try:
        for name in names:
            if (repository / name).exists():
                (repository / name).rename(stage / f"{name}.replaced")
            (stage / name).rename(repository / name)
    except OSError as error:
        raise disk_error(error, repository, cure=_CURE) from error


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "1").mkdir(parents=True)
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _part_config(
    project: Project, split: SplitModel, number: int, gpus: Sequence[int], notes: list[str]
) -> dict[str, Any]:
    whole, part = project.config, split.parts[number]
    crossing = {tensor.name: tensor for each in split.parts for tensor in each.received}
    config: dict[str, Any] = {"name": f"{project.name}_part{number + 1}", "max_batch_size": whole.max_batch_size}
    config["input"] = [_entry(name, whole, crossing, project.batched, is_input=True) for name in part.inputs]
    config["output"] = [_entry(name, whole, crossing, project.batched, is_input=False) for name in part.outputs]
    group: dict[str, Any] = {"kind": "KIND_CPU", "count": 1}
    if gpus:
        group = {"kind": "KIND_GPU", "count": _INSTANCES if project.batched else 1, "gpus": [gpus[number]]}
    config["instance_group"] = [group]
    if whole.dynamic_batching is not None:
        config["dynamic_batching"] = {}
    config |= whole.model_dump(mode="json", include=set(_COPIED) & whole.model_fields_set, exclude_defaults=True)
    if optimization := _optimization(project, part, notes):
        config["optimization"] = optimization
    return config


def _entry(
    name: str, whole: ModelConfig, crossing: Mapping[str, CrossingTensor], batched: bool, *, is_input: bool
) -> dict[str, Any]:
    """Return the entry of a tensor: that of the whole, or that of a crossing tensor."""
    entries = [tensor for tensor in (whole.input if is_input else whole.output) if tensor.name == name]
    if entries:
        entry = entries[0].model_dump(mode="json", exclude_defaults=True)
        return {"name": name, "data_type": entry.pop("data_type"), "dims": list(entry.pop("dims")), **entry}
    tensor = crossing[name]
    dims = [dim if isinstance(dim, int) else -1 for dim in tensor.dims]
    data_type = BY_ONNX_NUMBER[tensor.element_type].config_name
    return {"name": name, "data_type": data_type, "dims": dims[1:] if batched else dims}


def _optimization(project: Project, part: Part, notes: list[str]) -> dict[str, Any]:
    """Return `optimization` of a part: precision and profiles of the whole as far as they fit."""
    whole = project.config.optimization
    if not whole.model_fields_set:
        return {}
    optimization: dict[str, Any] = {}
    precision = requested_precision(whole)
    if precision in CALIBRATED or precision == "best":
        notes.append(
            f"{project.name} is built in {precision}, which needs samples of the tensors between the parts: the parts "
            "have no precision, write fp16, or quantise the model before it is split"
        )
    elif precision != "fp32":
        optimization["precision"] = precision
    if whole.workspace_mb is not None:
        optimization["workspace_mb"] = whole.workspace_mb
    profiles = [_profile(project, part, profile, notes) for profile in whole.profiles]
    if profiles:
        optimization["profiles"] = profiles
    return optimization


def _profile(project: Project, part: Part, profile: EngineProfile, notes: list[str]) -> dict[str, Any]:
    """Return a profile for the inputs of a part; free dimensions of crossing tensors follow those of the model's inputs."""
    written: dict[str, Any] = {} if profile.batch is None else {"batch": list(profile.batch)}
    shapes = {name: [list(shape) for shape in profile.shapes[name]] for name in part.inputs if name in profile.shapes}
    sizes = _symbol_sizes(project, profile)
    for tensor in part.received:
        dims = tensor.dims[1:] if project.batched else tensor.dims
        if all(isinstance(dim, int) for dim in dims):
            continue
        if any(isinstance(dim, str) and dim not in sizes for dim in dims):
            notes.append(f"tensor '{tensor.name}' has a free dimension: add its shapes to optimization.profiles")
            continue
        shapes[tensor.name] = [
            [dim if isinstance(dim, int) else sizes[dim][position] for dim in dims] for position in range(3)
        ]
    return written | ({"shapes": shapes} if shapes else {})


def _symbol_sizes(project: Project, profile: EngineProfile) -> dict[str, tuple[int, int, int]]:
    """Return smallest, tuned and largest size of each symbol in the shapes of the model's inputs."""
    sizes: dict[str, tuple[int, int, int]] = {}
    model = onnx.load_model(project.source, load_external_data=False)
    for value in model.graph.input:
        if value.name in profile.shapes:
            dims = value.type.tensor_type.shape.dim[1 if project.batched else 0 :]
            for dim, *three in zip(dims, *profile.shapes[value.name], strict=False):
                if dim.dim_param:
                    sizes[dim.dim_param] = (three[0], three[1], three[2])
    return sizes


def _copy_labels(project: Project, config: Mapping[str, Any], folder: Path) -> None:
    for tensor in config["output"]:
        label_file = tensor.get("label_filename")
        if label_file and (project.folder.path / label_file).is_file():
            (folder / label_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project.folder.path / label_file, folder / label_file)


def _pipeline_config(project: Project, split: SplitModel, names: Sequence[str], pipeline: str) -> dict[str, Any]:
    whole = project.config
    steps = [
        {
            "model_name": name,
            "model_version": -1,
            "input_map": {tensor: tensor for tensor in part.inputs},
            "output_map": {tensor: tensor for tensor in part.outputs},
        }
        for name, part in zip(names, split.parts, strict=True)
    ]
    config: dict[str, Any] = {"name": pipeline, "platform": "ensemble", "max_batch_size": whole.max_batch_size}
    for field, tensors in (("input", whole.input), ("output", whole.output)):
        config[field] = [
            {"name": tensor.name, "data_type": tensor.data_type, "dims": list(tensor.dims)} for tensor in tensors
        ]
    if "slo" in whole.model_fields_set:
        config["slo"] = whole.slo.model_dump(mode="json", exclude_unset=True)
    config["ensemble_scheduling"] = {"step": steps}
    return config
