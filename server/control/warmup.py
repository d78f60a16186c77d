"""Requests that every instance answers before a version serves: `model_warmup` of the configuration.

What the fields mean is told by Triton's published message `ModelWarmup`: a data file holds the values of one row, which is
repeated for every row of the batch; here it may as well hold all rows. BYTES elements are a length of four bytes, little-endian,
and that many bytes.
"""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.backends.base import Execution
from server.control.document import refuse
from server.control.model_files import shown, within
from server.core.model_config import Location, ModelConfig, ModelInput, Problem, WarmupInput
from server.core.tensor import BF16, BY_CONFIG_NAME, BYTES, Array, Datatype

logger = logging.getLogger("headrace.warmup")

FOLDER = "warmup"
# One input of one warm-up; a configuration may come from a client, and shall not take the machine's memory with it.
MAX_INPUT_BYTES = 1 << 30
MAX_RUNS = 10_000
# A Python object and what it holds, about.
_BYTES_ELEMENT_SIZE = 64


@dataclass(frozen=True, slots=True)
class Warmup:
    """One request to warm up with.

    Attributes:
        name: for the log.
        inputs: as a request would bring them.
        count: how many times it is run.
    """

    name: str
    inputs: dict[str, Array]
    count: int


class WarmUp:
    """Runs warm-ups; called by each instance on its own thread with its own execution.

    Args:
        model: for the log.
        warmups: what to run.
    """

    def __init__(self, model: str, warmups: list[Warmup]) -> None:
        self._model = model
        self._warmups = warmups

    def __call__(self, execution: Execution) -> None:
        """Run all warm-ups; what the execution raises goes on to the caller, and with it the loading fails."""
        for warmup in self._warmups:
            logger.debug("model %s warms up with %s", self._model, warmup.name)
            for _ in range(warmup.count):
                execution.run(dict(warmup.inputs))


def warmup_problems(config: ModelConfig, folder: Path, repository: Path) -> list[Problem]:
    """Why warm-ups cannot be run.

    Args:
        config: complete.
        folder: the model's.
        repository: that nothing may lead out of.
    """
    problems: list[Problem] = []
    known = {tensor.name: tensor for tensor in config.input}
    for index, warmup in enumerate(config.model_warmup):
        loc: Location = ("model_warmup", index)
        if warmup.batch_size > max(config.max_batch_size, 1):
            message = f"the warm-up has {warmup.batch_size} rows, max_batch_size is {config.max_batch_size}"
            problems.append(Problem((*loc, "batch_size"), message, "lower batch_size"))
        if warmup.count > MAX_RUNS:
            problems.append(Problem((*loc, "count"), f"count is {warmup.count}", f"write {MAX_RUNS} at most"))
        missing = [t.name for t in config.input if not t.optional and t.name not in warmup.inputs]
        if missing:
            message = f"the warm-up does not feed input {', '.join(missing)}"
            problems.append(Problem((*loc, "inputs"), message, "add what every request must bring"))
        for name, feed in warmup.inputs.items():
            if name in known:
                here: Location = (*loc, "inputs", name)
                told = _feed_problems(feed, known[name], warmup.batch_size, folder, repository)
                problems += [problem._replace(loc=(*here, *problem.loc)) for problem in told]
    return problems


def make_warmups(config: ModelConfig, folder: Path) -> list[Warmup]:
    """The warm-ups with their data.

    Raises:
        ConfigError: a data file cannot be read, or has changed since `warmup_problems` found nothing wrong.
    """
    known = {tensor.name: tensor for tensor in config.input}
    warmups: list[Warmup] = []
    for index, warmup in enumerate(config.model_warmup):
        rows = warmup.batch_size if config.max_batch_size else 0
        inputs = {name: _data(feed, known[name], rows, folder) for name, feed in warmup.inputs.items()}
        warmups.append(Warmup(warmup.name or str(index), inputs, warmup.count))
    return warmups


