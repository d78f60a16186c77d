"""Errors of exporters in plain words: the operator, and the remedy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Rule:
    """One known error.

    Attributes:
        pattern: regular expression, searched in each exception of the chain as "Type: text".
        message: its description; {0}, {1} are the groups of the pattern.
        cure: what to do.
        program: program that raises it; "" for all.
    """

    pattern: str
    message: str
    cure: str
    program: str = ""


@cache
def _rules() -> list[Rule]:
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    return [Rule(**entry) for entry in tomllib.loads(text)["rules"]]


def explain(program: str, fault: Mapping[str, Any]) -> str:
    """Return an error of the process with a framework as fault, and remedy.

    Args:
        program: name of the program.
        fault: "message" and "cure", or "chain": types and texts of the exceptions, the outermost first.
    """
    if "message" in fault:
        return f"{fault['message']}: {fault['cure']}"
    chain: Sequence[Sequence[str]] = fault["chain"]
    texts = [f"{kind}: {text}" for kind, text in chain]
    for rule in _rules():
        if rule.program in ("", program):
            # The innermost exception is the reason of the others.
            for text in reversed(texts):
                if match := re.search(rule.pattern, text):
                    return f"{rule.message.format(*match.groups())}: {rule.cure.format(*match.groups())}"
    kind, text = chain[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{kind}: {' '.join(lines)[:_MAX_TEXT]}: correct the model, or leave that part out of it"
