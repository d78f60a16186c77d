"""Reads `config.yaml` into a `Document`.

The nodes are composed, not constructed, so that every value keeps its line. Only what JSON could say is let through: no
aliases (nothing grows beyond the file), no tags of one's own, no duplicate keys, no empty values.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from headrace.config.document import Document, refuse
from headrace.core.model_config import Location

MAX_DEPTH = 32
_SCALAR_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "merge", "value")}
_NULL = "tag:yaml.org,2002:null"
# Maps of free text: `1.50` and `yes` are kept as they are written.
_TEXT_MAPS = {"parameters", "metric_tags"}


class _Refused(yaml.MarkedYAMLError):
    """YAML that is well formed but not for configurations."""


class _Loader(yaml.SafeLoader):
    """Composes nodes without aliases and not too deep."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _Refused(
                problem="anchors and aliases are not read; write the value out", problem_mark=event.start_mark
            )
        if self.depth >= MAX_DEPTH:
            raise _Refused(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


# YAML 1.1 takes 1e-7 for text; JSON, and everybody, takes it for a number.
EXPONENT_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_NUMBER, list("-+0123456789"))


class _Conversion:
    """Turns nodes into plain data and notes their lines."""

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
            here = (*loc, key)
            if key in data:
                cure = "remove one of them"
                raise refuse(self._path, line, f'"{key}" is written twice, first in line {self.lines[here]}', cure)
            self.lines[here] = line
            data[key] = self.value(value_node, here)
        return data

    def _text(self, node: yaml.ScalarNode, line: int) -> str:
        text = str(node.value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise refuse(self._path, line, "half of a surrogate pair is no character", "write the character itself")
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
            raise refuse(self._path, line, f"{text[:80]!r} is no finite number", "write a finite number")
        return value


def _compose(text: str, path: str) -> tuple[object, dict[Location, int]]:
    """Plain data and lines of the only YAML document in `text`; None if there is none.

    Raises:
        ConfigError: it is no YAML, or more than a configuration may hold.
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
        line = None if mark is None else mark.line + 1
        raise refuse(
            path, line, f"cannot be read as YAML: {error.problem or error.context}", "correct the YAML"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise refuse(path, line, f"cannot be read as YAML: {error.reason}", "remove the character") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # PyYAML lets the errors of int() and chr() through, for instance for an escape beyond Unicode.
        raise refuse(path, None, f"cannot be read as YAML: {error}", "correct the YAML") from None


def read_yaml(text: str, path: str) -> Document:
    """Reads a whole `config.yaml`; an empty one is an empty configuration.

    Args:
        text: what is in the file.
        path: the file's name for findings.

    Raises:
        ConfigError: no YAML, no mapping, or YAML that a configuration may not use.
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
    """Reads one value, written as a YAML scalar or as JSON, as `parameters` of `config.pbtxt` carry it.

    Raises:
        ConfigError: no YAML, empty, or YAML that a configuration may not use.
    """
    data, _ = _compose(text, path)
    if data is None:
        raise refuse(path, None, "the value is empty", "write a value, or remove the parameter")
    return data
