"""Section `optimization` of a model's configuration: graph, CUDA, accelerators, precision, calibration, accuracy.

Every field of Triton's message is accepted; docs/configuration.md says which ones have an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.config_base import (
    ConfigPart,
    Count,
    Dimension,
    Flag,
    Int32,
    OneOf,
    ParameterText,
    PositiveCount,
    Problem,
    Text,
    option,
)


class Graph(ConfigPart):
    """Optimisation of the model's graph."""

    level: Int32 = option(0, "-1: basic, 0: all (the default), 1: extended; ONNX Runtime's levels.")


class Cuda(ConfigPart):
    """Submission of work to an NVIDIA GPU."""

    graphs: Flag = option(False, "Capture the execution as a CUDA graph and replay it.")
    busy_wait_events: Flag = option(False, "Spin on CUDA events instead of sleeping.")
    output_copy_stream: Flag = option(False, "Copy outputs on a separate CUDA stream.")


class Accelerator(ConfigPart):
    """One execution accelerator and its options."""

    name: Annotated[str, Field(strict=True, min_length=1)] = Field(description="The accelerator, e.g. `tensorrt`.")
    parameters: dict[str, ParameterText] = option({}, "Its options, e.g. `precision_mode: FP16`.")


class ExecutionAccelerators(ConfigPart):
    """Accelerators by device."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = option((), "Accelerators on a GPU.")
    cpu_execution_accelerator: tuple[Accelerator, ...] = option((), "Accelerators on a CPU.")


class PinnedMemory(ConfigPart):
    """Use of pinned host memory for transfers."""

    # As in Triton's message an empty block disables it, an absent one enables it.
    enable: Flag = option(False, "Use pinned memory; true if the block is absent.")


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

    batch: tuple[PositiveCount, PositiveCount, PositiveCount] | None = option(
        None, "Rows: minimum, tuned, maximum. If absent: 1, `max_batch_size`, `max_batch_size`."
    )
    shapes: dict[str, tuple[Shape, Shape, Shape]] = option(
        {},
        "For each input with free dimensions: minimum, tuned and maximum shape, without the batch dimension. For a ragged input: "
        "the number of elements of a batch.",
    )

    def _problems(self) -> Iterator[Problem]:
        if self.batch is not None and not self.batch[0] <= self.batch[1] <= self.batch[2]:
            yield Problem(("batch",), f"batch {list(self.batch)} does not ascend", "write [min, opt, max]")
        for name, (smallest, tuned, largest) in self.shapes.items():
            same = len(smallest) == len(tuned) == len(largest)
            if not same or not all(0 < a <= b <= c for a, b, c in zip(smallest, tuned, largest, strict=True)):
                message = f'the shapes of "{name}" do not ascend from the smallest to the largest'
                yield Problem(("shapes", name), message, "write three shapes without -1: [min, opt, max]")


class Calibration(ConfigPart):
    """Calibration of the tensor ranges of an INT8 or FP8 engine."""

    method: Annotated[Method, OneOf()] = option(
        "entropy", "`entropy`, `minmax`, `percentile` or `mse`. `tensorrt` can no longer be built: write `entropy`."
    )
    data: Text = option(
        "", "Samples in the model's folder: images, an .npz with one array for each input, or `file.py:function`."
    )
    samples: PositiveCount = option(256, "Maximum number of samples.")
    percentile: Annotated[float, Field(strict=True, gt=50, le=100)] = option(
        99.99, "Percentage of values inside the range, for `method: percentile`."
    )
    keep: tuple[Text, ...] = option(
        (), "Nodes (by name, `*` allowed) that stay in floating point, in addition to those found by measurement."
    )


class AccuracyBar(ConfigPart):
    """Accuracy relative to the FP32 model that a built engine must reach to be published."""

    data: Text = option("", "Held-out samples, as in `calibration.data`; the calibration's last quarter if absent.")
    samples: PositiveCount = option(512, "Maximum number of samples.")
    min_top1_agreement: Share | None = option(
        None,
        "Minimum share of samples with the same largest output. If absent: 0.98, or 0.9 for INT8 and FP8, or no "
        "minimum without samples, where random inputs are compared.",
    )
    max_drop: Share | None = option(
        None, "Maximum loss of accuracy if the samples have labels; 0.005 is half a percentage point."
    )
    min_cosine: Share | None = option(
        None, "Minimum cosine similarity of the outputs; 0.999 if absent, 0.95 for INT8 and FP8."
    )


class Optimization(ConfigPart):
    """Optimisations of the model's execution."""

    graph: Graph | None = option(None, "Optimisation of the model's graph.")
    priority: Annotated[Priority, OneOf("PRIORITY_")] = option(
        "PRIORITY_DEFAULT", "Priority of this model's work on the device."
    )
    cuda: Cuda | None = option(None, "Submission of work to an NVIDIA GPU.")
    execution_accelerators: ExecutionAccelerators | None = option(None, "Accelerators, such as TensorRT.")
    input_pinned_memory: PinnedMemory = option(PinnedMemory(enable=True), "Inputs go through pinned memory to a GPU.")
    output_pinned_memory: PinnedMemory = option(
        PinnedMemory(enable=True), "Outputs go through pinned memory from a GPU."
    )
    gather_kernel_buffer_threshold: Count = option(0, "Buffers from which a kernel gathers the input on a GPU.")
    eager_batching: Flag = option(False, "Assemble a batch before an instance is idle.")
    precision: Annotated[Precision, OneOf()] | None = option(
        None,
        "Precision of the engine from `headrace build`: `fp32` (the default), `fp16`, `bf16`, `int8`, `fp8`, or "
        "`best`: the fastest that meets `accuracy`.",
    )
    profiles: tuple[EngineProfile, ...] = option((), "Ranges of shapes that the engine supports.")
    workspace_mb: PositiveCount | None = option(None, "Maximum scratch memory of TensorRT in MiB; unlimited if absent.")
    calibration: Calibration = option(Calibration(), "Calibration for INT8 and FP8.")
    keep_fp32: tuple[Text, ...] = option(
        (), "Nodes (by name, `*` allowed) that stay FP32 among FP16 or BF16, in addition to those found by measurement."
    )
    accuracy: AccuracyBar = option(AccuracyBar(), "Accuracy that an engine must reach to be published.")


