"""The example deploy/nginx/headrace.conf in a real nginx, before a real server with keys.

Names, files, addresses and the port are the test's; everything else is as it is shipped.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from headrace.server.commands.connection import ConnectionOptions
from headrace.server.commands.infer_client import InferClient
from tritonclient.utils import InferenceServerException

from deploy.make_keys import KEYS, KEYS_FILE, make_keys
from tests.support.certificates import Certificates
from tests.support.models import add_model, affine
from tests.support.serving import HOST, ROOT, Server, free_port, serving
from tests.support.tools import tool

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "deploy" / "nginx" / "headrace.conf"
NAME = "inference.example"
# Just below --max-body-bytes, as FP32 rows of 16 numbers.
LARGE_ROWS = 100 * 2**20 // 64


@dataclass
class Proxy:
    """nginx with the example, and the server behind it.

    Attributes:
        port: of nginx.
        server: the server behind it.
        certificates: of nginx.
        keys: by name.
        folder: with the files of keys and the error log of nginx.
    """

    port: int
    server: Server
    certificates: Certificates
    keys: dict[str, str]
    folder: Path

    def request(
        self, method: str, path: str, body: bytes | None = None, host: str = NAME, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """One request over TLS; underscores in names of headers become hyphens."""
        context = ssl.create_default_context(cafile=str(self.certificates.authority))
        connection = http.client.HTTPSConnection(HOST, self.port, timeout=60, context=context)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"Host": host, **named})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def options(self, key: str = "infer") -> ConnectionOptions:
        return ConnectionOptions(
            ca=str(self.certificates.authority), api_key=self.keys.get(key, ""), api_key_source=key
        )

    @property
    def grpc_address(self) -> str:
        return f"grpcs://{HOST}:{self.port}"


def example(port: int, server: Server, certificates: Certificates) -> str:
    """The example with the files and addresses of a test; each of them must be there once."""
    text = EXAMPLE.read_text()
    for pattern, replacement in (
        (r"server 127\.0\.0\.1:8000;", f"server {server.address};"),
        (r"server 127\.0\.0\.1:8001;", f"server {server.grpc_address};"),
        (r"listen 443 ssl http2;", f"listen {HOST}:{port} ssl http2;"),
        (r"/etc/nginx/tls/inference\.example\.pem", str(certificates.server.certificate)),
        (r"/etc/nginx/tls/inference\.example\.key", str(certificates.server.key)),
    ):
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, pattern
    return text


@contextmanager
def nginx(folder: Path, text: str, port: int) -> Iterator[None]:
    """A real nginx with the text in its http block, in one process, as this user."""
    paths = "\n".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log info;\n"
        f"events {{ worker_connections 256; }}\nhttp {{\naccess_log {folder}/access.log;\n{paths}\n{text}\n}}\n"
    )
    words = [tool("nginx"), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    checked = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr, checked.stderr
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while not _listens(port):
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < end, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    tool("nginx")
    folder = tmp_path_factory.mktemp("nginx")
    add_model(folder / "repository", "net", affine(), files={"config.yaml": f"max_batch_size: {LARGE_ROWS}\n"})
    certificates = Certificates(folder)
    make_keys(folder)
    keys = {name: (folder / f"{name}.key").read_text().strip() for name in KEYS}
    options = ("--api-keys-file", str(folder / KEYS_FILE), "--allowed-host", NAME)
    with serving(folder / "repository", folder, *options) as server:
        port = free_port()
        with nginx(folder, example(port, server, certificates), port):
            yield Proxy(port, server, certificates, keys, folder)


def rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(count * 16, dtype=np.float32).reshape(count, 16) % 7


def infer_body(count: int = 1) -> bytes:
    data = rows(count)
    described = {"name": "X", "datatype": "FP32", "shape": list(data.shape), "data": data.ravel().tolist()}
    return json.dumps({"inputs": [described]}).encode()


def test_http_inference_with_a_key(proxy: Proxy) -> None:
    direct = proxy.server.request(
        "POST", "/v2/models/net/infer", infer_body(), {"Authorization": f"Bearer {proxy.keys['infer']}"}
    )
    for header in ({"Authorization": f"Bearer {proxy.keys['infer']}"}, {"X_API_Key": proxy.keys["infer"]}):
        status, _, body = proxy.request("POST", "/v2/models/net/infer", infer_body(), **header)
        assert (status, json.loads(body)) == (200, json.loads(direct[2]))


def test_keys_hold_behind_the_proxy(proxy: Proxy) -> None:
    status, headers, _ = proxy.request("POST", "/v2/models/net/infer", infer_body())
    assert (status, headers["www-authenticate"].split()[0]) == (401, "Bearer")
    key = {"Authorization": f"Bearer {proxy.keys['metrics']}"}
    assert proxy.request("POST", "/v2/models/net/infer", infer_body(), **key)[0] == 403
    assert proxy.request("GET", "/v2/health/ready")[0] == 200


CHANGES = (
    "/v2/repository/models/net/unload",
    "/v2/repository//models/net/load",
    "/v2/logging",
    "/v2/%6cogging",
    "/v2/trace/setting",
    "/v2/models/net/trace/setting",
    "/v2/systemsharedmemory/region/r/register",
    "/v2/cudasharedmemory/unregister",
)
GRPC_CHANGES = (
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "LogSettings",
    "TraceSetting",
    "SystemSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
)


def grpc_codes(proxy: Proxy, port: int) -> set[str]:
    """Codes of the calls that change the server, without a key."""
    codes = set()
    with grpc.secure_channel(f"{HOST}:{port}", proxy.options().channel_credentials()) as channel:
        for method in GRPC_CHANGES:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"", timeout=30)
            codes.add(caught.value.code().name)
    return codes


def test_the_proxy_refuses_changes_unless_keys_decide(proxy: Proxy) -> None:
    for path in CHANGES:
        status, _, body = proxy.request("POST", path, b"{}")
        assert (status, b"nginx" in body) == (403, True), path
    assert grpc_codes(proxy, proxy.port) == {"PERMISSION_DENIED"}
    key = {"Authorization": f"Bearer {proxy.keys['infer']}"}
    for method, path in (("GET", "/v2/logging"), ("GET", "/v2/trace/setting"), ("POST", "/v2/repository/index")):
        assert proxy.request(method, path, **key)[0] == 200, path
    port = free_port()
    text, count = re.subn(r'\n *"~\^POST .*', "", example(port, proxy.server, proxy.certificates))
    assert count == 2
    folder = proxy.folder / "keyed"
    folder.mkdir()
    with nginx(folder, text, port):
        direct = replace(proxy, port=port)
        assert {direct.request("POST", path, b"{}")[0] for path in CHANGES[2:3]} == {401}
        assert grpc_codes(proxy, port) == {"UNAUTHENTICATED"}
        log = (folder / "error.log").read_text()
        assert "[error]" not in log, (
            log
        )  # such as a second reset of a call that was refused before its message was there


def test_metrics_are_not_public(proxy: Proxy) -> None:
    assert proxy.request("GET", "/metrics", Authorization=f"Bearer {proxy.keys['metrics']}")[0] == 404


def test_the_host_is_passed_on_and_checked(proxy: Proxy) -> None:
    key = {"Authorization": f"Bearer {proxy.keys['infer']}"}
    assert proxy.request("GET", "/v2", **key)[0] == 200
    status, _, body = proxy.request("GET", "/v2", host="evil.example", **key)
    assert status == 421, body
    assert "--allowed-host evil.example" in json.loads(body)["error"]


def test_large_bodies_pass_in_both_directions(proxy: Proxy) -> None:
    data = rows(LARGE_ROWS)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "X",
                    "datatype": "FP32",
                    "shape": list(data.shape),
                    "parameters": {"binary_data_size": data.nbytes},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Authorization": f"Bearer {proxy.keys['infer']}", "Inference_Header_Content_Length": str(len(header))}
    status, answered, body = proxy.request("POST", "/v2/models/net/infer", header + data.tobytes(), **headers)
    assert status == 200, body[:300]
    outputs = json.loads(body[: int(answered["inference-header-content-length"])])["outputs"]
    assert outputs[0]["shape"][0] == LARGE_ROWS
    del body
    with InferClient(proxy.grpc_address, 60, proxy.options()) as client:
        (output,) = client.infer("net", {"X": data}).values()
    assert output.shape[0] == LARGE_ROWS


def test_a_body_over_the_limit_is_refused_by_either(proxy: Proxy) -> None:
    """128 MiB is the limit of both; nginx reads the declared length first."""
    context = ssl.create_default_context(cafile=str(proxy.certificates.authority))
    connection = http.client.HTTPSConnection(HOST, proxy.port, timeout=60, context=context)
    connection.putrequest("POST", "/v2/models/net/infer", skip_host=True)
    for name, value in (("Host", NAME), ("Content-Length", str(2**27 + 1))):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_grpc_inference_with_a_key(proxy: Proxy) -> None:
    with InferClient(proxy.grpc_address, 30, proxy.options()) as client:
        assert client.metadata("net")["name"] == "net"
        (through,) = client.infer("net", {"X": rows(2)}).values()
    direct = InferClient(proxy.server.grpc_address, 30, ConnectionOptions(api_key=proxy.keys["infer"]))
    with direct as client:
        (expected,) = client.infer("net", {"X": rows(2)}).values()
    assert np.array_equal(through, expected)


@pytest.mark.parametrize(("key", "code"), [("", "UNAUTHENTICATED"), ("metrics", "PERMISSION_DENIED")])
def test_grpc_statuses_pass_the_proxy(proxy: Proxy, key: str, code: str) -> None:
    address = proxy.grpc_address.removeprefix("grpcs://")
    credentials = proxy.options().channel_credentials()
    with triton.InferenceServerClient(address, ssl=True, creds=credentials) as client:
        assert client.is_server_live(), "health needs no key"
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_metadata("net", headers=proxy.options(key).headers())
    assert caught.value.status() == f"StatusCode.{code}"


def test_streams_pass_the_proxy(proxy: Proxy) -> None:
    """Each answer comes before the next request is sent: nothing is buffered."""
    answers: SimpleQueue[Any] = SimpleQueue()
    address = proxy.grpc_address.removeprefix("grpcs://")
    tensor = triton.InferInput("X", [1, 16], "FP32").set_data_from_numpy(rows(1))
    with triton.InferenceServerClient(address, ssl=True, creds=proxy.options().channel_credentials()) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=proxy.options().headers())
        for number in range(20):
            client.async_stream_infer("net", [tensor], request_id=str(number))
            result, error = answers.get(timeout=30)
            assert error is None
            assert result.get_response().id == str(number)
        client.stop_stream()


def test_connections_to_the_server_are_kept(proxy: Proxy) -> None:
    """Each request comes over a new connection of TLS; nginx must not open one to the server each time."""
    key = {"Authorization": f"Bearer {proxy.keys['infer']}"}
    for _ in range(10):
        assert proxy.request("GET", "/v2/models/net", **key)[0] == 200
    metrics = {"Authorization": f"Bearer {proxy.keys['metrics']}"}
    page = proxy.server.request("GET", "/metrics", headers=metrics)[2].decode()
    opened = re.search(r'^headrace_connections\{protocol="http"\} (\d+)', page, re.M)
    assert opened is not None
    assert int(opened[1]) <= 3, "this one, and those that nginx keeps"
    assert int(opened[1]) >= 2, "nginx keeps one"


def test_grpc_clients_get_a_status_when_the_server_is_gone(tmp_path: Path) -> None:
    tool("nginx")
    certificates = Certificates(tmp_path)
    port, nowhere = free_port(), free_port()
    gone = Server(None, tmp_path / "log", nowhere, nowhere)  # type: ignore[arg-type]
    with nginx(tmp_path, example(port, gone, certificates), port):
        options = ConnectionOptions(ca=str(certificates.authority))
        credentials = options.channel_credentials()
        with (
            triton.InferenceServerClient(f"{HOST}:{port}", ssl=True, creds=credentials) as client,
            pytest.raises(InferenceServerException) as caught,
        ):
            client.is_server_live(client_timeout=20)
    assert (caught.value.status(), caught.value.message()) == ("StatusCode.UNAVAILABLE", "no server answers")
