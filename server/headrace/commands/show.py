"""Answers on a terminal: wide or narrow, with colours or without, with block characters or plain ASCII."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.commands.pictures import Classified, RankedClass
from headrace.commands.tensor_files import AnyArray
from headrace.core.clock import NS_PER_MS

_EIGHTHS = " ▏▎▍▌▋▊▉"
_MAX_BAR, _MIN_BAR = 40, 4
_MAX_LABEL = 40
_FIRST_VALUES = 4


def printable(text: str) -> str:
    """Text from a server or a file name with control characters, which could drive the terminal, replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def classes(console: Console, results: Sequence[Classified]) -> None:
    """Each picture's file name, and its classes with a bar for each.

    Scores between 0 and 1 that add up to no more than 1 are probabilities: they are shown in percent, the bar from 0 to 1.
    Others are shown as they are, the bar in proportion to the picture's best.
    """
    percent = all(_are_probabilities([c.score for c in result.classes]) for result in results)
    for result in results:
        console.print(Text(_fit_encoding(console, printable(result.file)), style="bold"), soft_wrap=True)
        ratios = [c.score for c in result.classes] if percent else _ratios([c.score for c in result.classes])
        scores = [f"{c.score:.1%}" if percent else f"{c.score:.3f}" for c in result.classes]
        for line in _lines(console, [_label(console, c) for c in result.classes], scores, ratios):
            console.print(line, no_wrap=True, overflow="crop")


def times(console: Console, pictures: int, requests: int, total_ns: int, server_ns: int | None) -> None:
    """One line: how much was sent and how long it took.

    Args:
        console: where to.
        pictures: how many, 0 if tensors were sent.
        requests: how many.
        total_ns: from the first question to the last answer, pre-processing included.
        server_ns: of it in the server, None if it is not known.
    """
    what = (
        f"{_plural(pictures, 'picture')} in {_plural(requests, 'request')}"
        if pictures
        else _plural(requests, "request")
    )
    server = "" if server_ns is None else f", {server_ns / NS_PER_MS:.1f} ms of it in the server"
    console.print(Text(f"{what}: {total_ns / NS_PER_MS:.1f} ms{server}", style="dim"), soft_wrap=True)


def tensors(console: Console, outputs: Mapping[str, AnyArray], datatypes: Mapping[str, str]) -> None:
    """Datatype, shape, range and first values of every output.

    Args:
        console: where to.
        outputs: arrays by name.
        datatypes: the protocol's name of each output's datatype.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("output", "datatype", "shape", "min", "mean", "max", "first values"):
        table.add_column(title, overflow="fold")
    for name, array in outputs.items():
        datatype = datatypes[name]
        if datatype == "BF16":  # NumPy's functions of statistics do not take it
            array = array.astype(np.float32)
        numbers = array.astype(np.float64) if array.size and array.dtype.kind in "fiub" else None
        spread = (
            ["", "", ""]
            if numbers is None
            else [f"{v:.6g}" for v in (np.min(numbers), np.mean(numbers), np.max(numbers))]
        )
        first = " ".join(_value(value) for value in array.ravel()[:_FIRST_VALUES].tolist())
        more = " ..." if array.size > _FIRST_VALUES else ""
        cells = [printable(name), datatype, str(list(array.shape)), *spread, first + more]
        table.add_row(*(Text(_fit_encoding(console, cell)) for cell in cells))
    console.print(table)


def plain(array: AnyArray, datatype: str) -> dict[str, Any]:
    """An output for JSON: datatype, shape, and its elements as a flat list; bytes as text, BF16 as its bits."""
    elements = (array.view(np.uint16) if datatype == "BF16" else array).ravel().tolist()
    if array.dtype == object:
        elements = [element.decode("utf-8", "replace") for element in elements]
    return {"datatype": datatype, "shape": list(array.shape), "data": elements}


def bar(ratio: float, width: int, ascii_only: bool = False) -> str:
    """A bar of `ratio` of `width` cells, to an eighth of a cell, padded with blanks."""
    ratio = min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else 0.0
    if ascii_only:
        return ("#" * round(ratio * width)).ljust(width)
    full, eighths = divmod(round(ratio * width * 8), 8)
    return ("█" * full + _EIGHTHS[eighths].strip()).ljust(width)


def _lines(console: Console, labels: list[str], scores: list[str], ratios: list[float]) -> list[Text]:
    """Lines "  label  bar  score" that fit the console; the bar goes first where it is narrow."""
    score_width = max((len(score) for score in scores), default=0)
    room = console.width - 2 - 1 - score_width
    label_width = min(max((cell_len(label) for label in labels), default=0), _MAX_LABEL)
    bar_width = min(room - label_width - 1, _MAX_BAR)
    if bar_width < _MIN_BAR:
        bar_width = _MIN_BAR if room >= 3 * _MIN_BAR else 0
        label_width = min(label_width, max(room - bar_width - (1 if bar_width else 0), 1))
    ascii_only = console.options.ascii_only
    lines: list[Text] = []
    for label, score, ratio in zip(labels, scores, ratios, strict=True):
        name = Text(label)
        name.truncate(label_width, overflow="crop" if ascii_only else "ellipsis", pad=True)
        drawn = Text(bar(ratio, bar_width, ascii_only) + " " if bar_width else "", style="cyan")
        lines.append(Text.assemble("  ", name, " ", drawn, score.rjust(score_width)))
    return lines


def _label(console: Console, ranked: RankedClass) -> str:
    return _fit_encoding(console, printable(ranked.label or f"class {ranked.index}"))


def _fit_encoding(console: Console, text: str) -> str:
    """The text, with "?" for what a terminal or pipe of another encoding cannot show."""
    return text.encode(console.encoding, "replace").decode(console.encoding)


def _are_probabilities(scores: Sequence[float]) -> bool:
    return all(0.0 <= score <= 1.0 for score in scores) and sum(scores) <= 1.0001


def _ratios(scores: Sequence[float]) -> list[float]:
    """Each score in proportion to the best; of negative ones the best is the one closest to 0."""
    best = max(scores, default=0.0)
    if best > 0:
        return [score / best for score in scores]
    return [best / score if score else 1.0 for score in scores]


def _value(value: object) -> str:
    if isinstance(value, bytes):
        return repr(value.decode("utf-8", "replace"))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
