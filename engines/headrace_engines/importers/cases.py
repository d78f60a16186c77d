"""Inputs for the comparison of an imported model: random ones of several seeds and batch sizes, and the user's samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import Preprocess

from headrace_engines.errors import BuildError
from headrace_engines.quantization.sample_sources import open_samples

Array = npt.NDArray[Any]
# One row, two, an odd number, and the size that most hides errors of strides: a power of two.
BATCH_SIZES = (1, 2, 5, 8)
SEEDS = (11, 12)
MAX_SAMPLES = 32
# Rows of a batch of samples: odd, so that the last batch differs from the others.
_SAMPLE_ROWS = 7
_PIXELS = 255.0
# Larger batches are left out: the outputs of a comparison are in memory twice.
_MAX_CASE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class InputForm:
    """One input of an imported model.

    Attributes:
        name: name of the tensor.
        dtype: NumPy type of its elements; object for text.
        dims: example's shape, the batch included.
        free: axes of free dimensions without the batch.
        low, high: range of the example's values; None if unknown.
        mean, std: of the example's values; for floats.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int, ...]
    free: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    std: float = 1.0

    def random(self, random: np.random.Generator, dims: Sequence[int]) -> Array:
        """Return random values in the range of the example.

        Floats have the example's mean, standard deviation and range. Integers fill the example's range;
        without an example they are 0 or 1, which is valid as an index and as a mask. Text is "0" or "1".
        """
        if self.dtype.kind == "O":
            return np.array([b"0", b"1"], dtype=object)[random.integers(0, 2, dims)]
        if self.dtype.kind == "b":
            return np.asarray(random.integers(0, 2, dims), bool)
        if self.dtype.kind in "iu":
            low, high = (0, 1) if self.low is None or self.high is None else (int(self.low), int(self.high))
            # An example of zeros says nothing of the range.
            return random.integers(low, max(high, low + 1) + 1, dims).astype(self.dtype)
        values = self.mean + self.std * _varied_noise(random, dims)
        if self.low is not None and self.high is not None:
            # Not cut to the bounds: equal values would make ranks ambiguous.
            outside = (values < self.low) | (values > self.high)
            values[outside] = random.uniform(self.low, self.high, int(outside.sum()))
        return values.astype(self.dtype)


