"""Web pages of the server: static files of this package, which load nothing from other hosts.

Pages show text from untrusted sources: names of models, reasons, labels. Three measures keep such text from becoming a script:
pages have no inline scripts, the Content-Security-Policy forbids them, and Trusted Types reject text that is inserted as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from headrace.http.routes import Route

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Pages change with the version of the server and are small: browsers revalidate them at each visit.
    "cache-control": "no-cache",
}
_METRICS_LINK = b' <a href="metrics">Metrics</a>'
_PAGES = {
    "/": ("index.html", "What the models do, live, and a form to try them; for people"),
    "/docs": ("docs.html", "This page, for people"),
}


def page_routes(metrics: bool) -> Iterator[Route]:
    """List the routes of all pages and of the files that they load.

    Args:
        metrics: True if /metrics is served on the same port; otherwise the link to it is removed.
    """
    for path, (name, summary) in _PAGES.items():
        content = (_FOLDER / name).read_bytes()
        yield _route(path, summary, content if metrics else content.replace(_METRICS_LINK, b""), _MEDIA_TYPES[".html"])
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _MEDIA_TYPES and file.suffix != ".html":
            part = _route(f"/page/{file.name}", "", file.read_bytes(), _MEDIA_TYPES[file.suffix])
            yield replace(part, documented=False)


def _route(path: str, summary: str, content: bytes, media_type: str) -> Route:
    return Route("pages", path, summary, lambda: content, str, media_type=media_type, headers=HEADERS)
