"""The configuration that a load request brings."""

from __future__ import annotations

import json

import pytest
from headrace.config.binding import bind
from headrace.config.documents import read_pbtxt
from headrace.config.triton_json import read_config_json, to_triton_json
from headrace.core.errors import ConfigError

TEXT = """
max_batch_size: 0
input { name: "X" data_type: TYPE_FP32 dims: [-1, 3] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1, 3] }
dynamic_batching { }
version_policy { specific { versions: [2, 4] } }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "headrace.labels" value { string_value: "{stable: 2}" } }
model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: [2, 3] zero_data: true } } }
"""


def test_json_is_equivalent_to_the_text_format_with_both_spellings() -> None:
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    message = text_format.Parse(TEXT, model_config_pb2.ModelConfig())
    expected = bind(read_pbtxt(TEXT, "config.pbtxt"))[0]
    assert expected is not None
    for snake in (True, False):
        document = read_config_json(json_format.MessageToJson(message, preserving_proto_field_name=snake))
        config, findings = bind(document)
        assert not any(finding.fatal for finding in findings)
        assert config is not None
        # Protobuf does not write the zero that the text did.
        assert config.model_copy(update={"max_batch_size": 0}) == expected


def test_the_shown_configuration_can_be_sent_back() -> None:
    config = bind(read_pbtxt(TEXT, "config.pbtxt"))[0]
    assert config is not None
    again, findings = bind(read_config_json(json.dumps(to_triton_json(config))))
    assert [finding for finding in findings if finding.fatal] == []
    assert again == config


def test_a_written_zero_is_not_a_missing_field() -> None:
    for text, written in (('{"max_batch_size": 0}', True), ('{"maxBatchSize": 0}', True), ("{}", False)):
        config = bind(read_config_json(text))[0]
        assert config is not None
        assert ("max_batch_size" in config.model_fields_set) is written
    nulled = bind(read_config_json('{"max_batch_size": null}'))[0]
    assert nulled is not None
    assert "max_batch_size" not in nulled.model_fields_set


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("[]", "not a JSON object"),
        ('{"max_batch_sise": 1}', "did you mean max_batch_size"),
        ('{"input": [{"nmae": "x"}]}', "did you mean name"),
        ('{"name": "a", "name": "b"}', "written twice"),
        ('{"max_batch_size": NaN}', "NaN is not a JSON number"),
        ('{"max_batch_size": 1e999}', "cannot be read"),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"max_batch_size": ' + "9" * 5000 + "}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"input":' * 300 + "1" + "}" * 300, "unknown field|cannot be read"),
        ('{"input": [null]}', "null"),
        ('{"input": {"a": 1}}', "input"),
        ('{"parameters": {"a": 1}}', "parameters"),
        ('{"name": "\\ud800"}', "cannot be read"),
        ('{"\\ud800": 1}', "cannot be read"),
        ('{"instance_group": [{"kind": "KIND_TOASTER"}]}', "KIND_TOASTER"),
        ("{" + ",".join(f'"k{n}": 1' for n in range(20_000)) + ', "k0": 2}', "written twice"),
        ('{"name": "' + "x" * (1 << 20) + '"}', "larger than"),
    ],
)
def test_invalid_configurations_have_a_short_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_config_json(text)
    assert str(refused.value).startswith("config:")
    assert len(str(refused.value)) < 700
    str(refused.value).encode("ascii")
