"""`headrace validate`: loads every model of a repository as the server does and reports every problem, without serving.

Run as `python -m headrace.server.commands.validate`, this module is the child process that loads the models.
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

from headrace_reports.command_line import did_you_mean, plural
from rich.console import Console
from rich.text import Text

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder, read_model_folder, served_versions
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, Finding
from headrace.models.accounted_model import cpu_batch_size
from headrace.models.batch_proofs import BatchProofs, StoredDifference
from headrace.models.builds import BUILDER, EngineBuilds
from headrace.models.deployment import Deployments, ModelSource
from headrace.models.folders import (
    RepositoryModel,
    SkippedFolder,
    folder_names,
    folders,
    is_model_folder,
    open_paths,
)
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.integrity.verified_copy import ModelVerifier, open_verifier
from headrace.models.loader import Loader
from headrace.models.pipelines import in_load_order
from headrace.models.registry import Registry
from headrace.models.trials import OwnTrials
from headrace.models.version_closer import VersionCloser
from headrace.python.environments import Environments, environments_root

TRIAL_LOAD: tuple[str, ...] = (sys.executable, "-P", "-m", "headrace.server.commands.validate")
_READY, _LOADING = "READY", "LOADING"


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Result for one model folder.

    Attributes:
        model: the model, None if its folder cannot be read as one.
        findings: errors and warnings; those of the files by file and line, then those of loading.
        states: (version, state, reason) as in a server's repository index; empty if nothing was loaded.
        substitutes: (version, reason) for each version that runs on the CPU although the configuration requests a GPU.
        skipped: set if the folder is not a model's, with the reason.
    """

    model: ModelFolder | None
    findings: tuple[Finding, ...]
    states: tuple[tuple[str, str, str], ...] = ()
    substitutes: tuple[tuple[str, str], ...] = ()
    skipped: SkippedFolder | None = None

    @property
    def ready(self) -> tuple[str, ...]:
        """Versions that a server would serve."""
        return tuple(version for version, state, _ in self.states if state == _READY)


def inspect(
    path: Path, load: bool = True, state_dir: str = "", environments_dir: str = "", model_keys_file: str = ""
) -> list[ModelCheck]:
    """Read and load the models in `path`, or the one model whose folder it is. Problems become findings, not exceptions.

    Args:
        path: a repository, one model's folder, or an ONNX file; findings name files relative to it (for a model or
            file: to the folder around it).
        load: also load the models, in a child process; False only reads their files.
        state_dir: state folder of the server, with engines of read-only folders; "" for none.
        environments_dir: folder of Python environments; "" for that in the state folder.
        model_keys_file: public keys of signed models; "" accepts others too.

    Raises:
        ConfigError: the public keys cannot be read.
    """
    verifier = open_verifier(model_keys_file, None)
    # "." and ".." are not names of models, so the path is made absolute. Links stay: the reader checks them.
    path = Path(os.path.abspath(path))
    if path.is_file() and path.suffix == ".onnx":
        with open_paths([path]) as named:
            return inspect(named.repositories[0], load, state_dir, environments_dir, model_keys_file)
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        suggestion = did_you_mean(path.name, folder_names(path.parent))
        cure = " ".join(filter(None, (suggestion, "name a model repository, or one model's folder")))
        return [_unreadable(Finding(path.name, None, state, cure))]
    folders_used = {
        "state_dir": os.path.expanduser(state_dir),
        "environments_dir": environments_dir,
        "model_keys_file": model_keys_file,
    }
    if is_model_folder(path):
        inspections = [_read_folder(path, path.parent, verifier)]
        return _with_load_outcomes(inspections, path.parent, folders_used) if load else inspections
    try:
        models, skipped = folders(path)
    except ConfigError as error:
        return [_unreadable(replace(error.findings[0], path=path.name))]
    if not models:
        cure = "put each model in a folder of its own: <model>/1/model.onnx"
        empty = _unreadable(Finding(path.name, None, "holds no models", cure, fatal=False))
        return [*(ModelCheck(None, (), skipped=folder) for folder in skipped), empty]
    inspections = [_read_folder(folder, path, verifier) for folder in models]
    notes = [ModelCheck(None, (), skipped=folder) for folder in skipped]
    return [*notes, *(_with_load_outcomes(inspections, path, folders_used) if load else inspections)]


def _unreadable(finding: Finding) -> ModelCheck:
    return ModelCheck(None, (finding,))


