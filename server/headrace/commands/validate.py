"""`headrace validate`: loads every model of a repository as the server does and reports every problem, without serving.

Run as a module it is the child process that loads the models: `python -m headrace.commands.validate`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.config.model_folder import ModelFolder, read_model_folder, served_versions
from headrace.core.command_line import did_you_mean
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import ModelConfig
from headrace.core.tensor_config import ModelInput, ModelOutput
from headrace.repository.builds import BUILDER, EngineBuilds
from headrace.repository.deployment import Deployments, ModelSource, VersionCloser
from headrace.repository.folders import SkippedFolder, folder_names, folders, is_model_folder, open_paths
from headrace.repository.gpu_model_cache import GpuModelCache
from headrace.repository.loader import Loader
from headrace.repository.registry import Registry

TRIAL_LOAD: tuple[str, ...] = (sys.executable, "-P", "-m", "headrace.commands.validate")
_READY, _LOADING = "READY", "LOADING"


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The outcome for one model's folder.

    Attributes:
        model: the model, None if its folder cannot be read as one.
        findings: errors and warnings; those of the files in the order of file and line, then those of loading.
        states: version, state and reason as the index of a server would have them; empty where nothing was loaded.
        substitutes: version and reason where the CPU serves though the configuration asks for a GPU.
        skipped: the folder is not a model's, and why.
    """

    model: ModelFolder | None
    findings: tuple[Finding, ...]
    states: tuple[tuple[str, str, str], ...] = ()
    substitutes: tuple[tuple[str, str], ...] = ()
    skipped: SkippedFolder | None = None

    @property
    def ready(self) -> tuple[str, ...]:
        """The versions that a server would serve."""
        return tuple(version for version, state, _ in self.states if state == _READY)


def inspect(path: Path, load: bool = True, state_dir: str = "") -> list[ModelCheck]:
    """Read and load the models in `path`, or the one model whose folder it is; never raises for what it finds.

    Args:
        path: a repository, one model's folder, or an ONNX file; findings name files relative to it (to the folder around a
            model or file).
        load: load the models too, in a process of their own; False: only read their files.
        state_dir: of the server, where engines of read-only folders lie; "" for none.
    """
    # "." and ".." have no name that a model could have; links stay as they are, for the reader to judge.
    path = Path(os.path.abspath(path))
    if path.is_file() and path.suffix == ".onnx":
        with open_paths([path]) as named:
            return inspect(named.repositories[0], load, state_dir)
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        suggestion = did_you_mean(path.name, folder_names(path.parent))
        cure = " ".join(filter(None, (suggestion, "name a model repository, or one model's folder")))
        return [_only(Finding(path.name, None, state, cure))]
    if is_model_folder(path):
        inspections = [_read(path, path.parent)]
        return _loaded(inspections, path.parent, state_dir) if load else inspections
    try:
        models, skipped = folders(path)
    except ConfigError as error:
        return [_only(replace(error.findings[0], path=path.name))]
    if not models:
        cure = "put each model in a folder of its own: <model>/1/model.onnx"
        empty = _only(Finding(path.name, None, "holds no models", cure, fatal=False))
        return [*(ModelCheck(None, (), skipped=folder) for folder in skipped), empty]
    inspections = [_read(folder, path) for folder in models]
    notes = [ModelCheck(None, (), skipped=folder) for folder in skipped]
    return [*notes, *(_loaded(inspections, path, state_dir) if load else inspections)]


def _only(finding: Finding) -> ModelCheck:
    return ModelCheck(None, (finding,))


def _read(folder: Path, repository: Path) -> ModelCheck:
    try:
        model = read_model_folder(folder, repository)
    except ConfigError as error:
        return ModelCheck(None, tuple(error.findings))
    return ModelCheck(model, model.findings)


def _loaded(inspections: Sequence[ModelCheck], repository: Path, state_dir: str) -> list[ModelCheck]:
    """The inspections, with what came of loading the models that could be read."""
    models = [inspection.model for inspection in inspections if inspection.model is not None]
    outcomes = load_in_child(models, repository, state_dir)
    return [
        inspection if inspection.model is None else _with_outcome(inspection, inspection.model, outcomes)
        for inspection in inspections
    ]


def _with_outcome(inspection: ModelCheck, model: ModelFolder, outcomes: Mapping[str, Any]) -> ModelCheck:
    outcome = outcomes[model.name]
    findings = [_below_model(Finding(*finding), model) for finding in outcome["findings"]]
    states = tuple((version, state, reason) for version, state, reason in outcome["states"])
    substitutes = tuple((version, reason) for version, reason in outcome["substitutes"])
    return replace(inspection, findings=(*inspection.findings, *findings), states=states, substitutes=substitutes)


