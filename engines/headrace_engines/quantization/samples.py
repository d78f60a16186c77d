"""Samples of a model's inputs, read in batches, and the required layout of each input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from headrace.config.model_config import ModelConfig
from headrace.core.tensor import BF16, BY_CONFIG_NAME, Datatype

from headrace_engines.errors import BuildError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Required type and shape of one input.

    Attributes:
        name: name of the tensor.
        datatype: type of its elements.
        dims: shape in the configuration, without the batch dimension; -1 for free dimensions.
        model_dims: shape in the model (after `reshape`), without the batch dimension.
        batched: True if the model has a batch dimension in front.
        optional: True if the input may be left out.
    """

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    model_dims: tuple[int, ...]
    batched: bool
    optional: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type of the elements."""
        return np.dtype(self.datatype.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample in the model, 1 for free dimensions."""
        return tuple(max(size, 1) for size in self.model_dims)

    def keeps_row(self, rank: int) -> bool:
        """Return whether an array of this rank has its samples along the first dimension of the model's shape.

        True for a model without a batch dimension whose first size is 1 or free: each row is a sample, as [1, ...].
        """
        return not self.batched and rank == len(self.dims) and self.dims[:1] in ((1,), (-1,))

    def count(self, dtype: np.dtype[Any], shape: Sequence[int], location: str) -> int:
        """Check type and shape of an array and return its number of samples.

        Raises:
            BuildError: they do not fit the input.
        """
        if self.keeps_row(len(shape)):
            self.check(dtype, (1, *shape[1:]), location)
        else:
            self.check(dtype, shape, location, samples_in_front=True)
        return shape[0]

    def sample(self, array: Array, location: str) -> Array:
        """Return one sample in the type and shape of the model.

        Args:
            array: in the shape of the configuration, without a dimension of samples.
            location: origin of the data, for messages.

        Raises:
            BuildError: type or shape do not fit, or a value is NaN or infinite.
        """
        self.check(array.dtype, array.shape, location)
        array = self._converted(array, location)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BuildError(f"{location}: '{self.name}' has NaN or infinite values: remove such samples")
        free = iter([actual for expected, actual in zip(self.dims, array.shape, strict=True) if expected < 0])
        return array.reshape([next(free) if size < 0 else size for size in self.model_dims])

    def check(self, dtype: np.dtype[Any], shape: Sequence[int], location: str, samples_in_front: bool = False) -> None:
        """Check a type and a shape against the input.

        Args:
            dtype: type of the data.
            shape: shape of the data.
            location: origin of the data, for messages.
            samples_in_front: the first dimension counts samples.

        Raises:
            BuildError: they do not fit. The message has the expected and the actual shape and, if it matches, a common mistake.
        """
        sample_shape = tuple(shape[1:]) if samples_in_front else tuple(shape)
        if not self._fits(sample_shape):
            expected = ["N", *self.dims] if samples_in_front else [*self.dims]
            message = f"{location}: input '{self.name}' takes {_shape_text(expected)}, found {_shape_text(shape)}"
            raise BuildError(f"{message}: {self._cure(tuple(shape), sample_shape)}")
        if not self._takes(dtype):
            cure = f"convert it with .astype('{self.dtype}') after the pre-processing of the model"
            raise BuildError(f"{location}: input '{self.name}' takes {self.datatype.name}, found {dtype}: {cure}")

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.dims) and all(e in (-1, f) for e, f in zip(self.dims, shape, strict=True))

    def _takes(self, dtype: np.dtype[Any]) -> bool:
        """Return whether data of this type can be converted: the same type, floats to floats, integers to integers."""
        if self.dtype == object:
            return dtype.kind in "OSU"
        if self.datatype is BF16:
            return dtype in (np.uint16, np.float32)
        same = "f" if self.dtype.kind == "f" else "iu" if self.dtype.kind in "iu" else self.dtype.kind
        return dtype.kind in same

    def _converted(self, array: Array, location: str) -> Array:
        if self.dtype == object:
            return array.astype(object)
        if self.datatype is BF16 and array.dtype == np.float32:
            # As bit patterns.
            return array.astype(ml_dtypes.bfloat16).view(np.uint16)
        if self.dtype.kind in "iu" and array.size and not np.can_cast(array.dtype, self.dtype):
            limits = np.iinfo(self.dtype)
            if array.min() < limits.min or array.max() > limits.max:
                raise BuildError(f"{location}: '{self.name}' has values that {self.datatype.name} cannot hold")
        with np.errstate(over="ignore"):  # overflow becomes infinity, which is reported
            return np.asarray(array, self.dtype)

    def _cure(self, whole: tuple[int, ...], sample_shape: tuple[int, ...]) -> str:
        if self._fits(whole):
            return "the first dimension must count samples: use array[None] for a single one"
        if len(sample_shape) == 3 and self._fits((sample_shape[2], sample_shape[0], sample_shape[1])):
            return "the data is channels last (NHWC), the input channels first (NCHW): use array.transpose(0, 3, 1, 2)"
        if len(sample_shape) == 3 and self._fits((sample_shape[1], sample_shape[2], sample_shape[0])):
            return "the data is channels first (NCHW), the input channels last (NHWC): use array.transpose(0, 2, 3, 1)"
        if self._fits((1, *sample_shape)):
            return "the dimension of the single channel is missing: use array[:, None]"
        if self._fits((*sample_shape, 1)):
            return "the dimension of the single channel is missing: use array[..., None]"
        return "reshape it to the shape of the input"


