"""The HTTP control plane as a bare ASGI callable: hostile bodies, headers and paths get 4xx with a short text, never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import pytest
from headrace.config.model_config import name_problem
from headrace.core.errors import BadRequest, Forbidden, Unavailable
from headrace.core.limits import ClientLimits, Limits
from headrace.models.registry import Registry
from headrace.wire.http.application import HttpApplication
from headrace.wire.http.routes import MAX_CONTROL_BYTES
from headrace.wire.requests.services import ControlServices
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

LIMIT = 200_000
CALLS: list[tuple[Any, ...]] = []


class Backstage:
    """Every service at once: writes down what gets through to it."""

    active = False
    config = layers = None

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.rows: list[dict[str, object]] = []

    def _note(self, *what: Any) -> None:
        CALLS.append(what)
        if self.raises is not None:
            raise self.raises

    allows_files = True

    def check_control(self, name: str) -> None:
        """Model control is on."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self._note("load", name, config, files)

    async def unload(self, name: str, dependents: bool) -> None:
        self._note("unload", name, dependents)

    def index(self) -> list[dict[str, object]]:
        return self.rows

    def register_system(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        self._note("system", name, key, offset, size_bytes)

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        self._note("cuda", name, handle, device, size_bytes)

    def unregister(self, kind: str, name: str) -> None:
        self._note("unregister", kind, name)

    def status(self, kind: str, name: str) -> list[dict[str, object]]:
        return []

    def settings(self, *whose: str) -> dict[str, object]:
        return {}

    def update(self, *changes: Any) -> dict[str, object]:
        self._note("update", *changes)
        return {}


def application(backstage: Backstage, models: Registry | None = None) -> HttpApplication:
    all_of_it: Any = backstage
    services = ControlServices(
        models=models or all_of_it,
        repository=all_of_it,
        regions=all_of_it,
        traces=all_of_it,
        observer=all_of_it,
        logs=all_of_it,
        overview=all_of_it,
        version="0",
        extensions=(),
        explain=all_of_it,
    )
    return HttpApplication(services, ClientLimits(Limits(max_body_bytes=LIMIT)), None)


APPLICATION = application(Backstage())
EMPTY = application(Backstage(), Registry())
REGISTER = "/v2/systemsharedmemory/region/r/register"
BODIES = [
    "/v2/repository/index",
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    REGISTER,
    "/v2/cudasharedmemory/region/r/register",
    "/v2/trace/setting",
    "/v2/logging",
]


def call(
    path: str,
    *parts: bytes,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    app: Callable[..., Any] = APPLICATION,
) -> tuple[int, dict[str, str], bytes]:
    """One request; the path as it stands in the request line."""
    sent: list[Any] = []
    waiting = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ] or [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": None,
        "server": ("x", 80),
    }
    CALLS.clear()
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, sent[1].get("body", b"")


def refused(answer: tuple[int, dict[str, str], bytes], *words: str, status: int = 400) -> None:
    code, headers, content = answer
    assert code == status, content
    assert headers["content-type"] == "application/json"
    text = json.loads(content)["error"]
    assert len(text) < 500, "the answer repeats what the client sent"
    for word in words:
        assert word in text
    assert not CALLS, "it got through"


GOOD = {"key": "k", "byte_size": 8}
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "JSON"),
    "no JSON": (b"key=k", "JSON"),
    "half of it": (b'{"key": "k"', "JSON"),
    "something behind it": (b'{"key": "k", "byte_size": 8} {}', "JSON"),
    "an array": (b"[]", "object"),
    "null": (b"null", "object"),
    "no size": (b'{"key": "k"}', "byte_size"),
    "a size as text": (b'{"key": "k", "byte_size": "8"}', "$.byte_size"),
    "true for a size": (b'{"key": "k", "byte_size": true}', "$.byte_size"),
    "a fraction": (b'{"key": "k", "byte_size": 8.5}', "$.byte_size"),
    "NaN": (b'{"key": "k", "byte_size": NaN}', "NaN"),
    "infinity": (b'{"key": "k", "byte_size": -Infinity}', "Infinity"),
    "beyond floats": (b'{"key": "k", "byte_size": 1e999}', "$.byte_size"),
    "beyond 64 bits": (b'{"key": "k", "byte_size": 1e300}', "$.byte_size"),
    "a thousand digits": (b'{"key": "k", "byte_size": %s}' % (b"9" * 1000), "$.byte_size"),
    "ten thousand digits": (b'{"key": "k", "byte_size": %s}' % (b"9" * 10_000), "JSON"),
    "below zero": (b'{"key": "k", "byte_size": 8, "offset": -1}', "$.offset"),
    "a key twice": (b'{"key": "k", "byte_size": 8, "key": "l"}', "twice"),
    "an unknown key": (b'{"key": "k", "byte_size": 8, "more": 1}', "more"),
    "a huge unknown key": (b'{"key": "k", "byte_size": 8, "%s": 1}' % (b"x" * 60_000), "xxx"),
    "half a surrogate pair": (b'{"key": "\\ud800", "byte_size": 8}', "JSON"),
    "bytes that are no text": (b'{"key": "\xff", "byte_size": 8}', "JSON"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "JSON"),
    "arrays in arrays": (b"[" * 60_000, "JSON"),
    "objects in objects": (b'{"key":' * 9_000, "JSON"),
}


