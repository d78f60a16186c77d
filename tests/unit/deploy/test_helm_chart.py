"""The Helm chart: its stored renderings agree with the server; Helm renders them in the slow tests.

`SNAPSHOTS=write` renders them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from headrace.server import settings

from tests.support import manifest_wheels
from tests.support.models import add_model, affine
from tests.support.serving import ROOT, serving

CHART = ROOT / "deploy" / "helm" / "headrace"
ADAPTER = ROOT / "deploy" / "helm" / "prometheus-adapter.yaml"
STORED = Path(__file__).parent / "helm"
CASES = [path.name.removesuffix(".values.yaml") for path in sorted(STORED.glob("*.values.yaml"))]
PROBES = {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}


def documents(case: str) -> dict[str, Any]:
    """The stored manifests of a case by kind."""
    every = [each for each in yaml.safe_load_all((STORED / f"{case}.rendered.yaml").read_text()) if each]
    assert len({each["kind"] for each in every}) == len(every)
    return {each["kind"]: each for each in every}


def pod(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec and its container."""
    spec = documents(case)["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def values(case: str) -> dict[str, Any]:
    """The chart's values with those of a case, as Helm merges them."""

    def merge(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        nested = {name: merge(base[name], each) for name, each in other.items() if isinstance(base.get(name), dict)}
        return base | other | nested

    defaults, chosen = CHART / "values.yaml", STORED / f"{case}.values.yaml"
    return merge(yaml.safe_load(defaults.read_text()), yaml.safe_load(chosen.read_text()))


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([manifest_wheels.helm(), *words], capture_output=True, text=True, timeout=100)


def render(*words: str) -> subprocess.CompletedProcess[str]:
    # Built from its module, Helm assumes a very old Kubernetes.
    return helm("template", "shop", str(CHART), "--namespace", "serving", "--kube-version", "1.30", *words)


@pytest.mark.slow
def test_helm_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_chart_renders_what_is_stored(case: str) -> None:
    done = render("--values", str(STORED / f"{case}.values.yaml"))
    assert done.returncode == 0, done.stderr
    stored = STORED / f"{case}.rendered.yaml"
    if os.environ.get("SNAPSHOTS") == "write":
        stored.write_text(done.stdout)
    assert done.stdout == stored.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("hpa.enabled=true,keda.enabled=true", "one autoscaler only"),
        ("keda.enabled=true,keda.minReplicas=0", "keda.minReplicas 0 needs keda.query"),
        ("hpa.metric=cpu", "metric"),
        ("server.readyWen=all", "readyWen"),
        ("models.uri=ftp://x", "uri"),
        ("models.claimName=", "models.claimName or models.uri"),
        ("httpRoute.enabled=true", "the name of a Gateway"),
    ],
)
def test_values_that_cannot_work_are_refused(words: str, message: str) -> None:
    done = render("--set", words)
    assert (done.returncode != 0, message in done.stderr) == (True, True), done.stderr


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema_rs.validator_for(schema)
    for case in CASES:
        validator.validate(values(case))
    for wrong in ({"replicaCount": -1}, {"hpa": {"metric": "cpu"}}, {"server": {"readyWen": "all"}}, {"extra": 1}):
        assert not validator.is_valid(values("default") | wrong), wrong
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(defaults) == set(schema["properties"]) - {"global"}
    for name, each in defaults.items():
        if "properties" in schema["properties"][name]:
            assert set(each) == set(schema["properties"][name]["properties"]), name


