"""Writes demo models into a model repository: up-to-date models stay, new ones appear complete or not at all.

<output>/<name>/config.pbtxt | config.yaml, labels.txt     written if missing, never overwritten
<output>/<name>/calibration[.npz], accuracy[.npz]          samples, likewise
<output>/<name>/1/model.onnx                               the model
<output>/<name>/1/recipe.json                              the stamp: recipe, weights, size, accuracy
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from headrace.config.durable import locked_folder

from headrace_engines.demo.catalogue import CATALOGUE, Artefact, DemoModel, load_recipe, make_samples
from headrace_engines.demo.weights_file import WeightsFile
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

VERSION = "1"
MODEL_FILE = "model.onnx"
STAMP_FILE = "recipe.json"
# What the stamp was called before; now the stamps of engines built from the model are.
OLD_STAMP_FILE = "build.json"

# Called with a model's name, the share of its work that is done and a few words.
Progress = Callable[[str, float, str], None]


class DemoState(Enum):
    """State of a model relative to its recipe."""

    MISSING = "no model there"
    OUTDATED = "built from another recipe or other weights"
    UP_TO_DATE = "built from this recipe"
    FOREIGN = "a model without a stamp of this builder"


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Result for one demo model.

    Attributes:
        name: the model's name.
        state: how it stood before.
        built: True if it was built now.
        size_bytes: of the model file, 0 if there is none.
        accuracy: as in `Artefact`.
        weights: as in `Artefact`, "" if not known.
        seconds: how long it took.
        error: why it could not be built, "" if nothing went wrong.
        remark: what was done about its samples, or why it has none, "" if nothing was to do.
    """

    name: str
    state: DemoState
    built: bool = False
    size_bytes: int = 0
    accuracy: float | None = None
    weights: str = ""
    seconds: float = 0.0
    error: str = ""
    remark: str = ""


def choose_models(names: Sequence[str], fetched: WeightsFile | None) -> list[DemoModel]:
    """The models of these names, all of them if none is named.

    Raises:
        BuildError: if a name is not in the catalogue, or weights are given and no chosen model takes any.
    """
    unknown = sorted(set(names) - set(CATALOGUE))
    if unknown:
        raise BuildError(f"no demo model is called {', '.join(unknown)}, expected some of {', '.join(CATALOGUE)}")
    models = [model for model in CATALOGUE.values() if not names or model.name in names]
    if fetched and not any(model.fetched_recipe for model in models):
        takers = ", ".join(model.name for model in CATALOGUE.values() if model.fetched_recipe)
        raise BuildError(f"published weights were requested, and only {takers} takes them: name it with --only")
    return models


