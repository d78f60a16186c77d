"""The command line: the commands of the server, such as `headrace serve`, and the commands of the builder."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from headrace_reports.command_line import Parser, open_console
from rich.text import Text

from headrace.core.errors import ConfigError, Unavailable
from headrace.core.heap import use_one_arena
from headrace.core.store_url import StoreUrl
from headrace.server import settings
from headrace.server.commands.connection import ServerAddress
from headrace.server.program import configure_logging, end_process

# Commands of `python -m headrace_engines`.
ENGINES_COMMANDS = {
    "build": "build engines for this machine, compare them with FP32, publish them",
    "inspect": "list the layers of a built engine with precision, kernel and time",
    "compare": "compare a model in several precisions",
    "bisect": "find the first layer of a lower precision that deviates from FP32",
    "optimize": "make a model smaller: channel pruning with distillation",
    "split": "cut a model into parts, each on its own GPU, and the pipeline that joins them",
    "engines": "list, clean and check the store of built engines: ls, gc, verify",
    "import": "import a model of another framework or an ONNX file: torch, keras, savedmodel, onnx",
    "lab": "measure convolution algorithms: conv",
    "models": "models build: build the demo models",
}


def run() -> NoReturn:
    """Run the command of this process, and end the process with its status."""
    end_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words of the command line; None for those of the process.

    Returns:
        The exit status.
    """
    settings.disable_ort_telemetry()
    # The server never imports the builder: its commands replace this process, with the unchanged command line.
    words = list(sys.argv[1:] if arguments is None else arguments)
    if warning := settings.ensure_home():
        if settings.is_json_log(words):
            configure_logging("json")
        logging.getLogger("headrace").warning("%s", warning)
    if words[:1] and words[0] in ENGINES_COMMANDS:
        # One process, so that signals and the exit status need no forwarding.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "headrace_engines", *settings.with_state(words)])
    try:
        if words[:1] and words[0].endswith(".onnx"):
            raise ValueError(f"{words[0]!r} is not a command: did you mean headrace serve {shlex.join(words)}?")
        if words[:1] == ["health"]:
            return _health(words[1:])
        Parser.words = words
        args = _parser().parse_args(words)
    except ValueError as error:
        _print_usage_error(str(error), words)
        return 2
    status: int = args.run(args)
    return status


class _Parser(Parser):
    """A parser that prints errors as JSON if the log is JSON, and explains flags of tritonserver and earlier ones."""

    def hint(self, option: str) -> str:
        """Return the explanation of an option that the command does not accept; "" without one."""
        return settings.option_hint(self.words[0], option) if self.words else ""

    def usage_error(self, message: str) -> NoReturn:
        """Print usage and message and exit with status 2."""
        if settings.is_json_log(self.words):
            _print_usage_error(message, self.words)
            self.exit(2)
        super().usage_error(message)


