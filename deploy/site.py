"""Stages the Markdown of the checkout for MkDocs and builds the documentation site into build/site/; `make site`.

    .venv/bin/python deploy/site.py              # build, strict: a warning is an error
    .venv/bin/python deploy/site.py --stage-only # write build/site-source/ and stop

The site has the same pages as the checkout: README.md is its first page, then docs/ and the guides of the root. Links between
pages keep working in both places, because staging rewrites them. A linked file that is no page, such as a Kubernetes manifest,
is copied to files/ of the site as text.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site-source"
CONFIG = ROOT / "mkdocs.yml"
GUIDES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
FENCE = re.compile(r"^\s*(```|~~~)")

# [text](target) and ![text](target); a target has no spaces and at most one level of parentheses.
_LINK = re.compile(r"(?<=\])\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
_CODE_SPAN = re.compile(r"(`+)(?:(?!\1).)*\1")


def pages() -> list[str]:
    """The Markdown files that become pages, relative to the root of the checkout."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *(name for name in GUIDES if name.endswith(".md")), *docs]


def map_links(text: str, replace: Callable[[str], str]) -> str:
    """Apply a function to the target of every Markdown link outside of code.

    Args:
        text: Markdown.
        replace: returns the new target for a target such as `gpu.md#memory` or `https://example.org`.

    Returns:
        The Markdown with new targets.
    """
    lines, fence = [], ""
    for line in text.split("\n"):
        match = FENCE.match(line)
        if match and fence in ("", match[1]):
            fence = "" if fence else match[1]
        elif not fence and not line.startswith("    "):
            line = _map_line(line, replace)
        lines.append(line)
    return "\n".join(lines)


def _map_line(line: str, replace: Callable[[str], str]) -> str:
    spans = [match.span() for match in _CODE_SPAN.finditer(line)]

    def target(match: re.Match[str]) -> str:
        inside = any(start < match.start() < end for start, end in spans)
        return match[0] if inside else f"({replace(match[1])})"

    return _LINK.sub(target, line)


def site_name(name: str) -> str:
    """Path of a file of the checkout inside the site's source."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name in GUIDES:
        return name if name.endswith(".md") else f"{name}.txt"
    folder, _, base = name.rpartition("/")
    # MkDocs leaves out files whose names begin with a dot.
    return f"files/{folder}/{base.lstrip('.')}.txt"


def stage(destination: Path) -> set[str]:
    """Write the source of the site.

    Args:
        destination: a folder; it is emptied first.

    Returns:
        The files of the checkout that are in it.
    """
    shutil.rmtree(destination, ignore_errors=True)
    written = {*pages(), "LICENSE"}
    for page in pages():
        folder = posixpath.dirname(page)

        def target(link: str, folder: str = folder, page: str = page) -> str:
            path, mark, anchor = link.partition("#")
            if not path or re.match(r"[a-z][a-z0-9+.-]*:", link):
                return link
            name = posixpath.normpath(posixpath.join(folder, path))
            if (ROOT / name).is_file():
                written.add(name)
            return posixpath.relpath(site_name(name), posixpath.dirname(site_name(page)) or ".") + mark + anchor

        text = map_links((ROOT / page).read_text(encoding="utf-8"), target)
        path = destination / site_name(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in written - set(pages()):
        path = destination / site_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation site into build/site/.")
    parser.add_argument("--stage-only", action="store_true", help="write build/site-source/ and stop")
    options = parser.parse_args(arguments)
    print(f"{len(stage(SOURCE))} files staged in {os.path.relpath(SOURCE)}")
    if options.stage_only:
        return 0
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(CONFIG))
    status = subprocess.run(words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    if status == 0:
        print(f"built {os.path.relpath(ROOT / 'build' / 'site' / 'index.html')}")
    return status


if __name__ == "__main__":
    sys.exit(main())
