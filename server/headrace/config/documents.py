"""Reads configuration files (YAML, protobuf text) into a `Document`: plain data with the line of each value.

All readers, also that of Triton's JSON (`triton_json`), return a `Document`, so that the later steps (screening, validation,
completion) exist once.

YAML: nodes are composed, not constructed, so that every value has a line. Only values that JSON can express are accepted: no
aliases (nothing grows beyond the file), no custom tags, no duplicate keys, no empty values.

Protobuf text format of Triton's published `ModelConfig` message: protobuf's own parser checks syntax, fields and types. It has no
lines and, for plain numbers, no difference between absent and zero; a second, lenient pass over the text adds both.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from headrace_reports.command_line import nearest

from headrace.config.config_base import Location, Problem
from headrace.core.errors import ConfigError, Finding

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

# A configuration is a page of text; a larger file is not a configuration.
MAX_CONFIG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One configuration file, parsed but not yet checked.

    Attributes:
        path: file name relative to the repository.
        data: field names to plain values (dict, list, str, int, float, bool).
        lines: 1-based line of every location in `data`.
        headrace_prefix: prefix of Headrace's own fields: "headrace." in `config.pbtxt`, "" in `config.yaml`.
        remarks: warnings of the reader.
    """

    path: str
    data: dict[str, object] = field(default_factory=dict)
    lines: dict[Location, int] = field(default_factory=dict)
    headrace_prefix: str = ""
    remarks: tuple[Finding, ...] = ()

    def line_of(self, loc: Location) -> int | None:
        """Return the line of `loc`, or of the nearest enclosing location with a line."""
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.lines:
                return self.lines[loc[:end]]
        return None

    def finding(self, problem: Problem, fatal: bool = True) -> Finding:
        """Create a finding with the file and line of a problem."""
        return Finding(self.path, self.line_of(problem.loc), problem.message, problem.cure, fatal)


def refuse(path: str, line: int | None, message: str, cure: str = "") -> ConfigError:
    """Create a ConfigError with one finding."""
    return ConfigError([Finding(path, line, message, cure)])


def file_signature(path: str | Path) -> tuple[int, ...]:
    """Return values that differ after a change of a file, its owner or its mode; empty if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size


def within(path: Path, root: Path) -> bool:
    """True if `path`, with all links followed, lies in `root`.

    Links of a Hugging Face cache lead from `snapshots/REVISION` to `blobs` beside it: where `root` lies in such a snapshot, the
    folder that holds both counts.
    """
    try:
        target, folder = path.resolve(), root.resolve()
        caches = [
            p.parent for p in (folder, *folder.parents) if p.name == "snapshots" and (p.parent / "blobs").is_dir()
        ]
    except (OSError, RuntimeError):  # a loop of links
        return False
    return any(target.is_relative_to(each) for each in (folder, *caches))


def open_regular_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; links are followed.

    A pipe in a repository would block the thread that opens it, and with it start-up, reloads and shutdown.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a folder; `strerror` has the reason.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_permissions(option: str, path: Path, mode: int) -> str:
    """Check the mode of a file with rights of clients.

    Args:
        option: option with the file, for the error.
        path: of the file.
        mode: from `os.fstat`.

    Returns:
        A warning if the group of the file may write it; "" for none.

    Raises:
        ConfigError: every user of the machine may write it.
    """
    if mode & stat.S_IWOTH:
        raise refuse(option, None, "can be written by every user of this machine", f"chmod 600 {path}")
    if mode & stat.S_IWGRP:
        return f"{path} can be written by its group, which may grant itself all rights (chmod g-w {path})"
    return ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a cure that names the choice nearest to `word`, or all choices."""
    words = sorted(choices)
    if near := nearest(word, words):
        return f"did you mean {near}?"
    if not words:
        return "remove it"
    return f"choose from: {', '.join(words)}" if len(words) <= 8 else "docs/configuration.md lists the fields"


MAX_DEPTH = 32
_SCALAR_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "merge", "value")}
_NULL = "tag:yaml.org,2002:null"
# Maps of free text: `1.50` and `yes` stay as written.
_TEXT_MAPS = {"parameters", "metric_tags"}


class _UnsupportedYaml(yaml.MarkedYAMLError):
    """Well-formed YAML that configurations must not use."""