def _print_usage_error(message: str, arguments: Sequence[str]) -> None:
    if settings.is_json_log(arguments):
        configure_logging("json")
        logging.getLogger("headrace").error("%s", message)
        return
    open_console(stderr=True, highlight=False).print(f"headrace: {message}", style="red", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headrace", description="An inference server for folders of models.")
    parser.add_argument("--version", action="version", version=version("headrace"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model repository")
    settings.add_arguments(serve)
    serve.set_defaults(run=_serve)

    commands.add_parser("health", help="exit status 0 while a server is ready")

    _add_validate(commands)
    _add_proof(commands)
    from headrace.inference.simulation import options as simulation
    from headrace.server.commands import explain as explain_command
    from headrace.server.commands import infer as infer_command

    infer = commands.add_parser("infer", help="send pictures or tensors to a running server")
    address = _server_address()
    infer_command.add_arguments(infer, settings.api_key(), address)
    infer.set_defaults(run=infer_command.main)

    explain = commands.add_parser("explain", help="what limits a model of a running server now")
    explain_command.add_arguments(explain, settings.api_key(), address)
    explain.set_defaults(run=explain_command.main)

    from headrace_bench import options as bench_options

    bench = commands.add_parser("bench", help="put load on a running server and measure it")
    bench_options.add_arguments(bench, settings.api_key(), address)
    bench.set_defaults(run=partial(_import_and_run, "headrace_bench.command"))

    simulate = commands.add_parser("simulate", help="replay a load against a policy in virtual time")
    simulation.add_arguments(simulate)
    _read_stores(simulate, partial(_import_and_run, "headrace.server.commands.simulate"))

    from headrace.server.commands import tune as tune_command

    tune = commands.add_parser("tune", help="try numbers of instances and batch sizes of a model")
    tune_command.add_arguments(tune)
    _read_stores(tune, tune_command.main)

    _add_administration(commands)
    for name, text in ENGINES_COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def _add_administration(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Declare the commands that need no server: keys, checksums, backends and environments."""
    from headrace.server.commands import checksums as checksums_command
    from headrace.server.commands import keys as keys_command

    keys = commands.add_parser("keys", help="create, list and revoke the keys of clients")
    keys_command.add_arguments(keys, settings.default_keys_file(), settings.expandable_path)
    keys.set_defaults(run=keys_command.main)

    checksums = commands.add_parser("checksums", help="write, sign and verify the checksums of models")
    checksums_command.add_arguments(checksums, settings.add_model_keys)
    checksums.set_defaults(run=checksums_command.main)

    backends = commands.add_parser("backends", help="list the backends and what is installed for them")
    backends.add_argument("--json", action="store_true", help="print JSON")
    backends.set_defaults(run=partial(_import_and_run, "headrace.server.commands.backends"))

    from headrace.server.commands import environments as environments_command

    environments = commands.add_parser("environments", help="list and remove Python environments of models")
    environments_command.add_arguments(environments, (settings.add_state, settings.add_environments))
    environments.set_defaults(run=environments_command.main)


def _serve(args: argparse.Namespace) -> int:
    options = settings.from_arguments(args)
    # A handler, because processes of models would inherit an ignored signal.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    if not settings.configures_malloc():
        use_one_arena()
    try:
        configure_logging(options.log_format)
    except Unavailable as error:
        open_console(stderr=True, highlight=False).print(f"headrace: {error}", style="red", markup=False)
        return 1
    from headrace.config.documents import refuse
    from headrace.models.folders import open_paths
    from headrace.models.stores.cache import open_mirrors

    paths = [path for path in args.path if isinstance(path, Path)]
    mirrors = open_mirrors(settings.repository_locations(args), settings.repository_cache(options))
    try:
        with open_paths(paths, options.state_dir, options.model_name) as served, mirrors as folders:
            options = replace(
                options,
                model_repository=(*folders, *served.repositories),
                stores=tuple((str(folder), str(url)) for folder, url in folders.items() if url is not None),
            )
            if options.front_ends == settings.AUTO:
                from headrace.server.front_ends.process_count import available_cores, choose_front_ends, memory_limit

                count, reason = choose_front_ends(available_cores(), memory_bytes=memory_limit())
                options = replace(options, front_ends=count, front_ends_reason=reason)
            if options.front_ends:
                if sys.platform != "linux":
                    message, cure = "needs Linux", "leave it out: one process serves everything"
                    raise refuse(f"--front-ends {options.front_ends}", None, message, cure)
                from headrace.server.front_ends.supervisor import ServerSupervisor

                return ServerSupervisor(options, served.model_filter, served.first_model).run()
            from headrace.server.app import HeadraceServer
            from headrace.server.banner import announce, log_announcement

            text = partial(announce, first_model=served.first_model)
            return HeadraceServer(
                options, log_announcement if options.log_format == "json" else text, served.model_filter
            ).run()
    except ConfigError as error:
        logging.getLogger("headrace").error("%s", error)
        return 1


def _health(arguments: Sequence[str]) -> int:
    """Run `health` without the libraries of the other commands, whose import takes longer than the server's response."""
    from headrace.server.commands import health as health_command

    return health_command.main(arguments, _server_address(), settings.api_key())


def _server_address() -> ServerAddress:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    served = settings.from_arguments(parser.parse_args([]))
    url = settings.server_url()
    return ServerAddress(served.host, served.http_port, served.tls_cert, served.grpc_port, url)


def _add_validate(commands: argparse._SubParsersAction[_Parser]) -> None:
    validate = commands.add_parser("validate", help="check a model repository without serving it")
    text = "a model repository or its URL, the folder of one model, or an ONNX file"
    validate.add_argument("path", nargs="+", type=settings.repository_location, help=text)
    text = "load the models as the server does, in a process of its own (on); --no-load only reads their files"
    validate.add_argument("--load", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "fail, as serve --strict does, where the CPU serves a model that requires a GPU"
    validate.add_argument("--strict", action="store_true", help=text)
    settings.add_environments(validate)
    settings.add_model_keys(validate)
    _read_stores(validate, _validate)


def _add_proof(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "run a batch again that gave a row other outputs than the row alone has; exit status 1 if it does so again"
    proof = commands.add_parser("proof", help=text)
    proof.add_argument("model", type=Path, help="folder of the model")
    settings.add_state(proof)
    proof.set_defaults(run=_proof)


def _proof(args: argparse.Namespace) -> int:
    from headrace.server.commands import validate

    return validate.repeat_difference(args.model, args.state_dir, open_console(highlight=False))


def _read_stores(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    """Declare the options of a command that reads repositories, also those in stores."""
    settings.add_state(parser)
    settings.add_repository_cache(parser)
    parser.set_defaults(run=partial(_run_on_copies, command))


def _run_on_copies(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command that reads repositories, those with a URL from local copies."""
    is_list = "path" in args
    locations = args.path if is_list else [args.model_repository]
    if not any(isinstance(location, StoreUrl) for location in locations):
        return command(args)
    errors = open_console(stderr=True, highlight=False)
    if getattr(args, "apply", False):
        text = f"--apply changes a local configuration, {args.model_repository} is in a store"
        errors.print(Text(f"headrace tune: {text}: leave it out, and write the change into the store"), soft_wrap=True)
        return 2
    from headrace.models.stores.sync import local_copies

    cache, bound_bytes = settings.repository_cache(args), args.repository_cache_bytes
    try:
        with local_copies(locations, cache, bound_bytes, settings.store_hosts()) as folders:
            values = {**vars(args), **({"path": folders} if is_list else {"model_repository": folders[0]})}
            return command(argparse.Namespace(**values))
    except ConfigError as error:
        for finding in error.findings:
            errors.print(Text(str(finding)), soft_wrap=True)
        return 1


def _validate(args: argparse.Namespace) -> int:
    from headrace.server.commands import validate

    folders_used = (args.state_dir, args.environments_dir, args.model_keys_file)
    try:
        return validate.main(args.path, open_console(), args.load, args.strict, *folders_used)
    except ConfigError as error:  # the keys cannot be read
        open_console(stderr=True, highlight=False).print(Text(f"headrace: {error}"), soft_wrap=True)
        return 1


def _import_and_run(module: str, args: argparse.Namespace) -> int:
    """Run the command of a module whose libraries the other commands do not need."""
    status: int = import_module(module).main(args)
    return status


if __name__ == "__main__":
    run()
