"""Links of the pages lead somewhere, in the checkout and on the site; the site builds without a warning."""

from __future__ import annotations

import html
import importlib.util
import posixpath
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.serving import ROOT

SCRIPT = ROOT / "deploy" / "site.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headrace_site", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load()
PAGES: list[str] = site.pages()


def links(text: str) -> list[str]:
    """Targets of the links of a page, outside of code."""
    targets: list[str] = []
    site.map_links(text, lambda target: targets.append(target) or target)
    return targets


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the hosts of repositories and the site make them."""
    result: set[str] = set()
    fence = False
    for line in text.splitlines():
        fence ^= bool(site.FENCE.match(line))
        match = re.match(r"#{1,6} (.+)", line)
        if match and not fence:
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            number = 1
            while f"{slug}-{number}" in result:
                number += 1
            result.add(f"{slug}-{number}" if slug in result else slug)
    return result


def faults(page: str, text: str, folder: Path) -> list[str]:
    """Return problems of the links of a page, whose path is relative to a folder."""
    result = []
    for link in links(text):
        address = urllib.parse.urlsplit(link)
        if address.scheme:
            if address.scheme not in ("http", "https", "mailto") or not (
                address.hostname or address.scheme == "mailto"
            ):
                result.append(f"{page}: {link} is no address")
            continue
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), address.path)) if address.path else page
        if not (folder / name).exists():
            result.append(f"{page}: {link}: there is no {name}")
        elif address.fragment and address.fragment not in anchors((folder / name).read_text()):
            result.append(f"{page}: {link}: {name} has no such heading")
    return result


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    assert faults(page, (ROOT / page).read_text(), ROOT) == []


def test_broken_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One\n\n```\n# No heading\n```\n## Two `x.y`\n## Two `x.y`\n")
    good = "[1](b.md#one) [2](b.md#two-xy-1) [3](https://example.org/x_(y)) [4](#a) `[code](none.md)`\n\n    [code](none.md)\n"
    assert faults("a.md", good.replace("#a", "b.md"), tmp_path) == []
    bad = "[1](b.md#no-heading) [2](c.md) [3](https:///x) ![4](c.png)"
    assert len(faults("a.md", bad, tmp_path)) == 4


def test_staged_pages_link_each_other(tmp_path: Path) -> None:
    site.stage(tmp_path)
    staged = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md"))
    assert len(staged) == len(PAGES)
    assert [fault for page in staged for fault in faults(page, (tmp_path / page).read_text(), tmp_path)] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    expected = {site.site_name(page) for page in PAGES if "decisions/" not in page} | {"decisions/index.md"}
    assert named == expected, "add the page to `nav` in mkdocs.yml"


def test_the_index_of_decisions_has_each_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("[0-9]*.md")}
    listed = re.findall(r"^- \[(.+)\]\((\S+)\)$", (folder / "index.md").read_text(), re.M)
    assert sorted((name, f"# {title}") for title, name in listed) == sorted(titles.items())


def test_every_page_of_docs_is_linked_by_the_readme() -> None:
    linked = set(links((ROOT / "README.md").read_text()))
    pages = [page for page in PAGES if page.startswith("docs/") and "decisions/" not in page]
    assert [page for page in pages if not any(link.partition("#")[0] == page for link in linked)] == []


@pytest.mark.slow
def test_the_site_builds_and_has_no_markup_left_over() -> None:
    pytest.importorskip("mkdocs", reason="make site installs it")
    done = subprocess.run([sys.executable, SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    built = ROOT / "build" / "site"
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', (built / "index.html").read_text())
    left = [
        (path.name, text[:200])
        for path in built.rglob("*.html")
        for part in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", path.read_text(), re.DOTALL)
        # A table or a list that the site's Markdown took for text.
        if re.search(r"^\s*(?:\||- |\d+\. |```)", text := html.unescape(re.sub(r"<[^>]+>", "", part)), re.MULTILINE)
    ]
    assert left == []
