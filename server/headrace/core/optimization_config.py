"""Section `optimization` of a model's configuration: graph, CUDA, accelerators, precision, calibration, accuracy.

Every field of Triton's message is accepted; docs/configuration.md says which ones have an effect.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.core.config_base import (
    ConfigPart,
    Count,
    Dimension,
    Flag,
    Int32,
    ParameterText,
    PositiveCount,
    Problem,
    Problems,
    Text,
    one_of,
)


class Graph(ConfigPart):
    """Optimisation of the model's graph."""

    level: Int32 = Field(default=0, description="-1: basic, 0: all (the default), 1: extended; ONNX Runtime's levels.")


class Cuda(ConfigPart):
    """Submission of work to an NVIDIA GPU."""

    graphs: Flag = Field(default=False, description="Capture the execution as a CUDA graph and replay it.")
    busy_wait_events: Flag = Field(default=False, description="Spin on CUDA events instead of sleeping.")
    output_copy_stream: Flag = Field(default=False, description="Copy outputs on a separate CUDA stream.")


class Accelerator(ConfigPart):
    """One execution accelerator and its options."""

    name: Annotated[str, Field(strict=True, min_length=1)] = Field(description="The accelerator, e.g. `tensorrt`.")
    parameters: dict[str, ParameterText] = Field(default={}, description="Its options, e.g. `precision_mode: FP16`.")


