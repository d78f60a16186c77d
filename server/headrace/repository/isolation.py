"""Models that run in a process of their own, because their configuration says so."""

from __future__ import annotations

import math

from headrace.backends.process.backend import IsolatedBackend
from headrace.core.model_config import ModelConfig
from headrace.core.tensor import BY_CONFIG_NAME
from headrace.core.tensor_config import ModelInput, ModelOutput

# Where each backend is made, for the process that is to make it.
FACTORIES = {
    "onnxruntime": "headrace.backends.onnxruntime:OnnxRuntimeBackend",
    "tensorrt": "headrace.backends.tensorrt.backend:TensorRtBackend",
}


def isolated(runtime: str, config: ModelConfig) -> IsolatedBackend:
    """A backend that loads the model into a process of its own.

    Args:
        runtime: name of the backend that runs it there.
        config: complete.
    """
    return IsolatedBackend(config.name, FACTORIES[runtime], config.isolation_timeout_s, _batch_bytes(config))


def _batch_bytes(config: ModelConfig) -> int:
    """Inputs and outputs of the largest batch; where a size is free it counts as 1, and elements of text as 8 bytes."""
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    row_bytes = sum(
        BY_CONFIG_NAME[tensor.data_type].dtype.itemsize * math.prod(max(size, 1) for size in tensor.dims)
        for tensor in tensors
    )
    return row_bytes * max(config.max_batch_size, 1)
