"""`headrace checksums write | verify | new-key`: write, sign and verify the checksums of models."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace_reports.command_line import open_console, plural

from headrace.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser, add_model_keys: Callable[[argparse.ArgumentParser], None]) -> None:
    """Declare the commands and their options.

    Args:
        parser: of `headrace checksums`.
        add_model_keys: declares the option with the public keys.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="checksums_command")
    write = commands.add_parser("write", help="write SHA256SUMS of models, and sign it")
    write.add_argument("--secret-key", type=Path, metavar="FILE", help="sign with this minisign secret key")
    write.add_argument(
        "--model-name", metavar="NAME", help="sign one model for another name than that of its folder (the folder's)"
    )
    verify = commands.add_parser("verify", help="compare the files of models with SHA256SUMS, as the server does")
    add_model_keys(verify)
    for command in (write, verify):
        command.add_argument("path", nargs="+", type=Path, help="the folder of a model, or a model repository")
    new_key = commands.add_parser("new-key", help="create a key pair: NAME.key, which is secret, and NAME.pub")
    new_key.add_argument("name", type=Path, metavar="NAME", help="path of both files without suffix")
    new_key.add_argument("--no-password", action="store_true", help="do not encrypt the secret key")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    errors = open_console(stderr=True, highlight=False)
    try:
        if args.checksums_command == "new-key":
            return _new_key(args)
        folders = list(_model_folders(args.path))
        return _write(args, folders) if args.checksums_command == "write" else _verify(args, folders)
    except (ConfigError, ValueError) as error:
        errors.print(f"headrace: {error}", style="red", markup=False, soft_wrap=True)
    except OSError as error:
        errors.print(f"headrace: {error.filename}: {error.strerror or error}", style="red", markup=False)
    return 1


# The functions import the readers themselves: they take longer to import than the other commands, which share this parser, run.


def _model_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the absolute folders of all models in paths."""
    from headrace.models.folders import folders, is_model_folder

    for path in paths:
        absolute = path.absolute()
        if is_model_folder(absolute):
            yield absolute
            continue
        models, _ = folders(absolute)
        if not models:
            raise ValueError(f"{path} has no models: name the folder of a model, or a model repository")
        yield from models


def _write(args: argparse.Namespace, folders: Sequence[Path]) -> int:
    from headrace.models.integrity.checksums import CHECKSUMS, write_checksums
    from headrace.models.integrity.signatures import read_secret_key, sign_checksums

    if args.model_name and len(folders) != 1:
        raise ValueError(f"--model-name names one model, and there are {len(folders)}: name the folder of one model")
    key = None
    if args.secret_key is not None:
        key = read_secret_key(args.secret_key, lambda: getpass.getpass(f"Password of {args.secret_key}: "))
    console = open_console(highlight=False)
    for folder in folders:
        content = write_checksums(folder)
        signed = ""
        if key is not None:
            name = args.model_name or folder.name
            sign_checksums(folder, content, key, name)
            signed = f", signed for the model {name}"
        files = plural(content.count(b"\n"), "file")
        console.print(f"{folder / CHECKSUMS}: {files}{signed}", markup=False, soft_wrap=True)
    return 0


def _verify(args: argparse.Namespace, folders: Sequence[Path]) -> int:
    from headrace.models.integrity.checksums import CHECKSUMS
    from headrace.models.integrity.verified_copy import open_verifier

    verifier = open_verifier(args.model_keys_file, None)
    console, errors = open_console(highlight=False), open_console(stderr=True, highlight=False)
    failed = 0
    for folder in folders:
        try:
            result = verifier.check(folder, folder.parent)
        except ConfigError as error:
            failed += 1
            errors.print(str(error), style="red", markup=False, soft_wrap=True)
            continue
        if result is None:
            failed += 1
            errors.print(f"{folder.name}: has no {CHECKSUMS}", style="red", markup=False, soft_wrap=True)
            continue
        count, key = result
        signed = f", signed with the key {key}" if key else ""
        console.print(f"OK {folder.name}: {plural(count, 'file')}{signed}", markup=False, soft_wrap=True)
    return 1 if failed else 0


def _new_key(args: argparse.Namespace) -> int:
    from headrace.models.integrity.signatures import create_key_pair

    password = ""
    if not args.no_password:
        password = getpass.getpass("Password of the new key: ")
        if not password:
            raise ValueError("the password is empty: write --no-password for a key without one")
        if getpass.getpass("Password again: ") != password:
            raise ValueError("the passwords differ: run the command again")
    secret, public = create_key_pair(args.name, password)
    console = open_console(stderr=True, highlight=False)
    console.print(f"Keep {secret} secret, and serve with --model-keys-file {public}", markup=False, soft_wrap=True)
    return 0
