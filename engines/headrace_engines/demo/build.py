"""Demo models: the catalogue, and the files written into a model repository.

Up-to-date models are not written again. New ones appear complete or not at all.

<output>/<name>/config.pbtxt | config.yaml, labels.txt     written if missing, never overwritten
<output>/<name>/calibration[.npz], accuracy[.npz]          samples, written if missing
<output>/<name>/1/model.onnx | model.py                    the model
<output>/<name>/1/recipe.json                              the stamp: recipe, weights, size, accuracy

This module imports no NumPy and no ONNX: a recipe is named by module and function, and imported for its build.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Artefact:
    """Built demo model.

    Attributes:
        model: the graph with its weights, or the text of a Python model.
        weights: origin of the weights: "seeded", "trained", "none", or "sha256:<hex>" of their file.
        accuracy: accuracy on held-out samples, 0..1; None without a measurement.
        extra_files: contents of additional files of the version, by name.
    """

    model: onnx.ModelProto | bytes
    weights: str
    accuracy: float | None = None
    extra_files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Entry of the catalogue.

    Attributes:
        name: name of the model and of its folder.
        recipe: "module:function" in `headrace_engines.demo`; the function takes a `Report` and returns an `Artefact`.
        sources: modules, and files with their paths, that define the model; a change of their text leads to a rebuild.
        files: file in the model's folder -> file in the `files/` folder of this package that it is copied from.
        samples: "module:function" that returns the contents of calibration and accuracy samples by path, "" without one.
        sample_paths: files and folders in the model's folder that `samples` writes.
        equal_recipes: digests of earlier texts of `sources` that build the same model; no rebuild for these.
        model_file: name of the model's file in its version.
    """

    name: str
    recipe: str
    sources: Sequence[str]
    files: dict[str, str]
    samples: str = ""
    sample_paths: Sequence[str] = ()
    equal_recipes: Sequence[str] = ()
    model_file: str = "model.onnx"

    def recipe_digest(self) -> str:
        """Return the SHA-256, in hex, of the text of `sources`."""
        digest = hashlib.sha256()
        for source in self.sources:
            file = source if "/" in source else f"{source}.py"
            digest.update(files("headrace_engines.demo").joinpath(file).read_bytes())
        return digest.hexdigest()

    def file_text(self, name: str) -> str:
        """Return the text of one of `files`."""
        return files("headrace_engines.demo").joinpath("files", self.files[name]).read_text(encoding="utf-8")


def _load(recipe: str) -> Any:
    """Import and return "module:function" of `headrace_engines.demo`."""
    module_name, function_name = recipe.split(":")
    return getattr(import_module(f"headrace_engines.demo.{module_name}"), function_name)


def _read_catalogue() -> dict[str, DemoModel]:
    text = files("headrace_engines.demo").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return {name: DemoModel(name, **entry) for name, entry in tomllib.loads(text).items()}


CATALOGUE = _read_catalogue()
VERSION = "1"
STAMP_FILE = "recipe.json"


class DemoState(Enum):
    """State of a demo model relative to its recipe."""

    MISSING = "no model there"
    OUTDATED = "built from another recipe or other weights"
    UP_TO_DATE = "built from this recipe"
    FOREIGN = "a model without a stamp of this builder"


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Result for one demo model.

    Attributes:
        name: name of the model.
        state: state before this call.
        built: True if this call built it.
        size_bytes: size of the model file; 0 without one.
        accuracy: as in `Artefact`.
        weights: as in `Artefact`; "" if unknown.
        seconds: duration of this call.
        error: reason why the build failed; "" without an error.
        remark: samples written by this call, or the reason why there are none; "" without any.
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


def choose_models(names: Sequence[str]) -> list[DemoModel]:
    """Return the models of these names, or all models without names.

    Raises:
        BuildError: a name is not in the catalogue.
    """
    unknown = sorted(set(names) - set(CATALOGUE))
    if unknown:
        raise BuildError(f"no demo model is called {', '.join(unknown)}, expected some of {', '.join(CATALOGUE)}")
    return [model for model in CATALOGUE.values() if not names or model.name in names]


