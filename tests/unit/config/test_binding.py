from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from headrace.config.binding import REFUSED, bind
from headrace.config.documents import Document, read_pbtxt, read_yaml
from headrace.config.model_config import ModelConfig, is_headrace_field
from headrace.config.sequence_config import SequenceBatching
from headrace.core.errors import Finding

from tests.support.models import read_config_text

EXAMPLES = Path(__file__).parent / "triton_examples"


def example(name: str) -> tuple[ModelConfig | None, list[Finding]]:
    path = EXAMPLES / name
    return read_config_text(path.read_text(), "m/config" + path.suffix)


def findings_of(text: str, reader: Callable[[str, str], Document] = read_yaml) -> list[str]:
    return [str(finding) for finding in bind(reader(text, "f"))[1]]


@pytest.mark.parametrize("name", ["image_classifier.pbtxt", "add_sub.pbtxt", "text_encoder.pbtxt"])
def test_ordinary_triton_configurations_raise_no_eyebrow(name: str) -> None:
    config, findings = example(name)
    assert config is not None
    assert findings == []


def test_an_image_classifier() -> None:
    config, _ = example("image_classifier.pbtxt")
    assert config is not None
    assert config.max_batch_size == 16
    assert config.input[0].dims == (3, 224, 224)
    assert config.input[0].format == "FORMAT_NCHW"
    assert config.output[0].label_filename == "labels.txt"
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == (4, 8, 16)
    assert config.dynamic_batching.max_queue_delay_microseconds == 250
    assert [(group.kind, group.count) for group in config.instance_group] == [("KIND_CPU", 2)]
    assert config.version_policy.latest is not None
    assert config.version_policy.latest.num_versions == 2


def test_a_text_encoder() -> None:
    config, _ = example("text_encoder.pbtxt")
    assert config is not None
    assert [tensor.data_type for tensor in config.input] == ["TYPE_INT64", "TYPE_BOOL", "TYPE_STRING"]
    assert config.input[2].optional
    assert config.input[2].reshape is not None
    assert config.version_policy.specific is not None
    assert config.version_policy.specific.versions == (1, 3)
    assert "max_batch_size" in config.model_fields_set


def test_parameters_of_the_backend_stay() -> None:
    config, _ = example("add_sub.pbtxt")
    assert config is not None
    assert config.parameters == {"intra_op_thread_count": "1", "execution_mode": "0"}


def test_both_formats_are_equivalent() -> None:
    from_pbtxt, pbtxt_findings = example("tuned.pbtxt")
    from_yaml, yaml_findings = example("tuned.yaml")
    assert from_pbtxt is not None
    assert from_pbtxt == from_yaml
    assert sorted(f.message for f in pbtxt_findings) == sorted(f.message for f in yaml_findings)
    assert not any(finding.fatal for finding in pbtxt_findings)


def test_a_tuned_configuration_is_carried_in_full() -> None:
    config, findings = example("tuned.pbtxt")
    assert config is not None
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.priority_queue_policy[3].max_queue_size == 64
    assert config.optimization.execution_accelerators is not None
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert accelerator.parameters == {"precision_mode": "FP16", "max_workspace_size_bytes": "1073741824"}
    assert config.slo.p99_ms == 50
    assert config.labels == {"stable": 1, "canary": 2}
    assert config.oversize == "reject"
    assert config.preprocess is not None
    assert config.preprocess.mean == (123.7, 116.3, 103.5)
    assert config.model_warmup[0].inputs["x"].random_data
    assert config.parameters == {}
    warned = {finding.message.split('"')[1] for finding in findings}
    assert "slo" not in warned
    assert {"metric_tags", "optimization.cuda"} <= warned
    assert "instance_group.0.kind" not in warned


