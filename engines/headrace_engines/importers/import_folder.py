"""The folder of an imported model: configuration, labels, model file and report, complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from headrace.config.files import sync
from headrace.config.model_folder import CONFIG_FILES, ModelFolder, read_model_folder
from headrace.config.onnx_model import OnnxSignature, TensorSignature, external_files, read_signature
from headrace.core.errors import ConfigError

from headrace_engines.errors import BuildError

VERSION = "1"
MODEL = "model.onnx"
REPORT = "import.json"
LABELS = "labels.txt"
CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """Content of a model's folder beside the ONNX file.

    Attributes:
        name: name of the model.
        max_batch_size: rows of a batch; 0 without a batch dimension.
        labels: names of classes; () without any.
        needs_labels: an output must match the labels; else labels without a match are left out.
        preprocess: section of the configuration; empty without one.
        remark: first comment line of the configuration.
    """

    name: str
    max_batch_size: int
    labels: tuple[str, ...]
    needs_labels: bool
    preprocess: Mapping[str, Any]
    remark: str


def write_folder(folder: Path, plan: FolderPlan) -> ModelFolder:
    """Write configuration and labels beside a model file, and read the folder as the server does.

    Args:
        folder: folder of the model, with the ONNX file in its version.
        plan: the content.

    Raises:
        BuildError: the server would refuse the model; has the reason.
    """
    try:
        signature = read_signature(folder / VERSION / MODEL, MODEL)
        document = _config(signature, plan)
        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
        (folder / CONFIG).write_text(f"# {plan.remark}\n{text}", encoding="utf-8")
        if any("label_filename" in output for output in document["output"]):
            (folder / LABELS).write_text("".join(f"{label}\n" for label in plan.labels), encoding="utf-8")
        return read_model_folder(folder, folder.parent)
    except ConfigError as error:
        raise BuildError(f"the server would refuse the imported model: {error}") from error


def _config(signature: OnnxSignature, plan: FolderPlan) -> dict[str, Any]:
    batched = plan.max_batch_size > 0
    document: dict[str, Any] = {
        "name": plan.name,
        "backend": "onnxruntime",
        "max_batch_size": plan.max_batch_size,
        "input": [_tensor(tensor, batched) for tensor in signature.required_inputs],
        "output": [_tensor(tensor, batched) for tensor in signature.outputs],
    }
    if plan.labels:
        position = next((i for i, o in enumerate(document["output"]) if o["dims"][-1:] == [len(plan.labels)]), None)
        if position is not None:
            document["output"][position]["label_filename"] = LABELS
        elif plan.needs_labels:
            there = ", ".join(f"{output['name']} {output['dims']}" for output in document["output"])
            raise BuildError(
                f"--labels has {len(plan.labels)} names, no output has as many classes ({there}): write one name for each class"
            )
    if plan.max_batch_size > 1:
        document["dynamic_batching"] = {}
    if plan.preprocess:
        document["preprocess"] = {"input": document["input"][0]["name"], **plan.preprocess}
    return document


def _tensor(tensor: TensorSignature, batched: bool) -> dict[str, Any]:
    if not tensor.data_type:
        raise BuildError(
            f"tensor {tensor.name} is {tensor.onnx_type}, which no request can carry: give the model tensors of numbers or text"
        )
    if tensor.shape is None:
        raise BuildError(f"tensor {tensor.name} has no known rank: write it with a fixed number of dimensions")
    dims = list(tensor.shape[1:] if batched else tensor.shape)
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": dims}


def check_batch(path: Path, cure: str) -> None:
    """Check that the first dimension of each input and output is free.

    Args:
        path: the ONNX file.
        cure: remedy if one is fixed.

    Raises:
        BuildError: it is fixed in the model.
    """
    signature = read_signature(path, MODEL)
    tensors = (*signature.required_inputs, *signature.outputs)
    fixed = [tensor for tensor in tensors if tensor.shape is not None and tensor.shape[:1] != (-1,)]
    if fixed:
        text = ", ".join(f"{tensor.name} {list(tensor.shape or ())}" for tensor in fixed)
        raise BuildError(f"the batch is fixed in the model ({text}), a dynamic one is the default: {cure}")


def write_report(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the report of an import beside the model file."""
    text = json.dumps(document, indent=2, allow_nan=False)
    (folder / VERSION / REPORT).write_text(text + "\n", encoding="utf-8")


def check_free(target: Path, replace: bool) -> None:
    """Check that a model may be written.

    Raises:
        BuildError: the model exists and is not to be replaced, or is no folder.
    """
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise BuildError(f"{target} is no folder: remove it, or write --name OTHER")
    if not replace:
        raise BuildError(f"{target} exists: write --name OTHER for another model, or --replace to replace this one")


def publish(staged: Path, target: Path, replace: bool) -> None:
    """Move a complete folder into the repository.

    A new model appears by one rename. An existing one is replaced file by file; other files and versions stay.

    Args:
        staged: the new folder, on the same file system.
        target: folder of the model in the repository.
        replace: replace an existing model.

    Raises:
        BuildError: the model exists, or the folder cannot be written.
    """
    check_free(target, replace)
    try:
        if not target.exists():
            staged.rename(target)
        else:
            _replace(staged, target)
        sync(target.parent)
    except OSError as error:
        raise BuildError(
            f"{target} cannot be written: {error.strerror}: check the permissions, or make room"
        ) from error


def _replace(staged: Path, target: Path) -> None:
    (target / VERSION).mkdir(exist_ok=True)
    data = external_files(staged / VERSION / MODEL, MODEL)
    files = [f"{VERSION}/{name}" for name in (*data, REPORT, MODEL)]
    labels = [LABELS] if (staged / LABELS).exists() else []
    for name in (*labels, *files, CONFIG):
        (staged / name).replace(target / name)
    for name in set(CONFIG_FILES) - {CONFIG}:
        (target / name).unlink(missing_ok=True)
    if f"{MODEL}.data" not in data:
        (target / VERSION / f"{MODEL}.data").unlink(missing_ok=True)


def read_label_names(path: Path) -> tuple[str, ...]:
    """Read names of classes, one a line.

    Raises:
        BuildError: the file cannot be read or is empty.
    """
    try:
        lines: Sequence[str] = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BuildError(f"--labels {path} cannot be read ({reason}): name a text file with one name a line") from error
    names = tuple(line.strip() for line in lines)
    while names and not names[-1]:
        names = names[:-1]
    if not names:
        raise BuildError(f"--labels {path} is empty: write one name a line")
    return names
