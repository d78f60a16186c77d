"""Properties of the readers together: nothing but findings for garbage, and both formats say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format, text_format
from headrace.config.binding import bind
from headrace.config.documents import EXPONENT_NUMBER, Document, read_pbtxt, read_yaml
from headrace.config.model_config import ModelConfig
from headrace.config.triton_json import to_triton_json
from headrace.core.errors import ConfigError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from tests.support.config_strategies import config_data, configs
from tests.support.examples import examples
from tests.support.models import read_config_text

EXAMPLES = {path.name: path.read_text() for path in (Path(__file__).parent / "triton_examples").iterdir()}
quick = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Dumper(yaml.SafeDumper):
    """Quotes what the reader would take for a number."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_NUMBER, list("-+0123456789"))


def as_pbtxt(config: ModelConfig) -> str:
    message = json_format.ParseDict(to_triton_json(config), model_config_pb2.ModelConfig())
    return text_format.MessageToString(message, as_utf8=True)


@quick
@given(config_data())
def test_both_formats_with_one_content_are_equal_configurations(data: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(data)
    from_yaml, yaml_findings = bind(read_yaml(yaml.dump(data, Dumper=Dumper), "config.yaml"))
    from_pbtxt, pbtxt_findings = bind(read_pbtxt(as_pbtxt(config), "config.pbtxt"))
    assert [finding for finding in (*yaml_findings, *pbtxt_findings) if finding.fatal] == []
    assert from_yaml == config
    assert from_pbtxt == config


@quick
@given(configs)
def test_the_json_of_a_configuration_is_json_and_reads_back(config: ModelConfig) -> None:
    shown = to_triton_json(config)
    text = json.dumps(shown, allow_nan=False)
    message = json_format.Parse(text, model_config_pb2.ModelConfig())
    assert message.max_batch_size == config.max_batch_size
    assert [list(tensor.dims) for tensor in message.input] == [list(tensor.dims) for tensor in config.input]
    # 64-bit numbers are numbers, not text as in protobuf's own JSON.
    assert all(isinstance(size, int) for tensor in shown["input"] for size in tensor["dims"])  # type: ignore[attr-defined]


READERS: list[Callable[[str, str], Document]] = [read_pbtxt, read_yaml]


def only_findings(text: str, reader: Callable[[str, str], Document]) -> None:
    """Reads and checks `text`; whatever is wrong with it must come as findings."""
    config = None
    try:
        document = reader(text, "m/config")
    except ConfigError as error:
        findings = error.findings
    else:
        config, findings = bind(document)
    assert (config is None) == any(finding.fatal for finding in findings)
    # YAML counts more characters as the end of a line than "\n".
    assert all(f.message and 1 <= (f.line or 1) <= len(text.splitlines()) + 1 for f in findings)
    if config is not None:
        json.dumps(to_triton_json(config), allow_nan=False).encode()


@pytest.mark.parametrize("reader", READERS)
@quick
@given(text=st.text(max_size=200))
def test_arbitrary_text_gives_findings_and_nothing_else(text: str, reader: Callable[[str, str], Document]) -> None:
    only_findings(text, reader)


FRAGMENTS = {
    read_pbtxt: [
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        ":",
        ",",
        '"',
        "'",
        "#",
        "\n",
        "-",
        "1e9",
        "input",
        "dims",
        "0x7",
        "99999999999999999999",
    ],
    read_yaml: [
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        "- ",
        ",",
        '"',
        "'",
        "#",
        "\n",
        "\n  ",
        "&a ",
        "*a",
        "!!int ",
        "!!float x",
        "|",
        "~",
        "<<: ",
        "? ",
    ],
}


@pytest.mark.parametrize("reader", READERS)
@quick
@given(data=st.data())
def test_a_damaged_example_gives_findings_and_nothing_else(
    data: st.DataObject, reader: Callable[[str, str], Document]
) -> None:
    suffix = ".yaml" if reader is read_yaml else ".pbtxt"
    text = data.draw(st.sampled_from(sorted(content for name, content in EXAMPLES.items() if name.endswith(suffix))))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        filling = data.draw(st.one_of(st.just(""), st.sampled_from(FRAGMENTS[reader]), st.text(max_size=5)))
        text = text[:start] + filling + text[end:]
    only_findings(text, reader)


json_values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@quick
@given(fields=st.dictionaries(st.sampled_from(sorted(ModelConfig.model_fields)), json_values, max_size=4))
def test_valid_fields_with_any_values_raise_only_findings(fields: dict[str, Any]) -> None:
    only_findings(yaml.safe_dump(fields, allow_unicode=True), read_yaml)


@quick
@given(
    key=st.sampled_from(
        [
            *("slo", "slo.p99_ms", "labels", "labels.a", "preprocess", "preprocess.mean", "oversize", "x", ""),
            *("rate_limits", "rate_limits.clients.a", "fair_sharing.weights", "priority_aging_microseconds"),
            *(
                "optimization",
                "optimization.",
                "optimization.precision",
                "optimization.precision.x",
                "optimization.profiles",
            ),
            *("optimization.profiles.0.batch", "optimization.calibration", "optimization.calibration.keep"),
            *("optimization.accuracy.max_drop", "optimization.priority"),
        ]
    ),
    value=st.one_of(st.text(max_size=20), json_values.map(json.dumps)),
)
def test_headrace_parameters_with_any_values_raise_only_findings(key: str, value: str) -> None:
    message = model_config_pb2.ModelConfig()
    try:
        message.parameters["headrace." + key].string_value = value
    except ValueError:  # surrogates
        return
    only_findings(text_format.MessageToString(message, as_utf8=True), read_pbtxt)


def test_reading_by_file_name() -> None:
    assert read_config_text('name: "m"', "config.pbtxt")[0] == read_config_text("name: m", "m/config.yaml")[0]
    config, (finding,) = read_config_text("name: [", "m/config.yaml")
    assert config is None
    assert finding.fatal
