"""Interpreters with a framework: which one is used, when an environment is made, and what is said if it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from headrace.python.environments import list_environments
from headrace_engines.errors import BuildError
from headrace_engines.importers import environment
from headrace_engines.importers.environment import framework_python, installation_text, missing_packages

from tests.support.wheels import add_numpy, add_uv, add_wheel


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installer with a folder of wheels with the package `gauge`, the only source of packages."""
    wheels = tmp_path / "wheels"
    add_wheel(wheels, "gauge", "1.5", {"gauge.py": "value = 1\n"})
    add_numpy(wheels)
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    return str(add_uv(tmp_path / "programs"))


def test_the_builders_own_interpreter_is_used_if_it_has_the_packages(tmp_path: Path) -> None:
    assert framework_python(["numpy>=1.20", "onnx"], root=tmp_path / "root") == Path(sys.executable)
    assert not (tmp_path / "root").exists()


def test_an_environment_is_made_once_and_shared(tmp_path: Path, uv: str) -> None:
    notes: list[str] = []
    root = tmp_path / "root"
    python = framework_python(["gauge>=1", "numpy"], lambda _done, note: notes.append(note), root=root, uv=uv)
    code = "import gauge, numpy; print(gauge.value)"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
    assert notes[0].startswith("installs gauge>=1, numpy, ")
    assert framework_python(["numpy", "gauge>=1"], root=root, uv=uv) == python
    (entry,) = list_environments(root)
    assert not entry.in_use
    assert python.parents[1].name == entry.name
    # The environment itself, and not the interpreter behind its link.
    assert not missing_packages(python, ["gauge>=1.5"])
    assert missing_packages(python, ["gauge>=1.6", "numpy"]) == ["gauge>=1.6"]


def test_size_and_folder_are_known_before_an_installation(tmp_path: Path, uv: str) -> None:
    root = tmp_path / "root"
    assert installation_text(["numpy"], root=root, uv=uv) == ""
    assert installation_text(["torch>=2.6"], python=Path(sys.executable), root=root, uv=uv) == ""
    requirements = ["torch>=2.6", "numpy"]
    for has_gpu, installer, size in ((False, uv, 1), (True, uv, 6), (False, "", 6)):
        text = installation_text(requirements, root=root, uv=installer, has_gpu=lambda has_gpu=has_gpu: has_gpu)  # type: ignore[misc]
        assert text == f"numpy, torch>=2.6 are installed into a folder of {root}: about {size} GB"
    assert "about 1.5 GB" in installation_text(["tensorflow-cpu>=2.18 | tensorflow>=2.18"], root=root, uv=uv)
    assert "gauge are installed" in installation_text(["gauge"], root=root, uv=uv)
    framework_python(["gauge"], root=root, uv=uv)
    assert installation_text(["gauge"], root=root, uv=uv) == "", "it is there"


@pytest.mark.parametrize(("has_gpu", "backend"), [(False, "cpu"), (True, "")])
def test_without_a_gpu_uv_installs_the_build_for_cpus(
    tmp_path: Path, uv: str, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, backend: str
) -> None:
    monkeypatch.setattr(environment, "has_device_files", lambda: has_gpu)
    python = framework_python(["gauge"], root=tmp_path / "root", uv=uv)
    (file,) = python.parents[1].glob("lib/python*/site-packages/torch_backend")
    assert file.read_text() == backend


def test_a_package_that_cannot_be_installed_is_named_with_cures(tmp_path: Path, uv: str) -> None:
    with pytest.raises(BuildError) as raised:
        framework_python(["gadget>=2"], root=tmp_path / "root", uv=uv)
    text = str(raised.value)
    assert text.startswith("gadget>=2 cannot be installed: ")
    assert "gadget>=2 was not found in " in text
    assert "--python PATH" in text
    assert "PIP_INDEX_URL" in text
    assert list_environments(tmp_path / "root") == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, uv: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="Not a directory"):
        framework_python(["gauge"], root=tmp_path / "file" / "root", uv=uv)


def test_a_named_interpreter_is_used_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    named = Path(sys.executable)
    assert framework_python(["numpy"], python=named, root=tmp_path) == named
    with pytest.raises(BuildError) as raised:
        framework_python(["numpy", "gadget>=2"], python=named, root=tmp_path)
    assert str(raised.value) == (
        f"{named} lacks gadget>=2: install them with `{named} -m pip install 'gadget>=2'`, or leave --python out"
    )


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho 5\n", "no program"])
def test_what_is_no_interpreter_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "python"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    with pytest.raises(BuildError, match=r"does not run as a Python interpreter \(.+\): name a Python interpreter"):
        framework_python(["numpy"], python=path, root=tmp_path)


def test_either_of_two_packages_meets_a_requirement() -> None:
    own = Path(sys.executable)
    assert missing_packages(own, ["gadget | numpy>=1"]) == []
    assert missing_packages(own, ["gadget>=1 | numpy>=1000"]) == ["gadget>=1"]


@pytest.mark.parametrize(
    ("bounds", "is_met"),
    [
        ("", True),
        (f"=={np.__version__}", True),
        (f">={np.__version__}", True),
        (f"<{np.__version__}", False),
        (">=1.9,<1000", True),
        (">=1.10.0, <2", np.lib.NumpyVersion(np.__version__) < "2.0.0"),
        (">=1000", False),
        # A newer version of one digit more is not an older one.
        ("<9.9", True),
        ("<10", True),
    ],
)
def test_versions_are_compared_as_numbers(bounds: str, is_met: bool) -> None:
    assert missing_packages(Path(sys.executable), [f"numpy{bounds}"]) == ([] if is_met else [f"numpy{bounds}"])


def test_a_requirement_of_another_form_is_left_to_the_installer() -> None:
    requirement = "numpy @ file:///wheels/numpy.whl"
    assert missing_packages(Path(sys.executable), [requirement]) == [requirement]