def test_every_refused_field_is_refused_by_name_line_and_cure() -> None:
    config, findings = example("refused.pbtxt")
    assert config is None
    named = {finding.message.split('"')[1] for finding in findings}
    of_triton = [pattern for pattern in REFUSED if not is_headrace_field(tuple(pattern.split(".")))]
    # A configuration has one scheduler: the field of an ensemble has a test with the others in docs/from-triton.md.
    expected = {pattern.replace("*", "0") for pattern in of_triton} - {"ensemble_scheduling.step.0.model_namespace"}
    # The second input is the shape tensor.
    expected = {name.replace("input.0.is_", "input.1.is_") if name.startswith("input") else name for name in expected}
    assert named == expected
    text = (EXAMPLES / "refused.pbtxt").read_text().splitlines()
    for finding in findings:
        assert finding.fatal
        assert finding.cure
        assert finding.line is not None
        field = finding.message.split('"')[1].split(".")
        assert field[-1] in text[finding.line - 1], finding


def test_a_python_model_is_bound_by_its_backend() -> None:
    config, findings = example("python_backend.pbtxt")
    assert config is not None
    assert (config.backend, config.kind, findings) == ("python", "python", [])


def test_an_ensemble_is_read_with_its_steps() -> None:
    config, findings = example("ensemble.pbtxt")
    assert config is not None, findings
    assert config.is_pipeline
    assert config.ensemble_scheduling is not None
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["preprocess", "classify"]
    assert config.ensemble_scheduling.step[1].input_map == {"data_0": "pixels"}


def test_an_empty_block_turns_sequences_on() -> None:
    config, findings = bind(read_pbtxt("sequence_batching { }", "config.pbtxt"))
    assert findings == []
    assert config is not None
    assert config.sequence_batching == SequenceBatching()


def test_refused_fields_at_their_defaults_are_passed_over() -> None:
    text = "input: [{name: x, is_shape_tensor: false}]\nbatch_input: []\nresponse_cache: {enable: false}"
    config, findings = bind(read_yaml(text, "f"))
    assert config is not None
    assert findings == []


def test_unknown_fields_get_a_suggestion() -> None:
    text = "max_batch_siz: 3\ndynamic_batching:\n  max_queue_delay: 5\ninput:\n- name: x\n  dim: [3]\n"
    assert findings_of(text) == [
        'f:1: error: unknown field "max_batch_siz" (did you mean max_batch_size?)',
        'f:3: error: unknown field "dynamic_batching.max_queue_delay" (did you mean max_queue_delay_microseconds?)',
        'f:6: error: unknown field "input.0.dim" (did you mean dims?)',
    ]
    assert findings_of("precision: fp16\n") == [
        'f:1: error: unknown field "precision" (write it in the block optimization)'
    ]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("float32", "FP32"),
        ("float", "FP32"),
        ("Half", "FP16"),
        ("bfloat16", "BF16"),
        ("double", "FP64"),
        ("str", "STRING"),
    ],
)
def test_datatypes_of_other_libraries_get_the_right_word(word: str, meant: str) -> None:
    (finding,) = findings_of(f"input: [{{name: x, data_type: {word}, dims: [3]}}]\n")
    assert finding.endswith(f'"{word}" is not a datatype (write TYPE_{meant})')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: yes", "f:1: error: name must be text, not True (put it in quotes)"),
        (
            'max_batch_size: "8"',
            "f:1: error: max_batch_size must be a whole number, not '8' (write the number without quotes)",
        ),
        ("max_batch_size: 8.5", "f:1: error: max_batch_size must be a whole number, not 8.5 (write a number)"),
        (
            "input: [{name: x, optional: 1}]",
            "f:1: error: input.0.optional must be true or false, not 1 (write true or false)",
        ),
        ("input: x", "f:1: error: input must be a list, not 'x' (write [...], or one item a line behind '-')"),
        ("input:\n- 3", "f:2: error: input.0 must be a block of fields, not 3 (write {} for the defaults)"),
        ("input:\n- dims: [1]", 'f:2: error: "input.0.name" is missing (write name)'),
        (
            "max_batch_size: -3",
            "f:1: error: max_batch_size should be greater than or equal to 0, not -3 (correct the value)",
        ),
        ("oversize: splitt", 'f:1: error: oversize: "splitt" is not a valid value (write one of split, reject)'),
        ("parameters:\n  wait: [1]", "f:2: error: parameters.wait must be text, not [1] (put it in quotes)"),
    ],
)
def test_wrong_values_have_readable_errors(text: str, message: str) -> None:
    assert findings_of(text) == [message]


