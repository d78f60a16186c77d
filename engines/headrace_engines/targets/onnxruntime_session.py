"""Sessions of ONNX Runtime with the server's options, and the reasons why a model cannot be loaded."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime as ort
from headrace.config.machine import usable_cores

from headrace_engines.errors import BuildError

_NODE = re.compile(
    r"implementation for (?P<op>\S+)\(\d+\) node with name '(?P<node>[^']*)'"
    r"|operator \((?P<op2>\S+)\) in node \((?P<node2>[^)]*)\)"
    r'|In Node, \("(?P<node3>[^"]*)", (?P<op3>[^,]+),'
    r"|Fatal error: (?P<op4>\S+?)\(-?\d+\) is not a registered"
)


def session_options() -> ort.SessionOptions:
    """Return session options as the server sets them for a model of one instance."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4
    return options


def open_session(model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Open a session on the CPU.

    Raises:
        BuildError: ONNX Runtime cannot load the model; the message has the node, if any, and the remedy.
    """
    try:
        return ort.InferenceSession(
            str(model) if isinstance(model, Path) else model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the binding's exceptions share no other base
        raise BuildError(_load_failure(str(error))) from error


def _load_failure(text: str) -> str:
    match = _NODE.search(text)
    reason = text.partition(" : ")[2] or text
    if "serialization failed" in text:
        return f"ONNX Runtime cannot write the optimised model: {reason}: make room on the disk"
    if not match:
        return f"ONNX Runtime cannot load the model: {reason}: check it with onnx.checker"
    operator = next(value for name, value in match.groupdict().items() if name.startswith("op") and value)
    node = next((value for name, value in match.groupdict().items() if name.startswith("node") and value), "")
    location = f"node '{node}' ({operator})" if node else f"operator {operator}"
    cure = "keep it in FP32, or write it with operators that ONNX Runtime has on CPUs"
    return f"{location} cannot run on ONNX Runtime's CPU: {reason}: {cure}"
