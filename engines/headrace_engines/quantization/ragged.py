"""Profiles and random samples for models with ragged batches (docs/ragged-batches.md).

The model's inputs are the joined inputs of a batch of requests, and those that `batch_input` computes. A sample is a whole batch,
so that the computed inputs are consistent with the others.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from headrace.config.model_config import ModelConfig
from headrace.config.optimization_config import EngineProfile
from headrace.config.ragged_rules import joined_inputs
from headrace.config.tensor_config import ModelInput
from headrace.core.ragged import SourceSizes, computed_values
from headrace.core.tensor import BY_CONFIG_NAME

from headrace_engines.errors import BuildError
from headrace_engines.quantization.samples import SEED, Sample, Samples
from headrace_engines.targets.base import ShapeRange

_Shape = tuple[int, ...]
_Limits = tuple[_Shape, _Shape, _Shape]


def ragged_range(config: ModelConfig, profile: EngineProfile) -> ShapeRange:
    """Return the shapes of the model's inputs for a profile.

    A batch has at least one row, and a request at least one row: computed inputs follow from the rows and the elements.

    Args:
        config: completed configuration of a model with ragged batches.
        profile: shapes of ragged inputs are the numbers of elements of a batch, as [elements].

    Raises:
        BuildError: a profile is inconsistent, or the number of elements is not known.
    """
    max_rows = config.max_batch_size
    _, tuned_rows, most_rows = profile.batch or (1, max_rows, max_rows)
    if most_rows > max_rows:
        cure = f"raise max_batch_size to {most_rows}, or write [.., .., {max_rows}]"
        raise BuildError(f"{config.name}: a profile has a batch of {most_rows}, max_batch_size is {max_rows}: {cure}")
    names = [tensor.name for tensor in joined_inputs(config)]
    unknown = sorted(set(profile.shapes) - set(names))
    if unknown:
        message = f"a profile names {', '.join(unknown)}, the model's inputs are {', '.join(names)}"
        raise BuildError(f"{config.name}: {message}")
    rows = (1, tuned_rows, most_rows)
    shapes: dict[str, _Limits] = {}
    sources: dict[str, tuple[SourceSizes, SourceSizes, SourceSizes]] = {}
    for tensor in config.input:
        limits = _joined_limits(config, profile, tensor, rows)
        shapes[tensor.name] = limits
        sources[tensor.name] = _source_sizes(tensor, limits, rows)
    for part in config.batch_input:
        smallest, tuned, largest = (size.computed_shape(part.kind) for size in sources[part.source_input[0]])
        for name in part.target_name:
            shapes[name] = profile.shapes.get(name, (smallest, tuned, largest))
    return ShapeRange(shapes)


def _joined_limits(
    config: ModelConfig, profile: EngineProfile, tensor: ModelInput, rows: tuple[int, int, int]
) -> _Limits:
    """Return the smallest, tuned and largest shape of an input that requests have."""
    if tensor.allow_ragged_batch:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        given = profile.shapes.get(tensor.name)
        if given is None and any(size < 0 for size in dims):
            line = f"optimization: {{profiles: [{{shapes: {{{tensor.name}: [[1], [1024], [16384]]}}}}]}}"
            cure = f"write the fewest, tuned and most elements of a batch, e.g. {line}"
            raise BuildError(f"{config.name}: the elements of the ragged input {tensor.name} have no bound: {cure}")
        if given is not None and len(given[0]) != 1:
            cure = "write one number each: the elements of a batch, e.g. [[1], [1024], [16384]]"
            raise BuildError(f"{config.name}: the profile of the ragged input {tensor.name} has several sizes: {cure}")
        count = math.prod(dims)
        return given or ((rows[0] * count,), (rows[1] * count,), (rows[2] * count,))
    smallest, tuned, largest = input_sizes(config, profile, tensor)
    return (rows[0], *smallest), (rows[1], *tuned), (rows[2], *largest)


def input_sizes(config: ModelConfig, profile: EngineProfile, tensor: ModelInput) -> _Limits:
    """Return the smallest, tuned and largest dims of an input that is not ragged, without the batch.

    Raises:
        BuildError: its dims are free and the profile has none, or those do not fit.
    """
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    given = profile.shapes.get(tensor.name)
    if given is None and any(size < 0 for size in dims):
        cure = f"write optimization.profiles with shapes for it: {{shapes: {{{tensor.name}: [min, opt, max]}}}}"
        raise BuildError(f"{config.name}: input {tensor.name} has free dimensions {list(dims)}: {cure}")
    smallest, tuned, largest = given or (dims, dims, dims)
    if len(smallest) != len(dims) or any(
        dim not in (-1, a) or dim not in (-1, c) for dim, a, c in zip(dims, smallest, largest, strict=True)
    ):
        raise BuildError(f"{config.name}: the profile of input {tensor.name} does not fit its dims {list(dims)}")
    return smallest, tuned, largest


def _source_sizes(
    tensor: ModelInput, limits: _Limits, rows: tuple[int, int, int]
) -> tuple[SourceSizes, SourceSizes, SourceSizes]:
    """Return the sizes of the smallest, tuned and largest batch, from which computed inputs follow."""
    smallest, tuned, largest = (math.prod(shape) for shape in limits)
    item = tensor.dims  # its number of sizes counts
    return (
        SourceSizes(rows[0], rows[0], smallest, 1, item),
        SourceSizes(rows[1], rows[1], tuned, max(tuned // rows[1], 1), item),
        # The largest request may have all elements.
        SourceSizes(rows[2], rows[2], largest, largest, item),
    )


def ragged_samples(config: ModelConfig, count: int, shapes: ShapeRange) -> Samples:
    """Return random ragged batches; always the same. The first one is a lone request.

    Floats are standard normal. Integers are 0 or 1, valid as indices into any table and as masks. All requests have one row.

    Args:
        config: completed configuration of a model with ragged batches.
        count: number of batches.
        shapes: the profile whose tuned shapes the batches have, or nearly.
    """

    def read(number: int) -> Sample:
        random = np.random.default_rng([SEED, number])
        requests = 1 + number % _most_requests(config, shapes)
        sample: Sample = {}
        request_shapes: dict[str, list[_Shape]] = {}
        for tensor in config.input:
            dtype = BY_CONFIG_NAME[tensor.data_type].dtype
            if tensor.allow_ragged_batch:
                request_shapes[tensor.name] = _request_shapes(tensor, shapes.shapes[tensor.name], requests)
                shape: _Shape = (sum(map(math.prod, request_shapes[tensor.name])),)
            else:
                row = shapes.shapes[tensor.name][1][1:]
                request_shapes[tensor.name] = [(1, *row)] * requests
                shape = (requests, *row)
            noise = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
            sample[tensor.name] = noise.astype(dtype)
        for part in config.batch_input:
            dtype = BY_CONFIG_NAME[part.data_type].dtype
            values = computed_values(part.kind, request_shapes[part.source_input[0]], dtype)
            sample.update((name, values) for name in part.target_name)
        return sample

    description = repr([config.model_dump_json(include={"input", "batch_input"}), dict(shapes.shapes)])
    digests = [hashlib.sha256(f"ragged {SEED} {number} {description}".encode()).digest() for number in range(count)]
    return Samples(read, digests, "random batches", "", batched=False)


def _most_requests(config: ModelConfig, shapes: ShapeRange) -> int:
    """Return the most requests of a sample: the tuned rows, if the elements suffice for so many."""
    most = config.max_batch_size
    for tensor in config.input:
        _, tuned, _ = shapes.shapes[tensor.name]
        most = min(most, tuned[0] // _unit(tensor) if tensor.allow_ragged_batch else tuned[0])
    return max(most, 1)


def _unit(tensor: ModelInput) -> int:
    """Return the elements of the shortest row of an input."""
    return math.prod([max(size, 1) for size in tensor.dims])


def _request_shapes(tensor: ModelInput, limits: _Limits, requests: int) -> list[_Shape]:
    """Return the shapes of an input in requests of one row, of different length if it has a free size.

    The elements of all are the tuned number, rounded down to whole rows.
    """
    free = next((axis for axis, size in enumerate(tensor.dims) if size < 0), None)
    if free is None:
        return [(1, *tensor.dims)] * requests
    total = max(limits[1][0] // _unit(tensor), 1)
    lengths = [total // requests] * requests
    for index in range(1, requests, 2):  # odd requests are shorter, the ones before longer
        moved = lengths[index] // 2
        lengths[index] -= moved
        lengths[index - 1] += moved
    lengths[0] += total - sum(lengths)
    return [
        (1, *[max(size, 1) if axis != free else length for axis, size in enumerate(tensor.dims)]) for length in lengths
    ]
