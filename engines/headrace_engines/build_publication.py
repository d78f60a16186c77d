"""Last stage of `headrace build`: the engine is published beside the model, and its batches are proven."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.config.auto_complete import keeps_rows_apart
from headrace.config.onnx_model import read_signature
from headrace.config.tried_files import TriedFiles
from headrace.core.errors import HeadraceError
from headrace_reports.command_line import plural

from headrace_engines.build import BuildResult, find_fp32_engine, make_stamp
from headrace_engines.build_request import BuildRequest
from headrace_engines.errors import BuildError
from headrace_engines.layers.bisection import first_batch_layer
from headrace_engines.layers.report import batch_layer_text
from headrace_engines.progress import Report, silent
from headrace_engines.project import open_data
from headrace_engines.store import Store, publish, publishing_folder

# Loads models as a server does, tests all batch sizes and stores the result; orders and results are lines of JSON.
_TRIAL_LOAD = (sys.executable, "-P", "-m", "headrace.server.commands.validate")


@dataclass(frozen=True, slots=True)
class Published:
    """A published engine.

    Attributes:
        state_folder: folder that it is in, if not the version's folder.
        fp32_rows_per_s: throughput of FP32 on the same target; 0 if unknown.
        batches: which of its batches are proven; "" if nothing was tested.
    """

    state_folder: Path | None
    fp32_rows_per_s: float = 0.0
    batches: str = ""


def publish_build(request: BuildRequest, built: BuildResult, store: Store) -> Published:
    """Put the engine beside the model, or into the state folder if the version's folder is read-only.

    Raises:
        BuildError: it misses its accuracy and --force is not given, neither folder can be written, or it is no longer in the
            store.
    """
    project, state_dir = request.project, request.options.state_dir
    if built.refusal and not request.options.force:
        raise BuildError("; ".join(built.refusal) + "; --force publishes it with a mark")
    entry = store.find(built.key)
    if entry is None:
        raise BuildError("the engine was removed from the store meanwhile: build it again")
    stamp = make_stamp(built, entry, project, request.requested, request.overridden, bool(built.refusal))
    folder = publishing_folder(project, state_dir)
    publish(entry.path, folder, stamp)
    # The build has run the engine, so a server with this state folder loads it at once.
    tried = TriedFiles(state_dir)
    tried.write(tried.key(stamp.artefact_sha256, stamp.machine, project.config.parameters), project.name)
    return Published(None if folder == project.version_folder else folder, _fp32_rows_per_s(request, built, store))


def prove_batches(request: BuildRequest, built: BuildResult, store: Store, report: Report) -> str:
    """Prove the batches of the published engine; return the result, with the first layer if only the engine is wrong."""
    project, target = request.project, request.target
    if target.name != "tensorrt" and keeps_rows_apart(project.config, read_signature(built.path, built.path.name)):
        return ""
    report(1.0, "proving batches")
    folder = project.folder.path
    order = {"models": [[project.name, str(folder), str(folder.parent)]], "environments_dir": "", "model_keys_file": ""}
    order |= {"state_dir": str(request.options.state_dir.expanduser())}
    child = subprocess.run(_TRIAL_LOAD, input=json.dumps(order), capture_output=True, text=True, check=False)
    if child.returncode:
        return f"its batches are not proven: the process of the proof ended with status {child.returncode}"
    batches = json.loads(child.stdout)["batches"].get(str(project.version), {})
    verified, faults, reason = (batches.get(name) for name in ("verified_batches", "faults", "reason"))
    if not reason:
        return f"{plural(len(verified), 'batch size')} proven, up to {verified[-1]} rows" if verified else ""
    text = f"not all batches are proven ({batches['state']}): {reason}"
    if batches["state"] == "limited" and faults:
        report(1.0, "searching the layer")
        rows, data = min(map(int, faults)), open_data(project, built.spec)
        try:
            text += f"; {batch_layer_text(first_batch_layer(project, built.spec, target, store, data, rows, silent))}"
        except HeadraceError as error:
            text += f"; its layer was not found: {error}"
    return text


def _fp32_rows_per_s(request: BuildRequest, built: BuildResult, store: Store) -> float:
    """Return the throughput of FP32 on the target: its FP32 engine, or `model.onnx` on ONNX Runtime; 0 if unknown."""
    fp32 = find_fp32_engine(request.project, built.spec, request.target, store)
    if fp32 is not None:
        return fp32.rows_per_s
    baseline = built.baseline if request.target.name == "onnxruntime" else None
    return 0.0 if baseline is None else baseline.rows_per_s