class ExecutionAccelerators(ConfigPart):
    """Accelerators by device."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = Field(default=(), description="Accelerators on a GPU.")
    cpu_execution_accelerator: tuple[Accelerator, ...] = Field(default=(), description="Accelerators on a CPU.")


class PinnedMemory(ConfigPart):
    """Use of pinned host memory for transfers."""

    # As in Triton's message an empty block disables it, an absent one enables it.
    enable: Flag = Field(default=False, description="Use pinned memory; true if the block is absent.")


Priority = Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"]


PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8", "best")
# Precisions whose ranges are calibrated on samples.
CALIBRATED = ("int8", "fp8")
METHODS = ("entropy", "minmax", "percentile", "mse", "tensorrt")
Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8", "best"]
Method = Literal["entropy", "minmax", "percentile", "mse", "tensorrt"]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Shape = tuple[Dimension, ...]


class EngineProfile(ConfigPart):
    """A range of shapes that an engine supports and is tuned for."""

    batch: tuple[PositiveCount, PositiveCount, PositiveCount] | None = Field(
        default=None,
        description="Rows: minimum, tuned, maximum. If absent: 1, `max_batch_size`, `max_batch_size`.",
    )
    shapes: dict[str, tuple[Shape, Shape, Shape]] = Field(
        default={},
        description="For each input with free dimensions: minimum, tuned and maximum shape, without the batch "
        "dimension.",
    )

    @model_validator(mode="after")
    def _check(self) -> EngineProfile:
        problems = []
        if self.batch is not None and not self.batch[0] <= self.batch[1] <= self.batch[2]:
            problems.append(Problem(("batch",), f"batch {list(self.batch)} does not ascend", "write [min, opt, max]"))
        for name, (least, tuned, most) in self.shapes.items():
            same = len(least) == len(tuned) == len(most)
            if not same or not all(0 < a <= b <= c for a, b, c in zip(least, tuned, most, strict=True)):
                message = f'the shapes of "{name}" do not ascend from the smallest to the largest'
                problems.append(Problem(("shapes", name), message, "write three shapes without -1: [min, opt, max]"))
        if problems:
            raise Problems(problems)
        return self


class Calibration(ConfigPart):
    """Calibration of the tensor ranges of an INT8 or FP8 engine."""

    method: Annotated[Method, *one_of(METHODS)] = Field(
        default="entropy",
        description="`entropy`, `minmax`, `percentile` or `mse`. `tensorrt` can no longer be built: write `entropy`.",
    )
    data: Text = Field(
        default="",
        description="Samples in the model's folder: images, an .npz with one array for each input, or "
        "`file.py:function`.",
    )
    samples: PositiveCount = Field(default=256, description="Maximum number of samples.")
    percentile: Annotated[float, Field(strict=True, gt=50, le=100)] = Field(
        default=99.99, description="Percentage of values inside the range, for `method: percentile`."
    )
    keep: tuple[Text, ...] = Field(
        default=(),
        description="Nodes (by name, `*` allowed) that stay in floating point, in addition to those found by "
        "measurement.",
    )


class AccuracyBar(ConfigPart):
    """Accuracy relative to the FP32 model that a built engine must reach to be published."""

    data: Text = Field(
        default="", description="Held-out samples, as in `calibration.data`; the calibration's last quarter if absent."
    )
    samples: PositiveCount = Field(default=512, description="Maximum number of samples.")
    min_top1_agreement: Share | None = Field(
        default=None,
        description="Minimum share of samples with the same largest output. If absent: 0.98, or 0.9 for INT8 and FP8, "
        "or no minimum without samples, where random inputs are compared.",
    )
    max_drop: Share | None = Field(
        default=None,
        description="Maximum loss of accuracy if the samples have labels; 0.005 is half a percentage point.",
    )
    min_cosine: Share | None = Field(
        default=None, description="Minimum cosine similarity of the outputs; 0.999 if absent, 0.95 for INT8 and FP8."
    )


class Optimization(ConfigPart):
    """Optimisations of the model's execution."""

    graph: Graph | None = Field(default=None, description="Optimisation of the model's graph.")
    priority: Annotated[Priority, *one_of(("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"), "PRIORITY_")] = Field(
        default="PRIORITY_DEFAULT", description="Priority of this model's work on the device."
    )
    cuda: Cuda | None = Field(default=None, description="Submission of work to an NVIDIA GPU.")
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
    eager_batching: Flag = Field(default=False, description="Assemble a batch before an instance is idle.")
    precision: Annotated[Precision, *one_of(PRECISIONS)] | None = Field(
        default=None,
        description="Precision of the engine from `headrace build`: `fp32` (the default), `fp16`, `bf16`, `int8`, "
        "`fp8`, or `best`: the fastest that meets `accuracy`.",
    )
    profiles: tuple[EngineProfile, ...] = Field(default=(), description="Ranges of shapes that the engine supports.")
    workspace_mb: PositiveCount | None = Field(
        default=None, description="Maximum scratch memory of TensorRT in MiB; unlimited if absent."
    )
    calibration: Calibration = Field(default=Calibration(), description="Calibration for INT8 and FP8.")
    accuracy: AccuracyBar = Field(
        default=AccuracyBar(), description="Accuracy that an engine must reach to be published."
    )


HEADRACE_OPTIMIZATION_FIELDS: tuple[str, ...] = ("precision", "profiles", "workspace_mb", "calibration", "accuracy")

# Names of accelerators that select TensorRT: Triton's, and that of its ONNX Runtime backend.
TENSORRT_ACCELERATORS = ("tensorrt", "auto")


def tensorrt_accelerator(optimization: Optimization) -> Accelerator | None:
    """Return the TensorRT accelerator of `execution_accelerators`, None without one."""
    accelerators = optimization.execution_accelerators
    for accelerator in accelerators.gpu_execution_accelerator if accelerators else ():
        if accelerator.name.lower() in TENSORRT_ACCELERATORS:
            return accelerator
    return None


def requested_precision(optimization: Optimization) -> str:
    """Return the requested precision: field `precision`, else that of the TensorRT accelerator, else "fp32".

    The value of the accelerator is not validated.
    """
    if optimization.precision is not None:
        return optimization.precision
    accelerator = tensorrt_accelerator(optimization)
    return "fp32" if accelerator is None else accelerator.parameters.get("precision_mode", "fp32").lower()
