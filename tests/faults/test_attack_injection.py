"""Attempts to inject headers, log lines, spans and terminal sequences through text of clients (S32 in docs/security.md).

Request ids, names of models, `traceparent`, `tracestate`, client names and user agents carry CR, LF, NUL, sequences of ANSI
terminals and HTML. None of it may reach a response header, a line of any log, an exported span or a terminal as it was sent.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from headrace.server.commands import explain
from rich.console import Console
from tritonclient.grpc import service_pb2

from tests.support.attacks import OPTIONS, Attacked, build, grpc_request, http_body
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request
from tests.support.keys import Keys, until
from tests.support.otlp_receiver import Receiver, attributes, receiving
from tests.support.serving import HOST, run_headrace, serving

pb: Any = service_pb2
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MARK = "injected"
ESCAPES = f"\x1b[31m{MARK}\x1b[0m\x1b]0;{MARK}\x07\x9b2J\x7f\u202e"
TEXTS = {
    "a header": f"a\r\nX-{MARK}: 1\r\nSet-Cookie: {MARK}=1",
    "a response": f"a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-{MARK}: 1\r\n\r\n",
    "a line": f'a\n[01/01/30 00:00:00] ERROR    {MARK}\n{{"{MARK}": 1}}\n',
    "NUL": f"a\0{MARK}",
    "escapes": f"a{ESCAPES}",
    # Without a byte that paths refuse: these reach the logs.
    "8-bit escapes": f"a\u009b31m{MARK}\u202e\u2028{MARK}\u0085{MARK}",
    "markup": f"a[red]{MARK}[/red][link=http://{MARK}]",
    "HTML": f"a<script>alert('{MARK}')</script><img src=x onerror=alert(1)>",
}
# Values of header fields: RFC 9110 forbids CR, LF and NUL in them, and a line feed ends a field of HTTP/1.1 anyway.
VALUES = {name: text for name, text in TEXTS.items() if not re.search("[\r\n\0]", text)}
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
HEADERS = re.compile(
    r"content-(type|length|encoding)|date|server|connection|keep-alive|retry-after|allow|vary|cache-control|www-authenticate"
    r"|x-content-type-options|inference-header-content-length|server-timing|traceparent|(x-)?headrace-[a-z-]+"
)
TRAILERS = re.compile(
    r":status|content-type|grpc-status|grpc-message|grpc-status-details-bin|grpc-accept-encoding|accept-encoding"
    r"|server-timing|(x-)?headrace-[a-z-]+|retry-[a-z-]+|date|server|triton-[a-z-]+"
)


@dataclass
class Observed(Attacked):
    """A server with keys whose logs and spans are collected.

    Attributes:
        keys: its keys.
        receiver: receiver of its spans.
        access_log: file of its request log.
        looked: characters of the log and of the request log that tests have looked at.
    """

    keys: Keys
    receiver: Receiver
    access_log: Path
    looked: tuple[int, int] = (0, 0)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("injection")
    keys, access_log = Keys(folder), folder / "access.log"
    with receiving("http") as receiver:
        options = (
            *OPTIONS, "--api-keys-file", str(keys.path), "--request-log", "all",
            "--request-log-file", str(access_log), "--otlp-endpoint", receiver.endpoint, "--otlp-protocol", "http",
            "--trace-rate", "1",
        )  # fmt: skip
        repository = build(folder / "models")
        with serving(repository, folder, *options) as server:
            yield Observed(server, repository, keys, receiver, access_log)


def exchange(case: Attacked, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes on a connection of HTTP/1.1: status, headers and body of the first response, and that there is no second one."""
    with socket.create_connection((HOST, case.server.port), timeout=20) as sock:
        sock.sendall(raw)
        response = http.client.HTTPResponse(sock)
        response.begin()
        body = response.read()
        sock.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            assert not sock.recv(1), "a second response"
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def post(case: Observed, path: str, body: bytes, fields: str = "") -> tuple[int, dict[str, str], bytes]:
    key = case.keys.bearer("all")["Authorization"]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    return exchange(case, head.encode("utf-8") + body)


