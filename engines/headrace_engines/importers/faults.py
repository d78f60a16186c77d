"""Errors of exporters in plain words: the operator, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Rule:
    """One known error.

    Attributes:
        program: program that raises it; "" for all.
        pattern: regular expression, searched in each exception of the chain as "Type: text".
        message: its description; {0}, {1} are the groups of the pattern.
        cure: what to do.
    """

    program: str
    pattern: str
    message: str
    cure: str


_BATCH_CURE = (
    "make the model compute each row of the batch by itself (x.shape[0] in place of a number in view and reshape), "
    "or import it with a fixed batch: --static-batch"
)
RULES: tuple[Rule, ...] = (
    Rule(
        "torch_program",
        r"No (?:ONNX function|decompositions?) (?:found|registered) for <OpOverload\(op='([\w.:]+)'",
        "the exporter has no ONNX form of the operator {0}",
        "write that part of the model with other operators; a higher --opset or a newer PyTorch may have it",
    ),
    Rule(
        "torch_program",
        r"(?:Unsupported|unsupported) (?:FX nodes?|operator)[^'\"]*['\"]([\w.:]+)['\"]",
        "the exporter has no ONNX form of the operator {0}",
        "write that part of the model with other operators; a higher --opset or a newer PyTorch may have it",
    ),
    Rule(
        "torch_program",
        r"(?:GuardOnDataDependentSymNode|UserError)[^\n]*: (?:.|\n)*?[Cc]ould not (?:guard on|extract specialized integer from) "
        r"data-dependent expression ([^\n]{1,80})",
        "the model's control flow depends on the values of a tensor ({0})",
        "replace `if tensor` by torch.where or torch.cond, and sizes that come from values by fixed ones",
    ),
    Rule(
        "torch_program",
        r"(?:[Dd]ata-dependent (?:control flow|branching)|Dynamic control flow is not supported|GuardOnDataDependent)",
        "the model's control flow depends on the values of a tensor",
        "replace `if tensor` by torch.where or torch.cond, and sizes that come from values by fixed ones",
    ),
    Rule(
        "torch_program",
        r"(?:ConstraintViolationError|Constraints violated|UserError|ValueError)(?:.|\n)*?\(?[\"']?batch[\"']?"
        r"(?:.|\n)*?(?:speciali[sz]ed|constant|a constant \(\d+\)|not all values of)",
        "the model fixes the size of the batch",
        _BATCH_CURE,
    ),
    Rule(
        "torch_program",
        r"Constraints violated \(([^)]*)\)",
        "the model does not take every size of its free dimensions ({0})",
        "give fixed sizes for these in --input-shape, or a size of the example that is a multiple of what the model needs",
    ),
    Rule(
        "",
        r"[Oo]pset(?:_version| version)?[^\n]{0,60}?(\d+)[^\n]{0,60}?(?:not supported|unsupported|[Uu]nsupported)",
        "the exporter does not write opset {0}",
        "leave --opset out, or write one that the exporter has",
    ),
    Rule(
        "keras_program",
        r"(?:Requested the deserialization of a `?Lambda`? layer|[Ll]ambda.{0,200}safe_mode|arbitrary code execution)",
        "the file has a Lambda layer: Python code, which loading the model runs",
        "replace it by a layer, or, if you trust the file, write --allow-code",
    ),
    Rule(
        "keras_program",
        r"Could not locate (?:class|function) '(\w+)'",
        "the model uses the class {0}, which is not in its file",
        "name the Python file that defines it: --custom-objects FILE.py",
    ),
    Rule(
        "keras_program",
        r"Unknown (?:layer|object|loss|metric)[^\n]*?'(\w+)'",
        "the model uses the class {0}, which is not in its file",
        "name the Python file that defines it: --custom-objects FILE.py",
    ),
    Rule(
        "",
        r"(?:No conversion for op|Unsupported ops:|[Tt]ensorflow op \[\S+?: |Op type not registered '?)\W*(\w+)",
        "there is no ONNX form of the operator {0}",
        "write that part of the model with other operators; a higher --opset may have it",
    ),
    Rule(
        "",
        r"(?:exceeds? maximum protobuf size|larger than 2 ?GB|Failed to serialize proto)",
        "the model is larger than 2 GB, which this exporter does not write",
        "import it from PyTorch, or in FP16",
    ),
    Rule(
        "",
        r"(?:MemoryError|DefaultCPUAllocator: can't allocate|OOM when allocating)",
        "there is not enough memory",
        "close other programs, or give smaller examples with --input-shape",
    ),
    Rule(
        "",
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "the model needs the module {0}, which is not installed",
        "install it with --requirement {0}, or name an interpreter that has it with --python PATH",
    ),
)


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
    for rule in RULES:
        if rule.program in ("", program):
            # The innermost exception is the reason of the others.
            for text in reversed(texts):
                if match := re.search(rule.pattern, text):
                    return f"{rule.message.format(*match.groups())}: {rule.cure.format(*match.groups())}"
    kind, text = chain[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{kind}: {' '.join(lines)[:_MAX_TEXT]}: correct the model, or leave that part out of it"
