"""Number of Python functions of ours that one plain request calls: each costs about 0.1 us, the largest part of its time.

Without keys, cache, pipeline or canary, each request alone. A rise changes the bound, and its commit gives the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import models
from tests.support.serving import ROOT

# Calls of one request, generators and coroutines counted each time that they go on. A bound is the count itself.
BOUNDS = {"http": 69, "grpc": 80}


def test_calls_of_one_request(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine())
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.call_counter", str(tmp_path / "repository")],
        cwd=ROOT,
        env={**env, "HEADRACE_STATE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    for name, calls in json.loads(ran.stdout).items():
        total = sum(calls.values())
        listed = "\n".join(f"{number:4} {function}" for function, number in sorted(calls.items()))
        assert 20 < total <= BOUNDS[name], f"{name}: {total} calls, at most {BOUNDS[name]} are allowed:\n{listed}"
        print(f"{name}: {total} calls in {len({function.partition(':')[0] for function in calls})} files")
