"""Attacks that a web page can make with the browser of a visitor: DNS rebinding, cross-site requests; and what CORS allows."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attacks import Attacked, attack, http_body, http_changes, pb, watched
from tests.support.browser import Browser, Page, chromium
from tests.support.http2_peer import RawPeer, grpc_head, message, request
from tests.support.http2_peer import data as data_frame
from tests.support.serving import HOST, free_port

NAMES = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
UNLOAD = "/v2/repository/models/affine/unload"
LOGGING, TRACES = "/v2/logging", "/v2/trace/setting"
INFER = "/v2/models/affine/infer"
CHANGES = http_changes(log_verbose_level=3, trace_rate="1")
EVIL = "http://evil.example"


class _Empty(http.server.BaseHTTPRequestHandler):
    """A page without content at every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page of another origin</title>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """The port of a web site that is not Headrace."""
    server = http.server.ThreadingHTTPServer((HOST, 0), _Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium"), NAMES) as running:
        yield running


@pytest.fixture(params=["evil.example", HOST], ids=["cross-site", "same-site"])
def page(request: pytest.FixtureRequest, browser: Browser, site: int) -> Iterator[Page]:
    """A page of another origin: of another site, or on another port of the server's address."""
    opened = browser.open(f"http://{request.param}:{site}/")
    yield opened
    opened.close()


def state(server: Attacked) -> tuple[object, ...]:
    """Model states and settings, which attacks try to change."""
    _, _, index = server.server.request("POST", "/v2/repository/index", b"{}")
    settings = [server.server.request("GET", path)[2] for path in (LOGGING, TRACES, "/v2/systemsharedmemory/status")]
    return index, *settings


# --- Hosts -------------------------------------------------------------------------------------------------------------


def ask(server: Attacked, target: str, *lines: str, version: str = "1.1", port: int = 0) -> tuple[int, str]:
    """Status and body of a request whose Host is among `lines`."""
    with socket.create_connection((HOST, port or server.server.port), timeout=20) as sock:
        sock.sendall("\r\n".join((f"GET {target} HTTP/{version}", *lines, "Connection: close", "", "")).encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("target", "lines", "version", "status"),
    [
        ("/v2", ("Host: evil.example",), "1.1", 421),
        ("/v2", ("Host: EVIL.example:8000",), "1.1", 421),
        ("/v2", ("Host: evil.example.",), "1.1", 421),
        ("/v2", ("Host: localhost.evil.example",), "1.1", 421),
        ("/v2", ("Host: 127.0.0.1.evil.example",), "1.1", 421),
        ("/v2", ("Host: evil.example",), "1.0", 421),
        ("/v2", ("Host:",), "1.1", 400),
        ("/v2/health/live", ("Host: evil.example",), "1.1", 421),
        ("/page/page.js", ("Host: evil.example",), "1.1", 421),
        ("http://evil.example/v2", ("Host: localhost",), "1.1", 421),
        ("http://localhost/v2", ("Host: evil.example",), "1.1", 421),
        ("HTTP://EVIL.example:80/v2", (), "1.0", 421),
        ("/v2", ("Host: user@localhost",), "1.1", 400),
        ("http://localhost@evil.example/v2", ("Host: localhost",), "1.1", 400),
        ("http://user:password@localhost/v2", ("Host: localhost",), "1.1", 400),
        ("/v2", ("Host: localhost, evil.example",), "1.1", 400),
        ("/v2", ("Host: localhost\xe9",), "1.1", 400),
        ("/v2", ("Host: localhost", "Host: localhost"), "1.1", 400),
        ("/v2", ("Host: localhost", "Host: evil.example"), "1.1", 400),
        ("/v2", (), "1.1", 400),
        ("/v2", (), "1.0", 200),
        ("/v2", ("Host: localhost",), "1.0", 200),
        ("/v2", ("Host: LocalHost:9000",), "1.1", 200),
        ("/v2", ("Host: localhost.",), "1.1", 200),
        ("/v2", ("Host: 127.0.0.1:1",), "1.1", 200),
        ("/v2", ("Host: 192.168.7.7",), "1.1", 200),
        ("/v2", ("Host: [::1]:8000",), "1.1", 200),
        ("/v2", ("Host: [fe80::1]",), "1.1", 200),
        ("http://localhost:8000/v2", ("Host: localhost",), "1.1", 200),
    ],
)
def test_host(attacked: Attacked, target: str, lines: tuple[str, ...], version: str, status: int) -> None:
    assert ask(attacked, target, *lines, version=version)[0] == status
    # A second time, since the check of a value is cached.
    found, text = ask(attacked, target, *lines, version=version)
    assert found == status
    assert status != 421 or "--allowed-host evil.example" in text or "--allowed-host " in text


def test_dns_rebinding(attacked: Attacked) -> None:
    infer = [f"POST {INFER} HTTP/1.1", f"Content-Length: {len(http_body())}", "Content-Type: text/plain"]
    with watched(attacked, "S15 DNS rebinding") as watch:
        for host in ("localhost", "evil.example", "localhost", "evil.example"):  # with cached heads between them
            with attacked.connect() as wire:
                for _ in range(3):
                    wire.pour(["\r\n".join((*infer, f"Host: {host}", "", "")).encode() + http_body()])
                    status, text = wire.answer()
                    if host == "localhost":
                        assert (status, text) == (200, "")
                        continue
                    assert status == 421
                    assert "does not answer to the host 'evil.example'" in text
                    assert wire.closed()
                    break
    watch.check()
    attacked.still_serves()


@pytest.mark.slow
def test_a_browser_at_a_rebound_name_reads_nothing(attacked: Attacked, browser: Browser) -> None:
    page = browser.open(f"{EVIL}:{attacked.server.port}/")
    assert page.statuses(EVIL)[0] == 421
    answer = page.evaluate("fetch('/v2/status').then((response) => response.status)")
    assert answer == 421
    page.close()


def test_allowed_hosts(tmp_path: Path) -> None:
    metrics_port = free_port()
    options = (
        "--metrics-port",
        str(metrics_port),
        "--allowed-host",
        "Models.example",
        "--allowed-host",
        "other.example",
    )
    with attack(tmp_path, *options) as server:
        for host, status in (("models.example:443", 200), ("other.example.", 200), ("evil.example", 421)):
            assert ask(server, "/v2", f"Host: {host}")[0] == status
        for host, status in (("models.example", 200), ("localhost", 200), ("evil.example", 421)):
            assert ask(server, "/metrics", f"Host: {host}", port=metrics_port)[0] == status


# --- Cross-site requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "browser_headers",
    [
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/json", ""])
def test_cross_site_changes(attacked: Attacked, browser_headers: dict[str, str], media_type: str) -> None:
    before = state(attacked)
    headers = {**browser_headers, **({"Content-Type": media_type} if media_type else {})}
    for path, body in CHANGES.items():
        content = b"" if body is None else json.dumps(body).encode()
        status, _, answer = attacked.server.request("POST", path, content, headers)
        assert (status, b"--cors-origin" in answer) == (403, True), path
    assert attacked.infer(http_body(), **browser_headers)[0] == 403
    assert state(attacked) == before


@pytest.mark.slow
def test_a_page_of_another_origin(attacked: Attacked, page: Page) -> None:
    before = state(attacked)
    url = attacked.server.url
    with watched(attacked, "S14 cross-site requests") as watch:
        for path, body in CHANGES.items():
            text = json.dumps(json.dumps(body or {}))
            page.evaluate(f"fetch('{url}{path}', {{method: 'POST', mode: 'no-cors', body: {text}}}).then(() => 1)")
        text = json.dumps(http_body().decode())
        page.evaluate(f"fetch('{url}{INFER}', {{method: 'POST', mode: 'no-cors', body: {text}}}).then(() => 1)")
        assert page.evaluate(f"navigator.sendBeacon('{url}{LOGGING}', '{{\"log_verbose_level\": 3}}')")
        page.evaluate(
            "(() => { const form = document.createElement('form'), field = document.createElement('input');"
            f"form.method = 'POST'; form.action = '{url}{UNLOAD}'; form.enctype = 'text/plain'; form.target = 'frame';"
            "const frame = document.createElement('iframe'); frame.name = 'frame';"
            'field.name = \'{"parameters": {}, "x": "\'; field.value = \'"}\';'
            "form.append(field); document.body.append(frame, form); form.submit(); })()"
        )
        page.wait("performance.now() > 0 && new Promise((done) => setTimeout(() => done(true), 500))")
    statuses = page.statuses(url)
    assert len(statuses) >= len(CHANGES) + 2
    assert set(statuses) == {403}
    with pytest.raises(AssertionError, match="Failed to fetch"):
        page.evaluate(f"fetch('{url}/v2').then((response) => response.json())")
    assert state(attacked) == before
    watch.check()
    attacked.still_serves()


@pytest.mark.slow
def test_programs_and_own_pages_change_state_as_before(attacked: Attacked, browser: Browser) -> None:
    reset = json.dumps({"log_verbose_level": 0}).encode()
    for headers in (
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},  # curl -d
        {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin", "Origin": attacked.server.url},
        {"Content-Type": "application/json", "Sec-Fetch-Site": "none"},
        {"Content-Type": "application/json", "Origin": f"http://localhost:{attacked.server.port}"},
    ):
        named = {"Host": f"localhost:{attacked.server.port}", **headers}
        assert attacked.server.request("POST", LOGGING, reset, named)[0] == 200, headers
    status, _, answer = attacked.server.request(
        "POST", LOGGING, reset, {"Sec-Fetch-Site": "same-origin", "Content-Type": "text/plain"}
    )
    assert (status, b"send application/json" in answer) == (403, True)
    page = browser.open(f"{attacked.server.url}/")
    post = "{method: 'POST', headers: {'content-type': 'application/json'}, body: '{\"log_verbose_level\": 0}'}"
    assert page.evaluate(f"fetch('/v2/logging', {post}).then((response) => response.status)") == 200
    page.close()


@pytest.mark.parametrize("media_type", [b"text/plain", b"", b"application/grpc"])
def test_grpc_refuses_requests_of_browsers(attacked: Attacked, media_type: bytes) -> None:
    """Over TLS a browser speaks HTTP/2, but neither a page nor the browser sends `te: trailers`, which the server requires."""
    fields = dict(grpc_head("/inference.GRPCInferenceService/LogSettings"))
    fields |= {b"content-type": media_type, b"origin": EVIL.encode()}
    head = [(name, value) for name, value in fields.items() if name != b"te" and value]
    change = pb.LogSettingsRequest()
    change.settings["log_verbose_level"].uint32_param = 3
    before = attacked.server.request("GET", LOGGING)[2]
    with RawPeer(attacked.server.grpc_port) as peer:
        peer.send(request(1, False, head), data_frame(1, message(change.SerializeToString()), True))
        while (frame := peer.frame()) is not None and frame.stream_id != 1:
            pass
    assert frame is not None, "answered with an error, or reset"
    assert attacked.server.request("GET", LOGGING)[2] == before
    attacked.still_serves()


# --- CORS --------------------------------------------------------------------------------------------------------------


def infer_from(page: Page, url: str) -> object:
    """Status, size of the binary output and a few headers of an inference request with a binary body."""
    head = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}]}
    head["parameters"] = {"binary_data_output": True}  # type: ignore[assignment]
    text = json.dumps(head)
    return page.evaluate(
        f"(async () => {{ const head = {json.dumps(text)};"
        "const headers = {'content-type': 'application/octet-stream', 'inference-header-content-length': head.length,"
        "'headrace-timing': '1'};"
        f"const response = await fetch('{url}{INFER}', {{method: 'POST', headers,"
        "body: new Blob([head, new Float32Array(16)])});"
        "const size = Number(response.headers.get('inference-header-content-length'));"
        "const body = await response.arrayBuffer();"
        "return [response.status, body.byteLength - size, Boolean(response.headers.get('headrace-timing'))]; })()"
    )


