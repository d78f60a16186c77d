from __future__ import annotations

import pytest
from headrace.config.documents import read_value, read_yaml
from headrace.core.errors import ConfigError


def test_values_and_lines() -> None:
    text = "a: 1\nb:\n  - c: [1, 2]\n    d: {}\n  - x\nparameters:\n  p: 1.50\n  q: yes\n"
    document = read_yaml(text, "m/config.yaml")
    assert document.data == {"a": 1, "b": [{"c": [1, 2], "d": {}}, "x"], "parameters": {"p": "1.50", "q": "yes"}}
    lines = {("a",): 1, ("b",): 2, ("b", 0, "c"): 3, ("b", 0, "d"): 4, ("b", 1): 5, ("parameters", "q"): 8}
    assert {loc: document.lines[loc] for loc in lines} == lines


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_an_empty_configuration(text: str) -> None:
    assert read_yaml(text, "p").data == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-7", 1e-7),
        ("2E5", 2e5),
        ("0.5", 0.5),
        ("true", True),
        ("2020-01-01", "2020-01-01"),
        ('"3"', "3"),
        ("[1]", [1]),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = read_value(text, "p")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: &x 1", 2, "anchors and aliases are not read"),
        ("a: 1\nb: *x", 2, "anchors and aliases are not read"),
        ("[" * 100, 1, "nested more than"),
        ("a: 1\nb:\n", 2, '"b" has no value'),
        ("a: ~", 1, '"a" has no value'),
        ("a: 1\nb: 2\na: 3", 3, '"a" is written twice, first in line 1'),
        ("a: {b: 1, b: 1}", 1, '"b" is written twice'),
        ("a: !!python/object:os.system x", 1, "python/object:os.system is not read"),
        ("a: !x {}", 1, "the tag !x is not read"),
        ("a: !!binary aGk=", 1, "binary is not read"),
        ('"\\ud800": 1', 1, "surrogate"),
        ("a: 0b_", 1, "cannot be read as a number"),
        ("a: 1\nb: \x01", 2, "special characters are not allowed"),
        ("? [a]\n: b", 1, "a key must be a word"),
        ("a: .inf", 1, "not a finite number"),
        ("a: .nan", 1, "not a finite number"),
        ("a: 1e999", 1, "not a finite number"),
        ("---\na: 1\n---\nb: 1", 3, "another document"),
        ("a: 'b", 1, "cannot be read as YAML"),
        ("a:\n\tb: 1", 2, "cannot be read as YAML"),
        ("- a", 1, "a mapping of fields to values"),
        ("word", 1, "a mapping of fields to values"),
    ],
)
def test_errors_carry_their_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "m/config.yaml")
    (finding,) = caught.value.findings
    assert (finding.path, finding.line) == ("m/config.yaml", line)
    assert message in finding.message
    assert finding.cure
    assert ("spaces" in finding.cure) == ("\t" in text)


@pytest.mark.parametrize("text", ['a: "\\UFFFFFFFF"', "%YAML 111111111111\n---\na: 1"])
def test_errors_of_int_and_chr_are_findings(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read_yaml(text, "p")


def test_an_empty_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="the value is empty"):
        read_value(" ", "p")
