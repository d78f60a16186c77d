"""The thread that builds: one builder at a time, cancelled when it is not needed, its failure reported in words."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from headrace.models import builds
from headrace.models.builds import BuildOrder, EngineBuilds

from tests.support.fake_builder import command
from tests.support.models import add_model, affine
from tests.support.waiting import until

ENGINE = affine(seed=2).SerializeToString()


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The fake builder's folder."""
    command(tmp_path / "orders")
    (tmp_path / "orders" / "engine.onnx").write_bytes(ENGINE)
    return tmp_path / "orders"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_model(tmp_path / "repository", name, affine(seed=1))
    return tmp_path / "repository"


Ends = queue.Queue[tuple[BuildOrder, str]]


@contextmanager
def building(words: tuple[str, ...]) -> Iterator[tuple[EngineBuilds, Ends]]:
    """A started `EngineBuilds` and its reports; stopped at the end, without left-over threads or processes."""
    ends: Ends = queue.Queue()
    engine_builds = EngineBuilds(words, lambda order, failure: ends.put((order, failure)))
    engine_builds.start()
    try:
        yield engine_builds, ends
    finally:
        engine_builds.stop()
        assert engine_builds.join()
        assert "builds" not in [thread.name for thread in threading.enumerate()]


def order(repository: Path, name: str = "a", digest: str = "1") -> BuildOrder:
    return BuildOrder(name, "1", repository / name, "onnxruntime", digest)


def calls(orders: Path) -> list[str]:
    path = orders / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_an_engine_is_built_once_at_low_priority(orders: Path, repository: Path) -> None:
    requested = order(repository)
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [requested])
        assert engine_builds.failure(requested) is None
        assert ends.get(timeout=60) == (requested, "")
        assert engine_builds.failure(requested) == ""
        engine_builds.set_orders("a", [requested])
        assert [path.suffix for path in (repository / "a" / "1").glob("model.*.onnx")] == [".onnx"]
        assert calls(orders) == ["started a 1 onnxruntime 10"]
        engine_builds.set_orders("a", [])
        engine_builds.set_orders("a", [requested])
        assert ends.get(timeout=60) == (requested, ""), "a model that was forgotten may be tried again"


def test_nothing_is_built_before_the_start(orders: Path, repository: Path) -> None:
    engine_builds = EngineBuilds(command(orders), lambda *_: None)
    engine_builds.set_orders("a", [order(repository)])
    assert calls(orders) == []
    assert "builds" not in [thread.name for thread in threading.enumerate()]
    engine_builds.stop()
    assert engine_builds.join()
    assert calls(orders) == []
    assert engine_builds.failure(order(repository)) is None
    engine_builds.set_orders("b", [order(repository, "b")])
    assert "not built any more" in (engine_builds.failure(order(repository, "b")) or "")


@pytest.mark.slow
def test_one_at_a_time(orders: Path, repository: Path) -> None:
    (orders / "hold").touch()
    first, second = order(repository), order(repository, "b")
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [first])
        engine_builds.set_orders("b", [second])
        until(lambda: len(calls(orders)) == 1)
        assert ends.empty()
        (orders / "hold").unlink()
        assert [ends.get(timeout=60)[0] for _ in range(2)] == [first, second]


def test_a_failure_is_reported_without_paths_of_this_machine(orders: Path, repository: Path) -> None:
    text = [
        "early words",
        "\u250f\u2501 a table \u2501\u2513",
        "",
        f"{repository / 'a'}: node '/layer/Conv' is not supported",
        "see /usr/lib/thing.so and /home/who ever/x.onnx, 3 rows/s, C:\\users\\me\\y.onnx",
        "remove it\x1b[31m",
    ]
    (orders / "fail").write_text("\n".join(text))
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [order(repository)])
        _, failure = ends.get(timeout=60)
    assert failure.startswith("a: node '")
    assert failure.endswith(" remove it [31m")
    for word in (str(repository), "/usr/lib", "users", "early", "\u2501", "\x1b"):
        assert word not in failure
    assert "3 rows/s" in failure
    (orders / "fail").write_text("x" * 5000)
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [order(repository)])
        assert ends.get(timeout=60)[1] == "..." + "x" * 400


@pytest.mark.parametrize(
    ("words", "failure"),
    [
        (("/nowhere/builder",), "the builder cannot be started: No such file or directory"),
        ((sys.executable, "-c", "raise SystemExit(4)"), "the builder ended with status 4 without output"),
        (
            (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"),
            "the builder was killed by SIGKILL: is there enough memory?",
        ),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 6)"), "the builder was killed by SIGABRT"),
    ],
)
def test_a_builder_without_output(repository: Path, words: tuple[str, ...], failure: str) -> None:
    with building(words) as (engine_builds, ends):
        requested = order(repository)
        engine_builds.set_orders("a", [requested])
        assert ends.get(timeout=60) == (requested, failure)
        assert engine_builds.failure(requested) == failure
        other = order(repository, digest="2")
        engine_builds.set_orders("a", [requested, other])
        assert ends.get(timeout=60) == (other, failure), "what has failed is not tried again, something else is"
        engine_builds.set_orders("a", [other])
        assert engine_builds.failure(requested) is None, "and the first one is forgotten"


def test_builds_that_are_no_longer_needed_are_cancelled(orders: Path, repository: Path) -> None:
    (orders / "hold").touch()
    first, second, other = order(repository), order(repository, digest="2"), order(repository, "b")
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [first])
        until(lambda: len(calls(orders)) == 1)
        engine_builds.set_orders("b", [other])
        engine_builds.set_orders("b", [])
        engine_builds.set_orders("a", [second])
        until(lambda: len(calls(orders)) == 3)
        assert [line.split()[0] for line in calls(orders)] == ["started", "stopped", "started"]
        (orders / "hold").unlink()
        assert ends.get(timeout=60) == (second, "")
        assert ends.empty()


@pytest.mark.parametrize("deaf", [False, True])
def test_the_end_of_the_server_is_the_end_of_the_builder(
    orders: Path, repository: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "_GRACE_S", 0.3 if deaf else 20.0)
    (orders / "hold").touch()
    if deaf:
        (orders / "deaf").touch()
    with building(command(orders)) as (engine_builds, ends):
        engine_builds.set_orders("a", [order(repository)])
        until(lambda: len(calls(orders)) == 1)
        process = engine_builds._process
        assert process is not None
    assert process.returncode == (-9 if deaf else 128 + 15)
    assert ends.empty()
    assert [path.name for path in (repository / "a" / "1").iterdir()] == ["model.onnx"]


def test_the_end_of_the_thread_is_reported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("no")

    monkeypatch.setattr(EngineBuilds, "_build", broken)
    with building(("true",)) as (engine_builds, ends):
        first, second = order(repository), order(repository, "b")
        engine_builds.set_orders("a", [first])
        assert ends.get(timeout=60) == (first, builds._STOPPED)
        engine_builds.set_orders("b", [second])
        assert engine_builds.failure(second) == builds._STOPPED
