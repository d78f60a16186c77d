"""`make quick`: prints the tests of the packages that a change touches, and of those that import them, nearest first.

The change is the difference from the branch `main`, committed or not. The order: changed test files and those in the folder of
a touched package; tests that import a changed module; tests that import a module that imports one. At most MAX_FILES files of
tests/unit are printed, and standard error says how many are left to `make test`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tests.architecture.rules import ROOT, dotted, imported

# Roots of the product; the tests of a package are in the folder of the same name below the second one.
FOLDERS = {
    "server/headrace": "tests/unit",
    "server/headrace_bench": "tests/unit/headrace_bench",
    "server/headrace_model": "tests/unit/headrace_model",
    "server/headrace_reports": "tests/unit/headrace_reports",
    "engines/headrace_engines": "tests/unit/engines",
    "engines/headrace_lab": "tests/unit/headrace_lab",
    "loadtest": "tests/unit/loadtest",
    "deploy": "tests/unit/deploy",
    "docs": "tests/unit/docs",
}

# A file takes 0.4 to 1 s of processor time, one of the engines 3 s; the rest takes 55 s, and 50 s more where a change makes
# mypy check every file: two minutes on two cores. Of 546 files of the product 46 have more tests than that.
MAX_FILES = 50


def changed_files() -> list[str]:
    """Return the files that differ from `main`, and those that are new, relative to the root."""
    bases = [name for name in ("main", "origin/main") if _git("rev-parse", "--verify", "--quiet", name)]
    base = _git("merge-base", "HEAD", bases[0])[0] if bases else "HEAD"
    files = [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]
    return sorted(set(files))


def ranked(changed: Iterable[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Return the test files of a change, nearest first: those of tests/unit, and changed ones of other folders.

    At the same distance one file of each folder comes in turn, and within a folder the one that imports least: it tests
    little else.

    Args:
        changed: files relative to the root.
        imports: for each Python file of the tree, the dotted names that it imports.
    """
    modules = {_module(file): file for file in imports}
    # A name imported from a module is an import of the module.
    uses = {
        file: {modules[name] for full in names for name in (full, full.rpartition(".")[0]) if name in modules}
        for file, names in imports.items()
    }
    touched = {file for file in changed if file in imports}
    folders = {PurePosixPath(folder) for folder in map(_folder, changed) if folder}
    # A test uses what its helper in tests/support uses.
    near = {file for file, used in uses.items() if used & touched and not _is_test(file)}

    def distance(file: str) -> int | None:
        steps = (file in touched, PurePosixPath(file).parent in folders, uses[file] & touched, uses[file] & near)
        return next((number for number, is_reached in enumerate(steps) if is_reached), None)

    turns = Counter[tuple[int, PurePosixPath]]()
    ranks = {}
    for file in sorted(filter(_is_test, uses), key=lambda file: (len(uses[file]), file)):
        steps, folder = distance(file), PurePosixPath(file).parent
        if steps == 0 or (steps and file.startswith("tests/unit/")):
            ranks[file] = (steps, turns[steps, folder], file)
            turns[steps, folder] += 1
    return sorted(ranks, key=ranks.__getitem__)


def _module(path: str) -> str:
    return dotted(path).removesuffix(".__init__")


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def _folder(path: str) -> str:
    """Return the folder of the tests of a file's package, "" without one."""
    for root, folder in FOLDERS.items():
        if path.startswith(root + "/"):
            return (PurePosixPath(folder) / PurePosixPath(path).parent.relative_to(root)).as_posix()
    return ""


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def tree_imports() -> dict[str, set[str]]:
    """Return for each Python file of the tree the dotted names that it imports."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("server", "engines", "loadtest", "deploy", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return {file: {name for _, name in imported(file, Path(ROOT, file).read_text())} for file in files}


def main() -> int:
    """Print the nearest files, and on standard error how many are left out."""
    tests = ranked(changed_files(), tree_imports())
    print(*tests[:MAX_FILES])
    if rest := tests[MAX_FILES:]:
        folders = Counter(PurePosixPath(file).parent.parts[1:3][-1] for file in rest).most_common()
        print(
            f"quick: left to `make test`, {len(rest)} of {len(tests)} test files, the farthest from the change: "
            f"{', '.join(f'{count} of {folder}' for folder, count in folders)}",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
