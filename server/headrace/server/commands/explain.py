"""`headrace explain MODEL`: prints what limits a model of a running server, and the setting that would help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from headrace_reports.command_line import open_console, printable, printable_json
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from headrace.core.errors import BadRequest, HeadraceError, ModelFailed
from headrace.server.commands.connection import (
    DEFAULT_ADDRESS,
    ConnectionOptions,
    ServerAddress,
    explained_request,
    host_of,
    model_path,
)
from headrace.server.commands.connection import (
    add_arguments as add_connection_arguments,
)

_TIMEOUT_S = 60.0

# Numbers to print: JSON key -> unit, and the divisor that converts the server's value to that unit.
_SHOWN = {
    "requests_per_s": ("requests/s", 1),
    "rows_per_batch": ("rows a batch", 1),
    "busy": ("% busy", 0.01),
    "queue_us": ("ms in the queue", 1000),
    "compute_us": ("ms computing", 1000),
    "total_us": ("ms in all", 1000),
    "p99_us": ("ms p99", 1000),
}


def add_arguments(parser: argparse.ArgumentParser, api_key: str = "", address: ServerAddress = DEFAULT_ADDRESS) -> None:
    """Declare the command's options; `api_key` is the value of HEADRACE_API_KEY, `address` that of the server."""
    add = parser.add_argument
    add("model", help="name of the model")
    add("--url", default=address.url, help="the server's address (%(default)s)")
    add("--model-version", default="", metavar="N", help="version of the model (the one the server chooses)")
    add("--json", action="store_true", help="print JSON")
    add_connection_arguments(parser, api_key)


def main(args: argparse.Namespace, console: Console | None = None, errors: Console | None = None) -> int:
    """Fetch the explanation of a model and print it.

    Args:
        args: options of `add_arguments`.
        console: output of the explanation; None uses standard output.
        errors: output of an error; None uses standard error.

    Returns:
        0, or 1 if the server returned an error or cannot be reached.
    """
    console = console or open_console(highlight=False)
    errors = errors or open_console(stderr=True, highlight=False)
    try:
        options = ConnectionOptions.from_arguments(args)
        document = fetch(args.url, args.model, args.model_version, options=options, warn=partial(_warn, errors))
    except HeadraceError as error:
        errors.print(Text.assemble(("headrace explain: ", "bold red"), printable(str(error))), soft_wrap=True)
        return 1
    if args.json:
        console.print(printable_json(orjson.dumps(document).decode()), markup=False, soft_wrap=True)
        return 0
    title = f"{document.get('name', args.model)}, version {document.get('version', '')}"
    console.print(Text(printable(title), style="bold"))
    _findings(console, document.get("findings", ()))
    _numbers(console, document.get("numbers", {}))
    _cache(console, document.get("cache"))
    _padding(console, document.get("padding"))
    _batches(console, document.get("batches"))
    _sequences(console, document.get("sequences"))
    _traffic(console, document.get("traffic"))
    return 0


