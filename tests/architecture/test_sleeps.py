"""Tests wait for a state (tests/support/waiting.py) or run in virtual time (tests/support/virtual_time.py), not for a time."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_SLEEP_S = 0.05
EXCEPTIONS = {
    "tests/e2e/test_front_ends.py": "processor time of idle processes over 2 s",
    "tests/e2e/test_python_readiness.py": "an answer counts for 100 ms, and a call that hangs has no sign outside its process",
    "tests/e2e/test_server_process.py": "connections that are idle for nearly as long as they are kept, or longer",
    "tests/faults/test_attack_body_memory.py": "clients that send a little for 20 s, or read nothing until a time-out",
    "tests/faults/test_attack_connections.py": "processor time of an idle process over 1 s",
    "tests/gpu/test_main_job.py": "a caller on the GPU that meets the new version",
    "tests/gpu/test_tensorrt_commands.py": "TensorRT shows no sign of a build that has begun",
    "tests/image/check_image.py": "states of containers, each read by a new process",
    "tests/support/screenshots.py": "a program that makes pictures for the docs",
}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _value(node: ast.expr, constants: Mapping[str, float]) -> float | None:
    """Return the value of a constant expression of numbers and names of constants; None for others."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return constants.get(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            values = _value(left, constants), _value(right, constants)
            if None not in values and not (isinstance(op, ast.Div) and not values[1]):
                return float(_OPERATORS[type(op)](*values))
    return None


def long_sleeps(source: str) -> Iterator[tuple[int, float]]:
    """Yield line and seconds of each call of `sleep`, and of `Event().wait`, with a constant above `MAX_SLEEP_S`."""
    nodes = list(ast.walk(ast.parse(source)))
    constants: dict[str, float] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                value = _value(expression, constants)
                if value is not None:
                    constants[name] = value
    for node in nodes:
        match node:
            case (
                ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[argument, *_])
                | ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr="Event")), attr="wait"), args=[argument])
            ):  # fmt: skip
                seconds = _value(argument, constants)
                if seconds is not None and seconds > MAX_SLEEP_S:
                    yield node.lineno, seconds


@pytest.mark.parametrize(
    ("source", "seconds"),
    [
        ("time.sleep(0.1)", [0.1]),
        ("await asyncio.sleep(2 * 0.5)", [1.0]),
        ("SETTLE_S = 0.3\nsleep(4 * SETTLE_S)", [1.2]),
        ("threading.Event().wait(3)", [3]),
        ("time.sleep(0.05)", []),
        ("time.sleep(seconds)", []),
        ("assert ended.wait(60)", []),
        ("code = 'time.sleep(60)'", []),
    ],
)
def test_long_sleeps_are_reported(source: str, seconds: list[float]) -> None:
    assert [each for _, each in long_sleeps(source)] == pytest.approx(seconds)


def test_no_test_waits_for_a_time() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("tests/**/*.py")}
    result = {
        path: list(long_sleeps(source))
        for path, source in sources.items()
        if "sleep(" in source or "Event().wait(" in source
    }
    broken = [
        f"{path}:{line}: waits {seconds:g} s: wait for a state (tests/support/waiting.py) or use virtual time"
        for path, sleeps in result.items()
        if path not in EXCEPTIONS
        for line, seconds in sleeps
    ]
    assert not broken, "\n" + "\n".join(broken)
    assert [path for path in EXCEPTIONS if not result.get(path)] == [], "these need no exception any more"
