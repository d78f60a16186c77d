"""Trace files in the layout of Triton's, written by a thread of their own."""

from __future__ import annotations

import json
import logging
import queue
import threading
from dataclasses import dataclass
from io import FileIO

from headrace.observability.tally import DROPPED

logger = logging.getLogger("headrace.trace")

_QUEUE_RECORDS = 4096
# A new file costs a block of the file system, however small it is.
_FILE_BYTES = 4096
MAX_BYTES = 1 << 30
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One traced request.

    Attributes:
        number: of the trace, from 1.
        model: the model's name.
        version: of the model.
        request_id: the caller's own, "" if there is none.
        events: name and monotonic nanoseconds of each station, in order.
        log_frequency: traces in an indexed file, 0 for the one file without an index.
    """

    number: int
    model: str
    version: str
    request_id: str
    events: tuple[tuple[str, int], ...]
    log_frequency: int


class TraceWriter:
    """Writes records to `path`, or to `path`.0, `path`.1, ... where they carry a `log_frequency`.

    Each file is a JSON array (Triton's documentation, "JSON Trace Output") and is valid after every record: the closing bracket
    is written with it and overwritten by the next. An indexed file ends when it holds `log_frequency` traces of the record
    written last; unlike Triton's, traces of models with different frequencies share the files.

    `put` and `close` are called by one thread, the event loop; the records pass to the writer's thread through the queue.

    Args:
        path: where the operator wants the traces; existing files are overwritten.
        max_bytes: in all files together; the writer stops there, so that no client can fill the disk.

    Attributes:
        dropped: records lost because the queue was full.
        failed: the writer cannot write any more; the log says why.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.dropped = 0
        DROPPED.declare("traces")
        self.failed = False
        self._path = path
        self._left_bytes = max_bytes
        self._queue: queue.Queue[TraceRecord | None] = queue.Queue(_QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        self._single: _JsonArray | None = None
        self._indexed: _JsonArray | None = None
        self._index = 0

    def put(self, record: TraceRecord) -> None:
        """Hand over a record; drops and counts it if the writer is behind or has failed."""
        if self._thread is None:
            # A daemon: a disk that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="headrace-traces", daemon=True)
            self._thread.start()
        try:
            if self.failed:
                raise queue.Full
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            DROPPED.count("traces")

    def close(self) -> None:
        """Write what waits and close the files; waits at most ten seconds for a slow disk. No `put` may follow."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            self.failed = True
        else:
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the trace writer is stuck, traces are lost")
        if self.dropped:
            logger.warning("%d traces were dropped: they came faster than they could be written", self.dropped)

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._write(record)
                if self._left_bytes <= 0:
                    self.failed = True
                    logger.error("the trace files have reached their limit: tracing stops")
                    break
        except OSError as error:
            self.failed = True
            logger.error("tracing stops, --trace-file %s cannot be written: %s", self._path, error.strerror)
        except Exception:
            self.failed = True
            logger.exception("tracing stops, the trace writer has died")
        finally:
            for file in (self._single, self._indexed):
                if file is not None:
                    file.close()
            # Nobody reads any more: `close` must find room.
            while self.failed and not self._queue.empty():
                self._queue.get_nowait()

    def _write(self, record: TraceRecord) -> None:
        if record.log_frequency == 0:
            if self._single is None:
                self._single = self._open(self._path)
            self._left_bytes -= self._single.append(record)
            return
        if self._indexed is None:
            self._indexed = self._open(f"{self._path}.{self._index}")
            self._index += 1
        self._left_bytes -= self._indexed.append(record)
        if self._indexed.records >= record.log_frequency:
            self._indexed.close()
            self._indexed = None

    def _open(self, path: str) -> _JsonArray:
        self._left_bytes -= _FILE_BYTES
        return _JsonArray(path)


class _JsonArray:
    """A file with a JSON array that records are appended to."""

    def __init__(self, path: str) -> None:
        self._file = FileIO(path, "w")
        self._file.write(b"[\n]")
        self.records = 0

    def append(self, record: TraceRecord) -> int:
        """Write one record; how many bytes that were."""
        text = (",\n" if self.records else "\n") + _to_triton(record) + "\n]"
        data = text.encode("ascii")
        self._file.seek(-2, 2)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self.records += 1
        return len(data)

    def close(self) -> None:
        self._file.close()


def _to_triton(record: TraceRecord) -> str:
    """The two objects of one trace, a line each: what was traced, and when it was where."""
    about: dict[str, object] = {
        "id": record.number,
        "model_name": record.model,
        "model_version": int(record.version) if record.version.isdecimal() else record.version,
    }
    if record.request_id:
        about["request_id"] = record.request_id
    stations = [{"name": name, "ns": ns} for name, ns in record.events]
    return json.dumps(about) + ",\n" + json.dumps({"id": record.number, "timestamps": stations})
