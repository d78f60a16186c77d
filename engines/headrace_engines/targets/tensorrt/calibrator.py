"""TensorRT 10's own INT8 calibrator, fed from rows in memory; its table is kept in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.cuda.driver import CudaStream
from headrace.cuda.memory import DeviceBuffer, PinnedBuffer, upload

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report
from headrace_engines.targets.tensorrt.api import write_atomically

Array = npt.NDArray[Any]


# First word of a table, e.g. "TRT-100600-EntropyCalibration2".
_TABLE_START = b"TRT-"


def even_batches(rows: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Batches of one and the same shape, as a calibrator needs them: those of the first batch's shape.

    Raises:
        BuildError: there are none.
    """
    if not rows:
        raise BuildError("TensorRT's calibrator needs samples: write optimization.calibration.data")
    shapes = {name: values.shape for name, values in rows[0].items()}
    return [dict(batch) for batch in rows if {name: values.shape for name, values in batch.items()} == shapes]


class CalibrationFeed:
    """Batches and table of a calibrator. Needs a current device; owns one GPU buffer for each input until `close`.

    TensorRT calls from inside of the build, where no exception can pass: an error is stored in `raised` and ends the
    calibration.

    Attributes:
        batch_size: rows of a batch.
        raised: what went wrong, None if nothing did.
    """

    def __init__(self, batches: Sequence[Mapping[str, Array]], table: Path | None, report: Report) -> None:
        self._batches = batches
        self._table = table
        self._report = report
        self._next = 0
        self._stream = CudaStream()
        self._buffers = {name: (DeviceBuffer(), PinnedBuffer()) for name in batches[0]}
        first = next(iter(batches[0].values()))
        self.batch_size = int(first.shape[0]) if first.ndim else 1
        self.raised: BaseException | None = None

    def next_batch(self, names: Sequence[str]) -> list[int] | None:
        """Addresses of the next batch on the GPU in the order of `names`, None when there are no more."""
        if self.raised is not None or self._next == len(self._batches):
            return None
        try:
            self._report(self._next / len(self._batches), "calibrating")
            batch = self._batches[self._next]
            missing = [name for name in names if name not in batch]
            if missing:
                raise BuildError(f"the calibration samples lack the inputs {', '.join(missing)}")
            for name in names:
                self._send(name, np.ascontiguousarray(batch[name]))
            self._stream.synchronize()
        except BaseException as error:
            self.raised = error
            return None
        self._next += 1
        return [self._buffers[name][0].address for name in names]

    def read_table(self) -> bytes | None:
        """The table of an earlier calibration; None if there is none, or the file is no table."""
        if self._table is None:
            return None
        try:
            data = self._table.read_bytes()
        except OSError:
            return None
        return data if data.startswith(_TABLE_START) else None

    def write_table(self, table: bytes) -> None:
        """Keep a table."""
        if self._table is not None and self.raised is None:
            try:
                write_atomically(self._table, table)
            except BuildError as error:
                self.raised = error

    def close(self) -> None:
        """Give the buffers back."""
        for device, pinned in self._buffers.values():
            device.free()
            pinned.free()

    def _send(self, name: str, values: Array) -> None:
        device, pinned = self._buffers[name]
        device.reserve(values.nbytes)
        pinned.reserve(values.nbytes)
        staged = pinned.view(values.shape, values.dtype)
        np.copyto(staged, values)
        upload(device, staged, self._stream)


def entropy_calibrator(trt: Any, feed: CalibrationFeed) -> Any:
    """The IInt8EntropyCalibrator2 that TensorRT is handed."""

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)

        def get_batch_size(self) -> int:
            return feed.batch_size

        def get_batch(self, names: Sequence[str]) -> list[int] | None:
            return feed.next_batch(names)

        def read_calibration_cache(self) -> bytes | None:
            return feed.read_table()

        def write_calibration_cache(self, cache: Any) -> None:
            feed.write_table(bytes(cache))

    return Calibrator()