def check_headers(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        assert HEADERS.fullmatch(name), (name, value)
        assert MARK not in value, (name, value)
        assert not UNPRINTABLE.search(value), (name, value)


def check_files(case: Observed) -> None:
    """Check that no line of a log was forged and that no text in it controls a terminal."""
    log, access_log = case.server.text, case.access_log.read_text()
    for text in (log[case.looked[0] :], access_log[case.looked[1] :]):
        assert not UNPRINTABLE.search(text), UNPRINTABLE.findall(text)
        assert not re.search(rf"^(\[01/01/30|ERROR +{MARK}|X-{MARK}|Set-Cookie|HTTP/1|\{{\"{MARK})", text, re.MULTILINE)
        assert "Traceback" not in text
    whole = access_log[case.looked[1] : access_log.rfind("\n") + 1]
    for line in whole.splitlines():
        assert line.isascii()
        assert isinstance(json.loads(line), dict)
    case.looked = (len(log), access_log.rfind("\n") + 1)


def check_spans(case: Observed) -> None:
    for span in tuple(case.receiver.spans):
        for text in (span.name, span.trace_state, *map(str, attributes(span).values())):
            assert not UNPRINTABLE.search(text), (span.name, text)
            assert "\n" not in text, (span.name, text)
    case.receiver.spans.clear()


# --- request ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXTS)
def test_request_ids_over_http(case: Observed, kind: str) -> None:
    text = TEXTS[kind]
    lines = len(case.access_log.read_text().splitlines())
    for model, expected in (("affine", 200), ("nothing", 404)):
        timing = f"X-Headrace-Timing: 1\r\ntraceparent: {TRACEPARENT}\r\n"
        status, headers, body = post(case, f"/v2/models/{model}/infer", http_body(id=text), timing)
        assert status == expected
        check_headers(headers)
        document = json.loads(body)
        assert document.get("id", text) == text, "the id is returned, as text in JSON"
        assert not re.search(rb"[\x00-\x09\x0b-\x1f]", body)
    # A refused request has its id in the log too.
    assert post(case, "/v2/models/affine/infer", json.dumps({"id": text, "inputs": []}).encode())[0] == 400
    until(lambda: len(case.access_log.read_text().splitlines()) >= lines + 2, "the lines of both requests")
    check_files(case)
    check_spans(case)


@pytest.mark.parametrize("kind", TEXTS)
def test_request_ids_over_grpc(case: Observed, kind: str) -> None:
    text = TEXTS[kind].replace("\0", "") if kind != "NUL" else TEXTS[kind]
    metadata = case.keys.metadata("all")
    assert case.call(grpc_request(id=text), metadata=metadata)[0] == "OK"
    wrong = grpc_request(id=text)
    wrong.inputs[0].shape[:] = [1, 15]
    assert case.call(wrong, metadata=metadata)[0] == "INVALID_ARGUMENT"
    check_files(case)
    check_spans(case)


# --- traceparent, tracestate, client, user agent ----------------------------------------------------------------------------

FIELDS = ("traceparent", "tracestate", "x-headrace-client", "user-agent", "x-request-timeout-ms", "x-headrace-timing")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", [kind for kind in TEXTS if kind != "a response"])  # which ends the client's own head
def test_header_fields_over_http(case: Observed, kind: str, field: str) -> None:
    text = TEXTS[kind]
    before = f"traceparent: {TRACEPARENT}\r\n" if field == "tracestate" else ""
    value = f"{TRACEPARENT}{text}" if field == "traceparent" else text
    _, headers, body = post(case, "/v2/models/affine/infer", http_body(), f"{before}{field}: {value}\r\n")
    check_headers(headers)
    assert not re.search(rb"[\x00-\x09\x0b-\x1f]", body)
    check_files(case)
    for span in tuple(case.receiver.spans):
        assert MARK not in span.trace_state or kind in ("markup", "HTML"), "printable text is passed on, as W3C demands"
    check_spans(case)


def raw_call(case: Observed, content: bytes, path: str, *fields: tuple[bytes, bytes]) -> dict[str, str] | None:
    """Header fields of the answer to a call whose fields no client library sends; None if the server refuses the stream."""
    key = dict(case.keys.metadata("all"))
    metadata = [(name.lower().encode(), value.encode()) for name, value in key.items()]
    with RawPeer(case.server.grpc_port) as peer:
        peer.send(
            request(1, end=False, fields=grpc_head(path, *metadata, *fields)), data(1, message(content), end=True)
        )
        try:
            return peer.trailers(1)
        except (AssertionError, TimeoutError):
            return None


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", TEXTS)
def test_metadata_over_grpc(case: Observed, kind: str, field: str) -> None:
    before = [(b"traceparent", TRACEPARENT.encode())] if field == "tracestate" else []
    value = (TRACEPARENT if field == "traceparent" else "") + TEXTS[kind]
    path = "/inference.GRPCInferenceService/ModelInfer"
    content = grpc_request().SerializeToString()
    trailers = raw_call(case, content, path, *before, (field.encode(), value.encode()))
    if trailers is not None:
        check_trailers(trailers)
    assert case.call(grpc_request(), metadata=case.keys.metadata("all")) == ("OK", ""), "other connections go on"
    check_files(case)
    check_spans(case)


def check_trailers(trailers: dict[str, str]) -> None:
    for name, value in trailers.items():
        assert TRAILERS.fullmatch(name), (name, value)
        assert not UNPRINTABLE.search(value), (name, value)
        assert "\n" not in value, (name, value)
        assert value.isascii(), (name, value)


# --- names of models ------------------------------------------------------------------------------------------------------

PATHS = (("POST", "/v2/models/{}/infer"), ("GET", "/v2/models/{}/explain"), ("POST", "/v2/repository/models/{}/load"))


@pytest.mark.parametrize("kind", TEXTS)
def test_names_of_models_over_http(case: Observed, kind: str) -> None:
    for method, path in PATHS:
        body = http_body() if path.endswith("infer") else b"{}" if method == "POST" else b""
        key = case.keys.bearer("all")["Authorization"]
        target = path.format(quote(TEXTS[kind], safe=""))
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        status, headers, content = exchange(case, head.encode() + body)
        assert status in (400, 404)
        check_headers(headers)
        assert headers["content-type"].startswith("application/json"), "no browser reads it as HTML"
        assert json.loads(content)["error"]
    check_files(case)
    check_spans(case)


CALLS = {
    "ModelInfer": lambda name: pb.ModelInferRequest(model_name=name),
    "ModelMetadata": lambda name: pb.ModelMetadataRequest(name=name),
    "RepositoryModelLoad": lambda name: pb.RepositoryModelLoadRequest(model_name=name),
}


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("kind", TEXTS)
def test_names_of_models_over_grpc(case: Observed, kind: str, method: str) -> None:
    content = CALLS[method](TEXTS[kind]).SerializeToString()
    trailers = raw_call(case, content, f"/inference.GRPCInferenceService/{method}")
    assert trailers is not None
    assert trailers["grpc-status"] != "0"
    check_trailers(trailers)
    if method == "RepositoryModelLoad":  # a control call: the audit has one line, with the name
        until(lambda: "audit: load model" in case.server.text[case.looked[0] :], "the line of the audit")
    check_files(case)
    check_spans(case)


@pytest.mark.parametrize("kind", VALUES)
def test_methods_over_grpc(case: Observed, kind: str) -> None:
    trailers = raw_call(case, b"", f"/inference.GRPCInferenceService/{VALUES[kind]}")
    if trailers is not None:
        assert trailers.get("grpc-status") != "0"
        check_trailers(trailers)
    check_files(case)


# --- audit ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VALUES)
def test_refused_callers_in_the_audit(case: Observed, kind: str) -> None:
    body = b"{}"
    for key in ("", f"Authorization: Bearer {VALUES[kind]}\r\n"):
        path = f"/v2/repository/models/{quote(TEXTS[kind], safe='')}/load"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}User-Agent: {VALUES[kind]}\r\nContent-Length: 2\r\n\r\n"
        status, headers, _ = exchange(case, head.encode() + body)
        assert status in (400, 401, 403)
        check_headers(headers)
    check_files(case)
    assert f"Bearer a{MARK}" not in case.server.text