def _feed_problems(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path, repository: Path) -> list[Problem]:
    if feed.data_type and feed.data_type != tensor.data_type:
        message = f"the warm-up has {feed.data_type} for input {tensor.name}, which is {tensor.data_type}"
        return [Problem(("data_type",), message, "remove data_type")]
    dims = _dims(feed, tensor)
    if any(size < 0 for size in dims):
        return [Problem(("dims",), f"dims {list(dims)} of the warm-up leave a size open", "write every size")]
    fits = len(dims) == len(tensor.dims) and all(
        allowed in (-1, size) for size, allowed in zip(dims, tensor.dims, strict=True)
    )
    if not fits:
        message = f"dims {list(dims)} of the warm-up are none that input {tensor.name} takes: {list(tensor.dims)}"
        return [Problem(("dims",), message, "leave out the batch dimension, and write every other size")]
    kind = BY_CONFIG_NAME[tensor.data_type]
    element_bytes = kind.size_bytes or _BYTES_ELEMENT_SIZE
    if math.prod(dims) * rows * element_bytes > MAX_INPUT_BYTES:
        return [Problem(("dims",), f"the warm-up takes more than {MAX_INPUT_BYTES} bytes", "warm up with less")]
    return _file_problems(feed, kind, math.prod(dims), rows, folder, repository) if feed.input_data_file else []


def _file_problems(
    feed: WarmupInput, kind: Datatype, elements: int, rows: int, folder: Path, repository: Path
) -> list[Problem]:
    path = folder / FOLDER / feed.input_data_file
    loc: Location = ("input_data_file",)
    name = shown(path, repository)
    if not path.is_file():
        return [Problem(loc, f"{name} is missing", f"put the file into the model's folder {FOLDER}/")]
    if not within(path, repository):
        return [Problem(loc, f"{name} is a link that leads out of the repository", "copy the file into the repository")]
    size = path.stat().st_size
    if size > MAX_INPUT_BYTES:
        return [Problem(loc, f"{name} has {size} bytes", f"warm up with {MAX_INPUT_BYTES} bytes at most")]
    row_bytes = elements * kind.size_bytes
    if kind is not BYTES and size not in (row_bytes, row_bytes * rows):
        message = f"{name} has {size} bytes, one row takes {row_bytes}"
        return [Problem(loc, message, "write the values of one row, little-endian, or those of all rows")]
    return []


def _dims(feed: WarmupInput, tensor: ModelInput) -> tuple[int, ...]:
    return feed.dims if "dims" in feed.model_fields_set else tensor.dims


def _data(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path) -> Array:
    """The array of one input: (rows, *dims), or dims if `rows` is 0, which says that there is no batch dimension."""
    kind = BY_CONFIG_NAME[tensor.data_type]
    dims = _dims(feed, tensor)
    shape = (rows, *dims) if rows else dims
    if feed.input_data_file:
        return _from_file(folder / FOLDER / feed.input_data_file, kind, shape, dims)
    return _random(kind, shape) if feed.random_data else _zeros(kind, shape)


def _zeros(kind: Datatype, shape: tuple[int, ...]) -> Array:
    zeros: Array = np.full(shape, b"", dtype=object) if kind is BYTES else np.zeros(shape, kind.dtype)
    return zeros


def _random(kind: Datatype, shape: tuple[int, ...]) -> Array:
    """Floats in [0, 1); whole numbers 0 and 1, so that an index stays within its table; texts of such a number."""
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
        raise refuse(name, None, f"{len(content)} bytes are no whole number of {kind.name} values", "write raw values")
    values: Array = np.frombuffer(content, kind.dtype).copy()
    return values


def _texts(content: bytes, name: str) -> Array:
    texts: list[bytes] = []
    at = 0
    while at < len(content):
        length = struct.unpack_from("<I", content, at)[0] if at + 4 <= len(content) else len(content)
        if at + 4 + length > len(content):
            cure = "write the length of every element in four bytes, little-endian, in front of it"
            raise refuse(name, None, f"ends within the element that begins at byte {at}", cure)
        texts.append(content[at + 4 : at + 4 + length])
        at += 4 + length
    values = np.empty(len(texts), dtype=object)
    values[:] = texts
    return values
