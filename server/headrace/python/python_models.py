"""Opens Python models: the load request for the process of each instance, and the interpreter that runs it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import headrace_model
from headrace_model import protocol

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.config.python_rules import reads_device_rows
from headrace.config.serving_plan import ServingPlan
from headrace.config.tensor_config import ModelInput, ModelOutput, row_bytes_of
from headrace.config.triton_json import to_triton_json
from headrace.core.response_stream import MAX_RESPONSE_BYTES, MAX_RESPONSES
from headrace.core.tensor import BY_CONFIG_NAME
from headrace.observability.custom_metrics import CustomMetrics
from headrace.python.backend import PythonBackend, PythonModel
from headrace.python.environments import Environments, Interpreter, own_interpreter
from headrace.python.model_calls import ModelCalls
from headrace.python.outputs import ModelTensors
from headrace.python.process import ProcessOptions
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.processes.child_process import Message

PROGRAM = Path(headrace_model.__file__).parent / "__main__.py"


@dataclass(frozen=True, slots=True)
class InstancePlace:
    """Name and device of an instance, as a model's code reads them.

    Attributes:
        name: name of the instance.
        kind: "CPU" or "GPU".
        device_id: number of the GPU; 0 on the CPU.
    """

    name: str
    kind: str
    device_id: int


def instance_places(config: ModelConfig, instances: int) -> list[InstancePlace]:
    """Return the instances of a configuration; those of a GPU that does not exist are on the CPU.

    Args:
        config: complete configuration.
        instances: number of instances.
    """
    places: list[InstancePlace] = []
    for group in config.instance_group:
        on_gpu = group.kind == "KIND_GPU" and gpus.is_visible()
        for index in range(group.count):
            name = f"{group.name}_{index}" if group.count > 1 else group.name
            device_id = group.gpus[index % len(group.gpus)] if on_gpu and group.gpus else 0
            places.append(InstancePlace(name, "GPU" if on_gpu else "CPU", device_id))
    places += [InstancePlace(f"{config.name}_{index}", "CPU", 0) for index in range(len(places), instances)]
    return places[:instances]


def load_order(folder: ModelFolder, version: int, file: Path, place: InstancePlace, action: str = "load") -> Message:
    """Return the request to a model's process.

    Args:
        folder: the model's folder.
        version: version number.
        file: the model's file.
        place: the instance.
        action: "load", or "describe" for the configuration that the model's code completes.
    """
    config = folder.config
    document = to_triton_json(config)
    return {
        "do": action,
        "protocol": protocol.VERSION,
        "model": config.name,
        "version": str(version),
        "file": str(file.absolute()),
        "form": config.backend,
        "config": document,
        "memory_bytes": config.isolation_memory_limit or 0,
        "responses": {"decoupled": config.is_decoupled, "count": MAX_RESPONSES, "bytes": MAX_RESPONSE_BYTES},
        "iterative": config.is_iterative,
        "inputs": _tensors(config.model_input),
        "outputs": _tensors(config.output),
        "args": {
            "model_config": json.dumps(document),
            "model_instance_kind": place.kind,
            "model_instance_device_id": str(place.device_id),
            "model_instance_name": place.name,
            "model_repository": str(folder.path.absolute()),
            "model_version": str(version),
            "model_name": config.name,
            "model_file": str(file.absolute()),
        },
    }


def program_command(interpreter: Interpreter) -> tuple[str, ...]:
    """Return the command that starts the program of a model's process.

    The user's site folder is never on the path (-s). Variables such as PYTHONPATH are for the server's interpreter only (-E).
    """
    options = ("-s",) if interpreter.is_own else ("-s", "-E")
    return (*interpreter.command, *options, str(PROGRAM))


def open_python_model(
    folder: ModelFolder,
    version: int,
    plan: ServingPlan,
    instances: int,
    interpreters: Environments | None,
    calls: ModelCalls | None = None,
    metrics: CustomMetrics | None = None,
) -> PythonModel:
    """Start the processes of a Python model, and wait until all have loaded it.

    Args:
        folder: the model's folder.
        version: version number.
        plan: the serving plan, with the model's file.
        instances: number of instances.
        interpreters: chooses the interpreter; None for the server's.
        calls: receives calls to other models; None if there are none.
        metrics: receives the custom metrics of the model; None drops them.

    Raises:
        ConfigError: a process could not load the model.
    """
    config = folder.config
    interpreter = own_interpreter() if interpreters is None else interpreters.python_for(folder, version)
    command = program_command(interpreter)
    orders = [load_order(folder, version, plan.file, place) for place in instance_places(config, instances)]
    tensors = _model_tensors(config)

    def on_message(message: Message) -> None:
        report = message.get("metric")
        if metrics is not None and isinstance(report, dict):
            metrics.report(config.name, report)

    def options(index: int) -> ProcessOptions:
        return ProcessOptions(
            command=command,
            order=orders[index],
            limit_s=config.execution_timeout_s or config.isolation_timeout_s,
            slot_bytes=_batch_bytes(config),
            memory_bytes=config.isolation_memory_limit or 0,
            on_message=on_message,
            open_calls=None
            if calls is None
            else lambda end, running: calls.open(end, config.name, str(version), running),
        )

    backend = PythonBackend(tensors, options, reads_device_rows(config))
    return backend.load(plan.file, instances, dict(config.parameters))


def folder_digest(folder: ModelFolder, version: int) -> str:
    """Return the SHA-256 of a version's files, to find out whether a model has changed.

    Args:
        folder: the model's folder; its `requirements.txt` counts as well.
        version: version number.
    """
    files = sorted(path for path in (folder.path / str(version)).rglob("*") if "__pycache__" not in path.parts)
    return files_digest(folder.path, [*files, folder.path / "requirements.txt"])


def files_digest(folder: Path, paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the files of a folder among `paths`: of their names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder)} {content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _model_tensors(config: ModelConfig) -> ModelTensors:
    inputs, outputs, is_batched = _codes(config.model_input), _codes(config.output), config.max_batch_size > 0
    return ModelTensors(
        config.name, inputs, outputs, is_batched, config.is_decoupled, config.max_open_requests, config.is_iterative
    )


def _codes(tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((tensor.name, protocol.CODES[BY_CONFIG_NAME[tensor.data_type].name]) for tensor in tensors)


def _tensors(tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> list[list[object]]:
    return [[name, code] for name, code in _codes(tensors)]


def _batch_bytes(config: ModelConfig) -> int:
    """Return the bytes of inputs and outputs of the largest batch, with a page for the slot's head; the slot grows if it must."""
    tensors: list[ModelInput | ModelOutput] = [*config.model_input, *config.output]
    return 4096 + (row_bytes_of(tensors) + 64 * len(tensors)) * max(config.max_batch_size, 1)
