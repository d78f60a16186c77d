"""`make dist`: faults of a wheel and a source archive are found; the real ones have none and serve."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.serving import ROOT

SCRIPT = ROOT / "deploy" / "dist.py"
INFO = "headrace-0.1.0.dist-info"
SERVE_TIMEOUT_S = 900


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headrace_dist", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dist = load()
needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a checkout: lists the tracked files"
)


def metadata(**changes: str) -> str:
    table = dist.project()
    fields = {
        "Metadata-Version": "2.4",
        "Name": table["name"],
        "Version": table["version"],
        "Summary": table["description"],
        "License-Expression": table["license"],
        "License-File": "LICENSE",
        "Requires-Python": table["requires-python"],
        "Description-Content-Type": "text/markdown",
    } | {key.replace("_", "-"): value for key, value in changes.items()}
    readme = (ROOT / "README.md").read_text()
    return "".join(f"{key}: {value}\n" for key, value in fields.items()) + f"\n{readme}"


def write_wheel(folder: Path, names: set[str], text: str | None = None) -> Path:
    path = folder / "headrace-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in sorted(names):
            wheel.writestr(name, "")
        wheel.writestr(f"{INFO}/METADATA", text or metadata())
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/entry_points.txt", "")
        wheel.writestr(f"{INFO}/licenses/LICENSE", "")
    return path


FILES = [
    "LICENSE",
    "pyproject.toml",
    "server/headrace/__init__.py",
    "server/headrace/py.typed",
    "engines/headrace_engines/__init__.py",
    "tests/test_a.py",
]


@pytest.fixture
def packaged() -> set[str]:
    names: set[str] = dist.package_files(FILES)
    return names


def test_a_complete_wheel_has_no_faults(tmp_path: Path, packaged: set[str]) -> None:
    assert dist.check_wheel(write_wheel(tmp_path, packaged), FILES) == []


def test_a_wheel_without_a_file_of_a_package_is_refused(tmp_path: Path, packaged: set[str]) -> None:
    (missing,) = [name for name in packaged if name.endswith("py.typed")]
    assert dist.check_wheel(write_wheel(tmp_path, packaged - {missing}), FILES) == [f"the wheel lacks {missing}"]


def test_a_wheel_with_tests_is_refused(tmp_path: Path, packaged: set[str]) -> None:
    faults = dist.check_wheel(write_wheel(tmp_path, packaged | {"tests/test_a.py"}), FILES)
    assert faults == ["the wheel has tests/test_a.py, which is no file of a package"]


def test_wrong_metadata_is_refused(tmp_path: Path, packaged: set[str]) -> None:
    text = metadata(License_Expression="MIT", Requires_Python=">=3.8")
    faults = dist.check_wheel(write_wheel(tmp_path, packaged, text), FILES)
    assert [fault.partition(" is ")[0] for fault in faults] == [
        "METADATA: License-Expression",
        "METADATA: Requires-Python",
    ]


def test_an_archive_with_other_files_than_the_checkout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "headrace-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (
            "LICENSE",
            "pyproject.toml",
            "server/headrace/__init__.py",
            "server/headrace/py.typed",
            "notes.txt",
            "PKG-INFO",
        ):
            archive.addfile(tarfile.TarInfo(f"headrace-0.1.0/{name}"), io.BytesIO())
    assert dist.check_archive(path, FILES) == [
        "the source archive lacks engines/headrace_engines/__init__.py",
        "the source archive lacks tests/test_a.py",
        "the source archive has notes.txt, which git does not track",
    ]


@needs_git
@pytest.mark.slow
@pytest.mark.timeout(SERVE_TIMEOUT_S)
def test_the_distributions_are_built_checked_installed_and_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dist.main(["--output", str(tmp_path)]) == 0, capfd.readouterr()
    assert "add_sub answered OUTPUT0 = [1, 2, 3," in capfd.readouterr().out


def test_the_licence_is_the_whole_standard_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert re.findall(r"^   (\d)\. [A-Z]", text, re.M) == list("123456789")
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_has_the_version_and_unreleased_changes() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == ("Unreleased", "")
    assert dist.project()["version"] in [version for version, date in headings if date]
    # Readers look only for the headings of Keep a Changelog.
    kinds = set(re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
