"""Samples of a model's inputs: what ranges are found on and what artefacts are compared on.

a folder of pictures    picture_folder   through the model's own `preprocess`
an .npz                 array_file       an array an input
file.py:function        sample_reader    a function of the model's owner
                           |
                        Samples          by batch, as often as they are wanted
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engines.errors import BuildError
from engines.quantization.model_inputs import InputLayout, layouts_of
from server.config.model_files import filename_problem, within
from server.core.model_config import ModelConfig

Array = npt.NDArray[Any]
Sample = dict[str, Array]

SEED = 5
_PIXELS = 255.0


class Samples:
    """Inputs for a model, in an order that does not change, read when they are wanted.

    Args:
        read: gives the sample of a number: by input name an array in the model's own shape, without the batch dimension.
        digests: of every sample's content, by number.
        name: what people know the data by, e.g. "calibration/".
        noun: what the samples are called when they are counted, e.g. "pictures"; "" leaves the count out.
        labels: INT64, the class of every sample by number; None where nobody knows.
        batched: False for a model without a batch dimension: a batch is then one sample, in exactly the shape the model takes.
        numbers: which samples these are, all of them if None.
    """

    def __init__(
        self,
        read: Callable[[int], Sample],
        digests: Sequence[bytes],
        name: str,
        noun: str = "samples",
        *,
        labels: Array | None = None,
        batched: bool = True,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._read = read
        self._digests = digests
        self._name = name
        self._noun = noun
        self._labels = labels
        self.batched = batched
        self._numbers = range(len(digests)) if numbers is None else numbers

    @classmethod
    def of(cls, arrays: Mapping[str, Array], labels: Array | None = None, name: str = "arrays") -> Self:
        """Samples from arrays by input name, all with the samples along their first dimension."""
        kept = {key: np.asarray(array) for key, array in arrays.items()}
        count = len(next(iter(kept.values())))

        def read(number: int) -> Sample:
            return {key: array[number] for key, array in kept.items()}

        return cls(read, [content_digest(read(n)) for n in range(count)], name, labels=labels)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def labels(self) -> Array | None:
        """INT64 [len], the class of every sample; None where nobody knows."""
        return None if self._labels is None else np.asarray(self._labels[list(self._numbers)], np.int64)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, over what the samples hold, labels included."""
        digest = hashlib.sha256()
        for number in self._numbers:
            digest.update(self._digests[number])
        labels = self.labels
        if labels is not None:
            digest.update(labels.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def origin(self) -> str:
        """For people: what it is and how much, e.g. "calibration/ (96 pictures)"."""
        noun = self._noun[:-1] if len(self) == 1 else self._noun
        return f"{self._name} ({len(self)} {noun})" if self._noun else self._name

    def batches(self, rows: int) -> Iterator[Sample]:
        """The samples in order, as batches by input name.

        Args:
            rows: of a batch at most. A batch is shorter at the end, and where the next sample has another shape; where the
                model has no batch dimension it is one sample.

        Raises:
            BuildError: a sample cannot be read; names it.
        """
        if not self.batched:
            yield from map(self._read, self._numbers)
            return
        waiting: list[Sample] = []
        for number in self._numbers:
            sample = self._read(number)
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
        """The first `count` samples, or all if there are fewer."""
        return self._part(self._numbers[:count])

    def split(self, share: float) -> tuple[Samples, Samples]:
        """All but the last `share` (0..1) of the samples, and that last share; each has one sample at least.

        Raises:
            BuildError: there are fewer than two.
        """
        if len(self) < 2:
            raise BuildError(f"{self.origin}: one sample cannot be divided into two parts: add samples")
        cut = min(max(len(self) - round(share * len(self)), 1), len(self) - 1)
        return self._part(self._numbers[:cut]), self._part(self._numbers[cut:])

    def without(self, others: Samples) -> Samples:
        """Those that are not among others, by content."""
        known = {others._digests[number] for number in others._numbers}
        return self._part([number for number in self._numbers if self._digests[number] not in known])

    def _part(self, numbers: Sequence[int]) -> Samples:
        return Samples(
            self._read,
            self._digests,
            self._name,
            self._noun,
            labels=self._labels,
            batched=self.batched,
            numbers=numbers,
        )


def open_samples(source: str, folder: Path, config: ModelConfig, limit: int) -> Samples:
    """The samples that a configuration names.

    Args:
        source: a folder of pictures, an .npz, or "file.py:function"; relative to `folder`, and below it.
        folder: the model's.
        config: complete; tells the inputs and how a picture becomes one.
        limit: how many samples are taken at most. Of pictures and arrays a fixed random choice, in a fixed random order,
            because files and data sets are often sorted by class; of a reader those that it yields first.

    Raises:
        BuildError: nothing is there, it does not fit the model, it cannot be read, or it lies outside of the folder.
    """
    # Each of them loads what it needs; pictures need Pillow.
    path_text, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    path = _inside(path_text, folder, config.name)
    layouts = layouts_of(config)
    if function:
        from engines.quantization.sample_reader import open_reader

        return open_reader(path, function, layouts, config, limit)
    if path.is_dir():
        from engines.quantization.picture_folder import open_pictures

        return open_pictures(path, folder, layouts, config, limit)
    if path.suffix == ".npz":
        from engines.quantization.array_file import open_arrays

        return open_arrays(path, layouts, config, limit)
    kinds = "a folder of pictures, an .npz, or file.py:function"
    raise BuildError(f"{config.name}: samples cannot be read from '{source}': write {kinds} in the model's folder")


def random_samples(config: ModelConfig, count: int, shapes: Mapping[str, Sequence[int]] | None = None) -> Samples:
    """Noise for a model whose owner gave no samples; the same every time.

    Floats are standard normal, or what noise in the pixels becomes where the model takes pictures; UINT8 and INT8 fill their
    range; other whole numbers are 0 or 1, which are indices into any table and masks as well; text is "0" or "1".

    Args:
        config: complete.
        count: how many samples.
        shapes: by input with free dimensions its shape without the batch dimension; a dimension told by nobody is 1.
    """
    layouts = {name: layout.sized((shapes or {}).get(name)) for name, layout in layouts_of(config).items()}
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

    told = repr([(name, layout.shape, str(layout.dtype)) for name, layout in layouts.items()] + [mean, deviation])
    digests = [hashlib.sha256(f"random {SEED} {number} {told}".encode()).digest() for number in range(count)]
    batched = all(layout.batched for layout in layouts.values())
    return Samples(read, digests, "random inputs", "", batched=batched)


def content_digest(sample: Sample, *more: object) -> bytes:
    """SHA-256 over a sample's names, types, shapes and values, and over the text of `more`."""
    digest = hashlib.sha256()
    for name, array in sorted(sample.items()):
        content = repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).tobytes()
        digest.update(repr((name, array.dtype.str, array.shape, len(content))).encode())
        digest.update(content)
    digest.update(repr(more).encode())
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


def _inside(text: str, folder: Path, model: str) -> Path:
    """The path of samples, known to exist and to lie in the folder."""
    problem = filename_problem(text)
    if problem is not None:
        raise BuildError(f"{model}: samples cannot be read: {problem[0]}: {problem[1]}")
    path = folder / text
    if not path.exists():
        cure = "put a folder of pictures, an .npz or file.py:function there, or write where they are"
        raise BuildError(f"{model}: the samples '{text}' are not in the model's folder {folder}: {cure}")
    if not within(path, folder):
        raise BuildError(f"{model}: '{text}' is a link that leads out of the model's folder: copy the samples into it")
    return path


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sample.items()}


def _stacked(samples: list[Sample]) -> Sample:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
