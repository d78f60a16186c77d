"""Pipelines in YAML: the graph, steps that are joined, and every rule with its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.config.config_base import Problems
from headrace.config.model_config import ModelConfig
from headrace.inference.pipelines.yaml_steps import BUILTIN_VERSION, build_yaml_graph, builtin_spec

RESIZE = {"resize_short_side": 32, "crop": [32, 32]}
DECODE = {"builtin": "decode_image", "inputs": {"image": "file"}, "outputs": {"image": "pixels"}}
SHRINK = {"builtin": "resize", "options": RESIZE, "inputs": {"image": "pixels"}, "outputs": {"tensor": "tensor"}}
MODEL = {"model": "net", "inputs": {"X": "tensor"}, "outputs": {"Y": "logits"}}
TOP = {
    "builtin": "top_k",
    "options": {"k": 3, "softmax": True},
    "inputs": {"scores": "logits"},
    "outputs": {"scores": "scores", "classes": "classes"},
}
STEPS = {"decode": DECODE, "resize": SHRINK, "model": MODEL, "top": TOP}
FILE = {"name": "file", "data_type": "bytes", "dims": [1]}
SCORES = {"name": "scores", "data_type": "fp32", "dims": [3]}
CLASSES = {"name": "classes", "data_type": "int32", "dims": [3]}


def config(steps: dict[str, Any] = STEPS, rows: int = 0, **fields: Any) -> ModelConfig:
    pipeline = {"steps": steps, **({"outputs": fields.pop("renamed")} if "renamed" in fields else {})}
    values = {"input": [FILE], "output": [SCORES, CLASSES], "max_batch_size": rows, **fields}
    return ModelConfig(name="p", pipeline=pipeline, **values)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**STEPS, name: {**STEPS[name], **fields}}


def problems(steps: dict[str, Any] = STEPS, **fields: Any) -> list[tuple[str, str]]:
    with pytest.raises(Problems) as caught:
        build_yaml_graph(config(steps, **fields))
    return [("/".join(map(str, problem.loc)), problem.message) for problem in caught.value.problems]


def test_steps_become_a_graph_and_a_resize_is_joined_with_its_decoder() -> None:
    graph = build_yaml_graph(config())
    assert [step.name for step in graph.steps] == ["decode", "model", "top"]
    decode, model, top = graph.steps
    assert (decode.outputs, decode.options["resize"]) == ((("tensor", "tensor"),), RESIZE)
    assert decode.version == f"{BUILTIN_VERSION} decode"
    assert (model.model, model.version, model.builtin) == ("net", "", "")
    assert graph.order(graph.needed(())) == [0, 1, 2]
    assert graph.outputs == {"scores": "scores", "classes": "classes"}
    assert [step.index for step in graph.steps] == [0, 1, 2]
    assert top.reads == ("logits",)


@pytest.mark.parametrize(
    "steps",
    [
        changed("resize", when="pixels.rows > 10"),
        changed("resize", options={**RESIZE, "color": "gray"}),
        {
            **STEPS,
            "other": {**SHRINK, "outputs": {"tensor": "small"}},
            "use": {**MODEL, "inputs": {"X": "small"}, "outputs": {"Y": "more"}},
        },
    ],
    ids=["a condition", "another colour", "two readers"],
)
def test_a_resize_stays_a_step_if_it_cannot_be_joined(steps: dict[str, Any]) -> None:
    more = {
        "output": [
            {**SCORES, "dims": [-1]},
            {**CLASSES, "dims": [-1]},
            *([{**SCORES, "name": "more"}] if "use" in steps else []),
        ]
    }
    assert "resize" in [step.name for step in build_yaml_graph(config(steps, **more)).steps]


def test_pixels_that_are_an_output_are_not_joined() -> None:
    pixels = {"name": "pixels", "data_type": "uint8", "dims": [-1, -1, 3]}
    graph = build_yaml_graph(config(output=[SCORES, CLASSES, pixels]))
    assert [step.name for step in graph.steps] == ["decode", "resize", "model", "top"]


@pytest.mark.parametrize("rows", [0, 4])
def test_built_in_steps_have_the_rows_of_their_pipeline(rows: int) -> None:
    first = [-1] if rows else []
    for step in build_yaml_graph(config(rows=rows)).steps:
        if step.builtin == "decode_image":
            spec = builtin_spec(step, rows)
            assert list(spec.inputs["image"].shape) == [*first, 1]
            assert list(spec.outputs["tensor"].shape) == [*first, 3, 32, 32]
            assert spec.max_batch_size == rows
    boxes = {"builtin": "nms", "inputs": {"boxes": "b", "scores": "s"}, "outputs": {"indices": "i"}}
    graph = build_yaml_graph(
        config(
            {"nms": boxes},
            rows,
            input=[
                {"name": "b", "data_type": "fp32", "dims": [-1, 4]},
                {"name": "s", "data_type": "fp32", "dims": [-1]},
            ],
            output=[{"name": "i", "data_type": "int64", "dims": [-1]}],
        )
    )
    assert builtin_spec(graph.steps[0], rows).max_batch_size == 0  # results have a size of their own


def test_rows_run_alone_with_each_and_max_batch_size() -> None:
    each = changed("model", each="tensor")
    assert build_yaml_graph(config(each, rows=4)).rows_run_alone
    assert not build_yaml_graph(config(each)).rows_run_alone
    assert not build_yaml_graph(config(rows=4)).rows_run_alone


def test_outputs_may_have_other_names_than_their_tensors() -> None:
    graph = build_yaml_graph(
        config(
            renamed={"scores": "probabilities"},
            steps=changed("top", outputs={"scores": "probabilities", "classes": "classes"}),
        )
    )
    assert graph.outputs == {"scores": "probabilities", "classes": "classes"}


def test_an_output_that_may_be_skipped_is_empty() -> None:
    steps = changed("top", when="logits.max > 0.5")
    graph = build_yaml_graph(config(steps, output=[{**SCORES, "dims": [-1]}, {**CLASSES, "dims": [2, -1]}]))
    assert {name: (array.shape, array.dtype) for name, array in graph.empty.items()} == {
        "scores": ((0,), np.float32), "classes": ((2, 0), np.int32),
    }  # fmt: skip
    # A skipped step takes those behind it along.
    steps = changed("model", when="tensor.size > 0")
    assert build_yaml_graph(config(steps, rows=4)).empty["scores"].shape == (0, 3)


@pytest.mark.parametrize(
    ("steps", "fields", "place", "message"),
    [
        ({}, {}, "pipeline", "a pipeline has no steps"),
        (changed("model", inputs={}), {}, "pipeline/steps/model/inputs", 'step "model" has no inputs'),
        (changed("model", model="p"), {}, "pipeline/steps/model/model", "the pipeline itself"),
        (changed("model", model="p/3"), {}, "pipeline/steps/model/model", "the pipeline itself"),
        (changed("model", fallback="p"), {}, "pipeline/steps/model/fallback", "the pipeline itself"),
        (changed("top", fallback="net"), {}, "pipeline/steps/top/fallback", "fallback is for steps with a model"),
        (changed("top", each="logits"), {}, "pipeline/steps/top/each", "each is for steps with a model"),
        (changed("model", each="pixels"), {}, "pipeline/steps/model/each", '"pixels" is no tensor in inputs'),
        (changed("model", each="tensor"), {"rows": 4097}, "pipeline/steps/model/each", "max_batch_size 4097 is more than 4096"),
        (changed("model", each="tensor", when="tensor.size > 0"), {"rows": 4}, "output/0/dims", "has no value if a step is"),
        (changed("model", when="tensor.median > 1"), {}, "pipeline/steps/model/when", '"median" is no reduction'),
        (changed("model", when="gone.max > 1"), {}, "pipeline/steps/model/when", 'tensor "gone" is neither'),
        (changed("model", inputs={"X": "gone"}), {}, "pipeline/steps/model/inputs/X", 'tensor "gone" is neither'),
        (changed("model", outputs={"Y": "pixels"}), {}, "pipeline/steps/model/outputs/Y", "written twice"),
        (changed("top", options={"k": 0}), {}, "pipeline/steps/top/options/k", "k is 0"),
        (changed("top", options={"size": 3}), {}, "pipeline/steps/top/options/size", "'size' is no option of top_k"),
        (changed("top", options={"labels": "../x"}), {}, "pipeline/steps/top/options/labels", "labels is '../x'"),
        (changed("resize", options={"crop": [0, 1]}), {}, "pipeline/steps/resize/options", "crop is [0, 1]"),
        (changed("resize", options={**RESIZE, "by": "server"}), {}, "pipeline/steps/resize/options/by", "by is not an option"),
        (changed("decode", options={"max_pixels": "x"}), {}, "pipeline/steps/decode/options/max_pixels", "max_pixels is 'x'"),
        (STEPS, {"renamed": {"other": "scores"}}, "pipeline/outputs/other", "which is no output of the model"),
        (STEPS, {"renamed": {"scores": "gone"}}, "output/0/name", "is not written by any step"),
        (STEPS, {"instance_group": [{"count": 2}]}, "instance_group", "not for a pipeline"),
        (STEPS, {"platform": "onnxruntime_onnx"}, "platform", 'pipeline is for platform "ensemble"'),
        (STEPS, {"ensemble_scheduling": {}}, "pipeline", "two forms of the same"),
        (changed("top", when="logits.max > 0.5"), {}, "output/0/dims", "has no value if a step is skipped"),
    ],
)  # fmt: skip
def test_rules_name_the_field(steps: dict[str, Any], fields: dict[str, Any], place: str, message: str) -> None:
    found = problems(steps, **fields)
    assert any(loc == place and message in text for loc, text in found), found


def test_a_cycle_is_found() -> None:
    steps = {"a": {"model": "m", "inputs": {"X": "file", "Z": "b"}, "outputs": {"Y": "scores"}},
             "b": {"model": "m", "inputs": {"X": "scores"}, "outputs": {"Y": "b"}}}  # fmt: skip
    assert any("never ready" in text for _, text in problems(steps, output=[SCORES]))
