"""What every part of a model's configuration shares: the base class, its scalar types, and how a problem is told.

Scalars are strict (the text "8" is no number), sequences may be lists or tuples. Words of an enumeration are accepted in any
case and without their prefix: `fp32` is `TYPE_FP32`, `cpu` is `KIND_CPU`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from headrace.core.tensor import BY_CONFIG_NAME

Location = tuple[str | int, ...]


class Problem(NamedTuple):
    """One thing wrong in a configuration, before it is known in which file and line it stands.

    Attributes:
        loc: field names, indices and keys that lead to the place, from where the problem was raised.
        message: what is wrong.
        cure: what to write instead.
    """

    loc: Location
    message: str
    cure: str = ""


class Problems(ValueError):
    """Every problem that one check found; pydantic hands it on in a `ValidationError` under `ctx["error"]`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(p.message + (f" ({p.cure})" if p.cure else "") for p in problems))
        self.problems = tuple(problems)


class ConfigPart(BaseModel):
    """A part of a model's configuration: frozen, checked at birth, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def one_of(words: Sequence[str], prefix: str = "") -> tuple[BeforeValidator, WithJsonSchema]:
    """The validators of an enumeration whose words may be written in lower case and without their prefix.

    Args:
        words: the words as Triton's schema spells them.
        prefix: what may be left out in front, e.g. "KIND_".
    """
    spelled = {spelling.upper(): word for word in words for spelling in (word, word.removeprefix(prefix))}

    def spell_out(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        word = spelled.get(value.upper())
        if word is None:
            raise Problems([Problem((), f'"{value}" is not known here', f"write one of {', '.join(words)}")])
        return word

    short = [word.removeprefix(prefix).lower() for word in words]
    return BeforeValidator(spell_out), WithJsonSchema({"enum": list(dict.fromkeys([*words, *short]))})


def _data_type_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.upper().removeprefix("TYPE_")
    name = "TYPE_" + {"BYTES": "STRING"}.get(word, word)
    if name not in BY_CONFIG_NAME:
        raise Problems([Problem((), f'"{value}" is no datatype', f"write one of {', '.join(BY_CONFIG_NAME)}")])
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
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Duration = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Version = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_SIZE_UNITS = {"B": 1, **{f"{p}{u}": b**n for u, b in (("B", 1000), ("iB", 1024)) for n, p in enumerate("KMGT", 1)}}


def _size_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise Problems([Problem((), f'"{value[:80]}" is no size', 'write a number of bytes, or a size such as "2GiB"')])
    return int(float(found[1]) * _SIZE_UNITS[found[2]])


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
    # Triton's JSON and text format wrap a parameter's value; plain text is what a person writes.
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