class _Loader(yaml.SafeLoader):
    """Composes nodes without aliases and with limited depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _UnsupportedYaml(
                problem="anchors and aliases are not read; write the value out", problem_mark=event.start_mark
            )
        if self.depth >= MAX_DEPTH:
            raise _UnsupportedYaml(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


# YAML 1.1 reads 1e-7 as text; JSON and YAML 1.2 read it as a number.
EXPONENT_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_NUMBER, list("-+0123456789"))


class _Conversion:
    """Converts nodes to plain data and records their lines."""

    def __init__(self, loader: _Loader, path: str) -> None:
        self._loader = loader
        self._path = path
        self.lines: dict[Location, int] = {}

    def value(self, node: yaml.Node, loc: Location) -> object:
        line = node.start_mark.line + 1
        self.lines.setdefault(loc, line)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.value(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc, line)
        raise refuse(self._path, line, f"the tag {node.tag} is not read", "write plain values")

    def _mapping(self, node: yaml.MappingNode, loc: Location) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise refuse(self._path, line, "a key must be a word", "quote it if it is text")
            key = self._text(key_node, line)
            item_loc = (*loc, key)
            if key in data:
                cure = "remove one of them"
                raise refuse(self._path, line, f'"{key}" is written twice, first in line {self.lines[item_loc]}', cure)
            self.lines[item_loc] = line
            data[key] = self.value(value_node, item_loc)
        return data

    def _text(self, node: yaml.ScalarNode, line: int) -> str:
        text = str(node.value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise refuse(self._path, line, "half of a surrogate pair is not a character", "write the character itself")
        return text

    def _scalar(self, node: yaml.ScalarNode, loc: Location, line: int) -> object:
        text = self._text(node, line)
        if node.tag == _NULL:
            field = f'"{loc[-1]}"' if loc else "the file"
            cure = "write a value ({} for a block with its defaults), or remove the field"
            raise refuse(self._path, line, f"{field} has no value", cure)
        if node.tag not in _SCALAR_TAGS:
            raise refuse(self._path, line, f"the tag {node.tag} is not read", "write plain values")
        if len(loc) >= 2 and loc[-2] in _TEXT_MAPS:
            return text
        try:
            value: object = (
                self._loader.construct_object(node) if node.tag.endswith((":int", ":float", ":bool")) else text
            )
        except (ValueError, KeyError, IndexError, yaml.YAMLError):
            raise refuse(
                self._path, line, f"{text[:80]!r} cannot be read as a number", "quote it if it is text"
            ) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(self._path, line, f"{text[:80]!r} is not a finite number", "write a finite number")
        return value


def _compose(text: str, path: str) -> tuple[object, dict[Location, int]]:
    """Return plain data and lines of the only YAML document in `text`; None if there is none.

    Raises:
        ConfigError: the text is not YAML, or exceeds the limits of a configuration.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            conversion = _Conversion(loader, path)
            return conversion.value(node, ()), conversion.lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = None if mark is None else mark.line + 1, error.problem or error.context or ""
        cure = "write spaces in place of the tab" if r"'\t'" in problem else "correct the YAML"
        raise refuse(path, line, f"cannot be read as YAML: {problem}", cure) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise refuse(path, line, f"cannot be read as YAML: {error.reason}", "remove the character") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # PyYAML does not catch errors of int() and chr(), for instance for an escape beyond Unicode.
        raise refuse(path, None, f"cannot be read as YAML: {error}", "correct the YAML") from None


def read_yaml(text: str, path: str) -> Document:
    """Read a whole `config.yaml`; an empty file is an empty configuration.

    Args:
        text: content of the file.
        path: name of the file for findings.

    Raises:
        ConfigError: not YAML, not a mapping, or YAML that a configuration must not use.
    """
    data, lines = _compose(text, path)
    if data is None:
        return Document(path)
    if not isinstance(data, dict):
        raise refuse(
            path, 1, "a configuration is a mapping of fields to values", 'write lines such as "max_batch_size: 8"'
        )
    return Document(path, data, lines)


