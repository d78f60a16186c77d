"""The number of front ends for a number of cores, and the cores of a container."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from headrace.server.front_ends.process_count import available_cores, choose_front_ends, memory_limit, quota_cores


def reader(name: str = "cpu.max", **files: str) -> Callable[[str], str]:
    """Read files that are given by name: `root` and `group` are the `cpu.max` (or `name`) of the root and of group /a/b."""
    paths = {
        "/proc/self/cgroup": files.get("cgroup"),
        f"/sys/fs/cgroup/{name}": files.get("root"),
        f"/sys/fs/cgroup/a/{name}": files.get("above"),
        f"/sys/fs/cgroup/a/b/{name}": files.get("group"),
    }

    def read(path: str) -> str:
        text = paths.get(path)
        if text is None:
            raise FileNotFoundError(path)
        return text

    return read


@pytest.mark.parametrize(
    ("cores", "count"),
    [(1, 0), (1.5, 0), (2, 0), (3, 0), (3.9, 0), (4, 2), (5, 3), (8, 5), (10, 6), (16, 8), (20, 8), (64, 8)],
)
def test_front_ends_by_cores(cores: float, count: int) -> None:
    assert choose_front_ends(cores, "linux").processes == count


@pytest.mark.parametrize(("mib", "count"), [(None, 8), (4096, 8), (2048, 8), (2047, 7), (1024, 4), (256, 1), (255, 0)])
def test_front_ends_by_a_memory_limit(mib: int | None, count: int) -> None:
    choice = choose_front_ends(16, "linux", None if mib is None else mib << 20)
    assert choice.processes == count
    assert choice.reason == (
        "16 cores: one for 1.6, at most 8" if count == 8 else f"a memory limit of {mib} MiB: one for 256 MiB"
    )


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cgroup": "0::/\n", "root": "max\n"}, None),
        ({"cgroup": "0::/\n", "root": "1073741824\n"}, 1 << 30),
        ({"cgroup": "0::/a/b\n", "group": "max\n", "above": "4096\n"}, 4096),
        ({"cgroup": "0::/\n", "root": "unreadable"}, None),
    ],
)
def test_memory_limits_of_control_groups(files: dict[str, str], limit: int | None) -> None:
    assert memory_limit(reader("memory.max", **files)) == limit


def test_reasons_name_the_cores_and_the_rule() -> None:
    assert choose_front_ends(16, "linux").reason == "16 cores: one for 1.6, at most 8"
    assert choose_front_ends(1, "linux").reason == "1 core: one process does everything below 4"
    assert choose_front_ends(2.5, "linux").reason == "2.5 cores: one process does everything below 4"
    assert choose_front_ends(64, "darwin") == (0, "front-end processes need Linux, this is darwin")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cgroup": "0::/\n", "root": "max 100000\n"}, None),
        ({"cgroup": "0::/\n", "root": "250000 100000\n"}, 2.5),
        ({"cgroup": "0::/a/b\n", "group": "400000 100000", "above": "200000 100000"}, 2),
        ({"cgroup": "0::/a/b\n", "group": "max 100000", "above": "50000 100000"}, 0.5),
        ({"cgroup": "12:cpu:/docker\n0::/a/b\n", "group": "300000 100000"}, 3),
        ({"cgroup": "0::/../..\n", "root": "100000 100000"}, 1),
        ({"cgroup": "1:name=systemd:/\n", "root": "100000 100000"}, 1),
        ({"cgroup": "0::/\n", "root": "unreadable"}, None),
        ({"cgroup": "0::/\n", "root": "100000 0"}, None),
    ],
)
def test_quotas_of_control_groups(files: dict[str, str], cores: float | None) -> None:
    assert quota_cores(reader(**files)) == cores


def test_cores_are_the_smaller_of_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert available_cores(reader(cgroup="0::/\n", root="300000 100000")) == 3
    assert available_cores(reader(cgroup="0::/\n", root="1600000 100000")) == 8
    assert available_cores(reader()) == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores(reader()) == 6


def test_this_machine_has_cores() -> None:
    assert available_cores() > 0
