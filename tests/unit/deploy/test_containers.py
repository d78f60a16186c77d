"""The files that make containers of Headrace: sound by their tools, and true to the server and to each other.

That the image really builds and serves is `make image-test`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import yaml
from headrace.server.settings import Settings
from headrace.wire.tls import TlsFiles

from deploy.make_keys import KEYS, KEYS_FILE
from tests.support.certificates import Certificates
from tests.support.models import add_model, affine
from tests.support.serving import ROOT, run_headrace, serving
from tests.support.tools import tool

DEPLOY = ROOT / "deploy"
DOCKERFILES = (DEPLOY / "docker" / "Dockerfile", DEPLOY / "docker" / "Dockerfile.gpu")
COMPOSE = DEPLOY / "compose.yaml"
MANIFEST = DEPLOY / "kubernetes" / "headrace.yaml"
LOCKS = ROOT / "requirements"
USER = 10001
PROBES = {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in joined.splitlines() if line.strip()]


def requirements(name: str) -> dict[str, str]:
    """The blocks of a lock by package and version."""
    blocks = re.split(r"\n(?=\S)", (LOCKS / name).read_text().strip())
    return {block.split()[0]: block for block in blocks}


def environment(path: Path) -> dict[str, str]:
    """Return the environment that a Dockerfile sets for the server."""
    return dict(
        re.findall(r"(HEADRACE_\w+)=(\S+)", " ".join(rest for word, rest in instructions(path) if word == "ENV"))
    )


@cache
def compose() -> list[str]:
    """Compose's command line: the plug-in, or Debian's program."""
    if os.path.exists("/usr/bin/docker-compose"):
        return ["/usr/bin/docker-compose"]
    plugin = subprocess.run(["sh", "-c", "docker compose version"], capture_output=True, timeout=60)
    return ["docker", "compose"] if plugin.returncode == 0 else [tool("docker-compose")]


@functools.cache
def services(**variables: str) -> dict[str, Any]:
    """The services that `docker compose up` would start, as Compose itself reads the file, by name; not to be changed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "HEADRACE_"))}
    done = subprocess.run(
        [*compose(), "config"], cwd=DEPLOY, env=kept | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    profiles = set(variables.get("COMPOSE_PROFILES", "cpu").split(","))
    result: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return {name: service for name, service in result.items() if profiles & set(service.get("profiles", profiles))}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return mounts by target path; Compose writes them in one of two forms."""
    result = {}
    for volume in service["volumes"]:
        if isinstance(volume, dict):
            result[volume["target"]] = f"{volume['source']}:{'ro' if volume.get('read_only') else 'rw'}"
        else:
            source, target, mode = volume.split(":")
            result[target] = f"{source}:{mode}"
    return result


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    lint = str(beside) if beside.exists() else tool("hadolint")
    done = subprocess.run([lint, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_unprivileged_with_a_health_check(path: Path) -> None:
    result = instructions(path)
    last = len(result) - 1 - [word for word, _ in reversed(result)].index("USER")
    assert result[last] == ("USER", f"{USER}:{USER}")
    assert [rest for word, rest in result if word == "HEALTHCHECK" and 'CMD ["headrace", "health"]' in rest]
    assert ("ENTRYPOINT", '["headrace"]') in result
    ports = [rest for word, rest in result if word == "EXPOSE"]
    default = Settings(model_repository=())
    assert ports == [f"{default.http_port} {default.grpc_port} {environment(path)['HEADRACE_METRICS_PORT']}"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_python_is_installed_by_hash(path: Path) -> None:
    installs = [rest for word, rest in instructions(path) if word == "RUN" and "pip" in rest and " install " in rest]
    assert len(installs) >= 3
    for line in installs:
        assert "--no-deps" in line
        assert "--require-hashes" in line or "--no-build-isolation --no-deps ." in line


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_locale_of_text_models_and_the_libraries_of_stores(path: Path) -> None:
    lines = instructions(path)
    assert ("COPY", "--from=locale /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8") in lines
    (made,) = [rest for word, rest in lines if word == "RUN" and "localedef" in rest]
    assert made.endswith("localedef --no-archive -i en_US -f UTF-8 en_US.UTF-8")
    assert [rest for word, rest in lines if word == "ENV" and "LANG=en_US.UTF-8" in rest]
    assert [rest for word, rest in lines if word == "RUN" and "-r requirements/stores.lock" in rest]


def test_other_peoples_images_are_those_of_one_release() -> None:
    bases = [rest.removeprefix("BASE=") for path in DOCKERFILES for word, rest in instructions(path) if word == "ARG"]
    composed = [one["image"] for one in services(COMPOSE_PROFILES="cpu,traces").values() if "build" not in one]
    assert len(bases) == 2
    assert len(composed) == 3
    for image in bases + composed:
        _, _, tag = image.partition(":")
        assert re.match(r"v?\d+\.\d+(\.\d+|-py3$)", tag), f"{image} is another one tomorrow"


def test_both_images_are_set_up_alike() -> None:
    cpu, gpu = map(environment, DOCKERFILES)
    assert cpu == gpu
    assert cpu["HEADRACE_HOST"] == "0.0.0.0"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_copied_files_exist_and_are_not_ignored(path: Path) -> None:
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    sources = [
        source
        for word, rest in instructions(path)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert {"server", "engines", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in let_in, source


@pytest.mark.parametrize("name", ["demo", "otel", "jwt", "signing", "stores", "image-gpu"])
def test_packages_of_images_are_locked_and_added_to_those_of_the_server(name: str) -> None:
    server = {requirement.split("==")[0] for requirement in requirements("serve.lock")}
    result = requirements(f"{name}.lock")
    assert result
    for requirement, block in result.items():
        assert "--hash=sha256:" in block, requirement
        assert requirement.split("==")[0] not in server


def test_the_image_needs_nothing_to_build_demo_models() -> None:
    locks = requirements("serve.lock") | requirements("otel.lock")
    names = {requirement.split("==")[0] for requirement in locks}
    assert not names & {"scikit-learn", "scipy", "tensorrt"}
    assert {"onnxruntime", "grpcio", "numpy", "setuptools"} <= names


def test_compose_starts_one_server_that_prometheus_finds() -> None:
    targets = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    ((host, port),) = [target.split(":") for target in targets["static_configs"][0]["targets"]]
    assert port == environment(DOCKERFILES[0])["HEADRACE_METRICS_PORT"]
    for profile, server in (("cpu", "headrace"), ("gpu", "headrace-gpu")):
        result = services(COMPOSE_PROFILES=profile)
        keys = "keys" if profile == "cpu" else "keys-gpu"
        assert set(result) == {server, keys, "prometheus", "grafana"}
        assert result[server]["networks"]["default"]["aliases"] == [host]


def test_compose_starts_a_trace_collector_with_its_profile() -> None:
    result = services(COMPOSE_PROFILES="cpu,traces", HEADRACE_OTLP_ENDPOINT="http://jaeger:4317")
    assert set(result) == {"keys", "headrace", "jaeger", "prometheus", "grafana"}
    assert result["headrace"]["environment"]["HEADRACE_OTLP_ENDPOINT"] == "http://jaeger:4317"
    assert services()["headrace"]["environment"]["HEADRACE_OTLP_ENDPOINT"] == ""
    folder = DEPLOY / "grafana/provisioning/datasources"
    (jaeger,) = yaml.safe_load((folder / "jaeger.yaml").read_text())["datasources"]
    assert urlsplit(jaeger["url"]).hostname == "jaeger"
    (prometheus,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["datasources"]
    (leads,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert leads == {"name": "trace_id", "datasourceUid": jaeger["uid"]}


def test_without_a_profile_the_cpu_serves() -> None:
    assert "COMPOSE_PROFILES=cpu" in (DEPLOY / ".env").read_text().splitlines()


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_limits_the_rights_of_the_server(profile: str) -> None:
    (server,) = [s for name, s in services(COMPOSE_PROFILES=profile).items() if name.startswith("headrace")]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert float(server["stop_grace_period"].rstrip("s")) > float(server["environment"]["HEADRACE_DRAIN_TIMEOUT_S"])
    dockerfile = ROOT / server["build"]["dockerfile"]
    assert dockerfile in DOCKERFILES
    assert f"AS {server['build']['target']}" in dockerfile.read_text()
    assert set(mounts(server)) == {"/models", "/var/lib/headrace", "/keys"}


def test_compose_shows_nothing_to_strangers() -> None:
    text = COMPOSE.read_text()
    assert len(re.findall(r"\$\{(?:HEADRACE|WATCH)_BIND:-127\.0\.0\.1\}:\d+:\d+", text)) == 5
    assert json.dumps(services()).count("127.0.0.1") >= 4


def test_compose_mounts_models_of_ones_own(tmp_path: Path) -> None:
    assert mounts(services()["headrace"])["/models"].endswith("demo-models:ro")
    own = services(HEADRACE_MODELS=str(tmp_path), HEADRACE_MODELS_MODE="rw")["headrace"]
    assert mounts(own)["/models"] == f"{tmp_path}:rw"


def test_compose_and_its_settings_agree() -> None:
    set_ = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / ".env").read_text(), re.M))
    del set_["COMPOSE_PROFILES"]
    read = re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text())
    assert set(read) == set(set_.items())


def test_compose_monitors_with_the_files_of_this_folder() -> None:
    result = services()
    grafana, prometheus = mounts(result["grafana"]), mounts(result["prometheus"])
    for folder in (DEPLOY / "grafana" / "provisioning").iterdir():
        assert grafana[f"/etc/grafana/provisioning/{folder.name}"] == f"{folder}:ro"
    assert "/etc/grafana/provisioning" not in grafana, "it would hide the image's own folders"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/headrace.yaml").read_text())["providers"]
    assert grafana[provider["options"]["path"]] == f"{DEPLOY}/grafana/dashboards:ro"
    home = Path(result["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DEPLOY / "grafana" / "dashboards" / home.name).exists()
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert urlsplit(source["url"]).hostname in result
    assert prometheus["/etc/prometheus"] == f"{DEPLOY}/prometheus:ro"
    assert "--config.file=/etc/prometheus/prometheus.yml" in result["prometheus"]["command"]


def test_kubernetes_runs_the_image_as_it_is_made() -> None:
    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == USER
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    for probe, what in PROBES.items():
        assert container[probe]["httpGet"] == {"path": f"/v2/health/{what}", "port": "http"}
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_stores_engines_in_a_volume_and_mounts_models_read_only(profile: str) -> None:
    (server,) = [s for name, s in services(COMPOSE_PROFILES=profile).items() if name.startswith("headrace")]
    result = mounts(server)
    assert result["/models"].endswith(":ro")
    assert re.fullmatch(r"(\w+_)?state:rw", result["/var/lib/headrace"])
    for file in DOCKERFILES:
        variables = " ".join(rest for word, rest in instructions(file) if word == "ENV")
        assert "HOME=/var/lib/headrace " in variables
        assert environment(file)["HEADRACE_STATE_DIR"].startswith("/var/lib/headrace/")
        assert environment(file)["HEADRACE_MODEL_REPOSITORY"] == "/models"


def test_kubernetes_on_a_gpu_differs_by_image_gpu_memory_and_a_claim_for_engines() -> None:
    cpu, cpu_service = yaml.safe_load_all(MANIFEST.read_text())
    gpu, claim, gpu_service = yaml.safe_load_all(MANIFEST.with_name("headrace-gpu.yaml").read_text())
    assert gpu_service == cpu_service
    pods = [one["spec"]["template"]["spec"] for one in (cpu, gpu)]
    (cpu_container,), (gpu_container,) = (pod["containers"] for pod in pods)
    assert gpu_container["image"] == "headrace:gpu"
    assert gpu_container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert claim["kind"] == "PersistentVolumeClaim"
    home = {"name": "home", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert home in pods[1]["volumes"]
    mounted = {mount["name"]: mount["mountPath"] for mount in gpu_container["volumeMounts"]}
    assert environment(DOCKERFILES[1])["HEADRACE_STATE_DIR"].startswith(mounted["home"] + "/")
    # One claim and one GPU: a second pod beside the first would wait for both.
    assert gpu["spec"]["strategy"] == {"type": "Recreate"}

    for key in ("image", "resources"):
        gpu_container[key] = cpu_container[key]
    pods[1]["volumes"] = pods[0]["volumes"]
    gpu["spec"]["strategy"] = cpu["spec"]["strategy"]
    assert gpu == cpu


def test_kubernetes_waits_for_requests_in_flight() -> None:
    deployment, _ = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = float({variable["name"]: variable["value"] for variable in container["env"]}["HEADRACE_DRAIN_TIMEOUT_S"])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + drain


# --- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_creates_keys_before_the_server_starts(profile: str) -> None:
    result = services(COMPOSE_PROFILES=profile)
    (server,) = [service for name, service in result.items() if name.startswith("headrace")]
    ((name, condition),) = server["depends_on"].items()
    assert condition["condition"] == "service_completed_successfully"
    keys = result[name]
    assert keys["image"] == server["image"]
    assert keys["read_only"] is True
    assert keys["cap_drop"] == ["ALL"]
    assert keys["network_mode"] == "none"
    assert keys["entrypoint"] == ["python3", "/make_keys.py", "--folder", "/keys", "--group-readable", "metrics"]
    volume = mounts(server)["/keys"].removesuffix(":ro")
    assert mounts(keys) == {"/make_keys.py": f"{DEPLOY / 'make_keys.py'}:ro", "/keys": f"{volume}:rw"}
    assert server["environment"]["HEADRACE_API_KEYS_FILE"] == f"/keys/{KEYS_FILE}"
    # A new volume gets the owner and the mode of the folder in the image.
    (owner,) = [
        re.search(r"mkdir -m 0750 /keys && chown (\d+):(\d+) /keys", rest)
        for word, rest in instructions(ROOT / server["build"]["dockerfile"])
        if word == "RUN" and "/keys" in rest
    ]
    assert owner is not None
    assert owner.groups() == (str(USER), str(USER))
    assert result["prometheus"]["group_add"] == [str(USER)]
    assert mounts(result["prometheus"])["/keys"] == f"{volume}:ro"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["authorization"] == {"credentials_file": "/keys/metrics.key"}


@pytest.fixture(scope="module")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys as the service of Compose creates them."""
    folder = tmp_path_factory.mktemp("keys")
    words = services()["keys"]["entrypoint"][1:]
    named = {"/make_keys.py": str(DEPLOY / "make_keys.py"), "/keys": str(folder)}
    done = make_keys(*(named.get(word, word) for word in words))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"created keys: {', '.join(KEYS)}\n{folder}: {KEYS_FILE} for the server" in done.stdout
    return folder


def make_keys(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make_keys.py with the Python that has Headrace, as in the image."""
    environment = os.environ | variables
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)


def test_keys_are_created_once_and_for_their_readers_only(key_folder: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in key_folder.iterdir() if not path.name.startswith(".")}
    assert modes == {KEYS_FILE: 0o600, "infer.key": 0o600, "admin.key": 0o600, "metrics.key": 0o640}
    before = {path.name: path.read_bytes() for path in key_folder.iterdir()}
    clients = yaml.safe_load(before[KEYS_FILE])["clients"]
    assert {name: tuple(client["scopes"]) for name, client in clients.items()} == KEYS
    for name, client in clients.items():
        key = before[f"{name}.key"].strip()
        assert [entry["sha256"] for entry in client["keys"]] == [hashlib.sha256(key).hexdigest()]
    done = make_keys(str(DEPLOY / "make_keys.py"), "--folder", str(key_folder))
    assert done.stdout.startswith("kept the keys that exist\n")
    assert {path.name: path.read_bytes() for path in key_folder.iterdir()} == before


def test_a_server_with_these_keys_gives_each_its_scope(key_folder: Path, tmp_path: Path) -> None:
    """The server of Compose: its environment, its health check, its Prometheus and its clients."""
    add_model(tmp_path / "repository", "net", affine())
    variables = {"HEADRACE_API_KEYS_FILE": str(key_folder / KEYS_FILE)}
    keys = {name: (key_folder / f"{name}.key").read_text().strip() for name in KEYS}
    options = ("--model-control", "explicit", "--load-model", "net")
    routes = [("GET", "/v2"), ("GET", "/metrics"), ("POST", "/v2/repository/models/net/load")]
    with serving(tmp_path / "repository", tmp_path, *options, env=variables) as server:
        for name, expected in (
            (None, [401] * 3),
            ("infer", [200, 403, 403]),
            ("metrics", [403, 200, 403]),
            ("admin", [200] * 3),
        ):
            headers = {"Authorization": f"Bearer {keys[name]}"} if name else {}
            statuses = [
                server.request(method, path, b"" if method == "POST" else None, headers)[0] for method, path in routes
            ]
            assert statuses == expected, name
        done = run_headrace("health", "--url", server.url)
        assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


class KubernetesApi(BaseHTTPRequestHandler):
    """Keeps the Secrets that are posted, as the API of a cluster does."""

    secrets: ClassVar[dict[str, Any]] = {}
    tokens: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.tokens.append(self.headers["Authorization"])
        name = f"{self.path}/{secret['metadata']['name']}"
        status = 403 if self.tokens[-1] != "Bearer account-token" else 409 if name in self.secrets else 201
        if status == 201:
            self.secrets[name] = secret
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_the_job_of_kubernetes_creates_the_secret_that_the_pod_mounts(tmp_path: Path) -> None:
    account, role, binding, job, script = yaml.safe_load_all((MANIFEST.with_name("keys.yaml")).read_text())
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert script["data"]["make_keys.py"] == (DEPLOY / "make_keys.py").read_text()
    (container,) = pod["containers"]
    assert container["command"][:2] == ["python3", "/script/make_keys.py"]

    certificates = Certificates(tmp_path)
    shutil.copy(certificates.authority, tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text("serving")
    (tmp_path / "token").write_text("account-token\n")
    (tmp_path / "make_keys.py").write_text(script["data"]["make_keys.py"])
    pair = certificates.server
    with ThreadingHTTPServer(("127.0.0.1", 0), KubernetesApi) as api:
        context = TlsFiles(str(pair.certificate), str(pair.key)).ssl_context(())
        api.socket = context.wrap_socket(api.socket, server_side=True)
        thread = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        variables = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.server_port)}

        def run_job() -> subprocess.CompletedProcess[str]:
            words = [str(tmp_path / "make_keys.py"), *container["command"][2:], "--service-account", str(tmp_path)]
            return make_keys(*words, **variables)

        try:
            assert run_job().stdout == "the Secret headrace-keys was created\n"
            assert run_job().stdout == "the Secret headrace-keys exists and is kept\n"
            (tmp_path / "token").write_text("another")
            assert "the Kubernetes API answered 403" in run_job().stderr
        finally:
            api.shutdown()
            thread.join()
    ((path, secret),) = KubernetesApi.secrets.items()
    assert path == "/api/v1/namespaces/serving/secrets/headrace-keys"
    data = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    assert set(data) == {KEYS_FILE, *(f"{name}.key" for name in KEYS)}
    deployment, _ = yaml.safe_load_all(MANIFEST.read_text())
    (volume,) = [one["secret"] for one in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert volume["secretName"] == secret["metadata"]["name"]
    assert volume["items"] == [{"key": KEYS_FILE, "path": KEYS_FILE}], "the keys themselves are not for the server"
    monitor = yaml.safe_load(MANIFEST.with_name("pod-monitor.yaml").read_text())["spec"]
    assert monitor["podMetricsEndpoints"][0]["authorization"]["credentials"] == {
        "name": "headrace-keys",
        "key": "metrics.key",
    }
    entries = yaml.safe_load(data[KEYS_FILE])["clients"]["metrics"]["keys"]
    assert [entry["sha256"] for entry in entries] == [hashlib.sha256(data["metrics.key"].strip()).hexdigest()]


def test_the_network_policy_names_the_pods_and_ports_of_the_server() -> None:
    policy = yaml.safe_load(MANIFEST.with_name("network-policy.yaml").read_text())["spec"]
    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    assert policy["podSelector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert ports == [port["port"] for port in service["spec"]["ports"]]