@pytest.mark.slow
def test_cors_of_an_allowed_and_a_refused_origin(tmp_path: Path, browser: Browser, site: int) -> None:
    with attack(tmp_path, "--cors-origin", f"{EVIL}:{site}") as server:
        url = server.server.url
        page = browser.open(f"{EVIL}:{site}/")
        for _ in range(3):  # by the parser, then by the cached head
            assert infer_from(page, url) == [200, 16, True]
        assert (
            page.evaluate(f"fetch('{url}/v2').then((response) => response.json()).then((it) => it.name)") == "headrace"
        )
        post = "{method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'}"
        assert page.evaluate(f"fetch('{url}{LOGGING}', {post}).then((it) => it.status)") == 200
        missing = f"fetch('{url}/v2/models/none/infer', {post}).then((it) => it.json()).then((it) => it.error)"
        assert "none" in str(page.evaluate(missing)), "errors are readable too"
        page.close()
        page = browser.open(f"http://{HOST}:{site}/")
        with pytest.raises(AssertionError, match="Failed to fetch"):
            infer_from(page, url)
        with pytest.raises(AssertionError, match="Failed to fetch"):
            page.evaluate(f"fetch('{url}/v2').then((response) => response.json())")
        page.close()


def test_cors_headers(tmp_path: Path) -> None:
    ask_for = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    app = "https://app.example"
    with attack(tmp_path, "--cors-origin", app, "--cors-origin", "https://[::1]:8443") as server:
        for path in (INFER, "/v2/models/affine/versions/1/infer", LOGGING, "/v2", "/metrics"):
            status, headers, body = server.server.request("OPTIONS", path, None, {"Origin": app, **ask_for})
            assert (status, body, headers["access-control-allow-origin"]) == (204, b"", app)
            assert {"authorization", "x-api-key", "inference-header-content-length", "x-request-timeout-ms"} <= set(
                headers["access-control-allow-headers"].split(", ")
            )
            assert "Origin" in headers["vary"]
            assert "access-control-allow-credentials" not in headers
            status, headers, body = server.server.request("OPTIONS", path, None, {"Origin": EVIL, **ask_for})
            assert (status, "access-control-allow-origin" in headers) == (403, False)
        status, headers, _ = server.server.request("GET", "/v2", None, {"Origin": app})
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, app, "Origin")
        status, headers, _ = server.server.request("GET", "/v2", None, {"Origin": EVIL})
        assert (status, headers["vary"], "access-control-allow-origin" in headers) == (200, "Origin", False)
        status, headers, _ = server.server.request("GET", "/v2")
        assert (status, headers["vary"]) == (200, "Origin")
        assert server.server.request("POST", LOGGING, b"{}", {"Origin": EVIL})[0] == 403


def test_every_origin_may_infer_but_not_change_state(tmp_path: Path) -> None:
    with attack(tmp_path, "--cors-origin", "*") as server:
        status, headers, _ = server.server.request("POST", INFER, http_body(), {"Origin": EVIL})
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
        assert server.server.request("POST", LOGGING, b"{}", {"Origin": EVIL})[0] == 403


def test_no_cors_headers_without_the_option(attacked: Attacked) -> None:
    ask_for = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    for path in (INFER, LOGGING):
        status, headers, _ = attacked.server.request("OPTIONS", path, None, ask_for)
        assert (status, [name for name in headers if name.startswith("access-control")]) == (405, [])
    _, headers, _ = attacked.server.request("GET", "/v2", None, ask_for)
    assert not {"vary", "access-control-allow-origin"} & set(headers)
