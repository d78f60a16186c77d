"""Shared memory of clients: real files in /dev/shm, hostile keys and ranges, memory that goes away."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import BadRequest, HeadraceError, NotFound, TooLarge, Unsupported
from headrace.core.tensor import Region
from headrace.models.shared_memory import SYSTEM, SharedMemoryRegions
from headrace.wire.requests.services import Regions
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system shared memory needs /dev/shm")

SHM = Path("/dev/shm")
HUGE = [2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
Make = Callable[..., str]


@pytest.fixture
def make() -> Iterator[Make]:
    """Shared memory with the given content; the key."""
    created: list[Path] = []

    def create(content: bytes = bytes(range(256)), name: str = "") -> str:
        path = SHM / (name or f"test-{uuid.uuid4().hex}")
        path.write_bytes(content)
        created.append(path)
        return f"/{path.name}"

    yield create
    for path in created:
        path.unlink(missing_ok=True)


@pytest.fixture
def regions() -> SharedMemoryRegions:
    return SharedMemoryRegions(allowed=True, cuda=None)


def file_of(key: str) -> Path:
    return SHM / key.removeprefix("/")


def open_files() -> int:
    gc.collect()  # what other tests have left in cycles may hold some
    return len(os.listdir("/proc/self/fd"))


def test_it_implements_the_interface_of_the_front_ends(regions: SharedMemoryRegions, make: Make) -> None:
    seen: Regions = regions
    seen.register_system("r", make(), 0, 8)
    region: Region = seen.find("r")
    assert region.read(0, 8).tolist() == list(range(8))


def test_reads_and_writes_are_visible_to_another_process(regions: SharedMemoryRegions) -> None:
    memory = shared_memory.SharedMemory(create=True, size=1 << 16)
    assert memory.buf is not None
    try:
        tensor = np.arange(1000, dtype=np.float32)
        memory.buf[256 : 256 + tensor.nbytes] = tensor.tobytes()
        regions.register_system("r", memory.name, 256, 8000)
        region = regions.find("r")

        copy = region.read(0, tensor.nbytes)
        assert copy.dtype == np.uint8
        assert copy.shape == (4000,)
        np.testing.assert_array_equal(copy.view(np.float32), tensor)
        # A copy: what the client writes later is not in it, and it belongs to the caller.
        memory.buf[256] = 77
        assert copy[0] == 0
        assert copy.flags.writeable
        assert copy.flags.owndata

        region.write(4000, tensor.tobytes())
        region.write(0, memoryview(tensor[::-1].copy()))
        np.testing.assert_array_equal(np.frombuffer(bytes(memory.buf[4256:8256]), np.float32), tensor)
        np.testing.assert_array_equal(np.frombuffer(bytes(memory.buf[256:4256]), np.float32), tensor[::-1])
    finally:
        memory.close()
        memory.unlink()


def test_a_key_needs_no_slash(regions: SharedMemoryRegions, make: Make) -> None:
    key = make(b"abcd")
    regions.register_system("with", key, 0, 4)
    regions.register_system("without", key.removeprefix("/"), 0, 4)
    assert regions.find("without").read(1, 2).tobytes() == regions.find("with").read(1, 2).tobytes() == b"bc"


def test_a_region_in_use_outlives_its_name_and_then_closes(regions: SharedMemoryRegions, make: Make) -> None:
    key = make(b"before")
    before = open_files()
    regions.register_system("r", key, 0, 6)
    in_flight = regions.find("r")
    regions.unregister(SYSTEM, "r")
    file_of(key).unlink()
    # The name is free for other memory, and the request in flight still works on the old.
    regions.register_system("r", make(b"second"), 0, 6)
    assert in_flight.read(0, 6).tobytes() == b"before"
    in_flight.write(0, b"answer")
    assert in_flight.read(0, 6).tobytes() == b"answer"
    assert regions.find("r").read(0, 6).tobytes() == b"second"
    assert open_files() == before + 2
    del in_flight
    gc.collect()
    assert open_files() == before + 1


@pytest.mark.parametrize("size", [0, 1, 99])
def test_truncated_memory_is_an_error_and_no_signal(regions: SharedMemoryRegions, make: Make, size: int) -> None:
    key = make(bytes(100_000))
    regions.register_system("r", key, 50, 100)
    region = regions.find("r")
    os.truncate(file_of(key), size)
    with pytest.raises(BadRequest, match="smaller than when it was registered"):
        region.read(0, 100)
    with pytest.raises(BadRequest, match="smaller than when it was registered"):
        region.write(0, bytes(100))
    # The server has not grown what its client has cut.
    assert file_of(key).stat().st_size == size
    os.truncate(file_of(key), 100_000)
    assert region.read(0, 100).tobytes() == bytes(100)


def test_sealed_memory_is_an_error(monkeypatch: pytest.MonkeyPatch, regions: SharedMemoryRegions, make: Make) -> None:
    regions.register_system("r", make(), 0, 16)

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted", "/dev/shm/secret")

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    for call in (lambda: regions.find("r").read(0, 1), lambda: regions.find("r").write(0, b"x")):
        with pytest.raises(BadRequest) as caught:
            call()
        assert "secret" not in str(caught.value)


def test_short_reads_and_writes_continue(
    monkeypatch: pytest.MonkeyPatch, regions: SharedMemoryRegions, make: Make
) -> None:
    regions.register_system("r", make(), 6, 250)
    region = regions.find("r")
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    assert region.read(4, 240).tobytes() == bytes(range(10, 250))
    region.write(0, bytes(reversed(range(250))))
    monkeypatch.undo()
    assert region.read(0, 250).tobytes() == bytes(reversed(range(250)))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "/..",
        "//name",
        "../etc/passwd",
        "/../etc/passwd",
        "/a/b",
        "a/../b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\ud800",
        "a\u202eb",
        "x" * 256,
        "ä" * 128,
    ],
)
def test_keys_that_are_no_name_of_shared_memory(regions: SharedMemoryRegions, key: str) -> None:
    with pytest.raises(BadRequest, match="shared memory key"):
        regions.register_system("r", key, 0, 1)


def test_only_regular_files_are_opened_and_the_error_hides_the_type(regions: SharedMemoryRegions) -> None:
    token = uuid.uuid4().hex
    target, link, folder, pipe, unix = (
        SHM / f"test-{kind}-{token}" for kind in ("file", "link", "dir", "fifo", "sock")
    )
    target.write_bytes(bytes(16))
    link.symlink_to(target)
    folder.mkdir()
    os.mkfifo(pipe)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(unix))
    before = open_files()
    texts = set()
    try:
        for path in (link, folder, pipe, unix, SHM / f"test-missing-{token}"):
            with pytest.raises(BadRequest) as caught:
                regions.register_system("r", path.name, 0, 1)
            texts.add(str(caught.value))
    finally:
        listener.close()
        for path in (target, link, pipe, unix):
            path.unlink()
        folder.rmdir()
    assert len(texts) == 1
    text = texts.pop()
    assert token not in text
    assert "/dev/shm" not in text
    assert open_files() == before - 1
    assert list(regions.status(SYSTEM, "")) == []


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (-1, 1),
        (0, 0),
        (0, -1),
        (0, 257),
        (1, 256),
        (256, 1),
        *((huge, 1) for huge in HUGE),
        *((0, huge) for huge in HUGE),
        (2**64 - 1, 2**64 - 1),
        (2**64 - 255, 256),
    ],
)
def test_registered_ranges_lie_in_the_memory(
    regions: SharedMemoryRegions, make: Make, offset: int, size_bytes: int
) -> None:
    key = make()
    before = open_files()
    with pytest.raises(BadRequest):
        regions.register_system("r", key, offset, size_bytes)
    assert open_files() == before
    assert list(regions.status(SYSTEM, "")) == []


NUMBERS = st.one_of(st.integers(-5, 300), st.sampled_from([-h for h in HUGE] + HUGE), st.integers())


@given(start=st.integers(0, 200), length=st.integers(1, 56), offset=NUMBERS, size=NUMBERS)
def test_any_range_is_read_right_or_refused(start: int, length: int, offset: int, size: int) -> None:
    content = bytes(range(256))
    path = SHM / f"test-{uuid.uuid4().hex}"
    path.write_bytes(content)
    try:
        regions = SharedMemoryRegions(allowed=True, cuda=None)
        regions.register_system("r", path.name, start, length)
        region = regions.find("r")
        if offset >= 0 and size >= 0 and offset + size <= length:
            region.check(offset, size)
            assert region.read(offset, size).tobytes() == content[start + offset : start + offset + size]
            region.write(offset, bytes(size))
            expected = bytearray(content)
            expected[start + offset : start + offset + size] = bytes(size)
            assert path.read_bytes() == bytes(expected)
        else:
            with pytest.raises(BadRequest, match="do not lie in the region"):
                region.check(offset, size)
            with pytest.raises(BadRequest):
                region.read(offset, size)
            if 0 <= size <= 10_000:
                with pytest.raises(BadRequest):
                    region.write(offset, bytes(size))
            assert path.read_bytes() == content
    finally:
        path.unlink()


@given(key=st.text(max_size=40), name=st.text(max_size=300))
def test_any_text_is_a_client_error(key: str, name: str) -> None:
    regions = SharedMemoryRegions(allowed=True, cuda=None)
    with pytest.raises(HeadraceError) as caught:
        regions.register_system(name, key, 0, 1)
    str(caught.value).encode()
    with pytest.raises(NotFound) as missing:
        regions.find(name)
    str(missing.value).encode()
    regions.unregister(SYSTEM, name)


def test_writes_out_of_the_region_change_nothing(regions: SharedMemoryRegions, make: Make) -> None:
    key = make()
    regions.register_system("r", key, 100, 10)
    for offset, data in ((0, bytes(11)), (10, b"x"), (-1, b"x"), (2**64, b"x")):
        with pytest.raises(BadRequest):
            regions.find("r").write(offset, data)
    assert file_of(key).read_bytes() == bytes(range(256))


def test_the_number_of_regions_is_bounded(make: Make) -> None:
    regions = SharedMemoryRegions(allowed=True, cuda=None, limit=3)
    key = make()
    for name in ("a", "b", "c"):
        regions.register_system(name, key, 0, 1)
    with pytest.raises(TooLarge, match="3 shared memory regions"):
        regions.register_system("d", key, 0, 1)
    regions.unregister(SYSTEM, "b")
    regions.register_system("d", key, 0, 1)


def test_the_default_limit_reserves_descriptors_for_connections(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    regions = SharedMemoryRegions(allowed=True, cuda=None)
    key = make()
    for name in "abcd":
        regions.register_system(name, key, 0, 1)
    with pytest.raises(TooLarge):
        regions.register_system("e", key, 0, 1)


def test_memory_shared_by_mmap_is_seen(regions: SharedMemoryRegions, make: Make) -> None:
    key = make(bytes(mmap.PAGESIZE))
    with file_of(key).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        regions.register_system("r", key, 0, mmap.PAGESIZE)
        mapped[10:15] = b"hello"
        assert regions.find("r").read(10, 5).tobytes() == b"hello"
        regions.find("r").write(20, b"world")
        assert mapped[20:25] == b"world"


def test_a_machine_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, regions: SharedMemoryRegions, make: Make
) -> None:
    key = make()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unsupported, match="Linux"):
        regions.register_system("r", key, 0, 1)
