"""Image preprocessing as data: the recipe of a configuration, and its resampling tables.

The fields are those of `preprocess` in a model's `config.yaml`. In `config.pbtxt` and in the protocol's model
configuration each is a parameter `headrace.preprocess.<field>` whose string value is the same in JSON.

A resampling table lists for each pixel of the result the source pixels and their weights. The arithmetic is that of
Pillow's `Image.resize` on 8-bit channels (libImaging/Resample.c): the support grows when the image shrinks, weights
are fixed point with 22 bits, and the horizontal pass comes first and is rounded to 8 bits before the vertical one.
Integers give the same bits in NumPy and in a CUDA kernel. They equal Pillow's, except where Pillow begins with the
vertical pass (tall images): then a bilinear result may differ by 1 of 255, a bicubic one by a few where it
overshoots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from headrace.core.errors import ConfigError, Finding

PARAMETER_PREFIX = "headrace.preprocess."

Color = Literal["rgb", "gray"]
Interpolation = Literal["bilinear", "bicubic"]
Layout = Literal["nchw", "nhwc"]
Side = Literal["client", "server"]


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """Preprocessing steps: decode, resize, crop the centre, (pixel - mean) / std, order the dimensions.

    Attributes:
        input: name of the model's image input; "" for a model with a single input.
        color: "rgb" (three channels) or "gray" (one).
        resize_short_side: pixels of the shorter side after resizing; the aspect ratio is preserved.
        crop: (height, width) in pixels, cut from the centre after resizing.
        interpolation: "bilinear" or "bicubic", both with a support that grows when the image shrinks.
        mean: subtracted from each pixel (0..255); one number, or one for each channel.
        std: divisor of the difference; one number, or one for each channel.
        layout: "nchw" or "nhwc".
        by: side that preprocesses, "client" or "server"; a server takes decoded pixels.
        source: (height, width) of the pixels that the server takes, None if they have the size of the crop.
    """

    input: str = ""
    color: Color = "rgb"
    resize_short_side: int = 256
    crop: tuple[int, int] = (224, 224)
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: Layout = "nchw"
    by: Side = "client"
    source: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        findings = _check_values(self)
        if findings:
            raise ConfigError(findings)

    @property
    def channels(self) -> int:
        """3 for "rgb", 1 for "gray"."""
        return 3 if self.color == "rgb" else 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one image's tensor, with a leading batch dimension of 1."""
        height, width = self.crop
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Height, width and channels of the pixels that a server takes if it preprocesses."""
        return (*(self.source or self.crop), self.channels)

    def window(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return the part of an image that becomes the crop: left, top, right, bottom in its own pixels.

        Resizing the window to `crop` equals resizing the whole image and cropping the centre. The longer side after
        resizing is rounded down, as in torchvision.
        """
        short = self.resize_short_side
        if width <= height:
            resized_width, resized_height = short, short * height // width
        else:
            resized_width, resized_height = short * width // height, short
        crop_height, crop_width = self.crop
        left, top = (resized_width - crop_width) // 2, (resized_height - crop_height) // 2
        across, down = width / resized_width, height / resized_height
        # Rounding may move an edge slightly outside the image, which Pillow refuses.
        right, bottom = min((left + crop_width) * across, width), min((top + crop_height) * down, height)
        return left * across, top * down, right, bottom

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "preprocess") -> Self:
        """Read a `preprocess` section; missing fields have their defaults.

        Args:
            mapping: field names and values from YAML or JSON.
            where: location for findings, e.g. a file's name.

        Raises:
            ConfigError: unknown fields, wrong types, values out of range; all findings at once.
        """
        findings = [
            Finding(where, None, f"{key!r} is no field of preprocess", f"write one of {', '.join(_READERS)}")
            for key in mapping
            if key not in _READERS
        ]
        values: dict[str, Any] = {}
        for key, read in _READERS.items():
            if key in mapping:
                try:
                    values[key] = read(mapping[key])
                except ValueError as error:
                    findings.append(Finding(where, None, f"{key} is {mapping[key]!r}", str(error)))
        if findings:
            raise ConfigError(findings)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError([Finding(where, None, f.message, f.cure) for f in error.findings]) from None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], where: str = "parameters") -> Self | None:
        """Read the recipe from a model's parameters; None if none begins with `headrace.preprocess`.

        Args:
            parameters: names to {"string_value": text}, as in the protocol's model configuration, or to text.
            where: location for findings.

        Raises:
            ConfigError: as for `from_mapping`.
        """
        mapping: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name.startswith(PARAMETER_PREFIX):
                text = parameter.get("string_value") if isinstance(parameter, Mapping) else parameter
                mapping[name.removeprefix(PARAMETER_PREFIX)] = parameter_value(text)
        return cls.from_mapping(mapping, where) if mapping else None


