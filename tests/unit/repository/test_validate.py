from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from headrace.commands import validate
from headrace.commands.validate import inspect, main
from rich.console import Console

from tests.support.onnx_models import write_model

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow


def run(*paths: Path) -> tuple[int, list[str]]:
    out = io.StringIO()
    status = main(paths, Console(file=out, width=40))
    return status, out.getvalue().splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "good")
    write_model(tmp_path / "warned", config="# a comment\nmetric_tags: {a: b}\n")
    return tmp_path


def test_good_models_are_listed_with_their_signatures(repository: Path) -> None:
    status, lines = run(repository)
    assert status == 0
    assert "OK good 1: x FP32[-1,16] -> y FP32[-1,16], batches of up to 4" in lines
    assert any(line.startswith(f"{repository}/warned/config.yaml:2: warning: ") for line in lines)
    assert lines[-1] == "2 good models, 0 errors, 1 warning"


def test_one_bad_model_makes_the_status_1_and_the_others_are_still_read(repository: Path) -> None:
    write_model(repository / "bad", config="max_batch_siz: 3\n")
    status, lines = run(repository)
    assert status == 1
    expected = 'bad/config.yaml:1: error: unknown field "max_batch_siz" (did you mean max_batch_size?)'
    assert f"{repository}/{expected}" in lines
    assert lines[-1] == "2 good models, 1 error, 1 warning"
    findings = [finding for inspection in inspect(repository) for finding in inspection.findings]
    assert [str(finding) for finding in findings if finding.fatal] == [expected]


@pytest.mark.parametrize("text", ["[bold]x[/bold]: 3", "a" * 300 + ": 3"])
def test_text_of_the_file_is_neither_markup_nor_wrapped(repository: Path, text: str) -> None:
    write_model(repository / "bad", config=text, name="config.pbtxt")
    _, lines = run(repository)
    assert sum("bad/config.pbtxt:1: error: " in line and line.endswith(")") for line in lines) == 1


def test_a_single_model_may_be_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(repository / "good")[1][-1] == "1 good model, 0 errors, 0 warnings"
    monkeypatch.chdir(repository / "warned")
    status, lines = run(Path("."))
    assert status == 0
    assert lines[0].startswith("config.yaml:2: warning: ")
    monkeypatch.chdir(repository)
    assert run(Path("good"), Path("warned"))[1][-1] == "2 good models, 0 errors, 1 warning"


def test_hidden_folders_and_files_are_no_models(repository: Path) -> None:
    (repository / ".git").mkdir()
    (repository / "README.md").touch()
    assert run(repository)[0] == 0


def test_missing_folders_are_reported(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "absent")
    assert status == 1
    assert lines[0].startswith(f"{tmp_path}/absent: error: does not exist")
    (tmp_path / "file").touch()
    assert "is not a folder" in run(tmp_path / "file")[1][0]
    (tmp_path / "empty").mkdir()
    status, lines = run(tmp_path / "empty")
    assert status == 0
    assert "warning: holds no models" in lines[0]


def test_neither_onnx_runtime_nor_a_server_is_imported(repository: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rich.console import Console; from headrace.commands import validate; "
        f"validate.main([Path({str(repository)!r})], Console()); "
        "print([m for m in ('onnxruntime', 'fastapi', 'uvicorn', 'tritonclient') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.splitlines()[-1] == "[]"


def test_an_onnx_file_may_be_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    file = (tmp_path / "m" / "1" / "model.onnx").rename(tmp_path / "my model.onnx")
    status, lines = run(file)
    assert (status, lines[0]) == (0, "OK my_model 1: x FP32[-1,16] -> y FP32[-1,16], batches of up to 4")
    file.write_bytes(b"no model")
    status, lines = run(file)
    assert status == 1
    assert lines[0].startswith(f"{file}: error: is no ONNX model")


def test_a_model_that_crashes_its_runtime_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each child stands for a server's process: one that a model kills is named, and the others are loaded by the next."""
    for name in ("a", "b", "c"):
        write_model(tmp_path / name)
    code = (
        "import os, signal, sys; from headrace.commands import validate as t; load = t.trial_load\n"
        "def crashing(name, folder, repository, state):\n"
        "    if name == 'b':\n"
        "        print('free(): invalid pointer', file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return load(name, folder, repository, state)\n"
        "t.trial_load = crashing; t.load_in_this_process()"
    )
    monkeypatch.setattr(validate, "TRIAL_LOAD", (sys.executable, "-c", code))
    status, lines = run(tmp_path)
    assert status == 1
    assert [line for line in lines if "error: " in line] == [
        f"{tmp_path}/b: error: loading the model ends the process with SIGSEGV: free(): invalid pointer (check the model's file "
        "and the libraries of its runtime; `isolation: process` keeps the server alive)"
    ]
    assert [line.split()[1] for line in lines if line.startswith("OK ")] == ["a", "c"]


def test_files_only_mode_loads_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setattr(validate, "TRIAL_LOAD", ("/nonexistent",))
    out = io.StringIO()
    assert main([tmp_path], Console(file=out, width=40), load=False) == 0
    assert "OK m 1: " in out.getvalue()
