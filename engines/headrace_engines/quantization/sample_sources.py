"""Reads samples from the three kinds of sources of a configuration.

folder of pictures      pre-processed by the model's `preprocess` section
    calibration/*.jpg                        pictures
    calibration/<class>/*.jpg                pictures with labels: number of the class, or its name in the label file
    calibration/labels.csv                   labels as lines of "file,class", for pictures in any folder
.npz                    an array for each input, samples along the first dimension, and labels if present. Only the selected
                        samples are read into memory: the file may be larger than the memory.
file.py:function        a function of the model's owner; its code runs in the builder, never in the server:

    def samples():
        for picture, label in pairs:
            yield {"image": picture, "label": label}      # or the array alone, for a model with a single input

    Its samples are written to a temporary file, because they are read more than once and may not fit into memory.
"""

from __future__ import annotations

import csv
import hashlib
import os
import sys
import tempfile
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from headrace.config.documents import within
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import filename_problem, read_labels
from headrace.core.errors import BadRequest, ConfigError
from headrace.inference.pipelines.image import decode, prepare
from headrace.inference.pipelines.recipe import ImageRecipe

from headrace_engines.errors import BuildError
from headrace_engines.quantization.samples import (
    SEED,
    InputLayout,
    Sample,
    Samples,
    check_labels,
    class_names,
    content_digest,
    input_layouts,
)


def open_samples(source: str, folder: Path, config: ModelConfig, limit: int) -> Samples:
    """Open the samples that a configuration names.

    Args:
        source: folder of pictures, .npz file, or "file.py:function"; a path relative to `folder` and below it.
        folder: folder of the model.
        config: completed configuration, with inputs and preprocessing.
        limit: largest number of samples. Pictures and arrays are a fixed random selection in a fixed random order, because files
            and data sets are often sorted by class; a function's samples are the first ones.

    Raises:
        BuildError: the source is missing, unreadable, outside of the folder, or does not fit the model.
    """
    path_text, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    path = _inside(path_text, folder, config.name)
    layouts = input_layouts(config)
    if function:
        return open_reader(path, function, layouts, config, limit)
    if path.is_dir():
        return open_pictures(path, folder, layouts, config, limit)
    if path.suffix == ".npz":
        return open_arrays(path, layouts, config, limit)
    kinds = "a folder of pictures, an .npz, or file.py:function"
    raise BuildError(f"{config.name}: samples cannot be read from '{source}': write {kinds} in the model's folder")


def _inside(text: str, folder: Path, model: str) -> Path:
    """Return the path of samples after a check that it exists in the folder."""
    problem = filename_problem(text)
    if problem is not None:
        raise BuildError(f"{model}: samples cannot be read: {problem[0]}: {problem[1]}")
    path = folder / text
    if not path.exists():
        cure = "put a folder of pictures, an .npz or file.py:function there, or correct the path"
        raise BuildError(f"{model}: the samples '{text}' are not in the model's folder {folder}: {cure}")
    if not within(path, folder):
        raise BuildError(f"{model}: '{text}' is a link that leads out of the model's folder: copy the samples into it")
    return path


Array = npt.NDArray[Any]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
LABEL_FILE = "labels.csv"
# Size of the cache of prepared pictures: samples are read many times.
_CACHE_BYTES = 256 << 20
_LARGEST_FILE_BYTES = 256 << 20
_PIXEL_TYPES = ("FP32", "FP16", "FP64", "UINT8")


def open_pictures(
    path: Path, folder: Path, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int
) -> Samples:
    """Open the pictures in a folder and the folders below it.

    Args:
        path: folder of pictures.
        folder: folder of the model, which has the label file.
        layouts: layouts of the inputs by name.
        config: completed configuration with `preprocess`.
        limit: largest number of pictures; a hash of their names selects and orders them.

    Raises:
        BuildError: the model has no input for pictures, there are none, one cannot be read, or a label is not a class.
    """
    location = f"{config.name}: {path.relative_to(folder).as_posix()}/"
    layout, recipe = _recipe(layouts, config, location)
    names = _pictures(path, location)
    # Sorted by a hash: classes are mixed for any names, and a new picture hardly changes the selection.
    names = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:limit]
    labels = _labels(names, path, folder, config, location)
    reader = _Pictures(path, folder, names, layout, recipe, location)
    # The prepared first picture is part of the digest: the digest changes with the code of the preparation.
    recipe_bytes = repr((recipe, layout.datatype.name, layout.model_dims)).encode() + content_digest(reader.read(0))
    digests = [
        hashlib.sha256(recipe_bytes + _content(path / name, folder, f"{location}{name}")).digest() for name in names
    ]
    name = path.relative_to(folder).as_posix() + "/"
    return Samples(reader.read, digests, name, "pictures", labels=labels, batched=layout.batched)


