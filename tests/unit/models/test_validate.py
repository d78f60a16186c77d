from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from headrace.server.commands import validate
from headrace.server.commands.validate import main
from rich.console import Console

from tests.support.models import add_model, add_pipeline, affine, ensemble_config
from tests.support.networks import network
from tests.support.onnx_models import write_model
from tests.support.wheels import OFFLINE, add_numpy

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


def test_an_ensemble_is_tried_with_the_models_that_it_calls(tmp_path: Path) -> None:
    add_model(tmp_path, "net", affine())
    fp32 = "TYPE_FP32"
    config = ensemble_config(
        [("net", {"X": "x"}, {"Y": "y"})], {"x": (fp32, (16,))}, {"y": (fp32, (4,))}, "max_batch_size: 4"
    )
    add_pipeline(tmp_path, "good", config)
    add_pipeline(tmp_path, "lost", config.replace('"net"', '"gone"'))
    status, lines = run(tmp_path)
    assert status == 1
    assert "OK good 1: x FP32[-1,16] -> y FP32[-1,4], batches of up to 4" in lines
    assert any(line.startswith(f"{tmp_path}/lost/config.pbtxt:5: error: needs model 'gone'") for line in lines), lines
    assert run(tmp_path / "good")[1][-1] == "1 good model, 0 errors, 0 warnings"


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
        "import sys; from pathlib import Path; from rich.console import Console; from headrace.server.commands import validate; "
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
        "import os, signal, sys; from headrace.server.commands import validate as t; load = t.trial_load\n"
        "def crashing(name, *paths):\n"
        "    if name == 'b':\n"
        "        print('free(): invalid pointer', file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return load(name, *paths)\n"
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


OWN_FORM = """
from headrace_model import Tensor, model

@model(max_batch_size=4)
def scale(x: Tensor["fp32", 3]) -> {"y": Tensor["int64", -1]}:
    return {"y": x.astype("int64")}
"""


def test_a_model_that_its_code_completes_is_listed_with_its_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "scale" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(OWN_FORM)
    status, lines = run(tmp_path)
    assert status == 0, lines
    assert "OK scale 1: x FP32[-1,3] -> y INT64[-1,-1], batches of up to 4" in lines
    out = io.StringIO()
    assert main([tmp_path], Console(file=out, width=40), load=False) == 0
    assert "OK scale 1: inputs and outputs come from its code or its steps" in out.getvalue()
    (tmp_path / "scale" / "config.pbtxt").write_text(
        'backend: "python"\ninput { name: "x", data_type: TYPE_FP32, dims: [ 3 ] }\n'
    )
    out = io.StringIO()
    assert main([tmp_path], Console(file=out, width=40), load=False) == 0
    assert "x FP32[3] -> ... (outputs come from its code or its steps)" in out.getvalue()


def test_environments_are_made_in_the_named_folder(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "scale" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(OWN_FORM)
    (folder / "requirements.txt").write_text(OFFLINE)
    add_numpy(folder / "wheels")
    (folder / "requirements.txt").write_text(OFFLINE + "numpy\n")
    words = ["--environments-dir", str(tmp_path / "environments"), str(tmp_path / "repository")]
    done = subprocess.run([sys.executable, "-m", "headrace", "validate", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "environments").iterdir() if (path / "bin" / "python").exists()]


def test_batches_that_change_answers_are_a_warning_and_all_sizes_are_proven_for_the_server(tmp_path: Path) -> None:
    mixed = network("M = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, M)", {}, ("N", 4))
    add_model(tmp_path / "models", "mixed", mixed, config="max_batch_size: 8\ndynamic_batching {}\n")
    console = Console(file=io.StringIO(), width=300)
    assert main([tmp_path / "models"], console, state_dir=str(tmp_path / "state")) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mixed/1: warning: batches are not proven (alone): influence: output 'y' of row 0 of 2" in text
    assert list((tmp_path / "state" / "proofs").iterdir())
