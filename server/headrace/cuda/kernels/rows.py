"""Rows from wherever a GPU reads them into one batch.

A launch allocates nothing and waits for nothing, so that it may be captured in a CUDA graph.
"""

from __future__ import annotations

from headrace.cuda.driver import Stream
from headrace.cuda.kernels.loading import Kernels

# Few and large blocks keep the bus busy from few of the GPU's multiprocessors, and leave room there for others: a PCIe bus of
# 54 GB/s and some 1.5 us wants 80 KB under way, 8 blocks have 256 KB.
_THREADS = 512


class RowGather:
    """Rows from anywhere in GPUs' and pinned memory into one batch, padded with copies of the last row; see `reference.gather`.

    Args:
        device: its ordinal.

    Raises:
        Unsupported, DeviceError: as for `Kernels`.
    """

    def __init__(self, device: int) -> None:
        self._kernels = Kernels(device, "rows.cu", {}, {"gather": "PPPii"})

    def launch(
        self,
        stream: Stream,
        addresses: int,
        row_bytes: int,
        rows: int,
        total: int,
        destination: int,
        blocks: int,
    ) -> None:
        """Queue the work of a batch.

        Args:
            stream: on which.
            addresses: address, on the GPU or of pinned memory, of uint64 (rows,): where each row is.
            row_bytes: of one row, at least 1.
            rows: at least 1.
            total: rows of the result, at least `rows`.
            destination: address of the result, total * row_bytes.
            blocks: of threads, that is multiprocessors that it takes from others; 8 fill a PCIe bus.

        Raises:
            DeviceError: the driver refuses.
        """
        self._kernels.launch("gather", (blocks, 1), _THREADS, stream, addresses, destination, row_bytes, rows, total)

    def close(self) -> None:
        """Unload it; all work must be done."""
        self._kernels.close()