def parameter(key: str, value: str) -> str:
    return f'name: "m"\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("headrace.slow.p99_ms", "5", 'unknown parameter "headrace.slow.p99_ms"'),
        ("headrace.slo.p99ms", "5", 'unknown field "headrace.slo.p99ms" (did you mean p99_ms?)'),
        ("headrace.slo.p99_ms", "fast", "headrace.slo.p99_ms must be a number, not 'fast'"),
        ("headrace.slo.p99_ms", "", '"headrace.slo.p99_ms": the value is empty'),
        ("headrace.slo.p99_ms", "[", '"headrace.slo.p99_ms": cannot be read as YAML'),
        ("headrace.max_batch_size", "5", "max_batch_size is a field of Triton"),
        ("headrace.", "5", 'unknown parameter "headrace."'),
        ("headrace.oversize.deep", "x", "oversize"),
        ("headrace.optimization.precison", "int8", "did you mean headrace.optimization.precision?"),
        ("headrace.optimization.precision", "int4", 'headrace.optimization.precision: "int4" is not a valid value'),
        ("headrace.optimization.calibration.sample", "9", 'unknown field "headrace.optimization.calibration.sample"'),
        ("headrace.optimization.priority", "1", "optimization.priority is a field of Triton"),
        ("headrace.optimization", "{precision: int8}", "optimization is a field of Triton"),
        ("headrace.optimization.profiles.0.batch", "[1, 2, 3]", "optimization.profiles must be a list"),
    ],
)
def test_wrong_headrace_parameters_are_errors(key: str, value: str, message: str) -> None:
    errors = [text for text in findings_of(parameter(key, value), read_pbtxt) if ": error:" in text]
    assert len(errors) == 1
    assert errors[0].startswith("f:2: error: ")
    assert message in errors[0]


def test_a_field_set_in_two_ways_is_an_error() -> None:
    result = findings_of("oversize: split\nparameters: {headrace.oversize: reject}")
    assert result == ['f:2: error: "headrace.oversize" is written twice (keep one of them)']


OPTIMIZED_YAML = """
max_batch_size: 32
input: [{name: ids, data_type: int64, dims: [-1]}]
optimization:
  precision: INT8
  priority: max
  workspace_mb: 512
  profiles: [{batch: [1, 8, 32], shapes: {ids: [[1], [64], [512]]}}]
  calibration: {method: percentile, data: calibration, percentile: 99.9, keep: ["head*"]}
  accuracy: {max_drop: 0.005, min_top1_agreement: 0.98}
build_on_load: true
"""
OPTIMIZED_PBTXT = """
max_batch_size: 32
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
optimization { priority: PRIORITY_MAX }
parameters { key: "headrace.optimization.precision" value { string_value: "int8" } }
parameters { key: "headrace.optimization.workspace_mb" value { string_value: "512" } }
parameters {
  key: "headrace.optimization.profiles"
  value { string_value: "[{batch: [1, 8, 32], shapes: {ids: [[1], [64], [512]]}}]" }
}
parameters { key: "headrace.optimization.calibration.method" value { string_value: "percentile" } }
parameters { key: "headrace.optimization.calibration.data" value { string_value: "calibration" } }
parameters { key: "headrace.optimization.calibration.percentile" value { string_value: "99.9" } }
parameters { key: "headrace.optimization.calibration.keep" value { string_value: "['head*']" } }
parameters { key: "headrace.optimization.accuracy" value { string_value: "{max_drop: 0.005, min_top1_agreement: 0.98}" } }
parameters { key: "headrace.build_on_load" value { string_value: "true" } }
"""


