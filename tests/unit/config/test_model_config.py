from __future__ import annotations

from typing import Any

import pytest
from headrace.config.config_base import Problem, Problems
from headrace.config.model_config import HEADRACE_FIELDS, ModelConfig, name_problem
from headrace.core.tensor import BY_CONFIG_NAME
from pydantic import BaseModel, ValidationError
from tritonclient.grpc import model_config_pb2


def problems(**fields: Any) -> list[Problem]:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(fields)
    result = []
    for detail in caught.value.errors():
        cause = detail.get("ctx", {}).get("error")
        assert isinstance(cause, Problems), detail
        result += [problem._replace(loc=(*detail["loc"], *problem.loc)) for problem in cause.problems]
    return result


def test_an_empty_configuration_has_tritons_defaults() -> None:
    config = ModelConfig()
    assert config.max_batch_size == 0
    assert config.dynamic_batching is None
    assert config.version_policy.latest is not None
    assert config.version_policy.latest.num_versions == 1
    assert config.oversize == "split"
    assert config.model_fields_set == set()


def test_a_configuration_is_frozen_all_the_way() -> None:
    config = ModelConfig.model_validate({"input": [{"name": "x"}], "dynamic_batching": {}})
    for part, field in ((config, "name"), (config.input[0], "name"), (config.dynamic_batching, "preserve_ordering")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, field, "y")


@pytest.mark.parametrize("name", BY_CONFIG_NAME)
def test_datatypes_are_known_by_long_and_short_names(name: str) -> None:
    for written in (name, name.lower(), name.removeprefix("TYPE_"), name.removeprefix("TYPE_").lower()):
        assert ModelConfig.model_validate({"input": [{"name": "x", "data_type": written}]}).input[0].data_type == name


def test_words_of_enumerations_may_be_short() -> None:
    config = ModelConfig.model_validate(
        {
            "instance_group": [{"kind": "cpu"}, {"kind": "KIND_GPU"}, {"kind": "Auto"}],
            "dynamic_batching": {"default_queue_policy": {"timeout_action": "delay"}},
            "oversize": "REJECT",
            "preprocess": {"color": "Gray", "layout": "NHWC"},
        }
    )
    assert [group.kind for group in config.instance_group] == ["KIND_CPU", "KIND_GPU", "KIND_AUTO"]
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.default_queue_policy.timeout_action == "DELAY"
    assert config.oversize == "reject"
    assert config.preprocess is not None
    assert (config.preprocess.color, config.preprocess.layout) == ("gray", "nhwc")


