"""`make tools` installs every program that the tests name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.serving import ROOT

# Programs by the Debian package that brings them, where the names differ.
PACKAGES = {"nginx": "nginx-light", "promtool": "prometheus", "protoc": "protobuf-compiler-grpc"}
# Toolchains, which come with a developer's machine, and programs in wheels.
OTHERS = {"go", "java", "mvn", "node", "npm", "make", "hadolint", "envoy"}


def test_every_program_is_installed_by_make_tools() -> None:
    words = re.findall(r'^.*TOOLS(?: \?= |=")([^"\n]*)', (ROOT / "Makefile").read_text(), re.MULTILINE)
    packages = set(" ".join(words).split())
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for program in programs(file):
            assert program in OTHERS or PACKAGES.get(program, program) in packages, f"{file}: {program}"


def programs(file: Path) -> list[object]:
    """The programs that a file of the tests names."""
    source = file.read_text()
    calls = [node for node in ast.walk(ast.parse(source if "tool(" in source else "")) if isinstance(node, ast.Call)]
    names = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "tool"]
    return [name.value for name in names if isinstance(name, ast.Constant)]
