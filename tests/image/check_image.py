"""The CPU's Dockerfile, built for real and run as it would be in production; `make image-test`, as root.

There is no registry: the image is built on a Debian of our own making (debootstrap; kept in build/), by podman with chroot
isolation, and run by podman with a root file system that cannot be written, without any right of root's. It takes minutes, so
`make test` does not collect it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.serving import ROOT
from tests.tools import tool

SCRATCH = ROOT / "build" / "image-test"
BASE, IMAGE = "localhost/headrace-test-base", "localhost/headrace-test"
MODELS = "headrace-test-models"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
READY_S = 60.0
BUILD_S = 1500.0

pytestmark = [
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap and podman's chroot isolation need root"),
]


def run(*words: str | Path, timeout_s: float = 60.0) -> str:
    """Run a program; its standard output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, f"{words[0]} {words[1]} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def podman(*words: str | Path, timeout_s: float = 60.0) -> str:
    # crun of Debian 12 knows no machines whose control groups are of both versions; runc does.
    return run(tool("podman"), "--runtime", tool("runc"), *words, timeout_s=timeout_s).strip()


@pytest.fixture(scope="session")
def base() -> str:
    """An image of Debian with Python, as `python:slim` is one."""
    archive = SCRATCH / f"{SUITE}.tar"
    if not archive.exists():
        debootstrap = tool("debootstrap")
        folder = SCRATCH / SUITE
        run("rm", "-rf", folder)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        run(debootstrap, "--variant=minbase", f"--include={PACKAGES}", SUITE, folder, timeout_s=BUILD_S)
        run("tar", "-C", folder, "-cf", archive.with_suffix(".new"), ".", timeout_s=BUILD_S)
        run("rm", "-rf", folder)
        archive.with_suffix(".new").rename(archive)
    podman("import", archive, BASE, timeout_s=BUILD_S)
    return BASE


def build(base: str, target: str) -> str:
    """Build a stage of the Dockerfile; its name."""
    # What this machine trusts beyond Debian's authorities (a proxy between it and the package index) holds for pip too.
    pip = SCRATCH / "pip.conf"
    pip.write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
    trust = ["-v", f"{pip}:/etc/pip.conf:ro", "-v", "/etc/ssl/certs:/etc/ssl/certs:ro"]
    name = f"{IMAGE}:{target}"
    file = ROOT / "deploy" / "docker" / "Dockerfile"
    options = ["--isolation", "chroot", "--format", "docker", "--layers", "--build-arg", f"BASE={base}", *trust]
    podman("build", *options, "-f", file, "--target", target, "-t", name, ROOT, timeout_s=BUILD_S)
    return name


@pytest.fixture(scope="session")
def demo(base: str) -> str:
    return build(base, "demo")


@pytest.fixture(scope="session")
def alone(base: str) -> str:
    return build(base, "server")


