"""Help texts, the API page, the table of errors and the files of the wheel, compared with what is stored."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.core import errors
from headrace.core.errors import HeadraceError
from headrace.wire.requests import status

from tests.snapshots.commands import Commands
from tests.snapshots.comparison import compare
from tests.support import models
from tests.support.serving import ROOT, serving


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


def subcommands(text: str) -> list[str]:
    """Names in the list of subcommands of a help text."""
    _, actual, rest = text.partition("\n  COMMAND")
    names = re.match(r"(?:\n    .*)*", rest.partition("\n")[1] + rest.partition("\n")[2]) if actual else None
    return re.findall(r"^    (\S+)", names[0], re.MULTILINE) if names is not None else []


def plain(text: str) -> str:
    """A help text in a form that all versions of argparse share: an option and its text on one line, one blank between them."""
    text = re.sub(r"\n {20,}", "   ", text)
    text = re.sub(r"(?<=\S) {2,}", "  ", text)
    # Python 3.13 writes the value of an option once: `--option, --alias VALUE`.
    return re.sub(r"(?m)^(  --?[\w-]+) (\S+), (?=--[\w-]+ \2)", r"\1, ", text)


def test_help_texts(commands: Commands) -> None:
    """Of the command and of each command below it."""
    actual: dict[tuple[str, ...], str] = {}
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        words = waiting.pop()
        result = commands.run(*words, "--help")
        assert (result.returncode, result.stderr) == (0, ""), words
        actual[words] = result.stdout
        waiting += [(*words, name) for name in subcommands(result.stdout)]
    assert {("engines", "verify"), ("models", "build"), ("serve",)} <= set(actual)
    lines = [
        f"$ {' '.join(('headrace', *words, '--help'))}\n{plain(text).replace(str(commands.folder), 'HOME')}"
        for words, text in sorted(actual.items())
    ]
    compare("help.txt", "\n".join(lines))


# What says whether a command was understood, whatever version of Python runs it.
CALLS = [
    ["--version"],
    ["serv"],
    ["serve", "--htp-port", "1"],
    ["serve", "--log-verbose=1"],
    ["serve", "--http-port", "many"],
    ["serve", "--model-repository", "nowhere"],
    ["model.onnx"],
    ["validate", "nowhere"],
    ["health", "--url", "http://127.0.0.1:1"],
    ["infer", "model", "--url", "http://127.0.0.1:1"],
    ["explain", "model", "--url", "http://127.0.0.1:1"],
    ["simulate", "nowhere"],
    ["tune", "nowhere"],
    ["build", "nowhere"],
    ["inspect", "nowhere"],
    ["compare", "nowhere"],
    ["engines", "ls"],
    ["engines", "gc"],
    ["engines", "verify"],
    ["engines", "list"],
    ["models"],
]


def test_command_output_without_a_server_or_a_model(commands: Commands) -> None:
    texts = []
    for words in CALLS:
        result = commands.run(*words)
        streams = {"stdout": result.stdout, "stderr": result.stderr}
        printed = [f"{name}: {line}" for name, text in streams.items() for line in text.splitlines()]
        # The usage stands in help.txt; versions of argparse quote the choices in different ways.
        printed = [
            line.replace(str(commands.folder), "FOLDER") for line in printed if not re.match(r"\w+: usage: ", line)
        ]
        printed = [re.sub(r"\(choose from .*?\)", "(choose from ...)", line) for line in printed]
        printed = [re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", "[TIME]", line) for line in printed]
        texts.append("\n".join([f"$ headrace {' '.join(words)}", *printed, f"exit status {result.returncode}", ""]))
    compare("calls.txt", "\n".join(texts))


def test_the_api_page(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "row_sums", models.row_sums())
    with serving(tmp_path / "repository", tmp_path) as server:
        code, headers, content = server.request("GET", "/openapi.json")
    assert (code, headers["content-type"]) == (200, "application/json")
    document = json.loads(content)
    paths, schemas = document.pop("paths"), document["components"].pop("schemas")
    lines = [f"{digest(document)} everything else"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            lines.append(f"{digest(operation)} {method.upper()} {path}: {' '.join(operation['responses'])}")
    lines += [f"{digest(schema)} schema {name}" for name, schema in schemas.items()]
    compare("openapi.txt", "\n".join(lines) + "\n")


def digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]


def error_classes(kind: type[HeadraceError] = HeadraceError) -> Iterator[type[HeadraceError]]:
    """The tree of errors that the front ends translate, parents first."""
    yield kind
    for child in sorted(kind.__subclasses__(), key=lambda child: child.__name__):
        if child.__module__ == errors.__name__:
            yield from error_classes(child)


def example(kind: type[HeadraceError]) -> HeadraceError:
    """One error of a class, with all that its constructor takes."""
    values = {
        "message": "the text",
        "retry_after_s": 2.25,
        "can_retry": True,
        "client": "shop",
        "reference": "0123456789ab",
        "findings": [
            errors.Finding("m/config.pbtxt", 3, "the finding", "the cure"),
            errors.Finding("m/config.pbtxt", None, "the warning", fatal=False),
        ],
    }
    if kind.__init__ is HeadraceError.__init__:
        return kind("the text")
    return kind(*(values[name] for name in list(inspect.signature(kind.__init__).parameters)[1:]))


def test_the_table_of_errors() -> None:
    lines = []
    for kind in error_classes():
        error = example(kind)
        columns = {
            "is a": kind.__mro__[1].__name__,
            "reason": error.reason,
            "http": status.http_status(error),
            "grpc": status.grpc_code(error),
            "retry after": f"{status.retry_after_s(error)} s, {status.retry_after_ms(error)} ms",
            "text": str(error),
        }
        lines.append("\n".join([kind.__name__, *(f"    {name}: {value}" for name, value in columns.items())]))
    compare("errors.txt", "\n".join(lines))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the tree as it is, built in a copy without what an earlier build has left."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("server", "engines"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=unwanted)
    for file in [*ROOT.glob("*.*"), *ROOT.glob("LICENSE*")]:
        if file.is_file():
            shutil.copy(file, folder / "tree" / file.name)
    # What `pip wheel --no-deps --no-build-isolation` calls; an environment need not have a pip of its own.
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "tree", capture_output=True, text=True, timeout=110
    )
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_files_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Modules come and go; everything else that the wheel carries is listed by its name and its folder's name."""
    names = [Path(name) for name in wheel.namelist()]
    data = [name for name in names if name.suffix != ".py" and not name.parts[0].endswith(".dist-info")]
    packages = {"server": "headrace", "engines": "headrace_engines"}
    listed = [f"{packages.get(name.parent.name, name.parent.name)}/{name.name}" for name in data]
    about = [name.name for name in names if name.parts[0].endswith(".dist-info")]
    entry_points = next(str(name) for name in names if name.name == "entry_points.txt")
    commands = re.findall(r"^(\S+) = ", wheel.read(entry_points).decode(), re.MULTILINE)
    top = {packages.get(name.parts[0], name.parts[0]) for name in names if not name.parts[0].endswith(".dist-info")}
    text = {"packages": top, "commands": commands, "files beside modules": listed, "files about the wheel": about}
    compare("wheel.txt", "\n".join(f"{name}:\n  " + "\n  ".join(sorted(items)) for name, items in text.items()))


def test_the_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    """Compared by folder and name within the packages, whatever the source roots are."""
    roots = (ROOT / "server", ROOT / "engines")
    modules = [path.relative_to(root).as_posix() for root in roots for path in root.rglob("*.py")]
    shipped = [f"/{name}" for name in wheel.namelist() if name.endswith(".py")]
    assert len(shipped) == len(modules)
    assert [module for module in modules if not any(name.endswith(f"/{module}") for name in shipped)] == []