def demo_state(model: DemoModel, output: Path, fetched: WeightsFile | None) -> DemoState:
    """Return the state of the model in `output` relative to its recipe (and to `fetched`, if it takes weights)."""
    folder = output / model.name / VERSION
    if not (folder / MODEL_FILE).is_file():
        return DemoState.MISSING
    stamp = read_stamp(folder)
    if stamp is None:
        return DemoState.FOREIGN
    if stamp.get("size_bytes") != (folder / MODEL_FILE).stat().st_size:
        return DemoState.OUTDATED
    if model.fetched_recipe and fetched:
        if stamp.get("weights") != f"sha256:{fetched.sha256}":
            return DemoState.OUTDATED
    # Fetched weights are kept, also when `make serve` builds the missing models.
    elif model.fetched_recipe and str(stamp.get("weights", "")).startswith("sha256:"):
        return DemoState.UP_TO_DATE
    return DemoState.UP_TO_DATE if model.is_recipe(stamp.get("recipe")) else DemoState.OUTDATED


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp of a version folder, also one under its old name, or None if there is none that can be read."""
    return _read_json(folder / STAMP_FILE) or _old_stamp(folder)


def _old_stamp(folder: Path) -> dict[str, Any] | None:
    old = _read_json(folder / OLD_STAMP_FILE)
    return old if old is not None and "recipe" in old and "builds" not in old else None


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _rename_old_stamp(folder: Path) -> None:
    """Give an old stamp its new name, or take it away where there is a new one."""
    if _old_stamp(folder) is None:
        return
    # Where it cannot be renamed, it is still read.
    with suppress(OSError), locked_folder(folder):
        if _old_stamp(folder) is None:  # a builder of engines has put its own there meanwhile, and kept ours
            return
        if (folder / STAMP_FILE).exists():
            (folder / OLD_STAMP_FILE).unlink()
        else:
            (folder / OLD_STAMP_FILE).rename(folder / STAMP_FILE)


def build_model(
    model: DemoModel, output: Path, fetched: WeightsFile | None, force: bool, progress: Progress
) -> DemoOutcome:
    """Bring one model up to date.

    Args:
        model: which one.
        output: the model repository; created if missing.
        fetched: published weights, for a model that takes them.
        force: build it even if it is up to date or has no stamp of this builder.
        progress: called with the progress.

    Returns:
        The outcome; it holds a failure, which is not raised.
    """
    started_s = time.monotonic()
    state = demo_state(model, output, fetched)
    try:
        _write_missing_files(model, output / model.name)
        remark = "" if state is DemoState.FOREIGN and not force else _write_missing_samples(model, output / model.name)
        if not force and state in (DemoState.UP_TO_DATE, DemoState.FOREIGN):
            _rename_old_stamp(output / model.name / VERSION)
            return replace(_unchanged_outcome(model, output, state), remark=remark)
        artefact = _run_recipe(model, fetched, lambda done, note: progress(model.name, done, note))
        seconds = time.monotonic() - started_s
        size_bytes = _write_version(model, output / model.name, artefact, seconds)
    except (BuildError, OSError) as error:
        return DemoOutcome(model.name, state, seconds=time.monotonic() - started_s, error=str(error))
    progress(model.name, 1.0, "done")
    seconds = time.monotonic() - started_s
    return DemoOutcome(model.name, state, True, size_bytes, artefact.accuracy, artefact.weights, seconds, remark=remark)


def _unchanged_outcome(model: DemoModel, output: Path, state: DemoState) -> DemoOutcome:
    folder = output / model.name / VERSION
    stamp = read_stamp(folder) or {}
    size_bytes = (folder / MODEL_FILE).stat().st_size
    return DemoOutcome(model.name, state, False, size_bytes, stamp.get("accuracy"), str(stamp.get("weights", "")))


def _run_recipe(model: DemoModel, fetched: WeightsFile | None, report: Report) -> Artefact:
    if fetched and model.fetched_recipe:
        return load_recipe(model.fetched_recipe)(report, fetched)
    return load_recipe(model.recipe)(report)


def _write_missing_files(model: DemoModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A configuration of the other kind, written by the user, takes precedence.
    has_config = any((folder / name).exists() for name in ("config.pbtxt", "config.yaml", "config.yml"))
    for name in model.files:
        if (folder / name).exists() or (has_config and name.startswith("config.")):
            continue
        temporary = folder / f".{name}.{os.getpid()}"
        try:
            temporary.write_text(model.file_text(name), encoding="utf-8", newline="\n")
            temporary.replace(folder / name)
        finally:
            temporary.unlink(missing_ok=True)


def _write_missing_samples(model: DemoModel, folder: Path) -> str:
    """Write the missing samples; return a sentence about it, or about the failure.

    A model serves without them, so that what they are made from is not installed does not fail it.
    """
    missing = [path for path in model.sample_places if not (folder / path).exists()]
    if not missing:
        return ""
    try:
        _write_samples(make_samples(model), missing, folder)
    except (BuildError, OSError) as error:
        return f"has no samples to calibrate with: {error}"
    return f"{' and '.join(missing)} laid beside it: samples to calibrate with and to measure on"


def _write_samples(files: Mapping[str, bytes], missing: Sequence[str], folder: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".samples.", dir=folder))
    try:
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for target in missing:
            # Another builder may have been faster; its samples are the same.
            if not (folder / target).exists():
                (temporary / target).replace(folder / target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_version(model: DemoModel, folder: Path, artefact: Artefact, seconds: float) -> int:
    """Write the version folder and return the model file's size in bytes."""
    import numpy as np
    import onnx

    onnx.checker.check_model(artefact.model)
    content = artefact.model.SerializeToString()
    stamp = {
        "model": model.name,
        "recipe": model.recipe_digest(),
        "weights": artefact.weights,
        "size_bytes": len(content),
        "accuracy": artefact.accuracy,
        "seconds": round(seconds, 3),
        "built_with": {"onnx": onnx.__version__, "numpy": np.__version__},
    }
    # The stamp is last: where files are replaced one by one, it vouches for all of them.
    written = {**artefact.extra_files, MODEL_FILE: content, STAMP_FILE: (json.dumps(stamp, indent=2) + "\n").encode()}
    temporary = Path(tempfile.mkdtemp(prefix=f".{VERSION}.", dir=folder))
    try:
        temporary.chmod(0o755)  # mkdtemp's folder is readable by its owner alone; a server may run as another user
        for name, data in written.items():
            (temporary / name).write_bytes(data)
        if (folder / VERSION).exists():
            for name in written:
                (temporary / name).replace(folder / VERSION / name)
            _rename_old_stamp(folder / VERSION)
        else:
            temporary.replace(folder / VERSION)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(content)
