"""The proof of a published engine: what `headrace build` prints of it. `tests/e2e/test_proof.py` has its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from headrace_engines import build_publication
from headrace_engines.build_publication import prove_batches
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.store import Store

from tests.support.deviating_models import WrongEight, wrong_in_the_middle
from tests.support.engine_projects import write_project
from tests.support.networks import inputs_of


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "8",
            "not all batches are proven (limited): wrong; the first layer whose rows differ in a batch: middle (Tanh",
        ),
        ("4", "not all batches are proven (limited): wrong; rows have the same outputs in a batch and alone"),
        ("raise SystemExit(3)", "its batches are not proven: the process of the proof ended with status 3"),
    ],
)
def test_the_layer_of_a_wrong_engine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, text: str
) -> None:
    """The process of the proof reports a fault of a batch size, or ends."""
    if program.isdecimal():
        report = {"state": "limited", "reason": "wrong", "verified_batches": [1, 2], "faults": {program: "wrong"}}
        program = f"print({json.dumps({'batches': {'1': report}})!r})"
    monkeypatch.setattr(build_publication, "_TRIAL_LOAD", (sys.executable, "-c", program))
    monkeypatch.setattr(WrongEight, "name", "tensorrt")
    model = wrong_in_the_middle()
    project = write_project(tmp_path / "models", model, inputs_of(model, 32))
    options = SimpleNamespace(state_dir=tmp_path / "state")
    request: Any = SimpleNamespace(project=project, target=WrongEight(), options=options)
    built: Any = SimpleNamespace(spec=read_spec(project.config, "fp32"))
    assert prove_batches(request, built, Store(tmp_path / "store"), silent).startswith(text)
