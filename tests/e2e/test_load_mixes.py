"""`make load`: every mix of users runs against a real server with the demo models."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.make_keys import KEYS_FILE, make_keys
from loadtest.run import MIXES
from tests.e2e.test_demo_models import DEMO
from tests.support.certificates import Certificates
from tests.support.models import add_model, affine
from tests.support.serving import COMMAND, ROOT, Server, serving

pytestmark = pytest.mark.slow

MODELS = ("tiny", "digits", "add_sub", "efficientnet_lite0")
SHAPES = dict(zip(MIXES, ("steady", "steps", "ramp", "spike"), strict=True))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for name in MODELS:
        assert (DEMO / name / "1" / "model.onnx").is_file(), "the demo models are not built: make models"
    options = [word for name in MODELS for word in ("--load-model", name)]
    with serving(DEMO, tmp_path_factory.mktemp("demo"), "--model-control", "explicit", *options) as server:
        yield server


def load(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    address = ["--host", server.url, "--grpc-address", server.grpc_address]
    return subprocess.run(
        [sys.executable, "-m", "loadtest.run", *address, "--users", "6", "--duration", "3", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_passes(demo: Server, mix: str) -> None:
    words = ("--mix", mix, "--shape", SHAPES[mix], "--p99-ms", "30000", "--think-s", "0.05")
    for duration_s in (3, 9, 27, 81):  # on a busy machine it takes longer until every user has done something
        done = load(demo, *words, "--duration", str(duration_s))
        assert done.returncode == 0, done.stdout
        assert "PASS" in done.stdout
        (report,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("report:")]
        page = (ROOT / report).read_text()
        idle = [name for name in MIXES[mix].users if name not in page]
        if not idle:
            break
    assert not idle, "users that did nothing"
    for path in ROOT.glob(report.replace(".html", ".*")):
        path.unlink()


def test_a_mix_passes_with_keys_and_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    server_pair, client = certificates.server, certificates.client
    make_keys(tmp_path)
    options = [word for name in MODELS for word in ("--load-model", name)]
    options += ["--tls-cert", str(server_pair.certificate), "--tls-key", str(server_pair.key)]
    options += ["--tls-client-ca", str(certificates.authority), "--api-keys-file", str(tmp_path / KEYS_FILE)]
    with serving(DEMO, tmp_path, "--model-control", "explicit", *options) as server:
        address = ("--host", server.url.replace("http", "https"), "--grpc-address", f"grpcs://{server.grpc_address}")
        trusted = ("--ca", str(certificates.authority), "--cert", str(client.certificate), "--key", str(client.key))
        admin = ("--api-key-file", str(tmp_path / "admin.key"))  # the mix reads metrics, too
        words = ("--mix", "web", "--p99-ms", "30000", "--think-s", "0.05", *address)
        done = load(server, *words, *trusted, *admin)
        assert (done.returncode, "PASS" in done.stdout) == (0, True), done.stdout
        assert "gRPC" in done.stdout
        for given, error in (
            ((*trusted,), "the server needs an API key"),
            (trusted[2:], "the server's certificate is not trusted"),
            (trusted[:2], "requires a client certificate"),
            (
                (*trusted, "--api-key-file", str(tmp_path / "metrics.key")),
                "does not allow it: use a key with that scope",
            ),
        ):
            done = load(server, *words, *given)
            assert (done.returncode, error in done.stdout) == (2, True), done.stdout


def test_a_server_of_its_own_may_have_keys(tmp_path: Path) -> None:
    """The command has no ports: `loadtest.run` adds `--http-port` and `--grpc-port` with free ones."""
    make_keys(tmp_path)
    command = shlex.join([*COMMAND, "serve", "--api-keys-file", str(tmp_path / KEYS_FILE)])
    words = ("--command", command, "--mix", "gallery", "--users", "2", "--duration", "2", "--p99-ms", "30000")
    for key, status, text in (
        (["--api-key-file", str(tmp_path / "infer.key")], 0, "PASS"),
        ([], 2, "the server needs an API key"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "loadtest.run", *words, *key],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, text in done.stdout) == (status, True), done.stdout + done.stderr


def test_a_threshold_that_is_missed_fails(demo: Server) -> None:
    done = load(demo, "--mix", "nightly", "--p99-ms-of", "tiny*=0.0001")
    assert done.returncode == 1, done.stdout
    assert "FAIL  tiny JSON: p99 is" in done.stdout
    assert "FAIL  digits" not in done.stdout


def test_a_missing_model_is_reported_before_the_load_test(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "tiny", affine())
    with serving(tmp_path / "repository", tmp_path) as server:
        done = load(server, "--mix", "nightly")
    assert done.returncode == 2, done.stdout
    assert f"model digits is not ready at {server.url}: 404 " in done.stdout
    assert "make models" in done.stdout
    assert "report:" not in done.stdout, "nothing was run"
    done = load(server, "--mix", "nightly")
    assert done.returncode == 2, done.stdout
    assert f"no server is ready at {server.url}" in done.stdout


def test_the_first_error_is_printed_as_it_happens(tmp_path: Path) -> None:
    for name in ("tiny", "digits", "add_sub"):
        add_model(tmp_path / "repository", name, affine())
    with serving(tmp_path / "repository", tmp_path) as server:
        done = load(server, "--mix", "nightly")
    assert done.returncode == 1, done.stdout
    first = done.stdout.index("first error: POST ")
    assert "status 400: " in done.stdout[first : first + 200]
    assert done.stdout.count("first error") == 1
    assert first < done.stdout.index("FAIL  ")


def test_locust_that_cannot_run_is_reported(demo: Server) -> None:
    done = load(demo, "--users", "none")
    assert done.returncode == 2
