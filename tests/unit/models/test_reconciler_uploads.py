"""Load requests that bring their own configuration or files, through the control thread."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from headrace.core.errors import BadRequest, ConfigError, NotFound

from tests.support.control_thread import everything, infer_values, put, running, same
from tests.support.models import affine
from tests.support.waiting import until_async


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path / "repository", 1)
    return tmp_path / "repository"


async def test_a_configuration_sent_by_the_client(repository: Path) -> None:
    async with running(repository) as (reconciler, registry):
        put(repository, 2, version=2)
        await reconciler.load(
            "m", json.dumps({"versionPolicy": {"specific": {"versions": [1]}}, "max_batch_size": 2}), {}
        )
        assert registry.config("m", "")["max_batch_size"] == 2
        assert same(await infer_values(registry), 1)
        assert not (repository / "m" / "config.pbtxt").exists()
        with pytest.raises(ConfigError, match=r"^config: error: unknown field"):
            await reconciler.load("m", '{"max_batch_sise": 1}', {})
        with pytest.raises(ConfigError, match=r"config: error: the name \"x\" is not the folder's"):
            await reconciler.load("m", '{"name": "x"}', {})
        assert registry.config("m", "")["max_batch_size"] == 2
        await reconciler.load("m", None, {})
        assert registry.config("m", "")["max_batch_size"] == 4
        assert same(await infer_values(registry), 2)


async def test_files_sent_by_the_client_are_stored_in_a_private_folder(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = affine(seed=7).SerializeToString()
    folder = tmp_path.parent / f"{tmp_path.name}-private"
    folder.mkdir()

    def folders() -> list[Path]:
        return list(folder.iterdir())

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with running(repository) as (reconciler, registry):
        before = everything(tmp_path)
        with pytest.raises(BadRequest, match="config"):
            await reconciler.load("m", None, {"1/model.onnx": content})
        with pytest.raises(BadRequest, match="outside of"):
            await reconciler.load("m", "{}", {"../../evil": content, "1/model.onnx": content})
        await reconciler.load("m", "{}", {"3/model.onnx": content})
        assert list(registry.versions("m")) == ["3"]
        assert same(await infer_values(registry), 7)
        await reconciler.load("new", "{}", {"1/model.onnx": content})
        assert same(await infer_values(registry, "new"), 7)
        assert len(folders()) == 2
        with pytest.raises(ConfigError) as refused:
            await reconciler.load("new", "{}", {"1/model.onnx": b"no model"})
        assert "headrace-" not in str(refused.value)
        assert same(await infer_values(registry, "new"), 7)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 1)
        await until_async(lambda: len(folders()) == 1)
        await reconciler.unload("new", False)
        await until_async(lambda: not folders())
        with pytest.raises(NotFound):
            await reconciler.load("new", None, {})
        assert everything(tmp_path) == before, "nothing was written anywhere else"
        await reconciler.load("new", "{}", {"1/model.onnx": content})
    assert folders() == [], "the end of the server removes it too"
