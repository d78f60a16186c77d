"""Triton's JSON form of a configuration: read for a load request, written for the API.

Every field is accepted under both names (`max_batch_size` and `maxBatchSize`); protobuf's own parser checks fields and types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from headrace.config.config_base import Location
from headrace.config.model_config import HEADRACE_FIELD_PATHS, ModelConfig
from headrace.config.optimization_config import HEADRACE_OPTIMIZATION_FIELDS
from headrace.config.sequence_config import SequenceBatching
from headrace.config.tensor_config import ModelWarmup
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
from headrace.config.documents import MAX_CONFIG_BYTES, Document, describe_parse_error, plain_fields, read_value, refuse

NAME = "config"
"""Name of a load request's configuration in findings."""


def read_config_json(text: str) -> Document:
    """Read the value of a load request's parameter `config`.

    Raises:
        ConfigError: not JSON, or a field that Triton's schema does not have.
    """
    from google.protobuf import json_format

    from headrace.config.triton_messages import model_config_pb2

    if len(text) > MAX_CONFIG_BYTES:
        raise refuse(NAME, None, f"is larger than {MAX_CONFIG_BYTES} bytes", "a configuration is a page of text")
    message = model_config_pb2.ModelConfig()
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
        if not isinstance(data, dict):
            raise refuse(NAME, None, "is not a JSON object", 'write {"max_batch_size": 8}, or {} to complete all of it')
        json_format.ParseDict(data, message)
    except json.JSONDecodeError as error:
        raise refuse(NAME, error.lineno, f"cannot be read as JSON: {error.msg}", "correct the JSON") from None
    except json_format.Error as error:
        message_and_cure = describe_parse_error(_short(error), model_config_pb2.DESCRIPTOR, "JSON")
        raise refuse(NAME, None, *message_and_cure) from None
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise refuse(NAME, None, f"cannot be read as JSON: {_short(error)}", "correct the value") from None
    order: dict[Location, int] = {}
    _note_paths(data, message.DESCRIPTOR, (), order)
    return Document(NAME, plain_fields(message, (), order), headrace_prefix="headrace.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()  # protobuf fails on half of a surrogate pair
        if name in data:
            raise ValueError(f"{name!r:.80} is written twice")
        data[name] = value
    return data


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _short(error: Exception) -> str:
    """Return the parser's error text; it quotes the input, so it is bounded and made ASCII."""
    return ascii(str(error))[1:-1][:400]


def _note_paths(data: dict[str, Any], descriptor: Descriptor, loc: Location, order: dict[Location, int]) -> None:
    """Record the order of every location in the JSON in `order`; null is the same as absent."""
    for name, value in data.items():
        field = descriptor.fields_by_name.get(name) or descriptor.fields_by_camelcase_name.get(name)
        if field is None or value is None:
            continue
        item_loc: Location = (*loc, field.name)
        order[item_loc] = len(order)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
            items = [((*item_loc, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            items = [((*item_loc, index), item) for index, item in enumerate(value)]
        else:
            items = [(item_loc, value)]
        for child_loc, item in items:
            order[child_loc] = len(order)
            if inner is not None and isinstance(item, dict):
                _note_paths(item, inner, child_loc, order)


# Fields of the published message that are refused; readers of Triton's JSON expect them with their defaults.
_TENSOR_DEFAULTS = {"is_shape_tensor": False}
# Characters that YAML refuses, or reads as the end of a line.
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_GROUP_DEFAULTS: dict[str, object] = {"secondary_devices": [], "profile": [], "passive": False, "host_policy": ""}


def to_triton_json(config: ModelConfig) -> dict[str, object]:
    """Return the configuration as plain JSON values.

    Names and nesting are those of Triton's published message, which can parse the result. 64-bit numbers are numbers,
    as Triton writes them. Headrace's own fields are `parameters` named "headrace.".
    """
    document: dict[str, object] = {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "version_policy": _plain(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [{**_plain(tensor), **_TENSOR_DEFAULTS} for tensor in config.served_input],
        "output": [{**_plain(tensor), **_TENSOR_DEFAULTS} for tensor in config.served_output],
        "batch_input": [_plain(item) for item in config.batch_input],
        "batch_output": [_plain(item) for item in config.batch_output],
        "optimization": {
            name: value
            for name, value in _plain(config.optimization).items()
            if name not in HEADRACE_OPTIMIZATION_FIELDS
        },
    }
    blocks = (
        "dynamic_batching", "ensemble_scheduling", "response_cache", "model_transaction_policy", "model_metrics"
    )  # fmt: skip
    document |= {name: _plain(block) for name in blocks if (block := getattr(config, name)) is not None}
    if config.sequence_batching is not None:
        document["sequence_batching"] = _sequences(config.sequence_batching)
    document |= {
        "instance_group": [{**_plain(group), **_GROUP_DEFAULTS} for group in config.instance_group],
        "default_model_filename": config.default_model_filename,
        "cc_model_filenames": {},
        "metric_tags": dict(config.metric_tags),
        "parameters": {
            key: {"string_value": text} for key, text in (config.parameters | headrace_parameters(config)).items()
        },
        "model_warmup": [_warmup(warmup) for warmup in config.model_warmup],
    }
    return document


def headrace_parameters(config: ModelConfig) -> dict[str, str]:
    """Return Headrace's own fields that are not at their defaults, by their names in `config.pbtxt`."""
    parameters: dict[str, str] = {}
    document = _plain(config)
    for path in HEADRACE_FIELD_PATHS:
        part: Any = config
        value: Any = document
        for name in map(str, path):
            default = type(part).model_fields[name].default
            part = getattr(part, name)
            value = value.get(name)
        if part != default:
            for key, leaf in _leaves(".".join(("headrace", *map(str, path))), value):
                parameters[key] = _text(leaf)
    return parameters


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    # A name with a dot in it cannot be a part of a dotted key.
    if isinstance(value, dict) and value and not any("." in name for name in value):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _text(value: object) -> str:
    """Format a value so that reading it as YAML gives it back; text stays unquoted if possible."""
    if isinstance(value, str):
        try:
            if read_value(value, "") == value:
                return value
        except ConfigError:
            pass
    # JSON is YAML except for characters beyond 16 bits, which JSON escapes in halves; unescaped, YAML accepts them.
    return _UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def _plain(part: BaseModel) -> dict[str, Any]:
    """Return fields by name; absent blocks are left out, as in protobuf's JSON."""
    return part.model_dump(mode="json", exclude_none=True)


def _sequences(sequences: SequenceBatching) -> dict[str, object]:
    """Return the block without the strategy, and the kinds of initial data, that it does not have."""
    document = {name: value for name, value in _plain(sequences).items() if value is not None}
    initial = [
        [{key: value for key, value in _plain(each).items() if value} for each in state.initial_state]
        for state in sequences.state
    ]
    states = [{**_plain(state), "initial_state": each} for state, each in zip(sequences.state, initial, strict=True)]
    return {**document, "state": states}


def _warmup(warmup: ModelWarmup) -> dict[str, object]:
    # The three data sources are a oneof in the message: only the chosen one may appear.
    feeds = {name: {key: value for key, value in _plain(feed).items() if value} for name, feed in warmup.inputs.items()}
    return {**_plain(warmup), "inputs": feeds}
