"""Reads a configuration in Triton's JSON, as a load request carries it, into a `Document`.

Protobuf's own parser decides what is well formed and knows every field under both its names (`max_batch_size` and
`maxBatchSize`). Whether a number was written or left out, which it does not keep, a walk over the JSON tells.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.config.document import MAX_CONFIG_BYTES, Document, refuse
from headrace.config.pbtxt_reader import explain, plain_fields
from headrace.core.model_config import Location

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

NAME = "config"
"""What findings call the configuration of a load request."""


def read_config_json(text: str) -> Document:
    """Reads the value of a load request's parameter `config`.

    Raises:
        ConfigError: no JSON, or a field that Triton's schema does not have.
    """
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    if len(text) > MAX_CONFIG_BYTES:
        raise refuse(NAME, None, f"is larger than {MAX_CONFIG_BYTES} bytes", "a configuration is a page of text")
    message = model_config_pb2.ModelConfig()
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        if not isinstance(data, dict):
            raise refuse(
                NAME, None, "is no JSON object", 'write {"max_batch_size": 8}, or {} to have all of it completed'
            )
        json_format.ParseDict(data, message)
    except json.JSONDecodeError as error:
        raise refuse(NAME, error.lineno, f"cannot be read as JSON: {error.msg}", "correct the JSON") from None
    except json_format.Error as error:
        message_and_cure = explain(_short(error), model_config_pb2.DESCRIPTOR, "JSON")
        raise refuse(NAME, None, *message_and_cure) from None
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise refuse(NAME, None, f"cannot be read as JSON: {_short(error)}", "correct the value") from None
    written: dict[Location, int] = {}
    _note(data, message.DESCRIPTOR, (), written)
    return Document(NAME, plain_fields(message, (), written), own_prefix="headrace.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()  # protobuf chokes on half of a surrogate pair
        if name in data:
            raise ValueError(f"{name!r:.80} is written twice")
        data[name] = value
    return data


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _short(error: Exception) -> str:
    """The parser's sentence; it quotes what was sent, so it is bounded and freed of what cannot be sent back."""
    return ascii(str(error))[1:-1][:400]


def _note(data: dict[str, Any], descriptor: Descriptor, loc: Location, written: dict[Location, int]) -> None:
    """Writes every place that the JSON names, in its order, into `written`; null is the same as left out."""
    for name, value in data.items():
        field = descriptor.fields_by_name.get(name) or descriptor.fields_by_camelcase_name.get(name)
        if field is None or value is None:
            continue
        here: Location = (*loc, field.name)
        written[here] = len(written)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
            items = [((*here, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            items = [((*here, index), item) for index, item in enumerate(value)]
        else:
            items = [(here, value)]
        for place, item in items:
            written[place] = len(written)
            if inner is not None and isinstance(item, dict):
                _note(item, inner, place, written)
