"""`headrace keys new | list | revoke`: create, list and revoke the keys of clients in a keys file."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from headrace_reports.command_line import open_console, plain_table
from rich.text import Text

from headrace.core.access import Scope
from headrace.core.errors import ConfigError

_DEFAULT_SCOPES = (Scope.INFER, Scope.READ)
_QUOTA = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?::([0-9]+))?")
_DAYS = re.compile(r"([0-9]{1,5})d")
# Digits of the hash by which `list` and `revoke --key` name a key.
_SHOWN_DIGITS = 8


def add_arguments(parser: argparse.ArgumentParser, default_file: str, parse_path: Callable[[str], str]) -> None:
    """Declare the commands and their options.

    Args:
        parser: of `headrace keys`.
        default_file: keys file without --file.
        parse_path: parses the value of --file.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="keys_command")
    new = commands.add_parser("new", help="create a key, and print it once")
    new.add_argument("name", metavar="NAME", help="name of the client; one with a key gets a second one, for rotation")
    text = f"operations of the client; repeatable ({', '.join(_DEFAULT_SCOPES)})"
    new.add_argument("--scope", action="append", choices=[scope.value for scope in Scope], help=text)
    text = "model that the client may use, such as resnet*; repeatable (all)"
    new.add_argument("--model", action="append", metavar="PATTERN", help=text)
    new.add_argument("--quota", metavar="RATE[:BURST]", help="requests per second over the whole server (unlimited)")
    new.add_argument("--expires", metavar="TIME", help="end of the key: 90d, or 2027-01-31 (none)")
    new.add_argument("--certificate", action="append", metavar="NAME", help="name in a client certificate; repeatable")
    lines = commands.add_parser("list", help="list clients, rights and keys")
    revoke = commands.add_parser("revoke", help="revoke all keys of a client, or one of them")
    revoke.add_argument("name", metavar="NAME", help="name of the client")
    revoke.add_argument("--key", metavar="DIGITS", help="only the key whose hash begins with these digits (see list)")
    for command in (new, lines, revoke):
        command.add_argument(
            "--file", type=parse_path, default=default_file, metavar="FILE", help="the keys file (%(default)s)"
        )


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    console = open_console(stderr=True, highlight=False)
    path = Path(args.file).expanduser()
    try:
        return {"new": _new, "list": _list, "revoke": _revoke}[args.keys_command](args, path)
    except (ConfigError, ValueError) as error:
        console.print(f"headrace: {error}", style="red", markup=False)
    except OSError as error:
        console.print(f"headrace: {path}: {error.strerror or error}", style="red", markup=False)
    return 1


# The functions import the reader themselves: it takes longer to import than the other commands, which share this parser, run.


def _new(args: argparse.Namespace, path: Path) -> int:
    from headrace.wire.access.keys_file import editing, key_hash, new_key

    key = new_key()
    entry: dict[str, Any] = {"sha256": key_hash(key).hex(), "created": _text(datetime.now(UTC))}
    if args.expires:
        entry["expires"] = _expiry(args.expires)
    with editing(path) as clients:
        is_known = args.name in clients
        client = clients.setdefault(args.name, {"scopes": [scope.value for scope in _DEFAULT_SCOPES]})
        if args.scope:
            client["scopes"] = list(dict.fromkeys(args.scope))
        if args.model:
            client["models"] = list(dict.fromkeys(args.model))
        if args.quota:
            client["quota"] = _quota(args.quota)
        if args.certificate:
            client["certificates"] = list(dict.fromkeys(args.certificate))
        client.setdefault("keys", []).append(entry)
        count, scopes, models = len(client["keys"]), client["scopes"], client.get("models", ["all models"])
    print(key)  # noqa: T201 - alone on standard output, for scripts
    console = open_console(stderr=True, highlight=False)
    console.print(
        f"The key of {args.name}: {', '.join(scopes)} on {', '.join(models)}. It is not shown again.", markup=False
    )
    if is_known:
        console.print(
            f"{args.name} has {count} keys now. When the new one is in use: headrace keys list, then revoke --key.",
            markup=False,
        )
        if args.scope or args.model or args.quota or args.certificate:
            console.print(f"The rights of all keys of {args.name} have changed, not only of the new one.", markup=False)
    console.print(f"Serve with:  headrace serve --api-keys-file {shlex.quote(str(path))}", markup=False, soft_wrap=True)
    console.print("Send it as:  Authorization: Bearer KEY", markup=False)
    return 0


def _list(args: argparse.Namespace, path: Path) -> int:
    from headrace.wire.access.keys_file import parse_time, read_keys

    keys, warning = read_keys(path)
    console = open_console(highlight=False)
    table = plain_table("client", "scopes", "models", "quota", "keys", "certificates")
    now = datetime.now(UTC)
    for name, client in keys.clients.items():
        quota = client.quota
        rows = []
        for key in client.keys:
            ends = (
                "" if key.expires is None else "expired" if parse_time(key.expires) <= now else f"until {key.expires}"
            )
            rows.append(" ".join(filter(None, (key.sha256[:_SHOWN_DIGITS], ends))))
        cells = (
            name,
            ", ".join(client.scopes),
            ", ".join(client.models) or "all",
            "" if quota is None else f"{quota.requests_per_s:g}/s, burst {quota.burst_size}",
            "\n".join(rows),
            "\n".join(client.certificates),
        )
        table.add_row(*map(Text, cells))
    console.print(table if keys.clients else f"{path} has no clients: headrace keys new NAME", markup=False)
    if warning:
        open_console(stderr=True, highlight=False).print(warning, style="yellow", markup=False)
    return 0


def _revoke(args: argparse.Namespace, path: Path) -> int:
    from headrace.wire.access.keys_file import editing, read_keys

    read_keys(path)  # a missing file is an error, and is not created
    with editing(path) as clients:
        client = clients.get(args.name)
        if client is None:
            raise ValueError(f"{path} has no client {args.name!r}: it has {', '.join(clients) or 'none'}")
        keys = client.get("keys", [])
        if args.key is None:
            del clients[args.name]
            revoked = len(keys)
        else:
            client["keys"] = [key for key in keys if not key["sha256"].startswith(args.key.lower())]
            revoked = len(keys) - len(client["keys"])
            if revoked != 1:
                raise ValueError(
                    f"{revoked} keys of {args.name!r} begin with {args.key!r}: headrace keys list has their digits"
                )
    subject = f"{args.name} and its {revoked} keys" if args.key is None else f"one key of {args.name}"
    console = open_console(stderr=True, highlight=False)
    console.print(
        f"Revoked {subject}. A running server reads the file within a second. Check its log: the line "
        f"'audit: reload keys {path}' ends with 'ok' if it has.",
        markup=False,
    )
    return 0


def _quota(text: str) -> dict[str, object]:
    match = _QUOTA.fullmatch(text)
    if match is None or not float(match[1]):
        raise ValueError(f"--quota {text!r} is not RATE or RATE:BURST, such as 100 or 100:20 (requests per second)")
    return {"requests_per_s": float(match[1]), **({"burst": int(match[2])} if match[2] else {})}


def _expiry(text: str) -> str:
    days = _DAYS.fullmatch(text)
    if days is not None:
        return _text(datetime.now(UTC) + timedelta(days=int(days[1])))
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--expires {text!r} is not a time: write 90d, or 2027-01-31") from None
    return text


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
