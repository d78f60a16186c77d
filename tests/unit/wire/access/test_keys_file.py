"""The keys file: strict reading with file, line and cure; atomic edits that leave no key and no reader behind."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

import pytest
from headrace.core.errors import ConfigError
from headrace.wire.access import keys_file
from headrace.wire.access.keys_file import editing, key_hash, new_key, parse_keys, read_keys

from tests.support.waiting import on_threads

HASH = "0" * 64
TWICE = f"""
clients:
  a: {{scopes: [infer], keys: [{{sha256: '{HASH}'}}]}}
  b:
    scopes: [infer]
    keys:
    - sha256: '{HASH}'
"""
WITHOUT_END = f"clients:\n  web:\n    scopes: [infer]\n    keys:\n    - {{sha256: '{HASH}', expires: soon}}\n"
GOOD = f"""
clients:
  web:
    scopes: [infer, read]
    models: ["resnet*", tiny]
    quota: {{requests_per_s: 2.5, burst: 7}}
    keys:
      - sha256: "{HASH}"
        expires: 2027-01-31
    certificates: [web.example]
"""


def test_a_key_has_256_random_bits_and_the_file_their_hash() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"hr_[A-Za-z0-9_-]{43}", key) for key in keys)
    assert key_hash("hr_x") == hashlib.sha256(b"hr_x").digest()


def test_every_field_is_read() -> None:
    (client,) = parse_keys(GOOD, "k").clients.values()
    assert client.scopes == ("infer", "read")
    assert client.models == ("resnet*", "tiny")
    assert client.quota is not None
    assert (client.quota.requests_per_s, client.quota.burst_size) == (2.5, 7)
    assert (client.keys[0].sha256, client.keys[0].expires) == (HASH, "2027-01-31")
    assert client.certificates == ("web.example",)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, ['"clients" is missing', "write clients: {}"]),
        ("clients:\n", 1, ['"clients" has no value']),
        ("- a\n", 1, ["a mapping"]),
        ("clients: {}\nmore: 1\n", 2, ['unknown field "more"']),
        ("clients:\n  web: {}\n", 2, ['"clients.web.scopes" is missing', "write scopes"]),
        ("clients:\n  web:\n    scopes: []\n", 3, ["clients.web.scopes", "at least 1"]),
        ("clients:\n  web:\n    scopes: [infer,\n      inver]\n", 4, ["'inver' is not a scope", "did you mean infer?"]),
        ("clients:\n  web:\n    scopes: infer\n", 3, ["clients.web.scopes"]),
        (
            "clients:\n  web:\n    scopes: [infer]\n    model: [a]\n",
            4,
            ['unknown field "clients.web.model"', "did you mean models?"],
        ),
        ("clients:\n  web:\n    scopes: [infer]\n    models: ['a b']\n", 4, ["not a pattern of model names"]),
        (
            "clients:\n  web:\n    scopes: [infer]\n    models: []\n",
            4,
            ["the list of models is empty", "remove the line for all models"],
        ),
        (
            "clients:\n  web:\n    scopes: [infer]\n    quota: {requests_per_s: 1.0e-300}\n",
            4,
            ["1e-300 requests per second are less than 1e-06", "write a higher rate"],
        ),
        ("clients:\n  'a b':\n    scopes: [infer]\n", 2, ["cannot be the name of a client"]),
        (
            "clients:\n  web:\n    scopes: [infer]\n    quota: {requests_per_s: 0}\n",
            4,
            ["requests_per_s", "greater than 0"],
        ),
        (
            "clients:\n  web:\n    scopes: [infer]\n    keys:\n    - sha256: abc\n",
            5,
            ["not the SHA-256 of a key", "headrace keys new"],
        ),
        (
            "clients:\n  web:\n    scopes: [infer]\n    keys:\n    - key: hr_x\n",
            5,
            ['unknown field "clients.web.keys.0.key"', '"clients.web.keys.0.sha256" is missing'],
        ),
        (
            WITHOUT_END,
            5,
            ["'soon' is not a time"],
        ),
        ("clients:\n  a: {scopes: [infer]}\n  a: {scopes: [read]}\n", 3, ['"a" is written twice']),
        (
            TWICE,
            7,
            ["the key of 'b' is also one of 'a'"],
        ),
        (
            "clients:\n  a: {scopes: [infer], certificates: [x]}\n  b: {scopes: [infer], certificates: [x]}\n",
            3,
            ["the certificate 'x' of 'b' is also one of 'a'"],
        ),
        ("clients: &a\n  b: *a\n", 1, ["anchors and aliases"]),
        ("clients: {", 1, ["cannot be read as YAML"]),
    ],
)
def test_errors_name_file_line_and_cure(text: str, line: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_keys(text, "keys.yaml")
    report = str(error.value)
    assert report.startswith("keys.yaml")
    for word in words:
        assert word in report
    if line is not None:
        assert f"keys.yaml:{line}: " in report


def test_an_error_does_not_show_a_key_that_was_written_in_place_of_its_hash() -> None:
    key = new_key()
    with pytest.raises(ConfigError) as error:
        parse_keys(f"clients:\n  web:\n    scopes: [infer]\n    keys:\n    - sha256: {key}\n", "k")
    assert key not in str(error.value)


def test_files_that_others_may_write_are_refused_and_readable_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    path.chmod(0o602)
    with pytest.raises(ConfigError, match=r"every user of this machine.*chmod 600"):
        read_keys(path)
    path.chmod(0o640)
    assert "chmod 600" in read_keys(path)[1]
    path.chmod(0o660)
    assert "can be written by its group" in read_keys(path)[1]
    path.chmod(0o600)
    assert read_keys(path)[1] == ""


def test_files_that_are_no_keys_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headrace keys new NAME"):
        read_keys(tmp_path / "missing.yaml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(tmp_path / "binary")


def test_an_edit_is_atomic_private_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "keys.yaml"
    with editing(path) as clients:
        clients["web"] = {"scopes": ["infer"], "keys": [{"sha256": HASH}]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_bytes()
    for broken in ({"scopes": ["infer"], "models": [""]}, {"scopes": []}):
        with pytest.raises(ConfigError), editing(path) as clients:
            clients["bad"] = broken
    with pytest.raises(KeyError), editing(path) as clients:
        del clients["nothing"]
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir()} == {"keys.yaml", ".keys.yaml.lock"}


def test_an_edit_keeps_mode_and_link(tmp_path: Path) -> None:
    path, link = tmp_path / "real" / "keys.yaml", tmp_path / "link.yaml"
    path.parent.mkdir()
    path.write_text(GOOD)
    path.chmod(0o640)
    link.symlink_to(path)
    with editing(link) as clients:
        clients["other"] = {"scopes": ["read"]}
    assert link.is_symlink()
    assert set(read_keys(path)[0].clients) == {"web", "other"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_edit_keeps_the_owner_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12346)
        with editing(path):
            pass
        for each in (path, tmp_path / ".keys.yaml.lock"):
            assert (each.stat().st_uid, each.stat().st_gid) == (12345, 12346), each
    else:
        groups = [group for group in os.getgroups() if group != os.getegid()]
        if groups:
            os.chown(path, -1, groups[0])
            with editing(path):
                pass
            assert path.stat().st_gid == groups[0]
    actual = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        status = list(actual(descriptor))
        status[4] += 1
        return os.stat_result(status)

    def refuse(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(keys_file.os, "fstat", foreign)
    monkeypatch.setattr(keys_file.os, "fchown", refuse)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be kept.*run this as its owner: sudo -u"), editing(path) as clients:
        clients.clear()
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"keys.yaml", ".keys.yaml.lock"}


def test_an_edit_keeps_every_field(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    path.chmod(0o600)
    before = read_keys(path)[0]
    with editing(path):
        pass
    assert read_keys(path)[0] == before


def test_two_writers_do_not_lose_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def add(number: int) -> None:
        with editing(path) as clients:
            clients[f"client-{number}"] = {"scopes": ["infer"], "keys": [{"sha256": key_hash(new_key()).hex()}]}

    on_threads(add, range(12))
    assert len(read_keys(path)[0].clients) == 12


def test_a_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    path.chmod(0o600)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys_file.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"), editing(path) as clients:
        clients.clear()
    assert path.read_text() == GOOD
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))
