"""Unpacks archives of Python environments, such as those of conda-pack, without trusting the names and links in them."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from headrace.config.documents import open_regular_file

MAX_BYTES = 64 << 30
MAX_MEMBERS = 2_000_000
_CHUNK_BYTES = 1 << 20
# An environment must not fill the disk: models, engines and logs may share it.
_FREE_BYTES = 512 << 20


class ArchiveRefused(Exception):
    """An archive that is not unpacked; the message has the member and the reason."""


def unpack(archive: Path, target: Path, max_bytes: int = MAX_BYTES, max_members: int = MAX_MEMBERS) -> int:
    """Unpack a tar archive, compressed or not, into a new folder.

    Only files, folders and links are created. A member is refused if its name or a link leads out of the folder, if its path
    leads through a link, or if it is a device, a pipe or a second file of the same name. Of the modes only the permission to
    execute is kept. After an error the folder is incomplete: the caller removes it.

    Args:
        archive: file that the formats of `tarfile` cover.
        target: folder that does not exist.
        max_bytes: bytes of all files together.
        max_members: number of members.

    Returns:
        The bytes of all files.

    Raises:
        ArchiveRefused: the archive is damaged, too large, or not allowed.
        OSError: the folder cannot be written.
    """
    target.mkdir(mode=0o700)
    unpacking = _Unpacking(target, max_bytes)
    try:
        with open_regular_file(archive) as stream, tarfile.open(fileobj=stream, mode="r:*") as members:
            for number, member in enumerate(_members(members), 1):
                if number > max_members:
                    raise ArchiveRefused(f"has more than {max_members} members")
                unpacking.add(members, member)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, UnicodeError, ValueError) as error:
        raise ArchiveRefused(f"is not a readable tar archive: {str(error) or type(error).__name__}") from error
    unpacking.check_links()
    return unpacking.size


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members one after the other, without keeping them: an archive may have a million."""
    while (member := archive.next()) is not None:
        yield member
        archive.members = []  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Unpacking:
    """One archive while it is unpacked."""

    target: Path  # folder that receives the members
    max_bytes: int  # largest `size`
    size: int = 0  # bytes of the files so far
    kinds: dict[PurePosixPath, str] = field(default_factory=dict)  # "folder", "file" or "link" of every path so far

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Create a member."""
        path = _path(member.name)
        if path is None:
            return
        self._make_folders(path.parent)
        if member.isdir():
            self._make_folders(path)
            return
        if path in self.kinds:
            raise ArchiveRefused(f"has {member.name!r} twice")
        if member.issym():
            self._link(path, member)
        elif member.islnk():
            self._hard_link(path, member)
        elif member.isreg():
            self._write(path, member, archive.extractfile(member))
        else:
            raise ArchiveRefused(f"has the member {member.name!r}, which is a device or a pipe")

    def check_links(self) -> None:
        """Check where every symbolic link leads, over all other links."""
        root = os.path.realpath(self.target)
        for path, kind in self.kinds.items():
            if kind == "link":
                real = os.path.realpath(self.target / path)
                if real != root and not real.startswith(root + os.sep):
                    raise ArchiveRefused(f"has the link '{path}', which leads out of the environment")

    def _make_folders(self, path: PurePosixPath) -> None:
        for folder in [*reversed(path.parents), path]:
            kind = self.kinds.get(folder)
            if kind is None and folder.parts:
                (self.target / folder).mkdir(mode=0o755)
                self.kinds[folder] = "folder"
            elif kind in ("file", "link"):
                raise ArchiveRefused(f"has members below '{folder}', which is a {kind}")

    def _link(self, path: PurePosixPath, member: tarfile.TarInfo) -> None:
        where = os.path.normpath(path.parent / member.linkname)
        if os.path.isabs(member.linkname) or where.split("/")[0] == "..":
            raise ArchiveRefused(
                f"has the link {member.name!r}, which leads out of the environment, to {member.linkname!r}; "
                "`python -m venv --copies` and conda-pack make environments without such links"
            )
        os.symlink(member.linkname, self.target / path)
        self.kinds[path] = "link"

    def _hard_link(self, path: PurePosixPath, member: tarfile.TarInfo) -> None:
        source = _path(member.linkname)
        if source is None or self.kinds.get(source) != "file":
            raise ArchiveRefused(
                f"has the hard link {member.name!r} to {member.linkname!r}, which is no file before it"
            )
        os.link(self.target / source, self.target / path, follow_symlinks=False)
        self.kinds[path] = "file"

    def _write(self, path: PurePosixPath, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        self.size += member.size
        if self.size > self.max_bytes:
            raise ArchiveRefused(f"has more than {self.max_bytes} bytes of files")
        if member.size > _CHUNK_BYTES and shutil.disk_usage(self.target).free < member.size + _FREE_BYTES:
            raise ArchiveRefused(f"does not fit on the disk: {member.name!r} has {member.size} bytes")
        mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.target / path, flags, mode), "wb") as stream:
            if content is not None:
                shutil.copyfileobj(content, stream, _CHUNK_BYTES)
        self.kinds[path] = "file"


def _path(name: str) -> PurePosixPath | None:
    """Return the path of a member in the folder; None for the folder itself.

    Raises:
        ArchiveRefused: it leads out of the folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ArchiveRefused(f"has the member {name!r}, which leads out of the environment")
    return path if path.parts else None