def _varied_noise(random: np.random.Generator, dims: Sequence[int]) -> Array:
    """Return standard normal noise; with three dimensions and more, each row and each channel, first or last, has its own mean.

    Means over many independent values are nearly equal in all rows: behind a global pooling rows would hardly differ.
    """
    noise = random.standard_normal(dims)
    if len(dims) < 3:
        return noise
    first = random.standard_normal([*dims[:2], *(1 for _ in dims[2:])])
    last = random.standard_normal([dims[0], *(1 for _ in dims[1:-1]), dims[-1]])
    return np.asarray((noise + first + last) / np.sqrt(3.0))


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one comparison.

    Attributes:
        name: description for the report, e.g. "random, 5 rows".
        rows: rows of the batch; 0 without a batch dimension.
        inputs: arrays by input name.
        has_other_sizes: free dimensions differ from those of the example; a model may refuse them.
    """

    name: str
    rows: int
    inputs: dict[str, Array]
    has_other_sizes: bool = False


def input_forms(
    description: Mapping[str, Any], config: ModelConfig, dtypes: Mapping[str, np.dtype[Any]]
) -> list[InputForm]:
    """Return the inputs of a description.

    Args:
        description: of the process with the framework.
        config: completed configuration; its -1 are the free dimensions, its `preprocess` gives the range of pixels.
        dtypes: NumPy types by input.
    """
    dims = {tensor.name: tensor.dims for tensor in config.input}
    offset = 1 if config.max_batch_size else 0
    forms = []
    for entry in description["inputs"]:
        name = str(entry["name"])
        free = tuple(axis + offset for axis, size in enumerate(dims[name]) if size < 0)
        form = InputForm(name, dtypes[name], tuple(entry["dims"]), free)
        values = {key: entry[key] for key in ("low", "high", "mean", "std") if key in entry}
        forms.append(replace(form, **_pixels(config.preprocess, name) or values))
    return forms


def _pixels(preprocess: Preprocess | None, name: str) -> dict[str, float]:
    """Return range, mean and standard deviation of an input of pictures: those of uniform pixels."""
    if preprocess is None or preprocess.input not in ("", name):
        return {}
    mean, std = float(np.mean(preprocess.mean)), abs(float(np.mean(preprocess.std)))
    low, high = -mean / std, (_PIXELS - mean) / std
    return {"low": low, "high": high, "mean": (low + high) / 2, "std": (high - low) / np.sqrt(12.0)}


def random_cases(forms: Sequence[InputForm], batched: bool) -> Iterator[Case]:
    """Yield random inputs: each seed with each batch size, and one case with other sizes of the free dimensions.

    Args:
        forms: the inputs.
        batched: the first dimension is the batch.
    """
    for seed in SEEDS:
        for rows in BATCH_SIZES if batched else (0,):
            dims = {form.name: (rows, *form.dims[1:]) if batched else form.dims for form in forms}
            if rows > 1 and sum(_bytes(form, dims[form.name]) for form in forms) > _MAX_CASE_BYTES:
                continue
            name = f"random, {rows} {'row' if rows == 1 else 'rows'}" if batched else "random"
            yield Case(name, rows, _draw(forms, dims, [seed, rows]))
    if any(form.free for form in forms):
        rows = 3 if batched else 0
        dims = {form.name: _other_sizes(form, rows) for form in forms}
        sizes = ", ".join(f"{form.name} {list(dims[form.name])}" for form in forms if form.free)
        yield Case(f"random, other sizes: {sizes}", rows, _draw(forms, dims, [SEEDS[0], rows]), True)


def _draw(forms: Sequence[InputForm], dims: Mapping[str, Sequence[int]], seed: Sequence[int]) -> dict[str, Array]:
    random = np.random.default_rng([*seed])
    return {form.name: form.random(random, dims[form.name]) for form in forms}


def _other_sizes(form: InputForm, rows: int) -> tuple[int, ...]:
    """Return the shape with free dimensions of half the size: that stays a multiple of most strides, and below most limits."""
    sizes = [
        size if axis not in form.free else size // 2 if size > 3 else size + 1 for axis, size in enumerate(form.dims)
    ]
    return (rows, *sizes[1:]) if rows else tuple(sizes)


def _bytes(form: InputForm, dims: Sequence[int]) -> int:
    return int(np.prod(dims)) * form.dtype.itemsize


def sample_cases(source: Path, function: str, config: ModelConfig) -> Iterator[Case]:
    """Yield the user's samples in batches.

    Args:
        source: an .npz file, a folder of pictures, or a Python file with a function that yields samples.
        function: name of that function; "" for the others.
        config: completed configuration.

    Raises:
        BuildError: the samples cannot be read, or do not fit the model.
    """
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if not path.exists():
        raise BuildError(
            f"--samples {source} does not exist: name an .npz file, a folder of pictures or FILE.py:function"
        )
    # Classes of samples are not compared, and the label file lies in another folder.
    unlabelled = tuple(output.model_copy(update={"label_filename": ""}) for output in config.output)
    plain = config.model_copy(update={"output": unlabelled})
    words = f"{path.name}:{function}" if function else path.name
    samples = open_samples(words, path.parent, plain, MAX_SAMPLES)
    for inputs in samples.batches(_SAMPLE_ROWS):
        rows = len(next(iter(inputs.values()))) if samples.batched else 0
        noun = "row" if rows == 1 else "rows"
        yield Case(f"{samples.name}, {rows} {noun}" if rows else samples.name, rows, dict(inputs))
