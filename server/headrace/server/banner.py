"""Startup message of `headrace serve`: addresses, models, a command to try; as text or as JSON log lines."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from headrace_reports.command_line import open_console, plural
from rich.table import Table
from rich.text import Text

from headrace.core.tensor import BOOL, BY_CONFIG_NAME, BYTES
from headrace.models.registry import Registry
from headrace.observability.logs import FIELDS
from headrace.server.settings import Settings

logger = logging.getLogger("headrace")

# Of `headrace infer`, if --url is not given.
_DEFAULT_TARGET = "127.0.0.1:8001"


class Addresses(NamedTuple):
    """Addresses of a server.

    Attributes:
        url: URL of HTTP.
        grpc: host and port of gRPC; "" without gRPC.
        metrics: URL of the metrics page.
        access: operations that are open, and to which callers; "" to leave it out.
        has_keys: callers need a key.
        processes: processes of the server and the reason for their number; "" to leave it out.
    """

    url: str
    grpc: str
    metrics: str
    access: str = ""
    has_keys: bool = False
    processes: str = ""


def describe_processes(settings: Settings) -> str:
    """Return the processes of the server, and why `auto` chose them; "" for one process that was not chosen."""
    count, reason = settings.front_ends, settings.front_ends_reason
    ends = f"{count} front {'end' if count == 1 else 'ends'}"
    if reason:
        return f"one, and up to {ends} as the load needs ({reason})" if count else f"one ({reason})"
    return f"an engine and {ends}" if count else ""


def describe_access(settings: Settings, is_loopback: bool) -> str:
    """Return which operations are open, to which callers, and how to close them.

    Args:
        settings: of the server.
        is_loopback: the server is reached from this machine only.
    """
    if settings.api_keys_file or settings.jwks:
        text = "every operation needs a key; health routes and the static files of the page are open"
        if not (is_loopback or settings.tls_cert):
            text += ". Keys travel unencrypted: add --tls-cert and --tls-key, or a proxy that ends TLS"
        return text
    cure = "; keys (--api-keys-file) close it"
    if is_loopback:
        return f"every program on this machine may use every operation{cure}"
    callers = "every client with a certificate" if settings.tls_client_ca else "every client"
    callers += f" that reaches {settings.host or 'this machine'}"
    if settings.insecure_control:
        return (
            f"{callers} may use every operation, also load models and change settings (--insecure-control), without a "
            f"key{cure}"
        )
    return (
        f"{callers} may run models, read and scrape metrics without a key{cure}. Loading models, shared memory, log and trace "
        "settings are closed: --api-keys-file FILE opens them to keys, --insecure-control to every client"
    )


def startup_rows(registry: Registry) -> list[dict[str, str]]:
    """Return the startup table: one row a version, cells by column title, in the order of the columns.

    Args:
        registry: the registry.
    """
    placements = registry.placements()
    rows = []
    for row in registry.index():
        name, number = str(row["name"]), str(row["version"])
        placement = placements.get((name, number), {})
        cells = {title: str(placement.get(title, "")) for title in ("runtime", "device", "precision")}
        note = str(row["reason"] or placement.get("not_on_gpu", ""))
        rows.append({"model": name, "version": number, "state": str(row["state"]), **cells, "note": note})
    return rows


def announce(addresses: Addresses, registry: Registry, first_model: str = "") -> None:
    """Print the models, the addresses and a command to try; lines are folded on terminals only.

    Args:
        addresses: addresses of the server.
        registry: the registry.
        first_model: name of the first model given as a file, for the command to try; "" if there is none.
    """
    url = addresses.url
    console = open_console(highlight=False)
    rows = startup_rows(registry)
    titles = [title for title in rows[0] if title != "note"] if rows else ["model", "version", "state"]
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        texts = {title: Text(row[title]) for title in titles}
        texts["state"].stylize("green" if row["state"] == "READY" else "red")
        table.add_row(*texts.values())
    console.print(table)
    for row in rows:  # below the table: one long reason would widen every row
        if row["note"]:
            console.print(f"{row['model']} {row['version']}: {row['note']}", soft_wrap=True, markup=False)
    ready: set[object] = {row["model"] for row in rows if row["state"] == "READY"}
    failed = {row["model"] for row in rows} - ready
    console.print(f"{plural(len(ready), 'model')} ready" + f", {len(failed)} failed" * bool(failed), markup=False)
    console.print()
    console.print(_addresses_line(addresses), soft_wrap=True, markup=False)
    if addresses.grpc:
        console.print(f"gRPC: {addresses.grpc}", soft_wrap=True, markup=False)
    if addresses.access:
        console.print(f"Access: {addresses.access}.", soft_wrap=True, markup=False)
    if addresses.processes:
        console.print(f"Processes: {addresses.processes}", soft_wrap=True, markup=False)
    line = (
        model_example(url, first_model, registry.config(first_model, ""))
        if first_model in ready
        else example(url, ready)
    )
    if addresses.has_keys:
        line = line.replace("curl ", 'curl -H "Authorization: Bearer $HEADRACE_API_KEY" ')
    console.print("Try:  " + line, soft_wrap=True, markup=False)
    if "efficientnet_lite0" in ready and addresses.grpc:
        command = sys.argv[0] if sys.argv[0].endswith("headrace") else "headrace"
        target = addresses.grpc if url.startswith("http:") else f"grpcs://{addresses.grpc}"
        option = "" if target == _DEFAULT_TARGET else f" --url {target}"
        console.print(f"or:   {command} infer efficientnet_lite0 photo.jpg{option}", soft_wrap=True, markup=False)
    console.print("Ctrl-C stops it.")


def log_announcement(addresses: Addresses, registry: Registry) -> None:
    """Log the startup message: one line for each version with its row of the table, then one with the addresses.

    Args:
        addresses: addresses of the server.
        registry: the registry.
    """
    for row in startup_rows(registry):
        message = f"model {row['model']} version {row['version']} is {row['state']} after start-up"
        logger.info("%s", message, extra={FIELDS: {"event": "startup_model", **row}})
    fields = {
        "event": "listening",
        "http": addresses.url,
        "grpc": addresses.grpc,
        "metrics": addresses.metrics,
        "access": addresses.access,
        "processes": addresses.processes,
    }
    logger.info("%s", _addresses_line(addresses), extra={FIELDS: fields})


def _addresses_line(addresses: Addresses) -> str:
    return f"Headrace listens on {addresses.url}   metrics: {addresses.metrics}   API: {addresses.url}/docs"


def example(url: str, ready: set[object]) -> str:
    """Return a curl command for the simplest demo model, or for the list of models if that is not served.

    Args:
        url: URL of the server.
        ready: names of the models that are READY.
    """
    if "add_sub" not in ready:
        return f"curl -s {url}/v2/models"
    numbers = list(range(16))
    body = {
        "inputs": [
            {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": numbers},
            {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
        ]
    }
    return f"curl -s {url}/v2/models/add_sub/infer -d {shlex.quote(orjson.dumps(body).decode())}"


# Inputs with more elements are sent as binary zeros through a pipe, not as numbers in JSON.
_MAX_JSON_ELEMENTS = 64


def model_example(url: str, name: str, config: Mapping[str, Any]) -> str:
    """Return a curl command for a model, with zeros for its inputs and 1 for each free dimension.

    Args:
        url: URL of the server.
        name: name of the model.
        config: configuration of the model in Triton's JSON.
    """
    batch = [1] if config["max_batch_size"] else []
    inputs: list[dict[str, Any]] = []
    total_bytes = 0
    for tensor in config["input"]:
        datatype = BY_CONFIG_NAME[tensor["data_type"]]
        shape = [*batch, *(max(size, 1) for size in tensor["dims"])]
        elements = math.prod(shape)
        entry: dict[str, Any] = {"name": tensor["name"], "datatype": datatype.name, "shape": shape}
        if datatype is BYTES:
            entry["data"] = ["text"] * elements
        elif elements <= _MAX_JSON_ELEMENTS and datatype.name not in ("FP16", "BF16"):
            entry["data"] = [False if datatype is BOOL else 0] * elements
        else:
            size_bytes = elements * datatype.size_bytes
            entry["parameters"] = {"binary_data_size": size_bytes}
            total_bytes += size_bytes
        inputs.append(entry)
    body = orjson.dumps({"inputs": inputs}).decode()
    target = f"{url}/v2/models/{name}/infer"
    if not total_bytes:
        return f"curl -s {target} -d {shlex.quote(body)}"
    header = f"-H 'Inference-Header-Content-Length: {len(body.encode())}'"
    zeros = f"(printf %s {shlex.quote(body)}; head -c {total_bytes} /dev/zero)"
    return f"{zeros} | curl -s {target} {header} --data-binary @-"
