"""The CPU's Dockerfile, built for real and run as it would be in production; `make image-test`, as root.

There is no registry: the image is built on a Debian of our own making (debootstrap; kept in build/), by podman with chroot
isolation, and run by podman with a root file system that cannot be written, without any right of root's. It takes minutes, so
`make test` does not collect it.

Compose's services are started by podman as `docker-compose config` reads deploy/compose.yaml, as far as their images can be had:
the CPU's server, and Prometheus from Debian's program. `NOT_STARTED` says what is not, and why.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import yaml

from tests.support.models import affine
from tests.support.serving import ROOT
from tests.support.tools import tool

SCRATCH = ROOT / "build" / "image-test"
BASE, IMAGE = "localhost/headrace-test-base", "localhost/headrace-test"
MODELS = "headrace-test-models"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
READY_S = 60.0
ENGINE_S = 240.0
DEPLOY = ROOT / "deploy"
# Services of Compose that are not started here.
NOT_STARTED = {
    "headrace-gpu": "needs a GPU and NVIDIA's TensorRT image",
    "keys-gpu": "is keys on NVIDIA's TensorRT image",
    "grafana": "its image cannot be had without a registry, and Debian has no package of it",
    "jaeger": "its image cannot be had without a registry, and Debian has no package of it",
}
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
    # crun of Debian 12 does not support machines with control groups of both versions; runc does.
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
        port_options = [f"-e=HEADRACE_{name}_PORT={port}" for name, port in variables.items()]
        locked = ["--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
        limits = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=8192:8192"]
        self.id = podman("run", "-d", "--network=host", *locked, *limits, *port_options, *options, image)

    def healthy(self) -> bool:
        """Return the result of the image's own health check."""
        words = [tool("podman"), "--runtime", tool("runc"), "healthcheck", "run", self.id]
        return subprocess.run(words, capture_output=True, timeout=60).returncode == 0

    def wait(self) -> None:
        """Until it is healthy."""
        until = time.monotonic() + READY_S
        while not self.healthy():
            assert time.monotonic() < until, self.log()
            time.sleep(0.5)

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A program in it."""
        command = [tool("podman"), "--runtime", tool("runc"), "exec", self.id, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def get(self, port: int, path: str, key: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read().decode()

    def log(self) -> str:
        """Return the server's log from standard error."""
        words = [tool("podman"), "--runtime", tool("runc"), "logs", self.id]
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stderr

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
    kernels = server.inside(
        "sh", "-c", "ls /opt/headrace/lib/python3*/site-packages/headrace/runtimes/cuda/kernels/*.cu"
    )
    assert len(kernels.stdout.split()) == len(list((ROOT / "server/headrace/runtimes/cuda/kernels").glob("*.cu"))) > 0


def test_it_answers_over_grpc(server: Container) -> None:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.arange(16, dtype=np.int32)[None])
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        summed = client.infer("add_sub", inputs).as_numpy("OUTPUT0")
    assert summed.tolist() == [[2 * number for number in range(16)]]


def test_metrics_have_their_own_port(server: Container) -> None:
    status, page = server.get(server.metrics, "/metrics")
    assert status == 200
    assert 'headrace_model_state{model="digits"' in page
    assert server.get(server.http, "/metrics")[0] == 404


def test_it_is_not_root_and_can_write_only_to_its_home_folder(server: Container) -> None:
    status = server.inside("cat", "/proc/1/status").stdout
    assert "\nUid:\t10001\t10001\t10001\t10001" in status
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert f"\n{kind}:\t0000000000000000" in status
    assert "\nNoNewPrivs:\t1" in status
    for path in ("/x", "/models/x", "/opt/headrace/x"):
        assert server.inside("touch", path).returncode != 0
    assert server.inside("touch", "/var/lib/headrace/x").returncode == 0


def test_it_stores_its_profiles_in_its_home_folder(server: Container) -> None:
    assert server.inside("sh", "-c", "ls /var/lib/headrace/state/profiles").stdout.count(".json") >= 4


def test_its_log_is_json(server: Container) -> None:
    lines = server.log().splitlines()
    messages = [json.loads(line)["message"] for line in lines if line.startswith("{")]
    assert "model digits serves version 1" in messages


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