def input_layouts(config: ModelConfig) -> dict[str, InputLayout]:
    """Return the layouts of the inputs of the model by name, with those that the server fills for sequences."""
    return {
        tensor.name: InputLayout(
            tensor.name,
            BY_CONFIG_NAME[tensor.data_type],
            tensor.dims,
            tensor.dims if tensor.reshape is None else tensor.reshape.shape,
            config.max_batch_size > 0,
            tensor.optional,
        )
        for tensor in config.model_input
    }


def class_output(config: ModelConfig) -> str:
    """Return the name of the first output with a label file, the one with classes; "" without one."""
    return next((output.name for output in config.output if output.label_filename), "")


def class_names(config: ModelConfig) -> tuple[str, int]:
    """Return label file ("" without one) and number of classes (0 if unknown) of the output with classes."""
    name = class_output(config)
    matches = [output for output in config.output if output.name == name]
    if not matches and len(config.output) > 1:
        return "", 0
    output = next(iter(matches or config.output), None)
    if output is None:
        return "", 0
    return output.label_filename, max(output.dims[-1], 0) if output.dims else 0


def check_labels(labels: Array, config: ModelConfig, location: str) -> Array:
    """Return labels as INT64 [N].

    Args:
        labels: integers, [N] or [N, 1].
        config: completed configuration.
        location: origin of the labels, for messages.

    Raises:
        BuildError: type or shape are wrong, or a class does not exist.
    """
    flat = labels.reshape(len(labels)) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        actual = f"{labels.dtype} {_shape_text(labels.shape)}"
        raise BuildError(f"{location}: labels are {actual}: write the number of a class for each sample, integers [N]")
    classes = class_names(config)[1]
    if flat.size and (flat.min() < 0 or (classes and flat.max() >= classes)):
        bounds = f"from 0 to {classes - 1}" if classes else "0 or more"
        raise BuildError(
            f"{location}: labels go from {flat.min()} to {flat.max()}, the model's classes are {bounds}: correct the labels"
        )
    return flat.astype(np.int64)


