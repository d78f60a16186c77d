"""A configuration as Triton shows it at `/v2/models/<name>/config`: its names, its order, its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from server.config.yaml_reader import read_value
from server.core.errors import ConfigError
from server.core.model_config import HEADRACE_FIELDS, InstanceGroup, ModelConfig, ModelWarmup

# Fields of the published message that are refused here; a reader of Triton's JSON expects them with their defaults.
_INPUT_DEFAULTS = {"is_shape_tensor": False, "allow_ragged_batch": False}
_OUTPUT_DEFAULTS = {"is_shape_tensor": False}
_GROUP_DEFAULTS: dict[str, object] = {"secondary_devices": [], "profile": [], "passive": False, "host_policy": ""}


def to_triton_json(config: ModelConfig) -> dict[str, object]:
    """The configuration as plain JSON values.

    Names and nesting are those of Triton's published message, which the result parses into; 64-bit numbers are numbers, as
    Triton writes them. Headrace's own fields are `parameters` named "headrace.".
    """
    shown: dict[str, object] = {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "version_policy": _plain(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [{**_plain(tensor), **_INPUT_DEFAULTS} for tensor in config.input],
        "output": [{**_plain(tensor), **_OUTPUT_DEFAULTS} for tensor in config.output],
        "batch_input": [],
        "batch_output": [],
        "optimization": _plain(config.optimization),
    }
    if config.dynamic_batching is not None:
        shown["dynamic_batching"] = _plain(config.dynamic_batching)
    shown |= {
        "instance_group": [_group(group) for group in config.instance_group],
        "default_model_filename": config.default_model_filename,
        "cc_model_filenames": {},
        "metric_tags": dict(config.metric_tags),
        "parameters": {
            key: {"string_value": text} for key, text in (config.parameters | own_parameters(config)).items()
        },
        "model_warmup": [_warmup(warmup) for warmup in config.model_warmup],
    }
    return shown


def own_parameters(config: ModelConfig) -> dict[str, str]:
    """Headrace's own fields where they are not at their defaults, by the names they have in `config.pbtxt`."""
    found: dict[str, str] = {}
    for name in HEADRACE_FIELDS:
        value = getattr(config, name)
        if value != ModelConfig.model_fields[name].default:
            for key, leaf in _leaves("headrace." + name, value):
                found[key] = _text(leaf)
    return found


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _text(value: object) -> str:
    """The value so that reading it as YAML gives it back; text stays bare where it can."""
    if isinstance(value, str):
        try:
            if read_value(value, "") == value:
                return value
        except ConfigError:
            pass
    return json.dumps(value)


def _plain(part: BaseModel) -> dict[str, Any]:
    """Fields by name; blocks that are absent are left out, as in protobuf's JSON."""
    return part.model_dump(mode="json", exclude_none=True)


def _group(group: InstanceGroup) -> dict[str, object]:
    return {**_plain(group), **_GROUP_DEFAULTS}


def _warmup(warmup: ModelWarmup) -> dict[str, object]:
    # The three ways to tell the data are one choice in the message: only the one taken may appear.
    feeds = {name: {key: value for key, value in _plain(feed).items() if value} for name, feed in warmup.inputs.items()}
    return {**_plain(warmup), "inputs": feeds}
