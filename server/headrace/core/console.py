"""Consoles of the commands: terminals wrap, pipes and files get one line for each row and message."""

from __future__ import annotations

import shlex
import sys

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

# Wider than any line: rich wraps and folds at the width of its console.
PIPE_WIDTH = 1_000_000


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console on standard output or standard error.

    Args:
        stderr: Write to standard error.
        highlight: Colour numbers and paths in plain text.

    Returns:
        A console as wide as the terminal. For a pipe or a file it is `PIPE_WIDTH` wide, whatever `COLUMNS` says.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=highlight, width=None if stream.isatty() else PIPE_WIDTH)


def is_pipe(console: Console) -> bool:
    """Return True for a console of `open_console` that is no terminal. Its tables have one line a row and no bars."""
    return console.width >= PIPE_WIDTH


def fit_title(table: Table, width: int) -> Table:
    """Widen a table to its title, which rich breaks at the width of the rows.

    Args:
        table: Table whose title is text; changed in place.
        width: Of the console, in characters. A terminal's table stays as it is.

    Returns:
        The same table.
    """
    if width >= PIPE_WIDTH:
        table.min_width = max(cell_len(str(text)) for text in (table.title or "", table.caption or ""))
    return table


def pickup_text(model: str, repository: str) -> str:
    """Return what makes a server serve a model whose configuration or engine has changed.

    Args:
        model: Name of the model.
        repository: Folder of its repository.
    """
    return (
        f"To serve it: a running server takes it by itself with --model-control poll; with --model-control explicit by\n"
        f"  curl -X POST http://127.0.0.1:8000/v2/repository/models/{model}/load\n"
        f"else start it again:\n"
        f"  headrace serve --model-repository {shlex.quote(repository)}"
    )