def _read_folder(folder: Path, repository: Path, verifier: ModelVerifier) -> ModelCheck:
    try:
        verifier.check(folder, repository)
        model = read_model_folder(folder, repository)
    except ConfigError as error:
        return ModelCheck(None, tuple(error.findings))
    return ModelCheck(model, model.findings)


def _with_load_outcomes(
    inspections: Sequence[ModelCheck], repository: Path, folders_used: Mapping[str, str]
) -> list[ModelCheck]:
    """Add the outcome of loading to the inspections of models that could be read."""
    models = [inspection.model for inspection in inspections if inspection.model is not None]
    outcomes = load_in_child(models, repository, folders_used)
    return [
        inspection if inspection.model is None else _with_outcome(inspection, inspection.model, outcomes)
        for inspection in inspections
    ]


def _with_outcome(inspection: ModelCheck, model: ModelFolder, outcomes: Mapping[str, Any]) -> ModelCheck:
    outcome = outcomes[model.name]
    findings = [_below_model(Finding(*finding), model) for finding in outcome["findings"]]
    states = tuple((version, state, reason) for version, state, reason in outcome["states"])
    substitutes = tuple((version, reason) for version, reason in outcome["substitutes"])
    if model.missing and outcome["tensors"]:  # completed by the model's code
        model = replace(model, config=model.config.model_copy(update=_completed(outcome["tensors"])))
    findings = [*inspection.findings, *findings]
    return replace(inspection, model=model, findings=tuple(findings), states=states, substitutes=substitutes)


def _completed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input": tuple(ModelInput.model_validate(tensor) for tensor in tensors["input"]),
        "output": tuple(ModelOutput.model_validate(tensor) for tensor in tensors["output"]),
        "max_batch_size": tensors["max_batch_size"],
    }


def _below_model(finding: Finding, model: ModelFolder) -> Finding:
    """Prefix a finding of loading, which may name a version's file without its folder, with the model's name."""
    if finding.path == model.name or finding.path.startswith(f"{model.name}/"):
        return finding
    if finding.path.startswith(f"{model.name} "):
        return replace(finding, path=model.name)
    return replace(finding, path=model.name, message=f"{finding.path} {finding.message}")