def ports(number: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    free = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return free


class Container:
    """A running container of the server, locked in as deploy/compose.yaml locks it in.

    Args:
        image: its name.
        options: more of podman's.
    """

    def __init__(self, image: str, *options: str) -> None:
        self.http, self.grpc, self.metrics = ports(3)
        variables = {"HTTP": self.http, "GRPC": self.grpc, "METRICS": self.metrics}
        told = [f"-e=HEADRACE_{name}_PORT={port}" for name, port in variables.items()]
        locked = ["--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
        limits = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=8192:8192"]
        self.id = podman("run", "-d", "--network=host", *locked, *limits, *told, *options, image)

    def healthy(self) -> bool:
        """What the image's own health check says."""
        words = [tool("podman"), "--runtime", tool("runc"), "healthcheck", "run", self.id]
        return subprocess.run(words, capture_output=True, timeout=60).returncode == 0

    def wait(self) -> None:
        """Until it is healthy."""
        until = time.monotonic() + READY_S
        while not self.healthy():
            assert time.monotonic() < until, podman("logs", self.id)
            time.sleep(0.5)

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A program in it."""
        command = [tool("podman"), "--runtime", tool("runc"), "exec", self.id, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def get(self, port: int, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def remove(self) -> None:
        podman("rm", "-f", "-v", self.id)


@pytest.fixture(scope="module")
def server(demo: str) -> Iterator[Container]:
    # As Compose does it: new volumes get what the image has there, the models too.
    container = Container(demo, "-v=/var/lib/headrace", f"-v={MODELS}:/models:ro")
    try:
        container.wait()
        yield container
    finally:
        container.remove()
        podman("volume", "rm", MODELS)


def test_every_demo_model_is_ready(server: Container) -> None:
    for model in ("add_sub", "digits", "efficientnet_lite0", "resnet50"):
        assert server.get(server.http, f"/v2/models/{model}/ready")[0] == 200


def test_its_page_and_its_kernels_are_in_it(server: Container) -> None:
    status, page = server.get(server.http, "/")
    assert (status, "<html" in page) == (200, True)
    kernels = server.inside("sh", "-c", "ls /opt/headrace/lib/python3*/site-packages/server/cuda/kernels/*.cu")
    assert len(kernels.stdout.split()) == len(list((ROOT / "server" / "cuda" / "kernels").glob("*.cu"))) > 0


def test_it_answers_over_grpc(server: Container) -> None:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.arange(16, dtype=np.int32)[None])
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        summed = client.infer("add_sub", inputs).as_numpy("OUTPUT0")
    assert summed.tolist() == [[2 * number for number in range(16)]]


def test_it_is_measured_on_a_port_of_its_own(server: Container) -> None:
    status, page = server.get(server.metrics, "/metrics")
    assert status == 200
    assert 'headrace_model_state{model="digits"' in page
    assert server.get(server.http, "/metrics")[0] == 404


def test_it_is_not_root_and_can_write_only_at_home(server: Container) -> None:
    status = server.inside("cat", "/proc/1/status").stdout
    assert "\nUid:\t10001\t10001\t10001\t10001" in status
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert f"\n{kind}:\t0000000000000000" in status
    assert "\nNoNewPrivs:\t1" in status
    for path in ("/x", "/models/x", "/opt/headrace/x"):
        assert server.inside("touch", path).returncode != 0
    assert server.inside("touch", "/var/lib/headrace/x").returncode == 0


def test_it_keeps_its_profiles_at_home(server: Container) -> None:
    assert server.inside("sh", "-c", "ls /var/lib/headrace/state/profiles").stdout.count(".json") >= 4


def test_its_log_is_json(server: Container) -> None:
    words = [tool("podman"), "--runtime", tool("runc"), "logs", server.id]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=60).stderr.splitlines()
    told = [json.loads(line)["message"] for line in lines if line.startswith("{")]
    assert "model digits serves version 1" in told


def test_it_ends_in_order_when_it_is_stopped(demo: str) -> None:
    container = Container(demo)  # nor is its home there: it serves all the same
    try:
        container.wait()
        podman("stop", "-t", "40", container.id)
        assert podman("inspect", container.id, "--format", "{{.State.ExitCode}}").splitlines()[-1] == "0"
    finally:
        container.remove()


def test_its_health_check_can_fail(server: Container) -> None:
    failed = server.inside("env", "HEADRACE_HTTP_PORT=1", "headrace", "health")
    assert failed.returncode == 1
    assert "http://127.0.0.1:1 is not ready" in failed.stderr


def test_a_server_that_must_serve_what_is_not_there_ends(alone: str) -> None:
    told = ["-e=HEADRACE_STRICT=1", "-e=HEADRACE_MODEL_CONTROL=explicit", "-e=HEADRACE_LOAD_MODEL=missing"]
    container = Container(alone, *told)
    try:
        assert podman("wait", container.id, timeout_s=READY_S).splitlines()[-1] == "1"
    finally:
        container.remove()


def test_the_server_alone_has_no_models_and_nothing_that_installs(alone: str, demo: str) -> None:
    look = [
        "run",
        "--rm",
        "--network=host",
        "--ulimit=nofile=4096:4096",
        "--ulimit=nproc=8192:8192",
        "--entrypoint",
        "sh",
    ]
    there = "ls /models; ls /opt/headrace/lib/python3*/site-packages | grep -E '^(pip|setuptools|sklearn|scipy|tests)$'"
    assert podman(*look, alone, "-c", f"{there}; true") == ""
    size, demo_size = (int(podman("image", "inspect", name, "--format", "{{.Size}}")) for name in (alone, demo))
    assert size < demo_size < 1 << 30
