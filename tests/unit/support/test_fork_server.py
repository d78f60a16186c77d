"""A forked server is like one that an interpreter started: folder, descriptors, signals, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.processes import alive
from tests.support.serving import COMMAND
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def start(forks: ForkServer, path: Path, *words: str, **env: str) -> ForkedProcess:
    with path.open("wb") as output:
        return forks.start([*COMMAND, *words], path.parent, {**os.environ, **env}, output, output)


def serve(forks: ForkServer, folder: Path, **env: str) -> ForkedProcess:
    (folder / "models").mkdir(exist_ok=True)
    ports = ("--host", "127.0.0.1", "--http-port", "0", "--no-grpc")
    process = start(
        forks, folder / "log", "serve", "--model-repository", "models", *ports, HEADRACE_STATE_DIR="", **env
    )
    until(lambda: "Ctrl-C stops it" in (folder / "log").read_text())
    return process


def test_status_and_output_of_a_command(forks: ForkServer, tmp_path: Path) -> None:
    assert start(forks, tmp_path / "out", "--version").wait(60) == 0
    assert (tmp_path / "out").read_text().strip().count(".") == 2
    failed = start(forks, tmp_path / "out", "serve", "--nonsense")
    assert (failed.wait(60), failed.poll(), failed.returncode) == (2, 2, 2)
    assert "--nonsense" in (tmp_path / "out").read_text()


def test_a_server_has_a_folder_and_descriptors_of_its_own(forks: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "kept open").open("wb") as file:
        first = serve(forks, tmp_path)
        second = tmp_path / "second"
        second.mkdir()
        other = serve(forks, second)
        for process, folder in ((first, tmp_path), (other, second)):
            info = Path(f"/proc/{process.pid}")
            assert (info / "cwd").readlink() == folder
            targets = [str(entry.readlink()) for entry in (info / "fd").iterdir()]
            assert file.name not in targets
            assert [target for target in targets if target.endswith("/log")] == [str(folder / "log")] * 2
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
        assert alive(other.pid)
        other.send_signal(signal.SIGINT)
        assert other.wait(30) == 0


def test_signals_that_end_a_server(forks: ForkServer, tmp_path: Path) -> None:
    process = serve(forks, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    process.kill()  # has ended: does nothing


def test_its_servers_end_with_the_tests(tmp_path: Path) -> None:
    forks = ForkServer()
    process = serve(forks, tmp_path)
    forks.close()
    until(lambda: not alive(process.pid))


@pytest.mark.parametrize(
    ("command", "env", "can"),
    [
        (COMMAND, {}, True),
        (COMMAND, {"HOME": "/nowhere", "HEADRACE_HOST": "x"}, True),
        (COMMAND, {"PYTHONHASHSEED": "1"}, False),
        (COMMAND, {"ORT_DISABLE_TELEMETRY": "0"}, False),
        ((sys.executable, "-m", "tests.support.fixed_machine"), {}, False),
        ((sys.executable, "-P", "-m", "headrace"), {}, False),
        (("headrace",), {}, False),
    ],
)
def test_what_a_fork_cannot_do_is_left_to_an_interpreter(
    forks: ForkServer, command: tuple[str, ...], env: dict[str, str], can: bool
) -> None:
    assert forks.can_start(command, {**os.environ, **env}) == can
