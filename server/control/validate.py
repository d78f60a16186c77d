"""`headrace validate`: reads every model of a repository as the server would, and tells all that is wrong, without serving."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from server.config.config_reader import CONFIG_FILES, ModelFolder, read_model_folder, served_versions
from server.core.errors import ConfigError, Finding
from server.core.model_config import ModelConfig, ModelInput, ModelOutput


@dataclass(frozen=True, slots=True)
class Inspection:
    """What reading one model's folder gave.

    Attributes:
        model: the model, None if it cannot be served.
        findings: errors and warnings, in the order of file and line.
    """

    model: ModelFolder | None
    findings: tuple[Finding, ...]


def validate_repository(path: Path) -> list[Finding]:
    """Every finding of a repository, or of the one model whose folder `path` is.

    Args:
        path: a repository, or one model's folder; findings name files relative to it (to the folder around a model).
    """
    return [finding for inspection in inspect(path) for finding in inspection.findings]


def inspect(path: Path) -> list[Inspection]:
    """Reads the models in `path`, or the one model whose folder it is; never raises for what it finds."""
    # "." and ".." have no name that a model could have; links stay as they are, for the reader to judge.
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        return [_only(Finding(path.name, None, state, "name a model repository, or one model's folder"))]
    if is_model_folder(path):
        return [_inspect_model(path, path.parent)]
    try:
        folders = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        return [_only(Finding(path.name, None, f"cannot be read: {error.strerror}", "check the folder's permissions"))]
    if not folders:
        cure = "put each model in a folder of its own: <model>/1/model.onnx"
        return [_only(Finding(path.name, None, "holds no models", cure, fatal=False))]
    return [_inspect_model(folder, path) for folder in folders]


def is_model_folder(path: Path) -> bool:
    """True for a folder with a configuration or with folders named by numbers."""
    if any((path / name).exists() for name in CONFIG_FILES):
        return True
    try:
        return any(entry.name.isdecimal() and entry.is_dir() for entry in path.iterdir())
    except OSError:
        return False


def _only(finding: Finding) -> Inspection:
    return Inspection(None, (finding,))


def _inspect_model(folder: Path, repository: Path) -> Inspection:
    try:
        model = read_model_folder(folder, repository)
    except ConfigError as error:
        return Inspection(None, tuple(error.findings))
    return Inspection(model, model.findings)


def main(paths: Sequence[Path], console: Console) -> int:
    """Prints what is wrong in `paths`, a line for each good model, and a summary.

    Args:
        paths: repositories, or folders of single models.
        console: where to print.

    Returns:
        The exit status: 1 if some model cannot be served, else 0.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        single = path.is_dir() and is_model_folder(path)
        for inspection in inspect(path):
            for finding in inspection.findings:
                counts["error" if finding.fatal else "warning"] += 1
                _print_finding(_from_here(finding, path, single), console)
            counts["model"] += inspection.model is not None
            if inspection.model is not None:
                _print_model(inspection.model, console)
    told = [
        _counted(counts["model"], "good model"),
        _counted(counts["error"], "error"),
        _counted(counts["warning"], "warning"),
    ]
    console.print(Text(", ".join(told), style="bold red" if counts["error"] else "bold green"))
    return 1 if counts["error"] else 0


def _from_here(finding: Finding, path: Path, single: bool) -> Finding:
    """The finding with its file as it can be opened from where the command was typed."""
    if finding.path == os.path.basename(os.path.abspath(path)):
        return replace(finding, path=str(path))
    if single:
        return replace(finding, path=str(path / Path(*Path(finding.path).parts[1:])))
    return replace(finding, path=str(path / finding.path))


def _print_finding(finding: Finding, console: Console) -> None:
    text = Text(str(finding))
    text.stylize("red" if finding.fatal else "yellow", len(finding.path))
    console.print(text, soft_wrap=True)


def _print_model(model: ModelFolder, console: Console) -> None:
    served = ", ".join(map(str, served_versions(model.config, model.versions)))
    console.print(
        Text.assemble(("OK ", "green"), (model.name, "bold"), f" {served}: {signature_line(model.config)}"),
        soft_wrap=True,
    )


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
