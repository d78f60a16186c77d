"""Compares `config.pbtxt` with protobuf's parser for C++, which is Triton's: the same values of every text that it takes."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, json_format, text_format
from headrace.config.documents import plain_fields, read_pbtxt
from headrace.config.model_config import ModelConfig
from headrace.config.triton_json import to_triton_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from tests.support.config_strategies import configs
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(shutil.which("protoc") is None, reason="needs protoc")
# A number, its sign apart; and other spellings of the same text.
SPELLINGS = {
    r"-(?=\w)": ["- ", "-\t\n ", "- # a comment: 1\n", "-"],
    r": (?=[-\w])": [":", ": # 1\n ", ":\n", ": "],
    r" \{": ["{", ":{", " {", "{ # -\n"],
    r"\}": ["};", "},", "} # '\n", "}"],
}
REPEATED = 'parameters { key: "KEY" value { string_value: "first" } }\n'
DAMAGE = [
    "-",
    " - ",
    "[",
    "]",
    ",",
    ";",
    ":",
    '"',
    "'",
    "#",
    "1",
    "0x",
    "inf",
    'parameters { key: "a" }',
    "\n",
    "\v",
    "\\",
]


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the schema of a configuration."""
    path = tmp_path_factory.mktemp("protoc") / "model_config"
    files = descriptor_pb2.FileDescriptorSet()
    model_config_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    path.write_bytes(files.SerializeToString())
    return path


def parse(text: str, descriptors: Path) -> model_config_pb2.ModelConfig | None:
    """Return what the parser for C++ reads; None if it refuses the text."""
    command = ["protoc", f"--descriptor_set_in={descriptors}", "--encode=inference.ModelConfig"]
    result = subprocess.run(
        [*command, model_config_pb2.DESCRIPTOR.name], input=text.encode(), capture_output=True, check=False
    )
    if result.returncode:
        return None
    try:
        return model_config_pb2.ModelConfig.FromString(result.stdout)
    except Exception:
        return None  # text that is not UTF-8


def agrees(text: str, descriptors: Path) -> None:
    message = parse(text, descriptors)
    if message is None:
        return
    document = read_pbtxt(text, "config.pbtxt")
    assert plain_fields(message, (), document.lines) == document.data


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "x" dims: [ - 1, -\n2 ] dims: - # 3\n 4 dims: - 0x10 }',
        "instance_group { kind: - 1 }",
        "model_metrics { metric_control { histogram_options { buckets: [ - 1.5, - inf, - 1f ] } } }",
        "name: \"- 1 # no comment\" platform: '- 2'",
        'parameters { key: "a" value { string_value: "1" } } parameters { key: "a" }',
        "model_warmup { inputs { key: 'a' value { dims: 1 } } inputs { key: 'a' value { zero_data: true } } }",
        "dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 2 } } priority_queue_policy { key: 1 } }",
    ],
)
def test_text_that_triton_takes_is_read(text: str, descriptors: Path) -> None:
    assert parse(text, descriptors) is not None
    agrees(text, descriptors)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs, seed=st.integers(0, 2**32))
def test_every_text_of_protobuf_has_protobufs_values(config: ModelConfig, seed: int, descriptors: Path) -> None:
    draw = random.Random(seed)
    message = json_format.ParseDict(to_triton_json(config), model_config_pb2.ModelConfig())
    lines = text_format.MessageToString(message, as_utf8=True).split("\n")
    for pattern, spellings in SPELLINGS.items():
        spelling = partial(lambda spellings, _match: draw.choice(spellings), spellings)
        lines = [line if '"' in line else re.sub(pattern, spelling, line) for line in lines]
    text = "\n".join(lines)
    for key in [key for key in [*config.parameters, "a", "a"] if key.isalnum() and draw.random() < 0.5]:
        text = REPEATED.replace("KEY", key) + text
    for _ in range(draw.randint(0, 2)):
        at = draw.randint(0, len(text))
        text = text[:at] + draw.choice(DAMAGE) + text[at:]
    agrees(text, descriptors)


def test_a_key_that_is_written_twice_is_a_warning(descriptors: Path) -> None:
    text = 'parameters { key: "k" value { string_value: "1" } }\nparameters { key: "k" value { string_value: "2" } }'
    (finding,) = read_pbtxt(text, "m/config.pbtxt").remarks
    assert (finding.line, finding.fatal) == (2, False)
    assert 'parameters has the key "k" twice: its value is that of line 2' in finding.message
    assert "see line 1" in finding.cure