def _shape_text(shape: Sequence[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


Sample = dict[str, Array]
SEED = 5
_PIXELS = 255.0


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Inputs of a model in a fixed order, read on use.

    Attributes:
        read: returns the sample of an index: arrays by input name in the model's shape, without the batch dimension.
        digests: digest of the content of every sample, by index.
        name: name of the data, for messages, e.g. "calibration/".
        noun: plural noun for the number of samples, e.g. "pictures"; "" for messages without the number.
        labels: class of every sample by index, INT64 [len]; None without labels.
        batched: False for a model without a batch dimension: a batch is one sample in the exact shape of the model.
    """

    read: Callable[[int], Sample]
    digests: Sequence[bytes]
    name: str
    noun: str = "samples"
    labels: Array | None = None
    batched: bool = True

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the contents of the samples and their labels."""
        digest = hashlib.sha256(b"".join(self.digests))
        if self.labels is not None:
            digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def origin(self) -> str:
        """Name and number of the samples, for messages, e.g. "calibration/ (96 pictures)"."""
        noun = self.noun[:-1] if len(self) == 1 else self.noun
        return f"{self.name} ({len(self)} {noun})" if self.noun else self.name

    def batches(self, rows: int) -> Iterator[Sample]:
        """Yield the samples in order, as batches by input name.

        Args:
            rows: largest batch. A batch is smaller at the end and before a sample of another shape; it is one sample for a model
                without a batch dimension.

        Raises:
            BuildError: a sample cannot be read.
        """
        if not self.batched:
            yield from map(self.read, range(len(self)))
            return
        waiting: list[Sample] = []
        for sample in map(self.read, range(len(self))):
            if waiting and _shapes(sample) != _shapes(waiting[0]):
                yield _stacked(waiting)
                waiting = []
            waiting.append(sample)
            if len(waiting) == rows:
                yield _stacked(waiting)
                waiting = []
        if waiting:
            yield _stacked(waiting)

    def head(self, count: int) -> Samples:
        """Return the first `count` samples, or all if there are fewer."""
        return self._part(range(len(self))[:count])

    def split(self, share: float) -> tuple[Samples, Samples]:
        """Split off the last `share` (0..1) of the samples; both parts have at least one sample.

        Raises:
            BuildError: there are fewer than two.
        """
        if len(self) < 2:
            raise BuildError(f"{self.origin}: one sample cannot be divided into two parts: add samples")
        cut = min(max(len(self) - round(share * len(self)), 1), len(self) - 1)
        return self._part(range(cut)), self._part(range(cut, len(self)))

    def without(self, others: Samples) -> Samples:
        """Return the samples whose content is not in `others`."""
        digests = set(others.digests)
        return self._part([index for index, digest in enumerate(self.digests) if digest not in digests])

    def _part(self, indices: Sequence[int]) -> Samples:
        return replace(
            self,
            read=lambda index: self.read(indices[index]),
            digests=[self.digests[index] for index in indices],
            labels=None if self.labels is None else self.labels[list(indices)],
        )


def random_samples(config: ModelConfig, count: int, shapes: Mapping[str, Sequence[int]] | None = None) -> Samples:
    """Return random samples for a model without samples; always the same.

    Floats are standard normal, or pre-processed random pixels for models of pictures. UINT8 and INT8 fill their range. Other
    integers are 0 or 1, valid as indices into any table and as masks. Text is "0" or "1".

    Args:
        config: completed configuration.
        count: number of samples.
        shapes: shapes of inputs with free dimensions, by name, without the batch dimension; 1 for missing ones.
    """
    layouts = input_layouts(config)
    for name in layouts.keys() & (shapes or {}).keys():
        layouts[name] = replace(layouts[name], model_dims=tuple((shapes or {})[name]))
    picture = config.preprocess
    mean, deviation = 0.0, 1.0
    if picture is not None:
        mean = (_PIXELS / 2 - float(np.mean(picture.mean))) / float(np.mean(picture.std))
        deviation = _PIXELS / np.sqrt(12.0) / abs(float(np.mean(picture.std)))

    def read(number: int) -> Sample:
        random = np.random.default_rng([SEED, number])
        sample = {}
        for name, layout in layouts.items():
            values = _noise(random, layout)
            if values.dtype.kind == "f" and picture is not None and picture.input in ("", name):
                values = (values * deviation + mean).astype(values.dtype)
            sample[name] = values
        return sample

    description = repr(
        [(name, layout.shape, str(layout.dtype)) for name, layout in layouts.items()] + [mean, deviation]
    )
    digests = [hashlib.sha256(f"random {SEED} {number} {description}".encode()).digest() for number in range(count)]
    batched = all(layout.batched for layout in layouts.values())
    return Samples(read, digests, "random inputs", "", batched=batched)


def content_digest(sample: Sample) -> bytes:
    """Return the SHA-256 of a sample's names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, array in sorted(sample.items()):
        content = repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).tobytes()
        digest.update(repr((name, array.dtype.str, array.shape, len(content))).encode())
        digest.update(content)
    digest.update(b"()")  # end of the sample: digests of stored engines include it
    return digest.digest()


def _noise(random: np.random.Generator, layout: InputLayout) -> Array:
    dtype, shape = layout.dtype, layout.shape
    if dtype.kind == "O":
        return random.integers(0, 2, shape).astype(str).astype(object)
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return random.integers(0, 2, shape).astype(dtype)


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sample.items()}


def _stacked(samples: list[Sample]) -> Sample:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
