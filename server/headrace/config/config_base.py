"""Base class, scalar types and errors of all parts of a model's configuration.

Scalars are strict (the text "8" is not a number). Sequences may be lists or tuples. Words of an enumeration are accepted in any
case and without their prefix: `fp32` is `TYPE_FP32`, `cpu` is `KIND_CPU`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from headrace.core.tensor import BY_CONFIG_NAME

Location = tuple[str | int, ...]


class Problem(NamedTuple):
    """One error in a configuration, without its file and line.

    Attributes:
        loc: field names, indices and keys from the validator that raised it to the value.
        message: description of the error.
        cure: the correction to make.
    """

    loc: Location
    message: str
    cure: str = ""


class Problems(ValueError):
    """All problems of one validator; pydantic passes it on in a `ValidationError` under `ctx["error"]`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(p.message + (f" ({p.cure})" if p.cure else "") for p in problems))
        self.problems = tuple(problems)


class ConfigPart(BaseModel):
    """Base class of the parts of a configuration: frozen, validated at construction, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def _problems(self) -> Iterable[Problem]:
        """Return the contradictions between the fields."""
        return ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise Problems(problems)
        return self


def option(default: Any, description: str) -> Any:
    """Declare a field that may be absent, with the description for the schema and docs/configuration.md."""
    return Field(default=default, description=description)


class OneOf:
    """Validates a `Literal` whose words may be written in any case and without their prefix; use it in `Annotated`.

    Args:
        prefix: optional prefix of the words, e.g. "KIND_".
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        words: tuple[str, ...] = get_args(source)
        short = [word.removeprefix(self._prefix) for word in words]
        spelled = {spelling.upper(): word for word, bare in zip(words, short, strict=True) for spelling in (word, bare)}

        def spell_out(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            word = spelled.get(value.upper())
            if word is None:
                raise Problems([Problem((), f'"{value}" is not a valid value', f"write one of {', '.join(words)}")])
            return word

        enum = list(dict.fromkeys([*words, *(word.lower() for word in short)]))
        return handler.generate_schema(Annotated[source, BeforeValidator(spell_out), WithJsonSchema({"enum": enum})])


# Names of datatypes in other libraries.
_MEANT = {
    "BFLOAT16": "BF16", "HALF": "FP16", "FLOAT16": "FP16", "FLOAT": "FP32", "FLOAT32": "FP32", "DOUBLE": "FP64",
    "FLOAT64": "FP64", "INT": "INT32", "STR": "STRING",
}  # fmt: skip


def _data_type_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.upper().removeprefix("TYPE_")
    name = "TYPE_" + {"BYTES": "STRING"}.get(word, word)
    if name not in BY_CONFIG_NAME:
        meant = _MEANT.get(word)
        cure = f"write TYPE_{meant}" if meant else f"write one of {', '.join(BY_CONFIG_NAME)}"
        raise Problems([Problem((), f'"{value}" is not a datatype', cure)])
    return name


_SHORT_DATA_TYPES = [name.removeprefix("TYPE_").lower() for name in BY_CONFIG_NAME]

DataType = Annotated[
    str,
    Field(strict=True),
    BeforeValidator(_data_type_name),
    WithJsonSchema({"enum": [*BY_CONFIG_NAME, *_SHORT_DATA_TYPES, "bytes"]}),
]

# The widths are those of the fields in Triton's published messages.
Int32 = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Duration = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Version = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
VERSION_PATTERN = "[1-9][0-9]{0,18}"
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]


def is_version_number(text: str) -> bool:
    """Return True for the number of a version as folders and requests have it: from 1 to 2^63 - 1, without leading zeros."""
    return re.fullmatch(VERSION_PATTERN, text) is not None and int(text) < 2**63


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_SIZE_UNITS = {"B": 1, **{f"{p}{u}": b**n for u, b in (("B", 1000), ("iB", 1024)) for n, p in enumerate("KMGT", 1)}}


def _size_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise Problems(
            [Problem((), f'"{value[:80]}" is not a size', 'write a number of bytes, or a size such as "2GiB"')]
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


SizeBytes = Annotated[
    int,
    Field(strict=True, ge=1, le=2**63 - 1),
    BeforeValidator(_size_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{_SIZE.pattern}$"}]}),
]


def _dimension(value: int) -> int:
    if value < 1 and value != -1:
        raise Problems([Problem((), f"a dimension is at least 1, or -1 for any size, not {value}")])
    return value


Dimension = Annotated[int, Field(strict=True, ge=-1, le=2**63 - 1), AfterValidator(_dimension)]


def _parameter_text(value: Any) -> Any:
    # Triton's JSON and text format wrap a parameter's value; a YAML file has plain text.
    if isinstance(value, dict) and set(value) == {"string_value"}:
        return value["string_value"]
    return value


ParameterText = Annotated[
    str,
    Field(strict=True),
    BeforeValidator(_parameter_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": ["string", "number", "boolean"]},
                {"type": "object", "properties": {"string_value": {"type": "string"}}, "additionalProperties": False},
            ]
        }
    ),
]
