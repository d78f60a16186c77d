"""Rules and alerts in deploy/prometheus: sound by promtool, each alert seen to fire, and all names those of docs/metrics.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from headrace.observability.metrics_table import FAMILIES

from tests.support.serving import ROOT
from tests.support.tools import tool

FOLDER = ROOT / "deploy" / "prometheus"
RULES, ALERTS = FOLDER / "headrace.rules.yml", FOLDER / "headrace.alerts.yml"
TESTS = FOLDER / "tests" / "headrace.test.yml"
SUFFIXES = ("_bucket", "_sum", "_count", "")


def rules(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def promtool(*words: str | Path) -> None:
    done = subprocess.run([tool("promtool"), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", [("check", "config", "--syntax-only", FOLDER / "prometheus.yml"), ("check", "rules", RULES, ALERTS)]
)
def test_promtool_finds_nothing_wrong(words: tuple[str | Path, ...]) -> None:
    promtool(*words)


@pytest.mark.slow
def test_the_rules_pass_their_own_tests() -> None:
    promtool("test", "rules", TESTS)


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    expected = str(
        [sample["labels"] for test in tests for case in test["promql_expr_test"] for sample in case["exp_samples"]]
    )
    fired = set(re.findall(r'alertname="(\w+)"', expected))
    assert fired == {rule["alert"] for rule in rules(ALERTS)}


@pytest.mark.parametrize("rule", rules(ALERTS), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_and_a_remedy(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 40


def test_rules_and_dashboards_name_nothing_that_is_not_there() -> None:
    entry = {family.name + suffix for family in FAMILIES.values() for suffix in SUFFIXES} | {"headrace_", "headrace"}
    entry |= {rule["record"] for rule in rules(RULES)}
    texts = [rule["expr"] for path in (RULES, ALERTS) for rule in rules(path)]
    texts += [path.read_text() for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")]
    named = {name for text in texts for name in re.findall(r"\bheadrace[_:][\w:]+", text)}
    assert len(named) > 50
    assert named <= entry
