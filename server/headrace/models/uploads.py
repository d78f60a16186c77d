"""Files that a load request carries: their checks, and the temporary folder that has them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from headrace.config.config_base import is_version_number
from headrace.config.documents import Document
from headrace.config.files import SharedFolder
from headrace.config.model_folder import DATA_FOLDERS, filename_problem
from headrace.core.errors import BadRequest, TooLarge, Unavailable

MAX_FILES = 1024
MAX_BYTES = 1 << 30
_MAX_PATH = 240
_MAX_DEPTH = 8


def check_files(files: Mapping[str, bytes], config: Document) -> None:
    """Check the files that a load request carries: files of a version, label files and warm-up data.

    Args:
        files: content by path, relative to the model's folder.
        config: configuration in the same request; it names the label files.

    Raises:
        BadRequest: a path is not allowed, or one path is both a file and a folder.
        TooLarge: more than `MAX_FILES` files, or more than `MAX_BYTES` bytes.
    """
    if len(files) > MAX_FILES:
        raise TooLarge(f"the load request has {len(files)} files, at most {MAX_FILES} are allowed: send fewer files")
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        raise TooLarge(
            f"the files of the load request have {size} bytes, at most {MAX_BYTES} are allowed: send smaller files"
        )
    labels = set(_label_files(config))
    for path in files:
        _check_path(path, labels)
    for path in files:
        for folder in PurePosixPath(path).parents:
            if str(folder) in files:
                raise BadRequest(f"'file:{folder}' is a file and also the folder of 'file:{path}': rename one of them")
    is_pipeline = not {"ensemble_scheduling", "pipeline"}.isdisjoint(config.data)
    if not is_pipeline and not any(is_version_number(path.partition("/")[0]) for path in files):
        raise BadRequest("the load request has files but no version folder: send 'file:1/model.onnx'")


def _check_path(path: str, labels: set[str]) -> None:
    parameter = ascii("file:" + path[:80])  # the value appears in logs and terminals
    problem = filename_problem(path)
    if problem is not None:
        raise BadRequest(f"parameter {parameter} is a path outside of the model's folder: {problem[1]}")
    parts = PurePosixPath(path).parts
    if (
        not path.isprintable()
        or len(path.encode()) > _MAX_PATH
        or len(parts) > _MAX_DEPTH
        or str(PurePosixPath(path)) != path
    ):
        raise BadRequest(
            f"Invalid file path: parameter {parameter} is not a plain relative path: write one such as 'file:1/model.onnx'"
        )
    if len(parts) > 1 and (is_version_number(parts[0]) or parts[0] in DATA_FOLDERS):
        return
    if path not in labels:
        raise BadRequest(
            f"parameter {parameter} is not a file of a version: send 'file:<version>/<name>', 'file:warmup/<name>', "
            "'file:initial_state/<name>', or a file that the configuration names as label_filename"
        )


def _label_files(config: Document) -> Iterable[str]:
    outputs = config.data.get("output", [])
    for output in outputs if isinstance(outputs, list) else []:
        if isinstance(output, dict) and isinstance(name := output.get("label_filename"), str):
            yield name


class PrivateFolder(SharedFolder):
    """Temporary folder with the uploaded files of one model; removed with its last reference. Thread-safe.

    Args:
        name: name of the model.
        files: checked content by path, relative to the model's folder.

    Raises:
        Unavailable: the files cannot be stored.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        except OSError as error:
            raise _cannot_store(error) from error
        super().__init__(Path(self._folder.name), name, self._folder.cleanup)
        try:
            for path, content in files.items():
                target = self.path / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as stream:
                    stream.write(content)
        except OSError as error:
            self._folder.cleanup()
            raise _cannot_store(error) from error


def _cannot_store(error: OSError) -> Unavailable:
    cure = "free space in the server's temporary folder"
    return Unavailable(f"the files of the load request cannot be stored: {error.strerror}; {cure}")
