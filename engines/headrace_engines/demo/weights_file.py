"""A published weights file: where it is, which checksum it must have, and its bytes."""

from __future__ import annotations

import hashlib
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20
# Ten times what the largest demo model needs; a server that sends without end must not fill the memory.
_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file that is only used if its content is the one that was meant.

    Attributes:
        url: http, https or file URL, or a path on this machine.
        sha256: the checksum it must have, 64 hex digits in lower case.
    """

    url: str
    sha256: str

    def __post_init__(self) -> None:
        """Check the checksum's form.

        Raises:
            BuildError: if it is not 64 hex digits.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise BuildError(f"the weights' SHA-256 is {self.sha256!r}, expected 64 hex digits in lower case")

    def read(self, report: Report) -> bytes:
        """The file's bytes.

        Raises:
            BuildError: if it cannot be read or fetched, is too large, or has another checksum.
        """
        try:
            if "://" not in self.url:
                with Path(self.url).open("rb") as stream:
                    content = _read(stream, self.url, Path(self.url).stat().st_size, report)
            elif self.url.startswith(("http://", "https://", "file://")):
                with urllib.request.urlopen(self.url, timeout=_TIMEOUT_S) as response:
                    content = _read(response, self.url, int(response.headers.get("Content-Length") or 0), report)
            else:
                raise BuildError(f"{self.url}: expected an http, https or file URL, or a path")
        except (OSError, urllib.error.URLError) as error:
            raise BuildError(
                f"{self.url}: {error}: without a network, give a local copy with --weights-url PATH --weights-sha256 HEX"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise BuildError(
                f"{self.url} has SHA-256 {digest}, expected {self.sha256}: it is another file, or a damaged one"
            )
        return content


# torchvision's ResNet50_Weights.IMAGENET1K_V1 (BSD-3-Clause): the file's name has the first eight digits of its SHA-256.
RESNET50_IMAGENET = WeightsFile(
    "https://download.pytorch.org/models/resnet50-0676ba61.pth",
    "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
)


def _read(stream: BinaryIO, url: str, size_bytes: int, report: Report) -> bytes:
    chunks: list[bytes] = []
    done_bytes = 0
    while chunk := stream.read(_CHUNK_BYTES):
        chunks.append(chunk)
        done_bytes += len(chunk)
        if done_bytes > _LIMIT_BYTES:
            raise BuildError(f"{url} is larger than {_LIMIT_BYTES >> 20} MiB, expected the weights of one small model")
        report(done_bytes / size_bytes if size_bytes else 0.0, f"fetching, {done_bytes >> 20} MiB")
    return b"".join(chunks)
