"""`headrace environments` and `headrace backends`: what they list, and what `prune` removes."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pytest
from headrace.config.model_config import BACKENDS, served_backends
from headrace.python.environments import MARKER, EnvironmentFacts, write_facts
from headrace.server import settings
from headrace.server.commands import backends, environments

OLD, NEW, TORN = "venv-0000000000000001", "archive-0000000000000002", "venv-0000000000000003"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Environments of 40 days and of today, and an interrupted one."""
    for name in (OLD, NEW, TORN):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "data").write_bytes(bytes(3 << 20))
    write_facts(tmp_path / "root" / OLD, EnvironmentFacts("/models/a/1/requirements.txt", "3.11.7", "2.1.0"))
    write_facts(tmp_path / "root" / NEW, EnvironmentFacts("/opt/env.tar.gz", "3.8.18", "1.24.4", (1, 2, 3)))
    then = time.time() - 40 * 86_400
    os.utime(tmp_path / "root" / OLD / MARKER, (then, then))
    return tmp_path / "root"


def run(root: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    environments.add_arguments(parser, (settings.add_state, settings.add_environments))
    return environments.main(parser.parse_args([*words, "--environments-dir", str(root)]))


def test_list_has_versions_sizes_uses_and_sources(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "list") == 0
    heading, archive, old, torn = capsys.readouterr().out.splitlines()
    assert heading.split() == ["environment", "Python", "NumPy", "size", "last", "use", "made", "of"]
    assert archive.split() == [NEW, "3.8.18", "1.24.4", "3", "MiB", "0", "days", "ago", "/opt/env.tar.gz"]
    assert old.split()[:8] == [OLD, "3.11.7", "2.1.0", "3", "MiB", "40", "days", "ago"]
    assert torn.split()[:2] == [TORN, "incomplete"]


@pytest.mark.parametrize(
    ("words", "removed"),
    [
        ((), [OLD, TORN]),
        (("--unused-days", "41"), [TORN]),
        (("--unused-days", "0"), [NEW, OLD, TORN]),
        (("--unused-days", "0", "--dry-run"), []),
    ],
)
def test_prune_removes_unused_and_incomplete_ones(
    root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], removed: list[str]
) -> None:
    assert run(root, "prune", *words) == 0
    assert {path.name for path in root.iterdir()} == {OLD, NEW, TORN} - set(removed)
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[:-1]] == (removed or [NEW, OLD, TORN])
    verb = "would be removed, 9 MiB" if "--dry-run" in words else f"removed, {3 * len(removed)} MiB"
    assert output.splitlines()[-1] == f"{len(removed) or 3} environments {verb}"


def test_a_root_that_does_not_exist_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere", "list") == 0
    assert capsys.readouterr().out.replace("\n", "") == f"{tmp_path / 'nowhere'} has no environments"
    assert run(tmp_path / "nowhere", "prune") == 0


def test_without_any_folder_the_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    environments.add_arguments(parser, (settings.add_state, settings.add_environments))
    assert environments.main(parser.parse_args(["list", "--state-dir", ""])) == 1
    assert "write --environments-dir DIR or --state-dir DIR" in capsys.readouterr().err


def test_backends_are_those_that_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert backends.main(argparse.Namespace(json=True)) == 0
    listed = {backend["backend"]: backend for backend in json.loads(capsys.readouterr().out)}
    assert tuple(listed) == served_backends()
    assert listed["onnxruntime"]["library"].startswith("onnxruntime 1.")
    for name, backend in listed.items():
        assert backend["file"] == BACKENDS[name].default_model_filename
        assert ("instance" in backend["process"]) == (BACKENDS[name].kind == "python")
    assert backends.main(argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(served_backends())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("python", "Python 3."),
        ("sklearn", "scikit-learn 1."),
        ("ensemble", ""),
        ("pytorch", "not installed: add torch to requirements.txt of the model"),
    ],
)
def test_the_library_of_a_backend_is_described(name: str, text: str) -> None:
    assert backends._library(BACKENDS[name]).startswith(text)
