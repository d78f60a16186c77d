"""Archives of environments: what is unpacked, and every archive that is refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace.python.environment_archives import ArchiveRefused, unpack

Member = tarfile.TarInfo


def entry(name: str, content: bytes = b"", *, mode: int = 0o644) -> tuple[Member, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[Member, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def special(name: str, kind: bytes) -> tuple[Member, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    return member, b""


def pack(path: Path, *members: tuple[Member, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_folders_and_links_are_unpacked(tmp_path: Path, mode: str) -> None:
    archive = pack(
        tmp_path / "env",
        special("./bin", tarfile.DIRTYPE),
        entry("./bin/python", b"program", mode=0o4777),
        entry("lib/module.py", b"x = 1"),
        link("bin/python3", "python"),
        link("lib64", "lib"),
        link("bin/copy", "bin/python", tarfile.LNKTYPE),
        mode=mode,
    )
    target = tmp_path / "target"
    assert unpack(archive, target) == len(b"programx = 1")
    assert (target / "bin" / "python").read_bytes() == b"program"
    assert (target / "bin" / "python").stat().st_mode & 0o7777 == 0o755  # no set-user-ID
    assert (target / "lib" / "module.py").stat().st_mode & 0o777 == 0o644
    assert os.readlink(target / "bin" / "python3") == "python"
    assert (target / "lib64" / "module.py").read_bytes() == b"x = 1"
    assert (target / "bin" / "copy").samefile(target / "bin" / "python")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([entry("../evil", b"x")], "leads out of the environment"),
        ([entry("lib/../../evil", b"x")], "leads out of the environment"),
        ([entry("/tmp/evil", b"x")], "leads out of the environment"),
        ([link("lib", "/etc")], "leads out of the environment, to '/etc'"),
        ([link("lib", "../..")], "leads out of the environment"),
        ([link("lib", "target"), entry("lib/evil", b"x")], "has members below 'lib', which is a link"),
        ([entry("lib", b"x"), entry("lib/evil", b"x")], "has members below 'lib', which is a file"),
        ([link("a", "../target/../.."), entry("a/evil", b"x")], "leads out of the environment"),
        # Each link is inside by its own text; together they lead out.
        (
            [entry("p/q/file", b"x"), link("p/q/top", "../.."), link("out", "p/q/top/..")],
            "has the link 'out', which leads out of the environment",
        ),
        ([special("null", tarfile.CHRTYPE)], "device or a pipe"),
        ([special("disk", tarfile.BLKTYPE)], "device or a pipe"),
        ([special("pipe", tarfile.FIFOTYPE)], "device or a pipe"),
        ([link("passwd", "/etc/passwd", tarfile.LNKTYPE)], "leads out of the environment"),
        ([link("passwd", "../../etc/passwd", tarfile.LNKTYPE)], "leads out of the environment"),
        ([link("a", "b", tarfile.LNKTYPE)], "which is no file before it"),
        ([link("a", "."), link("b", "a", tarfile.LNKTYPE)], "which is no file before it"),
        ([entry("a", b"x"), entry("a", b"y")], "has 'a' twice"),
        ([entry("a", b"x"), link("a", "b")], "has 'a' twice"),
        ([entry("a", b"x" * 600), entry("b", b"x" * 600)], "more than 1000 bytes"),
        ([entry(f"f{number}") for number in range(11)], "more than 10 members"),
    ],
)
def test_an_archive_that_attacks_is_refused(tmp_path: Path, members: list[tuple[Member, bytes]], message: str) -> None:
    outside = {path for path in tmp_path.parent.rglob("*") if path.name == "evil"}
    archive = pack(tmp_path / "env.tar.gz", *members)
    with pytest.raises(ArchiveRefused, match=message):
        unpack(archive, tmp_path / "target", max_bytes=1000, max_members=10)
    assert {path for path in tmp_path.parent.rglob("*") if path.name == "evil"} == outside


def test_a_bomb_is_refused_before_it_is_written(tmp_path: Path) -> None:
    archive = tmp_path / "bomb.tar.gz"
    member = tarfile.TarInfo("zeros")
    member.size = 64 << 20
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.addfile(member, io.BytesIO(bytes(member.size)))
    assert archive.stat().st_size < 1 << 20
    with pytest.raises(ArchiveRefused, match="more than 1048576 bytes"):
        unpack(archive, tmp_path / "target", max_bytes=1 << 20)
    assert not (tmp_path / "target" / "zeros").exists()


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda _: b"not an archive" * 100, _cut], ids=["empty", "text", "cut"]
)
@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], mode: str) -> None:
    archive = pack(tmp_path / "env", entry("bin/python", os.urandom(50_000)), mode=mode)
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(ArchiveRefused, match="readable tar archive"):
        unpack(archive, tmp_path / "target")


def test_a_pipe_in_place_of_the_archive_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "env.tar.gz")
    with pytest.raises(OSError, match="not a regular file"):
        unpack(tmp_path / "env.tar.gz", tmp_path / "target")
