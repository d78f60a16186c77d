"""What can be wrong with `model_warmup`, found before anything is loaded; `control/warmup` makes and runs the requests."""

from __future__ import annotations

import math
from pathlib import Path

from headrace.config.model_files import shown, within
from headrace.core.model_config import Location, ModelConfig, ModelInput, Problem, WarmupInput
from headrace.core.tensor import BY_CONFIG_NAME, BYTES, Datatype

FOLDER = "warmup"
# One input of one warm-up; a configuration may come from a client, and shall not take the machine's memory with it.
MAX_INPUT_BYTES = 1 << 30
MAX_RUNS = 10_000
# A Python object and what it holds, about.
_BYTES_ELEMENT_SIZE = 64


def warmup_problems(config: ModelConfig, folder: Path, repository: Path) -> list[Problem]:
    """Why warm-ups cannot be run.

    Args:
        config: complete.
        folder: the model's.
        repository: that nothing may lead out of.
    """
    problems: list[Problem] = []
    known = {tensor.name: tensor for tensor in config.served_input}
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


def feed_dims(feed: WarmupInput, tensor: ModelInput) -> tuple[int, ...]:
    """The sizes that a warm-up asks for, without the batch dimension."""
    return feed.dims if "dims" in feed.model_fields_set else tensor.dims


def _feed_problems(feed: WarmupInput, tensor: ModelInput, rows: int, folder: Path, repository: Path) -> list[Problem]:
    if feed.data_type and feed.data_type != tensor.data_type:
        message = f"the warm-up has {feed.data_type} for input {tensor.name}, which is {tensor.data_type}"
        return [Problem(("data_type",), message, "remove data_type")]
    dims = feed_dims(feed, tensor)
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
