"""Files of a model on disk: atomic writes, locks that end with their process, and edits of a configuration file.

Locks are flock(2)'s: between processes and between threads, released with the descriptor.

An edit changes the batch size and the number of instances; all other text stays as it is. The file is edited as text,
at the positions that its parser reports: comments, order, quotes and blank lines survive. The new text is parsed again
and compared with the expected data before anything is written.
"""

from __future__ import annotations

import copy
import difflib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.config.documents import Document, TextField, outline, refuse
from headrace.config.model_folder import CONFIG_FILES

# Errors of file systems that cannot lock a folder: NFS needs a writable descriptor.
_NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
_FOLDER_LOCK = ".build.lock"
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]{8}\.tmp")


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None, *, block: bool = True) -> Iterator[int]:
    """Hold the lock of a file, which is created if it is missing; yields its descriptor.

    The holder may unlink the file: a waiting process then locks the new one.

    Args:
        path: lock file, used for nothing else.
        on_wait: called once if another process or thread holds the lock.
        block: wait for the lock.

    Raises:
        BlockingIOError: another process or thread holds the lock, and `block` is off.
        OSError: the file cannot be created or locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _flock(descriptor, on_wait, block)
            on_wait = None
            if _is_same_file(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, without a lock file if the file system can lock folders.

    Raises:
        OSError: the path is not a folder, or cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            with locked(folder / _FOLDER_LOCK):
                yield
            return
        yield
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return a new hidden name beside `path`; see `is_temporary`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def is_temporary(name: str) -> bool:
    """True for the names that `temporary_name` returns."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_oldest(folder: Path, kept: int, suffix: str = ".json") -> None:
    """Remove the least recently used of a folder's files with a suffix beyond `kept`; raises OSError if it cannot be read."""
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.name.endswith(suffix)]
    if len(files) > kept:
        with suppress(OSError):  # another process may remove the same files
            for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[:-kept]:
                Path(entry.path).unlink(missing_ok=True)


_PROCESS_LOCK = "lock"