# --- the terminal of an operator -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[str]:
    """A server whose answers are hostile: URL."""
    text = "".join(TEXTS.values())
    finding = {"kind": "idle", "explanation": text, "cure": text, "setting": text, "expected": text}
    figures = dict.fromkeys(("requests_per_s", "p99_us", text), 1.0)
    document = {
        "name": text, "version": text, "limit": text, "summary": text, "findings": [finding], "numbers": figures,
        "cache": {"state": text, "reason": text, "hits": 1, "redis": {"problem": text, "address": text, "tls": text}},
        text: text,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            missing = "missing" in self.path
            content = json.dumps({"error": text} if missing else document, ensure_ascii=False).encode()
            self.send_response(404 if missing else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("model", ["affine", "missing"])
def test_explain_prints_no_sequences_of_a_server(hostile_server: str, model: str, options: list[str]) -> None:
    done = run_headrace("explain", model, "--url", hostile_server, *options)
    assert done.returncode == (1 if model == "missing" else 0)
    for output in (done.stdout, done.stderr):
        assert not UNPRINTABLE.search(output), UNPRINTABLE.findall(output)
    shown = done.stderr if model == "missing" else done.stdout
    assert MARK in shown
    if options and model == "affine":
        assert json.loads(done.stdout)["name"] == "".join(TEXTS.values()), "nothing is lost in JSON"
    else:
        assert "[red]" in shown, "markup of the console is text"


@pytest.mark.parametrize("kind", [kind for kind in TEXTS if kind != "NUL"])
def test_explain_prints_no_sequences_of_its_arguments(case: Observed, kind: str) -> None:
    done = run_headrace("explain", TEXTS[kind], "--url", case.server.url, "--api-key-file", key_file(case))
    assert done.returncode == 1
    for output in (done.stdout, done.stderr):
        assert not UNPRINTABLE.search(output), UNPRINTABLE.findall(output)
        assert not re.search(rf"^(\[01/01/30|X-{MARK})", output, re.MULTILINE)


def key_file(case: Observed) -> Path:
    path = case.access_log.with_name("key")
    path.write_text(case.keys.bearer("all")["Authorization"].removeprefix("Bearer "))
    path.chmod(0o600)
    return path


def test_a_terminal_gets_only_the_colours_of_the_command(hostile_server: str) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, highlight=False, width=200)
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    assert explain.main(parser.parse_args(["affine", "--url", hostile_server]), console, console) == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert MARK in plain
    assert not UNPRINTABLE.search(plain), UNPRINTABLE.findall(plain)
