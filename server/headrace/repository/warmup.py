"""Warm-up requests that every instance runs before a version serves: `model_warmup` of the configuration.

The fields are those of Triton's published message `ModelWarmup`. A data file has the values of one row, which is repeated for
every row of the batch; here it may also have all rows. A BYTES element is its length in four bytes, little-endian, and its
bytes.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.backends.base import Execution
from headrace.config.documents import refuse
from headrace.config.model_folder import FOLDER, MAX_INPUT_BYTES, feed_dims
from headrace.core.model_config import ModelConfig
from headrace.core.tensor import BF16, BY_CONFIG_NAME, BYTES, Array, Datatype
from headrace.core.tensor_config import ModelInput, WarmupInput

logger = logging.getLogger("headrace.warmup")


@dataclass(frozen=True, slots=True)
class Warmup:
    """One warm-up request.

    Attributes:
        name: name for the log.
        inputs: arrays by input name.
        count: number of runs.
    """

    name: str
    inputs: dict[str, Array]
    count: int


class WarmupRunner:
    """Runs warm-ups; called by each instance on its own thread with its own execution.

    Args:
        model: name of the model, for the log.
        warmups: requests to run.
        on_done: called with the execution afterwards.
    """

    def __init__(
        self, model: str, warmups: list[Warmup], on_done: Callable[[Execution], None] = lambda _execution: None
    ) -> None:
        self._model = model
        self._warmups = warmups
        self._on_done = on_done

    def __call__(self, execution: Execution) -> None:
        """Run all warm-ups; an error of the execution is raised and fails the load."""
        for warmup in self._warmups:
            logger.debug("model %s runs the warm-up request %s", self._model, warmup.name)
            for _ in range(warmup.count):
                execution.run(dict(warmup.inputs))
        self._on_done(execution)


def make_warmups(config: ModelConfig, folder: Path) -> list[Warmup]:
    """Create the warm-up requests with their data.

    Args:
        config: complete configuration.
        folder: the model's folder.

    Raises:
        ConfigError: a data file cannot be read, or has changed since `warmup_problems` checked it.
    """
    tensors = {tensor.name: tensor for tensor in config.served_input}
    warmups: list[Warmup] = []
    for index, warmup in enumerate(config.model_warmup):
        rows = warmup.batch_size if config.max_batch_size else 0
        inputs = {name: _data(feed, tensors[name], rows, folder) for name, feed in warmup.inputs.items()}
        warmups.append(Warmup(warmup.name or str(index), inputs, max(warmup.count, 1)))
    return warmups


def one_row(tensor: ModelInput) -> Array:
    """Return random values for an input without free dimensions: (1, *dims)."""
    return _random(BY_CONFIG_NAME[tensor.data_type], (1, *tensor.dims))


def _data(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path) -> Array:
    """Return the array of one input: (rows, *dims), or dims if `rows` is 0, which means no batch dimension."""
    kind = BY_CONFIG_NAME[tensor.data_type]
    dims = feed_dims(feed, tensor)
    shape = (rows, *dims) if rows else dims
    if feed.input_data_file:
        return _from_file(folder / FOLDER / feed.input_data_file, kind, shape, dims)
    return _random(kind, shape) if feed.random_data else _zeros(kind, shape)


def _zeros(kind: Datatype, shape: tuple[int, ...]) -> Array:
    zeros: Array = np.full(shape, b"", dtype=object) if kind is BYTES else np.zeros(shape, kind.dtype)
    return zeros


def _random(kind: Datatype, shape: tuple[int, ...]) -> Array:
    """Return random values: floats in [0, 1), whole numbers 0 and 1, so that an index stays within its table, or text of 0 and
    1.
    """
    rng = np.random.default_rng()
    values: Array
    if kind is BYTES:
        values = np.empty(shape, dtype=object)
        values.reshape(-1)[:] = [b"%d" % bit for bit in rng.integers(0, 2, math.prod(shape)).tolist()]
    elif kind is BF16:  # the upper half of a single-precision number
        values = (rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif kind.dtype.kind == "f":
        values = rng.random(shape, np.float32).astype(kind.dtype)
    else:
        values = rng.integers(0, 2, shape).astype(kind.dtype)
    return values


def _from_file(path: Path, kind: Datatype, shape: tuple[int, ...], dims: tuple[int, ...]) -> Array:
    name = f"{path.parent.parent.name}/{FOLDER}/{path.name}"
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    values = _texts(content, name) if kind is BYTES else _numbers(content, kind, name)
    if values.size == math.prod(shape):
        return values.reshape(shape)
    if values.size != math.prod(dims):
        message = f"has {values.size} elements, one row takes {math.prod(dims)}"
        raise refuse(name, None, message, "write the values of one row, or those of all rows")
    return np.ascontiguousarray(np.broadcast_to(values.reshape(dims), shape))


def _numbers(content: bytes, kind: Datatype, name: str) -> Array:
    if len(content) % kind.size_bytes:
        raise refuse(
            name,
            None,
            f"has {len(content)} bytes, not a multiple of {kind.size_bytes} ({kind.name})",
            "write raw values",
        )
    values: Array = np.frombuffer(content, kind.dtype).copy()
    return values


def _texts(content: bytes, name: str) -> Array:
    texts: list[bytes] = []
    offset = 0
    while offset < len(content):
        length = struct.unpack_from("<I", content, offset)[0] if offset + 4 <= len(content) else len(content)
        if offset + 4 + length > len(content):
            cure = "write the length of every element in four bytes, little-endian, in front of it"
            raise refuse(name, None, f"ends within the element that begins at byte {offset}", cure)
        texts.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    values = np.empty(len(texts), dtype=object)
    values[:] = texts
    return values
