"""Argument parser and consoles of all commands.

The parser suggests the nearest existing name for an unknown option or command. Terminals wrap text. Pipes and files get one
line for each row and message.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from headrace.core.store_url import StoreUrl, is_store_url, parse_store_url
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '?(?P<word>[^']*?)'? \(choose from (?P<choices>.*)\)", re.DOTALL)


Number = TypeVar("Number", int, float)


def path_or_url(text: str) -> str | StoreUrl:
    """Parse a path, which is returned as it is, or the URL of a store; for the `type` of an argument."""
    if not is_store_url(text):
        return text
    try:
        return parse_store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number_parser(kind: type[Number], is_valid: Callable[[Number], bool], error: str) -> Callable[[str], Number]:
    """Return a parser of one number for the `type` of an argument.

    Args:
        kind: `int` for decimal digits only, or `float`.
        is_valid: returns True for the accepted numbers.
        error: message of the error, after the text.
    """

    def parse(text: str) -> Number:
        try:
            if kind is not int or (text.isascii() and text.isdecimal()):
                number = kind(text)
                if is_valid(number):
                    return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} {error}")

    return parse


positive_count = number_parser(int, lambda number: number >= 1, "is not a whole number of at least 1")
"""Parser of a whole number of at least 1."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the word of `names` that is most similar to `word`; "" if none is similar."""
    return next(iter(difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME?` for the most similar word of `names`; "" if none is similar."""
    match = nearest(word, names)
    return f"did you mean {match}?" if match else ""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors suggest a correction.

    Attributes:
        words: the command line. Set on the class, because argparse creates subparsers of the same class.
    """

    words: ClassVar[Sequence[str]] = ()
    _options: ClassVar[dict[str, set[str]]] = {}

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument as `ArgumentParser` does, and record its options for suggestions."""
        action = super().add_argument(*names, **settings)
        self._options.setdefault(self.prog, set()).update(action.option_strings)
        return action

    def hint(self, option: str) -> str:
        """Return a hint for an unknown option such as "--log-verbose"; "" to suggest an existing option."""
        del option
        return ""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that a word abbreviates; none for a word with a hint, which may mean another unit."""
        if self.hint(option_string.partition("=")[0]):
            return []
        found: list[Any] = super()._get_option_tuples(option_string)
        return found

    def error(self, message: str) -> NoReturn:
        """Print usage and the message with a suggestion, and exit with status 2."""
        self.usage_error(self.explain(message))

    def usage_error(self, message: str) -> NoReturn:
        """Print usage and `message`, and exit with status 2."""
        super().error(message)

    def explain(self, message: str) -> str:
        """Add a suggestion to a message of argparse."""
        unknown, choice = _UNKNOWN.fullmatch(message), _CHOICE.search(message)
        if unknown is not None:
            return self._explain_unknown(unknown[1].split())
        if choice is not None:
            suggestion = did_you_mean(choice["word"], re.findall(r"[\w*.-]+", choice["choices"]))
            return f"{message}: {suggestion}" if suggestion else message
        return message

    def _explain_unknown(self, words: Sequence[str]) -> str:
        """Return a line for each unknown option; words without a dash may be values of the option before them."""
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not options:
            return f"unexpected: {' '.join(words)} (see {self._command()} --help)"
        return "\n  ".join(f"unknown option {option}{self._answer(option)}" for option in options)

    def _answer(self, option: str) -> str:
        names = self._options.get(self._command(), set()) | {"--help"}
        answer = did_you_mean(option, names)
        if hint := self.hint(option):
            return f" {hint}"
        return f": {answer}" if answer else f" ({self._command()} --help lists those there are)"

    def _command(self) -> str:
        """Return program and subcommand, the `prog` of the parser that reads the options."""
        command = self.prog
        for word in self.words:
            if f"{command} {word}" not in self._options:
                break
            command = f"{command} {word}"
        return command


# Wider than any line: rich wraps and folds at the width of its console.
PIPE_WIDTH = 1_000_000


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console on standard output or standard error.

    Args:
        stderr: write to standard error.
        highlight: colour numbers and paths in plain text.

    Returns:
        A console as wide as the terminal. For a pipe or a file it is `PIPE_WIDTH` wide, regardless of `COLUMNS`. Brackets in
        texts are no markup: "[demo]" in an error is printed.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, highlight=highlight, markup=False, width=width)


def is_pipe(console: Console) -> bool:
    """Return True for a console of `open_console` that is not a terminal. Its tables have one line a row and no bars."""
    return console.width >= PIPE_WIDTH


def plain_table(*headings: str) -> Table:
    """Return a table without lines, whose columns wrap."""
    return Table(*(Column(heading, overflow="fold") for heading in headings), box=None, padding=(0, 2, 0, 0))


def fit_title(table: Table, width: int) -> Table:
    """Widen a table to its title, which rich breaks at the width of the rows.

    Args:
        table: table with a title of text; changed in place.
        width: width of the console in characters. The table of a terminal is not changed.

    Returns:
        The same table.
    """
    if width >= PIPE_WIDTH:
        table.min_width = max(cell_len(str(text)) for text in (table.title or "", table.caption or ""))
    return table


def pickup_text(model: str, repository: str) -> str:
    """Return instructions for serving a model whose configuration or engine has changed.

    Args:
        model: name of the model.
        repository: folder of its repository.
    """
    return (
        f"To serve it: a running server loads it automatically with --model-control poll; with --model-control explicit run\n"
        f"  curl -X POST http://127.0.0.1:8000/v2/repository/models/{model}/load\n"
        f"otherwise restart the server:\n"
        f"  headrace serve --model-repository {shlex.quote(repository)}"
    )


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. "1 request", "2 requests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """Text from a server or a file name with control characters, which could drive the terminal, replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def printable_json(text: str) -> str:
    """JSON on one line with characters that could drive the terminal as escapes, which keep their meaning."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
