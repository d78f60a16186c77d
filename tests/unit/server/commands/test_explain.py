"""`headrace explain` against a server with fixed responses."""

from __future__ import annotations

import argparse
import io
import json
import socket
from typing import Any

import pytest
from headrace.__main__ import main
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, Unavailable
from headrace.server.commands import explain as explain_command
from headrace.server.commands.connection import ConnectionOptions
from headrace.server.commands.explain import fetch
from rich.console import Console

ANSWER = {
    "name": "net",
    "version": "3",
    "limit": "unmerged",
    "summary": "...",
    "findings": [
        {
            "kind": "unmerged",
            "explanation": "the instance computes for 97 % of the time, one request at a time [bold]",
            "cure": "let requests share batches",
            "setting": "dynamic_batching {}",
            "expected": "3.1 times as much",
        },
        {"kind": "copies", "explanation": "a\u001b[2Jb", "cure": "", "setting": "", "expected": ""},
    ],
    "numbers": {
        "seconds": 9.5,
        "busy": 0.97,
        "queue_us": 1500.0,
        "rows_per_batch": 1,
        "closed": {"idle": 3, "full": 1},
    },
}


def explain(url: str, *, version: str = "", as_json: bool = False) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    parser = argparse.ArgumentParser()
    explain_command.add_arguments(parser)
    words = ["net", "--url", url, "--model-version", version, *(["--json"] if as_json else [])]
    status = explain_command.main(parser.parse_args(words), console, Console(file=errors, width=200))
    return status, out.getvalue(), errors.getvalue()


def test_findings_and_numbers_are_shown(server: Any) -> None:
    server.say("GET /v2/models/net/explain", json.dumps(ANSWER).encode())
    status, out, errors = explain(server.url)
    assert (status, errors) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        "net, version 3",
        "unmerged: the instance computes for 97 % of the time, one request at a time [bold]",
        "  cure: let requests share batches [dynamic_batching {}]",
        "  expected: 3.1 times as much",
        "copies: a\N{REPLACEMENT CHARACTER}[2Jb",
        "last 9.5 s: 1 rows a batch, 97 % busy, 1.5 ms in the queue, closed: idle 75%, full 25%",
    ]


def test_json_is_unchanged_and_the_version_is_requested(server: Any) -> None:
    server.say("GET /v2/models/net/versions/3/explain", json.dumps(ANSWER).encode())
    status, out, _ = explain(server.url, version="3", as_json=True)
    assert (status, json.loads(out)) == (0, ANSWER)


def test_a_model_that_is_not_there_is_an_error(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.say("GET /v2/models/net/explain", b'{"error": "model \'net\' is not found"}', 404)
    status, out, errors = explain(server.url)
    assert (status, out) == (1, "")
    assert "model 'net' is not found" in errors
    assert main(["explain", "net", "--url", server.url]) == 1
    assert "not found" in capsys.readouterr().err


# --- errors ------------------------------------------------------------------------------------------------------------


def test_a_path_in_the_url_is_a_prefix_and_names_are_quoted(server: Any) -> None:
    server.say("GET /team/a/v2/models/a%2Fb%20c/versions/3/explain", b"{}")
    assert fetch(server.url.removeprefix("http://") + "/team/a/", "a/b c", "3") == {}


def test_no_server_listens() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused, and no other process gets the port
        with pytest.raises(Unavailable, match=r"no server answers at .* start one with `headrace serve`"):
            fetch(f"http://127.0.0.1:{used.getsockname()[1]}", "m")


def test_no_answer_in_time() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Unavailable, match=r"no answer .* within 0.05 s"),
    ):
        fetch(f"127.0.0.1:{silent.getsockname()[1]}", "m", timeout_s=0.05)


def test_a_connection_that_breaks_off(server: Any) -> None:
    server.say("GET /v2/models/m/explain", b"{}", headers={"Content-Length": "100"})
    with pytest.raises(Unavailable, match=r"the connection to .* failed"):
        fetch(server.url, "m", timeout_s=5)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadRequest, match="write it like http://127"):
        fetch(url, "m")


@pytest.mark.parametrize("status", [400, 403, 404, 413, 429, 500, 502, 503, 504])
def test_a_status_is_shown_with_the_servers_text(server: Any, status: int) -> None:
    server.say("GET /v2/models/m/explain", b'{"error":"model \'m\' is wrong"}', status)
    with pytest.raises(HeadraceError) as caught:
        fetch(server.url, "m")
    assert str(caught.value) == f"the server returned {status}: model 'm' is wrong"


@pytest.mark.parametrize(
    ("status", "key", "cure"),
    [
        (401, "", "the server needs an API key: name one with --api-key-file FILE or the variable HEADRACE_API_KEY"),
        (401, "hr_x", "the server does not accept the API key of FILE: `headrace keys list` has the valid ones"),
        (403, "hr_x", "the API key of FILE does not allow it: use a key with that scope and model"),
        (
            421,
            "",
            "start the server with --allowed-host 127.0.0.1, or write a name or address that it accepts in the URL",
        ),
    ],
)
def test_a_refusal_is_shown_with_its_cure(server: Any, status: int, key: str, cure: str) -> None:
    server.say("GET /v2/models/m/explain", b'{"error":"no"}', status)
    with pytest.raises(HeadraceError) as caught:
        fetch(server.url, "m", options=ConnectionOptions(api_key=key, api_key_source="FILE"))
    assert str(caught.value) == f"the server returned {status}: no; {cure}"
    assert server.received[-1].headers.get("authorization", "") == (f"Bearer {key}" if key else "")


@pytest.mark.parametrize("body", [b"", b"<html>Not here</html>", b'{"detail":1}', b"[1]", b"\xff\xfe"])
def test_an_error_of_another_server_is_reported_as_such(server: Any, body: bytes) -> None:
    server.say("GET /v2/models/m/explain", body, 404)
    with pytest.raises(ModelFailed, match="check that the URL is that of a V2 inference server"):
        fetch(server.url, "m")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"1"])
def test_a_page_that_is_no_json_object(server: Any, body: bytes) -> None:
    server.say("GET /v2/models/m/explain", body)
    with pytest.raises(ModelFailed, match="check that the URL is that of a V2"):
        fetch(server.url, "m")
