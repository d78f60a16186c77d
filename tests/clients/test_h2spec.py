"""h2spec, the conformance tests of HTTP/2 and HPACK, against the gRPC port: with and without TLS."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Certificates
from tests.support.serving import HOST, Server, start
from tests.support.toolchains import BUILD_TIMEOUT_S, go_tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_TIMEOUT_S)]

SMALL_FRAMES = (sys.executable, "-m", "tests.support.small_frames_server")
CASES = 145
# These two need the default SETTINGS_MAX_FRAME_SIZE: see tests/support/small_frames_server.py.
DEFAULT_FRAMES_ONLY = {
    ("http2/4.2", "Sends a DATA frame with 2^14 octets in length"),
    ("http2/4.2", "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE"),
}


@pytest.fixture(scope="module")
def h2spec() -> Path:
    return go_tool("github.com/summerwind/h2spec/cmd/h2spec")


@pytest.fixture(scope="module", params=["plain", "tls"])
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of the server."""
    if request.param == "plain":
        return ()
    pair = Certificates(tmp_path_factory.mktemp("tls")).server
    return ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("h2spec")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(params=["small frames", "as served"])
def server(request: pytest.FixtureRequest, options: tuple[str, ...], folder: Path) -> Iterator[Server]:
    small = request.param == "small frames"
    with start(folder / "empty", folder / "log", *options, **({"command": SMALL_FRAMES} if small else {})) as running:
        running.wait_until_ready()
        yield running
        running.stop()


def run(program: Path, server: Server, report: Path, *words: str) -> tuple[str, set[tuple[str, str]]]:
    """Output of h2spec, and the failed and skipped cases by section and description."""
    done = subprocess.run(
        [program, "--host", HOST, "--port", str(server.grpc_port), "--junit-report", report, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    cases = ET.parse(report).getroot().iter("testcase")
    bad = {(case.get("package", ""), case.get("classname", "")) for case in cases if len(case)}
    return done.stdout, bad


def test_every_case_passes(
    h2spec: Path, server: Server, options: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = ["--tls", "--insecure"] if options else []
    output, bad = run(h2spec, server, tmp_path / "report.xml", *words)
    total = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", output)
    assert total is not None, output
    expected = DEFAULT_FRAMES_ONLY if request.node.callspec.params["server"] == "as served" else set()
    assert bad <= expected, output
    assert tuple(map(int, total.groups())) == (CASES, CASES - len(bad), 0, len(bad)), output
    if not options:
        assert server.request("GET", "/v2/health/live")[0] == 200
