from __future__ import annotations

import json
from pathlib import Path

from headrace.config.model_config import ModelConfig
from headrace.config.triton_json import to_triton_json

from tests.support.models import read_config_text

EXAMPLES = Path(__file__).parent / "triton_examples"


def test_the_json_is_what_tritons_clients_expect() -> None:
    config, _ = read_config_text((EXAMPLES / "add_sub.pbtxt").read_text(), "config.pbtxt")
    assert config is not None
    shown = to_triton_json(config)
    assert list(shown)[:6] == ["name", "platform", "backend", "version_policy", "max_batch_size", "input"]
    assert shown["version_policy"] == {"latest": {"num_versions": 1}}
    assert shown["input"][0] == {  # type: ignore[index]
        "name": "INPUT0",
        "data_type": "TYPE_INT32",
        "format": "FORMAT_NONE",
        "dims": [16],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
    }
    assert shown["parameters"] == {
        "intra_op_thread_count": {"string_value": "1"},
        "execution_mode": {"string_value": "0"},
    }
    assert "dynamic_batching" not in shown


def test_headrace_fields_are_parameters() -> None:
    config = ModelConfig.model_validate(
        {
            "oversize": "reject",
            "slo": {"p99_ms": 1e-7},
            "labels": {"stable": 3},
            "preprocess": {"input": "no", "crop": [3, 4]},
            "parameters": {"a": "b"},
            "optimization": {
                "priority": "max",
                "precision": "int8",
                "profiles": [{"batch": [1, 2, 3]}],
                "calibration": {"data": "no"},
            },
        }
    )
    assert set(to_triton_json(config)["optimization"]) == {  # type: ignore[call-overload]
        *("priority", "input_pinned_memory", "output_pinned_memory", "gather_kernel_buffer_threshold", "eager_batching")
    }
    parameters = to_triton_json(config)["parameters"]
    assert isinstance(parameters, dict)
    texts = {key: value["string_value"] for key, value in parameters.items()}
    assert texts["a"] == "b"
    assert texts["headrace.oversize"] == "reject"
    assert float(texts["headrace.slo.p99_ms"]) == 1e-7
    assert texts["headrace.labels.stable"] == "3"
    assert texts["headrace.preprocess.input"] == '"no"'
    assert texts["headrace.preprocess.crop"] == "[3, 4]"
    assert "headrace.build_on_load" not in texts
    assert texts["headrace.optimization.precision"] == "int8"
    assert json.loads(texts["headrace.optimization.profiles"]) == [{"batch": [1, 2, 3], "shapes": {}}]
    assert texts["headrace.optimization.calibration.data"] == '"no"'
    assert texts["headrace.optimization.calibration.samples"] == "256"
    assert not any(key.startswith("headrace.optimization.accuracy") for key in texts)


def test_names_with_dots_stay_whole() -> None:
    limits = {"clients": {"shop.example": {"requests_per_s": 5.0, "burst": 2}, "tests": {"requests_per_s": 1.0}}}
    config = ModelConfig.model_validate({"rate_limits": limits, "fair_sharing": {"weights": {"shop": 3.0}}})
    parameters = to_triton_json(config)["parameters"]
    assert isinstance(parameters, dict)
    texts = {key: value["string_value"] for key, value in parameters.items()}
    assert json.loads(texts["headrace.rate_limits.clients"]) == {
        "shop.example": {"requests_per_s": 5.0, "burst": 2},
        "tests": {"requests_per_s": 1.0},
    }
    assert texts["headrace.fair_sharing.weights.shop"] == "3.0"
