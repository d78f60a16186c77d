"""Signatures of checksums in the format of minisign: Ed25519, over the file or over its BLAKE2b hash.

The trusted comment, which is signed too, has the field `model:NAME`. Without it, a signed model could replace another one.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config.documents import open_regular_file, refuse
from headrace.config.files import write_durably
from headrace.models.integrity.checksums import CHECKSUMS, SIGNATURE

if TYPE_CHECKING:
    from minisign import PublicKey, SecretKey

MAX_KEYS_BYTES = 64 << 10
MAX_SIGNATURE_BYTES = 8 << 10
_EXTRA = "pip install '.[signing]' in a checkout of Headrace"
_COMMENT = "untrusted comment:"


def _minisign(subject: str) -> Any:
    """Import the library; only signatures need it."""
    try:
        import minisign
    except ImportError as error:
        raise refuse(subject, None, f"needs a package that is not installed ({error.name})", _EXTRA) from error
    return minisign


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """Public keys whose signatures are accepted.

    Attributes:
        file: path of the file with the keys, for errors.
        keys: by key ID.
    """

    file: str
    keys: Mapping[bytes, PublicKey]

    def check(self, content: bytes, signature: bytes | None, model: str) -> str:
        """Check the signature of `SHA256SUMS`, and return the ID of its key.

        Args:
            content: of `SHA256SUMS`.
            signature: content of `SHA256SUMS.minisig`; None if it is missing.
            model: name of the model, which the trusted comment must have.

        Raises:
            ConfigError: the signature is missing, malformed, of another key, of other content, or of another model.
        """
        name = f"{model}/{SIGNATURE}"
        cure = f"sign it with a key of {self.file}: headrace checksums write MODEL --secret-key FILE"
        if signature is None:
            raise refuse(name, None, f"is missing: only signed models are served (--model-keys-file {self.file})", cure)
        library = _minisign(name)
        try:
            parsed = library.Signature.from_bytes(signature)
        except library.Error as error:
            raise refuse(name, None, f"is not a signature of minisign: {error}", cure) from None
        key_id = _key_id(bytes(parsed).splitlines()[1])
        key = self.keys.get(key_id)
        if key is None:
            trusted = ", ".join(map(key_text, self.keys))
            message = f"is signed with the key {key_text(key_id)}, trusted are {trusted}"
            raise refuse(name, None, message, cure)
        try:
            key.verify(content, parsed)
        except library.Error:
            message = f"is not a signature of this {CHECKSUMS} by the key {key_text(key_id)}"
            raise refuse(name, None, message, cure) from None
        fields = parsed.trusted_comment.split("\t")
        if f"model:{model}" not in fields:
            names = [field.partition(":")[2] for field in fields if field.startswith("model:")]
            message = f"is for the model {names[0]!a}" if names else "names no model"
            cure = f"sign it for this one; minisign takes -t 'model:{model}' as trusted comment"
            raise refuse(name, None, f"{message}, not for {model!a}", cure)
        return key_text(key_id)


def _key_id(encoded: bytes) -> bytes:
    """Return the key ID of an encoded key or signature: 8 bytes after the name of the algorithm."""
    return b64decode(encoded)[2:10]


def key_text(key_id: bytes) -> str:
    """Return a key ID as minisign prints it."""
    return key_id[::-1].hex().upper()


def read_keys(path: Path) -> ModelKeys:
    """Read public keys of minisign: one or more files of `minisign -G` in one, or their second lines alone.

    Raises:
        ConfigError: the file cannot be read, has no key, or a line is not one.
    """
    option = f"--model-keys-file {path}"
    library = _minisign(option)
    try:
        with open_regular_file(Path(os.path.expanduser(path))) as stream:
            content = stream.read(MAX_KEYS_BYTES + 1)
    except OSError as error:
        raise refuse(option, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None
    cure = "write public keys of minisign, one a line; headrace checksums new-key creates a pair"
    if len(content) > MAX_KEYS_BYTES:
        raise refuse(option, None, f"has more than {MAX_KEYS_BYTES} bytes", cure)
    keys = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith((_COMMENT, "#")):
            continue
        try:
            key = library.PublicKey.from_base64(text)
        except (library.Error, ValueError) as error:
            raise refuse(option, number, f"is not a public key of minisign: {error}", cure) from None
        keys[_key_id(key.to_base64())] = key
    if not keys:
        raise refuse(option, None, "has no key", cure)
    return ModelKeys(str(path), keys)


def read_secret_key(path: Path, ask_password: Callable[[], str]) -> SecretKey:
    """Read a secret key of minisign.

    Args:
        path: the file.
        ask_password: returns the password of an encrypted key.

    Raises:
        ConfigError: it is not a secret key, or the password is wrong.
        OSError: it cannot be read.
    """
    library = _minisign(str(path))
    try:
        key: SecretKey = library.SecretKey.from_bytes(Path(os.path.expanduser(path)).read_bytes())
        if key.is_encrypted():
            key.decrypt(ask_password())
    except library.Error as error:
        cure = "name the file with the secret key; headrace checksums new-key creates a pair"
        raise refuse(str(path), None, f"is not a secret key of minisign that can be used: {error}", cure) from None
    return key


def sign_checksums(folder: Path, content: bytes, key: SecretKey, model: str) -> None:
    """Write `SHA256SUMS.minisig`.

    Args:
        folder: the model's folder.
        content: of `SHA256SUMS`.
        key: secret key.
        model: name under which the model is served.

    Raises:
        OSError: the file cannot be written.
    """
    comment = f"timestamp:{int(time.time())}\tfile:{CHECKSUMS}\tmodel:{model}\thashed"
    signature = key.sign(content, trusted_comment=comment)
    write_durably(folder / SIGNATURE, bytes(signature) + b"\n")


def create_key_pair(path: Path, password: str) -> tuple[Path, Path]:
    """Create a key pair and return its files: `path` with the suffix `.key`, readable by its owner only, and `.pub`.

    Args:
        path: path of both files without suffix.
        password: encrypts the secret key; "" for none.

    Raises:
        ConfigError: the library is missing, or one of the files exists.
        OSError: they cannot be written.
    """
    secret_file, public_file = path.with_name(f"{path.name}.key"), path.with_name(f"{path.name}.pub")
    pair = _minisign(str(path)).KeyPair.generate()
    pair.public_key.untrusted_comment = f"minisign public key {key_text(_key_id(pair.public_key.to_base64()))}"
    public = bytes(pair.public_key) + b"\n"
    if password:
        pair.secret_key.encrypt(password)
    for file in (secret_file, public_file):
        if os.path.lexists(file):
            raise refuse(str(file), None, "exists", "choose another name, keys are not replaced")
    write_durably(secret_file, bytes(pair.secret_key) + b"\n", 0o600)
    write_durably(public_file, public)
    return secret_file, public_file
