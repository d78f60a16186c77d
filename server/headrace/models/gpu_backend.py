"""Configures the backends of GPUs: the machine, GPUs of the instances, tensor checks, and pipeline steps that run on the GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from headrace.config.auto_complete import instances_on_each_gpu
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.config.model_config import ModelConfig
from headrace.config.optimization_config import cuda_accelerator
from headrace.config.ragged_rules import is_ragged, joined_inputs, joined_outputs
from headrace.config.serving_plan import CUDA_RUNTIME
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.core.errors import ConfigError, Finding
from headrace.core.tensor import BY_CONFIG_NAME
from headrace.inference.pipelines.execution import Steps
from headrace.models.sequence_policy import sequence_policy, state_tensors
from headrace.runtimes.base import LoadedModel
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.driver import lost_gpus
from headrace.runtimes.cuda.kernels.launching import ClassStage, PictureStage
from headrace.runtimes.tensorrt.backend import GPUS, HOST_CODE, JOINED, MAX_BATCH_SIZE, TensorRtModel
from headrace.runtimes.tensorrt.plan import PlanTensor, installed
from headrace.runtimes.tensorrt.states import PlanStates

logger = logging.getLogger("headrace.tensorrt")


def tensorrt_machine() -> Machine:
    """This machine's first GPU as TensorRT sees it.

    Raises:
        Unsupported: there is no GPU or no TensorRT.
    """
    version, gpu = installed()
    return Machine("tensorrt", version, gpu.name, gpu.capability, gpu.driver)


def cuda_machine() -> Machine:
    """This machine's first GPU as ONNX Runtime's CUDA provider sees it.

    Raises:
        Unsupported: there is no GPU.
    """
    gpu = gpus.describe()
    return Machine(CUDA_RUNTIME, onnxruntime_machine().version, gpu.name, gpu.capability, gpu.driver)


def memory_bytes(device: int) -> int:
    """Total memory of a GPU in bytes.

    Raises:
        Unsupported: there is no GPU of this number.
    """
    return gpus.describe(device).memory_bytes


def devices_of(config: ModelConfig) -> list[int]:
    """Return the GPU number of each instance: `count` instances on each GPU of a group, on all GPUs if it names none.

    KIND_CPU groups beside others apply only on machines without a GPU. GPUs that have failed are left out.

    Raises:
        ConfigError: all GPUs of the configuration have failed.
    """
    devices: list[int] = []
    for group in config.instance_group:
        if group.kind == "KIND_CPU":
            continue
        count = instances_on_each_gpu(config) if group.is_default else group.count
        for device in group.gpus or range(gpus.count()):
            devices += [device] * count
    lost, devices = lost_gpus(), devices or [0]
    if lost.issuperset(devices):
        gpus_lost = ", ".join(f"GPU {device}" for device in sorted(set(devices)))
        cure = "restart the server, or name another GPU in instance_group"
        raise ConfigError([Finding(config.name, None, f"{gpus_lost} has failed in this server", cure)])
    return [device for device in devices if device not in lost]


def without_gpu(config: ModelConfig, gpu: int) -> ModelConfig | None:
    """Return the configuration with its instances on all GPUs but one; None if it has none on others."""
    others = tuple(dict.fromkeys(device for device in devices_of(config) if device != gpu))
    groups = [
        group.model_copy(
            update={"gpus": others, "count": instances_on_each_gpu(config) if group.is_default else group.count}
        )
        for group in config.instance_group
        if group.kind != "KIND_CPU"
    ]
    return config.model_copy(update={"instance_group": tuple(groups)}) if gpu >= 0 and groups and others else None


def backend_parameters(config: ModelConfig, devices: Sequence[int], *, host_code: bool = False) -> dict[str, str]:
    """Return the configuration's parameters with those that the backend needs: largest batch and GPU numbers.

    A ragged batch has no dimension of rows in the model: its inputs have shapes of their own.

    Args:
        config: complete configuration.
        devices: GPU number of each instance.
        host_code: the stamp says that the engine is version compatible. A parameter of the configuration cannot set it.
    """
    added = {MAX_BATCH_SIZE: str(config.max_batch_size), GPUS: ",".join(map(str, devices))}
    added[HOST_CODE] = "1" if host_code else "0"
    if is_ragged(config):
        added |= {MAX_BATCH_SIZE: "0", JOINED: "1"}
    accelerator = cuda_accelerator(config.optimization)
    return {**({} if accelerator is None else accelerator.parameters), **config.parameters, **added}


def check_tensors(model: LoadedModel, config: ModelConfig, file: str) -> None:
    """Compare the tensors of a TensorRT plan with the configuration.

    Raises:
        ConfigError: tensors are missing or have another type or shape; lists all of them.
    """
    findings: list[Finding] = []
    inputs, outputs, batched = config.model_input, config.model_output, config.max_batch_size > 0
    if is_ragged(config):
        inputs, outputs, batched = joined_inputs(config), joined_outputs(config), False
    for side, declared, tensors in (("input", inputs, model.inputs), ("output", outputs, model.outputs)):
        remaining = {tensor.name: tensor for tensor in tensors}
        for tensor in declared:
            mismatch = _mismatch(tensor, remaining.pop(tensor.name, None), batched)
            if mismatch:
                cure = f"the plan's {side}s: {_describe(tensors)}"
                findings.append(Finding(file, None, f"{side} '{tensor.name}' {mismatch}", cure))
        if side == "input":
            findings += [
                Finding(file, None, f"input '{name}' is not in the configuration", "add it") for name in remaining
            ]
    if findings:
        raise ConfigError(findings)


def keep_states(model: TensorRtModel, config: ModelConfig, folder: Path) -> None:
    """Keep the states of sequences on the GPU, if they have constant shapes.

    Raises:
        ConfigError: the file of an initial state cannot be read.
    """
    rules = sequence_policy(config, max(config.max_batch_size, 1))
    if rules is None or not rules.states:
        return
    states = PlanStates(state_tensors(config, folder), rules.slots, rules.is_direct)
    reason = model.attach_states(states)
    if reason:
        logger.info("model %s: the states of its sequences are in host memory: %s", config.name, reason)


def join_steps(model: TensorRtModel, config: ModelConfig, steps: Steps) -> Steps:
    """Move preprocessing and ranking onto the GPU where it can run them.

    Returns:
        The steps that remain on the CPU.
    """
    pixels, ranks = steps.pixels, _class_stage(steps, config)
    prepares = None if pixels is None else PictureStage(pixels.name, pixels.recipe, pixels.dtype)
    stages = [stage for stage in (prepares, ranks) if stage is not None]
    if not stages:
        return steps
    reason = model.attach_stages(stages)
    if reason:
        logger.warning("model %s: the CPU prepares its pictures and ranks its classes: %s", config.name, reason)
        return steps
    return steps.on_gpu(prepares is not None, ranks is not None)


def _class_stage(steps: Steps, config: ModelConfig) -> ClassStage | None:
    if steps.ranking is None:
        return None
    name, options = steps.ranking.output, steps.ranking.postprocess
    output = next(tensor for tensor in config.output if tensor.name == name)
    row = output.dims[-1:] if output.reshape is None else output.reshape.shape
    if not row or min(row) < 1 or (output.reshape is not None and not config.max_batch_size):
        return None  # the number of classes, or where a row ends, is known at run time only
    return ClassStage(
        tensor=name,
        dtype=BY_CONFIG_NAME[output.data_type].dtype,
        row=row,
        classes=math.prod(row),
        softmax=options.softmax or not options.top_k,
        top_k=options.top_k,
        scores=options.scores,
        numbers=options.classes,
    )


def _mismatch(declared: ModelInput | ModelOutput, tensor: PlanTensor | None, batched: bool) -> str:
    if tensor is None:
        return "is not in the plan"
    dtype = BY_CONFIG_NAME[declared.data_type].dtype
    if dtype != tensor.dtype:
        return f"is {declared.data_type} in the configuration, {tensor.dtype} in the plan"
    dims = declared.dims if declared.reshape is None else declared.reshape.shape
    shape = tensor.shape[1:] if batched else tensor.shape
    fits = len(dims) == len(shape) and all(-1 in pair or pair[0] == pair[1] for pair in zip(dims, shape, strict=True))
    return "" if fits else f"has the shape {list(dims)} in the configuration, {list(shape)} in the plan"


def _describe(tensors: Sequence[PlanTensor]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