def demo_state(model: DemoModel, output: Path) -> DemoState:
    """Return the state of the model in `output` relative to its recipe."""
    folder = output / model.name / VERSION
    if not (folder / model.model_file).is_file():
        return DemoState.MISSING
    stamp = read_stamp(folder)
    if stamp is None:
        return DemoState.FOREIGN
    if stamp.get("size_bytes") != (folder / model.model_file).stat().st_size:
        return DemoState.OUTDATED
    is_recipe = stamp.get("recipe") in (model.recipe_digest(), *model.equal_recipes)
    return DemoState.UP_TO_DATE if is_recipe else DemoState.OUTDATED


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """Return the stamp of a version folder; None if none can be read."""
    return _read_json(folder / STAMP_FILE)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def build_demo_model(model: DemoModel, output: Path, force: bool, report: Report) -> DemoOutcome:
    """Bring one model up to date.

    Args:
        model: the model.
        output: folder of the model repository; created if missing.
        force: build even if the model is up to date or has no stamp of this builder.
        report: called with the progress.

    Returns:
        The outcome; errors are in it, not raised.
    """
    started_s = time.monotonic()
    state = demo_state(model, output)
    try:
        _write_missing_files(model, output / model.name)
        remark = "" if state is DemoState.FOREIGN and not force else _write_missing_samples(model, output / model.name)
        if not force and state in (DemoState.UP_TO_DATE, DemoState.FOREIGN):
            return replace(_unchanged_outcome(model, output, state), remark=remark)
        artefact: Artefact = _load(model.recipe)(report)
        seconds = time.monotonic() - started_s
        size_bytes = _write_version(model, output / model.name, artefact, seconds)
        _run_once(model, output / model.name / VERSION / model.model_file)
    except (BuildError, OSError) as error:
        return DemoOutcome(model.name, state, seconds=time.monotonic() - started_s, error=str(error))
    report(1.0, "done")
    seconds = time.monotonic() - started_s
    return DemoOutcome(model.name, state, True, size_bytes, artefact.accuracy, artefact.weights, seconds, remark=remark)


def _run_once(model: DemoModel, file: Path) -> None:
    """Run an ONNX file and record that, so that a server loads it at once."""
    if file.suffix != ".onnx":
        return
    import numpy as np
    from headrace.config.digests import onnx_digest
    from headrace.config.machine import onnxruntime_machine
    from headrace.config.tried_files import TriedFiles
    from headrace.core.tensor import BY_ORT_NAME

    from headrace_engines.store import DEFAULT_STATE
    from headrace_engines.targets.onnxruntime_session import open_session, session_options

    session = open_session(file, session_options())
    shapes = {node.name: [size if isinstance(size, int) else 1 for size in node.shape] for node in session.get_inputs()}
    session.run(
        None, {node.name: np.ones(shapes[node.name], BY_ORT_NAME[node.type].dtype) for node in session.get_inputs()}
    )
    tried = TriedFiles(DEFAULT_STATE)
    tried.write(tried.key(onnx_digest(file), onnxruntime_machine(), {}), model.name)


def _unchanged_outcome(model: DemoModel, output: Path, state: DemoState) -> DemoOutcome:
    folder = output / model.name / VERSION
    stamp = read_stamp(folder) or {}
    size_bytes = (folder / model.model_file).stat().st_size
    return DemoOutcome(model.name, state, False, size_bytes, stamp.get("accuracy"), str(stamp.get("weights", "")))


def _write_missing_files(model: DemoModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A configuration of the other format, written by the user, takes precedence.
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
    """Write the missing samples; return a remark on them, or on the failure.

    A model serves without samples, so a missing package of source data is no error.
    """
    missing = [path for path in model.sample_paths if not (folder / path).exists()]
    if not missing:
        return ""
    try:
        _write_samples(_load(model.samples)(), missing, folder)
    except (BuildError, OSError) as error:
        return f"has no calibration samples: {error}"
    return f"{' and '.join(missing)} written beside it: samples for calibration and accuracy"


def _write_samples(files: Mapping[str, bytes], missing: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".samples.", dir=folder, ignore_cleanup_errors=True) as temporary:
        for name, data in files.items():
            path = Path(temporary, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for target in missing:
            # Another builder may have written them first; its samples are equal.
            if not (folder / target).exists():
                Path(temporary, target).replace(folder / target)


def _write_version(model: DemoModel, folder: Path, artefact: Artefact, seconds: float) -> int:
    """Write the version folder and return the model file's size in bytes."""
    import numpy as np
    import onnx

    if isinstance(artefact.model, bytes):
        content = artefact.model
    else:
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
    # The stamp is last: if files are replaced one by one, a new stamp means that all of them are new.
    written = {
        **artefact.extra_files,
        model.model_file: content,
        STAMP_FILE: (json.dumps(stamp, indent=2) + "\n").encode(),
    }
    with tempfile.TemporaryDirectory(prefix=f".{VERSION}.", dir=folder, ignore_cleanup_errors=True) as path:
        temporary = Path(path)
        temporary.chmod(0o755)  # a temporary folder is readable by its owner only; a server may run as another user
        for name, data in written.items():
            (temporary / name).write_bytes(data)
        if (folder / VERSION).exists():
            for name in written:
                (temporary / name).replace(folder / VERSION / name)
        else:
            temporary.replace(folder / VERSION)
    return len(content)
