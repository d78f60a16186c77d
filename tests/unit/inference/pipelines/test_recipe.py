"""The recipe's readers: what is accepted, and what an error says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from headrace.core.errors import ConfigError
from headrace.inference.pipelines import recipe as module
from headrace.inference.pipelines.recipe import ImageRecipe

RESNET = {
    "input": "input",
    "color": "rgb",
    "resize_short_side": 256,
    "crop": [224, 224],
    "interpolation": "bicubic",
    "mean": [123.675, 116.28, 103.53],
    "std": [58.395, 57.12, 57.375],
    "layout": "nhwc",
}


def test_every_field_has_a_reader() -> None:
    assert list(module._READERS) == [field.name for field in fields(ImageRecipe)]


def test_a_mapping_sets_every_field() -> None:
    recipe = ImageRecipe.from_mapping(RESNET)
    assert recipe == ImageRecipe(
        input="input",
        color="rgb",
        resize_short_side=256,
        crop=(224, 224),
        interpolation="bicubic",
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        layout="nhwc",
    )
    assert ImageRecipe.from_mapping({}) == ImageRecipe()
    assert ImageRecipe.from_mapping({"mean": 127, "color": "GRAY"}).mean == (127.0,)


def test_parameters_parse_to_the_same_recipe() -> None:
    shown: dict[str, Any] = {
        "headrace.preprocess.input": {"string_value": "input"},
        "headrace.preprocess.color": {"string_value": "rgb"},
        "headrace.preprocess.resize_short_side": {"string_value": "256"},
        "headrace.preprocess.crop": {"string_value": "[224, 224]"},
        "headrace.preprocess.interpolation": {"string_value": '"bicubic"'},
        "headrace.preprocess.mean": {"string_value": "[123.675, 116.28, 103.53]"},
        "headrace.preprocess.std": {"string_value": "[58.395, 57.12, 57.375]"},
        "headrace.preprocess.layout": {"string_value": "nhwc"},
        "headrace.slo.p99_ms": {"string_value": "20"},
    }
    assert ImageRecipe.from_parameters(shown) == ImageRecipe.from_mapping(RESNET)
    assert ImageRecipe.from_parameters({"headrace.preprocess.input": "0"}) == ImageRecipe(input="0")
    assert ImageRecipe.from_parameters({"headrace.slo.p99_ms": {"string_value": "20"}}) is None
    assert ImageRecipe.from_parameters({}) is None


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"colour": "rgb"}, "'colour' is no field of preprocess (write one of input, color"),
        ({"color": "cmyk"}, "color is 'cmyk' (write rgb or gray)"),
        ({"crop": 224}, "crop is 224 (write [height, width] in pixels)"),
        ({"crop": [224, 0]}, "crop is [224, 0] (write a whole number of pixels, at least 1)"),
        ({"crop": [300, 224]}, "crop [300, 224] is larger than the picture after resize_short_side 256"),
        ({"resize_short_side": True}, "resize_short_side is True (write a whole number"),
        ({"resize_short_side": 256.5}, "resize_short_side is 256.5"),
        ({"interpolation": "nearest"}, "(write bilinear or bicubic)"),
        ({"mean": "127"}, "mean is '127' (write one number"),
        ({"mean": [1.0, float("nan"), 1.0]}, "mean is [1.0, nan, 1.0]"),
        ({"mean": [1, 2]}, "mean has 2 numbers (write one number, or 3 for rgb)"),
        ({"std": []}, "std has 0 numbers"),
        ({"std": [1, 0, 1]}, "std divides the pixels and cannot be 0"),
        ({"layout": "chw"}, "(write nchw or nhwc)"),
        ({"input": ["a"]}, "input is ['a'] (write the name of an input)"),
    ],
)
def test_errors_have_path_problem_and_remedy(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ImageRecipe.from_mapping(mapping, where="config.yaml")
    assert message in str(caught.value)
    assert all(finding.path == "config.yaml" and finding.cure for finding in caught.value.findings)


def test_every_error_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ImageRecipe.from_mapping({"crop": 1, "std": "x", "size": 3})
    assert len(caught.value.findings) == 3


def test_a_recipe_from_code_is_checked() -> None:
    with pytest.raises(ConfigError, match="std divides"):
        ImageRecipe(std=(0.0,))
