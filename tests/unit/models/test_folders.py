"""Which folders of a repository are models: what a volume has beside them is skipped with a note."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from headrace.config.digests import onnx_digest
from headrace.config.model_folder import read_model_folder
from headrace.core.errors import ConfigError
from headrace.models.control_policy import ControlPolicy
from headrace.models.folders import folders, open_paths, scan
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry

from tests.support import control_thread
from tests.support.models import add_model, affine

UNPRIVILEGED_UID = 65534


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="volume"))
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def without_rights(*closed: Path) -> Iterator[None]:
    """Act as a user who may not write anything here, nor read the folders that are closed."""
    for folder in closed:
        folder.chmod(0o700 if os.geteuid() == 0 else 0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(UNPRIVILEGED_UID)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder in closed:
            folder.chmod(0o755)


@pytest.mark.parametrize(
    ("files", "skipped"),
    [
        ([], "it is empty"),
        ([".keep"], "it is empty"),
        (["README.md"], "it has neither a configuration nor a version folder such as 1"),
        (["photos/cat.jpg"], "it has neither a configuration nor a version folder such as 1"),
        (["config.pbtxt"], None),
        (["config.yml"], None),
        (["1/model.onnx"], None),
        (["1/"], None),
        (["model.onnx"], None),
        (["v1/model.onnx"], None),
    ],
)
def test_a_folder_without_configuration_version_and_model_file_is_skipped(
    tmp_path: Path, files: list[str], skipped: str | None
) -> None:
    (tmp_path / "m").mkdir()
    for file in files:
        path = tmp_path / "m" / file
        if file.endswith("/"):
            path.mkdir()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    models, others = folders(tmp_path)
    assert [path.name for path in models] == ([] if skipped else ["m"])
    assert [folder.reason for folder in others] == ([skipped] if skipped else [])


def test_a_known_model_is_not_skipped_while_its_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert scan([tmp_path]) == []
    assert [model.name for model in scan([tmp_path], model_names={"m"})] == ["m"]


def test_unreadable_folders_are_skipped_and_read_only_models_serve(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_model(volume, "m", affine(seed=3))
    (volume / "lost+found").mkdir()
    (volume / "private").mkdir()
    before = sorted(volume.rglob("*"))

    async def check(_: Reconciler, registry: Registry) -> None:
        assert control_thread.index(registry) == {("m", "1"): ("READY", "")}
        assert control_thread.same(await control_thread.infer_values(registry), 3)

    # A user that may not read the interpreter's folder can import nothing new.
    add_model(volume / "private", "m", affine(seed=3))
    control_thread.run(volume / "private", check, ControlPolicy("none"))
    shutil.rmtree(volume / "private" / "m")
    caplog.clear()
    with without_rights(volume / "lost+found", volume / "private"), caplog.at_level("INFO"):
        control_thread.run(volume, check, ControlPolicy("none"))
    notes = {record.getMessage(): record.levelname for record in caplog.records if "is skipped" in record.getMessage()}
    assert notes == {
        f"{volume}/lost+found is skipped: it belongs to the file system": "INFO",
        f"{volume}/private is skipped: it cannot be read: Permission denied": "WARNING",
    }
    assert sorted(volume.rglob("*")) == before, "nothing is written into the repository"


def test_an_unreadable_repository_is_an_error_with_a_cure(volume: Path) -> None:
    with without_rights(volume), pytest.raises(ConfigError) as caught:
        scan([volume])
    assert "the model repository cannot be read: Permission denied (give the server" in str(caught.value)


def hub_snapshot(cache: Path, folder: str, links: tuple[bool, bool]) -> Path:
    """Write a model with external weights as the Hugging Face client keeps it: `snapshots` with links into `blobs`.

    Args:
        cache: folder of one model in the cache.
        folder: of the file in the snapshot.
        links: model.onnx and model.onnx_data are links.
    """
    snapshot = cache / "snapshots" / "2f3a" / folder
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    onnx.save(
        affine(), snapshot / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    for name, is_link in zip(("model.onnx", "model.onnx_data"), links, strict=True):
        if is_link:
            blob = (snapshot / name).rename(cache / "blobs" / name.replace(".", "0"))
            (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize(("form", "links"), [
    *((form, links) for form in ("file", "folder", "model", "repository") for links in ((True, True), (True, False))),
    ("file", (False, True)), ("folder", (False, True)), ("file", (False, False)),
])  # fmt: skip
def test_models_in_the_cache_of_the_hugging_face_hub(tmp_path: Path, form: str, links: tuple[bool, bool]) -> None:
    snapshot = hub_snapshot(tmp_path / "models--a--b", "onnx" if form in ("file", "folder") else "m/1", links)
    path = {"file": snapshot / "model.onnx", "folder": snapshot, "model": snapshot.parent}.get(
        form, snapshot.parents[1]
    )
    with open_paths([path], str(tmp_path / "state")) as served:
        (model,) = scan(served.repositories)
        folder = read_model_folder(model.path, model.repository)
        session = onnxruntime.InferenceSession(folder.model_file(1), providers=["CPUExecutionProvider"])
        assert session.run(None, {"X": np.ones((1, 16), np.float32)})[0].shape == (1, 4)
        weights = Path(f"{folder.model_file(1)}_data")
        digest = onnx_digest(folder.model_file(1))
        if not links[1] or form in ("model", "repository"):
            return
        content = weights.read_bytes()
    changed = snapshot.joinpath("model.onnx_data").resolve()
    changed.write_bytes(bytes(reversed(content)))
    with open_paths([path], str(tmp_path / "state")) as served:
        (model,) = scan(served.repositories)
        assert onnx_digest(model.path / "1" / "model.onnx") != digest


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx_data"])
def test_links_out_of_the_cache_stay_refused(tmp_path: Path, name: str) -> None:
    snapshot = hub_snapshot(tmp_path / "models--a--b", "m/1", (True, True))
    outside = (snapshot / name).resolve().rename(tmp_path / "outside")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of the"):
        read_model_folder(snapshot.parent, snapshot.parents[1])


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("", ["missing.onnx"], "missing.onnx: error: does not exist (name an ONNX file, the folder of a model"),
        ("", ["x.doc"], "x.doc: error: is no model in a format that is known: .onnx, .pt, "),
        ("", ["x.plan"], "cannot be served without a configuration (put it in FOLDER/NAME/1/model.plan"),
        ("", ["a/m.onnx", "b/m.onnx"], "b/m.onnx: error: a model of the name 'm' is served from "),
        ("", ["b"], "b: error: has 2 model files and no version folders (name those to serve: headrace serve "),
        ("x", ["a/m.onnx", "c"], "/c: error: a model of the name 'x' is served from "),
    ],
)
def test_paths_that_cannot_be_served(tmp_path: Path, name: str, paths: list[str], message: str) -> None:
    for file in ("a/m.onnx", "b/m.onnx", "b/n.onnx", "c/1/model.onnx", "x.doc", "x.plan"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(ConfigError) as refused, open_paths([tmp_path / path for path in paths], name=name):
        pass
    assert message in str(refused.value)
