"""Brings an ONNX file into a model repository.

The file is checked and run, its batch dimension is freed if requested, and the model's folder is written.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from headrace.config.files import sync
from headrace.config.model_config import ModelConfig, name_problem
from headrace.config.model_folder import CONFIG_FILES, find_versions, read_model_folder
from headrace.config.onnx_model import external_files
from headrace.core.errors import ConfigError

from headrace_engines.errors import BuildError, CallError
from headrace_engines.importers.import_folder import CONFIG, MODEL
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.onnx_proof import Proof, prove
from headrace_engines.onnx_graph import OnnxRunner, read_onnx, write_onnx
from headrace_engines.progress import Report, part, silent
from headrace_engines.quantization.samples import random_samples

# ONNX checks shapes in memory, in one protobuf.
_LARGEST_CHECKED_BYTES = 1 << 30
# Rows of a batch of a freed model.
DEFAULT_MAX_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class OnnxImport:
    """A model that was brought in.

    Attributes:
        name: name of the model.
        folder: folder of the version.
        config: completed configuration.
        proof: comparison of batches with single runs; None without a freed batch dimension.
        changes: one line for each node that was rewritten.
        notes: remarks on the configuration.
    """

    name: str
    folder: Path
    config: ModelConfig
    proof: Proof | None
    changes: tuple[str, ...]
    notes: tuple[str, ...]


def import_onnx(
    source: Path,
    repository: Path,
    *,
    name: str = "",
    version: int | None = None,
    dynamic_batch: bool = False,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    report: Report = silent,
) -> OnnxImport:
    """Write the folder of a model; it appears complete or not at all.

    Args:
        source: the ONNX file, its external data beside it.
        repository: the model repository; created if missing.
        name: name of the model; "" for the file's.
        version: number of the version; None for the next one.
        dynamic_batch: free the batch dimension.
        max_batch_size: rows of a batch of a freed model.
        report: progress callback.

    Raises:
        BuildError: the file is no valid model, fails, mixes rows, or the version exists.
    """
    report(0.0, f"reads {source.name}")
    model = read_onnx(source)
    _check(model, source)
    name = name or model_name(source)
    problem = name_problem(name)
    if problem is not None:
        raise CallError(f"{problem.message}: {problem.cure}, with --name")
    target = repository / name
    number = version or _next_version(target, repository)
    if (target / str(number)).exists():
        raise CallError(f"{target / str(number)} exists: choose another --name or --version, or remove that folder")
    proof: Proof | None = None
    changes: tuple[str, ...] = ()
    if dynamic_batch:
        model, proof, changes = _freed(model, part(report, 0.1, 0.9))
    report(0.9, "writes the model")
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import.", dir=repository, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary, name)
            file = folder / str(number) / MODEL
            file.parent.mkdir(parents=True)
            if dynamic_batch:
                write_onnx(model, file)
            else:
                _copy(source, file)
            config = _completed(folder, max_batch_size if dynamic_batch else None)
            notes = _try_out(model, config)
            _publish(folder, target, number)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BuildError(f"the model cannot be written to {repository}: {reason}: check the folder") from error
    return OnnxImport(name, target / str(number), config, proof, changes, notes)


def _freed(model: onnx.ModelProto, report: Report) -> tuple[onnx.ModelProto, Proof, tuple[str, ...]]:
    report(0.0, "frees the batch dimension")
    freed = free_batch(model)
    return freed.model, prove(model, freed.model, freed.batch_size, freed.merged, report=report), freed.changes


def model_name(source: Path) -> str:
    """Return a name for a model from that of its file: other characters than those of a name become "_"."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", source.stem).strip(".-") or "model"


def _next_version(folder: Path, repository: Path) -> int:
    if not folder.is_dir():
        return 1
    versions, _ = find_versions(folder, repository)
    return max(versions, default=0) + 1


def _check(model: onnx.ModelProto, source: Path) -> None:
    """Check types and shapes of all nodes; `read_onnx` has checked their form."""
    if model.ByteSize() > _LARGEST_CHECKED_BYTES:
        return
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # shape inference raises an exception of its own
        first = " ".join(str(error).split())[:300]
        raise BuildError(f"{source.name} is not a valid model: {first}: export it again") from error


def _copy(source: Path, file: Path) -> None:
    """Copy the file as it is, with its external data."""
    shutil.copyfile(source, file)
    for location in external_files(source, source.name):
        beside = file.parent / location
        beside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / location, beside)


def _completed(folder: Path, max_batch_size: int | None) -> ModelConfig:
    """Write the configuration of a new model as the server completes it.

    Args:
        folder: the model's folder, with one version.
        max_batch_size: rows of a batch; None for the server's choice.

    Raises:
        BuildError: the server cannot serve the model.
    """
    try:
        config = read_model_folder(folder, folder.parent).config
    except ConfigError as error:
        raise BuildError(f"the model cannot be served: {error}") from error
    rows = max_batch_size if max_batch_size is not None and config.max_batch_size else config.max_batch_size
    lines = [f"name: {json.dumps(folder.name)}", f"max_batch_size: {rows}"]
    for field, tensors in (("input", config.input), ("output", config.output)):
        lines.append(f"{field}:")
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.dims))
            lines.append(f"  - {{name: {json.dumps(tensor.name)}, data_type: {tensor.data_type}, dims: [{dims}]}}")
    if config.dynamic_batching is not None:
        lines.append("dynamic_batching: {}")
    (folder / CONFIG).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_model_folder(folder, folder.parent).config


def _try_out(model: onnx.ModelProto, config: ModelConfig) -> tuple[str, ...]:
    """Run the model on random inputs and return remarks.

    Raises:
        BuildError: ONNX Runtime cannot load the model, or it fails on inputs of the only shape that it has.
    """
    runner = OnnxRunner(model)
    inputs = next(iter(random_samples(config, 1).batches(1)))
    try:
        outputs = runner.run(inputs)
    except BuildError as error:
        if any(size < 0 for tensor in config.input for size in tensor.dims):
            return (f"not run: free dimensions of 1 do not suit it ({error})",)
        raise
    odd = [name for name, array in outputs.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
    return tuple(f"output {name} has values that are not finite for random inputs" for name in odd)


def _publish(folder: Path, target: Path, version: int) -> None:
    """Move a new model, or a new version of a model, into the repository; each appears complete.

    Raises:
        BuildError: the configuration of the existing model does not suit the new version.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync(path)
    if not target.exists():
        folder.rename(target)
        sync(target.parent)
        return
    if not any((target / name).exists() for name in CONFIG_FILES):
        (folder / CONFIG).rename(target / CONFIG)
    place = target / str(version)
    (folder / str(version)).rename(place)
    try:
        read_model_folder(target, target.parent)
    except ConfigError as error:
        shutil.rmtree(place)
        raise BuildError(f"the new version does not suit the configuration of {target}: {error}") from error
