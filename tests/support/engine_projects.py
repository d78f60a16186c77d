"""Models in folders of their own, with a configuration and samples, as `headrace build` finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace_engines.project import Project, open_project


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
    """A model's folder with its configuration.

    Args:
        repository: gets a folder `name`.
        model: its first dimension is free.
        samples: what it is calibrated with, the last quarter what it is compared on; by input, rows in front.
        name: of the model.
        rows: max_batch_size.
        calibration: fields besides `data`.
        optimization: fields besides `calibration`.
    """
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    np.savez(folder / "calibration.npz", **samples)
    told = {"calibration": {"data": "calibration.npz", **(calibration or {})}, **optimization}
    config = {"name": name, "backend": "onnxruntime", "max_batch_size": rows, "optimization": told}
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(config))
    return open_project(str(folder), repository)
