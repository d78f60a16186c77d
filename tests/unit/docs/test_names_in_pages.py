"""Paths, modules and symbols that the pages name exist in the tree."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]
# Pages name files relative to the checkout or to one of the source roots.
BASES = [ROOT, ROOT / "server", ROOT / "server/headrace", ROOT / "engines", ROOT / "engines/headrace_engines"]
# Written by commands, or a pattern.
NOT_IN_THE_TREE = ("loadtest/results", "docs/decisions/NNNN-title.md")
FOLDERS = "server engines tests loadtest deploy docs requirements"
PACKAGES = " ".join(sorted(path.name for path in (ROOT / "server/headrace").iterdir() if path.is_dir()))
PATH = re.compile(rf"(?:{'|'.join(f'{FOLDERS} {PACKAGES}'.split())})/[\w./-]*\w/?")
SYMBOL = re.compile(r"(_?[A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(\))?")


def code_spans(text: str) -> list[str]:
    """Inline code of a page, without fenced and indented blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", re.sub(r"^    .*$", "", prose, flags=re.MULTILINE))


def missing_paths(text: str) -> list[str]:
    """Paths in the inline code of a page that no file or folder has."""
    return [
        span
        for span in code_spans(text)
        if PATH.fullmatch(span)
        and not span.startswith(NOT_IN_THE_TREE)
        and not any((base / span).exists() or (base / f"{span}.py").exists() for base in BASES)
    ]


@functools.cache
def sources() -> list[str]:
    """Texts of the product's modules."""
    folders = (ROOT / "server", ROOT / "engines")
    return [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]


@functools.cache
def members(name: str) -> set[str] | None:
    """Methods and fields of the product's classes of a name; None if there is no such class."""
    pattern = re.compile(rf"^ *class {name}\b", re.MULTILINE)
    nodes = [node for source in sources() if pattern.search(source) for node in ast.walk(ast.parse(source))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    if not classes:
        return None
    return {
        part.name if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) else part.attr
        for found in classes
        for part in ast.walk(found)
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Attribute)
    }


def missing_symbols(text: str) -> list[str]:
    """Classes, and their methods and fields, in the inline code of a page that the product does not define."""
    result = []
    for span in code_spans(text):
        match = SYMBOL.fullmatch(span)
        if match and ((found := members(match[1])) is None or (match[2] and match[2] not in found)):
            result.append(span)
    return result


def misplaced_symbols(text: str) -> list[str]:
    """Classes and functions that a page names right behind a file, and that the file does not define."""
    result = []
    for file, name, member in re.findall(r"`([\w/]+\.py)`\s+`(\w+)(?:\.(\w+))?`", text):
        source = next((base / file).read_text(encoding="utf-8") for base in BASES if (base / file).exists())
        defined = {match[1] for match in re.finditer(r"^ *(?:class|(?:async )?def) (\w+)", source, re.MULTILINE)}
        if not {name, member or name} <= defined:
            result.append(f"{file} {name}")
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_a_page_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", ["processes.md", "structure.md"])
def test_classes_and_methods_of_a_page_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert missing_symbols(text) == []
    assert misplaced_symbols(text) == []


def test_missing_paths_and_symbols_are_reported() -> None:
    assert missing_paths(
        "`wire/http/codec.py` `inference/scheduling/` `tests/unit` `wire/http/no_such.py`, `infer/x` `model.onnx`"
    ) == ["wire/http/no_such.py"]
    assert missing_paths("```\n`wire/http/no_such.py`\n```\n    `wire/grpc/no_such.py`\n") == []
    assert missing_symbols("`ModelHandle.compute` `ModelHandle` `decide` `NoSuchClass` `ModelHandle.no_such`") == [
        "NoSuchClass",
        "ModelHandle.no_such",
    ]
    text = "`inference/scheduling/batching.py` `decide` and `core/errors.py`\n`decide`, `core/errors.py` `NotFound.no_such`"
    assert misplaced_symbols(text) == ["core/errors.py decide", "core/errors.py NotFound"]
