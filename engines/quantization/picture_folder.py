"""Samples from a folder of pictures, each brought into the model's input by its own `preprocess`.

calibration/*.jpg                        pictures
calibration/<class>/*.jpg                pictures with labels: the class's number, or its name in the label file
calibration/labels.csv                   labels as lines of "file,class", for pictures in whatever folders
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import BuildError
from engines.quantization.model_inputs import InputLayout, check_labels, class_names
from engines.quantization.samples import Sample, Samples, content_digest
from server.config.model_files import read_labels, within
from server.core.errors import BadRequest, ConfigError
from server.core.model_config import ModelConfig
from server.pipelines.image import decode, prepare
from server.pipelines.recipe import ImageRecipe

Array = npt.NDArray[Any]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
LABEL_FILE = "labels.csv"

# What is prepared once is kept as far as it fits in here: samples are passed over many times.
_KEPT_BYTES = 256 << 20
_LARGEST_FILE_BYTES = 256 << 20
_PIXEL_TYPES = ("FP32", "FP16", "FP64", "UINT8")


def open_pictures(
    path: Path, folder: Path, layouts: Mapping[str, InputLayout], config: ModelConfig, limit: int
) -> Samples:
    """Samples from the pictures in a folder and the folders below it.

    Args:
        path: the folder of pictures.
        folder: the model's, which has the label file.
        layouts: of the inputs.
        config: complete, with `preprocess`.
        limit: how many pictures are taken at most; which, is told by a hash of their names, and so is their order.

    Raises:
        BuildError: the model takes no pictures, there are none, one cannot be read, or labels name no class.
    """
    where = f"{config.name}: {path.relative_to(folder).as_posix()}/"
    layout, recipe = _recipe(layouts, config, where)
    names = _pictures(path, where)
    # Sorted by a hash: mixed in class and origin whatever the names are, and a new picture hardly changes the choice.
    names = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:limit]
    labels = _labels(names, path, folder, config, where)
    reader = _Pictures(path, folder, names, layout, recipe, where)
    # What one picture becomes tells a change of the code that prepares it.
    told = repr((recipe, layout.datatype.name, layout.model_dims)).encode() + content_digest(reader.read(0))
    digests = [hashlib.sha256(told + _content(path / name, folder, f"{where}{name}")).digest() for name in names]
    name = path.relative_to(folder).as_posix() + "/"
    return Samples(reader.read, digests, name, "pictures", labels=labels, batched=layout.batched)


class _Pictures:
    """Prepares pictures when they are wanted, and keeps the first ones prepared."""

    def __init__(
        self, path: Path, folder: Path, names: list[str], layout: InputLayout, recipe: ImageRecipe, where: str
    ) -> None:
        self._path = path
        self._folder = folder
        self._names = names
        self._layout = layout
        self._recipe = recipe
        self._where = where
        self._kept: dict[int, Array] = {}
        self._kept_bytes = 0

    def read(self, number: int) -> Sample:
        array = self._kept.get(number)
        if array is None:
            array = self._prepared(self._names[number])
            if self._kept_bytes + array.nbytes <= _KEPT_BYTES:
                self._kept[number] = array
                self._kept_bytes += array.nbytes
        return {self._layout.name: array}

    def _prepared(self, name: str) -> Array:
        where = f"{self._where}{name}"
        try:
            pixels = prepare(decode(_content(self._path / name, self._folder, where)), self._recipe)
        except BadRequest as error:
            raise BuildError(f"{where}: {error}") from error
        if self._layout.datatype.name == "UINT8":
            pixels = np.clip(np.rint(pixels), 0, 255)
        array = pixels.astype(self._layout.dtype)
        return self._layout.sample(array if len(self._layout.dims) == array.ndim else array[0], where)


def _recipe(layouts: Mapping[str, InputLayout], config: ModelConfig, where: str) -> tuple[InputLayout, ImageRecipe]:
    """The input that takes the picture, and how, known to go together."""
    if config.preprocess is None:
        cure = "add a `preprocess` section (`headrace.preprocess.*` parameters in a config.pbtxt), or give an .npz"
        raise BuildError(
            f"{where} is a folder, and the configuration does not tell how a picture becomes an input: {cure}"
        )
    recipe = ImageRecipe.from_mapping(config.preprocess.model_dump())
    name = recipe.input or next(iter(layouts))
    others = [other for other, layout in layouts.items() if other != name and not layout.optional]
    if others:
        cure = "give an .npz with an array an input"
        raise BuildError(f"{where}: pictures are no samples for the inputs {', '.join(others)}: {cure}")
    layout = layouts[name]
    if layout.datatype.name not in _PIXEL_TYPES:
        raise BuildError(
            f"{where}: input '{name}' is {layout.datatype.name}, pictures become {', '.join(_PIXEL_TYPES)}: give an .npz"
        )
    shape = recipe.shape[1:] if len(layout.dims) == 3 else recipe.shape
    layout.check(layout.dtype, shape, f"{where}: preprocess makes another tensor than the model takes")
    return layout, recipe


def _pictures(path: Path, where: str) -> list[str]:
    """The pictures' paths below `path`, with "/"."""
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
        found = f"the {others} files there are none" if others else "it is empty"
        raise BuildError(f"{where} has no pictures ({found}): put {', '.join(SUFFIXES)} files there")
    return names


