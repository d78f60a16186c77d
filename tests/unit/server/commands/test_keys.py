"""`headrace keys`: prints a key once, writes only its hash, and explains itself."""

from __future__ import annotations

import argparse
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from headrace.server.commands import keys
from headrace.wire.access.keys_file import key_hash, read_keys


def run(path: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    keys.add_arguments(parser, str(path), str)
    return keys.main(parser.parse_args(words))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "keys.yaml"


def test_new_prints_the_key_alone_and_stores_its_hash(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path, "new", "alice") == 0
    captured = capsys.readouterr()
    key = captured.out.strip()
    assert captured.out == f"{key}\n"
    assert key not in captured.err
    assert "headrace serve --api-keys-file" in captured.err
    client = read_keys(path)[0].clients["alice"]
    assert client.keys[0].sha256 == key_hash(key).hex()
    assert client.scopes == ("infer", "read")
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_option_of_new_is_stored(path: Path) -> None:
    options = ["--scope", "infer", "--scope", "metrics", "--model", "res*", "--model", "tiny", "--quota", "2.5:7"]
    assert run(path, "new", "shop", *options, "--expires", "2027-01-31", "--certificate", "shop.example") == 0
    client = read_keys(path)[0].clients["shop"]
    assert (client.scopes, client.models) == (("infer", "metrics"), ("res*", "tiny"))
    assert client.quota is not None
    assert (client.quota.requests_per_s, client.quota.burst) == (2.5, 7)
    assert client.keys[0].expires == "2027-01-31"
    assert client.certificates == ("shop.example",)


def test_a_second_key_keeps_the_rights_and_one_can_be_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(path, "new", "alice", "--model", "tiny", "--expires", "90d")
    first = capsys.readouterr().out.strip()
    run(path, "new", "alice")
    captured = capsys.readouterr()
    second = captured.out.strip()
    assert "alice has 2 keys now" in captured.err
    client = read_keys(path)[0].clients["alice"]
    assert client.models == ("tiny",)
    assert run(path, "list") == 0
    listed = capsys.readouterr().out
    digits = [key_hash(key).hex()[:8] for key in (first, second)]
    assert all(each in listed for each in ("alice", "infer, read", "tiny", *digits))
    assert first not in listed
    assert run(path, "revoke", "alice", "--key", digits[0]) == 0
    assert [key.sha256 for key in read_keys(path)[0].clients["alice"].keys] == [key_hash(second).hex()]
    assert run(path, "revoke", "alice") == 0
    assert read_keys(path)[0].clients == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["new", "two words"], "cannot be the name of a client"),
        (["new", "x", "--quota", "fast"], "--quota 'fast' is not RATE or RATE:BURST"),
        (["new", "x", "--quota", "0"], "--quota '0' is not RATE"),
        (["new", "x", "--expires", "soon"], "write 90d, or 2027-01-31"),
        (["new", "x", "--model", "a b"], "is not a pattern of model names"),
        (["revoke", "nobody"], "has no client 'nobody': it has alice"),
        (["revoke", "alice", "--key", "zz"], "0 keys of 'alice' begin with 'zz'"),
    ],
)
def test_errors_say_what_to_write_and_change_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    run(path, "new", "alice")
    before = path.read_bytes()
    capsys.readouterr()
    assert run(path, *words) == 1
    captured = capsys.readouterr()
    assert text in " ".join(captured.err.split())
    assert captured.out == ""
    assert path.read_bytes() == before


def test_a_missing_file_is_an_error_of_list_and_revoke(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list"], ["revoke", "alice"]):
        assert run(path, *words) == 1
        assert "headrace keys new NAME" in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_the_installed_command_reads_the_file_from_the_environment(path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "keys"]
    env = {"HEADRACE_API_KEYS_FILE": str(path), "PATH": "/usr/bin"}
    new = subprocess.run([*command, "new", "alice"], env=env, capture_output=True, text=True, check=True)
    assert new.stdout.startswith("hr_")
    listed = subprocess.run([*command, "list"], env=env, capture_output=True, text=True, check=True)
    assert "alice" in listed.stdout


def test_new_rights_of_a_known_client_are_said_to_be_those_of_all_its_keys(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(path, "new", "[red]alice")
    capsys.readouterr()
    run(path, "new", "[red]alice")
    text = " ".join(capsys.readouterr().err.split())
    assert "[red]alice has 2 keys now" in text
    assert "rights of all keys" not in text
    run(path, "new", "[red]alice", "--scope", "read")
    assert "The rights of all keys of [red]alice have changed" in " ".join(capsys.readouterr().err.split())


def test_revoke_names_the_line_by_which_the_server_confirms_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(path, "new", "alice")
    capsys.readouterr()
    assert run(path, "revoke", "alice") == 0
    text = capsys.readouterr().err.replace("\n", "")
    assert "audit: reload keys" in text
    assert "'ok'" in text