def load_in_child(
    models: Sequence[ModelFolder], repository: Path, folders_used: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Load models as the server does, in a child process: a crash of a runtime ends only that process.

    Args:
        models: to load, one after the other.
        repository: folder that contains the models.
        folders_used: `state_dir`, `environments_dir` and `model_keys_file`, as for `inspect`.

    Returns:
        For each model name the result of `trial_load`.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    waiting = list(models)
    while waiting:
        listed = [(model.name, str(model.path), str(repository)) for model in waiting]
        order = json.dumps({**folders_used, "models": listed})
        with tempfile.TemporaryFile() as errors:
            child = subprocess.run(TRIAL_LOAD, input=order.encode(), stdout=subprocess.PIPE, stderr=errors, check=False)
            lines = child.stdout.splitlines()
            for model, line in zip(waiting, lines, strict=False):
                outcomes[model.name] = json.loads(line)
            waiting = waiting[len(lines) :]
            if waiting:
                # The first model without a line crashed the process; the others are loaded in a new one.
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
    return {"states": [], "findings": [[name, None, message, cure, True]], "substitutes": [], "tensors": {}}


def main(
    paths: Sequence[Path],
    console: Console,
    load: bool = True,
    strict: bool = False,
    state_dir: str = "",
    environments_dir: str = "",
    model_keys_file: str = "",
) -> int:
    """Print the findings of `paths`, a line for each good model, and a summary.

    Args:
        paths: repositories, or folders of single models.
        console: output.
        load: as for `inspect`.
        strict: count a model that runs on the CPU instead of a GPU as an error, like `headrace serve --strict`.
        state_dir, environments_dir, model_keys_file: as for `inspect`.

    Returns:
        The exit status: 1 if a model would not be served (with `strict` also if `headrace serve --strict` would not
            start), else 0.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        single = path.is_dir() and is_model_folder(path)
        for inspection in inspect(path, load, state_dir, environments_dir, model_keys_file):
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
    nouns = {"model": "good model", "error": "error", "warning": "warning"}
    summary = ", ".join(plural(counts[kind], noun) for kind, noun in nouns.items())
    console.print(Text(summary, style="bold red" if counts["error"] else "bold green"))
    return 1 if counts["error"] else 0


def _from_here(finding: Finding, path: Path, single: bool) -> Finding:
    """Rewrite a finding's path so that it can be opened from the current folder."""
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
    path_text = path / skipped.path.name
    console.print(Text(f"{path_text}: note: skipped: {skipped.reason}", style="dim"), soft_wrap=True)


def _print_model(model: ModelFolder, inspection: ModelCheck, console: Console) -> None:
    served = inspection.ready or tuple(map(str, served_versions(model.config, model.versions)))
    line = f" {', '.join(served)}: {signature_line(model.config)}"
    console.print(Text.assemble(("OK ", "green"), (model.name, "bold"), line), soft_wrap=True)


def _print_states(model: ModelFolder, inspection: ModelCheck, console: Console) -> None:
    """Print the index's reason for a version that serves, or that is still loading because its engine is built first."""
    for version, state, reason in inspection.states:
        if version and reason and state in (_READY, _LOADING):
            word = "" if state == _READY else f"{state}: "
            console.print(Text(f"   {model.name} {version}: note: {word}{reason}", style="dim"), soft_wrap=True)


def _strict(inspection: ModelCheck) -> ModelCheck:
    """Add an error for each version that runs on the CPU instead of a GPU."""
    if inspection.model is None:
        return inspection
    cure = "write fallback: onnxruntime, or remove KIND_GPU and backend: tensorrt"
    errors = [
        Finding(f"{inspection.model.name}/{version}", None, f"requests a GPU: {reason}", cure)
        for version, reason in inspection.substitutes
    ]
    return replace(inspection, findings=(*inspection.findings, *errors))


def signature_line(config: ModelConfig) -> str:
    """One line with a model's inputs, outputs and batching, e.g. `x FP32[-1,16] -> y FP32[-1,16], batches of up to 4`."""
    batched = config.max_batch_size > 0
    inputs = ", ".join(_tensor(tensor, batched) for tensor in config.served_input)
    outputs = ", ".join(_tensor(tensor, batched) for tensor in config.served_output)
    if not inputs and not outputs:
        return "inputs and outputs come from its code or its steps"
    if not inputs or not outputs:
        unknown = "outputs" if inputs else "inputs"
        return f"{inputs or '...'} -> {outputs or '...'} ({unknown} come from its code or its steps)"
    batching = f", batches of up to {config.max_batch_size}" if batched else ", no batching"
    if batched and cpu_batch_size(config) < config.max_batch_size:
        batching += f", on the CPU {cpu_batch_size(config)}"
    return f"{inputs} -> {outputs}{batching}"


def _tensor(tensor: ModelInput | ModelOutput, batched: bool) -> str:
    shape = ",".join(map(str, (-1, *tensor.dims) if batched else tensor.dims))
    return f"{tensor.name} {tensor.data_type.removeprefix('TYPE_')}[{shape}]"


_CLOSE_TIMEOUT_S = 30.0
# A server measures each model for longer before it serves it; a few runs show whether it fails.
_MEASURE_S = 0.02
# A server proves fewer batch sizes at its first load, and the others while it is idle.
_PROOF_S = 600.0


def trial_load(
    name: str,
    folder: Path,
    repository: Path,
    state: Path | None = None,
    environments_dir: str = "",
    model_keys_file: str = "",
    proofs: BatchProofs | None = None,
) -> dict[str, object]:
    """Load one model with the server's own `Deployments`, measure it briefly, and close it again; no engine is built.

    Args:
        name: of the model.
        folder: of the model.
        repository: folder that contains it.
        state: state folder with engines of read-only folders; None for none.
        environments_dir: folder of Python environments; "" for that in the state folder.
        model_keys_file: public keys of signed models; "" accepts others too.
        proofs: tests the batch sizes; None tests all of them.

    Returns:
        `states`: version, state and reason as in the server's index; `findings`: why a version is not served;
        `substitutes`: version and reason for each version that runs on the CPU although the configuration requests a
        GPU; `tensors`: inputs, outputs and batch size of a model that serves; `batches`: what is proven, by version.
    """
    registry, gpu_model_cache, loop = Registry(), GpuModelCache(), asyncio.new_event_loop()
    drains, trials = VersionCloser(registry, gpu_model_cache.remove), None if state is None else OwnTrials(state)
    environments = Environments(environments_root(environments_dir, state))
    loader = Loader(
        Mailbox(loop),
        histograms=False,
        gpu_model_cache=gpu_model_cache,
        profile_s=_MEASURE_S,
        state=state,
        interpreters=environments,
        verifier=open_verifier(model_keys_file, state),
        trials=trials,
        proofs=proofs or BatchProofs(state, _PROOF_S, _PROOF_S),
    )
    # Its builds are never started: build requests stay queued, so no engine is built.
    deployments = Deployments(loader, registry, drains, EngineBuilds(BUILDER, lambda _order, _failure: None))
    # A pipeline needs the models that it calls.
    others = {path.name: RepositoryModel(path.name, path, repository) for path in folders(repository)[0]}
    models = in_load_order([RepositoryModel(name, folder, repository)], others)
    errors = {model.name: _load_errors(deployments, model) for model in models}[name]
    states = [[row["version"], row["state"], row["reason"]] for row in registry.index() if row["name"] == name]
    substitutes = [[version, reason] for model, version, reason in registry.substitutes() if model == name]
    batches = {number: handle.batch_verdict.report() for model, number, handle in registry.sources() if model == name}
    findings = _as_lists((*errors, *_unproven(name, batches)))
    is_ready = any(state == _READY for _, state, _ in states)
    tensors = _tensors(registry, name) if is_ready else {}
    if is_ready and trials is not None:
        trials.record()
    deployments.unload_all()
    drains.wait(_CLOSE_TIMEOUT_S)
    environments.close()
    loop.close()
    return {"states": states, "findings": findings, "substitutes": substitutes, "tensors": tensors, "batches": batches}


def _as_lists(findings: Sequence[Finding]) -> list[list[object]]:
    return [[f.path, f.line, f.message, f.cure, f.fatal] for f in findings]


def repeat_difference(path: Path, state_dir: str, console: Console) -> int:
    """Repeat the difference that a server has stored for a model, and print the result (`headrace proof`).

    Args:
        path: folder of the model.
        state_dir: state folder of the server.
        console: output.

    Returns:
        0 if a row of the batch has the outputs of the row alone, 1 if they differ again, 2 if nothing could be repeated.
    """
    path, state = Path(os.path.abspath(path)), Path(state_dir).expanduser()
    repeats = StoredDifference(state, path.name)
    if repeats.sample is None:
        text = f"no difference of model '{path.name}' is stored in {state}: name the server's folder with --state-dir"
        console.print(Text(text), soft_wrap=True)
        return 2
    loaded = trial_load(path.name, path, path.parent, state, proofs=repeats)
    for text, _ in repeats.results:
        console.print(Text(text), soft_wrap=True)
    if not repeats.results:
        console.print(Text(f"model '{path.name}' cannot be loaded: {loaded['states']}"), soft_wrap=True)
        return 2
    return int(any(differs for _, differs in repeats.results))


def _unproven(name: str, batches: Mapping[str, Mapping[str, object]]) -> list[Finding]:
    """Return a warning for each version whose batches are not proven."""
    cure = "see docs/proof.md"
    return [
        Finding(f"{name}/{version}", None, f"batches are not proven ({state}): {report['reason']}", cure, fatal=False)
        for version, report in batches.items()
        if (state := report["state"]) not in ("proven", "untested")
    ]


def _load_errors(deployments: Deployments, model: RepositoryModel) -> Sequence[Finding]:
    try:
        deployments.load(ModelSource(model.name, model.path, model.repository))
    except ConfigError as error:
        return error.findings
    return ()


def _tensors(registry: Registry, name: str) -> dict[str, object]:
    config: Mapping[str, Any] = registry.config(name, "")
    tensors = {
        field: [{key: tensor[key] for key in ("name", "data_type", "dims")} for tensor in config[field]]
        for field in ("input", "output")
    }
    return {**tensors, "max_batch_size": config["max_batch_size"]}


def load_in_this_process() -> int:
    """Load the models listed on standard input, print one JSON line for each; return exit status 0."""
    logging.disable()
    # Libraries print to standard output too: results get a copy of it, and everything else goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        order = json.load(sys.stdin)
        state = Path(order["state_dir"]) if order["state_dir"] else None
        folders_used = (state, order["environments_dir"], order["model_keys_file"])
        for name, folder, repository in order["models"]:
            results.write(json.dumps(trial_load(name, Path(folder), Path(repository), *folders_used)))
            results.write("\n")
            results.flush()
    return 0


if __name__ == "__main__":
    # A runtime's threads may never end; they must not keep the process alive.
    _status = load_in_this_process()
    sys.stderr.flush()
    os._exit(_status)
