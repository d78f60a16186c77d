"""Programs in other languages that tests build once, from pinned sources, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.serving import ROOT
from tests.support.tools import tool

CLIENTS = ROOT / "tests" / "clients"
# The protocol as files: a test compares them with the descriptors of tritonclient.
PROTOCOL = CLIENTS / "protocol"
MODULE = "headrace/tests/clients/go"
CACHE = ROOT / "build" / "clients"
# A first build downloads packages; pytest's own timeout is that of the test.
BUILD_TIMEOUT_S = 400


def cached(name: str, sources: Iterable[Path]) -> Path:
    """Return the cache folder of a program; another one for other sources."""
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(words: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run a build step and return its output; fails with the output if the step fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}:\n{done.stdout}"
    return done.stdout


def go_tool(package: str) -> Path:
    """Build a program of another Go module, at the version in tests/clients/go/go.mod; return its path."""
    go, module = tool("go"), CLIENTS / "go"
    program = cached("go-tools", [module / "go.mod", module / "go.sum"]) / package.rpartition("/")[2]
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        run([go, "build", "-mod=readonly", "-o", partial, package], module, GOFLAGS="-buildvcs=false")
        partial.replace(program)
    return program


def go_client() -> list[str | Path]:
    """Build tests/clients/go; return the command."""
    go, protoc, source = tool("go"), tool("protoc"), CLIENTS / "go"
    folder = cached("go", [*source.iterdir(), *PROTOCOL.iterdir()])
    program = folder / "client"
    if not program.exists():
        shutil.copytree(source, folder / "source", dirs_exist_ok=True)
        plugins = ["google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc"]
        programs = [go_tool(plugin) for plugin in plugins]
        package = "headrace/tests/clients/go/inference"
        words: list[str | Path] = [protoc, f"-I{PROTOCOL}"]
        for kind, plugin in zip(("go", "go-grpc"), programs, strict=True):
            words += [f"--plugin=protoc-gen-{kind}={plugin}", f"--{kind}_out=.", f"--{kind}_opt=module={MODULE}"]
            words += [f"--{kind}_opt=M{file.name}={package}" for file in sorted(PROTOCOL.iterdir())]
        run([*words, *(file.name for file in sorted(PROTOCOL.iterdir()))], folder / "source")
        run([go, "build", "-mod=readonly", "-o", program, "."], folder / "source", GOFLAGS="-buildvcs=false")
    return [program]


def short_protocol(folder: Path) -> Path:
    """Write the protocol without the messages of model configurations, which no client here reads; return its folder.

    The code that is generated for them takes a third of the time of a compiler. The bytes of other messages are the same.
    """
    text = (PROTOCOL / "grpc_service.proto").read_text()
    for old, new in {
        'import "model_config.proto";': "",
        "  ModelConfig config = 1;": "  bytes config = 1;",
        "package inference;": "package inference;\noption optimize_for = CODE_SIZE;",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "protocol").mkdir(exist_ok=True)
    (folder / "protocol" / "grpc_service.proto").write_text(text)
    return folder / "protocol"


def java_client() -> list[str | Path]:
    """Build tests/clients/java; return the command."""
    maven, java, source = tool("mvn"), tool("java"), CLIENTS / "java"
    main = source / "src" / "main" / "java" / "Client.java"
    folder = cached("java", [source / "pom.xml", main, *PROTOCOL.iterdir()])
    if not (folder / "complete").exists():
        folders = [f"-Dbuild.folder={folder}", f"-Dprotocol={short_protocol(folder)}"]
        run([maven, "-q", "-B", *folders, "compile", "dependency:copy-dependencies"], source)
        (folder / "complete").touch()
    return [java, "-cp", f"{folder}/classes:{folder}/dependency/*", "Client"]


def cpp_client() -> list[str | Path]:
    """Build tests/clients/cpp; return the command."""
    make, source = tool("make"), CLIENTS / "cpp"
    for name in ("c++", "pkg-config", "protoc", "grpc_cpp_plugin"):
        tool(name)
    folder = cached("cpp", [*source.iterdir(), *PROTOCOL.iterdir()])
    shutil.copytree(source, folder, dirs_exist_ok=True)
    run([make, f"PROTOCOL={short_protocol(folder)}", "client"], folder)
    return [folder / "client"]


def node_client() -> list[str | Path]:
    """Install the packages of tests/clients/node; return the command."""
    node, npm, source = tool("node"), tool("npm"), CLIENTS / "node"
    files = [source / name for name in ("client.js", "package.json", "package-lock.json")]
    folder = cached("node", files)
    if not (folder / "complete").exists():
        for file in files:
            shutil.copy(file, folder)
        run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        (folder / "complete").touch()
    return [node, folder / "client.js", PROTOCOL]