@pytest.mark.parametrize("case", CASES)
def test_the_options_and_variables_are_the_servers(case: str) -> None:
    spec, container = pod(case)
    assert container["args"][0] == "serve"
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, {each["name"]: each["value"] for each in container.get("env", ())})
    options = settings.from_arguments(parser.parse_args(container["args"][1:]))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}
    chosen = values(case)
    assert (options.drain_timeout_s, options.ready_when) == (
        chosen["server"]["drainTimeoutS"],
        chosen["server"]["readyWhen"],
    )
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pause + options.drain_timeout_s
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert ("/keys" in mounted) == bool(options.api_keys_file) == bool(chosen["keysSecret"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    names = {f"HEADRACE_{option.name.upper()}" for option in settings.OPTIONS}
    assert {each["name"] for each in container.get("env", ())} <= names


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted_and_selected(case: str) -> None:
    spec, container = pod(case)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    every = documents(case)
    labels = every["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert every["Service"]["spec"]["selector"].items() <= labels
    for kind, path in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("Deployment", "selector"),
    ):
        if kind in every:
            assert every[kind]["spec"][path]["matchLabels"].items() <= labels, kind
    if "ServiceMonitor" in every:
        monitor, service = every["ServiceMonitor"]["spec"], every["Service"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert service["metadata"]["labels"][monitor["jobLabel"]] == "headrace"
        (endpoint,) = monitor["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    if "NetworkPolicy" in every:
        allowed = [port["port"] for rule in every["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
        assert allowed == [port["containerPort"] for port in container["ports"]]


def test_each_switch_creates_its_manifest() -> None:
    always = {"Deployment", "Service"}
    assert set(documents("default")) == always | {"PodDisruptionBudget"}
    assert set(documents("hpa")) == always | {"HorizontalPodAutoscaler", "ServiceMonitor", "NetworkPolicy"}
    assert set(documents("keda")) == always | {"PodDisruptionBudget", "ScaledObject", "ServiceMonitor", "NetworkPolicy"}
    assert set(documents("store")) == always | {"PodDisruptionBudget", "Ingress", "HTTPRoute"}
    for case in CASES:
        every = documents(case)
        scalers = [every[kind] for kind in ("HorizontalPodAutoscaler", "ScaledObject") if kind in every]
        deployment = every["Deployment"]
        assert ("replicas" in deployment["spec"]) == (not scalers), "an autoscaler and Helm would fight over it"
        assert [each["spec"]["scaleTargetRef"]["name"] for each in scalers] == [deployment["metadata"]["name"]] * len(
            scalers
        )


def test_a_store_needs_no_claim_and_the_state_may_have_one() -> None:
    spec, container = pod("store")
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if len(volume) > 1 and "persistentVolumeClaim" in volume
    }
    assert claims == {"state": "headrace-state"}
    assert {"name": "state", "mountPath": "/var/lib/headrace/state"} in container["volumeMounts"]
    assert "--model-repository=s3://bucket/models" in container["args"]
    assert spec["runtimeClassName"] == "nvidia"
    ports = {port["name"]: port["port"] for port in documents("store")["Service"]["spec"]["ports"]}
    (rule,), (way,) = (documents("store")[kind]["spec"]["rules"] for kind in ("Ingress", "HTTPRoute"))
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "shop-headrace", "port": {"name": "http"}}
    assert way["backendRefs"] == [{"name": "shop-headrace", "port": ports["http"]}]


def test_the_autoscalers_read_metrics_that_exist() -> None:
    exported = set(re.findall(r"^\| `(headrace_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    rules = yaml.safe_load(ADAPTER.read_text())["rules"]
    template = (CHART / "templates" / "horizontal-pod-autoscaler.yaml").read_text()
    assert set(re.findall(r"headrace_\w+", template)) == {rule["name"]["as"] for rule in rules}
    (metric,) = documents("hpa")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "headrace_pod_predicted_wait_seconds"
    queries = [text for rule in rules for text in (rule["seriesQuery"], rule["metricsQuery"])]
    queries += re.findall(r"query: .*", (CHART / "templates" / "scaled-object.yaml").read_text())
    used = {name for query in queries for name in re.findall(r"headrace_[a-z_]+", query)}
    assert used == {"headrace_predicted_wait_seconds", "headrace_busy_seconds_total", "headrace_instances"}
    assert used <= exported
    (trigger,) = documents("keda")["ScaledObject"]["spec"]["triggers"]
    assert 'pod=~"shop-headrace-.*"' in trigger["metadata"]["query"]
    assert (trigger["metadata"]["threshold"], trigger["metadata"]["activationThreshold"]) == ("0.7", "0.05")


def test_the_probes_are_answered(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "net", affine())
    _, container = pod("default")
    with serving(tmp_path / "repository", tmp_path) as server:
        for name, state in PROBES.items():
            probe = container[name]["httpGet"]
            assert (probe["path"], probe["port"]) == (f"/v2/health/{state}", "http")
            assert server.request("GET", probe["path"])[0] == 200