@dataclass(slots=True)
class _Pictures:
    """Prepares pictures on use and caches the first ones."""

    path: Path
    folder: Path
    names: list[str]
    layout: InputLayout
    recipe: ImageRecipe
    location: str
    cache: dict[int, Array] = field(default_factory=dict)
    cache_bytes: int = 0

    def read(self, number: int) -> Sample:
        array = self.cache.get(number)
        if array is None:
            array = self._prepared(self.names[number])
            if self.cache_bytes + array.nbytes <= _CACHE_BYTES:
                self.cache[number] = array
                self.cache_bytes += array.nbytes
        return {self.layout.name: array}

    def _prepared(self, name: str) -> Array:
        location = f"{self.location}{name}"
        try:
            pixels = prepare(decode(_content(self.path / name, self.folder, location)), self.recipe)
        except BadRequest as error:
            raise BuildError(f"{location}: {error}") from error
        if self.layout.datatype.name == "UINT8":
            pixels = np.clip(np.rint(pixels), 0, 255)
        array = pixels.astype(self.layout.dtype)
        return self.layout.sample(array if len(self.layout.dims) == array.ndim else array[0], location)


def _recipe(layouts: Mapping[str, InputLayout], config: ModelConfig, location: str) -> tuple[InputLayout, ImageRecipe]:
    """Return the input of the picture and its preparation, after a check that they match."""
    if config.preprocess is None:
        cure = "add a `preprocess` section (`headrace.preprocess.*` parameters in a config.pbtxt), or give an .npz"
        raise BuildError(
            f"{location} is a folder of pictures, but the configuration has no preparation of pictures: {cure}"
        )
    recipe = ImageRecipe.from_mapping(config.preprocess.model_dump())
    name = recipe.input or next(iter(layouts))
    others = [other for other, layout in layouts.items() if other != name and not layout.optional]
    if others:
        cure = "write an .npz with an array for each input"
        raise BuildError(f"{location}: pictures have no data for the inputs {', '.join(others)}: {cure}")
    layout = layouts[name]
    if layout.datatype.name not in _PIXEL_TYPES:
        raise BuildError(
            f"{location}: input '{name}' is {layout.datatype.name}, pictures become {', '.join(_PIXEL_TYPES)}: write an .npz"
        )
    shape = recipe.shape[1:] if len(layout.dims) == 3 else recipe.shape
    layout.check(layout.dtype, shape, f"{location}: preprocess does not match the model")
    return layout, recipe


def _pictures(path: Path, location: str) -> list[str]:
    """Return the paths of the pictures relative to `path`, with "/"."""
    names = []
    others = 0
    for folder, below, files in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        for file in files:
            if file.startswith("."):
                continue
            if file.lower().endswith(SUFFIXES):
                names.append((Path(folder) / file).relative_to(path).as_posix())
            else:
                others += 1
    if not names:
        reason = f"{others} files of other types" if others else "it is empty"
        raise BuildError(f"{location} has no pictures ({reason}): put {', '.join(SUFFIXES)} files there")
    return names


def _content(file: Path, folder: Path, location: str) -> bytes:
    if not within(file, folder):
        raise BuildError(f"{location} is a link that leads out of the model's folder: copy the picture there")
    try:
        size_bytes = file.stat().st_size
        if size_bytes > _LARGEST_FILE_BYTES:
            raise BuildError(f"{location} has {size_bytes} bytes, at most {_LARGEST_FILE_BYTES} are allowed: remove it")
        return file.read_bytes()
    except OSError as error:
        raise BuildError(f"{location}: cannot be read: {error.strerror or error}: check the file") from error


def _labels(names: list[str], path: Path, folder: Path, config: ModelConfig, location: str) -> Array | None:
    """Return the classes of the pictures; None if neither folders nor a file have them."""
    if (path / LABEL_FILE).is_file():
        by_file = _label_file(path / LABEL_FILE, location)
        missing = [name for name in names if name not in by_file]
        if missing:
            raise BuildError(f"{location}{LABEL_FILE} has no line for {missing[0]}: write one for every picture")
        classes = [by_file[name] for name in names]
    else:
        classes = [name.partition("/")[0] if "/" in name else "" for name in names]
        if not any(classes):
            return None
    numbers = _numbers(folder, config)
    class_numbers = {name: numbers(_normalised_class(name)) for name in dict.fromkeys(classes)}
    if (path / LABEL_FILE).is_file() or any(number is not None for number in class_numbers.values()):
        strange = [name for name, number in class_numbers.items() if number is None]
        if strange:
            cure = "name every class by its number or its line in the label file"
            culprit = f"'{strange[0]}'" if strange[0] else "a picture outside of them"
            raise BuildError(
                f"{location}: {culprit} is not a class of the model (classes come from folders or {LABEL_FILE}): {cure}"
            )
        return check_labels(np.array([class_numbers[name] for name in classes], np.int64), config, location)
    return None


