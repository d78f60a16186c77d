"""The block `traffic`: its short form, its errors, the stable version, and what promotion makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.config.documents import read_yaml
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import read_model_folder, served_versions
from headrace.config.traffic_config import Traffic
from headrace.config.triton_json import headrace_parameters
from headrace.core.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

from tests.support import models
from tests.support.models import read_config_text


def config(text: str) -> ModelConfig:
    result, findings = read_config_text(text, "config.yaml")
    assert result is not None, findings
    return result


def errors(text: str) -> str:
    result, findings = read_config_text(text, "config.yaml")
    assert result is None
    return "\n".join(map(str, findings))


def test_the_short_form_is_the_versions() -> None:
    short = config('traffic: {"2": 5%}\n').traffic
    assert short == config('traffic: {versions: {"2": 5%}}\n').traffic == config("traffic: {2: 5.000 %}\n").traffic
    mixed = config('traffic: {"2": 5%, sticky_header: X-User, shadow: {version: 3}}\n').traffic
    assert mixed is not None
    assert (mixed.versions, mixed.sticky_header, set(mixed.named)) == ({"2": "5%"}, "x-user", {"2", "3"})


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ('{"2": 5}', "'5' is not a share"),
        ('{"2": 101%}', "'101%' is not a share"),
        ('{"2": 60%, "3": 41%}', "the shares of the versions are 101% together"),
        ("{versions: {canary: 5%}}", "'canary' is not a version number"),
        ('{versions: {"model:": 5%}}', "'model:' is not a version number"),
        ('{versions: {"model:../other": 5%}}', "'model:../other' is not a version number"),
        ('{"model:a": 60%, "model:b": 41%}', "the shares of the versions are 101% together"),
        ('{verions: {"2": 5%}}', "verions"),
        ('{versions: {"2": 5%}, "2": 6%}', "a version is written in and beside `versions`"),
        ("{sticky_header: Authorization}", "'Authorization' cannot be the sticky header"),
        ('{sticky_header: "X User"}', "'X User' cannot be the sticky header"),
        ("{shadow: {version: 3}, stable: 3}", "the stable version is also the shadow"),
        ("{rules: {}}", "rules has no rule"),
        ("{rules: {min_agreement: 99%}}", "there is no shadow"),
        ("{rules: {max_error_rate: 1%, window_s: 0}}", "window_s"),
    ],
)
def test_an_error_says_what_is_wrong(block: str, words: str) -> None:
    text = errors(f"traffic: {block}\n")
    assert words in text
    assert "config.yaml:1: error:" in text


def test_other_models_are_targets_beside_versions() -> None:
    short = config('traffic: {"2": 5%, "model:resnet50_v2.1": 10%}\n').traffic
    assert short == config('traffic: {versions: {"model:resnet50_v2.1": 10%, "2": 5%}}\n').traffic
    assert short is not None
    assert (set(short.versions), set(short.named)) == ({"2", "model:resnet50_v2.1"}, {"2"})
    assert short.stable_version(["1", "2"]) == "1"
    assert short.promoted("model:resnet50_v2.1").versions == {"model:resnet50_v2.1": "100%"}


def test_a_model_is_no_target_of_its_own_traffic(tmp_path: Path) -> None:
    block = 'traffic: {"model:classify": 5%}\n'
    assert "model 'classify' is a target of its own traffic" in errors(f"name: classify\n{block}")
    folder = models.add_model(tmp_path, "classify", models.affine(seed=1), files={"config.yaml": block})
    with pytest.raises(ConfigError, match="model 'classify' is a target of its own traffic"):
        read_model_folder(tmp_path / "classify", tmp_path)
    assert folder


def test_sequences_have_one_version() -> None:
    text = errors('traffic: {"2": 5%}\nsequence_batching: {}\n')
    assert "traffic does not go with sequence_batching" in text
    decoupled = "backend: python\nmodel_transaction_policy: {decoupled: true}\n"
    assert "the answers of a decoupled model are not compared" in errors(
        decoupled + "traffic: {shadow: {version: 2}}\n"
    )


def test_the_block_survives_the_text_format() -> None:
    block = config(
        'traffic: {"2": 5%, "model:other": 1%, sticky_header: x-user, shadow: {version: 3, share: 10%}, rules: {max_p99_ms: 50, '
        "max_error_rate: 1%, min_agreement: 99.5%, min_requests: 10}}\n"
    )
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: {value!r} }} }}'
        for key, value in headrace_parameters(block).items()
    ]
    again, findings = read_config_text("\n".join(lines), "config.pbtxt")
    assert again is not None, findings
    assert again.traffic == block.traffic


def test_versions_of_traffic_are_served_beside_those_of_the_policy() -> None:
    for text, versions in (
        ("{}", (4,)),
        ('traffic: {"2": 5%}', (2, 4)),
        ('traffic: {"4": 5%}', (3, 4)),
        ('traffic: {"4": 5%, shadow: {version: 1}}', (1, 3, 4)),
        ('traffic: {"4": 5%, stable: 2}', (2, 3, 4)),
        ('traffic: {"9": 5%}', (4,)),
        ('traffic: {"2": 5%}\nversion_policy: {specific: {versions: [1]}}', (1, 2)),
        ('traffic: {"2": 5%}\nversion_policy: {all: {}}', (1, 2, 3, 4)),
        ('traffic: {"2": 5%}\nversion_policy: {latest: {num_versions: 2}}', (2, 3, 4)),
    ):
        assert served_versions(config(text + "\n"), (1, 2, 3, 4)) == versions, text


def test_the_stable_version_is_named_or_the_highest_other_one() -> None:
    for block, stable in (
        ({"2": "5%"}, "3"),
        ({"3": "5%"}, "2"),
        ({"3": "5%", "stable": 1}, "1"),
        ({"3": "5%", "stable": 9}, "2"),
        ({"1": "70%", "2": "20%", "3": "10%"}, "1"),
        ({"shadow": {"version": 3}}, "2"),
    ):
        assert Traffic.model_validate(block).stable_version(["1", "2", "3"]) == stable, block
    assert Traffic.model_validate({"2": "5%"}).stable_version([]) == ""


def test_a_promoted_version_has_all_traffic() -> None:
    before = Traffic.model_validate(
        {
            "2": "5%",
            "sticky_header": "x-user",
            "shadow": {"version": 2},
            "rules": {"min_agreement": "99%", "max_error_rate": "1%"},
        }
    )
    after = before.promoted("2")
    assert after == Traffic.model_validate({"stable": 2, "sticky_header": "x-user", "rules": {"max_error_rate": "1%"}})
    assert after.stable_version(["1", "2", "3"]) == "2"
    assert Traffic.model_validate(after.model_dump(mode="json", exclude_defaults=True)) == after


@given(st.dictionaries(st.integers(1, 9).map(str), st.integers(0, 11_000), min_size=1, max_size=9))
def test_shares_survive_json(shares: dict[str, int]) -> None:
    block = Traffic.model_validate({version: f"{share / 1000:.3f}%" for version, share in shares.items()})
    assert Traffic.model_validate(block.model_dump(mode="json", exclude_defaults=True)) == block


def test_the_line_of_an_error_is_that_of_the_block() -> None:
    document = read_yaml('max_batch_size: 4\ntraffic:\n  "2": 5%\n', "config.yaml")
    assert document.line_of(("traffic", "versions", "2")) == 2
