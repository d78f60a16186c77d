"""Options and tensor specs of the built-in steps.

Each step has a `StepKind`: the readers of its options, and the specs of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.config.config_base import Problem
from headrace.core.errors import ConfigError
from headrace.core.tensor import BY_NAME, TensorSpec
from headrace.inference.pipelines.recipe import ImageRecipe

RESIZE = "resize"
"""Name of the step, and key of its options in those of a `decode_image` that it is joined with."""

# As in headrace.inference.pipelines.image: the size of present cameras.
DEFAULT_MAX_PIXELS = 50_000_000
DEFAULT_MAX_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of the step.

    Attributes:
        color: "rgb" or "gray".
        max_pixels: largest width times height.
        max_bytes: largest file.
        scaled: decode large JPEG images at 1/2, 1/4 or 1/8 of their size if the next step makes them smaller still.
        processes: number of processes that decode; 0: half of the cores.
        timeout_s: seconds after which a process that decodes one image counts as hung and is killed.
    """

    color: str = "rgb"
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_bytes: int = DEFAULT_MAX_BYTES
    scaled: bool = False
    processes: int = 0
    timeout_s: int = 10

    @property
    def channels(self) -> int:
        """3 for "rgb", 1 for "gray"."""
        return 3 if self.color == "rgb" else 1


@dataclass(frozen=True, slots=True)
class NmsOptions:
    """Options of the step.

    Attributes:
        iou_threshold: boxes that overlap more than this are the same object, 0 to 1.
        score_threshold: boxes at or below this score are dropped first.
        max_boxes: most boxes in the result.
        format: "corners" (x1, y1, x2, y2; or with y first, which is the same) or "center" (x, y, width, height).
    """

    iou_threshold: float = 0.5
    score_threshold: float = 0.0
    max_boxes: int = 100
    format: str = "corners"


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """Options of the step.

    Attributes:
        file: path of the tokenizer.json, relative to the pipeline's folder.
        max_length: tokens after which a text is cut; 0 for no limit.
        multiple_of: the length is padded up to a multiple of this.
        pad_to: every text is padded to this length; 0 pads to the longest text of the request.
        pad_id: id of the padding token.
        special_tokens: add the special tokens of the tokenizer's template, such as [CLS].
    """

    file: str = "tokenizer.json"
    max_length: int = 0
    multiple_of: int = 1
    pad_to: int = 0
    pad_id: int = 0
    special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of `top_k`.

    Attributes:
        k: number of classes, best first.
        softmax: turn the scores into probabilities first.
        labels: file with one class name a line, relative to the pipeline's folder; "" for none.
    """

    k: int = 5
    softmax: bool = False
    labels: str = ""


@dataclass(frozen=True, slots=True)
class SoftmaxOptions:
    """`softmax` has no options."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """A checked built-in step.

    Attributes:
        kind: name of the built-in step.
        options: options as configured; checked.
        inputs, outputs: specs by name, without a batch dimension.
        batches: False for a step whose results have a size of their own for each request, so that rows cannot be joined.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    batches: bool = True


class InvalidOptionError(ValueError):
    """An option has a wrong value; the text says what is allowed."""


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidOptionError(f"write a whole number from {low} to {high}")
        return value

    return read


