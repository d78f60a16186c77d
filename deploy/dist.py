"""Builds the wheel and the source archive into dist/, checks both, installs the wheel and serves with it; `make dist`.

    .venv/bin/python deploy/dist.py            # build, check, install, serve
    .venv/bin/python deploy/dist.py --no-serve # build and check only

The source archive is built from the files that git tracks, and the wheel from the unpacked source archive. So neither holds
a file of an earlier build, and the archive is proved to be complete.

Needs only the standard library, pip and the build backend of the lock.
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("server", "engines")
# Files of a checkout that the source archive leaves out.
NOT_IN_ARCHIVE = (".ci/", ".git-blame-ignore-revs", ".gitignore")
# Python names in the pages: `triton_python_backend_utils` of a model is the last one.
PUBLIC_NAMES = ("headrace", "headrace.ray", "headrace_model", "headrace_model.python_backend")
# The models that `headrace models build` makes without training or weights.
DEMO_MODELS = ("add_sub", "tiny")
READY_TIMEOUT_S = 60.0
REQUEST = {
    "inputs": [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
    ]
}

_LISTENS = re.compile(r"Headrace listens on (https?://\S+)")


class DistError(Exception):
    """A check of the wheel or the source archive failed."""


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run a program and return its standard output.

    Raises:
        DistError: the exit status is not 0; the message holds the output.
    """
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise DistError(f"{' '.join(map(str, words[:4]))} ... failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def tracked_files() -> list[str]:
    """The files of the checkout that git tracks, relative to its root."""
    return sorted(name for name in run("git", "ls-files", "-z").split("\0") if name and (ROOT / name).is_file())


def project() -> dict[str, object]:
    """The table `project` of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def build(output: Path, scratch: Path) -> tuple[Path, Path]:
    """Build both distributions without a network.

    Args:
        output: the folder that receives them; older ones in it are removed.
        scratch: an empty folder.

    Returns:
        The wheel and the source archive.
    """
    checkout = scratch / "checkout"
    for name in tracked_files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    output.mkdir(parents=True, exist_ok=True)
    for old in (*output.glob("headrace-*.whl"), *output.glob("headrace-*.tar.gz")):
        old.unlink()
    code = "import sys; from setuptools.build_meta import build_sdist as build; print(build(sys.argv[1]))"
    archive = output / run(sys.executable, "-c", code, output, cwd=checkout).split()[-1]
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(scratch / "unpacked", filter="data")
    (source,) = (scratch / "unpacked").iterdir()
    options = ("--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", output, source)
    (wheel,) = output.glob("headrace-*.whl")
    return wheel, archive


def package_files(files: Sequence[str]) -> set[str]:
    """The tracked files of the packages, by their names inside the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = config["tool"]["setuptools"]["packages"]["find"].get("where", ["."])
    names = set()
    for name in files:
        if name.startswith(tuple(f"{root}/" for root in SOURCE_ROOTS)):
            root = next((root for root in roots if name.startswith(f"{root}/")), "")
            names.add(name.removeprefix(f"{root}/"))
    return names


def check_wheel(wheel: Path, files: Sequence[str]) -> list[str]:
    """Compare a wheel with the checkout.

    Args:
        wheel: the file.
        files: the tracked files of the checkout.

    Returns:
        Its faults, one a line; empty for a good wheel.
    """
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        info = sorted(name for name in names if ".dist-info/" in name)
        folder = info[0].partition("/")[0]
        metadata = email.parser.Parser().parsestr(opened.read(f"{folder}/METADATA").decode())
        tag = opened.read(f"{folder}/WHEEL").decode()
    expected = package_files(files)
    packaged = names - set(info)
    faults = [f"the wheel lacks {name}" for name in sorted(expected - packaged)]
    faults += [f"the wheel has {name}, which is no file of a package" for name in sorted(packaged - expected)]
    faults += [
        f"the wheel lacks {folder}/{name}"
        for name in ("licenses/LICENSE", "entry_points.txt")
        if f"{folder}/{name}" not in names
    ]
    if "Tag: py3-none-any" not in tag or "Root-Is-Purelib: true" not in tag:
        faults.append("the wheel is not one for every platform (py3-none-any)")
    return faults + check_metadata(metadata)


def check_metadata(metadata: email.message.Message) -> list[str]:
    """Faults of a distribution's METADATA, one a line: fields that a package index or an installer needs."""
    table = project()
    expected = {
        "Name": table["name"],
        "Version": table["version"],
        "Summary": table["description"],
        "License-Expression": table["license"],
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }
    faults = [
        f"METADATA: {key} is {metadata[key]!r}, not {value!r}"
        for key, value in expected.items()
        if metadata[key] != value
    ]
    python = {part.strip() for part in str(metadata["Requires-Python"] or "").split(",")}
    if python != {part.strip() for part in str(table["requires-python"]).split(",")}:
        faults.append(f"METADATA: Requires-Python is {metadata['Requires-Python']!r}, not {table['requires-python']!r}")
    if str(metadata.get_payload()).strip() != (ROOT / "README.md").read_text(encoding="utf-8").strip():
        faults.append("METADATA: the description is not README.md")
    return faults


def check_archive(archive: Path, files: Sequence[str]) -> list[str]:
    """Compare a source archive with the checkout.

    Args:
        archive: the file.
        files: the tracked files of the checkout.

    Returns:
        Its faults, one a line; empty for a good archive.
    """
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    expected = {name for name in files if not name.startswith(NOT_IN_ARCHIVE)}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    faults = [f"the source archive lacks {name}" for name in sorted(expected - names)]
    return faults + [
        f"the source archive has {name}, which git does not track" for name in sorted(names - made - expected)
    ]


def serve(wheel: Path, scratch: Path) -> str:
    """Install the wheel with the locked dependencies into an empty environment, serve the demo models and send one request.

    Args:
        wheel: the file.
        scratch: an empty folder.

    Returns:
        The response's output OUTPUT0, as text.

    Raises:
        DistError: a step failed, or the answer is wrong.
    """
    environment = scratch / "environment"
    venv.create(environment)  # our pip installs into it
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--disable-pip-version-check")
    install = (*pip, "install", "--quiet", "--no-deps", "--no-compile")
    locks = ROOT / "requirements"
    run(*install, "--require-hashes", "-r", locks / "serve.lock", "-r", locks / "demo.lock")
    run(*install, wheel)
    run(*pip, "check")
    run(environment / "bin" / "python", "-c", f"import {', '.join(PUBLIC_NAMES)}", cwd=scratch)
    empty = scratch / "empty"
    empty.mkdir()
    headrace = environment / "bin" / "headrace"
    run(headrace, "models", "build", "--output", scratch / "models", "--only", *DEMO_MODELS, cwd=empty)
    options = ("--http-port", "0", "--grpc-port", "0", "--state-dir", str(scratch / "state"))
    log = scratch / "server.log"
    with log.open("wb") as stream:
        words = (headrace, "serve", "--model-repository", scratch / "models", *options)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
        process = subprocess.Popen(
            [*map(str, words)], cwd=empty, env=inherited, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        url = wait_for_url(process, log)
        document = json.dumps(REQUEST).encode()
        with urllib.request.urlopen(f"{url}/v2/models/add_sub/infer", document, timeout=30) as response:
            outputs = {output["name"]: output["data"] for output in json.load(response)["outputs"]}
        process.terminate()
        if process.wait(60) != 0:
            raise DistError(f"the server ended with status {process.returncode}:\n{log.read_text()}")
    finally:
        process.kill()
        process.wait()
    if outputs != {"OUTPUT0": list(range(1, 17)), "OUTPUT1": list(range(-1, 15))}:
        raise DistError(f"the answer is wrong: {outputs}")
    return str(outputs["OUTPUT0"])


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that a starting server prints.

    Raises:
        DistError: the server ended, or printed none in time.
    """
    end = time.monotonic() + READY_TIMEOUT_S
    while (match := _LISTENS.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise DistError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)
    return match[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status, 1 where a check failed."""
    parser = argparse.ArgumentParser(description="Build the wheel and the source archive, check, install and serve.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="folder of both files (dist)")
    parser.add_argument("--no-serve", action="store_true", help="do not install the wheel and serve with it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-dist-") as folder:
        scratch = Path(folder)
        try:
            wheel, archive = build(options.output.resolve(), scratch)
            files = tracked_files()
            faults = check_wheel(wheel, files) + check_archive(archive, files)
            print("\n".join(faults) or f"checked {wheel.name} and {archive.name} against {len(files)} tracked files")
            if faults:
                return 1
            if not options.no_serve:
                print(f"installed and served; add_sub answered OUTPUT0 = {serve(wheel, scratch)}")
        except DistError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
