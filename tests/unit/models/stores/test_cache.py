"""The folder of all mirrors: who holds which, what is evicted, and errors."""

from __future__ import annotations

import errno
import os
from importlib import util
from pathlib import Path

import pytest
from headrace.config.files import folder_bytes
from headrace.core.errors import ConfigError
from headrace.core.store_url import parse_store_url
from headrace.models.stores.base import StoreError
from headrace.models.stores.cache import make_room, open_mirrors

URL = parse_store_url("s3://bucket/models")
OTHER = parse_store_url("gs://bucket/models")


def test_local_folders_and_urls_keep_their_order(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    with open_mirrors([first, URL, last, URL], str(tmp_path / "cache")) as folders:
        paths = list(folders)
        assert (paths[0], paths[2], len(paths)) == (first, last, 3)
        assert list(folders.values()) == [None, URL, None]
        assert paths[1].is_dir()
        assert "s3-bucket-models" in str(paths[1])
    with open_mirrors([URL], str(tmp_path / "cache")) as folders:
        assert list(folders) == [paths[1]]


def test_a_second_server_has_a_copy_of_its_own(tmp_path: Path) -> None:
    with open_mirrors([URL], str(tmp_path)) as first:
        with open_mirrors([URL], str(tmp_path)) as second:
            assert not first.keys() & second.keys()
        with open_mirrors([URL], str(tmp_path)) as third:
            assert third.keys() == second.keys()


def test_mirrors_that_no_server_holds_are_evicted_first(tmp_path: Path) -> None:
    with open_mirrors([OTHER], str(tmp_path)) as folders:
        (unused,) = folders
        (unused / "x").write_bytes(b"x" * 5000)
    with open_mirrors([OTHER], str(tmp_path)) as other, open_mirrors([URL], str(tmp_path)) as folders:
        (mirror,) = (path.parent for path in folders)
        (next(iter(other)) / "y").write_bytes(b"y" * 1000)
        with pytest.raises(StoreError, match="raise --repository-cache-bytes"):
            make_room(mirror, 5000, 10_000, ())
        assert (unused / "x").exists()  # another server holds it
    with open_mirrors([URL], str(tmp_path)):
        make_room(mirror, 5000, 10_000, ())
        assert not unused.exists()
        assert mirror.exists()


def test_the_oldest_versions_go_first_and_kept_ones_stay(tmp_path: Path) -> None:
    with open_mirrors([URL], str(tmp_path)) as folders:
        (mirror,) = (path.parent for path in folders)
        for age, name in enumerate(("new", "kept", "old")):
            folder = mirror / "versions" / name
            folder.mkdir()
            (folder / "model").write_bytes(b"x" * 1000)
            os.utime(folder, (1000 - age, 1000 - age))
        make_room(mirror, 500, 2900, ["kept"])
        assert sorted(path.name for path in (mirror / "versions").iterdir()) == ["kept", "new"]


def test_other_folders_in_the_cache_are_never_removed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("lock", "data"):
        (foreign / name).write_bytes(b"x" * 1000)
    with open_mirrors([URL], str(tmp_path)) as folders:
        (mirror,) = (path.parent for path in folders)
        with pytest.raises(StoreError, match="too few beside what is served"):
            make_room(mirror, 500, 1500, ())
    assert (foreign / "data").exists()


def test_links_of_a_file_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    os.link(tmp_path / "a", tmp_path / "b")
    assert folder_bytes(tmp_path) == 100


def test_without_a_folder_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--repository-cache-dir DIR"), open_mirrors([URL], ""):
        pass
    with open_mirrors([tmp_path], "") as folders:
        assert folders == {tmp_path: None}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOTDIR)), open_mirrors([URL], str(tmp_path / "file")):
        pass


@pytest.mark.parametrize(("url", "package"), [("s3://bucket", "obstore"), ("hf://org/net", "huggingface_hub")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    monkeypatch.setattr(
        "headrace.models.stores.opening.find_spec", lambda name: None if name == package else util.find_spec(name)
    )
    expected = rf"needs the package {package}.*pip install '\.\[stores\]' in a checkout"
    with pytest.raises(ConfigError, match=expected), open_mirrors([parse_store_url(url)], str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []
