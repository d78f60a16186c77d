"""Specs for clients with preprocessing and ranked classes on the server, and rejected configurations."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.config.config_base import Problems
from headrace.config.model_config import ModelConfig
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "fp32", "dims": [3, 224, 224], "format": "nchw"}],
    "output": [{"name": "y", "data_type": "fp16", "dims": [10], "label_filename": "labels.txt"}],
    "preprocess": {"by": "server"},
    "postprocess": {"top_k": 3, "softmax": True},
}


def config(**change: Any) -> ModelConfig:
    return ModelConfig.model_validate({**BASE, **change})


def seen(tensors: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.data_type.removeprefix("TYPE_"), tensor.dims) for tensor in tensors]


def test_callers_see_pixels_and_classes() -> None:
    result = config()
    assert seen(result.input) == [("x", "FP32", (3, 224, 224))]
    assert seen(result.served_input) == [("x", "UINT8", (224, 224, 3))]
    assert result.served_input[0].format == "FORMAT_NHWC"
    assert seen(result.served_output) == [
        ("scores", "FP32", (3,)),
        ("classes", "INT32", (3,)),
        ("labels", "STRING", (3,)),
    ]


def test_the_source_is_the_tensor_that_callers_send() -> None:
    assert config(preprocess={"by": "server", "source": [480, 640]}).served_input[0].dims == (480, 640, 3)
    gray = {"by": "server", "color": "gray", "crop": [28, 20], "layout": "nhwc"}
    one = [{"name": "x", "data_type": "fp32", "dims": [28, 20, 1]}]
    assert config(preprocess=gray, input=one).served_input[0].dims == (28, 20, 1)


def test_softmax_alone_leaves_the_output_on_its_device() -> None:
    others = [{"name": "z", "data_type": "int8", "dims": [4]}, *BASE["output"]]
    result = config(output=others, postprocess={"softmax": True, "output": "y"})
    assert seen(result.served_output) == [("z", "INT8", (4,)), ("y", "FP32", (10,))]
    assert result.served_output[1].label_filename == "labels.txt"


def test_the_client_prepares_by_default() -> None:
    result = config(preprocess={}, postprocess=None)
    assert (result.served_input, result.served_output) == (result.input, result.output)


def test_a_model_without_a_batch_dimension_may_require_a_batch_of_one() -> None:
    inputs = [{"name": "x", "data_type": "fp32", "dims": [1, 3, 224, 224]}]
    outputs = [{"name": "y", "data_type": "fp32", "dims": [1, 10]}]
    result = config(max_batch_size=0, input=inputs, output=outputs)
    assert result.served_input[0].dims == (1, 224, 224, 3)
    assert [tensor.dims for tensor in result.served_output] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preprocess": {"source": [480, 640]}}, "source is for pixels that the server prepares"),
        ({"preprocess": {"by": "server", "source": [9000, 9000]}}, "more than 50000000 pixels"),
        ({"preprocess": {"by": "proxy"}}, '"proxy" is not a valid value (write one of client, server)'),
        (
            {"preprocess": {"by": "server", "crop": [200, 224]}},
            'makes tensors of [3, 200, 224] (nchw), input "x" takes',
        ),
        ({"preprocess": {"by": "server", "layout": "nhwc"}}, "makes tensors of [224, 224, 3] (nhwc)"),
        (
            {"input": [{"name": "x", "data_type": "int8", "dims": [3, 224, 224]}]},
            'makes floats, input "x" is TYPE_INT8',
        ),
        ({"input": [{"name": "x", "data_type": "fp32", "dims": [1, 3, 224, 224]}]}, 'input "x" takes [1, 3, 224, 224]'),
        (
            {"input": [{"name": "x", "dims": [150528], "reshape": {"shape": [3, 224, 224]}}]},
            'input "x" has a reshape (remove reshape',
        ),
        ({"postprocess": {}}, "has no effect (write softmax: true, a top_k, or both"),
        ({"postprocess": {"top_k": 11}}, 'top_k is 11, "y" has 10 classes (write at most 10)'),
        ({"postprocess": {"top_k": 2, "scores": "classes"}}, "two outputs of postprocess have one name"),
        ({"postprocess": {"top_k": 2, "output": "z"}}, '"z" is not an output of the model (write output: one of y)'),
        ({"output": [{"name": "y", "data_type": "int64", "dims": [10]}]}, 'takes scores from "y", which is TYPE_INT64'),
        ({"output": [{"name": "y", "data_type": "fp32", "dims": [10, 4]}]}, "takes one score a class"),
        (
            {"output": [*BASE["output"], {"name": "scores", "data_type": "fp32", "dims": [1]}]},
            "takes the scores from is not named",
        ),
        (
            {
                "output": [*BASE["output"], {"name": "scores", "data_type": "fp32", "dims": [1]}],
                "postprocess": {"top_k": 2, "output": "y"},
            },
            'makes an output "scores", and the model has one of that name',
        ),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**change)
    messages = [str(detail["ctx"]["error"]) for detail in caught.value.errors()]
    assert any(message in text for text in messages), messages
    assert all(isinstance(detail["ctx"]["error"], Problems) for detail in caught.value.errors())