def _below_model(finding: Finding, model: ModelFolder) -> Finding:
    """A finding of loading, which may name a file of a version without its folder, with the model in front."""
    if finding.path == model.name or finding.path.startswith(f"{model.name}/"):
        return finding
    if finding.path.startswith(f"{model.name} "):
        return replace(finding, path=model.name)
    return replace(finding, path=model.name, message=f"{finding.path} {finding.message}")


def load_in_child(models: Sequence[ModelFolder], repository: Path, state_dir: str = "") -> dict[str, dict[str, Any]]:
    """Load models as the server does, in a process of their own, which a crash of a runtime ends.

    Args:
        models: to load, one after the other.
        repository: that their folders are in.
        state_dir: as for `inspect`.

    Returns:
        By model name what `headrace.commands.validate` reports.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    waiting = list(models)
    while waiting:
        listed = [(model.name, str(model.path), str(repository)) for model in waiting]
        order = json.dumps({"state_dir": os.path.expanduser(state_dir), "models": listed})
        with tempfile.TemporaryFile() as errors:
            child = subprocess.run(TRIAL_LOAD, input=order.encode(), stdout=subprocess.PIPE, stderr=errors, check=False)
            lines = child.stdout.splitlines()
            for model, line in zip(waiting, lines, strict=False):
                outcomes[model.name] = json.loads(line)
            waiting = waiting[len(lines) :]
            if waiting:
                # The first without a line is the one that ended the process; the others get a new one.
                crashed = waiting.pop(0)
                outcomes[crashed.name] = _crash(crashed.name, child.returncode, _last_line(errors))
    return outcomes


def _last_line(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 2000, 0))
    text: str = file.read().decode("utf-8", "replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _crash(name: str, status: int, detail: str) -> dict[str, Any]:
    ending = f"status {status}"
    if status < 0:
        ending = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    message = f"loading the model ends the process with {ending}" + (f": {detail[:400]}" if detail else "")
    cure = "check the model's file and the libraries of its runtime; `isolation: process` keeps the server alive"
    return {"states": [], "findings": [[name, None, message, cure, True]], "substitutes": []}


def main(paths: Sequence[Path], console: Console, load: bool = True, strict: bool = False, state_dir: str = "") -> int:
    """Print what is wrong in `paths`, a line for each good model, and a summary.

    Args:
        paths: repositories, or folders of single models.
        console: where to print.
        load: as for `inspect`.
        strict: a model that the CPU serves in place of a GPU is an error, as with `headrace serve --strict`.
        state_dir: as for `inspect`.

    Returns:
        The exit status: 1 if a model is not served (with `strict` also if `headrace serve --strict` would not start), else 0.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        single = path.is_dir() and is_model_folder(path)
        for inspection in inspect(path, load, state_dir):
            if strict:
                inspection = _strict(inspection)
            if inspection.skipped is not None:
                _print_skipped(inspection.skipped, path, console)
            for finding in inspection.findings:
                counts["error" if finding.fatal else "warning"] += 1
                _print_finding(_from_here(finding, path, single), console)
            if inspection.model is None:
                continue
            if inspection.ready or not load:
                counts["model"] += 1
                _print_model(inspection.model, inspection, console)
            _print_states(inspection.model, inspection, console)
    summary = [
        _counted(counts["model"], "good model"),
        _counted(counts["error"], "error"),
        _counted(counts["warning"], "warning"),
    ]
    console.print(Text(", ".join(summary), style="bold red" if counts["error"] else "bold green"))
    return 1 if counts["error"] else 0


def _from_here(finding: Finding, path: Path, single: bool) -> Finding:
    """The finding with its file as it can be opened from where the command was typed."""
    if path.is_file() or finding.path == os.path.basename(os.path.abspath(path)):
        return replace(finding, path=str(path))
    if single:
        return replace(finding, path=str(path / Path(*Path(finding.path).parts[1:])))
    return replace(finding, path=str(path / finding.path))


def _print_finding(finding: Finding, console: Console) -> None:
    text = Text(str(finding))
    text.stylize("red" if finding.fatal else "yellow", len(finding.path))
    console.print(text, soft_wrap=True)


def _print_skipped(skipped: SkippedFolder, path: Path, console: Console) -> None:
    shown = path / skipped.path.name
    console.print(Text(f"{shown}: note: skipped: {skipped.reason}", style="dim"), soft_wrap=True)


