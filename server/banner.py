"""What `headrace serve` prints when it is ready: where it listens, what it serves, what to type next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import orjson
from rich.console import Console
from rich.table import Table


class Index(Protocol):
    """The registry, as far as the banner goes."""

    def index(self) -> Sequence[Mapping[str, object]]:
        """Every version found, its state and reason."""


class Addresses(NamedTuple):
    """Where a server listens.

    Attributes:
        url: of HTTP.
        grpc: host and port of gRPC, "" without.
        metrics: URL of the page of metrics.
    """

    url: str
    grpc: str
    metrics: str


def announce(addresses: Addresses, registry: Index) -> None:
    """Print the models, the addresses and a line to try."""
    url = addresses.url
    console = Console(highlight=False)
    rows = registry.index()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "version", "state"):
        table.add_column(title)
    for row in rows:
        state = str(row["state"])
        table.add_row(str(row["name"]), str(row["version"]), f"[{'green' if state == 'READY' else 'red'}]{state}[/]")
    console.print(table)
    console.print(
        f"\nHeadrace listens on [bold]{url}[/]   metrics: {addresses.metrics}   API: {url}/docs", soft_wrap=True
    )
    if addresses.grpc:
        console.print(f"gRPC: [bold]{addresses.grpc}[/]", soft_wrap=True)
    ready = {row["name"] for row in rows if row["state"] == "READY"}
    console.print("Try:  " + example(url, ready), soft_wrap=True, markup=False)
    if "efficientnet_lite0" in ready:
        command = sys.argv[0] if sys.argv[0].endswith("headrace") else "headrace"
        console.print(f"or:   {command} infer efficientnet_lite0 photo.jpg", markup=False)
    console.print("Ctrl-C stops it.")


def example(url: str, ready: set[object]) -> str:
    """A curl line: for the simplest demo model, or for readiness where that is not served."""
    if "add_sub" not in ready:
        return f"curl {url}/v2/health/ready"
    numbers = list(range(16))
    body = {
        "inputs": [
            {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": numbers},
            {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
        ]
    }
    return f"curl -s {url}/v2/models/add_sub/infer -d {shlex.quote(orjson.dumps(body).decode())}"
