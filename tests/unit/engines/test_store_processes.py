"""The store with several processes: concurrent builders, killed builders, failing writes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace_engines.store import Store

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KEY = Store.key({"model": "a"})

# Prints a line after the start of the write and continues after a line on standard input.
BUILDER = """
import sys
from pathlib import Path
from headrace_engines.store import Store

store, key = Store(Path(sys.argv[1])), sys.argv[2]
with store.building(key, lambda text: print("waits", flush=True)):
    entry = store.find(key)
    if entry is None:
        with store.scratch() as scratch:
            artefact = scratch / "model.plan"
            with artefact.open("wb") as stream:
                stream.write(bytes(100_000))
                stream.flush()
                print("builds", flush=True)
                sys.stdin.readline()
                stream.write(bytes(100_000))
            entry = store.add(key, artefact, {})
print(entry.sha256, flush=True)
"""
STOPPED = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
LIMITED = """
import resource, sys
from pathlib import Path
from headrace_engines.errors import BuildError
from headrace_engines.store import Store

resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with Store(Path(sys.argv[1])).scratch() as scratch:
        (scratch / "model.plan").write_bytes(bytes(100_000))
except BuildError as error:
    print(error)
    sys.exit(1)
"""


class _Builder:
    def __init__(self, root: Path, source: str = BUILDER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, str(root), KEY],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def builders(tmp_path: Path) -> Iterator[list[_Builder]]:
    started: list[_Builder] = []
    yield started
    for builder in started:
        builder.process.kill()
        builder.process.communicate()


def _files(root: Path) -> set[str]:
    return {path.relative_to(root).parts[0] for path in root.rglob("*") if path.is_file()}


def test_of_racing_builders_one_builds_and_all_have_it(tmp_path: Path, builders: list[_Builder]) -> None:
    builders += [_Builder(tmp_path) for _ in range(3)]
    first = [builder.line() for builder in builders]
    assert sorted(first) == ["builds", "waits", "waits"]
    builders[first.index("builds")].go()
    digests = {builder.line() for builder in builders}
    assert [builder.process.wait(30) for builder in builders] == [0, 0, 0]
    entry = Store(tmp_path).find(KEY)
    assert entry is not None
    assert digests == {entry.sha256}
    assert entry.size_bytes == 200_000
    assert _files(tmp_path) == {KEY}


def test_a_killed_builder_leaves_no_valid_entry(tmp_path: Path, builders: list[_Builder]) -> None:
    builders.append(_Builder(tmp_path))
    assert builders[0].line() == "builds"
    builders.append(_Builder(tmp_path))
    assert builders[1].line() == "waits"
    builders[0].process.kill()
    # The lock has gone with its holder: who waited builds, and sweeps first.
    assert builders[1].line() == "builds"
    assert len(list((tmp_path / "scratch").glob("*/model.plan"))) == 1
    store = Store(tmp_path)
    assert (store.find(KEY), store.keys()) == (None, [])
    builders[1].go()
    builders[1].line()
    assert builders[1].process.wait(30) == 0
    assert store.find(KEY) is not None
    assert _files(tmp_path) == {KEY}


def test_a_terminated_builder_cleans_up(tmp_path: Path, builders: list[_Builder]) -> None:
    builders.append(_Builder(tmp_path, BUILDER.replace("\nstore,", f"\n{STOPPED}store,", 1)))
    assert builders[0].line() == "builds"
    builders[0].process.send_signal(signal.SIGTERM)
    assert builders[0].process.wait(30) == 143
    assert _files(tmp_path) == set()


def test_a_failed_write_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "ulimit -f" in done.stdout
    assert _files(tmp_path) == set()
    assert Store(tmp_path).keys() == []


def test_the_living_are_not_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.scratch() as scratch:
        (scratch / "model.plan").write_bytes(b"x")
        Store(tmp_path).sweep()
        with Store(tmp_path).scratch():
            assert (scratch / "model.plan").exists()
    assert _files(tmp_path) == set()
