"""Edited configuration files: only the fields named change; comments, order and layout stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from headrace.config.files import Changes, ConfigFile, read_config_file
from headrace.core.errors import ConfigError

ALL = Changes(instances=3, max_batch_size=16, dynamic_batching=True)


def edited(name: str, text: str, changes: Changes = ALL) -> str:
    return ConfigFile(Path(name), text, True).apply(changes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "max_batch_size: 16\ndynamic_batching: {}\ninstance_group: [{count: 3}]\n"),
        (
            "# mine\nmax_batch_size: 8  # by guess\n\ndynamic_batching:\n  preferred_batch_size: [4, 8]\n",
            "# mine\nmax_batch_size: 16  # by guess\n\ndynamic_batching:\n  preferred_batch_size: [4, 8]\n"
            "instance_group: [{count: 3}]\n",
        ),
        (
            "instance_group: [{kind: KIND_CPU, count: 2}]  # two\nslo: {p99_ms: 5}",
            "instance_group: [{kind: KIND_CPU, count: 3}]  # two\nslo: {p99_ms: 5}\nmax_batch_size: 16\ndynamic_batching: {}\n",
        ),
        (
            "instance_group:\n  - kind: KIND_CPU\n    # of this machine\n    name: x\nmax_batch_size: 1\ndynamic_batching: {}\n",
            "instance_group:\n  - count: 3\n    kind: KIND_CPU\n    # of this machine\n    name: x\n"
            "max_batch_size: 16\ndynamic_batching: {}\n",
        ),
        ("instance_group: [{}]\n", "instance_group: [{count: 3}]\nmax_batch_size: 16\ndynamic_batching: {}\n"),
        ("instance_group: []\n", "instance_group: [{count: 3}]\nmax_batch_size: 16\ndynamic_batching: {}\n"),
        ('{"max_batch_size": 2}', '{dynamic_batching: {}, instance_group: [{count: 3}], "max_batch_size": 16}'),
        (
            "---\nmax_batch_size: 2\n...\n",
            "---\nmax_batch_size: 16\ndynamic_batching: {}\ninstance_group: [{count: 3}]\n...\n",
        ),
    ],
)
def test_yaml_edits_preserve_the_rest(before: str, after: str) -> None:
    assert edited("config.yaml", before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "max_batch_size: 16\ndynamic_batching { }\ninstance_group [ { count: 3 } ]\n"),
        (
            'name: "m" # { count: 9 }\nmax_batch_size : 8 # by guess\ninstance_group [\n  { kind: KIND_CPU count: 2 }\n]\n'
            "dynamic_batching { preferred_batch_size: [ 4, 8 ] }",
            'name: "m" # { count: 9 }\nmax_batch_size : 16 # by guess\ninstance_group [\n  { kind: KIND_CPU count: 3 }\n]\n'
            "dynamic_batching { preferred_batch_size: [ 4, 8 ] }",
        ),
        (
            "instance_group < kind: KIND_CPU >\nmax_batch_size: 1\n",
            "instance_group < count: 3 kind: KIND_CPU >\nmax_batch_size: 16\ndynamic_batching { }\n",
        ),
        (
            "instance_group: [ ]\nmax_batch_size: 1, dynamic_batching: {}",
            "instance_group: [ { count: 3 } ]\nmax_batch_size: 16, dynamic_batching: {}",
        ),
        (
            'parameters { key: "a" value { string_value: "max_" "batch_size: 2" } }\n',
            'parameters { key: "a" value { string_value: "max_" "batch_size: 2" } }\n'
            "max_batch_size: 16\ndynamic_batching { }\ninstance_group [ { count: 3 } ]\n",
        ),
    ],
)
def test_pbtxt_edits_preserve_the_rest(before: str, after: str) -> None:
    assert edited("config.pbtxt", before) == after


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "instance_group: [{count: 1}, {count: 2}]\n"),
        ("config.pbtxt", "instance_group { count: 1 }\ninstance_group { count: 2 }\n"),
    ],
)
def test_several_instance_groups_are_not_edited(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"has 2 instance groups \(write it by hand: the counts of all groups"):
        edited(name, text)
    assert "16" in edited(name, text, Changes(max_batch_size=16))


def test_a_file_is_replaced_whole_with_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_batch_size: 8 # a\n")
    path.chmod(0o640)
    file = read_config_file(tmp_path)
    text = file.apply(Changes(max_batch_size=32))
    assert file.diff(text).splitlines()[3:] == ["-max_batch_size: 8 # a", "+max_batch_size: 32 # a"]
    file.write(text)
    assert path.read_text() == "max_batch_size: 32 # a\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["config.yaml"]
    with pytest.raises(ConfigError, match="has changed since it was read"):
        file.write(text)


def test_a_model_without_a_file_gets_one(tmp_path: Path) -> None:
    file = read_config_file(tmp_path)
    assert not file.exists
    text = file.apply(ALL)
    assert file.diff(text).startswith("--- /dev/null\n+++ config.yaml\n")
    file.write(text)
    assert (tmp_path / "config.yaml").read_text() == text


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("config.yaml", "cpu_max_batch_size: 8 # few\n", "cpu_max_batch_size: 4 # few\n"),
        ("config.yaml", "max_batch_size: 64\n", "max_batch_size: 64\ncpu_max_batch_size: 4\n"),
        ("config.yaml", "", "cpu_max_batch_size: 4\n"),
        (
            "config.pbtxt",
            "parameters { key: 'a' value { string_value: 'b' } }\n"
            'parameters { key: "headrace.cpu_max_batch_size" value: { string_value: "8" } } # few\n',
            "parameters { key: 'a' value { string_value: 'b' } }\n"
            'parameters { key: "headrace.cpu_max_batch_size" value: { string_value: "4" } } # few\n',
        ),
        (
            "config.pbtxt",
            "max_batch_size: 64\n",
            'max_batch_size: 64\nparameters { key: "headrace.cpu_max_batch_size" value: { string_value: "4" } }\n',
        ),
    ],
)
def test_the_bound_of_the_cpu_is_a_field_or_a_parameter(name: str, before: str, after: str) -> None:
    assert edited(name, before, Changes(cpu_max_batch_size=4)) == after