HEADRACE_OPTIMIZATION_FIELDS: tuple[str, ...] = (
    "precision",
    "profiles",
    "workspace_mb",
    "calibration",
    "keep_fp32",
    "accuracy",
)

# Names of accelerators that select TensorRT: Triton's, and that of its ONNX Runtime backend.
TENSORRT_ACCELERATORS = ("tensorrt", "auto")


# Name of the accelerator that selects ONNX Runtime's CUDA provider, as in Triton's ONNX Runtime backend.
CUDA_ACCELERATOR = "cuda"
# Options of the CUDA provider that `parameters`, or the parameters of the accelerator, may set.
CUDA_PARAMETERS = (
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "gpu_mem_limit",
    "use_tf32",
)


def cuda_accelerator(optimization: Optimization) -> Accelerator | None:
    """Return the CUDA accelerator of `execution_accelerators`, None without one or beside that of TensorRT."""
    return None if tensorrt_accelerator(optimization) else _gpu_accelerator(optimization, (CUDA_ACCELERATOR,))


def tensorrt_accelerator(optimization: Optimization) -> Accelerator | None:
    """Return the TensorRT accelerator of `execution_accelerators`, None without one."""
    return _gpu_accelerator(optimization, TENSORRT_ACCELERATORS)


def _gpu_accelerator(optimization: Optimization, names: Sequence[str]) -> Accelerator | None:
    accelerators = optimization.execution_accelerators
    for accelerator in accelerators.gpu_execution_accelerator if accelerators else ():
        if accelerator.name.lower() in names:
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
