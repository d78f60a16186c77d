"""`python -m tests.support.public_score`: writes the score of public configurations into docs/from-triton.md.

The verdicts are those of tests/support/public_configs.py, which tests/e2e/test_public_configs.py compares with a server.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.public_configs import PUBLIC_CONFIGS, Kind, PublicConfig

PAGE = Path(__file__).parents[2] / "docs" / "from-triton.md"
PENDING: dict[Kind, str] = {}
"""Kinds of models that are not served yet, with a part of the finding."""
_BEGIN = "<!-- score of public configurations: written by `make docs` -->\n"
_END = "<!-- end of the score -->\n"
_KINDS: dict[Kind, str] = {
    "onnx": "ONNX model", "python": "Python model", "ensemble": "ensemble", "decoupled": "decoupled model",
    "sequence": "sequences", "iterative": "iterative sequences",
}  # fmt: skip


def verdict(config: PublicConfig) -> str:
    """Return "served", "refused" or "not yet"."""
    return "refused" if config.refused else "not yet" if config.kind in PENDING else "served"


def score() -> str:
    """Return the tables in Markdown."""
    verdicts = ("served", "refused", "not yet")
    lines = ["| kind | configurations | served | refused | not yet |", "|---|---|---|---|---|"]
    for kind, label in (*_KINDS.items(), ("", "all")):
        found = [verdict(config) for config in PUBLIC_CONFIGS if kind in ("", config.kind)]
        lines.append(f"| {label} | {len(found)} | " + " | ".join(str(found.count(each)) for each in verdicts) + " |")
    lines += ["", "| repository | configuration | kind | not served because |", "|---|---|---|---|"]
    for config in PUBLIC_CONFIGS:
        if verdict(config) != "served":
            repository, _, folder = config.source.partition(" ")
            why = config.why or f"{_KINDS[config.kind]}: not implemented"
            lines.append(f"| {repository} | {folder} | {_KINDS[config.kind]} | {why} |")
    return "\n".join(lines) + "\n"


def with_score(page: str) -> str:
    """Return the text of the page with the present score; raises ValueError if it has no place for it."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{score()}{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_score(PAGE.read_text()))
