"""Objects of a listing as models, versions and files."""

from __future__ import annotations

import pytest
from headrace.core.store_url import parse_store_url
from headrace.models.stores.base import StoredObject, StoreError
from headrace.models.stores.sync_units import split_units

URL = parse_store_url("s3://bucket/models")


def units(*paths: str, url: str = "s3://bucket/models", size: int = 3) -> dict[str, list[str]]:
    """Paths in each unit; those that end in "/" are empty objects in place of folders, as consoles make them."""
    objects = [StoredObject(path.rstrip("/"), 0 if path.endswith("/") else size, f"e-{path}") for path in paths]
    result = split_units(parse_store_url(url), objects)
    return {str(name): sorted(unit.objects) for name, unit in result.items()}


def test_versions_and_the_other_files_of_a_model_are_units() -> None:
    assert units("a/config.yaml", "a/labels.txt", "a/warmup/x", "a/1/model.onnx", "a/2/model.onnx", "a/2/w/x.bin") == {
        "a": ["config.yaml", "labels.txt", "warmup/x"],
        "a/1": ["model.onnx"],
        "a/2": ["model.onnx", "w/x.bin"],
    }


def test_folders_that_are_no_models_are_left_out() -> None:
    paths = ["README.md", ".git/1/x", "docs/page.md", "a/1/model.onnx", ".gitattributes"]
    assert units(*paths) == {"a": [], "a/1": ["model.onnx"]}


def test_empty_objects_stand_for_folders() -> None:
    assert units("a/", "a/config.yaml", "a/1/", "b/1/", "b/1/model.onnx", "b/") == {
        "a": ["config.yaml"],
        "a/1": [],
        "b": [],
        "b/1": ["model.onnx"],
    }


def test_a_url_may_be_one_model() -> None:
    expected = {"net": ["config.yaml", "labels.txt"], "net/1": ["model.onnx"]}
    assert units("config.yaml", "labels.txt", "1/model.onnx", url="hf://org/net") == expected
    assert units("1/model.onnx", url="s3://bucket/models/other") == {"other": [], "other/1": ["model.onnx"]}


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        ([], "has no objects"),
        (["docs/page.md", "model.onnx"], "has no model"),
        (["a/1/../../../x"], "cannot be a file"),
        (["a/1//x"], "cannot be a file"),
        (["a/1/x\\y"], "cannot be a file"),
        (["/".join(["a", "1", *"x" * 20])], "cannot be a file"),
    ],
)
def test_listings_without_a_repository_are_refused(paths: list[str], part: str) -> None:
    with pytest.raises(StoreError, match=part):
        split_units(URL, [StoredObject(path, 3, "e") for path in paths])


def test_keys_differ_with_any_change() -> None:
    first = [StoredObject("a/1/model.onnx", 3, "e")]
    others = [[StoredObject("a/1/model.onnx", 3, "f")], [StoredObject("a/1/model.onnx", 4, "e")]]
    others.append([*first, StoredObject("a/1/model.onnx.data", 1, "e")])
    keys = [
        next(unit.key for name, unit in split_units(URL, each).items() if name.version) for each in [first, *others]
    ]
    assert len(set(keys)) == 4
    again = split_units(URL, [StoredObject("a/1/model.onnx", 3, "e", "md5:0", modified_s=7)])
    assert keys[0] in {unit.key for unit in again.values()}


def test_an_object_that_cannot_be_a_file_is_left_out_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        units = split_units(URL, [StoredObject(path, 3, "e") for path in ("a/1/model.onnx", "b/1//hidden", "../up")])
        assert {str(name.model) for name in units} == {"a"}
    assert [line for line in caplog.messages if "cannot be a file" in line] == [
        f"{URL} has an object {path!r}, which cannot be a file and is left out: rename or remove it"
        for path in ("b/1//hidden", "../up")
    ]
