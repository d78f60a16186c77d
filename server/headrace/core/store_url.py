"""URLs of model repositories in object stores and on the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = {
    "s3": "s3://BUCKET/FOLDER",
    "gs": "gs://BUCKET/FOLDER",
    "az": "az://ACCOUNT/CONTAINER/FOLDER",
    "hf": "hf://ORGANISATION/NAME@REVISION/FOLDER",
}
"""Accepted URLs by scheme; the folder may be left out, and the revision of `hf`."""

# Other names of the schemes, the first is Triton's.
_ALIASES = {"as": "az", "azure": "az", "gcs": "gs"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(s3|gs|gcs|az|as|azure|hf):/?[^/]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"(refs/[a-z]+/[A-Za-z0-9._-]+|[A-Za-z0-9._-]+)(?:/(.*))?")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A folder in a store.

    Attributes:
        scheme: "s3", "gs", "az" or "hf".
        account: storage account of "az", "" for others.
        bucket: bucket, container, or ORGANISATION/NAME on the Hub.
        folder: path in the bucket without slashes at its ends; "" for all of it.
        revision: branch, tag or commit of "hf", "" for others.
    """

    scheme: str
    bucket: str
    folder: str = ""
    account: str = ""
    revision: str = ""

    def __str__(self) -> str:
        bucket = self.bucket + (f"@{self.revision}" if self.revision else "")
        return f"{self.scheme}://{'/'.join(filter(None, (self.account, bucket, self.folder)))}"

    @property
    def base_name(self) -> str:
        """Last part of the path: the name of a model whose files are at the root."""
        return (self.folder or self.bucket).rpartition("/")[2]


def is_store_url(text: str) -> bool:
    """True for a text that is a URL, also of an unknown scheme, or is meant as one of a store; False for a path."""
    return _URL.fullmatch(text) is not None or _ONE_SLASH.match(text) is not None


def parse_store_url(text: str) -> StoreUrl:
    """Parse the URL of a repository.

    Raises:
        ValueError: not such a URL; the text repeats no credentials of it.
    """
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a URL: write two slashes after the scheme, e.g. s3://BUCKET/FOLDER")
    scheme, rest = _ALIASES.get(match[1].lower(), match[1].lower()), match[2]
    if scheme not in FORMS:
        raise ValueError(f"'{scheme}://' is not a store: write a path, or one of {', '.join(FORMS.values())}")
    if any(character in rest for character in "?#\\%") or not rest.isprintable():
        cure = "leave it out: credentials come from the provider's own variables and files"
        raise ValueError(f"a {scheme}:// URL has a query, a fragment or an escaped character: {cure}")
    if "@" in rest.partition("/")[0]:
        cure = "leave them out: they come from the provider's own variables and files"
        raise ValueError(f"a {scheme}:// URL has credentials before '@': {cure}")
    parts = rest.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{text!r} has an empty part, '.' or '..' in its path: write {FORMS[scheme]}")
    return _hub_url(text, parts) if scheme == "hf" else _bucket_url(text, scheme, parts)


def _bucket_url(text: str, scheme: str, parts: list[str]) -> StoreUrl:
    account = ""
    if scheme == "az":
        account, parts = parts[0], parts[1:]
        if not parts or not _ACCOUNT.fullmatch(account):
            raise ValueError(f"{text!r} does not name a storage account and a container: write {FORMS[scheme]}")
    if not _BUCKET.fullmatch(parts[0]):
        cure = f"write {FORMS[scheme]}; the address of another server is AWS_ENDPOINT_URL" if scheme == "s3" else ""
        raise ValueError(f"{parts[0]!r} in {text!r} is not a bucket: {cure or 'write ' + FORMS[scheme]}")
    return StoreUrl(scheme, parts[0], "/".join(parts[1:]), account)


def _hub_url(text: str, parts: list[str]) -> StoreUrl:
    names, at, rest = "/".join(parts).partition("@")
    path = names.split("/")
    revision, folder = "main", "/".join(path[2:])
    if at:
        match = _REVISION.fullmatch(rest)
        if match is None or folder:
            raise ValueError(f"{text!r} has no revision after '@': write {FORMS['hf']}")
        revision, folder = match[1], match[2] or ""
    if len(path) < 2 or not all(_HUB_NAME.fullmatch(part) for part in path[:2]):
        raise ValueError(f"{text!r} does not name a repository of the Hub: write {FORMS['hf']}")
    return StoreUrl("hf", "/".join(path[:2]), folder, revision=revision)
