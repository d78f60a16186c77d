from __future__ import annotations

import pytest
from headrace.config.documents import read_pbtxt
from headrace.core.errors import ConfigError

SPELLINGS = """# a comment with { and "
name: "x"; max_batch_size: 0,
input [ { name: "a"
    dims: [1,
           2] }, { name: 'b' "c" dims: 3 dims: -1 } ]
input < name: "d # no comment" >
parameters { key: "k" value { string_value: "v" } }
parameters: { key: "j"
  value < string_value: "w" > }
dynamic_batching { }
version_policy: { all { } }
"""


def test_every_spelling_of_the_text_format_is_read_with_its_line() -> None:
    document = read_pbtxt(SPELLINGS, "m/config.pbtxt")
    assert document.data == {
        "name": "x",
        "max_batch_size": 0,
        "input": [{"name": "a", "dims": [1, 2]}, {"name": "bc", "dims": [3, -1]}, {"name": "d # no comment"}],
        "parameters": {"k": "v", "j": "w"},
        "dynamic_batching": {},
        "version_policy": {"all": {}},
    }
    lines = {
        ("name",): 2,
        ("max_batch_size",): 2,
        ("input",): 3,
        ("input", 0, "name"): 3,
        ("input", 0, "dims"): 4,
        ("input", 0, "dims", 1): 5,
        ("input", 1, "name"): 5,
        ("input", 2): 6,
        ("parameters", "k"): 7,
        ("parameters", "j"): 8,
        ("version_policy", "all"): 11,
    }
    assert {loc: document.line_of(loc) for loc in lines} == lines


def test_a_value_without_a_line_has_the_line_of_its_parent() -> None:
    document = read_pbtxt('name: "m"\ninput { name: "x" }', "config.pbtxt")
    assert document.line_of(("input", 0, "dims", 3)) == 2
    assert document.line_of(("output",)) is None


def test_zero_is_distinguished_from_absent() -> None:
    assert read_pbtxt("max_batch_size: 0", "p").data == {"max_batch_size": 0}
    assert read_pbtxt("", "p").data == {}


@pytest.mark.parametrize(
    ("text", "line", "message", "cure"),
    [
        ('name: "a"\nmax_batchsize: 3', 2, 'unknown field "max_batchsize"', "did you mean max_batch_size?"),
        ('input {\n  nam: "a"\n}', 2, 'unknown field "nam"', "did you mean name?"),
        (
            "version_policy {\n latest { num_version: 3 } }",
            2,
            'unknown field "num_version"',
            "did you mean num_versions?",
        ),
        ("zzz: 1", 1, 'unknown field "zzz"', "docs/configuration.md"),
        ("input {", 1, "ends too early, as protobuf text", "close every bracket"),
        ('input [ { name: "x" }\n', 2, "ends too early, as protobuf text", "close every bracket"),
        ("\n\nname: 3", 3, "cannot be read as protobuf text", ""),
        ("max_batch_size: 99999999999", 1, "cannot be read as protobuf text", ""),
        ('name: "a"\nname: "b"', 2, "cannot be read as protobuf text", ""),
        ('name: "\\xff"', 1, "cannot be read as protobuf text", ""),
        ('name: "\\ud800"', 1, "cannot be read as protobuf text", ""),
        ("dynamic_batching {}\nsequence_batching {}", 2, "cannot be read as protobuf text", ""),
    ],
)
def test_errors_carry_their_line(text: str, line: int, message: str, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_pbtxt(text, "m/config.pbtxt")
    (finding,) = caught.value.findings
    assert (finding.path, finding.line, finding.fatal) == ("m/config.pbtxt", line, True)
    assert message in finding.message
    assert cure in finding.cure


def test_an_empty_list_is_distinguished_from_an_absent_one() -> None:
    document = read_pbtxt('input { name: "x"\n dims: [ ] }', "p")
    assert document.data == {"input": [{"name": "x", "dims": []}]}
    assert document.line_of(("input", 0, "dims")) == 2


def test_an_unknown_number_of_an_enumeration_is_refused_by_the_schema() -> None:
    assert read_pbtxt("instance_group { kind: 9 }", "p").data == {"instance_group": [{"kind": "9"}]}
