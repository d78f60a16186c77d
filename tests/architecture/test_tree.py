"""The whole tree keeps the rules of `rules`: imports, calls, sizes, names, words, ports and slow tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.architecture.rules import (
    KNOWN_CYCLES,
    KNOWN_NAMESAKES,
    LATE_CALLBACKS,
    ROOT,
    all_findings,
    grown_packages,
    import_cycles,
    late_callbacks,
    module_findings,
    package_lines,
    private_names,
    probes,
)


def test_the_whole_tree_keeps_the_rules() -> None:
    found = all_findings()
    assert {"server/headrace/core/errors.py", "tests/architecture/rules.py"} <= set(found)
    broken = [text for findings in found.values() for text in findings.violations]
    assert not broken, "\n" + "\n".join(broken)


def test_no_modules_import_each_other() -> None:
    assert import_cycles({name: findings.imports for name, findings in module_findings().items()}) == KNOWN_CYCLES


def test_public_classes_have_names_of_their_own() -> None:
    names = [name for findings in module_findings().values() for name in findings.classes]
    assert {name for name in names if names.count(name) > 1} == set(KNOWN_NAMESAKES.split())


def test_callbacks_are_set_at_birth() -> None:
    paths = [path for path in all_findings() if path.startswith("server/headrace/")]
    found = {path: {name for _, name in late_callbacks((ROOT / path).read_text(encoding="utf-8"))} for path in paths}
    assert {path: names for path, names in found.items() if names} == {
        path: set(names.split()) for path, names in LATE_CALLBACKS.items()
    }, "build the object that is called first, and hand its method in"


def test_refused_identifiers_stay_away() -> None:
    result = [
        f"{path}:{line}: {name}: name the thing in the field's words (CONTRIBUTING.md)"
        for path, findings in all_findings().items()
        for line, name in findings.identifiers
    ]
    assert not result, "\n" + "\n".join(result)


def test_docstrings_and_comments_are_plain() -> None:
    result = [
        f"{path}:{line}: {text}: write in the field's words (CONTRIBUTING.md)"
        for path, findings in all_findings().items()
        for line, text in findings.prose
    ]
    assert not result, "\n" + "\n".join(result)


def test_tests_start_no_server_on_the_default_ports() -> None:
    result = [
        f"{path}:{line}: set --http-port and --grpc-port (0: free ones), or use tests.support.serving"
        for path, findings in all_findings().items()
        for line in findings.default_ports
    ]
    assert result == []


# Both numbers may only fall. Where the names come from a library, a probe says whether this release has it.
PRIVATE_NAMES, PROBES = 298, 20


def test_unit_tests_read_few_private_names() -> None:
    paths = [path for path in all_findings() if path.startswith("tests/unit/")]
    assert sum(private_names((ROOT / path).read_text(encoding="utf-8")) for path in paths) <= PRIVATE_NAMES


def test_abilities_are_declared() -> None:
    places = "server/headrace/runtimes server/headrace/inference server/headrace/python server/headrace/models"
    paths = [path for path in all_findings() if any(path.startswith(place) for place in places.split())]
    assert sum(probes((ROOT / path).read_text(encoding="utf-8")) for path in paths) <= PROBES


CODE_LINES = Path(__file__).parent / "code_lines.txt"


def test_packages_stay_small(capsys: pytest.CaptureFixture[str]) -> None:
    now = package_lines({path: findings.code_lines for path, findings in all_findings().items()})
    if os.environ.get("CODE_LINES") == "write":
        CODE_LINES.write_text("".join(f"{number:6} {package}\n" for package, number in now.items()), encoding="utf-8")
    rows = [row.split() for row in CODE_LINES.read_text(encoding="utf-8").splitlines()]
    table = {package: int(number) for number, package in rows}
    with capsys.disabled():
        print("\ncode lines (now, in tests/architecture/code_lines.txt, package):")
        print("\n".join(f"{number:6} {table.get(package, 0):6} {package}" for package, number in now.items()))
    advice = "delete as much, or write the table anew: CODE_LINES=write pytest tests/architecture/test_tree.py"
    assert grown_packages(now, table) == [], f"{advice}, and give the reason in the commit"
