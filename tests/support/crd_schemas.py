"""Schemas of custom resources, cut to the fields that our manifests use; `tests/unit/deploy/crds` has the result.

    python -m tests.support.crd_schemas MODULE VERSION CRD.yaml MANIFEST.yaml ...

writes a file for the resource of CRD.yaml, a CustomResourceDefinition of a Go module. It keeps the fields that the
manifests have, with their types, and refuses all others: a new field in a manifest needs
a new file, a misspelt one is in no schema.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.serving import ROOT

FOLDER = ROOT / "tests" / "unit" / "deploy" / "crds"
# Texts, and rules in a language of Kubernetes that are not evaluated here.
_DROPPED = ("description", "x-kubernetes-validations")


def manifests(path: Path) -> list[dict[str, Any]]:
    """Read the documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def cut(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return a schema with the fields that values have.

    Args:
        schema: structural schema of Kubernetes.
        values: values of one field in all manifests.
    """
    result = {key: each for key, each in schema.items() if key not in (*_DROPPED, "properties", "items")}
    if "properties" in schema:
        used = {name for value in values if isinstance(value, dict) for name in value}
        result["properties"] = {
            name: cut(schema["properties"][name], [value[name] for value in values if name in value])
            for name in sorted(used & schema["properties"].keys())
        }
        # Kubernetes drops unknown fields without an error; here they are errors.
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if "items" in schema:
        items = [item for value in values if isinstance(value, list) for item in value]
        result["items"] = cut(schema["items"], items)
    return result


def cut_definition(definition: dict[str, Any], documents: Iterable[dict[str, Any]], source: str) -> dict[str, Any]:
    """Return the schema of a resource, cut to the fields that documents of its kind have.

    Args:
        definition: CustomResourceDefinition.
        documents: of any kind.
        source: where the definition is from.
    """
    spec = definition["spec"]
    used = [each for each in documents if each["kind"] == spec["names"]["kind"]]
    assert used, f"no manifest has the kind {spec['names']['kind']}"
    (version,) = {each["apiVersion"].rpartition("/")[2] for each in used}
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in spec["versions"] if each["name"] == version]
    result = cut(schema, used)
    result["properties"]["apiVersion"] = {"const": f"{spec['group']}/{version}"}
    result["properties"]["kind"] = {"const": spec["names"]["kind"]}
    result["properties"]["metadata"] = {"type": "object"}  # the schema of metadata is that of Kubernetes
    result["required"] = sorted({*result.get("required", ()), "apiVersion", "kind", "metadata", "spec"})
    return {"$comment": source, **result}


def main(module: str, version: str, definition: Path, files: Sequence[Path]) -> None:
    """Write the schema of one resource."""
    (document,) = manifests(definition)
    source = f"CustomResourceDefinition {document['metadata']['name']} of {module} {version}, cut; see README.md"
    schema = cut_definition(document, [each for file in files for each in manifests(file)], source)
    path = FOLDER / f"{document['spec']['names']['kind']}.json"
    path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [Path(word) for word in sys.argv[4:]])
