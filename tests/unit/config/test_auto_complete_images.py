"""Pictures and classes of models on disk: what is left out, what is written as callers see it, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from headrace.config.model_folder import ModelFolder, read_model_folder
from headrace.config.triton_json import read_config_json, to_triton_json
from headrace.core.errors import ConfigError

from tests.support import models

PICTURES = models.pictures(classes=7)
LABELS = {"labels.txt": "\n".join("abcdefg")}
WHOLE = "preprocess: {by: server}\npostprocess: {top_k: 3}\n"


def read(tmp_path: Path, config: str, model: onnx.ModelProto = PICTURES) -> ModelFolder:
    models.add_model(tmp_path, "m", model, files={"config.yaml": config, **LABELS})
    return read_model_folder(tmp_path / "m", tmp_path)


def shapes(tensors: object) -> list[tuple[str, str, list[int]]]:
    return [(t.name, t.data_type, list(t.dims)) for t in tensors]  # type: ignore[attr-defined]


MODEL_TENSORS = ([("IMAGE", "TYPE_FP32", [3, 224, 224])], [("LOGITS", "TYPE_FP32", [7])])


@pytest.mark.parametrize(
    "more",
    [
        "",
        "input: [{name: IMAGE, data_type: fp32, dims: [3, 224, 224]}]",
        "input: [{name: IMAGE, data_type: uint8, dims: [224, 224, 3]}]",
        "max_batch_size: 8\noutput: [{name: LOGITS, label_filename: labels.txt}]",
    ],
)
def test_model_and_served_tensors_are_the_same_in_both_forms(tmp_path: Path, more: str) -> None:
    config = read(tmp_path, WHOLE + more).config
    assert (shapes(config.input), shapes(config.output)) == MODEL_TENSORS
    assert shapes(config.served_input) == [("IMAGE", "TYPE_UINT8", [224, 224, 3])]
    assert shapes(config.served_output)[:2] == [("scores", "TYPE_FP32", [3]), ("classes", "TYPE_INT32", [3])]
    assert len(config.served_output) == (3 if "label" in more else 2)


@pytest.mark.parametrize("labels", ["", "output: [{name: LOGITS, label_filename: labels.txt}]\n"])
def test_the_shown_configuration_round_trips(tmp_path: Path, labels: str) -> None:
    folder = read(tmp_path, WHOLE + labels)
    shown = to_triton_json(folder.config)
    again = read_model_folder(tmp_path / "m", tmp_path, read_config_json(json.dumps(shown)))
    assert to_triton_json(again.config) == shown
    assert (shapes(again.config.input), shapes(again.config.output)) == MODEL_TENSORS
    assert again.labels == folder.labels
    assert again.findings == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("preprocess: {by: server, crop: [200, 200]}", "makes tensors of [3, 200, 200] (nchw), input"),
        ("postprocess: {top_k: 8}", 'top_k is 8, "LOGITS" has 7 classes'),
        ("postprocess: {top_k: 2, output: PROBABILITIES}", '"PROBABILITIES" is not an output of the model'),
        ("preprocess: {by: server}\ninput: [{name: IMAGE, data_type: uint8, dims: [3, 224, 224]}]", "TYPE_UINT8"),
        ("preprocess: {by: server, source: [300, 300]}\n"
         "model_warmup: [{inputs: {IMAGE: {zero_data: true, dims: [224, 224, 3]}}}]",
         "do not match input IMAGE: [300, 300, 3]"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_model_are_errors(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert any(message in str(finding) for finding in caught.value.findings), caught.value.findings


def test_a_model_with_pixel_inputs_needs_no_server_preprocessing(tmp_path: Path) -> None:
    takes_pixels = models.identity("UINT8", ("batch", 224, 224, 3), ("IMAGE", "Y"))
    for written in ("", "input: [{name: IMAGE, data_type: uint8, dims: [224, 224, 3]}]"):
        with pytest.raises(ConfigError, match="takes UINT8 pixels as they are"):
            read(tmp_path, f"preprocess: {{by: server}}\n{written}", takes_pixels)


def test_a_plan_without_a_model_needs_a_full_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.plan").write_bytes(b"plan")
    served = "input: [{name: IMAGE, data_type: uint8, dims: [224, 224, 3]}]\n"
    output = "output: [{name: LOGITS, data_type: fp16, dims: [7]}]\nbackend: tensorrt\nmax_batch_size: 4\n"
    (folder / "config.yaml").write_text("preprocess: {by: server}\n" + output + served)
    with pytest.raises(ConfigError, match="write it as in the model"):
        read_model_folder(folder, tmp_path)
    input_block = "input: [{name: IMAGE, data_type: fp16, dims: [3, 224, 224]}]\n"
    (folder / "config.yaml").write_text(WHOLE + output + input_block)
    config = read_model_folder(folder, tmp_path).config
    assert shapes(config.served_input) == [("IMAGE", "TYPE_UINT8", [224, 224, 3])]
    assert shapes(config.served_output) == [("scores", "TYPE_FP32", [3]), ("classes", "TYPE_INT32", [3])]
