"""`make quick`: prints the tests of the packages that a change touches, and of those that import them.

The change is the difference from the branch `main`, committed or not. Tests are files below tests/unit that import a changed
module, or a module that imports one; those in the folder of a touched package; and changed test files.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tests.architecture.rules import ROOT, dotted, imported

# Roots of the product; the tests of a package are in the folder of the same name below the second one.
FOLDERS = {
    "server/headrace": "tests/unit",
    "server/headrace_model": "tests/unit/headrace_model",
    "engines/headrace_engines": "tests/unit/engines",
    "loadtest": "tests/unit/loadtest",
    "deploy": "tests/unit/deploy",
    "docs": "tests/unit/docs",
}


def changed_files() -> list[str]:
    """Return the files that differ from `main`, and those that are new, relative to the root."""
    bases = [name for name in ("main", "origin/main") if _git("rev-parse", "--verify", "--quiet", name)]
    base = _git("merge-base", "HEAD", bases[0])[0] if bases else "HEAD"
    files = [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]
    return sorted(set(files))


def selected(changed: Iterable[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Return the test files to run, in tests/unit and among the changed ones.

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
    users = {file for file, used in uses.items() if used & touched}
    # One step more for helpers: a test uses what its helper in tests/support uses.
    near = touched | {file for file in users if not _is_test(file)}
    tests = {file for file in imports if _is_test(file) and file.startswith("tests/unit/")}
    result = {file for file in tests if uses[file] & near}
    for folder in filter(None, map(_folder, changed)):
        result |= {file for file in tests if PurePosixPath(file).parent == PurePosixPath(folder)}
    return result | {file for file in touched if _is_test(file)}


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


def main() -> int:
    """Print the files."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("server", "engines", "loadtest", "deploy", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    imports = {file: {name for _, name in imported(file, Path(ROOT, file).read_text())} for file in files}
    print(*sorted(selected(changed_files(), imports)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
