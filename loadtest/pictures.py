"""Photographs that scikit-learn ships, as the tensors that `efficientnet_lite0` takes, and what is on them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np
from PIL import Image, ImageOps

from loadtest.protocol import Array

SIDE, SHORT_SIDE = 224, 256
_SHORT_SIDES = (240, 256, 288)
_SHOWN = (("china.jpg", 698), ("flower.jpg", 985))


@dataclass(frozen=True, slots=True, eq=False)
class Photograph:
    """One picture.

    Attributes:
        name: the file.
        pixels: FP32 `[1, 3, 224, 224]`, (pixel - 127) / 128, as the model wants them.
        class_index: the ImageNet class of what it shows.
    """

    name: str
    pixels: Array
    class_index: int


def photographs() -> list[Photograph]:
    """A palace and a daisy."""
    return [Photograph(name, _pixels(name), index) for name, index in _SHOWN]


def album() -> list[Photograph]:
    """The same from nearer and farther, and mirrored: what people send is never the same picture twice."""
    return [
        Photograph(name, _pixels(name, short_side, mirrored), index)
        for name, index in _SHOWN
        for short_side in _SHORT_SIDES
        for mirrored in (False, True)
    ]


def _pixels(name: str, short_side: int = SHORT_SIDE, mirrored: bool = False) -> Array:
    with as_file(files("sklearn.datasets") / "images" / name) as path, Image.open(path) as opened:
        picture = ImageOps.mirror(opened.convert("RGB")) if mirrored else opened.convert("RGB")
    scale = short_side / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    cropped = picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + SIDE, top + SIDE))
    pixels = (np.asarray(cropped, dtype=np.float32) - 127) / 128
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