def _fraction(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InvalidOptionError("write a number from 0 to 1")
    return float(value)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise InvalidOptionError("write a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError("write true or false")
    return value


def _word(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in words:
            raise InvalidOptionError(f"write {' or '.join(words)}")
        return str(value)

    return read


def _file(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else [""]
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidOptionError("write the path of a file in the pipeline's folder")
    return str(value)


_READERS: dict[str, tuple[type, dict[str, Callable[[Any], Any]]]] = {
    "decode_image": (
        DecodeOptions,
        {
            "color": _word("rgb", "gray"),
            "max_pixels": _integer(1, 1_000_000_000),
            "max_bytes": _integer(1, 2**31 - 1),
            "scaled": _flag,
            "processes": _integer(0, 256),
            "timeout_s": _integer(1, 3600),
        },
    ),
    "tokenize": (
        TokenizeOptions,
        {
            "file": _file,
            "max_length": _integer(0, 1_000_000),
            "multiple_of": _integer(1, 65536),
            "pad_to": _integer(0, 1_000_000),
            "pad_id": _integer(0, 2**31 - 1),
            "special_tokens": _flag,
        },
    ),
    "softmax": (SoftmaxOptions, {}),
    "top_k": (RankOptions, {"k": _integer(1, 1_000_000), "softmax": _flag, "labels": _file}),
    "nms": (
        NmsOptions,
        {
            "iou_threshold": _fraction,
            "score_threshold": _number,
            "max_boxes": _integer(1, 100_000),
            "format": _word("corners", "center"),
        },
    ),
}


def read_options(kind: str, options: Mapping[str, Any]) -> Any:
    """Return the checked options of a built-in step, e.g. `DecodeOptions`; an `ImageRecipe` for `resize`.

    Raises:
        ConfigError: as `ImageRecipe.from_mapping`.
        KeyError, InvalidOptionError: an option is unknown or invalid; `option_problems` finds these first.
    """
    if kind == RESIZE:
        return ImageRecipe.from_mapping(options, RESIZE)
    options_type, readers = _READERS[kind]
    return options_type(**{name: readers[name](value) for name, value in options.items() if name != RESIZE})


def option_problems(kind: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the options of a built-in step; their locations begin at the option's name."""
    if kind == RESIZE:
        try:
            ImageRecipe.from_mapping(options, RESIZE)
        except ConfigError as error:
            for finding in error.findings:
                yield Problem((), finding.message, finding.cure)
        for name in ("by", "source", "input"):
            if name in options:
                yield Problem((name,), f"{name} is not an option of the step resize", f"remove {name}")
        return
    readers = _READERS[kind][1]
    for name, value in options.items():
        if name not in readers:
            names = ", ".join(readers) or "none"
            yield Problem((name,), f"{name!r} is no option of {kind}", f"its options: {names}")
            continue
        try:
            readers[name](value)
        except InvalidOptionError as error:
            yield Problem((name,), f"{name} is {value!r}", str(error))
    if kind == "tokenize":
        yield from _length_problems(options)


def _length_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    pad_to, max_length = options.get("pad_to", 0), options.get("max_length", 0)
    if isinstance(pad_to, int) and isinstance(max_length, int) and 0 < pad_to < max_length:
        yield Problem(("pad_to",), f"pad_to {pad_to} is less than max_length {max_length}", "write max_length or more")


def _specs(*tensors: tuple[str, str, tuple[int, ...]], optional: tuple[str, ...] = ()) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, BY_NAME[datatype], dims, name in optional) for name, datatype, dims in tensors}


def step_settings(kind: str, options: Mapping[str, Any]) -> StepSettings:
    """Return the tensor specs of a built-in step with checked options."""
    if kind == "decode_image":
        image = _specs(("image", "BYTES", (1,)))
        if RESIZE in options:
            recipe: ImageRecipe = read_options(RESIZE, options[RESIZE])
            return StepSettings(kind, options, image, _specs(("tensor", "FP32", recipe.shape[1:])))
        channels = read_options(kind, options).channels
        return StepSettings(kind, options, image, _specs(("image", "UINT8", (-1, -1, channels))))
    if kind == RESIZE:
        recipe = read_options(RESIZE, options)
        pixels = _specs(("image", "UINT8", (-1, -1, recipe.channels)))
        return StepSettings(kind, options, pixels, _specs(("tensor", "FP32", recipe.shape[1:])))
    if kind == "softmax":
        return StepSettings(kind, options, _specs(("scores", "FP32", (-1,))), _specs(("probabilities", "FP32", (-1,))))
    if kind == "top_k":
        k = read_options(kind, options).k
        outputs = _specs(("classes", "INT32", (k,)), ("scores", "FP32", (k,)))
        if options.get("labels"):
            outputs |= _specs(("labels", "BYTES", (k,)))
        return StepSettings(kind, options, _specs(("scores", "FP32", (-1,))), outputs)
    if kind == "tokenize":
        length = read_options(kind, options).pad_to or -1
        ids = [(name, "INT64", (length,)) for name in ("input_ids", "attention_mask", "token_type_ids")]
        return StepSettings(kind, options, _specs(("text", "BYTES", (1,))), _specs(*ids))
    assert kind == "nms", f"unknown built-in step {kind}"
    boxes = (("boxes", "FP32", (-1, 4)), ("scores", "FP32", (-1,)), ("classes", "INT64", (-1,)))
    found = (*boxes, ("indices", "INT64", (-1,)))
    return StepSettings(kind, options, _specs(*boxes, optional=("classes",)), _specs(*found), batches=False)
