"""Files beside a build: written whole or not at all, and the timing cache, which makes the next build fast.

The timing cache holds what TensorRT measured of kernels; it is right for one GPU and one TensorRT, and TensorRT itself tells a
foreign one (IBuilderConfig.set_timing_cache).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from engines.errors import BuildError
from engines.targets.tensorrt_api import TensorRt

logger = logging.getLogger("headrace.tensorrt")


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file by way of a temporary one beside it, so that nobody ever sees a part of it.

    Raises:
        BuildError: the disk is full, or the folder cannot be written to.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "check the folder's owner and permissions"
        raise BuildError(f"{path} cannot be written ({error.strerror or error}): {cure}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


class TimingCache:
    """A file of measured kernels.

    Args:
        api: TensorRT.
        path: the file; None: nothing is kept beyond one build.
    """

    def __init__(self, api: TensorRt, path: Path | None) -> None:
        self._api = api
        self._path = path

    def attach(self, config: Any) -> None:
        """Let a build use what the file holds; what is not for this GPU and this TensorRT is left aside."""
        if self._path is None:
            return
        with self._api.log.collect():
            cache = self._read(config)
            if cache is not None and config.set_timing_cache(cache, False):
                return
            if cache is not None:
                logger.info("%s is of another GPU or another TensorRT and is begun anew", self._path.name)
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def save(self, config: Any) -> None:
        """Bring the file up to date after a build; a failure costs the next build's time alone and is only logged."""
        if self._path is None:
            return
        with self._api.log.collect():
            cache = config.get_timing_cache()
            if cache is None:
                return
            # Another builder may have written in the meantime: what it found is kept.
            other = self._read(config)
            if other is not None:
                cache.combine(other, False)
            try:
                write_whole(self._path, memoryview(cache.serialize()))
            except BuildError as error:
                logger.warning("the timing cache is not kept: %s", error)

    def _read(self, config: Any) -> Any:
        assert self._path is not None
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        if not data:
            return None
        try:
            return config.create_timing_cache(data)
        except Exception as error:  # the binding's exceptions share no other base
            logger.info("%s cannot be read and is begun anew: %s", self._path.name, error)
            return None
