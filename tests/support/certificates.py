"""Certificates for the tests of TLS: of a server, of a client, of their authority, and of a stranger's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """PEM files.

    Attributes:
        certificate: with the intermediate ones after it.
        key: of the certificate.
    """

    certificate: Path
    key: Path


class Certificates:
    """PEM files in a folder.

    Args:
        folder: where to write them.
    """

    def __init__(self, folder: Path) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        self.server = _pair(authority, folder, "127.0.0.1")
        self.client = _pair(authority, folder, "client.example")
        self.strange_authority = folder / "stranger.ca.pem"
        stranger.cert_pem.write_to_path(self.strange_authority)
        self.stranger = _pair(stranger, folder, "stranger.example")


def _pair(authority: trustme.CA, folder: Path, name: str) -> Pair:
    issued = authority.issue_cert(name)
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(pair.certificate, append=number > 0)
    issued.private_key_pem.write_to_path(pair.key)
    return pair
