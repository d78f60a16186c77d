"""`headrace explain` against a server that answers as it is told."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from server.__main__ import main
from server.client import explain_command

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
    status = explain_command.run("net", url, version, as_json, console, Console(file=errors, width=200))
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


def test_json_is_as_it_came_and_a_version_is_asked_for(server: Any) -> None:
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