def _content(file: Path, folder: Path, where: str) -> bytes:
    if not within(file, folder):
        raise BuildError(f"{where} is a link that leads out of the model's folder: copy the picture there")
    try:
        size_bytes = file.stat().st_size
        if size_bytes > _LARGEST_FILE_BYTES:
            raise BuildError(f"{where} has {size_bytes} bytes, at most {_LARGEST_FILE_BYTES} are taken: take it out")
        return file.read_bytes()
    except OSError as error:
        raise BuildError(f"{where}: cannot be read: {error.strerror or error}: check the file") from error


def _labels(names: list[str], path: Path, folder: Path, config: ModelConfig, where: str) -> Array | None:
    """The classes of the pictures; None where neither folders nor a file tell them."""
    if (path / LABEL_FILE).is_file():
        told = _label_file(path / LABEL_FILE, where)
        missing = [name for name in names if name not in told]
        if missing:
            raise BuildError(f"{where}{LABEL_FILE} has no line for {missing[0]}: write one for every picture")
        classes = [told[name] for name in names]
    else:
        classes = [name.partition("/")[0] if "/" in name else "" for name in names]
        if not any(classes):
            return None
    numbers = _numbers(folder, config)
    known = {name: numbers(_plain(name)) for name in dict.fromkeys(classes)}
    if (path / LABEL_FILE).is_file() or any(number is not None for number in known.values()):
        strange = [name for name, number in known.items() if number is None]
        if strange:
            cure = "name every class by its number or its line in the label file"
            found = f"'{strange[0]}'" if strange[0] else "a picture outside of them"
            raise BuildError(
                f"{where}: the pictures' classes are told by folders or {LABEL_FILE}, {found} is no class: {cure}"
            )
        return check_labels(np.array([known[name] for name in classes], np.int64), config, where)
    return None


def _numbers(folder: Path, config: ModelConfig) -> Callable[[str], int | None]:
    """Tells the number of a class by its number as text or by its name, None for what is no class."""
    file, count = class_names(config)
    names: tuple[str, ...] = ()
    if file:
        try:
            names = read_labels(folder / file, folder)
        except ConfigError as error:
            raise BuildError(str(error)) from error
    by_name = {_plain(name): number for number, name in reversed(list(enumerate(names)))}

    def number_of(name: str) -> int | None:
        if name.isdecimal() and len(name) < 10 and int(name) < max(count or 10**9, len(names)):
            return int(name)
        return by_name.get(name)

    return number_of


def _plain(name: str) -> str:
    """A class's name as a folder may be called: "Egyptian cat" is "egyptian_cat"."""
    return name.strip().lower().replace("_", " ").replace("/", " ")


def _label_file(file: Path, where: str) -> dict[str, str]:
    told = {}
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            for line, row in enumerate(csv.reader(stream), 1):
                if not row or row in (["file", "class"], ["file", "label"]):
                    continue
                if len(row) != 2:
                    raise BuildError(f"{where}{LABEL_FILE}:{line}: {len(row)} fields, expected two: write file,class")
                told[row[0].strip()] = row[1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BuildError(f"{where}{LABEL_FILE} cannot be read: {error}: write it as UTF-8, file,class") from error
    return told
