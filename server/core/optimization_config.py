"""How a configuration tells optimisations: all of it is carried, `docs/configuration.md` tells what takes effect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.core.config_base import ConfigPart, Count, Flag, Int32, ParameterText, one_of


class Graph(ConfigPart):
    """Optimisation of the model's graph."""

    level: Int32 = Field(default=0, description="-1: basic, 0: all (the default), 1: extended; ONNX Runtime's levels.")


class Cuda(ConfigPart):
    """How work is handed to an NVIDIA GPU."""

    graphs: Flag = Field(default=False, description="Capture the execution as a CUDA graph and replay it.")
    busy_wait_events: Flag = Field(default=False, description="Spin on CUDA events instead of sleeping.")
    output_copy_stream: Flag = Field(default=False, description="Copy outputs on a CUDA stream of their own.")


class Accelerator(ConfigPart):
    """One execution accelerator and its options."""

    name: Annotated[str, Field(strict=True, min_length=1)] = Field(description="The accelerator, e.g. `tensorrt`.")
    parameters: dict[str, ParameterText] = Field(default={}, description="Its options, e.g. `precision_mode: FP16`.")


class ExecutionAccelerators(ConfigPart):
    """Accelerators by device."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = Field(default=(), description="Accelerators on a GPU.")
    cpu_execution_accelerator: tuple[Accelerator, ...] = Field(default=(), description="Accelerators on a CPU.")


class PinnedMemory(ConfigPart):
    """Whether a transfer goes through pinned host memory."""

    # Triton's message makes an empty block say no, an absent one yes.
    enable: Flag = Field(default=False, description="Use pinned memory; yes where the block is absent.")


Priority = Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"]


class Optimization(ConfigPart):
    """Optimisations of the model's execution."""

    graph: Graph | None = Field(default=None, description="Optimisation of the model's graph.")
    priority: Annotated[Priority, *one_of(("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"), "PRIORITY_")] = Field(
        default="PRIORITY_DEFAULT", description="Priority of this model's work on the device."
    )
    cuda: Cuda | None = Field(default=None, description="How work is handed to an NVIDIA GPU.")
    execution_accelerators: ExecutionAccelerators | None = Field(
        default=None, description="Accelerators, such as TensorRT."
    )
    input_pinned_memory: PinnedMemory = Field(
        default=PinnedMemory(enable=True), description="Inputs go through pinned memory to a GPU."
    )
    output_pinned_memory: PinnedMemory = Field(
        default=PinnedMemory(enable=True), description="Outputs go through pinned memory from a GPU."
    )
    gather_kernel_buffer_threshold: Count = Field(
        default=0, description="Buffers from which a kernel gathers the input on a GPU."
    )
    eager_batching: Flag = Field(default=False, description="Assemble the batch before an instance is free.")
