"""How a picture becomes a model's input tensor, as data: read from a configuration, checked at birth.

The fields are those of `preprocess` in a model's `config.yaml`; in `config.pbtxt` and in the protocol's model configuration
each is a parameter `headrace.preprocess.<field>` whose string value is the same in JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from headrace.core.errors import ConfigError, Finding

PARAMETER_PREFIX = "headrace.preprocess."

Color = Literal["rgb", "gray"]
Interpolation = Literal["bilinear", "bicubic"]
Layout = Literal["nchw", "nhwc"]
Side = Literal["client", "server"]


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """Decode, resize, crop the centre, (pixel - mean) / std, order the dimensions.

    Attributes:
        input: the model's input that takes the picture; empty for a model with only one.
        color: "rgb" (three channels) or "gray" (one).
        resize_short_side: pixels of the shorter side after resizing; the ratio of the sides is kept.
        crop: (height, width) in pixels, cut from the centre after resizing.
        interpolation: "bilinear" or "bicubic", both with a support that grows when the picture shrinks.
        mean: subtracted from each pixel (0..255); one number, or one a channel.
        std: divides what is left; one number, or one a channel.
        layout: "nchw" or "nhwc".
        by: who does it, "client" or "server"; a server takes decoded pixels.
        source: (height, width) of the pixels that the server takes, None where they are as large as the crop.
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
        findings = _doubts(self)
        if findings:
            raise ConfigError(findings)

    @property
    def channels(self) -> int:
        """3 for "rgb", 1 for "gray"."""
        return 3 if self.color == "rgb" else 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of one picture's tensor, with a batch dimension of 1 in front."""
        height, width = self.crop
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Height, width and channels of the pixels that the server takes, where it is the one who prepares them."""
        return (*(self.source or self.crop), self.channels)

    def window(self, height: int, width: int) -> tuple[float, float, float, float]:
        """What of a picture ends up in the crop: left, top, right, bottom in its own pixels.

        Resizing the window to `crop` is resizing the whole picture and cutting out the centre. The longer side after resizing
        is rounded down, as torchvision does.
        """
        short = self.resize_short_side
        if width <= height:
            resized_width, resized_height = short, short * height // width
        else:
            resized_width, resized_height = short * width // height, short
        crop_height, crop_width = self.crop
        left, top = (resized_width - crop_width) // 2, (resized_height - crop_height) // 2
        across, down = width / resized_width, height / resized_height
        # Rounding may put an edge a hair outside the picture, which Pillow refuses.
        right, bottom = min((left + crop_width) * across, width), min((top + crop_height) * down, height)
        return left * across, top * down, right, bottom

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "preprocess") -> Self:
        """The recipe that a `preprocess` section holds; fields left out have their defaults.

        Args:
            mapping: field names and values as YAML or JSON gives them.
            where: what a finding says of the place, e.g. a file's name.

        Raises:
            ConfigError: unknown fields, wrong types, values out of range; every finding at once.
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
        """The recipe in a model's parameters, or None if they hold nothing of `headrace.preprocess`.

        Args:
            parameters: names to {"string_value": text}, as the protocol's model configuration shows them, or to text.
            where: what a finding says of the place.

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
    """The value of a parameter of a model's configuration: JSON, or a bare word such as rgb."""
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


def _pair_or_none(value: Any) -> tuple[int, int] | None:
    return None if value is None else _pair(value)


def _numbers(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        raise ValueError("write one number, or a list of one number a channel")
    return tuple(float(n) for n in numbers)


def _text(value: Any) -> str:
    # A tensor may be called 0 or 1 (exporters do that), and JSON reads such a parameter as a number.
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
    "source": _pair_or_none,
}


def _doubts(recipe: ImageRecipe) -> list[Finding]:
    """What is wrong with values that have the right types."""
    findings: list[Finding] = []

    def doubt(message: str, cure: str) -> None:
        findings.append(Finding("preprocess", None, message, cure))

    if max(recipe.crop) > recipe.resize_short_side:
        doubt(
            f"crop {list(recipe.crop)} is larger than the picture after resize_short_side {recipe.resize_short_side}",
            "crop at most what resizing leaves",
        )
    for name, values in (("mean", recipe.mean), ("std", recipe.std)):
        if len(values) not in (1, recipe.channels):
            doubt(f"{name} has {len(values)} numbers", f"write one number, or {recipe.channels} for {recipe.color}")
    if 0.0 in recipe.std:
        doubt("std divides the pixels and cannot be 0", "write 1.0 to leave them as they are")
    return findings