def read_value(text: str, path: str) -> object:
    """Read one value, a YAML scalar or JSON, as in `parameters` of `config.pbtxt`.

    Raises:
        ConfigError: not YAML, empty, or YAML that a configuration must not use.
    """
    data, _ = _compose(text, path)
    if data is None:
        raise refuse(path, None, "the value is empty", "write a value, or remove the parameter")
    return data


_TOKEN = re.compile(
    r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]:,;]|[^\s{}<>\[\]:,;"'\#]+|\n""",
)
_CLOSING = {"{": "}", "<": ">"}
# A sign apart from its number, which protobuf's parser for C++ reads and the one for Python does not; or a string, or a comment.
_SIGN = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*)|-((?:\s|\#[^\n]*\n)+)(?=[\w.])""")


@dataclass(frozen=True, slots=True)
class TextField:
    """One `name: value` or `name { ... }` of the text, one item of `name: [...]`, or an empty list.

    Attributes:
        name: name of the field.
        line: 1-based line.
        value: text without quotes, or the fields of a message.
        start: position of the value in the text, quotes or brackets included.
        end: end of the value.
        is_empty_list: the value is `[]`.
    """

    name: str
    line: int
    value: str | list[TextField]
    start: int
    end: int
    is_empty_list: bool = False

    def inner(self, name: str) -> list[TextField]:
        """Return the fields of a name in the message."""
        return [part for part in self.value if part.name == name] if isinstance(self.value, list) else []


class _Token(NamedTuple):
    text: str
    line: int
    start: int
    end: int


def outline(text: str) -> list[TextField]:
    """Return the fields of text that protobuf's parser has accepted."""
    return _Outline(text).fields()


class _Outline:
    """Finds fields, lines and positions in text that protobuf's parser has accepted."""

    def __init__(self, text: str) -> None:
        self._tokens: list[_Token] = []
        line = 1
        for match in _TOKEN.finditer(text):
            if match.group() == "\n":
                line += 1
            elif not match.group().startswith("#"):
                self._tokens.append(_Token(match.group(), line, *match.span()))
        self._index = 0
        self._last = _Token("", 0, len(text), len(text))

    def _peek(self) -> str:
        return self._tokens[self._index].text if self._index < len(self._tokens) else ""

    def _advance(self) -> str:
        if self._index < len(self._tokens):
            self._last = self._tokens[self._index]
            self._index += 1
            return self._last.text
        return ""

    def fields(self, closing: str = "") -> list[TextField]:
        fields: list[TextField] = []
        while self._peek() not in ("", closing):
            name = self._advance()
            if name in ",;":
                continue
            line = self._last.line
            if self._peek() == ":":
                self._advance()
            if self._peek() != "[":
                fields.append(self._field(name, line))
                continue
            self._advance()
            start = self._last.start
            if self._peek() == "]":
                fields.append(TextField(name, line, [], start, self._tokens[self._index].end, is_empty_list=True))
            while self._peek() not in ("", "]"):
                if self._peek() == ",":
                    self._advance()
                else:
                    fields.append(self._field(name, self._tokens[self._index].line))
            self._advance()
        self._advance()
        return fields

    def _field(self, name: str, line: int) -> TextField:
        token = self._advance()
        start = self._last.start
        value: str | list[TextField] = token
        if token in _CLOSING:
            value = self.fields(_CLOSING[token])
        elif token == "-":
            value = token + self._advance()
        elif token[:1] in ('"', "'"):
            value = token[1:-1]
            while self._peek()[:1] in ('"', "'"):  # a string may continue in a second pair of quotes
                value += self._advance()[1:-1]
        return TextField(name, line, value, start, self._last.end)


def _note_lines(
    fields: list[TextField], descriptor: Descriptor, loc: Location, lines: dict[Location, int], repeated: list[Problem]
) -> None:
    """Record the line of every field under `loc` in `lines`, and every key of a map that is written again in `repeated`."""
    counts: dict[str, int] = {}
    for part in fields:
        field = descriptor.fields_by_name.get(part.name)
        if field is None:
            continue
        item_loc: Location = (*loc, part.name)
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            lines.setdefault(item_loc, part.line)
            keys = part.inner("key")
            key = keys[0].value if keys and isinstance(keys[0].value, str) else ""
            item_loc = (*item_loc, key)
            if item_loc in lines:
                message_text = f'{part.name} has the key "{key}" twice: its value is that of line {part.line}'
                repeated.append(Problem(item_loc, message_text, f"see line {lines[item_loc]}, remove one"))
                for stale in [each for each in lines if each[: len(item_loc)] == item_loc]:
                    del lines[stale]
            lines[item_loc] = part.line
            for value in part.inner("value"):
                inner = message.fields_by_name["value"].message_type
                if inner is not None and isinstance(value.value, list):
                    _note_lines(value.value, inner, item_loc, lines, repeated)
            continue
        lines.setdefault(item_loc, part.line)
        if part.is_empty_list:
            continue
        if field.is_repeated:
            index = counts.get(part.name, 0)
            counts[part.name] = index + 1
            item_loc = (*item_loc, index)
            lines[item_loc] = part.line
        if message is not None and isinstance(part.value, list):
            _note_lines(part.value, message, item_loc, lines, repeated)


def plain_fields(message: Message, loc: Location, lines: Mapping[Location, int]) -> dict[str, Any]:
    """Return the fields in a message as plain values: enumerations by name, a parameter as its text.

    Args:
        message: message from protobuf's parser.
        loc: location of the message in the configuration.
        lines: order of every location in the text.
    """
    data: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        item_loc = (*loc, descriptor.name)
        if isinstance(value, Mapping):
            if value or item_loc in lines:
                # A protobuf map has no order of its keys.
                keys = sorted(value, key=lambda key: (lines.get((*item_loc, str(key)), 0), key))
                data[descriptor.name] = {key: _map_item(value[key], (*item_loc, str(key)), lines) for key in keys}
        elif isinstance(value, MutableSequence):
            if value or item_loc in lines:
                data[descriptor.name] = [
                    _plain_item(item, descriptor, (*item_loc, index), lines) for index, item in enumerate(value)
                ]
        elif descriptor.message_type is not None:
            if message.HasField(descriptor.name):
                data[descriptor.name] = plain_fields(value, item_loc, lines)
        elif item_loc in lines or value != descriptor.default_value:
            data[descriptor.name] = _plain_item(value, descriptor, item_loc, lines)
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
    """Read a whole `config.pbtxt`.

    Args:
        text: content of the file.
        path: name of the file for findings.

    Raises:
        ConfigError: not in the text format, or a field that Triton's schema does not have.
    """
    # Imported here because it takes 0.14 s, which servers with YAML files do not need.
    from google.protobuf import text_format

    from headrace.config.triton_messages import model_config_pb2

    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(_SIGN.sub(lambda match: match[1] or f" {match[2]}-", text), message)
    except text_format.ParseError as error:
        raise refuse(path, error.GetLine(), *describe_parse_error(str(error), model_config_pb2.DESCRIPTOR)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise refuse(path, None, f"cannot be read as protobuf text: {error}", "correct the value") from None
    lines: dict[Location, int] = {}
    repeated: list[Problem] = []
    _note_lines(outline(text), message.DESCRIPTOR, (), lines, repeated)
    document = Document(path, plain_fields(message, (), lines), lines, headrace_prefix="headrace.")
    return replace(document, remarks=tuple(document.finding(problem, fatal=False) for problem in repeated))


def describe_parse_error(error: str, file: Any, form: str = "protobuf text") -> tuple[str, str]:
    """Return message and cure for an error of protobuf's parser.

    Args:
        error: text of the error.
        file: descriptor of the file that has the messages.
        form: format of the text, for the message.
    """
    unknown = re.search(r'type "(?:inference\.)?([\w.]+)" has no field named "(\w+)"', error)
    if unknown is None:
        reason = re.sub(r"^\d+:\d+ ?: ", "", error)
        if reason.startswith(("'': Expected", 'Expected "}"')):
            return f"ends too early, as {form}", "close every bracket: as many } as {, as many ] as ["
        return f"cannot be read as {form}: {reason}", "correct the text"
    first, *rest = unknown[1].split(".")
    descriptor = file.message_types_by_name[first]
    for name in rest:
        descriptor = descriptor.nested_types_by_name[name]
    return f'unknown field "{unknown[2]}"', did_you_mean(unknown[2], descriptor.fields_by_name)
