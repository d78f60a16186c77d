"""Manifests in deploy/ against the schemas of Kubernetes, KServe, the Prometheus operator and KEDA."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.support.crd_schemas import FOLDER, cut_definition, manifests
from tests.support.manifest_wheels import schemas_of_kubernetes
from tests.support.serving import ROOT

DEPLOY = ROOT / "deploy"
FILES = [
    *sorted((DEPLOY / "kserve").glob("*.yaml")),
    *sorted((DEPLOY / "kubernetes").glob("*.yaml")),
    *sorted((ROOT / "tests" / "unit" / "deploy" / "helm").glob("*.rendered.yaml")),
]
CUSTOM = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
# The oldest Kubernetes that the chart was checked for, and the newest one of the schemas.
RELEASES = ("v1.30.0", "v1.37.0")


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each manifest, with the name of its file and its kind."""
    for path in FILES:
        for document in manifests(path):
            yield f"{path.name}: {document['kind']}", document


def errors(schema: dict[str, Any], document: dict[str, Any]) -> list[str]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(document)]


CUSTOM_DOCUMENTS = [(name, document) for name, document in documents() if document["kind"] in CUSTOM]


def test_each_schema_has_a_manifest() -> None:
    assert {document["kind"] for _, document in CUSTOM_DOCUMENTS} == set(CUSTOM)


@pytest.mark.parametrize(("name", "document"), CUSTOM_DOCUMENTS, ids=[name for name, _ in CUSTOM_DOCUMENTS])
def test_a_custom_resource_matches_its_definition(name: str, document: dict[str, Any]) -> None:
    found = errors(CUSTOM[document["kind"]], document)
    assert not found, f"{name}: {found}: is it a new field? See tests/unit/deploy/crds/README.md"


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("ClusterServingRuntime", ("spec", "containers", 0, "image"), 7, "7 is not of type"),
        ("ClusterServingRuntime", ("spec", "protocolVersion"), ["v2"], "'protocolVersion' was unexpected"),
        ("ClusterServingRuntime", ("spec", "containers", 0, "name"), None, '"name" is a required property'),
        ("InferenceService", ("spec", "predictor", "maxReplicas"), "four", "is not of type"),
        ("InferenceService", ("spec", "predictor", "model", "modelFormat", "name"), None, "is a required property"),
        ("InferenceService", ("spec", "predictor", "model", "storageURI"), "s3://a/b", "'storageURI' was unexpected"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "intervall"), "15s", "'intervall' was unexpected"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "interval"), "15 seconds", "does not match"),
        ("PodMonitor", ("spec", "selector"), None, "is a required property"),
        ("ScaledObject", ("spec", "maxReplicaCount"), 0, "is less than the minimum of 1"),
        ("ScaledObject", ("spec", "triggers"), None, "is a required property"),
    ],
)
def test_a_wrong_custom_resource_is_refused(kind: str, path: tuple[str | int, ...], value: object, words: str) -> None:
    document = copy.deepcopy(next(each for _, each in CUSTOM_DOCUMENTS if each["kind"] == kind))
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    assert words in "\n".join(errors(CUSTOM[kind], document))


def test_a_schema_is_cut_to_the_fields_of_the_manifests() -> None:
    texts = {"type": "object", "description": "text"}
    item = {**texts, "required": ["a"], "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    spec = {**texts, "properties": {"items": {"type": "array", "items": item}, "unused": {"type": "string"}}}
    schema = {**texts, "properties": {"spec": spec, "status": {"type": "object"}}}
    definition = {
        "spec": {
            "group": "example.org",
            "names": {"kind": "Thing"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
        }
    }
    thing = {
        "apiVersion": "example.org/v1",
        "kind": "Thing",
        "metadata": {},
        "spec": {"items": [{"a": "x"}, {"a": "y", "b": 1}]},
    }
    result = cut_definition(definition, [{"kind": "Other"}, thing], "here")
    assert not errors(result, thing)
    assert "unused" not in json.dumps(result)
    assert "description" not in json.dumps(result)
    for items, words in (
        ([{"b": 1}], '"a" is a required property'),
        ([{"a": 1}], "1 is not of type"),
        ([{"a": "x", "c": 1}], "'c' was unexpected"),
    ):
        assert words in "\n".join(errors(result, {**thing, "spec": {"items": items}}))


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_match_the_schemas_of_kubernetes(release: str) -> None:
    """Strict: unknown fields are refused."""
    with zipfile.ZipFile(schemas_of_kubernetes()) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(f"/{release}-local-strict/_definitions.json")]
        text = wheel.read(path).decode()
    definitions = json.loads(text.replace("/api/_definitions.json#/", "#/"))["$defs"]
    kinds = {
        (kind["group"], kind["version"], kind["kind"]): name
        for name, definition in definitions.items()
        for kind in definition.get("x-kubernetes-group-version-kind", ())
    }
    found, checked = [], 0
    for name, document in documents():
        if document["kind"] in CUSTOM:
            continue
        group, _, version = document["apiVersion"].rpartition("/")
        reference = {"$ref": f"#/$defs/{kinds[group, version, document['kind']]}", "$defs": definitions}
        found += [f"{name}: {error}" for error in errors(reference, document)]
        broken = {**document, "specs": {}}
        assert errors(reference, broken), f"{name}: an unknown field is not refused"
        checked += 1
    assert checked > 20
    assert not found
