"""Python environments: where they come from, when they are made, shared, refused and removed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.core.errors import ConfigError
from headrace.python.environments import (
    MARKER,
    EnvironmentPending,
    Environments,
    environment_source,
    environments_root,
    list_environments,
    prune_environments,
    read_facts,
)

from tests.support.wheels import OFFLINE, add_numpy, add_uv, add_wheel

# Installers: the path of `uv`, None for the real one, "" for pip.
SMALL = "small uv"
REAL = [pytest.param(None, id="uv", marks=pytest.mark.slow), pytest.param("", id="pip", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def small_uv(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `small_uv` install what no test leaves to the real uv or to pip."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("PATH", f"{add_uv(tmp_path / 'programs').parent}{os.pathsep}{os.environ['PATH']}")


def installer(path: str | None) -> str | None:
    """Return the path of an installer as `Environments` takes it; skips the test if it is not installed."""
    if path is None and not Environments(None)._uv:
        pytest.skip("needs uv")
    return None if path == SMALL else path


def model(path: Path, **parameters: str) -> ModelFolder:
    (path / "1").mkdir(parents=True, exist_ok=True)
    return ModelFolder(path.name, path, (1,), ModelConfig(name=path.name, parameters=parameters), (), {})


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """A model whose requirements are a package of the folder `wheels`."""
    found = model(tmp_path / "model")
    (found.path / "1" / "requirements.txt").write_text(f"{OFFLINE}gauge\n")
    add_wheel(found.path / "1" / "wheels", "gauge", "1.0", {"gauge.py": "value = 1\n"})
    add_numpy(found.path / "1" / "wheels")
    return found


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[Environments]:
    with closing(Environments(tmp_path / "root")) as made:
        yield made


def evaluate(command: tuple[str, ...], expression: str) -> str:
    code = f"import json\nprint({expression})"
    done = subprocess.run([*command, "-E", "-s", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make_archive(path: Path, *, copies: bool = True) -> Path:
    """Pack an environment of this interpreter as conda-pack does: without links that lead out."""
    made = path.parent / "packed"
    words = [sys.executable, "-m", "venv", "--without-pip", *(["--copies"] if copies else ["--symlinks"]), str(made)]
    subprocess.run(words, check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    import numpy

    (packages / "numpy.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(made, ".")
    return path


def test_a_model_without_an_environment_runs_on_the_servers_python(tmp_path: Path, environments: Environments) -> None:
    interpreter = environments.python_for(model(tmp_path / "model"), 1)
    assert interpreter.command == (sys.executable,)
    assert interpreter.is_own
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("uv", [SMALL, *REAL])
def test_requirements_are_installed_once(
    tmp_path: Path, folder: ModelFolder, caplog: pytest.LogCaptureFixture, uv: str | None
) -> None:
    caplog.set_level(logging.INFO, "headrace.environments")
    uv = installer(uv)
    with closing(Environments(tmp_path / "root", uv)) as environments:
        first = environments.python_for(folder, 1)
        assert not first.is_own
        assert evaluate(first.command, "__import__('gauge').value") == "1"
        assert evaluate(first.command, "__import__('numpy').ones(2).tolist()") == "[1.0, 1.0]"
    caplog.clear()
    with closing(Environments(tmp_path / "root", uv)) as restarted:
        assert restarted.python_for(folder, 1) == first
    assert caplog.messages == []


def test_every_part_of_an_environment_is_in_its_name(tmp_path: Path, folder: ModelFolder) -> None:
    environments = Environments(tmp_path / "root")

    def name() -> str:
        source = environment_source(folder, 1)
        assert source is not None
        return environments._name(source)

    names = [name(), name()]
    assert names[0] == names[1]
    text = folder.path / "1" / "requirements.txt"
    text.write_text(text.read_text() + "-r more.txt\n")
    names.append(name())
    (folder.path / "1" / "more.txt").write_text("package==1\n")
    names.append(name())
    (folder.path / "1" / "more.txt").write_text("package==2\n-c ../../escape.txt\n-r requirements.txt\n")
    names.append(name())
    add_wheel(folder.path / "1" / "wheels", "gauge", "1.1", {"gauge.py": "value = 2\n"})
    names.append(name())
    assert len(set(names)) == len(names) - 1


def test_requirements_of_the_model_serve_all_its_versions(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder.path / "2").mkdir()
    (folder.path / "requirements.txt").write_text("all\n")
    (folder.path / "2" / "requirements.txt").write_text("two\n")
    sources = [environment_source(folder, version) for version in (1, 2)]
    assert [source and source.path.read_text() for source in sources] == ["all\n", "two\n"]


def test_loads_at_the_same_time_install_once(
    tmp_path: Path, folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.environments")
    servers = [Environments(tmp_path / "root") for _ in range(2)]  # as two processes: each has its own locks
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(servers[number % 2].python_for, folder, 1) for number in range(4)]
        commands = {call.result().command for call in calls}
    for server in servers:
        server.close()
    assert len(commands) == 1
    assert sum("is made of requirements.txt" in message for message in caplog.messages) == 1


def test_an_interrupted_installation_is_made_again(
    tmp_path: Path, folder: ModelFolder, environments: Environments
) -> None:
    interpreter = environments.python_for(folder, 1)
    (made,) = (path for path in (tmp_path / "root").iterdir() if path.is_dir())
    environments.close()
    (made / MARKER).unlink()
    (made / "bin" / "python").unlink()
    with closing(Environments(tmp_path / "root")) as again:
        assert again.python_for(folder, 1) == interpreter
    assert evaluate(interpreter.command, "__import__('gauge').value") == "1"


def test_an_environment_whose_interpreter_is_gone_is_made_again(
    tmp_path: Path, folder: ModelFolder, environments: Environments
) -> None:
    interpreter = environments.python_for(folder, 1)
    Path(interpreter.command[0]).unlink()
    Path(interpreter.command[0]).symlink_to("/nowhere/python")
    environments.close()
    with closing(Environments(tmp_path / "root")) as again:
        assert evaluate(again.python_for(folder, 1).command, "__import__('gauge').value") == "1"


@pytest.mark.parametrize("uv", [SMALL, *REAL])
def test_a_failed_installation_names_the_cause_and_leaves_nothing(
    tmp_path: Path, folder: ModelFolder, caplog: pytest.LogCaptureFixture, uv: str | None
) -> None:
    (folder.path / "1" / "requirements.txt").write_text(f"{OFFLINE}package-that-is-not-there==3\n")
    with closing(Environments(tmp_path / "root", installer(uv))) as environments:
        with pytest.raises(ConfigError, match="package-that-is-not-there") as failure:
            environments.python_for(folder, 1)
        assert "model/1: error: its Python environment cannot be made: " in str(failure.value)
        assert "package-that-is-not-there" in caplog.text
        assert [path for path in (tmp_path / "root").iterdir() if path.is_dir()] == []
        (folder.path / "1" / "requirements.txt").write_text(f"{OFFLINE}gauge\n")
        assert environments.python_for(folder, 1).command


def test_a_load_can_leave_the_installation_to_its_thread(tmp_path: Path, folder: ModelFolder) -> None:
    with closing(Environments(tmp_path / "root", wait=False)) as environments:
        with pytest.raises(EnvironmentPending, match="its Python environment is being installed") as pending:
            environments.python_for(folder, 1)
        with pytest.raises(EnvironmentPending) as second:
            environments.python_for(folder, 1)
        assert second.value.done is pending.value.done
        interpreter = pending.value.done.result(60)
        assert environments.python_for(folder, 1) == interpreter


def test_the_first_load_after_a_failed_installation_gets_its_error(tmp_path: Path, folder: ModelFolder) -> None:
    (folder.path / "1" / "requirements.txt").write_text(f"{OFFLINE}package-that-is-not-there\n")
    with closing(Environments(tmp_path / "root", wait=False)) as environments:
        for _ in range(2):  # the second load tries again
            with pytest.raises(EnvironmentPending) as pending:
                environments.python_for(folder, 1)
            assert isinstance(pending.value.done.exception(60), ConfigError)
            with pytest.raises(ConfigError, match="package-that-is-not-there"):
                environments.python_for(folder, 1)


def test_a_server_without_a_folder_for_environments_says_so(folder: ModelFolder) -> None:
    with pytest.raises(ConfigError, match=r"no folder for it \(start the server with --state-dir DIR"):
        Environments(None).python_for(folder, 1)


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path, folder: ModelFolder) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        Environments(tmp_path / "file" / "root").python_for(folder, 1)


def test_a_link_to_requirements_outside_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (tmp_path / "requirements.txt").write_text("package\n")
    (folder.path / "1" / "requirements.txt").symlink_to(tmp_path / "requirements.txt")
    with pytest.raises(ConfigError, match="leads out of the model's folder"):
        environment_source(folder, 1)


def test_an_archive_is_unpacked_once_and_shared(
    tmp_path: Path, environments: Environments, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.environments")
    archive = make_archive(tmp_path / "env.tar.gz")
    interpreter = environments.python_for(model(tmp_path / "a", EXECUTION_ENV_PATH=str(archive)), 1)
    assert evaluate(interpreter.command, "__import__('sys').prefix").startswith(str(tmp_path / "root" / "archive-"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "env.tar.gz").write_bytes(archive.read_bytes())
    within = model(tmp_path / "b", EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    assert environments.python_for(within, 1) == interpreter
    assert sum("is made of env.tar.gz" in message for message in caplog.messages) == 1


def test_an_unchanged_archive_is_not_read_again(
    tmp_path: Path, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive(tmp_path / "env.tar.gz")
    folder = model(tmp_path / "a", EXECUTION_ENV_PATH=str(archive))
    interpreter = environments.python_for(folder, 1)

    def refuse_to_read(_path: Path) -> None:
        raise AssertionError("the archive was read")

    monkeypatch.setattr("headrace.python.environments.open_regular_file", refuse_to_read)
    assert environments.python_for(folder, 1) == interpreter


def test_conda_unpack_runs_in_the_folder(tmp_path: Path, environments: Environments) -> None:
    archive = make_archive(tmp_path / "env.tar.gz")
    script = tmp_path / "packed" / "bin" / "conda-unpack"
    script.write_text("import pathlib, sys\npathlib.Path(sys.prefix, 'unpacked').touch()\n")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "packed", ".")
    interpreter = environments.python_for(model(tmp_path / "a", EXECUTION_ENV_PATH=str(archive)), 1)
    assert (Path(interpreter.command[0]).parents[1] / "unpacked").exists()


def test_a_folder_is_used_as_it_is(tmp_path: Path, environments: Environments) -> None:
    make_archive(tmp_path / "env.tar.gz")
    interpreter = environments.python_for(model(tmp_path / "a", EXECUTION_ENV_PATH=str(tmp_path / "packed")), 1)
    assert interpreter.command == (str(tmp_path / "packed" / "bin" / "python"),)
    assert not interpreter.is_own
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nowhere/env.tar.gz", "'/nowhere/env.tar.gz' does not exist"),
        ("env.tar.gz", r"is a relative path \(write an absolute path, or \$\$TRITON_MODEL_DIRECTORY/env.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/../b/env.tar.gz", "leads out of the model's folder"),
        ("$$TRITON_MODEL_DIRECTORY/link.tar.gz", "leads out of the model's folder"),
    ],
)
def test_a_path_that_names_no_environment_is_refused(
    tmp_path: Path, environments: Environments, text: str, message: str
) -> None:
    folder = model(tmp_path / "a", EXECUTION_ENV_PATH=text)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "env.tar.gz").touch()
    (folder.path / "link.tar.gz").symlink_to(tmp_path / "b" / "env.tar.gz")
    with pytest.raises(ConfigError, match=message):
        environments.python_for(folder, 1)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo \'{"python": "3.7.9", "numpy": "1.21.0"}\'', "has Python 3.7.9, models need 3.8 or later"),
        ('echo \'{"python": "3.12.1", "numpy": ""}\'', "has no NumPy"),
        ("echo nothing", "has an interpreter that does not run here"),
        ("exit 3", "its Python environment cannot be made: python: status 3"),
        ("", "python of its environment cannot be started: Exec format error"),
    ],
)
def test_an_interpreter_that_cannot_run_models_is_refused(
    tmp_path: Path, environments: Environments, script: str, message: str
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n" if script else "\x7fELF of another machine")
    python.chmod(0o755)
    folder = model(tmp_path / "a", EXECUTION_ENV_PATH=str(tmp_path / "env"))
    with pytest.raises(ConfigError, match=message):
        environments.python_for(folder, 1)
    python.unlink()
    with pytest.raises(ConfigError, match="has no bin/python"):
        environments.python_for(folder, 1)


def test_an_archive_that_is_refused_leaves_nothing(tmp_path: Path, environments: Environments) -> None:
    archive = make_archive(tmp_path / "env.tar.gz", copies=False)
    with pytest.raises(ConfigError, match=r"env.tar.gz has the link .* which leads out of the environment"):
        environments.python_for(model(tmp_path / "a", EXECUTION_ENV_PATH=str(archive)), 1)
    assert [path for path in (tmp_path / "root").iterdir() if path.is_dir()] == []


def test_environments_are_listed_and_pruned(tmp_path: Path, folder: ModelFolder, environments: Environments) -> None:
    root = tmp_path / "root"
    assert list_environments(root) == []
    environments.python_for(folder, 1)
    (root / "venv-0123456789abcdef").mkdir()  # an interrupted installation
    (root / "notes").mkdir()
    torn, used = list_environments(root)
    assert (torn.facts, torn.in_use) == (None, False)
    assert used.facts is not None
    assert used.facts.source == str(folder.path / "1" / "requirements.txt")
    assert used.in_use
    assert used.bytes > 100
    assert [entry.name for entry in prune_environments(root, lambda _entry: True)] == [torn.name]
    environments.close()
    assert prune_environments(root, lambda entry: entry.used_s < time.time() - 3600) == []
    assert [entry.name for entry in prune_environments(root, lambda _entry: True)] == [used.name]
    assert [path.name for path in root.iterdir()] == ["notes"]


def test_an_environment_is_not_pruned_while_it_is_made(tmp_path: Path, folder: ModelFolder) -> None:
    root, removed, stop = tmp_path / "root", [], threading.Event()

    def prune() -> None:
        while not stop.is_set():
            removed.extend(prune_environments(root, lambda entry: entry.facts is None))

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        with closing(Environments(root)) as environments:
            assert evaluate(environments.python_for(folder, 1).command, "__import__('gauge').value") == "1"
    finally:
        stop.set()
        thread.join()
    assert removed == []


def test_a_damaged_marker_is_an_incomplete_environment(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", json.dumps({"source": "a", "python": "3", "numpy": "2", "archive": None})):
        (tmp_path / MARKER).write_text(text)
        assert read_facts(tmp_path) is None


def test_the_root_follows_the_options() -> None:
    assert environments_root("", None) is None
    assert environments_root("", Path("state")) == Path("state/environments")
    assert environments_root("here", None) == Path("here")
