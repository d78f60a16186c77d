"""`docs/from-triton.md`: every flag of tritonserver and every field of a model's configuration does what its row promises."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from headrace.__main__ import main
from headrace.config.binding import FEATURES, REFUSED, bind
from headrace.config.triton_json import read_config_json
from headrace.core.errors import Finding
from headrace.server import settings
from headrace_engines.__main__ import main as engines_main
from headrace_reports.command_line import Parser
from tritonclient.grpc import model_config_pb2

from tests.support.models import add_model, affine

PAGE = (Path(__file__).parents[3] / "docs" / "from-triton.md").read_text()
_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]*) \|", re.MULTILINE)


def section(title: str) -> dict[str, str]:
    """First to second cell of the tables of a section."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = _ROW.findall(text)
    assert len(rows) == len({name for name, _ in rows}), "a row is there twice"
    return {name: cell.strip() for name, cell in rows}


FLAGS = section("Flags")
FIELDS = section("Fields")


# Flags

# Flags with the same name, meaning and values.
TRITON_SAME = (
    "--help",
    "--id",
    "--model-repository",
    "--load-model",
    "--model-load-thread-count",
    "--http-port",
    "--grpc-port",
    "--http-header-forward-pattern",
    "--grpc-header-forward-pattern",
    "--metrics-port",
    "--trace-file",
    "--trace-rate",
    "--metrics-config",
    "--cache-config",
)


def test_every_flag_has_a_row_and_every_row_matches_the_command() -> None:
    expected = dict.fromkeys(TRITON_SAME, "the same")
    expected |= {flag: f"the same as `{ours}`, taken" for flag, ours in settings.TRITON_ALIASES.items()}
    expected |= settings.triton_hints()
    expected["--log-format"] = "the same name, other values: --log-format text or --log-format json"
    assert expected == FLAGS


def parsed(*words: str) -> settings.Settings:
    parser = Parser(prog="headrace serve")
    settings.add_arguments(parser, {})
    return settings.from_arguments(parser.parse_args(words))


# Ends before it listens; should it not, it takes free ports.
SERVE = ("serve", "--http-port", "0", "--grpc-port", "0")
VALUES = {
    "--model-control-mode": "poll",
    "--trace-file": "f",
    "--load-model": "m",
    "--metrics-config": "histogram_latencies=false",
    "--cache-config": "local,size=1048576",
}


@pytest.mark.parametrize("flag", [*TRITON_SAME[1:], *settings.TRITON_ALIASES])
def test_an_accepted_flag_works_like_the_headrace_option(flag: str) -> None:
    value = VALUES.get(flag, "7")
    ours = settings.TRITON_ALIASES.get(flag, flag)
    assert parsed(f"{flag}={value}") == parsed(ours, value)
    assert parsed(flag, value) != parsed(), "it has an effect"


# The form of a flag is parsed without regard to its name: two flags have all forms.
FORMS = [f"{flag}{more}" for flag in list(settings.triton_hints())[:2] for more in ("=1", " 1", "")]


