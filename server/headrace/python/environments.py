"""Python environments of models: archives named by EXECUTION_ENV_PATH, and `requirements.txt` beside the model.

An environment is a folder below one root, named after a hash of everything that it is made of: models and servers share it, and a
changed file gives a new one. It is complete if it has the file `headrace.json`, which is written last. A lock file beside it
serializes the processes that make it. A lock of the folder itself, held while a server runs, keeps `prune` away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from headrace.config.documents import open_regular_file, refuse, within
from headrace.config.files import folder_bytes, locked
from headrace.config.model_folder import ModelFolder
from headrace.core.errors import ConfigError
from headrace.core.threads import start_thread
from headrace.python.environment_archives import ArchiveRefused, unpack
from headrace.runtimes.processes.child_process import signal_group

logger = logging.getLogger("headrace.environments")

PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
REQUIREMENTS = "requirements.txt"
_WHEELS = "wheels"
MARKER = "headrace.json"
OLDEST_PYTHON = (3, 8)
_NAME = re.compile(r"(?:archive|venv)-[0-9a-f]{16}")
# Part of every name: raise it if environments are made in another way, so that older ones are not used.
_FORMAT = 1
_INSTALL_LIMIT_S = 3600.0
_CHECK_LIMIT_S = 60.0
_LOGGED_LINES = 30
_MAX_REASON = 400
_MAX_REQUIREMENTS_BYTES = 1 << 20
_INCLUDED = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[=\s]\s*(\S+)", re.MULTILINE)
_FRAME = re.compile("[\u2500-\u257f\u00d7]")
_FACTS = """
import json, platform, sys
try:
    import numpy
    numpy = numpy.__version__
except ImportError as error:
    numpy = ""
