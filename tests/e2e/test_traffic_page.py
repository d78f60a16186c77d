"""The example of docs/traffic.md runs as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import models
from tests.support.models import read_config_text
from tests.support.serving import ROOT, serving


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/traffic.md").read_text(encoding="utf-8")
    configs = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (commands,) = re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for version in (1, 2):
        models.add_model(
            tmp_path / "repository",
            "classify",
            models.affine(seed=version),
            version=version,
            files={"config.yaml": configs[0]},
        )
    with serving(tmp_path / "repository", tmp_path) as server:
        outputs = []
        for command in commands.splitlines():
            command = command.replace("127.0.0.1:8000", server.address).replace("curl", "curl -sS --fail-with-body")
            if command.startswith("headrace"):
                command = f"{sys.executable} -m {command} --url {server.url}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            outputs.append(done.stdout)
    shares = [{row["version"]: row["share"] for row in json.loads(output)["versions"]} for output in outputs[:4]]
    assert shares == [
        {"1": 0.95, "2": 0.05},
        {"1": 0.8, "2": 0.2},
        {"1": 0.0, "2": 1.0},
        {"1": 0.95, "2": 0.05},
    ]
    assert "traffic, version 1: stable, 95% of the traffic" in outputs[4]
    assert "traffic, version 2: canary, 5% of the traffic" in outputs[4]


def test_the_whole_block_and_the_text_format_are_read() -> None:
    page = (ROOT / "docs/traffic.md").read_text(encoding="utf-8")
    whole = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    config, findings = read_config_text(whole, "config.yaml")
    assert config is not None, findings
    assert config.traffic is not None
    assert config.traffic.model_fields_set == {*yaml.safe_load(whole)["traffic"]}
    other, findings = read_config_text(
        re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[2], "config.yaml"
    )
    assert other is not None, findings
    assert other.traffic is not None
    assert other.traffic.versions == {"model:resnet50_v2": "5%"}
    (text,) = re.findall(r"^```\n(parameters.*?)^```$", page, re.DOTALL | re.MULTILINE)
    short, findings = read_config_text(text, "config.pbtxt")
    assert short is not None, findings
    assert short.traffic is not None
    assert short.traffic.versions == {"2": "5%"}