@pytest.mark.parametrize("words", [*FORMS, *(f"{flag}=1" for flag in list(settings.triton_hints())[2:])])
def test_any_other_flag_is_answered(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = words.partition("=")[0].split()[0]
    with pytest.raises(SystemExit) as ended:
        main([*SERVE, *words.split()])
    assert ended.value.code == 2
    assert f"unknown option {flag} of tritonserver: {FLAGS[flag]}" in capsys.readouterr().err


def test_options_that_answers_name_are_there() -> None:
    """An answer that sends people to an option that does not exist would be a riddle."""
    parser = Parser(prog="headrace serve options")
    settings.add_arguments(parser, {})
    entry = set(re.findall(r"--[a-z][a-z0-9-]*", parser.format_help()))
    named = {option for text in settings.triton_hints().values() for option in re.findall(r"--[a-z][a-z0-9-]*", text)}
    assert named - entry == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SERVE, "--htp-port", "1"], "unknown option --htp-port: did you mean --http-port?"),
        ([*SERVE, "--model-control=pol"], "did you mean poll?"),
        (
            [*SERVE, "--grpc-engine=fast"],
            "unknown option --grpc-engine of an earlier version, which is gone: there is one gRPC",
        ),
        ([*SERVE, "--grpc-engine", "grpcio"], "Headrace's own; leave the option out"),
        (
            ["simulate", "--requests-per-sequence", "3"],
            "unknown option --requests-per-sequence of an earlier version, which is gone: sequences are not simulated",
        ),
        (["simulate", "--slots=16"], "unknown option --slots of an earlier version"),
        (["serv"], "did you mean serve?"),
        (["explain", "m", "--jsn"], "unknown option --jsn: did you mean --json?"),
        (["infer", "m", "--log-verbose=1"], "unknown option --log-verbose"),
        ([*SERVE, "a", "--strict", "b"], "unexpected: b"),
    ],
)
def test_misspelt_words_are_answered(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# Fields

BASE: dict[str, Any] = {
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
}
# Values that fit, where any value of the type does not.
SAMPLES: dict[str, Any] = {
    "name": "m",
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "runtime": "onnxruntime",
    "max_batch_size": 8,
    "input[].data_type": "TYPE_FP16",
    "output[].data_type": "TYPE_FP16",
    "input[].dims": [3],
    "output[].dims": [3],
    "input[].reshape.shape": [2, 1],
    "output[].reshape.shape": [2, 1],
    "input[].name": "other",
    "output[].name": "other",
    "instance_group[].gpus": [0],
    "instance_group[].kind": "KIND_GPU",
    "dynamic_batching.preferred_batch_size": [2],
    "model_warmup[].inputs[].data_type": "TYPE_FP32",
    "model_warmup[].inputs[].dims": [2],
    "parameters[].string_value": "1",
    "version_policy": {"all": {}},
    "version_policy.specific": {"versions": [1]},
    "input[].format": "FORMAT_NCHW",
    # Blocks without a meaning of their own: one of their fields is set.
    "optimization.graph": {"level": 1},
    "optimization.cuda": {"graphs": True},
    "instance_group[].rate_limiter": {"priority": 1},
    "model_operations": {"op_library_filename": ["x"]},
    "model_transaction_policy": {"decoupled": True},
    "model_repository_agents": {"agents": [{"name": "x"}]},
    "response_cache": {"enable": True},
    "model_metrics": {"metric_control": [{"metric_identifier": {"family": "x"}}]},
    "model_metrics.metric_control[].histogram_options.buckets": [1.0, 2.5],
    "input[].reshape": {"shape": [2]},
    "output[].reshape": {"shape": [2]},
    "optimization.execution_accelerators.gpu_execution_accelerator": [{"name": "tensorrt"}],
    "optimization.execution_accelerators.gpu_execution_accelerator[].name": "tensorrt",
    "optimization.execution_accelerators.gpu_execution_accelerator[].parameters": {"precision_mode": "FP16"},
    "optimization.execution_accelerators.cpu_execution_accelerator": [{"name": "openvino"}],
}
DATA = {"zero_data": True}
COMPUTED = {"target_name": ["count"], "data_type": "TYPE_INT32", "source_input": ["x"]}
SCATTERED = {"target_name": ["y"], "source_input": ["x"]}
SAMPLES |= {
    "batch_input": [COMPUTED],
    "batch_output": [SCATTERED],
    "batch_input[].data_type": "TYPE_FP32",
    "batch_input[].source_input": ["x"],
    "batch_input[].target_name": ["other"],
    "batch_output[].source_input": ["x"],
    "batch_output[].target_name": ["y"],
    "batch_output[].kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
}
CONTROL = "sequence_batching.control_input[].control"
START = {"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}
SAMPLES |= {
    "sequence_batching.control_input": [{"name": "s", "control": [START]}],
    CONTROL: [START],
    f"{CONTROL}[].int32_false_true": [0, 1],
    f"{CONTROL}[].fp32_false_true": [0, 1],
    f"{CONTROL}[].bool_false_true": [False, True],
    f"{CONTROL}[].data_type": "TYPE_UINT64",
    f"{CONTROL}[].kind": "CONTROL_SEQUENCE_END",
    "sequence_batching.control_input[].name": "s",
}
STATE = {"input_name": "i", "output_name": "o", "data_type": "TYPE_FP32", "dims": [1]}
INITIAL = "sequence_batching.state[].initial_state"
SAMPLES |= {
    "sequence_batching.state": [STATE],
    "sequence_batching.state[].input_name": "i",
    "sequence_batching.state[].output_name": "o",
    "sequence_batching.state[].data_type": "TYPE_FP32",
    INITIAL: [{"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}],
    f"{INITIAL}[].data_type": "TYPE_FP32",
}


def control(**fields: Any) -> dict[str, Any]:
    """A configuration with one control input."""
    return {"sequence_batching": {"control_input": [{"name": "s", "control": [fields]}]}}


# What must be written beside a field for it to mean anything.
BESIDE: dict[str, dict[str, Any]] = {
    "instance_group": {"backend": "tensorrt", "instance_group": [{"kind": "KIND_GPU"}]},
    "dynamic_batching.default_priority_level": {"dynamic_batching": {"priority_levels": 2}},
    "dynamic_batching.priority_queue_policy": {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}},
    "dynamic_batching.priority_levels": {"dynamic_batching": {"default_priority_level": 1}},
    "input[].format": {"input": [{"dims": [3, 8, 8]}]},
    "optimization.execution_accelerators.gpu_execution_accelerator[].parameters": {
        "optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}}
    },
    "optimization.execution_accelerators.cpu_execution_accelerator[].parameters": {
        "optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}}
    },
    "batch_input[]": {"batch_input": [COMPUTED]},
    "sequence_batching.control_input[].name": control(**START),
    "sequence_batching.control_input[].control": {"sequence_batching": {"control_input": [{"name": "s"}]}},
    f"{CONTROL}[].kind": control(int32_false_true=[0, 1]),
    f"{CONTROL}[].data_type": control(kind="CONTROL_SEQUENCE_CORRID"),
    "sequence_batching.state[]": {"sequence_batching": {"state": [STATE]}},
    "sequence_batching.state[].use_growable": {
        "sequence_batching": {"state": [{**STATE, "use_same_buffer_for_input_output": True}]}
    },
    f"{INITIAL}[]": {"sequence_batching": {"state": [{**STATE, "initial_state": [{"data_type": "TYPE_FP32", "dims": [1]}]}]}},
    **{
        f"{INITIAL}[].{field}": {"sequence_batching": {"state": [{"initial_state": [{"zero_data": True}]}]}}
        for field in ("data_type", "dims", "name")
    },
    "batch_output[]": {"batch_output": [SCATTERED]},
    "model_warmup": {
        "model_warmup": [{"name": "w", "batch_size": 1, "inputs": {"x": {"data_type": "TYPE_FP32", "dims": [2], **DATA}}}]
    },
}  # fmt: skip
KEYS = {"dynamic_batching.priority_queue_policy": "1", "parameters": "wait", "model_warmup[].inputs": "x"}


def is_repeated(field: FieldDescriptor) -> bool:
    """A property or a method, by the version of protobuf."""
    repeated = field.is_repeated
    return bool(repeated() if callable(repeated) else repeated)


def fields(descriptor: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field of the message, from the outside in; below what is refused as a whole there is nothing to say."""
    for field in descriptor.fields:
        here = f"{path}.{field.name}" if path else field.name
        yield here, field
        if field.message_type is None or here.replace("[]", ".*") in REFUSED:
            continue
        inner = field.message_type
        if inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None:
            yield from fields(inner, f"{here}[]" if is_repeated(field) else here)


ALL = dict(fields(model_config_pb2.ModelConfig.DESCRIPTOR))


def value_of(path: str, field: FieldDescriptor) -> Any:
    if path in SAMPLES:
        return SAMPLES[path]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {KEYS.get(path, "k"): value_of(path, field.message_type.fields_by_name["value"])}
    value: Any
    if field.message_type is not None:
        value = {}
    elif field.enum_type is not None:
        value = field.enum_type.values[min(1, len(field.enum_type.values) - 1)].name
    else:
        value = {field.CPPTYPE_STRING: "x", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
    return [value] if is_repeated(field) else value


def merged(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return {key: merged(base.get(key), more[key]) if key in more else base[key] for key in {**base, **more}}
    if isinstance(base, list) and isinstance(more, list) and base and isinstance(more[0], dict):
        return [merged(base[0], more[0]), *base[1:]]
    return copy.deepcopy(more)


def configuration(path: str) -> dict[str, Any]:
    """The smallest configuration that sets a field."""
    value = value_of(path, ALL[path])
    steps = path.split(".")
    for index in range(len(steps) - 1, -1, -1):
        value = {steps[index].removesuffix("[]"): value}
        if index and steps[index - 1].endswith("[]"):
            around = ".".join(steps[:index]).removesuffix("[]")
            is_map = ALL[around].message_type.GetOptions().map_entry
            value = {KEYS.get(around, "k"): value} if is_map else [value]
    config = copy.deepcopy(BASE)
    for prefix, beside in BESIDE.items():
        if path.startswith(prefix):
            config = merged(config, beside)
    if (path.startswith("model_warmup[].inputs[].") and path.endswith("_data")) or path.endswith("input_data_file"):
        del config["model_warmup"][0]["inputs"]["x"]["zero_data"]  # one of the three is a choice
    return dict(merged(config, value))


def findings_of(config: dict[str, Any]) -> list[Finding]:
    return bind(read_config_json(json.dumps(config)))[1]


def test_every_field_has_a_row() -> None:
    assert FIELDS.keys() == ALL.keys()


@pytest.mark.parametrize("path", ALL)
def test_a_field_is_parsed_as_documented(path: str) -> None:
    promise = FIELDS[path].split(":")[0]
    result = findings_of(configuration(path))
    levels = {"error" if finding.fatal else "warning" for finding in result}
    expected = {"honoured": set(), "informative": set(), "no effect, with a warning": {"warning"}, "refused": {"error"}}
    assert levels == expected[promise], (configuration(path), [str(finding) for finding in result])
    if promise == "refused":
        assert '" is not supported' in result[0].message
        assert result[0].cure


def test_every_listed_feature_is_a_refused_field() -> None:
    assert FEATURES.keys() <= REFUSED.keys()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"platform": "tensorflow_graphdef"}, "a TensorFlow GraphDef"),
        ({"platform": "tensorflow_savedmodel"}, "a TensorFlow SavedModel"),
        ({"backend": "dali"}, "a DALI pipeline"),
        ({"backend": "openvino"}, "an OpenVINO model"),
        ({"backend": "fil"}, "a forest of trees (FIL)"),
    ],
)
def test_a_refusal_names_the_feature_in_plain_words(config: dict[str, Any], words: str) -> None:
    result = [finding for finding in findings_of(merged(BASE, config)) if finding.fatal]
    assert result
    assert any(words in finding.message for finding in result), [str(finding) for finding in result]
    assert all(finding.cure for finding in result)


# Names of models


@pytest.mark.parametrize("command", ["build", "inspect", "compare", "tune", "simulate", "validate"])
def test_a_misspelt_model_is_answered_with_the_nearest(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add_model(tmp_path, "resnet50", affine())
    model, folder = "resnt50", str(tmp_path / "resnt50")
    if command in ("build", "inspect", "compare"):
        status = engines_main([command, model, "--model-repository", str(tmp_path)])
    elif command == "validate":
        status = main([command, folder])
    else:
        more = ["--profile", "450+20n", "--rate", "10"] if command == "simulate" else []
        status = main([command, model, "--model-repository", str(tmp_path), *more])
    assert status != 0
    out = capfd.readouterr()
    assert "did you mean resnet50?" in " ".join((out.out + out.err).split())