print(json.dumps({"python": platform.python_version(), "numpy": numpy}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter that runs a model.

    Attributes:
        command: words before the program's file.
        is_own: it is the server's own interpreter, to which variables such as PYTHONPATH apply.
        label: description for the log and the index.
    """

    command: tuple[str, ...]
    is_own: bool
    label: str


def own_interpreter() -> Interpreter:
    """Return the interpreter of the server."""
    return Interpreter((sys.executable,), True, f"Python {platform.python_version()} of the server")


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Origin of an environment.

    Attributes:
        kind: "archive", "folder" (used as it is) or "venv" (installed from requirements).
        path: the archive, the folder, or `requirements.txt`.
        subject: model and version, for findings.
    """

    kind: str
    path: Path
    subject: str


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """Content of the file `headrace.json` of an environment.

    Attributes:
        source: the archive or requirements file that it was made of.
        python: version of its interpreter.
        numpy: version of NumPy in it.
        archive: size, time of modification in nanoseconds and inode of the archive; () for an environment of requirements.
    """

    source: str
    python: str
    numpy: str
    archive: tuple[int, ...] = ()


class EnvironmentPending(ConfigError):
    """The environment of a model is being installed.

    Args:
        subject: model and version.
        done: completes with the interpreter or the error of the installation.
    """

    def __init__(self, subject: str, done: Future[Interpreter]) -> None:
        super().__init__(refuse(subject, None, "its Python environment is being installed").findings)
        self.done = done


def environment_source(folder: ModelFolder, version: int) -> EnvironmentSource | None:
    """Return the source of a version's environment; None if the server's own interpreter runs it.

    Raises:
        ConfigError: the named archive or folder does not exist, or lies outside of the model's folder without being named so.
    """
    subject = f"{folder.name}/{version}"
    text = folder.config.parameters.get(PARAMETER, "")
    if text:
        path = _named_path(text, folder.path, subject)
        if path.is_dir():
            return EnvironmentSource("folder", path, subject)
        if not path.is_file():
            raise refuse(
                subject, None, f"{PARAMETER} {text!r} does not exist", "write the path of an archive or a folder"
            )
        return EnvironmentSource("archive", path, subject)
    for path in (folder.path / str(version) / REQUIREMENTS, folder.path / REQUIREMENTS):
        if path.is_file():
            if not within(path, folder.path):
                message = f"{REQUIREMENTS} is a link that leads out of the model's folder"
                raise refuse(subject, None, message, "copy the file")
            return EnvironmentSource("venv", path, subject)
    return None


def _named_path(text: str, folder: Path, subject: str) -> Path:
    if text.startswith(_MODEL_DIRECTORY):
        path = folder / text.removeprefix(_MODEL_DIRECTORY).lstrip("/")
        if not within(path, folder):
            message = f"{PARAMETER} {text!r} leads out of the model's folder"
            raise refuse(subject, None, message, "write an absolute path, or a path in the folder")
        return path
    path = Path(text)
    if not path.is_absolute():
        cure = f"write an absolute path, or {_MODEL_DIRECTORY}/{path.name}"
        raise refuse(subject, None, f"{PARAMETER} {text!r} is a relative path", cure)
    return path


class Environments:
    """Python environments below a root folder.

    Ownership: `_lock` guards everything. Each installation runs on a thread of its own.

    Args:
        root: folder of the environments, made when the first is installed; None if there is none.
        uv: path of uv; "" installs with pip.
        wait: `python_for` waits until an environment is made.
        variables: NAME=VALUE, variables of the environment of uv.
    """

    def __init__(
        self, root: Path | None, uv: str | None = None, *, wait: bool = True, variables: Sequence[str] = ()
    ) -> None:
        self._root = None if root is None else root.expanduser().absolute()
        self._uv = (shutil.which("uv") or "") if uv is None else uv
        self._wait = wait
        self._variables = variables
        self._lock = threading.Lock()
        self._installing: dict[str, Future[Interpreter]] = {}
        self._failed: dict[str, ConfigError] = {}
        self._in_use: dict[str, int] = {}
        self._checked: dict[tuple[str, int], EnvironmentFacts] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def python_for(self, folder: ModelFolder, version: int) -> Interpreter:
        """Return the interpreter of a version; its environment is made if it is missing.

        Args:
            folder: the model's folder.
            version: version number.

        Raises:
            EnvironmentPending: the environment is being made, and `wait` is off. The first call after its end returns it, or
                raises the error.
            ConfigError: it cannot be made or used; has the reason.
        """
        source = environment_source(folder, version)
        if source is None:
            return own_interpreter()
        return self.python_of(source)

    @property
    def uses_uv(self) -> bool:
        """True if uv installs packages, else pip."""
        return bool(self._uv)

    def is_present(self, source: EnvironmentSource) -> bool:
        """True if the environment of an archive or requirements file has been made."""
        return self._present(self._name(source)) is not None

    def python_of(self, source: EnvironmentSource) -> Interpreter:
        """Return the interpreter of an environment, which is made if it is missing.

        Args:
            source: archive, folder or requirements file.

        Raises:
            EnvironmentPending: as in `python_for`.
            ConfigError: as in `python_for`.
        """
        if source.kind == "folder":
            return self._check(source, source.path, str(source.path))
        try:
            name = self._name(source)
        except OSError as error:
            message = f"{source.path.name} cannot be read: {error.strerror}"
            raise refuse(source.subject, None, message, "check the file and its permissions") from None
        interpreter = self._present(name)
        if interpreter is not None:
            return interpreter
        with self._lock:
            failure = self._failed.pop(name, None)
        if failure is not None:
            raise failure
        done = self._install(name, source)
        if self._wait:
            return done.result()
        raise EnvironmentPending(source.subject, done)

    def stop(self) -> None:
        """End all installations, and start no more."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            signal_group(process, signal.SIGKILL)

    def close(self) -> None:
        """`stop`, and release the locks of used environments: their models are closed."""
        self.stop()
        with self._lock:
            descriptors = list(self._in_use.values())
            self._in_use.clear()
        for descriptor in descriptors:
            os.close(descriptor)

    # Names

    def _name(self, source: EnvironmentSource) -> str:
        if source.kind == "archive":
            return f"archive-{self._archive_digest(source.path)[:16]}"
        digest = hashlib.sha256(f"{_FORMAT} {sys.version} {sysconfig.get_platform()} {sys.base_prefix}\n".encode())
        for file in _requirement_files(source.path):
            digest.update(f"{file.name}\n".encode("utf-8", "surrogateescape") + _read(file) + b"\0")
        wheels = source.path.parent / _WHEELS
        for wheel in sorted(wheels.iterdir()) if wheels.is_dir() else ():
            digest.update(f"{wheel.name} {wheel.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return f"venv-{digest.hexdigest()[:16]}"

    def _archive_digest(self, path: Path) -> str:
        """Return the digest of an archive; one that was unpacked before is not read again."""
        status = path.stat()
        identity = (status.st_size, status.st_mtime_ns, status.st_ino)
        for environment in self._folders():
            facts = read_facts(environment)
            if facts is not None and facts.archive == identity and facts.source == str(path):
                return environment.name.removeprefix("archive-")
        with open_regular_file(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _folders(self) -> Iterable[Path]:
        if self._root is None or not self._root.is_dir():
            return ()
        return [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]

    # Environments that exist

    def _present(self, name: str) -> Interpreter | None:
        """Return the interpreter of a complete environment, whose folder then stays locked against `prune`."""
        if self._root is None:
            return None
        folder = self._root / name
        facts = read_facts(folder)
        # Without the interpreter that it was made with, an environment is made again.
        if facts is None or not _python(folder).exists():
            return None
        with self._lock:
            if name not in self._in_use and not self._closed:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                _share(descriptor)
                self._in_use[name] = descriptor
        if read_facts(folder) is None:  # removed before it was locked
            with self._lock:
                descriptor = self._in_use.pop(name, -1)
            if descriptor >= 0:
                os.close(descriptor)
            return None
        os.utime(folder / MARKER)
        return _interpreter(folder, facts.python, name)

    def _check(self, source: EnvironmentSource, folder: Path, label: str) -> Interpreter:
        """Return the interpreter of an unpacked folder after a check of its Python and NumPy."""
        python = _python(folder)
        try:
            key = (str(python), python.stat().st_mtime_ns)
        except OSError:
            raise refuse(source.subject, None, f"{label} has no bin/python", "name the folder above bin") from None
        with self._lock:
            facts = self._checked.get(key)
        if facts is None:
            facts = self._facts(source, folder, label)
            with self._lock:
                self._checked[key] = facts
        return _interpreter(folder, facts.python, label)

    def _facts(self, source: EnvironmentSource, folder: Path, label: str) -> EnvironmentFacts:
        output = self._run(source.subject, [str(_python(folder)), "-E", "-s", "-c", _FACTS], folder, _CHECK_LIMIT_S)
        try:
            facts = json.loads(output.splitlines()[-1])
            version, numpy = str(facts["python"]), str(facts["numpy"])
        except (ValueError, LookupError):
            message = f"{label} has an interpreter that does not run here"
            raise refuse(source.subject, None, message, "make the environment on this kind of machine") from None
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_PYTHON:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            message = f"{label} has Python {version}, models need {oldest} or later"
            raise refuse(source.subject, None, message, f"make the environment with Python {oldest} or later")
        if not numpy:
            raise refuse(source.subject, None, f"{label} has no NumPy", "add numpy to the environment")
        return EnvironmentFacts(str(source.path), version, numpy)

    # Environments that are made

    def _install(self, name: str, source: EnvironmentSource) -> Future[Interpreter]:
        """Start an installation, or return the one that runs."""
        if self._root is None:
            message = f"needs a Python environment of its own ({source.path.name}), and the server has no folder for it"
            raise refuse(
                source.subject, None, message, "start the server with --state-dir DIR or --environments-dir DIR"
            )
        with self._lock:
            running = self._installing.get(name)
            if running is not None:
                return running
            done: Future[Interpreter] = Future()
            done.set_running_or_notify_cancel()  # a cancelled caller does not cancel the installation
            self._installing[name] = done
        thread = threading.Thread(target=self._make, args=(name, source, done), name=f"environment {name}", daemon=True)
        try:
            start_thread(thread)
        except BaseException:
            with self._lock:
                del self._installing[name]
            raise
        return done

    def _make(self, name: str, source: EnvironmentSource, done: Future[Interpreter]) -> None:
        result: Interpreter | ConfigError
        try:
            result = self._locked_make(name, source)
        except ConfigError as error:
            result = error
        except OSError as error:
            message = f"its Python environment cannot be made: {error.strerror or error}"
            result = refuse(source.subject, None, message, "check the folder of --environments-dir")
        except BaseException:
            logger.exception("the environment %s could not be made", name)
            result = refuse(source.subject, None, "its Python environment cannot be made", "the server's log has more")
        with self._lock:
            del self._installing[name]
            if isinstance(result, ConfigError) and not self._wait:
                self._failed[name] = result
        if isinstance(result, ConfigError):
            done.set_exception(result)
        else:
            done.set_result(result)

    def _locked_make(self, name: str, source: EnvironmentSource) -> Interpreter:
        assert self._root is not None
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = self._root / name
        on_wait = partial(logger.info, "another process makes the environment %s: waiting for it", name)
        with locked(self._root / f"{name}.lock", on_wait):
            interpreter = self._present(name)
            if interpreter is not None:
                return interpreter
            begun = time.monotonic()
            logger.info("model %s: its Python environment %s is made of %s", source.subject, name, source.path.name)
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
            try:
                make = self._unpack if source.kind == "archive" else self._create_venv
                facts = make(source, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            write_facts(folder, facts)
            seconds = time.monotonic() - begun
            logger.info("environment %s (Python %s) is complete after %.1f s", name, facts.python, seconds)
            interpreter = self._present(name)
        if interpreter is None:
            raise refuse(source.subject, None, f"the environment {name} was removed", "load the model again")
        return interpreter

    def _unpack(self, source: EnvironmentSource, folder: Path) -> EnvironmentFacts:
        status, archive = source.path.stat(), source.path.name
        try:
            unpack(source.path, folder)
        except ArchiveRefused as error:
            raise refuse(source.subject, None, f"{archive} {error}", "pack the environment with conda-pack") from None
        if not _python(folder).exists():
            message = f"{archive} has no bin/python"
            raise refuse(source.subject, None, message, "pack the content of the environment, not a folder around it")
        unpacked = folder / "bin" / "conda-unpack"
        if unpacked.is_file():  # writes the folder's path into scripts and libraries
            self._run(source.subject, [str(_python(folder)), "-E", "-s", str(unpacked)], folder, _INSTALL_LIMIT_S)
        facts = self._facts(source, folder, archive)
        identity = (status.st_size, status.st_mtime_ns, status.st_ino)
        return EnvironmentFacts(facts.source, facts.python, facts.numpy, identity)

    def _create_venv(self, source: EnvironmentSource, folder: Path) -> EnvironmentFacts:
        python, requirements = str(_python(folder)), source.path
        packages = ["-r", str(requirements.absolute()), "numpy"]
        if (requirements.parent / _WHEELS).is_dir():
            packages += ["--find-links", str((requirements.parent / _WHEELS).absolute())]
        if self._uv:
            create = [self._uv, "venv", "--quiet", "--python", sys.executable, str(folder)]
            install = ["env", *self._variables, self._uv, "pip", "install", "--quiet", "--python", python, *packages]
        else:
            create = [sys.executable, "-m", "venv", str(folder)]
            options = ["--disable-pip-version-check", "--no-input", "--quiet"]
            install = [python, "-I", "-m", "pip", "install", *options, *packages]
        for command in (create, install):
            self._run(source.subject, command, requirements.parent, _INSTALL_LIMIT_S)
        return self._facts(source, folder, f"the environment of {requirements.name}")

    def _run(self, subject: str, command: Sequence[str], folder: Path, limit_s: float) -> str:
        """Run a program in a folder and return its standard output.

        Raises:
            ConfigError: it failed, or ran longer than the limit; the log has its last lines.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                with self._lock:
                    if self._closed:
                        raise refuse(subject, None, "the server is stopping")
                    # Its own process group: compilers that pip starts end with it.
                    process = subprocess.Popen(
                        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0
                    )
                    self._processes.add(process)
            except OSError as error:
                message = f"{Path(command[0]).name} of its environment cannot be started: {error.strerror}"
                raise refuse(subject, None, message, "make the environment on this kind of machine") from None
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                signal_group(process, signal.SIGKILL)
                process.wait()
                message = f"{Path(command[0]).name} did not end within {limit_s:g} s"
                raise refuse(subject, None, f"its Python environment cannot be made: {message}") from None
            finally:
                with self._lock:
                    self._processes.discard(process)
            text = _text(output)
            if status:
                raise _failure(subject, command, status, [*text.splitlines(), *_text(errors).splitlines()])
            return text


def read_facts(folder: Path) -> EnvironmentFacts | None:
    """Return the facts of an environment; None if it is incomplete."""
    try:
        data = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return EnvironmentFacts(data["source"], data["python"], data["numpy"], tuple(data["archive"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_facts(folder: Path, facts: EnvironmentFacts) -> None:
    """Mark an environment as complete."""
    temporary = folder / f".{MARKER}.tmp"
    temporary.write_text(json.dumps(asdict(facts)), encoding="utf-8")
    temporary.replace(folder / MARKER)


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """An environment on disk, for `headrace environments`.

    Attributes:
        name: name of its folder.
        facts: its facts; None if it is incomplete.
        bytes: bytes of its files.
        used_s: time of its last use, seconds since the epoch.
        in_use: a running server has a model in it, or makes it.
    """

    name: str
    facts: EnvironmentFacts | None
    bytes: int
    used_s: float
    in_use: bool


def list_environments(root: Path) -> list[EnvironmentEntry]:
    """Return the environments below a root folder, sorted by name."""
    result = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if _NAME.fullmatch(folder.name) and folder.is_dir():
            facts = read_facts(folder)
            used_s = (folder if facts is None else folder / MARKER).stat().st_mtime
            result.append(EnvironmentEntry(folder.name, facts, folder_bytes(folder), used_s, _is_in_use(root, folder)))
    return result


def prune_environments(root: Path, is_unused: Callable[[EnvironmentEntry], bool]) -> list[EnvironmentEntry]:
    """Remove environments that no server uses; returns them.

    Args:
        root: folder of the environments.
        is_unused: chooses among those that are not in use.
    """
    removed = []
    for entry in list_environments(root):
        if entry.in_use or not is_unused(entry):
            continue
        folder, lock = root / entry.name, root / f"{entry.name}.lock"
        try:
            with locked(lock, block=False):
                if not _is_locked(folder):
                    (folder / MARKER).unlink(missing_ok=True)  # incomplete from here on
                    shutil.rmtree(folder)
                    lock.unlink(missing_ok=True)
                    removed.append(entry)
        except BlockingIOError:
            continue
    return removed


def _is_in_use(root: Path, folder: Path) -> bool:
    lock = root / f"{folder.name}.lock"
    if not lock.exists():  # a list makes no files
        return _is_locked(folder)
    try:
        with locked(lock, block=False):
            return _is_locked(folder)
    except BlockingIOError:
        return True


def _is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that cannot lock folders
        return False
    finally:
        os.close(descriptor)
    return False


def _share(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        logger.debug("an environment cannot be locked: %s", error)


def _interpreter(folder: Path, version: str, label: str) -> Interpreter:
    return Interpreter((str(_python(folder)),), False, f"Python {version} of {label}")


def _python(folder: Path) -> Path:
    return folder.absolute() / "bin" / "python"


def _requirement_files(path: Path, seen: frozenset[Path] = frozenset()) -> list[Path]:
    """Return a requirements file and the files that it includes."""
    files = [path]
    for name in _INCLUDED.findall(_read(path).decode("utf-8", "replace")):
        included = path.parent / name
        if included not in seen and included != path and included.is_file():
            files += _requirement_files(included, seen | {path})
    return files


def _read(path: Path) -> bytes:
    with open_regular_file(path) as stream:
        return stream.read(_MAX_REQUIREMENTS_BYTES)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "replace")


def _failure(subject: str, command: Sequence[str], status: int, lines: Sequence[str]) -> ConfigError:
    """Log the last lines of a failed program and return the error, with its last message."""
    program = Path(command[0]).name
    kept = ["".join(c for c in line if c.isprintable()).rstrip() for line in lines[-_LOGGED_LINES:]]
    logger.error("model %s: %s ended with status %d:\n%s", subject, " ".join(command[:4]), status, "\n".join(kept))
    messages = [_FRAME.sub("", line).strip(" \u25b6") for line in kept]
    reason = " ".join([message for message in messages if message][-3:])[-_MAX_REASON:] or f"status {status}"
    message = f"its Python environment cannot be made: {program}: {reason}"
    return refuse(subject, None, message, "the server's log has the whole output")


def environments_root(environments_dir: str, state: Path | None) -> Path | None:
    """Return the root folder of the environments.

    Args:
        environments_dir: value of --environments-dir; "" for a folder in the state folder.
        state: the state folder; None if there is none.
    """
    if environments_dir:
        return Path(environments_dir)
    return None if state is None else state / "environments"