def create_process_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Create a folder for files of this process; those of processes that were killed are removed.

    Only the user of this process may read it.

    Args:
        parent: folder around it; created if it is missing.
        prefix: of its name; folders of other prefixes are not touched.

    Returns:
        The folder, and the descriptor of its lock: close it after the folder has been removed.

    Raises:
        OSError: it cannot be created.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_folders(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    descriptor = os.open(folder / _PROCESS_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


class SharedFolder:
    """Folder with one model, removed with its last reference; the creator has the first one. Thread-safe.

    Args:
        repository: the folder; only the user of this process may read it.
        name: name of the model.
        remove: removes the folder.

    Attributes:
        repository: see Args.
        path: the model's folder in it.
    """

    def __init__(self, repository: Path, name: str, remove: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._references = 1
        self._remove = remove
        self.repository = repository
        self.path = repository / name

    def acquire(self) -> None:
        """Add a reference."""
        with self._lock:
            self._references += 1

    def release(self) -> None:
        """Drop a reference; the last one removes the folder."""
        with self._lock:
            self._references -= 1
            if self._references:
                return
        self._remove()


def _remove_stale_folders(parent: Path, prefix: str) -> None:
    """Remove the folders of killed processes; their locks are free."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(folder / _PROCESS_LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def write_durably(
    path: Path, content: bytes | memoryview, mode: int = 0o666, prepare: Callable[[int], None] | None = None
) -> None:
    """Replace a file atomically and wait until it is on disk; readers see the old content or the new one.

    Args:
        path: the file.
        content: new content.
        mode: of the new file, less the process's umask.
        prepare: takes the descriptor of the new file before it has content, e.g. to set its owner; None for nothing.

    Raises:
        OSError: it could not be written; the old content is unchanged.
    """
    temporary = temporary_name(path)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as stream:
            if prepare is not None:
                prepare(stream.fileno())
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk.

    Raises:
        OSError: it is not, e.g. because the disk is full.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems refuse to sync a folder, and do not need it.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _flock(descriptor: int, on_wait: Callable[[], None] | None, block: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not block:
            raise
        if on_wait is not None:
            on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


NEW_FILE = "config.yaml"
_BY_HAND = "write it by hand"
_CPU_PARAMETER = "headrace.cpu_max_batch_size"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to write.

    Attributes:
        instances: `count` of the only instance group; None: unchanged.
        max_batch_size: None: unchanged.
        dynamic_batching: add an empty block if there is none.
        cpu_max_batch_size: None: unchanged.
    """

    instances: int | None = None
    max_batch_size: int | None = None
    dynamic_batching: bool = False
    cpu_max_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A model's configuration file.

    Attributes:
        path: `config.pbtxt` or `config.yaml` in the model's folder; `config.yaml` if the model has none.
        text: content of the file; "" if it is missing.
        exists: the file exists.
    """

    path: Path
    text: str
    exists: bool

    @property
    def document(self) -> Document:
        """The parsed file."""
        return CONFIG_FILES[self.path.name](self.text, self.path.name)

    def apply(self, changes: Changes) -> str:
        """Return the text with the changes.

        Raises:
            ConfigError: the change has no single place in this file, e.g. several instance groups.
        """
        expected = _changed(self.document, changes)
        edit = _edit_pbtxt if self.path.suffix == ".pbtxt" else _edit_yaml
        text = edit(self.text, changes)
        if CONFIG_FILES[self.path.name](text, self.path.name).data != expected:
            raise refuse(self.path.name, None, "cannot be changed without touching other fields", _BY_HAND)
        return text

    def diff(self, text: str) -> str:
        """Return a unified diff from the file to `text`."""
        old = self.path.name if self.exists else "/dev/null"
        lines = difflib.unified_diff(self.text.splitlines(), text.splitlines(), old, self.path.name, lineterm="")
        return "\n".join(lines)

    def write(self, text: str) -> None:
        """Replace the file atomically; its permissions stay.

        Raises:
            ConfigError: the file has changed since it was read, or cannot be written.
        """
        path = self.path.resolve()
        try:
            if read_config_file(self.path.parent) != self:
                raise refuse(self.path.name, None, "has changed since it was read", "run the command again")
            mode = path.stat().st_mode if self.exists else None
            write_durably(path, text.encode())
            if mode is not None:
                path.chmod(mode)
        except OSError as error:
            cure = "check the permissions of the folder, or copy the lines"
            raise refuse(str(self.path), None, f"cannot be written: {error.strerror or error}", cure) from None


def read_config_file(folder: Path) -> ConfigFile:
    """Read a model's configuration file as text.

    Raises:
        ConfigError: it is not UTF-8.
        OSError: it cannot be read.
    """
    path = next((folder / name for name in CONFIG_FILES if (folder / name).is_file()), None)
    if path is None:
        return ConfigFile(folder / NEW_FILE, "", False)
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise refuse(path.name, None, "is not UTF-8", "save the file as UTF-8") from None
    if text.startswith("\ufeff"):
        raise refuse(path.name, 1, "begins with a byte order mark", "save the file as UTF-8 without one")
    return ConfigFile(path, text, True)


def _changed(document: Document, changes: Changes) -> dict[str, object]:
    """Return the data that the file should have after the changes."""
    data: dict[str, Any] = copy.deepcopy(document.data)
    if changes.max_batch_size is not None:
        data["max_batch_size"] = changes.max_batch_size
    if changes.dynamic_batching:
        data.setdefault("dynamic_batching", {})
    if changes.cpu_max_batch_size is not None:
        if document.headrace_prefix:
            data.setdefault("parameters", {})[_CPU_PARAMETER] = str(changes.cpu_max_batch_size)
        else:
            data["cpu_max_batch_size"] = changes.cpu_max_batch_size
    if changes.instances is not None:
        groups = data.setdefault("instance_group", [])
        if not groups:
            groups.append({})
        if len(groups) > 1:
            cure = f"{_BY_HAND}: the counts of all groups make the number of instances"
            raise refuse(
                document.path, document.line_of(("instance_group",)), f"has {len(groups)} instance groups", cure
            )
        groups[0]["count"] = changes.instances
    return data


@dataclass(frozen=True, slots=True)
class _Replacement:
    start: int
    end: int
    text: str


def _apply(text: str, replacements: list[_Replacement]) -> str:
    for replacement in sorted(replacements, key=lambda replacement: replacement.start, reverse=True):
        text = text[: replacement.start] + replacement.text + text[replacement.end :]
    return text


def _edit_yaml(text: str, changes: Changes) -> str:
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    fields = {} if root is None else {key.value: value for key, value in root.value}
    replacements, missing = [], []
    for name in ("max_batch_size", "cpu_max_batch_size"):
        number = getattr(changes, name)
        if number is not None and name in fields:
            replacements.append(_of_node(fields[name], str(number)))
        elif number is not None:
            missing.append(f"{name}: {number}")
    if changes.dynamic_batching and "dynamic_batching" not in fields:
        missing.append("dynamic_batching: {}")
    if changes.instances is not None:
        if "instance_group" in fields:
            replacements.append(_yaml_count(fields["instance_group"], changes.instances))
        else:
            missing.append(f"instance_group: [{{count: {changes.instances}}}]")
    if root is None:
        return _append_lines(text, missing)
    if missing and root.flow_style:
        start = root.start_mark.index + 1
        replacements.append(_Replacement(start, start, ", ".join(missing) + (", " if root.value else "")))
    elif missing:
        # After the last field: comments, or the end of the document, may follow.
        end = root.end_mark.index
        indent = " " * root.start_mark.column
        before = "" if not text[:end] or text[:end].endswith("\n") else "\n"
        lines = "".join(f"{indent}{line}\n" for line in missing)
        replacements.append(_Replacement(end, end, before + lines))
    return _apply(text, replacements)


def _yaml_count(groups: Any, instances: int) -> _Replacement:
    """Replace `count` of the only group in a sequence."""
    if not groups.value:
        return _of_node(groups, f"[{{count: {instances}}}]")
    group = groups.value[0]
    for key, value in group.value:
        if key.value == "count":
            return _of_node(value, str(instances))
    start = group.start_mark.index
    if group.flow_style:
        return _Replacement(start + 1, start + 1, f"count: {instances}" + (", " if group.value else ""))
    return _Replacement(start, start, f"count: {instances}\n{' ' * group.start_mark.column}")


def _of_node(node: Any, text: str) -> _Replacement:
    return _Replacement(node.start_mark.index, node.end_mark.index, text)


def _edit_pbtxt(text: str, changes: Changes) -> str:
    fields = outline(text)
    by_name = {field.name: field for field in reversed(fields)}
    replacements, missing = [], []
    if changes.max_batch_size is not None:
        if field := by_name.get("max_batch_size"):
            replacements.append(_Replacement(field.start, field.end, str(changes.max_batch_size)))
        else:
            missing.append(f"max_batch_size: {changes.max_batch_size}")
    if changes.cpu_max_batch_size is not None:
        if field := _pbtxt_parameter(fields, _CPU_PARAMETER):
            replacements.append(_Replacement(field.start, field.end, f'"{changes.cpu_max_batch_size}"'))
        else:
            value = f'{{ string_value: "{changes.cpu_max_batch_size}" }}'
            missing.append(f'parameters {{ key: "{_CPU_PARAMETER}" value: {value} }}')
    if changes.dynamic_batching and "dynamic_batching" not in by_name:
        missing.append("dynamic_batching { }")
    if changes.instances is not None:
        if field := by_name.get("instance_group"):
            replacements.append(_pbtxt_count(field, changes.instances))
        else:
            missing.append(f"instance_group [ {{ count: {changes.instances} }} ]")
    return _append_lines(_apply(text, replacements), missing)


def _pbtxt_parameter(fields: list[TextField], key: str) -> TextField | None:
    """Return the text of a `parameters` entry, the last one of a key; None if there is no such entry."""
    for field in reversed(fields):
        if field.name == "parameters" and [part.value for part in field.inner("key")] == [key]:
            return next((text for value in field.inner("value") for text in value.inner("string_value")), None)
    return None


def _pbtxt_count(group: TextField, instances: int) -> _Replacement:
    """Replace `count` of the only group."""
    if group.is_empty_list:
        return _Replacement(group.start, group.end, f"[ {{ count: {instances} }} ]")
    for count in group.inner("count"):
        return _Replacement(count.start, count.end, str(instances))
    return _Replacement(group.start + 1, group.start + 1, f" count: {instances}")


def _append_lines(text: str, lines: list[str]) -> str:
    if not lines:
        return text
    return text + ("" if not text or text.endswith("\n") else "\n") + "".join(f"{line}\n" for line in lines)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; a file with several links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
