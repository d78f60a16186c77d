"""Signatures in the format of minisign: those of the tool itself, and every way to be refused."""

from __future__ import annotations

import base64
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from headrace.core.errors import ConfigError
from headrace.models.integrity.checksums import SIGNATURE
from headrace.models.integrity.signatures import ModelKeys, create_key_pair, read_keys, read_secret_key, sign_checksums

if TYPE_CHECKING:
    from minisign import SecretKey

CONTENT = b"0" * 64 + b"  1/model.onnx\n"
# Made by minisign's author with minisign, over the four bytes "test": the hash is signed, and the file itself.
KEY = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
KEY_ID = "E7620F1842B4E81F"
HASHED = (
    "untrusted comment: signature from minisign secret key\n"
    "RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
    "trusted comment: timestamp:1556193335\tfile:test\n"
    "y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n"
)
LEGACY = (
    "untrusted comment: signature from minisign secret key\n"
    "RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n"
    "trusted comment: timestamp:1555779966\tfile:test\n"
    "QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n"
)


class Signer:
    """A key pair in files, and what signs with it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.secret_file, self.public_file = create_key_pair(folder / name, "")
        self.secret: SecretKey = read_secret_key(self.secret_file, lambda: "")
        self.keys = read_keys(self.public_file)

    def sign(self, content: bytes = CONTENT, model: str = "m") -> bytes:
        sign_checksums(self.folder, content, self.secret, model)
        return (self.folder / SIGNATURE).read_bytes()


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    """A key pair."""
    return Signer(tmp_path, "first")


def reason(keys: ModelKeys, signature: bytes | None, content: bytes = CONTENT, model: str = "m") -> str:
    with pytest.raises(ConfigError) as refused:
        keys.check(content, signature, model)
    assert str(refused.value).isprintable()
    return str(refused.value)


def public(tmp_path: Path, text: str) -> ModelKeys:
    (tmp_path / "trusted").write_text(text)
    return read_keys(tmp_path / "trusted")


def test_a_signature_is_accepted_and_names_its_key(signer: Signer) -> None:
    assert signer.keys.check(CONTENT, signer.sign(), "m") in signer.public_file.read_text()


@pytest.mark.parametrize("signature", [HASHED, LEGACY])
def test_signatures_of_minisign_itself_are_verified(tmp_path: Path, signature: str) -> None:
    keys = public(tmp_path, f"{KEY}\n")
    # Its trusted comment names no model: refused only after the signature was found right.
    assert "names no model, not for 'm'" in reason(keys, signature.encode(), b"test")
    assert f"is not a signature of this SHA256SUMS by the key {KEY_ID}" in reason(keys, signature.encode(), b"Test")


def test_a_file_and_its_hash_are_both_accepted_as_signed(signer: Signer) -> None:
    comment = "made by hand\tmodel:m"
    for prehash in (True, False):
        signature = bytes(signer.secret.sign(CONTENT, prehash=prehash, trusted_comment=comment))
        assert signer.keys.check(CONTENT, signature, "m")


def test_a_signature_of_one_kind_is_not_one_of_the_other(signer: Signer) -> None:
    lines = signer.sign().splitlines()
    encoded = base64.b64decode(lines[1])
    lines[1] = base64.b64encode(b"Ed" + encoded[2:])
    assert "is not a signature of this SHA256SUMS" in reason(signer.keys, b"\n".join(lines))


def test_other_content_is_refused(signer: Signer) -> None:
    assert "is not a signature of this SHA256SUMS" in reason(signer.keys, signer.sign(), CONTENT + b"\n")


def test_the_signature_of_another_key_is_refused(signer: Signer, tmp_path: Path) -> None:
    other = Signer(tmp_path, "second")
    text = reason(signer.keys, other.sign())
    assert "is signed with the key" in text
    assert signer.keys.check(CONTENT, signer.sign(), "m") in text


def test_the_key_id_of_a_trusted_key_is_not_enough(signer: Signer, tmp_path: Path) -> None:
    trusted, forged = signer.sign().splitlines(), Signer(tmp_path, "second").sign().splitlines()
    key_id = base64.b64decode(trusted[1])[:10]
    forged[1] = base64.b64encode(key_id + base64.b64decode(forged[1])[10:])
    assert "is not a signature of this SHA256SUMS" in reason(signer.keys, b"\n".join(forged))


def test_the_trusted_comment_is_signed(signer: Signer) -> None:
    changed = signer.sign(model="other").replace(b"model:other", b"model:m")
    assert "is not a signature of this SHA256SUMS" in reason(signer.keys, changed)


def test_a_signed_model_cannot_replace_another_one(signer: Signer) -> None:
    assert "is for the model 'cats', not for 'm'" in reason(signer.keys, signer.sign(model="cats"))
    assert "is for the model 'm2'" in reason(signer.keys, signer.sign(model="m2"))
    assert "is for the model 'M'" in reason(signer.keys, signer.sign(model="M"))


@pytest.mark.parametrize(
    "signature",
    [b"", b"\n\n\n\n", b"untrusted comment: x\nRWQ=\ntrusted comment: y\nRWQ=\n", b"\xff" * 300, HASHED.encode()[:-10]],
)
def test_what_is_no_signature_is_refused(signer: Signer, signature: bytes) -> None:
    assert "is not a signature of minisign" in reason(signer.keys, signature)


def test_a_missing_signature_is_refused(signer: Signer) -> None:
    assert "is missing: only signed models are served" in reason(signer.keys, None)


def test_several_keys_in_one_file(signer: Signer, tmp_path: Path) -> None:
    other = Signer(tmp_path, "second")
    keys = public(tmp_path, f"# of the team\n{signer.public_file.read_text()}\n{other.public_file.read_text()}{KEY}\n")
    assert len(keys.keys) == 3
    assert keys.check(CONTENT, signer.sign(), "m") != keys.check(CONTENT, other.sign(), "m")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no key"),
        ("untrusted comment: minisign public key\n", "has no key"),
        ("RWQ=\n", ":1: error: is not a public key of minisign"),
        (f"{KEY}\n{KEY[:-4]}AAA\n", ":2: error: is not a public key of minisign"),
        ("\udcff\n", "is not a public key of minisign"),
        ("#" * 70_000, "has more than 65536 bytes"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "keys").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        read_keys(tmp_path / "keys")
    assert expected in str(refused.value)


def test_a_missing_file_of_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "keys")


def test_a_secret_key_is_encrypted_private_and_not_replaced(tmp_path: Path) -> None:
    secret, public_file = create_key_pair(tmp_path / "k", "pass word")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="exists"):
        create_key_pair(tmp_path / "k", "")
    with pytest.raises(ConfigError, match="wrong password"):
        read_secret_key(secret, lambda: "passw0rd")
    sign_checksums(tmp_path, CONTENT, read_secret_key(secret, lambda: "pass word"), "m")
    assert read_keys(public_file).check(CONTENT, (tmp_path / SIGNATURE).read_bytes(), "m")


def test_a_public_key_is_no_secret_key(signer: Signer) -> None:
    with pytest.raises(ConfigError, match="is not a secret key of minisign"):
        read_secret_key(signer.public_file, lambda: "")


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisign", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[signing\]' in a checkout"):
        read_keys(tmp_path / "keys")
