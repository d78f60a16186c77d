"""CUDA graphs: work recorded once from a stream and replayed by a single call.

PyCUDA has no graphs, so this file calls the driver's library itself (CUDA driver API, "Stream Management", "Graph Management";
cuGraphInstantiateWithFlags needs CUDA 11.4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from headrace.cuda import driver
from headrace.cuda.driver import CudaStream, succeeded

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do in the meantime does not spoil the capture.
_THREAD_LOCAL = 1


class CudaGraph:
    """Work of a stream, ready to be replayed. Made and used with the stream's device current.

    Args:
        stream: where the work is recorded and replayed.
        enqueue: queues the work on that stream and does nothing else: no allocation, no waiting.

    Raises:
        DeviceError: the work cannot be captured.
    """

    def __init__(self, stream: CudaStream, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(stream.handle)
        self._executable = ctypes.c_void_p()
        library = driver.library()
        succeeded(library.cuStreamBeginCapture_v2(self._stream, _THREAD_LOCAL), "starting to capture a CUDA graph")
        graph = ctypes.c_void_p()
        try:
            enqueue()
        except BaseException:
            # The stream must come out of capturing, whatever has become of the graph.
            library.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            if graph:
                library.cuGraphDestroy(graph)
            raise
        succeeded(library.cuStreamEndCapture(self._stream, ctypes.byref(graph)), "capturing a CUDA graph")
        try:
            executable = ctypes.byref(self._executable)
            flags = ctypes.c_ulonglong(0)
            succeeded(library.cuGraphInstantiateWithFlags(executable, graph, flags), "instantiating a CUDA graph")
        finally:
            library.cuGraphDestroy(graph)
        try:
            # Else the first launch would pay for it.
            succeeded(library.cuGraphUpload(self._executable, self._stream), "uploading a CUDA graph")
        except BaseException:
            self.close()
            raise
        self._launch = library.cuGraphLaunch

    def launch(self) -> None:
        """Queue the work once more.

        Raises:
            DeviceError: the driver refuses it.
        """
        result = self._launch(self._executable, self._stream)
        if result:
            succeeded(result, "launching a CUDA graph")

    def close(self) -> None:
        """Give the graph back; its work must be done."""
        executable, self._executable = self._executable, ctypes.c_void_p()
        if executable:
            driver.library().cuGraphExecDestroy(executable)
