"""Tests that need a GPU are skipped without one: every module of tests/gpu has the marks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.serving import ROOT


def has_gpu_marks(source: str) -> bool:
    """Return whether a module assigns `pytestmark` with a condition to skip."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            value = ast.unparse(node.value)
            return "gpu_marks(" in value or ("pytest.mark.gpu" in value and "pytest.mark.skipif(" in value)
    return False


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=lambda path: path.name)
def test_modules_that_need_a_gpu_are_skipped_without_one(path: Path) -> None:
    assert has_gpu_marks(path.read_text()), f"{path.name}: write pytestmark = gpu_marks(seconds)"


def test_a_module_without_marks_is_reported() -> None:
    assert not has_gpu_marks("def test_it(): pass")
    assert not has_gpu_marks("pytestmark = [pytest.mark.gpu]")
    assert has_gpu_marks("pytestmark = gpu_marks(120)")