def parameter_value(text: Any) -> Any:
    """Parse a parameter of a model's configuration: JSON, or a bare word such as rgb."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _word(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        word = value.lower() if isinstance(value, str) else ""
        if word not in words:
            raise ValueError(f"write {' or '.join(words)}")
        return word

    return read


def _pixels(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("write a whole number of pixels, at least 1")
    return value


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("write [height, width] in pixels")
    height, width = value
    return _pixels(height), _pixels(width)


def _numbers(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        raise ValueError("write one number, or a list of one number a channel")
    return tuple(float(n) for n in numbers)


def _text(value: Any) -> str:
    # Exporters name tensors 0 or 1, and JSON reads such a name as a number.
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError("write the name of an input")
    return str(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "input": _text,
    "color": _word("rgb", "gray"),
    "resize_short_side": _pixels,
    "crop": _pair,
    "interpolation": _word("bilinear", "bicubic"),
    "mean": _numbers,
    "std": _numbers,
    "layout": _word("nchw", "nhwc"),
    "by": _word("client", "server"),
    "source": lambda value: None if value is None else _pair(value),
}


def _check_values(recipe: ImageRecipe) -> list[Finding]:
    """Findings about values that have the right types but do not fit together."""
    findings: list[Finding] = []

    def report(message: str, cure: str) -> None:
        findings.append(Finding("preprocess", None, message, cure))

    if max(recipe.crop) > recipe.resize_short_side:
        report(
            f"crop {list(recipe.crop)} is larger than the picture after resize_short_side {recipe.resize_short_side}",
            "crop at most what resizing leaves",
        )
    for name, values in (("mean", recipe.mean), ("std", recipe.std)):
        if len(values) not in (1, recipe.channels):
            report(f"{name} has {len(values)} numbers", f"write one number, or {recipe.channels} for {recipe.color}")
    if 0.0 in recipe.std:
        report("std divides the pixels and cannot be 0", "write 1.0 to leave them as they are")
    return findings


# 32 bits minus 8 of a pixel and 2 for overshoot.
PRECISION_BITS = 32 - 8 - 2

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Weights along one axis.

    Attributes:
        first: int32 (size,): source index of the first tap of each result pixel. Not monotonic: zero weights at the
            edges are dropped.
        weights: int32 (size, taps), in 1 / 2**PRECISION_BITS; 0 for taps outside of the source.
    """

    first: Ints
    weights: Ints

    @property
    def is_copy(self) -> bool:
        """True if the result is a contiguous run of source pixels, unchanged."""
        steps = np.diff(self.first)
        return self.weights.shape[1] == 1 and bool((self.weights == 1 << PRECISION_BITS).all() and (steps == 1).all())


def axis(source: int, low: float, high: float, size: int, interpolation: str) -> Axis:
    """Compute the weights that resize the span from `low` to `high` to `size` pixels.

    Args:
        source: number of source pixels.
        low, high: bounds of the resized part, in source pixels.
        size: number of result pixels.
        interpolation: "bilinear" or "bicubic".
    """
    # Pillow stores the box in single precision.
    low32, high32 = np.float32(low), np.float32(high)
    scale = float(high32 - low32) / size
    stretch = max(scale, 1.0)
    support = (1.0 if interpolation == "bilinear" else 2.0) * stretch
    kernel = _bilinear if interpolation == "bilinear" else _bicubic
    rows: list[tuple[int, list[int]]] = []
    for pixel in range(size):
        center = float(low32) + (pixel + 0.5) * scale
        start = max(int(center - support + 0.5), 0)
        stop = min(int(center + support + 0.5), source)
        shares = [kernel((index - center + 0.5) / stretch) for index in range(start, stop)]
        total = sum(shares)
        fixed = [_fixed(share / total if total else share) for share in shares]
        while len(fixed) > 1 and fixed[0] == 0:
            start, fixed = start + 1, fixed[1:]
        while len(fixed) > 1 and fixed[-1] == 0:
            fixed.pop()
        rows.append((start, fixed))
    weights = np.zeros((size, max(len(fixed) for _, fixed in rows)), np.int32)
    for pixel, (_, fixed) in enumerate(rows):
        weights[pixel, : len(fixed)] = fixed
    return Axis(np.array([start for start, _ in rows], np.int32), weights)


@dataclass(frozen=True, slots=True, eq=False)
class Resampling:
    """Tables from pixels of a fixed size to the crop of a recipe.

    Attributes:
        down: weights along the height.
        across: weights along the width.
    """

    down: Axis
    across: Axis

    @classmethod
    def of(cls, recipe: ImageRecipe) -> Resampling:
        """Compute the tables of a recipe; a plain copy if it has no source."""
        height, width = recipe.source or recipe.crop
        left, top, right, bottom = (0.0, 0.0, width, height) if recipe.source is None else recipe.window(height, width)
        crop_height, crop_width = recipe.crop
        return cls(
            axis(height, top, bottom, crop_height, recipe.interpolation),
            axis(width, left, right, crop_width, recipe.interpolation),
        )

    @property
    def is_copy(self) -> bool:
        """True if the crop is a part of the pixels, unchanged."""
        return self.down.is_copy and self.across.is_copy


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    """Keys' cubic convolution kernel with a = -0.5."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < 2.0 else 0.0


def _fixed(share: float) -> int:
    return math.trunc(share * (1 << PRECISION_BITS) + (0.5 if share >= 0 else -0.5))