def _print_model(model: ModelFolder, inspection: ModelCheck, console: Console) -> None:
    served = inspection.ready or tuple(map(str, served_versions(model.config, model.versions)))
    line = f" {', '.join(served)}: {signature_line(model.config)}"
    console.print(Text.assemble(("OK ", "green"), (model.name, "bold"), line), soft_wrap=True)


def _print_states(model: ModelFolder, inspection: ModelCheck, console: Console) -> None:
    """What the index says beside a version that serves, or that is still loading: its engine is built first."""
    for version, state, reason in inspection.states:
        if version and reason and state in (_READY, _LOADING):
            word = "" if state == _READY else f"{state}: "
            console.print(Text(f"   {model.name} {version}: note: {word}{reason}", style="dim"), soft_wrap=True)


def _strict(inspection: ModelCheck) -> ModelCheck:
    """The inspection with an error for each version that the CPU serves in place of a GPU."""
    if inspection.model is None:
        return inspection
    cure = "write fallback: onnxruntime, or remove KIND_GPU and backend: tensorrt"
    errors = [
        Finding(f"{inspection.model.name}/{version}", None, f"asks for a GPU: {reason}", cure)
        for version, reason in inspection.substitutes
    ]
    return replace(inspection, findings=(*inspection.findings, *errors))


def signature_line(config: ModelConfig) -> str:
    """A model's inputs, outputs and batching in one line, e.g. `x FP32[-1,16] -> y FP32[-1,16], batches of up to 4`."""
    batched = config.max_batch_size > 0
    inputs = ", ".join(_tensor(tensor, batched) for tensor in config.served_input)
    outputs = ", ".join(_tensor(tensor, batched) for tensor in config.served_output)
    batching = f", batches of up to {config.max_batch_size}" if batched else ", no batching"
    return f"{inputs} -> {outputs}{batching}"


def _tensor(tensor: ModelInput | ModelOutput, batched: bool) -> str:
    shape = ",".join(map(str, (-1, *tensor.dims) if batched else tensor.dims))
    return f"{tensor.name} {tensor.data_type.removeprefix('TYPE_')}[{shape}]"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


_CLOSE_TIMEOUT_S = 30.0
# A server runs each model for a while before it serves, to measure it; a few runs find what fails in them.
_MEASURE_S = 0.02


def trial_load(name: str, folder: Path, repository: Path, state: Path | None = None) -> dict[str, object]:
    """Load one model through the server's own `Deployments` and close it again.

    It is run for a moment, as a server measures it before it serves; no engine is built.

    Args:
        name: of the model.
        folder: of the model.
        repository: that contains the folder.
        state: the state folder, where engines of read-only folders lie; None: there are none.

    Returns:
        `states`: version, state and reason as the server's index has them; `findings`: why a version is not served;
        `substitutes`: version and reason where the CPU serves though the configuration asks for a GPU.
    """
    registry, gpu_model_cache, loop = Registry(), GpuModelCache(), asyncio.new_event_loop()
    drains = VersionCloser(registry, gpu_model_cache.remove)
    loader = Loader(Mailbox(loop), histograms=False, gpu_model_cache=gpu_model_cache, profile_s=_MEASURE_S, state=state)
    # Never started, so that orders for engines only wait.
    builds = EngineBuilds(BUILDER, lambda _order, _failure: None)
    deployments = Deployments(loader, registry, drains, builds)
    findings: Sequence[Finding] = ()
    try:
        deployments.load(ModelSource(name, folder, repository))
    except ConfigError as error:
        findings = error.findings
    states = [[row["version"], row["state"], row["reason"]] for row in registry.index() if row["name"] == name]
    substitutes = [[version, reason] for model, version, reason in registry.substitutes() if model == name]
    deployments.unload_all()
    drains.wait(_CLOSE_TIMEOUT_S)
    loop.close()
    errors = [[f.path, f.line, f.message, f.cure, f.fatal] for f in findings]
    return {"states": states, "findings": errors, "substitutes": substitutes}


def load_in_this_process() -> int:
    """Load what standard input lists; exit status 0."""
    logging.disable()
    # Libraries print to standard output too; the results keep it to themselves.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        order = json.load(sys.stdin)
        state = Path(order["state_dir"]) if order["state_dir"] else None
        for name, folder, repository in order["models"]:
            results.write(json.dumps(trial_load(name, Path(folder), Path(repository), state)) + "\n")
            results.flush()
    return 0


if __name__ == "__main__":
    # Threads of a runtime that never end must not keep the process.
    _status = load_in_this_process()
    sys.stderr.flush()
    os._exit(_status)
