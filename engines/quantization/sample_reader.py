"""Samples from a function that the model's owner wrote. Its code runs in the builder, never in the server.

    def samples():
        for picture, label in pairs:
            yield {"image": picture, "label": label}      # or the array alone, for a model with a single input

What it yields is kept in a temporary file, because samples are wanted more than once and may not fit into memory.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from engines.errors import BuildError
from engines.quantization.array_file import LABELS
from engines.quantization.model_inputs import InputLayout, check_labels
from engines.quantization.samples import Sample, Samples, content_digest
from server.core.model_config import ModelConfig

Array = npt.NDArray[Any]


def open_reader(
    path: Path, function: str, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int
) -> Samples:
    """Samples from a Python function without arguments.

    Args:
        path: the file with the function.
        function: its name. It gives something to iterate over: dicts of arrays by input name, or bare arrays for a model with a
            single input; one sample each, or several with a dimension for them in front. `label` (or `labels`) in a dict
            is the number of the class.
        layouts: of the inputs.
        config: complete.
        limit: after so many samples no more are asked for.

    Raises:
        BuildError: the code fails (told with file and line), or what it yields does not fit.
    """
    where = f"{path.name}:{function}"
    kept = _Kept()
    labels: list[int] = []
    for number, item in enumerate(_call(path, function)):
        for sample, label in _samples_of(item, layouts, config, f"{where}: item {number}"):
            if len(kept) < limit:
                kept.add(sample)
                labels += [] if label is None else [label]
        if len(kept) >= limit:
            break
    if not len(kept):
        raise BuildError(f"{where} gave no samples: let it yield at least one")
    if labels and len(labels) != len(kept):
        raise BuildError(
            f"{where} gave labels for {len(labels)} of {len(kept)} samples: give every sample one, or none"
        )
    batched = config.max_batch_size > 0
    found = check_labels(np.array(labels), config, where) if labels else None
    return Samples(kept.read, kept.digests, where, labels=found, batched=batched)


class _Kept:
    """Samples in a temporary file, which vanishes with the process."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="headrace-samples-")  # noqa: SIM115
        self._places: list[list[tuple[str, int, np.dtype[Any], tuple[int, ...]]]] = []
        self._text: dict[tuple[int, str], Array] = {}
        self.digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, sample: Sample) -> None:
        places = []
        try:
            for name, array in sample.items():
                if array.dtype == object:
                    self._text[len(self), name] = array
                else:
                    places.append((name, self._file.seek(0, 2), array.dtype, array.shape))
                    self._file.write(np.ascontiguousarray(array).tobytes())
            self._file.flush()
        except OSError as error:
            place = tempfile.gettempdir()
            raise BuildError(
                f"the samples cannot be kept in {place}: {error.strerror or error}: make room there"
            ) from error
        self.digests.append(content_digest(sample))
        self._places.append(places)

    def read(self, number: int) -> Sample:
        sample: Sample = {name: array for (n, name), array in self._text.items() if n == number}
        for name, place, dtype, shape in self._places[number]:
            self._file.seek(place)
            size_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            sample[name] = np.frombuffer(self._file.read(size_bytes), dtype).reshape(shape)
        return sample


def _call(path: Path, function: str) -> Iterator[Any]:
    """What the function yields; errors of its code are told with file and line."""
    name = f"headrace_samples_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and the like look their module up by its name.
    sys.modules[name] = module
    try:
        # Not imported: that would leave a cache in the model's folder.
        code = _guarded(path, lambda: compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
        _guarded(path, exec, code, module.__dict__)
        made = getattr(module, function, None)
        if not callable(made):
            there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise BuildError(
                f"{path.name} has no function '{function}' (it has {', '.join(there) or 'none'}): define it"
            )
        items = _guarded(path, made)
        if not hasattr(items, "__iter__") or isinstance(items, dict | np.ndarray):
            found = type(items).__name__
            raise BuildError(
                f"{path.name}:{function} gave one {found} and not several: write it with yield, or return a list"
            )
        iterator = _guarded(path, iter, items)
        ended = object()
        while (item := _guarded(path, next, iterator, ended)) is not ended:
            yield item
    finally:
        sys.modules.pop(name, None)


def _guarded(path: Path, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (Exception, SystemExit) as error:  # somebody's code: whatever it raises, it is at fault
        _tell(path, error)


def _tell(path: Path, error: BaseException) -> NoReturn:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        raise BuildError(f"{path.name}:{error.lineno}: {error.msg}: correct the code that reads samples") from error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f":{frames[-1].lineno}" if frames else ""
    what = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    raise BuildError(f"{path.name}{line}: {what}: correct the code that reads samples") from error


def _samples_of(
    item: Any, layouts: Mapping[str, InputLayout], config: ModelConfig, where: str
) -> Iterator[tuple[Sample, int | None]]:
    """The samples of one item, one or several, each with its label."""
    arrays = dict(item) if isinstance(item, Mapping) else {next(iter(layouts)): item}
    if not isinstance(item, Mapping) and len(layouts) != 1:
        cure = f"yield a dict with {', '.join(layouts)}"
        raise BuildError(f"{where}: a bare {type(item).__name__} where the model has {len(layouts)} inputs: {cure}")
    label = next((arrays.pop(name) for name in LABELS if name in arrays and name not in layouts), None)
    unknown = sorted(str(name) for name in set(arrays) - set(layouts))
    missing = [name for name, layout in layouts.items() if name not in arrays and not layout.optional]
    if unknown or missing or not arrays:
        found = ", ".join(map(str, arrays)) or "nothing"
        raise BuildError(
            f"{where}: the model's inputs are {', '.join(layouts)}, found {found}: yield arrays of those names"
        )
    try:
        values = {name: np.asarray(value) for name, value in arrays.items()}
    except (ValueError, TypeError) as error:
        raise BuildError(f"{where}: it is no array ({error}): yield arrays") from error
    first = next(iter(values))
    layout = layouts[first]
    if values[first].ndim == len(layout.dims) + 1 or layout.keeps_row(values[first].ndim):
        yield from _several(values, label, layouts, config, where)
        return
    labels = None if label is None else check_labels(np.asarray(label).reshape(1), config, where)
    sample = {name: layouts[name].sample(array, where) for name, array in values.items()}
    yield sample, None if labels is None else int(labels[0])


def _several(
    values: Mapping[str, Array], label: Any, layouts: Mapping[str, InputLayout], config: ModelConfig, where: str
) -> Iterator[tuple[Sample, int | None]]:
    counts = {name: layouts[name].count(array.dtype, array.shape, where) for name, array in values.items()}
    labels = None if label is None else check_labels(np.atleast_1d(np.asarray(label)), config, where)
    if len(set(counts.values())) != 1 or (labels is not None and len(labels) not in counts.values()):
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        labelled = "" if labels is None else f", labels {len(labels)}"
        raise BuildError(f"{where}: different numbers of samples ({told}{labelled}): yield as many of each")
    for row in range(next(iter(counts.values()))):
        sample = {}
        for name, array in values.items():
            one = array[row : row + 1] if layouts[name].keeps_row(array.ndim) else array[row]
            sample[name] = layouts[name].sample(one, where)
        yield sample, None if labels is None else int(labels[row])
