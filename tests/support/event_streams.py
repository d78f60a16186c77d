"""Reading of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def events(body: bytes) -> list[Any]:
    """The events of a body, without comments: a server that is busy sends one before its first event."""
    *parts, rest = body.split(b"\n\n")
    assert rest == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if part != b":"]


def answers(response: tuple[int, Mapping[str, str], bytes]) -> tuple[int, list[Any]]:
    """Status and events of a response, or its JSON if it is no event stream."""
    status, headers, body = response
    return status, events(body) if headers["content-type"].startswith("text/event-stream") else [json.loads(body)]
