"""Reads `config.pbtxt`, protobuf's text format of Triton's published `ModelConfig` message, into a `Document`.

Protobuf's own parser decides what is well formed and knows every field and type. It keeps no lines and, for plain numbers,
no difference between absent and zero; a second, lenient look at the text gives both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.document import Document, did_you_mean, refuse
from headrace.core.model_config import Location

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

TOKEN = re.compile(
    r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]:,;]|[^\s{}<>\[\]:,;"'\#]+|\n""",
)
_OPENING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class _Field:
    """One `name: value` or `name { ... }` of the text, one item of `name: [...]`, or an empty list."""

    name: str
    line: int
    value: str | list[_Field]
    empty_list: bool = False

    def inner(self, name: str) -> list[_Field]:
        return [part for part in self.value if part.name == name] if isinstance(self.value, list) else []


class _Outline:
    """Finds the fields and their lines in text that protobuf's parser has accepted."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, int]] = []
        line = 1
        for match in TOKEN.finditer(text):
            token = match.group()
            if token == "\n":
                line += 1
            elif not token.startswith("#"):
                self._tokens.append((token, line))
        self._next = 0

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _take(self) -> tuple[str, int]:
        token = self._tokens[self._next] if self._next < len(self._tokens) else ("", 0)
        self._next += 1
        return token

    def fields(self, closing: str = "") -> list[_Field]:
        found: list[_Field] = []
        while self._peek() not in ("", closing):
            name, line = self._take()
            if name in ",;":
                continue
            if self._peek() == ":":
                self._take()
            if self._peek() != "[":
                found.append(_Field(name, line, self._value()))
                continue
            self._take()
            if self._peek() == "]":
                found.append(_Field(name, line, [], empty_list=True))
            while self._peek() not in ("", "]"):
                if self._peek() == ",":
                    self._take()
                    continue
                item_line = self._tokens[self._next][1]
                found.append(_Field(name, item_line, self._value()))
            self._take()
        self._take()
        return found

    def _value(self) -> str | list[_Field]:
        token, _ = self._take()
        if token in _OPENING:
            return self.fields(_OPENING[token])
        if token == "-":
            return token + self._take()[0]
        text = token[1:-1] if token[:1] in "\"'" else token
        while token[:1] in "\"'" and self._peek()[:1] in ('"', "'"):
            text += self._take()[0][1:-1]
        return text


def _note_lines(
    fields: list[_Field], descriptor: Descriptor, loc: Location, path: str, lines: dict[Location, int]
) -> None:
    """Writes the line of every field under `loc` into `lines`.

    Raises:
        ConfigError: a key of a map is written twice; protobuf would silently take the last.
    """
    counts: dict[str, int] = {}
    for part in fields:
        field = descriptor.fields_by_name.get(part.name)
        if field is None:
            continue
        here: Location = (*loc, part.name)
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            lines.setdefault(here, part.line)
            keys = part.inner("key")
            key = keys[0].value if keys and isinstance(keys[0].value, str) else ""
            here = (*here, key)
            if here in lines:
                raise refuse(
                    path, part.line, f'{part.name} has the key "{key}" twice', f"see line {lines[here]}, remove one"
                )
            lines[here] = part.line
            for value in part.inner("value"):
                inner = message.fields_by_name["value"].message_type
                if inner is not None and isinstance(value.value, list):
                    _note_lines(value.value, inner, here, path, lines)
            continue
        lines.setdefault(here, part.line)
        if part.empty_list:
            continue
        if field.is_repeated:
            index = counts.get(part.name, 0)
            counts[part.name] = index + 1
            here = (*here, index)
            lines[here] = part.line
        if message is not None and isinstance(part.value, list):
            _note_lines(part.value, message, here, path, lines)


def plain_fields(message: Message, loc: Location, lines: Mapping[Location, int]) -> dict[str, Any]:
    """The fields that the text wrote, as plain values; enumerations by name, a parameter as its text.

    Args:
        message: what protobuf's parser made of the text.
        loc: where the message stands in the configuration.
        lines: has every place that the text names; which place comes first is where its number is lower.
    """
    data: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        here = (*loc, field.name)
        if isinstance(value, Mapping):
            if value or here in lines:
                # A protobuf map forgets the order in which its keys were written.
                keys = sorted(value, key=lambda key: (lines.get((*here, str(key)), 0), key))
                data[field.name] = {key: _map_item(value[key], (*here, str(key)), lines) for key in keys}
        elif isinstance(value, MutableSequence):
            if value or here in lines:
                data[field.name] = [_plain_item(item, field, (*here, index), lines) for index, item in enumerate(value)]
        elif field.message_type is not None:
            if message.HasField(field.name):
                data[field.name] = plain_fields(value, here, lines)
        elif here in lines or value != field.default_value:
            data[field.name] = _plain_item(value, field, here, lines)
    return data


def _plain_item(value: Any, field: Any, loc: Location, lines: Mapping[Location, int]) -> Any:
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return str(value) if name is None else name.name
    return plain_fields(value, loc, lines) if field.message_type is not None else value


def _map_item(value: Any, loc: Location, lines: Mapping[Location, int]) -> Any:
    if not hasattr(value, "DESCRIPTOR"):
        return value
    return value.string_value if value.DESCRIPTOR.name == "ModelParameter" else plain_fields(value, loc, lines)


def read_pbtxt(text: str, path: str) -> Document:
    """Reads a whole `config.pbtxt`.

    Args:
        text: what is in the file.
        path: the file's name for findings.

    Raises:
        ConfigError: not in the text format, or a field that Triton's schema does not have.
    """
    # Imported here because it costs 0.14 s, which a server of YAML files need not spend.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise refuse(path, error.GetLine(), *explain(str(error), model_config_pb2.DESCRIPTOR)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise refuse(path, None, f"cannot be read as protobuf text: {error}", "correct the value") from None
    lines: dict[Location, int] = {}
    _note_lines(_Outline(text).fields(), message.DESCRIPTOR, (), path, lines)
    return Document(path, plain_fields(message, (), lines), lines, own_prefix="headrace.")


def explain(error: str, file: Any, form: str = "protobuf text") -> tuple[str, str]:
    """Message and cure for what protobuf's parser says.

    Args:
        error: its sentence.
        file: descriptor of the file that has the messages.
        form: what the text was read as.
    """
    unknown = re.search(r'type "(?:inference\.)?([\w.]+)" has no field named "(\w+)"', error)
    if unknown is None:
        reason = re.sub(r"^\d+:\d+ ?: ", "", error)
        return f"cannot be read as {form}: {reason}", "correct the text"
    first, *rest = unknown[1].split(".")
    descriptor = file.message_types_by_name[first]
    for name in rest:
        descriptor = descriptor.nested_types_by_name[name]
    return f'unknown field "{unknown[2]}"', did_you_mean(unknown[2], descriptor.fields_by_name)
