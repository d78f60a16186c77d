"""From a document to a checked `ModelConfig`: our own fields out of `parameters`, screening, the schema, findings with lines."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from headrace.config.config_support import screen
from headrace.config.document import Document, did_you_mean
from headrace.config.yaml_reader import read_value
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import OWN_FIELDS, Location, ModelConfig, Optimization, Problem, Problems, is_own

PREFIX = "headrace."


def bind(document: Document) -> tuple[ModelConfig | None, list[Finding]]:
    """Checks a document against the schema.

    Returns:
        The configuration, None if there is a fatal finding, and all findings.
    """
    findings = _lift_own_fields(document)
    findings += screen(document)
    config = None
    try:
        config = ModelConfig.model_validate(document.data)
    except ValidationError as error:
        findings += [document.finding(problem) for problem in problems_of(error, document.own_prefix)]
    if any(finding.fatal for finding in findings):
        config = None
    return config, sorted(findings, key=lambda finding: finding.line or 0)


def _lift_own_fields(document: Document) -> list[Finding]:
    """Moves `parameters` entries such as "headrace.slo.p99_ms" to the fields they name. Changes the document."""
    parameters = document.data.get("parameters")
    findings: list[Finding] = []
    if not isinstance(parameters, dict):
        return findings
    for key in [key for key in parameters if isinstance(key, str) and key.startswith(PREFIX)]:
        problem = _lift(document, key, parameters.pop(key))
        if problem is not None:
            findings.append(
                Finding(document.path, document.lines.get(("parameters", key)), problem.message, problem.cure)
            )
    return findings


def _lift(document: Document, key: str, text: object) -> Problem | None:
    """Moves one entry; the value is read as YAML (so JSON will do) and checked later by the schema like any other."""
    loc: Location = ("parameters", key)
    own = tuple(key.removeprefix(PREFIX).split("."))
    if not is_own(own):
        return Problem(loc, f'unknown parameter "{key}"', _cure_of(key, own))
    if isinstance(text, dict):
        text = text.get("string_value")
    if not isinstance(text, str):
        return Problem(loc, f'"{key}" must be text', "write the value in quotes")
    try:
        value = read_value(text, document.path)
    except ConfigError as error:
        return Problem(loc, f'"{key}": {error.findings[0].message}', error.findings[0].cure)
    return _put(document, own, value, document.lines.get(loc))


def _cure_of(key: str, own: tuple[str, ...]) -> str:
    """What to do about a parameter that is none of ours: it may be a field of Triton's message, or a misspelt one of ours."""
    inside = own[0] == "optimization" and len(own) > 1
    if own[0] in ModelConfig.model_fields and (not inside or own[1] in Optimization.model_fields):
        return f"{'.'.join(own[:2] if inside else own[:1])} is a field of its own, write it as one"
    return did_you_mean(key, [PREFIX + ".".join(map(str, place)) for place in OWN_FIELDS])


def _put(document: Document, own: tuple[str, ...], value: object, line: int | None) -> Problem | None:
    """Writes `value` at the dotted place `own`, making the blocks on the way."""
    block: Any = document.data
    for depth, part in enumerate(own):
        last = depth == len(own) - 1
        if not isinstance(block, dict) or (last and part in block):
            return Problem(own, f'"{PREFIX}{".".join(own)}" is written twice', "keep one of them")
        if line is not None:
            document.lines.setdefault(own[: depth + 1], line)
        block = block.setdefault(part, value if last else {})
    return None


def problems_of(error: ValidationError, own_prefix: str = "") -> list[Problem]:
    """Says pydantic's findings in our words.

    Args:
        error: what the schema raised.
        own_prefix: put in front of the names of Headrace's own fields.
    """
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        loc: Location = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Problems):
            for problem in cause.problems:
                here = (*loc, *problem.loc)
                # A problem of the whole names its field in the message; one of a value does not.
                message = problem.message if problem.loc or not loc else f"{_shown(loc, own_prefix)}: {problem.message}"
                problems.append(Problem(here, message, problem.cure))
        else:
            problems.append(_problem(detail, loc, own_prefix))
    return problems


def _problem(detail: Any, loc: Location, own_prefix: str) -> Problem:
    shown = _shown(loc, own_prefix)
    match detail["type"]:
        case "extra_forbidden":
            return Problem(loc, f'unknown field "{shown}"', did_you_mean(str(loc[-1]), _known_at(loc[:-1])))
        case "missing":
            return Problem(loc, f'"{shown}" is missing', f"write {loc[-1]}")
        case "model_type" | "dict_type" | "model_attributes_type":
            return Problem(
                loc, f"{shown} must be a block of fields, not {detail['input']!r:.80}", "write {} for the defaults"
            )
        case "tuple_type" | "list_type":
            return Problem(
                loc,
                f"{shown} must be a list, not {detail['input']!r:.80}",
                "write [...], or one item a line behind '-'",
            )
        case "string_type":
            return Problem(loc, f"{shown} must be text, not {detail['input']!r:.80}", "put it in quotes")
        case "bool_type":
            return Problem(loc, f"{shown} must be true or false, not {detail['input']!r:.80}", "write true or false")
        case "int_type" | "float_type" | "int_parsing" | "int_from_float":
            cure = "write the number without quotes" if isinstance(detail["input"], str) else "write a number"
            kind = "a number" if detail["type"] == "float_type" else "a whole number"
            return Problem(loc, f"{shown} must be {kind}, not {detail['input']!r:.80}", cure)
    expected = str(detail["msg"]).removeprefix("Input should ").removeprefix("Tuple should ")
    return Problem(loc, f"{shown} should {expected}, not {detail['input']!r:.80}", "correct the value")


def _shown(loc: Location, own_prefix: str) -> str:
    dotted = ".".join(str(part) for part in loc)
    return own_prefix + dotted if is_own(loc) else dotted


def _known_at(loc: Location) -> list[str]:
    """Field names of the part of the schema that `loc` leads to."""
    model: type[BaseModel] = ModelConfig
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = model_in(field.annotation) or model
    return list(model.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class in a field's annotation, e.g. of `tuple[ModelInput, ...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := model_in(inner)) is not None), None)