def _numbers(folder: Path, config: ModelConfig) -> Callable[[str], int | None]:
    """Return a function from the name or number of a class, as text, to its number; it returns None for other text."""
    file, count = class_names(config)
    names: tuple[str, ...] = ()
    if file:
        try:
            names = read_labels(folder / file, folder)
        except ConfigError as error:
            raise BuildError(str(error)) from error
    by_name = {_normalised_class(name): number for number, name in reversed(list(enumerate(names)))}

    def number_of(name: str) -> int | None:
        if name.isdecimal() and len(name) < 10 and int(name) < max(count or 10**9, len(names)):
            return int(name)
        return by_name.get(name)

    return number_of


def _normalised_class(name: str) -> str:
    """Return the name of a class in the form of folder names: "Egyptian cat" equals "egyptian_cat"."""
    return name.strip().lower().replace("_", " ").replace("/", " ")


def _label_file(file: Path, location: str) -> dict[str, str]:
    classes = {}
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            for line, row in enumerate(csv.reader(stream), 1):
                if not row or row in (["file", "class"], ["file", "label"]):
                    continue
                if len(row) != 2:
                    raise BuildError(
                        f"{location}{LABEL_FILE}:{line}: {len(row)} fields, expected two: write file,class"
                    )
                classes[row[0].strip()] = row[1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BuildError(f"{location}{LABEL_FILE} cannot be read: {error}: write it as UTF-8, file,class") from error
    return classes


LABELS = ("labels", "label")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Header(NamedTuple):
    """Header of an array in the file."""

    shape: tuple[int, ...]
    column_major: bool
    dtype: np.dtype[Any]


def open_arrays(path: Path, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int) -> Samples:
    """Samples from a file that `numpy.savez` wrote.

    Args:
        path: the file. It has an array for every input by its name; for a model with a single input that array may have any
            name. `labels` or `label`, if it is there, has the number of every sample's class.
        layouts: of the inputs.
        config: complete.
        limit: largest number of samples, a fixed random selection.

    Raises:
        BuildError: the file cannot be read, an input is missing, or an array does not fit.
    """
    location = f"{config.name}: {path.name}"
    try:
        with zipfile.ZipFile(path) as archive:
            return _ArrayFile(archive, layouts, config, location).samples(path.name, limit)
    # Errors of a damaged archive.
    except (OSError, ValueError, EOFError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        cure = "write it with numpy.savez, without object arrays"
        raise BuildError(f"{location} is not a readable .npz ({error}): {cure}") from error


class _ArrayFile:
    """Reader of one open archive."""

    def __init__(
        self, archive: zipfile.ZipFile, layouts: Mapping[str, InputLayout], config: ModelConfig, location: str
    ) -> None:
        self._archive = archive
        self._layouts = layouts
        self._config = config
        self._location = location
        self._headers = {name.removesuffix(".npy"): self._header(name) for name in archive.namelist()}

    def samples(self, name: str, limit: int) -> Samples:
        arrays = self._assigned()
        count = self._count(arrays)
        chosen = [int(number) for number in np.random.default_rng(SEED).permutation(count)[:limit]]
        labels = self._labels(count)
        samples: list[Sample] = [{} for _ in chosen]
        for tensor, array in arrays.items():
            layout = self._layouts[tensor]
            keeps_row = layout.keeps_row(len(self._headers[array].shape))
            rows = self._rows(array, chosen)
            for number, row, sample in zip(chosen, rows, samples, strict=True):
                values = row[None] if keeps_row else row
                sample[tensor] = layout.sample(values, f"{self._location}: sample {number} of '{array}'")
        return Samples(
            samples.__getitem__,
            [content_digest(sample) for sample in samples],
            name,
            labels=None if labels is None else labels[chosen],
            batched=self._config.max_batch_size > 0,
        )

    def _assigned(self) -> dict[str, str]:
        """Return the name of the array by input."""
        arrays = {tensor: tensor for tensor in self._layouts if tensor in self._headers}
        missing = [name for name, layout in self._layouts.items() if name not in arrays and not layout.optional]
        others = [name for name in self._headers if name not in LABELS and name not in arrays]
        if len(self._layouts) == len(missing) == len(others) == 1:
            return {missing[0]: others[0]}
        if missing:
            names = ", ".join(self._headers) or "nothing"
            raise BuildError(
                f"{self._location} has no array for {', '.join(missing)} (it holds {names}): add one of that name"
            )
        return arrays

    def _count(self, arrays: Mapping[str, str]) -> int:
        counts = {}
        for tensor, array in arrays.items():
            header = self._headers[array]
            counts[array] = self._layouts[tensor].count(
                header.dtype, header.shape, f"{self._location}: array '{array}'"
            )
        if len(set(counts.values())) != 1:
            counts_text = ", ".join(f"'{array}' {count}" for array, count in counts.items()) or "none"
            raise BuildError(
                f"{self._location}: the arrays differ in their number of samples ({counts_text}): write as many of each"
            )
        count = next(iter(counts.values()))
        if not count:
            raise BuildError(f"{self._location} has no samples, its arrays are empty: write at least one")
        return count

    def _labels(self, count: int) -> Array | None:
        name = next((name for name in LABELS if name in self._headers and name not in self._layouts), "")
        if not name:
            return None
        shape = self._headers[name].shape
        if shape[:1] != (count,) or len(shape) > 2 or shape[1:] not in ((), (1,)):
            cure = f"write one number a sample, [{count}]"
            raise BuildError(
                f"{self._location}: array '{name}' has the shape {list(shape)} for {count} samples: {cure}"
            )
        labels = np.stack(self._rows(name, range(count)))
        return check_labels(labels, self._config, f"{self._location}: array '{name}'")

    def _header(self, member: str) -> _Header:
        with self._archive.open(member) as stream:
            return self._read_header(stream)

    def _read_header(self, stream: IO[bytes]) -> _Header:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"version {version} of the array format")
        header = _Header(*_HEADERS[version](stream))
        if header.dtype.hasobject:
            raise ValueError("an array of Python objects")
        return header

    def _rows(self, array: str, numbers: Sequence[int]) -> list[Array]:
        """Return rows by index, in order; the file is read once, from its start to the last of the rows."""
        with self._archive.open(f"{array}.npy") as stream:
            header = self._read_header(stream)
            if header.column_major:
                # Rows are not contiguous: the whole array must be read.
                values = np.frombuffer(stream.read(), header.dtype).reshape(header.shape, order="F")
                return [np.ascontiguousarray(values[number]) for number in numbers]
            shape = header.shape[1:]
            row_bytes = header.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            rows = dict.fromkeys(numbers, b"")
            for number in range(max(rows) + 1):
                content = stream.read(row_bytes)
                if len(content) < row_bytes:
                    raise EOFError("the file is truncated")
                if number in rows:
                    rows[number] = content
            return [np.frombuffer(rows[number], header.dtype).reshape(shape) for number in numbers]


def open_reader(
    path: Path, function: str, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int
) -> Samples:
    """Read samples from a Python function without arguments.

    Args:
        path: file with the function.
        function: name of the function. It returns an iterable of dicts with arrays by input name, or of arrays for a model with a
            single input. Each item is one sample, or several with a leading dimension. `label` (or `labels`) in a dict is the
            number of the class.
        layouts: layouts of the inputs by name.
        config: completed configuration.
        limit: largest number of samples; the iteration ends there.

    Raises:
        BuildError: the code raises an error (reported with file and line), or a sample does not fit.
    """
    location = f"{path.name}:{function}"
    store = _SampleFile()
    labels: list[int] = []
    for number, item in enumerate(_call(path, function)):
        for sample, label in _samples_of(item, layouts, config, f"{location}: item {number}"):
            if len(store) < limit:
                store.add(sample)
                labels += [] if label is None else [label]
        if len(store) >= limit:
            break
    if not len(store):
        raise BuildError(f"{location} yields no samples: yield at least one")
    if labels and len(labels) != len(store):
        raise BuildError(
            f"{location} yields labels for {len(labels)} of {len(store)} samples: yield a label for every sample, or for none"
        )
    batched = config.max_batch_size > 0
    checked = check_labels(np.array(labels), config, location) if labels else None
    return Samples(store.read, store.digests, location, labels=checked, batched=batched)


class _SampleFile:
    """Samples in a temporary file, removed at the end of the process."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="headrace-samples-")  # noqa: SIM115
        # By input the offset in the file, or an array of text.
        self._records: list[dict[str, int | Array]] = []
        self.digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, sample: Sample) -> None:
        record: dict[str, int | Array] = {}
        try:
            for name, array in sample.items():
                record[name] = array if array.dtype == object else self._file.seek(0, os.SEEK_END)
                if array.dtype != object:
                    np.save(self._file, array)
            self._file.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            raise BuildError(
                f"the samples cannot be written to {folder}: {error.strerror or error}: make room there"
            ) from error
        self.digests.append(content_digest(sample))
        self._records.append(record)

    def read(self, number: int) -> Sample:
        return {name: self._load(value) for name, value in self._records[number].items()}

    def _load(self, value: int | Array) -> Array:
        if isinstance(value, int):
            self._file.seek(value)
            return np.asarray(np.load(self._file))
        return value


def _call(path: Path, function: str) -> Iterator[Any]:
    """Yield the items of the function; errors of its code are raised with file and line."""
    name = f"headrace_samples_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and others look up their module by its name.
    sys.modules[name] = module
    try:
        # Not imported: an import writes a cache into the model's folder.
        code = _guarded(path, lambda: compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
        _guarded(path, exec, code, module.__dict__)
        callable_ = getattr(module, function, None)
        if not callable(callable_):
            functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise BuildError(
                f"{path.name} has no function '{function}' (it has {', '.join(functions) or 'none'}): define it"
            )
        items = _guarded(path, callable_)
        if not hasattr(items, "__iter__") or isinstance(items, dict | np.ndarray):
            type_name = type(items).__name__
            raise BuildError(
                f"{path.name}:{function} returns one {type_name}, expected an iterable of samples: use yield, or return a list"
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
    except (Exception, SystemExit) as error:  # code of the model's owner can raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f":{frames[-1].lineno}" if frames else ""
        message = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, message = f":{error.lineno}", error.msg
        raise BuildError(f"{path.name}{line}: {message}: correct the code that reads samples") from error


def _samples_of(
    item: Any, layouts: Mapping[str, InputLayout], config: ModelConfig, location: str
) -> Iterator[tuple[Sample, int | None]]:
    """Yield the samples of one item, one or several, each with its label or None."""
    arrays = dict(item) if isinstance(item, Mapping) else {next(iter(layouts)): item}
    if not isinstance(item, Mapping) and len(layouts) != 1:
        cure = f"yield a dict with {', '.join(layouts)}"
        raise BuildError(
            f"{location}: the item is one {type(item).__name__}, the model has {len(layouts)} inputs: {cure}"
        )
    label = next((arrays.pop(name) for name in LABELS if name in arrays and name not in layouts), None)
    unknown = sorted(str(name) for name in set(arrays) - set(layouts))
    missing = [name for name, layout in layouts.items() if name not in arrays and not layout.optional]
    if unknown or missing or not arrays:
        names = ", ".join(map(str, arrays)) or "nothing"
        raise BuildError(
            f"{location}: the model's inputs are {', '.join(layouts)}, found {names}: yield arrays of those names"
        )
    try:
        values = {name: np.asarray(value) for name, value in arrays.items()}
    except (ValueError, TypeError) as error:
        raise BuildError(f"{location}: a value cannot become an array ({error}): yield arrays") from error
    first = next(iter(values))
    layout = layouts[first]
    several = values[first].ndim == len(layout.dims) + 1 or layout.keeps_row(values[first].ndim)
    labels = None
    if label is not None:
        flat = np.atleast_1d(np.asarray(label)) if several else np.asarray(label).reshape(1)
        labels = check_labels(flat, config, location)
    for number, row in enumerate(_rows(values, labels, layouts, location) if several else [values]):
        sample = {name: layouts[name].sample(array, location) for name, array in row.items()}
        yield sample, None if labels is None else int(labels[number])


def _rows(
    values: Mapping[str, Array], labels: Array | None, layouts: Mapping[str, InputLayout], location: str
) -> Iterator[dict[str, Array]]:
    """Yield the arrays of each sample of an item with several."""
    counts = {name: layouts[name].count(array.dtype, array.shape, location) for name, array in values.items()}
    if len(set(counts.values())) != 1 or (labels is not None and len(labels) not in counts.values()):
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        labelled = "" if labels is None else f", labels {len(labels)}"
        raise BuildError(f"{location}: different numbers of samples ({counts_text}{labelled}): yield as many of each")
    for row in range(next(iter(counts.values()))):
        yield {
            name: array[row : row + 1] if layouts[name].keeps_row(array.ndim) else array[row]
            for name, array in values.items()
        }