def test_build_settings_are_equal_in_both_formats() -> None:
    from_yaml, yaml_findings = bind(read_yaml(OPTIMIZED_YAML, "f"))
    from_pbtxt, pbtxt_findings = bind(read_pbtxt(OPTIMIZED_PBTXT, "f"))
    assert [f for f in (*yaml_findings, *pbtxt_findings) if "priority" not in f.message] == []
    assert from_yaml is not None
    assert from_yaml == from_pbtxt
    parsed = from_yaml.optimization
    assert (parsed.precision, parsed.priority, parsed.workspace_mb) == ("int8", "PRIORITY_MAX", 512)
    assert parsed.profiles[0].shapes["ids"] == ((1,), (64,), (512,))
    assert parsed.calibration.keep == ("head*",)
    assert from_yaml.build_on_load


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("{batch: [8, 4, 16]}", "batch [8, 4, 16] does not ascend"),
        ("{shapes: {x: [[1], [2]]}}", "optimization.profiles.0.shapes.x"),
        ("{shapes: {x: [[1], [2], [-1]]}}", 'the shapes of "x" do not ascend'),
        ("{shapes: {x: [[1], [2, 3], [4]]}}", 'the shapes of "x" do not ascend'),
    ],
)
def test_a_profile_must_be_a_range(profile: str, message: str) -> None:
    (result,) = findings_of(f"optimization:\n  profiles:\n  - {profile}")
    assert result.startswith("f:3: error: ")
    assert message in result


def test_of_the_accelerators_the_builder_reads_tensorrt() -> None:
    text = """
optimization:
  execution_accelerators:
    gpu_execution_accelerator:
    - {name: tensorrt, parameters: {precision_mode: INT8, max_workspace_size_bytes: 1, trt_engine_cache_enable: x}}
    - {name: cuda_graphs, parameters: {deep: x}}
    cpu_execution_accelerator: [{name: openvino}]
"""
    where = "optimization.execution_accelerators."
    assert [text.split('"')[1].removeprefix(where) for text in findings_of(text)] == [
        "gpu_execution_accelerator.0.parameters.trt_engine_cache_enable",
        "gpu_execution_accelerator.1",
        "cpu_execution_accelerator",
    ]


def test_one_block_may_be_split_over_several_parameters() -> None:
    text = parameter("headrace.preprocess.crop", "[3, 4]") + parameter("headrace.preprocess", "x").replace(
        'name: "m"', ""
    )
    assert "written twice" in " ".join(findings_of(text, read_pbtxt))
    text = parameter("headrace.preprocess.crop", "[3, 4]") + parameter("headrace.preprocess.layout", "nhwc").replace(
        'name: "m"', ""
    )
    config, findings = bind(read_pbtxt(text, "f"))
    assert findings == []
    assert config is not None
    assert config.preprocess is not None
    assert (config.preprocess.crop, config.preprocess.layout) == ((3, 4), "nhwc")


def test_the_yaml_form_of_tritons_parameters_is_read() -> None:
    config, findings = bind(
        read_yaml("parameters: {wait: {string_value: x}, execution_mode: 1.50, headrace.oversize: reject}", "f")
    )
    assert findings == []
    assert config is not None
    assert config.parameters == {"wait": "x", "execution_mode": "1.50"}
    assert config.oversize == "reject"


def test_image_preparation_and_class_ranking_in_both_formats() -> None:
    yaml_text = "preprocess: {by: server, source: [480, 640]}\npostprocess: {top_k: 5, scores: chances}\n"
    parsed = {
        "preprocess.by": "server",
        "preprocess.source": "[480, 640]",
        "postprocess.top_k": 5,
        "postprocess.scores": "chances",
    }
    text = "".join(
        f'parameters {{ key: "headrace.{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parsed.items()
    )
    configs = [read_config_text(yaml_text, "m/config.yaml"), read_config_text(text, "m/config.pbtxt")]
    assert [findings for _, findings in configs] == [[], []]
    assert configs[0][0] == configs[1][0]
    assert configs[0][0] is not None
    assert configs[0][0].preprocess is not None
    assert configs[0][0].preprocess.pixels == (480, 640, 3)


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_kinds_and_gpus_count_whatever_the_backend(backend: str) -> None:
    text = f"backend: {backend}\ninstance_group: [{{kind: gpu, gpus: [1]}}]\n"
    config, findings = bind(read_yaml(text, "config.yaml"))
    assert config is not None
    assert findings == []


def test_tritons_runtime_library_is_refused_and_its_default_passed_over() -> None:
    (finding,) = findings_of('runtime: "libtriton_other.so"', read_pbtxt)
    assert '"libtriton_other.so" is not a valid value (write one of auto, onnxruntime, tensorrt)' in finding
    config, findings = bind(read_yaml("runtime: ''", "f"))
    assert config is not None
    assert (config.runtime, findings) == ("auto", [])
