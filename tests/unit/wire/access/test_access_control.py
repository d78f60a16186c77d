"""Principals follow the keys file in place: rotation, revocation, changed rights, renamed clients, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest
from headrace.config.model_config import RateLimit
from headrace.core import access as core_access
from headrace.core.access import Principal, Scope, certificate_names
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, QuotaExceeded, Unauthenticated
from headrace.wire.access import access_control, keys_file
from headrace.wire.access.access_control import KeyAccess
from headrace.wire.access.keys_file import key_hash

from tests.support.keys import Keys
from tests.support.waiting import more, record_calls, until_async


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def access(keys: Keys) -> KeyAccess:
    return KeyAccess(keys.path)


def bearer(access: KeyAccess, key: str, peer: Principal | None = None) -> Principal:
    return access.authenticate(f"Bearer {key}", "", peer)


def reread(access: KeyAccess, keys: Keys) -> None:
    keys.write()
    assert access._watcher is not None
    access._apply(access._watcher.read())


def test_a_key_has_one_principal_with_its_name(access: KeyAccess, keys: Keys) -> None:
    principal = bearer(access, keys.keys["all"])
    assert principal.name == "all"
    assert bearer(access, keys.keys["all"]) is access.authenticate("", keys.keys["all"], None) is principal


def test_no_credentials_and_invalid_ones_have_no_rights(access: KeyAccess) -> None:
    for authorization, api_key in (
        ("", ""),
        ("Bearer ", ""),
        ("Basic eA==", ""),
        ("Bearer hr_x", ""),
        ("", "hr_x"),
        ("", "\udcff"),
    ):
        principal = access.authenticate(authorization, api_key, None)
        assert (principal.name, principal.grant) == ("", None)
        with pytest.raises(Unauthenticated):
            principal.require(Scope.READ)


def test_a_hash_is_no_key(access: KeyAccess, keys: Keys) -> None:
    digest = key_hash(keys.keys["all"])
    for text in (digest.hex(), digest.decode("latin-1")):
        assert bearer(access, text).grant is None


def test_a_removed_key_ends_at_once_and_another_key_of_the_name_stays(access: KeyAccess, keys: Keys) -> None:
    second = "hr_second"
    keys.clients["all"]["keys"].append({"sha256": key_hash(second).hex()})
    reread(access, keys)
    old, new = bearer(access, keys.keys["all"]), bearer(access, second)
    assert old.name == new.name == "all"
    del keys.clients["all"]["keys"][0]
    reread(access, keys)
    with pytest.raises(Unauthenticated, match="revoked"):
        old.admit("tiny")
    new.admit("tiny")
    assert bearer(access, keys.keys["all"]).grant is None


def test_a_key_that_moves_to_another_name_is_another_principal(access: KeyAccess, keys: Keys) -> None:
    before = bearer(access, keys.keys["all"])
    keys.clients["renamed"] = keys.clients.pop("all")
    reread(access, keys)
    assert before.grant is None
    assert bearer(access, keys.keys["all"]).name == "renamed"


def test_a_revoked_key_that_returns_works_again(access: KeyAccess, keys: Keys) -> None:
    client = keys.clients.pop("all")
    reread(access, keys)
    assert bearer(access, keys.keys["all"]).grant is None
    keys.clients["all"] = client
    reread(access, keys)
    bearer(access, keys.keys["all"]).admit("tiny")


def test_a_reload_keeps_the_level_of_quotas(access: KeyAccess, keys: Keys) -> None:
    keys.clients["all"]["quota"] = {"requests_per_s": 0.001, "burst": 1}
    reread(access, keys)
    principal = bearer(access, keys.keys["all"])
    principal.admit("tiny")
    reread(access, keys)
    with pytest.raises(QuotaExceeded):
        principal.admit("tiny")


def test_a_raised_quota_ends_the_wait_of_the_old_one(
    access: KeyAccess, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = monotonic_ns()
    for module in (access_control, core_access):
        monkeypatch.setattr(module, "monotonic_ns", lambda: now_ns)
    keys.clients["all"]["quota"] = {"requests_per_s": 0.001, "burst": 1}
    reread(access, keys)
    principal = bearer(access, keys.keys["all"])
    principal.admit("tiny")
    keys.clients["all"]["quota"] = {"requests_per_s": 10.0, "burst": 1}
    reread(access, keys)
    with contextlib.suppress(QuotaExceeded):
        principal.admit("tiny")
    now_ns += NS_PER_S // 9
    principal.admit("tiny")


def test_expired_keys_have_no_rights(access: KeyAccess, keys: Keys) -> None:
    keys.clients["all"]["keys"][0]["expires"] = "2020-01-01"
    keys.clients["read"]["keys"][0]["expires"] = "2999-01-01T00:00:00+02:00"
    reread(access, keys)
    with pytest.raises(Unauthenticated, match="expired"):
        bearer(access, keys.keys["all"]).admit("tiny")
    bearer(access, keys.keys["read"]).require(Scope.READ)


def test_certificates_have_the_rights_of_their_entry(access: KeyAccess, keys: Keys) -> None:
    keys.clients["read"]["certificates"] = ["reader.example", "spiffe://x/reader"]
    reread(access, keys)
    assert access.certificate_principal(["unknown"]) is None
    peer = access.certificate_principal(["unknown", "spiffe://x/reader"])
    assert peer is not None
    assert peer is access.certificate_principal(["spiffe://x/reader"])
    assert peer.name == "read"
    # A key of the request goes before the certificate, also an invalid one.
    assert access.authenticate("", "", peer) is peer
    assert bearer(access, keys.keys["infer"], peer).name == "infer"
    assert bearer(access, "hr_wrong", peer).grant is None
    assert access.authenticate("Basic eA==", "", peer) is peer
    keys.clients["read"]["certificates"] = []
    reread(access, keys)
    assert peer.grant is None
    assert access.certificate_principal(["reader.example"]) is None


def test_a_removed_certificate_ends_and_another_of_the_client_stays(access: KeyAccess, keys: Keys) -> None:
    keys.clients["read"]["certificates"] = ["old.example", "new.example"]
    reread(access, keys)
    old, new = (access.certificate_principal([name]) for name in ("old.example", "new.example"))
    assert old is not None
    assert new is not None
    keys.clients["read"]["certificates"] = ["new.example"]
    reread(access, keys)
    assert access.certificate_principal(["new.example"]) is new
    new.require(Scope.READ)
    with pytest.raises(Unauthenticated, match="revoked"):
        old.require(Scope.READ)


def test_a_certificate_that_moves_to_another_client_is_another_principal(access: KeyAccess, keys: Keys) -> None:
    keys.clients["read"]["certificates"] = ["web.example"]
    reread(access, keys)
    before = access.certificate_principal(["web.example"])
    keys.clients["infer"]["certificates"] = keys.clients["read"].pop("certificates")
    reread(access, keys)
    after = access.certificate_principal(["web.example"])
    assert before is not None
    assert after is not None
    assert (before.grant, after.name) == (None, "infer")


def test_names_of_a_certificate() -> None:
    certificate = {
        "subject": ((("organizationName", "x"),), (("commonName", "web"),)),
        "subjectAltName": (("DNS", "web.example"), ("URI", "spiffe://x/web"), ("DNS", "web")),
    }
    assert certificate_names(certificate) == ("web", "web.example", "spiffe://x/web")
    assert certificate_names(None) == certificate_names({}) == ()


def test_caches_are_emptied_after_each_change(access: KeyAccess, keys: Keys) -> None:
    calls: list[int] = []
    access.on_change(lambda: calls.append(1))
    reread(access, keys)
    reread(access, keys)
    assert len(calls) == 2


def test_a_server_with_a_broken_file_does_not_start(keys: Keys) -> None:
    keys.write("clients: 1")
    with pytest.raises(ConfigError):
        KeyAccess(keys.path)


@pytest.fixture
def fast_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "_POLL_S", 0.02)


@pytest.mark.usefixtures("fast_poll")
async def test_the_thread_follows_the_file_and_keeps_the_keys_of_a_broken_or_missing_one(
    access: KeyAccess, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "headrace")

    access.start(asyncio.get_running_loop())

    async def wait(text: str, count: int = 1) -> None:
        await until_async(lambda: caplog.text.count(text) >= count)

    keys.write("clients: {broken")
    await wait("the keys in force stay")
    bearer(access, keys.keys["all"]).admit("tiny")
    os.remove(keys.path)
    await wait("there is no such file")
    polls = record_calls(monkeypatch, access_control, "file_signature")
    await until_async(more(polls, 4))
    assert caplog.text.count("there is no such file") == 1, "one line for one change"
    bearer(access, keys.keys["all"]).admit("tiny")
    del keys.clients["all"]
    keys.write()
    await wait("reload keys")
    await until_async(lambda: bearer(access, keys.keys["all"]).grant is None)
    before = caplog.text.count("reload keys")
    access.reload()
    await wait("reload keys", before + 1)
    access.stop()
    assert access._watcher is not None
    assert not access._watcher._thread.is_alive()
    assert not any(key in caplog.text for key in keys.keys.values())


@contextlib.asynccontextmanager
async def followed(access: KeyAccess) -> AsyncIterator[None]:
    """Run the thread of the keys file."""
    access.start(asyncio.get_running_loop())
    try:
        yield
    finally:
        access.stop()


@pytest.mark.usefixtures("fast_poll")
async def test_a_file_that_cannot_be_read_once_is_read_at_the_next_poll(
    access: KeyAccess, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "headrace")
    opened, failures = keys_file.open_regular_file, 3

    def open_later(path: Path) -> BinaryIO:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path)

    monkeypatch.setattr(keys_file, "open_regular_file", open_later)
    async with followed(access):
        del keys.clients["all"]
        keys.write()
        await until_async(lambda: bearer(access, keys.keys["all"]).grant is None)
    assert caplog.text.count("the keys in force stay: ") == 1, "one line for one error"
    assert "Too many open files" in caplog.text
    assert f"audit: reload keys {keys.path} by the server: ok" in caplog.text.splitlines()[-1]
    assert caplog.text.rstrip().endswith(": ok")


@pytest.mark.usefixtures("fast_poll")
async def test_a_change_that_keeps_size_and_modification_time_is_noticed(access: KeyAccess, keys: Keys) -> None:
    async with followed(access):
        status = os.stat(keys.path)
        text = keys.path.read_text()
        changed = text.replace(key_hash(keys.keys["all"]).hex(), "a" * 64)
        assert len(changed) == len(text)
        await asyncio.sleep(0.05)
        keys.path.write_text(changed)  # in place: the same inode and size
        os.utime(keys.path, ns=(status.st_atime_ns, status.st_mtime_ns))
        await until_async(lambda: bearer(access, keys.keys["all"]).grant is None)


def test_keys_that_cannot_be_applied_change_nothing_and_are_audited(
    access: KeyAccess, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "headrace")
    principal = bearer(access, keys.keys["all"])
    before = principal.grant
    changed = keys_file.parse_keys(keys.path.read_text(), "k")
    slow = RateLimit.model_construct(requests_per_s=1e-300, burst=None)
    infer = changed.clients.pop("infer")
    changed.clients["infer"] = infer.model_copy(update={"quota": slow})
    changed.clients["all"] = changed.clients["all"].model_copy(update={"scopes": ("read",)})
    access._reload(changed)
    assert principal.grant is before
    assert bearer(access, keys.keys["infer"]).grant is not None
    assert "audit: reload keys" in caplog.text
    assert "by the server: internal error" in caplog.text
    assert ": ok" not in caplog.text