def test_a_server_with_a_missing_required_model_exits(alone: str) -> None:
    variables = ["-e=HEADRACE_STRICT=1", "-e=HEADRACE_MODEL_CONTROL=explicit", "-e=HEADRACE_LOAD_MODEL=missing"]
    container = Container(alone, *variables)
    try:
        assert podman("wait", container.id, timeout_s=READY_S).splitlines()[-1] == "1"
    finally:
        container.remove()


def test_it_has_the_locale_of_text_models(alone: str) -> None:
    code = "import locale; print(locale.setlocale(locale.LC_ALL, 'en_US.UTF-8'))"
    options = ("--rm", "--entrypoint=/opt/headrace/bin/python")
    assert podman("run", *options, alone, "-c", code) == "en_US.UTF-8"


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


def composed() -> dict[str, Any]:
    """The services of deploy/compose.yaml, as Compose reads them."""
    done = subprocess.run([tool("docker-compose"), "config"], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return result


def compose_options(service: dict[str, Any], volumes: dict[str, str]) -> list[str]:
    """Options of podman for a service of Compose; its ports and network are the host's, as everywhere here.

    Args:
        service: as Compose reads it.
        volumes: name or folder of what is mounted, by the name or folder in deploy/compose.yaml that it stands for.
    """
    entry = {"build", "image", "profiles", "restart", "networks", "ports", "init", "ulimits", "command", "deploy"}
    entry |= {"depends_on", "entrypoint", "network_mode"}
    options = [f"-e={name}={value}" for name, value in service.get("environment", {}).items()]
    options += [f"--cap-drop={one}" for one in service.get("cap_drop", ())]
    options += [f"--security-opt={one.replace(':true', '')}" for one in service.get("security_opt", ())]
    options += [f"--tmpfs={one}" for one in service.get("tmpfs", ())]
    options += [f"--group-add={one}" for one in service.get("group_add", ())]
    options += ["--read-only"] if service.get("read_only") else []
    if "stop_grace_period" in service:
        options.append(f"--stop-timeout={service['stop_grace_period'].rstrip('s')}")
    for volume in service.get("volumes", ()):
        source, target, mode = volume.split(":")
        options.append(f"-v={volumes.get(source, source)}:{target}:{mode}")
    handled = {
        "environment",
        "cap_drop",
        "security_opt",
        "tmpfs",
        "read_only",
        "stop_grace_period",
        "volumes",
        "group_add",
    }
    assert set(service) <= entry | handled, "a setting of Compose that is not tried here"
    return options


class Composed(Container):
    """A service of Compose that serves models.

    Args:
        service: as Compose reads it.
        image: stands for the one that Compose builds.
        volumes: as for `compose_options`.
    """

    def __init__(self, service: dict[str, Any], image: str, volumes: dict[str, str]) -> None:
        self.http, self.grpc, self.metrics = ports(3)
        variables = {"HTTP": self.http, "GRPC": self.grpc, "METRICS": self.metrics}
        free = [f"-e=HEADRACE_{name}_PORT={port}" for name, port in variables.items()]
        limits = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=8192:8192"]
        self.id = podman("run", "-d", "--network=host", *limits, *free, *compose_options(service, volumes), image)


def create_keys(service: dict[str, Any], image: str, volumes: dict[str, str]) -> str:
    """Run the service of Compose that creates the keys, to its end; what it prints."""
    program, *words = service["entrypoint"]
    limits = ["--network=host", "--ulimit=nofile=4096:4096", "--ulimit=nproc=8192:8192"]
    options = compose_options(service, volumes)
    return podman("run", "--rm", *limits, *options, f"--entrypoint={program}", image, *words)


@pytest.fixture
def volume() -> Iterator[Callable[[str], str]]:
    """Names volumes of podman that are removed at the end."""
    created: list[str] = []

    def named(name: str) -> str:
        created.append(f"headrace-test-{name}")
        return created[-1]

    yield named
    for name in created:
        podman("volume", "rm", "-f", name)


def test_every_compose_service_is_started_here_or_listed() -> None:
    assert set(composed()) == {"keys", "headrace", "prometheus", *NOT_STARTED}
    for name, why in NOT_STARTED.items():
        print(f"not started: {name}: {why}")


def test_composes_server_builds_an_engine_once_beside_models_that_are_read_only(
    alone: str, tmp_path: Path, volume: Callable[[str], str]
) -> None:
    folder = tmp_path / "models" / "net"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(affine(64, 16), folder / "1" / "model.onnx")
    rows = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    np.savez(folder / "calibration.npz", X=rows)
    (folder / "config.yaml").write_text(
        "max_batch_size: 8\nbuild_on_load: true\noptimization:\n  precision: int8\n"
        "  calibration: {data: calibration.npz, method: minmax}\n  accuracy: {min_top1_agreement: 0.5, min_cosine: 0.9}\n"
    )
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    volumes = {"demo-models": str(tmp_path / "models"), "state": volume("state"), "keys": volume("keys")}
    service = composed()["headrace"]
    assert create_keys(composed()["keys"], alone, volumes).startswith("created keys: infer, metrics, admin")
    assert create_keys(composed()["keys"], alone, volumes).startswith("kept the keys that exist")
    before = sorted(folder.rglob("*"))

    def parameters(container: Container) -> dict[str, Any]:
        key = container.inside("cat", "/keys/infer.key").stdout.strip()
        return dict(json.loads(container.get(container.http, "/v2/models/net", key)[1]).get("parameters", {}))

    logs = []
    for _ in range(2):
        container = Composed(service, alone, volumes)  # the same server without the demo models
        try:
            container.wait()
            end = time.monotonic() + ENGINE_S
            while parameters(container).get("engine.precision") != "int8":
                assert time.monotonic() < end, container.log()
                time.sleep(0.5)
            logs.append(container.log())
        finally:
            container.remove()
    assert sorted(folder.rglob("*")) == before
    started = ["building ONNX Runtime INT8, usually a minute or two" in log for log in logs]
    assert started == [True, False]


def test_composes_prometheus_finds_composes_server(
    base: str, demo: str, tmp_path: Path, volume: Callable[[str], str]
) -> None:
    services = composed()
    shutil.copy(tool("prometheus"), tmp_path / "prometheus")
    # As the image of Prometheus is made: its program is the entry point and runs as an unprivileged user that owns /prometheus.
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nCOPY prometheus /bin/prometheus\nRUN mkdir /prometheus && chown 65534 /prometheus\n"
        'USER 65534\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    image = f"{IMAGE}:prometheus"
    podman("build", "--isolation", "chroot", "--format", "docker", "-t", image, tmp_path, timeout_s=BUILD_S)
    volumes = {"demo-models": volume("demo-models"), "state": volume("state"), "keys": volume("keys")}
    create_keys(services["keys"], demo, volumes)
    server = Composed(services["headrace"], demo, volumes)
    try:
        server.wait()
        assert server.get(server.http, "/v2")[0] == 401, "a key is needed"
        # The port of metrics is a free one here, so the configuration names it in place of 8002.
        configuration = tmp_path / "etc"
        shutil.copytree(DEPLOY / "prometheus", configuration)
        file = configuration / "prometheus.yml"
        text = file.read_text().replace("headrace:8002", f"headrace:{server.metrics}")
        file.write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
        for path in (tmp_path, *configuration.rglob("*"), configuration):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (port,) = ports(1)
        service = services["prometheus"]
        mounted = {str(DEPLOY / "prometheus"): str(configuration), "prometheus": volume("prometheus")}
        mounted["keys"] = volumes["keys"]  # it reads metrics.key, as another user of the group
        words = [
            "--network=host",
            "--add-host=headrace:127.0.0.1",
            "--ulimit=nofile=4096:4096",
            "--ulimit=nproc=8192:8192",
        ]
        options = [*words, *compose_options(service, mounted)]
        prometheus = podman("run", "-d", *options, image, *service["command"], f"--web.listen-address=127.0.0.1:{port}")
        try:

            def healths() -> list[str]:
                try:
                    targets = json.loads(server.get(port, "/api/v1/targets")[1])["data"]["activeTargets"]
                except OSError:
                    return []
                return [target["health"] for target in targets]

            end = time.monotonic() + READY_S
            while healths() != ["up"]:
                assert time.monotonic() < end, podman("logs", prometheus)
                time.sleep(0.5)
        finally:
            podman("rm", "-f", "-v", prometheus)
    finally:
        server.remove()
