"""Files that a client sends with a load request: checked, and kept in a private folder of the server's own."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from headrace.config.document import Document
from headrace.config.model_files import filename_problem
from headrace.core.errors import BadRequest, TooLarge, Unavailable

MAX_FILES = 1024
MAX_BYTES = 1 << 30
_MAX_PATH = 240
_MAX_DEPTH = 8
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def check_files(files: Mapping[str, bytes], config: Document) -> None:
    """Hold files against what a load request may bring: files below a version's folder, label files, data for warm-ups.

    Args:
        files: content by path in the model's folder.
        config: of the same request; it names the label files.

    Raises:
        BadRequest: a path that is none of these, or two that stand in each other's way.
        TooLarge: too many, or too much.
    """
    if len(files) > MAX_FILES:
        raise TooLarge(f"the load request brings {len(files)} files, {MAX_FILES} are the most")
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        raise TooLarge(f"the files of the load request have {size} bytes, {MAX_BYTES} are the most")
    labels = set(_label_files(config))
    for path in files:
        _check_path(path, labels)
    for path in files:
        for folder in PurePosixPath(path).parents:
            if str(folder) in files:
                raise BadRequest(f"'file:{folder}' cannot be a file and the folder of 'file:{path}' at once")
    if not any(_VERSION.fullmatch(path.partition("/")[0]) for path in files):
        raise BadRequest("the load request brings files but no version; send 'file:1/model.onnx'")


def _check_path(path: str, labels: set[str]) -> None:
    shown = ascii("file:" + path[:80])  # it reaches logs and terminals
    problem = filename_problem(path)
    if problem is not None:
        raise BadRequest(f"parameter {shown} leads out of the model's folder ({problem[1]})")
    parts = PurePosixPath(path).parts
    if (
        not path.isprintable()
        or len(path.encode()) > _MAX_PATH
        or len(parts) > _MAX_DEPTH
        or str(PurePosixPath(path)) != path
    ):
        raise BadRequest(
            f"Invalid file path: parameter {shown} is no plain path; write one such as 'file:1/model.onnx'"
        )
    if len(parts) > 1 and (_VERSION.fullmatch(parts[0]) or parts[0] == "warmup"):
        return
    if path not in labels:
        raise BadRequest(
            f"parameter {shown} is no file of a version; send 'file:<version>/<name>', 'file:warmup/<name>', or a file that "
            "the configuration names as label_filename"
        )


def _label_files(config: Document) -> Iterable[str]:
    outputs = config.data.get("output", [])
    for output in outputs if isinstance(outputs, list) else []:
        if isinstance(output, dict) and isinstance(name := output.get("label_filename"), str):
            yield name


class PrivateFolder:
    """A folder of the server's own with one model in it; removed when nobody holds it any more. Thread-safe.

    Args:
        name: of the model.
        files: checked content by path in the model's folder.

    Raises:
        Unavailable: the files cannot be stored.

    Attributes:
        repository: the folder; only this process's user may look into it.
        path: of the model in it.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._lock = threading.Lock()
        self._holders = 1
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        except OSError as error:
            raise Unavailable(f"the files of the load request cannot be stored: {error.strerror}") from error
        self.repository = Path(self._folder.name)
        self.path = self.repository / name
        try:
            for path, content in files.items():
                target = self.path / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as stream:
                    stream.write(content)
        except OSError as error:
            self._folder.cleanup()
            raise Unavailable(f"the files of the load request cannot be stored: {error.strerror}") from error

    def hold(self) -> None:
        """One more has need of it."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """One less; the last one removes it."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._folder.cleanup()
