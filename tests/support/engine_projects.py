"""Model folders with a configuration and samples, as inputs of `headrace build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace.config.machine import Machine
from headrace.config.manifest import Stamp
from headrace_engines.project import Project, open_project
from headrace_engines.store import StoreEntry


def write_project(
    repository: Path,
    model: onnx.ModelProto,
    samples: dict[str, np.ndarray],
    *,
    name: str = "net",
    rows: int = 8,
    calibration: dict[str, Any] | None = None,
    **optimization: Any,
) -> Project:
    """Write a model's folder with its configuration.

    Args:
        repository: parent of the new folder `name`.
        model: model with a free first dimension.
        samples: samples by input, [N, ...]; the last quarter is held out for the comparison.
        name: name of the model.
        rows: max_batch_size.
        calibration: fields besides `data`.
        optimization: fields besides `calibration`.
    """
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    np.savez(folder / "calibration.npz", **samples)
    options = {"calibration": {"data": "calibration.npz", **(calibration or {})}, **optimization}
    config = {"name": name, "backend": "onnxruntime", "max_batch_size": rows, "optimization": options}
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(config))
    return open_project(str(folder), repository)


def stamp_of(entry: StoreEntry, machine: Machine, sources: tuple[str, str], precision: str = "int8") -> Stamp:
    """Return the stamp of a built file; `sources` are the digests of model and configuration."""
    return Stamp(
        key=entry.key,
        artefact=entry.path.name,
        artefact_sha256=entry.sha256,
        size_bytes=entry.size_bytes,
        onnx_sha256=sources[0],
        config_digest=sources[1],
        spec_digest="c" * 64,
        precision=precision,
        requested=precision,
        overridden=False,
        machine=machine,
    )
