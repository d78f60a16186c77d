"""Events that streams and threads wait for, and the question whether a GPU still works."""

from __future__ import annotations

from headrace.cuda.driver import Stream, check, loaded

_SLEEPING = 1  # CU_EVENT_BLOCKING_SYNC
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING: recording costs less


class Signal:
    """A moment in a stream's work that other streams and one thread may wait for; recorded anew for every batch.

    Once made, it raises PyCUDA's own errors: whoever uses it turns those of all that a batch needs into ours together.

    PyCUDA gives the interpreter's lock away while it waits (`event::synchronize` of its C++ sources).

    Args:
        spins: who waits keeps a core busy, and is 15 us earlier on the spot than one who sleeps (measured on an H200).
    """

    def __init__(self, spins: bool = False) -> None:
        with check("making an event"):
            self._event = loaded().Event(_UNTIMED if spins else _UNTIMED | _SLEEPING)

    def record(self, stream: Stream) -> None:
        """Mark the moment when all work queued on the stream so far is done."""
        self._event.record(stream.stream)

    def hold_back(self, stream: Stream) -> None:
        """Let a stream begin what is queued on it from here on only after the moment last recorded."""
        stream.stream.wait_for_event(self._event)

    def wait(self) -> None:
        """Wait until the moment last recorded has come; some of the work before it may have failed."""
        self._event.synchronize()


def works() -> bool:
    """False once the current context has failed for good: after an illegal access, say, every call gives the same error.

    (CUDA driver API, CUDA_ERROR_ILLEGAL_ADDRESS: "the process must be terminated and relaunched".)
    """
    cuda = loaded()
    try:
        cuda.mem_get_info()
    except cuda.Error:
        return False
    return True
