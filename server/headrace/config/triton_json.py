"""A configuration as Triton shows it at `/v2/models/<name>/config`: its names, its order, its defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from headrace.config.yaml_reader import read_value
from headrace.core.errors import ConfigError
from headrace.core.model_config import OWN_FIELDS, InstanceGroup, ModelConfig, ModelWarmup
from headrace.core.optimization_config import HEADRACE_OPTIMIZATION_FIELDS

# Fields of the published message that are refused here; a reader of Triton's JSON expects them with their defaults.
_INPUT_DEFAULTS = {"is_shape_tensor": False, "allow_ragged_batch": False}
_OUTPUT_DEFAULTS = {"is_shape_tensor": False}
# What YAML does not take, or takes for the end of a line.
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
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
        "input": [{**_plain(tensor), **_INPUT_DEFAULTS} for tensor in config.served_input],
        "output": [{**_plain(tensor), **_OUTPUT_DEFAULTS} for tensor in config.served_output],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            name: value
            for name, value in _plain(config.optimization).items()
            if name not in HEADRACE_OPTIMIZATION_FIELDS
        },
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
    shown = _plain(config)
    for place in OWN_FIELDS:
        part: Any = config
        value: Any = shown
        for name in map(str, place):
            default = type(part).model_fields[name].default
            part = getattr(part, name)
            value = value.get(name)
        if part != default:
            for key, leaf in _leaves(".".join(("headrace", *map(str, place))), value):
                found[key] = _text(leaf)
    return found


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    # A name with a dot in it cannot be a part of a dotted key.
    if isinstance(value, dict) and value and not any("." in name for name in value):
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
    # JSON is YAML but for characters beyond 16 bits, which it escapes in halves; as they are, YAML takes them.
    return _UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def _plain(part: BaseModel) -> dict[str, Any]:
    """Fields by name; blocks that are absent are left out, as in protobuf's JSON."""
    return part.model_dump(mode="json", exclude_none=True)


def _group(group: InstanceGroup) -> dict[str, object]:
    return {**_plain(group), **_GROUP_DEFAULTS}


def _warmup(warmup: ModelWarmup) -> dict[str, object]:
    # The three ways to tell the data are one choice in the message: only the one taken may appear.
    feeds = {name: {key: value for key, value in _plain(feed).items() if value} for name, feed in warmup.inputs.items()}
    return {**_plain(warmup), "inputs": feeds}