def fetch(
    url: str,
    model: str,
    version: str = "",
    timeout_s: float = _TIMEOUT_S,
    options: ConnectionOptions | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fetch the explanation of a model from a server.

    Args:
        url: HTTP address of the server, e.g. "http://127.0.0.1:8000".
        model: name of the model.
        version: version of the model; "" lets the server choose.
        timeout_s: for connecting, and for every wait for bytes.
        options: TLS files and key of the client; None for neither.
        warn: is called with a warning if the key travels without TLS to another machine.

    Returns:
        The JSON object of `GET /v2/models/MODEL/explain`.

    Raises:
        BadRequest: the URL is wrong.
        Unavailable: no server listens there, or it does not answer in time.
        HeadraceError: the server returns an error.
        ModelFailed: the response is not a JSON object.
    """
    options = options or ConnectionOptions()
    try:
        host, is_tls = host_of(url)
        if not is_tls and (warning := options.clear_text_warning(host)):
            warn(warning)
        start = "start one with `headrace serve` (or `make serve`), or name its address with --url"
        status, body = explained_request(url, model_path(model, version) + "/explain", timeout_s, options, start=start)
    except ValueError as error:
        raise BadRequest(f"the URL {url!r} is wrong ({error}): write it like {DEFAULT_ADDRESS.url}") from None
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and status == 200:
        return document
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        cure = options.refusal_cure(status, host)
        raise HeadraceError(f"the server returned {status}: {document['error']}" + (f"; {cure}" if cure else ""))
    start = body[:200].decode("utf-8", "replace").strip() or "no text"
    raise ModelFailed(
        f"the response is {status} {start}, expected a JSON object: check that the URL is that of a V2 inference server"
    )


def _warn(errors: Console, warning: str) -> None:
    errors.print(Text.assemble(("warning: ", "yellow"), printable(warning)), soft_wrap=True)


def _findings(console: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    for finding in findings:
        kind = (printable(str(finding["kind"])), "bold yellow")
        console.print(Text.assemble(kind, ": ", printable(finding["explanation"])))
        setting = f" [{finding['setting']}]" if finding.get("setting") else ""
        for label, text in (("cure", f"{finding.get('cure', '')}{setting}"), ("expected", finding.get("expected", ""))):
            if text:
                line = Text.assemble((f"{label}: ", "green"), printable(text))
                console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _cache(console: Console, cache: object) -> None:
    """Print the state of the response cache; prints nothing without one."""
    if isinstance(cache, Mapping):
        console.print(Text(printable(f"response cache {cache.get('state')}: {cache.get('reason')}"), style="dim"))
        redis = cache.get("redis")
        if isinstance(redis, Mapping):
            tls = f" ({redis['tls']})" if redis.get("tls") else ""
            state = "is used" if redis.get("is_up") else f"is not used: {redis.get('problem')}"
            console.print(Text(printable(f"Redis at {redis.get('address')}{tls} {state}"), style="dim"))


def _batches(console: Console, batches: object) -> None:
    """Print the proven batch sizes; prints nothing for a model that was not tested."""
    if isinstance(batches, Mapping):
        sizes = ", ".join(map(str, batches.get("verified_batches", ()))) or "none"
        text = f"batches {batches.get('state')}: {sizes} rows verified"
        reason = f"; {batches['reason']}" if batches.get("reason") else ""
        console.print(Text(printable(text + reason), style="dim"))


def _padding(console: Console, padding: object) -> None:
    """Print the state of padding; prints nothing for a model without `pad`."""
    if isinstance(padding, Mapping):
        console.print(Text(printable(f"padding {padding.get('state')}: {padding.get('reason')}"), style="dim"))


def _sequences(console: Console, sequences: object) -> None:
    """Print sequences and slots; prints nothing for a model without sequences."""
    if isinstance(sequences, Mapping):
        slots = f"{sequences.get('used')} of {sequences.get('slots')} slots in use"
        parts = [f"{sequences.get('live')} live", slots, f"{sequences.get('backlog')} in the backlog"]
        for title, name in (("ended", "ends"), ("refused requests", "refusals")):
            counts = sequences.get(name)
            shown = (
                [f"{reason} {count}" for reason, count in counts.items() if count]
                if isinstance(counts, Mapping)
                else []
            )
            if shown:
                parts.append(f"{title}: {', '.join(shown)}")
        console.print(Text(printable(f"sequences: {'; '.join(parts)}"), style="dim"))


def _traffic(console: Console, traffic: object) -> None:
    """Print state, share and figures of each version and other model; prints nothing for a model without `traffic`."""
    versions = traffic.get("versions") if isinstance(traffic, Mapping) else None
    for version in versions if isinstance(versions, list) else ():
        state, percent = str(version.get("state")).replace("_", " "), 100 * version.get("share", 0)
        parts = [f"{state}, {percent:g}% of the traffic"]
        parts.append(f"{version.get('routed')} requests")
        if version.get("errors"):
            parts.append(f"{version['errors']} errors")
        if version.get("p99_ms") is not None:
            parts.append(f"p99 {version['p99_ms']:.3g} ms")
        if version.get("agreement") is not None:
            parts.append(f"agreement {version['agreement']:.2%}, largest difference {version.get('max_difference')}")
        for label, name in (
            ("undone" if state == "undone" else "no requests", "reason"),
            ("not promoted", "promotion"),
        ):
            if version.get(name):
                parts.append(f"{label}: {version[name]}")
        target = str(version.get("version"))
        subject = f"model {target[6:]}" if target.startswith("model:") else f"version {target}"
        console.print(Text(printable(f"traffic, {subject}: {'; '.join(parts)}"), style="dim"))


def _numbers(console: Console, numbers: Mapping[str, Any]) -> None:
    figures = [
        f"{numbers[name] / divisor:,.4g} {unit}"
        for name, (unit, divisor) in _SHOWN.items()
        if isinstance(numbers.get(name), int | float)
    ]
    closed = numbers.get("closed")
    if isinstance(closed, Mapping) and closed:
        total = sum(closed.values())
        figures.append("closed: " + ", ".join(f"{reason} {count / total:.0%}" for reason, count in closed.items()))
    if figures:
        console.print(Text(printable(f"last {numbers.get('seconds', 0):g} s: " + ", ".join(figures)), style="dim"))
