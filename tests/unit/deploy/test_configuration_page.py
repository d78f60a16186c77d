from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from headrace.config.auto_complete import DEFAULT_MAX_BATCH_SIZE
from headrace.config.binding import IGNORED, REFUSED, WITHOUT_EFFECT, bind
from headrace.config.documents import read_yaml

from deploy import configuration_page

DOCS = Path(__file__).parents[3] / "docs"
FOLDERS = {configuration_page.SCHEMA_FILE: configuration_page._SCHEMAS, configuration_page.PAGE_FILE: DOCS}


@pytest.mark.parametrize("name", [configuration_page.SCHEMA_FILE, configuration_page.PAGE_FILE])
def test_the_committed_docs_are_up_to_date(name: str, tmp_path: Path) -> None:
    shutil.copy(DOCS / configuration_page.PAGE_FILE, tmp_path)
    configuration_page.write_docs(tmp_path, tmp_path)
    assert (FOLDERS[name] / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), (
        "run `make docs`"
    )


def test_the_page_names_every_field_and_every_exception() -> None:
    page = configuration_page.configuration_page()
    for path, model in configuration_page._parts(configuration_page.ModelConfig):
        assert not path or f"## `{configuration_page._title(path)}`" in page
        assert all(f"| `{name}` |" in page for name in model.model_fields)
    for pattern in (*REFUSED, *IGNORED):
        assert f"`{configuration_page._title(tuple(pattern.split('.')))}`" in page
    assert all(instead in page for instead in WITHOUT_EFFECT.values())


def test_the_examples_of_the_page_are_valid_and_equivalent() -> None:
    from headrace.config.documents import read_pbtxt

    page = (DOCS / configuration_page.PAGE_FILE).read_text(encoding="utf-8")
    assert f"it becomes {DEFAULT_MAX_BATCH_SIZE} with dynamic batching" in page
    assert f"$schema=../../server/headrace/config/{configuration_page.SCHEMA_FILE}" in page
    blocks = page.split("```")
    from_yaml = next(block.removeprefix("yaml") for block in blocks if "# config.yaml" in block)
    from_pbtxt = next(block for block in blocks if "# config.pbtxt" in block)
    configs = [bind(read_yaml(from_yaml, "f"))[0], bind(read_pbtxt(from_pbtxt, "f"))[0]]
    assert configs[0] is not None
    assert configs[0] == configs[1]


def accepts(part: Any, value: Any, root: Any) -> bool:
    """A validator for the keywords that the schema uses; asserts that it supports them all."""
    entry = {"$ref", "anyOf", "enum", "type", "properties", "additionalProperties", "required", "items", "prefixItems"}
    entry |= {"minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "minLength", "propertyNames"}
    entry |= {"title", "description", "default", "const", "$schema", "$id", "$defs"}
    assert set(part) <= entry, set(part) - entry
    if "$ref" in part and not accepts(root["$defs"][part["$ref"].rpartition("/")[2]], value, root):
        return False
    if "anyOf" in part and not any(accepts(choice, value, root) for choice in part["anyOf"]):
        return False
    if ("enum" in part and value not in part["enum"]) or ("const" in part and value != part["const"]):
        return False
    kinds = part.get("type", [])
    python = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, python[k]) and (k == "boolean" or not isinstance(value, bool)) for k in kinds
    ):
        return False
    if isinstance(value, dict):
        extra = part.get("additionalProperties", True)
        for key, item in value.items():
            inner = part.get("properties", {}).get(key, extra)
            if inner is False or (isinstance(inner, dict) and not accepts(inner, item, root)):
                return False
        return set(part.get("required", [])) <= set(value)
    if isinstance(value, list):
        inner = part.get("prefixItems", [part.get("items", {})] * len(value))
        long_enough = part.get("minItems", 0) <= len(value) <= part.get("maxItems", len(value))
        return long_enough and all(accepts(i, item, root) for i, item in zip(inner, value, strict=False))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(part.get("minimum", value) <= value <= part.get("maximum", value))
    return True


def test_editors_accept_what_the_reader_accepts() -> None:
    root = configuration_page.json_schema()
    text = (
        (Path(__file__).parents[1] / "config" / "triton_examples" / "tuned.yaml")
        .read_text()
        .replace(", graph_spec: [{batch_size: 4}]", "")
    )
    assert accepts(root, json.loads(json.dumps(yaml.safe_load(text))), root)


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_siz: 3",
        "max_batch_size: many",
        "input: [{dims: [3]}]",
        "input: [{name: x, data_type: fp31}]",
        "instance_group: [{kind: kpu}]",
        "version_policy: {newest: {}}",
        "slo: {p99: 3}",
        "dynamic_batching: null",
        "preprocess: {crop: [3]}",
        "oversize: maybe",
    ],
)
def test_editors_mark_what_the_reader_refuses(text: str) -> None:
    root = configuration_page.json_schema()
    assert not accepts(root, yaml.safe_load(text), root)


def test_every_part_of_the_schema_is_described() -> None:
    root = configuration_page.json_schema()
    assert root["$schema"].endswith("2020-12/schema")
    parts = [root, *root["$defs"].values()]
    assert [name for part in parts for name, field in part["properties"].items() if not field.get("description")] == []
    assert "null" not in json.dumps(root)


def test_the_schema_is_a_part_of_the_package_and_has_an_id() -> None:
    text = files("headrace.config").joinpath(configuration_page.SCHEMA_FILE).read_text(encoding="utf-8")
    assert json.loads(text)["$id"] == "urn:headrace:config.schema.json"


def test_a_page_without_its_mark_is_refused() -> None:
    page = configuration_page.configuration_page()
    assert configuration_page.configuration_page("# Introduction\n\n" + page) == "# Introduction\n\n" + page
    with pytest.raises(ValueError, match="has no line"):
        configuration_page.configuration_page(page.replace("From here on", "Below"))


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert configuration_page.main([str(tmp_path), str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {configuration_page.SCHEMA_FILE, configuration_page.PAGE_FILE}
    assert "wrote" in capsys.readouterr().out
