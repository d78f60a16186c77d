"""Configurations of ragged batches and padding: what is refused, by name and with a cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.config.model_folder import ModelFolder, read_model_folder
from headrace.config.ragged_rules import joined_inputs, joined_outputs
from headrace.core.errors import ConfigError

from tests.support.models import add_model
from tests.support.ragged_models import PADDED_CONFIG, RAGGED_CONFIG, ragged_sums, token_sums


def ragged(repository: Path, config: str) -> ModelFolder:
    return read_model_folder(add_model(repository, "m", ragged_sums(), config=config), repository)


def padded(repository: Path, config: str) -> ModelFolder:
    return read_model_folder(add_model(repository, "m", token_sums(), files={"config.yaml": config}), repository)


def test_a_ragged_model_is_read_without_a_remark(tmp_path: Path) -> None:
    folder = ragged(tmp_path, RAGGED_CONFIG)
    assert folder.findings == ()
    assert [tensor.name for tensor in folder.config.input] == ["ELEMENTS"]
    assert folder.config.oversize == "reject"


def test_a_ragged_plan_has_the_joined_and_computed_inputs(tmp_path: Path) -> None:
    config = ragged(tmp_path, 'platform: "tensorrt_plan"\n' + RAGGED_CONFIG).config
    inputs = {tensor.name: (tensor.data_type, tensor.dims) for tensor in joined_inputs(config)}
    assert inputs == {"ELEMENTS": ("TYPE_INT64", (-1,)), "OFFSETS": ("TYPE_INT32", (-1,))}
    assert {tensor.name: tensor.dims for tensor in joined_outputs(config)} == {"SUM": (-1, 1)}


def test_a_padded_model_is_completed_from_the_file(tmp_path: Path) -> None:
    folder = padded(tmp_path, PADDED_CONFIG)
    assert folder.config.pad is not None
    assert folder.config.pad.values == {"ids": 0, "mask": 0}
    assert folder.config.pad.multiple_of == 16


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch_size: 16", "max_batch_size: 0", "allow_ragged_batch needs max_batch_size above 0"),
        ("max_batch_size: 16", "", "allow_ragged_batch needs max_batch_size above 0"),
        ('"OFFSETS"', '"ELEMENTS"', 'batch_input names "ELEMENTS", which requests have'),
        ('"OFFSETS"', '"OTHER"', 'batch_input names "OTHER", which is not an input of the model'),
        ("TYPE_INT32", "TYPE_FP32", 'batch_input "OFFSETS" has the type TYPE_FP32, the model has INT32'),
        ("TYPE_INT32", "TYPE_INT64", "batch_input has the data type TYPE_INT64"),
        (
            "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
            "BATCH_ITEM_SHAPE",
            'batch_input "OFFSETS" is BATCH_ITEM_SHAPE, the model has the shape [-1] for it',
        ),
        ('target_name: "DOUBLED"', 'target_name: "NONE"', 'batch_output names "NONE", which is not an output'),
        ('source_input: "ELEMENTS" }', 'source_input: "NONE" }', 'names the source input "NONE"'),
        ('source_input: "ELEMENTS" }', "}", "batch_output has 0 source inputs"),
        ("allow_ragged_batch: true", "allow_ragged_batch: true optional: true", "has allow_ragged_batch and optional"),
    ],
)
def test_ragged_configurations_are_refused_with_a_cure(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RAGGED_CONFIG
    with pytest.raises(ConfigError) as refused:
        ragged(tmp_path, RAGGED_CONFIG.replace(old, new))
    findings = [finding for finding in refused.value.findings if message in finding.message]
    assert findings, [str(finding) for finding in refused.value.findings]
    assert all(finding.cure for finding in findings)


def test_an_input_with_rows_in_the_model_is_not_ragged(tmp_path: Path) -> None:
    text = 'max_batch_size: 4\ninput [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true },'
    text += ' { name: "mask" data_type: TYPE_INT64 dims: [ -1 ] } ]'
    folder = add_model(tmp_path, "m", token_sums(), config=text)
    with pytest.raises(ConfigError, match=r"has allow_ragged_batch, the model has the shape \[-1, -1\]"):
        read_model_folder(folder, tmp_path)


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ("{}", "pad names no input"),
        ("{other: 0}", 'pad names "other", which is not an input'),
        ("{ids: 0, axis: 0}", "axis 0 is the batch"),
        ("{ids: 0, axis: 2}", 'input "ids" has dims [-1], without a free size at axis 2'),
        ("{ids: 0.5}", "the padding value 0.5 is no TYPE_INT64"),
        ("{ids: 0, multiple_of: 0}", "multiple_of"),
    ],
)
def test_paddings_are_refused_with_a_cure(tmp_path: Path, pad: str, message: str) -> None:
    text = PADDED_CONFIG.replace("{ids: 0, mask: 0, multiple_of: 16}", pad)
    with pytest.raises(ConfigError) as refused:
        padded(tmp_path, text)
    findings = [finding for finding in refused.value.findings if message in finding.message]
    assert findings, [str(finding) for finding in refused.value.findings]
    assert all(finding.cure for finding in findings)


def test_padding_needs_a_batch_dimension(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pad needs max_batch_size above 0"):
        padded(tmp_path, PADDED_CONFIG.replace("max_batch_size: 16", "max_batch_size: 0"))
