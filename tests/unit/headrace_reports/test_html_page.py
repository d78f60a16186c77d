"""Pages of one file."""

from __future__ import annotations

from headrace_reports.html_page import page, table


def test_titles_and_headings_are_text_and_cells_are_html() -> None:
    text = page("<b>", table(("<i>", "n"), [["<em>x</em>", "1"]]), ".own{}")
    assert "<title>&lt;b&gt;</title>" in text
    assert "<th>&lt;i&gt;</th>" in text
    assert "<td><em>x</em></td>" in text
    assert ".own{}" in text
    assert "default-src 'none'" in text
