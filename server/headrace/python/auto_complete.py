"""Completes the configuration of a Python model by its code, in a process of its own.

The code of `auto_complete_config`, or annotations of Headrace's own form, set what the file leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.config.auto_complete import complete_instances
from headrace.config.documents import refuse
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder, read_model_folder, served_versions
from headrace.config.python_rules import check_client_config, complete_from_code
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.config.triton_json import to_triton_json
from headrace.core.errors import ConfigError
from headrace.python.environments import Environments, own_interpreter
from headrace.python.process import InstanceProcess, ProcessOptions
from headrace.python.python_models import (
    instance_places,
    load_order,
    program_command,
)
from headrace.runtimes.processes.child_process import Message

_TRITON_METHOD = b"auto_complete_config"
_TRITON_CLASS = b"TritonPythonModel"
_MAX_CODE_BYTES = 16 << 20


def check_client_source(folder: ModelFolder, is_upload: bool) -> None:
    """Check a folder whose files or configuration come from a client.

    Args:
        folder: the folder, read with the client's configuration.
        is_upload: the client sends the files too.

    Raises:
        ConfigError: it would run code of the client.
    """
    if folder.config.kind != "python":
        return
    own = None
    if not is_upload:
        try:
            own = read_model_folder(folder.path, folder.path.parent).config
        except ConfigError:
            own = None
    check_client_config(folder.name, folder.config, own)


def complete_python(folder: ModelFolder, interpreters: Environments | None) -> ModelFolder:
    """Return the folder of a Python model with its configuration completed by its code; any other folder as it is.

    Starts a process for the newest served version if the file leaves something to its code.

    Args:
        folder: the model's folder.
        interpreters: chooses the interpreter; None for the server's.

    Raises:
        ConfigError: the code fails, contradicts the file, or leaves inputs or outputs unknown.
    """
    if folder.config.kind != "python":
        return folder
    version = served_versions(folder.config, folder.versions)[-1]
    if not folder.missing and not _completes(folder, version):
        return folder
    document = _describe(folder, version, interpreters)
    path = f"{folder.name}/{version}/{folder.config.default_model_filename}"
    config = complete_instances(complete_from_code(folder.config, document, path))
    return replace(folder, config=config, missing=())


def _completes(folder: ModelFolder, version: int) -> bool:
    """True if the code of a version may complete a configuration that has inputs and outputs."""
    with folder.model_file(version).open("rb") as stream:
        code = stream.read(_MAX_CODE_BYTES)
    if _TRITON_CLASS in code:
        return _TRITON_METHOD in code
    return folder.config.backend == "python" and "max_batch_size" not in folder.config.model_fields_set


def _describe(folder: ModelFolder, version: int, interpreters: Environments | None) -> Mapping[str, Any]:
    """Return the configuration that the code of a version completes, in Triton's JSON form."""
    interpreter = own_interpreter() if interpreters is None else interpreters.python_for(folder, version)
    (place,) = instance_places(folder.config, 1)
    order: Message = load_order(folder, version, folder.model_file(version), place, "describe")
    order["config"] = _written(folder.config)
    options = ProcessOptions(
        command=program_command(interpreter),
        order=order,
        limit_s=0.0,
        slot_bytes=0,
        memory_bytes=folder.config.isolation_memory_limit or 0,
    )
    process = InstanceProcess(f"{folder.name} (configuration)", folder.name, options)
    document = process.describe().get("described")
    if not isinstance(document, dict):
        raise refuse(folder.name, None, "the process that completes its configuration gave no answer", "see the log")
    return document


def _written(config: ModelConfig) -> dict[str, object]:
    """Return the configuration in Triton's JSON form, without what the file does not set."""
    document = to_triton_json(config)
    for field in ("input", "output"):
        tensors: tuple[ModelInput | ModelOutput, ...] = getattr(config, field)
        document[field] = [_plain_tensor(tensor) for tensor in tensors]
    if "max_batch_size" not in config.model_fields_set:
        del document["max_batch_size"]
    return document


def _plain_tensor(tensor: ModelInput | ModelOutput) -> dict[str, object]:
    """Return the fields of a tensor that the file sets."""
    fields = tensor.model_dump(mode="json", exclude_none=True, include={"name", "data_type", "dims", "optional"})
    return {name: value for name, value in fields.items() if name in tensor.model_fields_set}
