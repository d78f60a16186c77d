"""The example of docs/sequences.md runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.python_models import add_python_model
from tests.support.serving import ROOT, serving


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/sequences.md").read_text(encoding="utf-8")
    (config, code, client) = re.findall(r"^```(?:python|py)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    add_python_model(tmp_path / "repository", "counters", code, config)
    with serving(tmp_path / "repository", tmp_path) as server:
        done = subprocess.run(
            [sys.executable, "-c", client.replace("127.0.0.1:8000", server.address)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout.split()) == (0, ["5", "11", "18"]), done.stderr