@pytest.mark.parametrize(
    ("fields", "loc", "message"),
    [
        ({"name": "a/b"}, ("name",), "'a/b' cannot be a model's name"),
        ({"backend": "openvino"}, ("backend",), 'backend "openvino" is not served here'),
        ({"platform": "tensorflow_graphdef"}, ("platform",), 'platform "tensorflow_graphdef" is not served here'),
        ({"platform": "tensorrt_plan", "backend": "onnxruntime"}, ("platform",), "does not go with backend"),
        ({"input": [{"name": "x"}, {"name": "x"}]}, ("input", 1, "name"), 'input "x" is listed twice'),
        ({"input": [{"name": "x", "dims": [3, 0]}]}, ("input", 0, "dims", 1), "not 0"),
        ({"input": [{"name": "x", "data_type": "fp31"}]}, ("input", 0, "data_type"), '"fp31" is not a datatype'),
        (
            {"input": [{"name": "x", "dims": [4], "reshape": {"shape": [2, 3]}}]},
            ("input", 0, "reshape"),
            "reshape [2, 3] does not hold as many elements as dims [4]",
        ),
        ({"output": [{"name": "x", "reshape": {"shape": [3]}}]}, ("output", 0, "reshape"), "as dims []"),
        ({"input": [{"name": "x", "dims": [4], "format": "nchw"}]}, ("input", 0, "format"), "dims of 3 sizes"),
        (
            {"max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": [2, 8]}},
            ("dynamic_batching", "preferred_batch_size", 1),
            "preferred_batch_size 8 is more than max_batch_size 4",
        ),
        ({"dynamic_batching": {"priority_levels": 2}}, ("dynamic_batching", "default_priority_level"), "is not one of"),
        ({"dynamic_batching": {"default_priority_level": 2}}, ("dynamic_batching", "default_priority_level"), "is not"),
        (
            {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1, "preserve_ordering": True}},
            ("dynamic_batching", "preserve_ordering"),
            "contradict each other",
        ),
        (
            {"dynamic_batching": {"priority_queue_policy": {3: {}}}},
            ("dynamic_batching", "priority_queue_policy", 3),
            "there is no priority level 3",
        ),
        ({"instance_group": [{"kind": "cpu", "gpus": [0]}]}, ("instance_group", 0, "gpus"), "KIND_CPU"),
        ({"version_policy": {}}, ("version_policy",), "one policy is needed"),
        ({"rate_limits": {}}, ("rate_limits",), "has no limits"),
        (
            {"rate_limits": {"clients": {"a shop": {"requests_per_s": 1}}}},
            ("rate_limits", "clients", "a shop", "[key]"),
            "'a shop' cannot be the name of a client",
        ),
        (
            {"fair_sharing": {"weights": {"": 1}}},
            ("fair_sharing", "weights", "", "[key]"),
            "cannot be the name of a client",
        ),
        ({"version_policy": {"all": {}, "latest": {}}}, ("version_policy",), "one policy is needed"),
        ({"labels": {"1": 1}}, ("labels", "1", "[key]"), "cannot be the label"),
        ({"preprocess": {"std": [1, 0, 1]}}, ("preprocess", "std"), "cannot be 0"),
        ({"preprocess": {"mean": [1, 2]}}, ("preprocess", "mean"), "mean has 2 numbers"),
        ({"preprocess": {"crop": [300, 200]}}, ("preprocess", "crop"), "larger than the picture"),
        (
            {"preprocess": {"input": "z"}, "input": [{"name": "x"}]},
            ("preprocess", "input"),
            'preprocess.input "z" is not an input',
        ),
        ({"preprocess": {}, "input": [{"name": "x"}, {"name": "y"}]}, ("preprocess",), "preprocess.input is missing"),
        ({"model_warmup": [{"inputs": {"x": {}}}]}, ("model_warmup", 0, "inputs", "x"), "has no data"),
        ({"keep_loaded": True, "unload_after_s": 60}, ("unload_after_s",), "does not go with keep_loaded"),
        (
            {"input": [{"name": "x"}], "model_warmup": [{"inputs": {"y": {"zero_data": True}}}]},
            ("model_warmup", 0, "inputs", "y"),
            'names "y"',
        ),
    ],
)
def test_a_problem_has_its_place_and_message(fields: dict[str, Any], loc: tuple[object, ...], message: str) -> None:
    result = problems(**fields)
    assert [problem.loc for problem in result] == [loc]
    assert message in result[0].message


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_size": "8"},
        {"max_batch_size": True},
        {"max_batch_size": 8.0},
        {"max_batch_size": -1},
        {"max_batch_size": 2**31},
        {"build_on_load": "yes"},
        {"gpu_memory_budget": 0},
        {"gpu_memory_budget": 1.5},
        {"gpu_memory_budget": "0 B"},
        {"gpu_memory_budget": "2 gib"},
        {"gpu_memory_budget": "2"},
        {"gpu_memory_budget": "-1GiB"},
        {"gpu_memory_budget": "9999999999GiB"},
        {"keep_loaded": 1},
        {"unload_after_s": 0},
        {"unload_after_s": -1},
        {"unload_after_s": "60"},
        {"unload_after_s": 1e9},
        {"name": 3},
        {"slo": {"p99_ms": 0}},
        {"slo": {"p99_ms": 1.1e9}},
        {"cache": {"ttl_s": 0.0005}},
        {"cache": {"ttl_s": 1.1e9}},
        {"slo": {"p99_ms": float("nan")}},
        {"slo": {"p99_ms": float("inf")}},
        {"dynamic_batching": {"priority_levels": 100_000}},
        {"rate_limits": {"default": {}}},
        {"rate_limits": {"default": {"requests_per_s": 0}}},
        {"rate_limits": {"default": {"requests_per_s": 1e10}}},
        {"rate_limits": {"default": {"requests_per_s": 1, "burst": 0}}},
        {"rate_limits": {"clients": {"shop": 3}}},
        {"fair_sharing": {"weights": {"shop": 0}}},
        {"fair_sharing": {"weights": {"shop": 1e9}}},
        {"fair_sharing": {"default_weight": -1}},
        {"priority_aging_microseconds": -1},
        {"unknown": 1},
    ],
)
def test_scalars_are_strict_and_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelConfig.model_validate(fields)


@pytest.mark.parametrize("name", ["a", "resnet50", "a.b-c_d", "0", "_x", "a" * 128])
def test_good_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "-a", ".a", "ä", "a b", "a\n", "a\0", "a" * 129])
def test_bad_names(name: str) -> None:
    problem = name_problem(name)
    assert problem is not None
    assert problem.cure


def test_the_preferred_size_waits_for_the_batch_size() -> None:
    """Without max_batch_size in the file nothing can be compared yet; the reader completes it from the model."""
    assert ModelConfig.model_validate({"dynamic_batching": {"preferred_batch_size": [64]}}).dynamic_batching is not None


def test_one_number_serves_all_channels() -> None:
    config = ModelConfig.model_validate({"preprocess": {"mean": 127, "std": 128.0}})
    assert config.preprocess is not None
    assert (config.preprocess.mean, config.preprocess.std) == ((127.0,), (128.0,))


def _models(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    from headrace.config.binding import model_in

    seen.add(model)
    for field in model.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None and inner not in seen:
            _models(inner, seen)
    return seen


def test_every_field_is_described() -> None:
    models = _models(ModelConfig, set())
    assert len(models) > 15
    assert [f"{m.__name__}.{name}" for m in models for name, f in m.model_fields.items() if not f.description] == []


def test_headrace_fields_are_those_that_tritons_message_lacks() -> None:
    # Triton's `runtime` names a backend's library, which no model here has.
    triton = set(model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name) - {"runtime"}
    assert set(HEADRACE_FIELDS) == set(ModelConfig.model_fields) - triton


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        (5, 5),
        ("7B", 7),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("512 MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
    ],
)
def test_a_size_is_a_number_or_has_a_unit(size: object, size_bytes: int) -> None:
    assert ModelConfig.model_validate({"gpu_memory_budget": size}).gpu_memory_budget == size_bytes


@pytest.mark.parametrize(("limit", "most"), [({}, 2), ({"burst": 7}, 7), ({"requests_per_s": 0.1}, 1)])
def test_the_default_burst_is_one_second_of_requests(limit: dict[str, Any], most: int) -> None:
    config = ModelConfig.model_validate({"rate_limits": {"default": {"requests_per_s": 2.5, **limit}}})
    assert config.rate_limits is not None
    assert config.rate_limits.default is not None
    assert config.rate_limits.default.burst_size == most
