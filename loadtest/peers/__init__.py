"""Servers to compare with. Each listens on 127.0.0.1 and exits 0 on SIGTERM; those of HTTP answer GET / with 200 once ready."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

import uvicorn


def port_parser() -> argparse.ArgumentParser:
    """A parser with the option that every peer takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    return parser


def serve(app: Any, port: int, *, server_headers: bool = True) -> None:
    """Run an ASGI application on uvicorn with uvloop and httptools, without an access log, until SIGTERM.

    Args:
        app: the application.
        port: on the loopback address.
        server_headers: whether answers carry `server` and `date`, as they do by default in uvicorn.
    """
    # uvicorn raises the signal again after its shutdown; without a handler of ours the exit status would be -15.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        server_header=server_headers,
        date_header=server_headers,
    )