@pytest.mark.parametrize(("body", "word"), WRONG.values(), ids=WRONG)
def test_bodies_of_the_wrong_type(body: bytes, word: str) -> None:
    refused(call(REGISTER, body), word)


def test_a_good_body_gets_through() -> None:
    for body in (b'{"key": "k", "byte_size": 8}', b' {"byte_size": 8.0, "offset": 0, "key": "\\u006b"} '):
        assert call(REGISTER, body[:5], body[5:])[0] == 200
        assert CALLS == [("system", "r", "k", 0, 8)]
    for media_type in ("application/json; charset=utf-8", "text/plain", "APPLICATION/JSON"):
        assert call(REGISTER, json.dumps(GOOD).encode(), headers={"Content-Type": media_type})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/xml"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "x" * 10_000},
        {"Content-Encoding": "gzip"},
    ],
    ids=["xml", "form", "long", "gzip"],
)
def test_refused_headers(headers: dict[str, str]) -> None:
    refused(call(REGISTER, json.dumps(GOOD).encode(), headers=headers), next(iter(headers)).lower())


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_bounded(path: str) -> None:
    limit = LIMIT if path.endswith("/load") else MAX_CONTROL_BYTES
    refused(call(path, headers={"Content-Length": str(limit + 1)}), str(limit), status=413)
    refused(call(path, headers={"Content-Length": "9" * 19}), str(limit), status=413)
    refused(call(path, b" " * limit, b" "), str(limit), status=413)


@pytest.mark.parametrize(
    ("path", "allow"), [("/v2/logging", "GET, HEAD, POST"), ("/v2/repository/index", "POST"), ("/v2", "GET, HEAD")]
)
def test_refused_methods(path: str, allow: str) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "PROPFIND", *(() if "HEAD" in allow else ("HEAD",))):
        answer = call(path, method=method)
        assert answer[1]["allow"] == allow
        refused(answer, allow, status=405)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "parameters",
    "config",
    "file:1/model.onnx",
    "unload_dependents",
    "ready",
    "key",
    "offset",
    "byte_size",
    "raw_handle",
    "b64",
    "device_id",
    "trace_level",
    "trace_rate",
    "trace_count",
    "log_frequency",
    "trace_file",
    "trace_mode",
    "log_file",
    "log_info",
    "log_verbose_level",
    "log_format",
]
fields = st.sampled_from(FIELDS)
near_misses = st.dictionaries(fields, json_values | st.dictionaries(fields, json_values, max_size=3), max_size=4)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(BODIES), near_misses.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_any_body_is_accepted_or_refused(path: str, body: bytes) -> None:
    status, _, content = call(path, body)
    if status == 200:
        assert path.endswith("/index") or CALLS
    else:
        refused((status, {"content-type": "application/json"}, content))


@settings(max_examples=examples(200), deadline=None)
@given(st.text(min_size=1, max_size=300), st.sampled_from(["", "/config", "/stats", "/ready", "/trace/setting"]))
def test_any_name_of_a_model_is_not_found(name: str, rest: str) -> None:
    status, _, content = call(f"/v2/models/{quote(name, safe='')}{rest}", method="GET", app=EMPTY)
    if (name, rest) == ("stats", ""):
        return
    assert status == (400 if name_problem(name) else 404), content
    assert len(json.loads(content)["error"]) < 900


def test_refusals_of_the_services_are_passed_on() -> None:
    backstage = Backstage()
    app = application(backstage)
    for error, status in ((Forbidden("no"), 403), (Unavailable("later", 2.5), 503), (BadRequest("\ud800"), 400)):
        backstage.raises = error
        code, headers, content = call("/v2/repository/models/m/load", app=app)
        assert code == status
        assert headers.get("retry-after") == ("3" if status == 503 else None)
        expected = "failed to load 'm': " + {403: "no", 503: "later", 400: "?"}[status]
        assert json.loads(content)["error"] == str(error).encode("utf-8", "replace").decode() == expected


def test_internal_errors_show_only_their_reference(caplog: pytest.LogCaptureFixture) -> None:
    backstage = Backstage()
    backstage.raises = RuntimeError("/secret/path")
    code, _, content = call("/v2/repository/models/m/unload", app=application(backstage))
    text = json.loads(content)["error"]
    assert code == 500
    assert "secret" not in text
    assert text.partition("(")[2].rstrip(")") in caplog.text
    assert "/secret/path" in caplog.text


def test_names_that_are_no_text_are_shown_as_well_as_can_be() -> None:
    backstage = Backstage()
    backstage.rows = [{"name": b"caf\xe9".decode(errors="surrogateescape"), "state": "READY"}]
    code, _, content = call("/v2/repository/index", app=application(backstage))
    assert (code, json.loads(content)) == (200, [{"name": "caf?", "state": "READY"}])


def test_a_disconnect_within_a_body_ends_the_request() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v2/repository/models/m/load"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": [],
        "query_string": b"",
    }
    CALLS.clear()
    asyncio.run(asyncio.wait_for(APPLICATION(scope, receive, send), 60))
    assert not CALLS
    assert sent[0]["status"] == 499
