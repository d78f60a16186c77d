"""The frame of a page: one HTML file that needs nothing else, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryFile

from engines.errors import BuildError
from server.core.svg_plot import variables

_CSS = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;font:16px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
p{margin:.3rem 0}.soft{color:var(--soft)}.soft,small{font-size:.85rem}
svg{display:block;width:100%;height:auto}
.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr))}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.dot{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.35em;vertical-align:-.05em}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.5rem 0;list-style:none}
"""


def page(title: str, body: str, css: str = "") -> str:
    """A whole HTML document.

    Args:
        title: plain text.
        body: HTML.
        css: of this page alone.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing may be fetched and nothing may run, whatever a model's names hold.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{escape(title)}</title><style>{variables()}{_CSS}{css}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of numbers, the first column text, that scrolls by itself where the screen is narrow.

    Args:
        headings: plain text.
        rows: cells, HTML; what is text has been escaped.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def make_folder(path: Path) -> None:
    """Make a folder for pages, and see that it takes files.

    Raises:
        BuildError: it does not; says why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another folder, or make room") from error


def save(path: Path, text: str) -> None:
    """Write a page, a picture or JSON.

    Raises:
        BuildError: the file cannot be written; says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another file, or make room") from error
