"""Tables for terminals: where there is no room, what matters least goes, and a row's name is the last that is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from server.core.console import PIPE_WIDTH, fit_title

_GAP = 3


@dataclass(frozen=True, slots=True)
class Heading:
    """A column.

    Attributes:
        text: above it.
        number: to the right.
        wraps: its text may break between words.
        rank: columns with the highest go first where there is no room; 0: it stays.
    """

    text: str
    number: bool = False
    wraps: bool = False
    rank: int = 0


def narrow_table(title: str, headings: Sequence[Heading], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """A table that is `width` characters wide at most, without columns in which no row tells anything.

    Where it is too wide, the gaps shrink, then columns go by rank. A name in the first column stays whole up to half of the
    width.

    Args:
        title: above it.
        headings: the columns; the first one names the row.
        rows: as many cells as there are columns; a cell may have several lines.
        width: of the console; in a pipe's a cell has one line.
    """
    if width >= PIPE_WIDTH:
        rows = [[Text(", ").join(cell.split("\n")) for cell in row] for row in rows]
    shown = [column for column in range(len(headings)) if any(row[column].plain for row in rows)]
    least = [_widest(heading, [row[i] for row in rows], heading.wraps) for i, heading in enumerate(headings)]
    most = [_widest(heading, [row[i] for row in rows], False) for i, heading in enumerate(headings)]
    least[0] = min(least[0], width // 2)
    gap = _GAP
    while (spare := width - sum(least[column] + gap for column in shown) + gap) < 0:
        expendable = max(shown, key=lambda column: headings[column].rank)
        if gap > 1:
            gap -= 1
        elif headings[expendable].rank:
            shown.remove(expendable)
        else:
            break
    # The box draws one of the gap's characters.
    table = Table(title=Text(title, "bold"), box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.padding = (0, gap - 1, 0, 0)
    table.title_justify = table.caption_justify = "left"
    for column in shown:
        more = min(max(spare, 0), most[column] - least[column])
        spare -= more
        justify = "right" if headings[column].number else "left"
        table.add_column(headings[column].text, justify=justify, overflow="fold", max_width=least[column] + more)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(row[column] for column in shown))
    return fit_title(table, width)


def _widest(heading: Heading, cells: Sequence[Text], words: bool) -> int:
    texts = [heading.text, *(cell.plain for cell in cells)]
    return max(cell_len(piece) for text in texts for piece in (text.split() if words else text.split("\n")) or [""])
