"""Interpreters with a framework: the builder's own, one that the user names, or that of an environment which is made once.

Environments are those of Python models (`headrace.python.environments`): made by uv or venv and pip, complete or absent,
shared by all that need the same requirements, listed and removed by `headrace environments`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as WaitTimeout
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.python.environments import (
    REQUIREMENTS,
    EnvironmentPending,
    Environments,
    EnvironmentSource,
    Interpreter,
)
from headrace.runtimes.cuda.devices import has_device_files

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report, silent
from headrace_engines.store import DEFAULT_STATE

DEFAULT_ENVIRONMENTS = DEFAULT_STATE / "environments"
_CHECK_LIMIT_S = 60.0
_REPORT_S = 0.5
# Installed sizes in gigabytes, with what the packages need themselves.
_SIZES_GB = {"torch": 1.0, "tensorflow": 2.0, "tensorflow-cpu": 1.5}
_CUDA_GB = 5.0
# A requirement that is compared here: a name, and bounds of its version. Others, such as URLs, are left to the installer.
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*((?:(?:>=|<|==)\s*[0-9][0-9.]*\s*,?\s*)*)")
_BOUND = re.compile(r"(>=|<|==)\s*([0-9][0-9.]*)")
_VERSIONS = """
import importlib.metadata as metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def framework_python(
    requirements: Sequence[str],
    report: Report = silent,
    *,
    python: Path | None = None,
    root: Path = DEFAULT_ENVIRONMENTS,
    uv: str | None = None,
) -> Path:
    """Return an interpreter that has the packages of a framework.

    The order: the interpreter that the user names, the builder's own if it has the packages, and an environment of its own, which
    is made if it is missing. The progress callback gets the phase and the seconds since the start of the installation.

    Args:
        requirements: lines of a requirements file, e.g. "torch>=2.6". "tensorflow-cpu | tensorflow" is met by either; the first
            is installed.
        report: progress callback.
        python: interpreter that the user names; None for the others.
        root: folder of the environments.
        uv: path of uv; None to look for it, "" to install with pip.

    Returns:
        Absolute path of the interpreter. Links are not followed: an environment is found by the path of its link.

    Raises:
        BuildError: the named interpreter does not run or lacks a package, or the environment cannot be made; has the reason.
    """
    if python is not None:
        # Links are not followed, see above.
        named = Path(os.path.abspath(os.path.expanduser(python)))
        if missing := missing_packages(named, requirements):
            words = " ".join(f"'{requirement}'" for requirement in missing)
            cure = f"install them with `{named} -m pip install {words}`, or leave --python out"
            raise BuildError(f"{named} lacks {', '.join(missing)}: {cure}")
        return named
    own = Path(sys.executable)
    if not missing_packages(own, requirements):
        return own
    with _opened(requirements, root.expanduser(), uv) as (environments, source):
        try:
            return Path(_wait(environments, source, report).command[0])
        except ConfigError as error:
            raise BuildError(_explain(error, source.subject)) from None


def installation_text(
    requirements: Sequence[str],
    *,
    python: Path | None = None,
    root: Path = DEFAULT_ENVIRONMENTS,
    uv: str | None = None,
    has_gpu: Callable[[], bool] = has_device_files,
) -> str:
    """Return packages, size and folder of what `framework_python` would install; "" if it would install nothing.

    Args:
        requirements: as in `framework_python`.
        python: as in `framework_python`.
        root: as in `framework_python`.
        uv: as in `framework_python`.
        has_gpu: returns whether there is a GPU. Without one uv installs PyTorch's build for CPUs.
    """
    if python is not None or not missing_packages(Path(sys.executable), requirements):
        return ""
    with _opened(requirements, root.expanduser(), uv) as (environments, source):
        if environments.is_present(source):
            return ""
        on_cpu = environments.uses_uv and not has_gpu()
        sizes = [size for name, size in _SIZES_GB.items() if re.search(rf"\b{name}(?![\w-])", source.subject)]
        if "torch" in source.subject and not on_cpu and sys.platform == "linux":
            sizes.append(_CUDA_GB)
        size = f"about {sum(sizes):g} GB" if sizes else "some 100 MB"
        return f"{source.subject} are installed into a folder of {root}: {size}"


def missing_packages(python: Path, requirements: Sequence[str]) -> list[str]:
    """Return the requirements that an interpreter does not meet; of several packages the first.

    Only names and versions are compared. Requirements of another form, such as URLs, count as missing.

    Args:
        python: path of the interpreter.
        requirements: as in `framework_python`.

    Raises:
        BuildError: the interpreter does not run.
    """
    alternatives = [[part.strip() for part in requirement.split("|")] for requirement in requirements]
    matches = {part: _REQUIREMENT.fullmatch(part) for parts in alternatives for part in parts}
    versions = _versions(python, [match[1] for match in matches.values() if match])
    missing = []
    for parts in alternatives:
        present = [
            match is not None and match[1] in versions and _is_within(versions[match[1]], match[2])
            for match in (matches[part] for part in parts)
        ]
        if not any(present):
            missing.append(parts[0])
    return missing


def _versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    # Not in the current folder: its files would be taken for packages.
    command = [str(python), "-c", _VERSIONS, *names]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_CHECK_LIMIT_S, cwd="/"
        )
        versions = json.loads(done.stdout.splitlines()[-1])
        return {str(name): str(version) for name, version in versions.items()}
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it printed no versions of packages"
        cure = "name a Python interpreter, e.g. venv/bin/python"
        raise BuildError(f"{python} does not run as a Python interpreter ({reason}): {cure}") from None


def _is_within(version: str, bounds: str) -> bool:
    """Return whether a version lies within bounds such as ">=2.6, <3"; only the numbers are compared."""
    actual = _numbers(version)
    for operator, text in _BOUND.findall(bounds):
        bound = _numbers(text)
        width = max(len(actual), len(bound))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (actual, bound))
        if not (left >= right if operator == ">=" else left < right if operator == "<" else left == right):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else ()


@contextmanager
def _opened(
    requirements: Sequence[str], root: Path, uv: str | None
) -> Iterator[tuple[Environments, EnvironmentSource]]:
    """Yield the environments of a folder, and the source of that with some requirements."""
    installed = sorted({requirement.split("|")[0].strip() for requirement in requirements})
    subject = ", ".join(installed)
    # uv takes PyTorch's build for CPUs then.
    variables = () if has_device_files() else ("UV_TORCH_BACKEND=cpu",)
    environments = Environments(root, uv, wait=False, variables=variables)
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-requirements-") as folder:
            path = Path(folder) / REQUIREMENTS
            path.write_text("".join(f"{line}\n" for line in installed), encoding="utf-8")
            yield environments, EnvironmentSource("venv", path, subject)
    finally:
        # Ctrl-C ends the installer. The lock of the environment is released: it is in use while a command runs, not longer.
        environments.close()


def _wait(environments: Environments, source: EnvironmentSource, report: Report) -> Interpreter:
    try:
        return environments.python_of(source)
    except EnvironmentPending as pending:
        begun = time.monotonic()
        while True:
            report(0.0, f"installs {source.subject}, {time.monotonic() - begun:.0f} s")
            try:
                return pending.done.result(_REPORT_S)
            except WaitTimeout:
                continue


def _explain(error: ConfigError, subject: str) -> str:
    fault = error.findings[0].message
    cure = (
        "connect this machine, name an interpreter that has them with --python PATH, or a package index in "
        "PIP_INDEX_URL (UV_INDEX_URL for uv)"
    )
    return f"{subject} cannot be installed: {fault}: {cure}"
