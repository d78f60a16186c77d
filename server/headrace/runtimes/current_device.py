"""The GPU that is current while an instance works on it, and its errors."""

from __future__ import annotations

import logging
from types import TracebackType

from headrace.core.errors import HeadraceError
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.cuda.driver import (
    DeviceError,
    OutOfDeviceMemory,
    is_context_usable,
    loaded,
    mark_lost,
    primary_context,
)

logger = logging.getLogger("headrace.instance")


class CurrentDevice:
    """Makes the GPU current on a thread; converts errors after which the GPU is unusable to `ExecutionLost`. Stateless.

    Args:
        device: number of the GPU.
        name: file of the model, for messages.
    """

    def __init__(self, device: int, name: str) -> None:
        self._context = primary_context(device)
        self._device = device
        self._name = name

    def __enter__(self) -> None:
        try:
            self._context.push()
        except loaded().Error as error:
            raise self._lost(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error itself is not raised again: its frames form a cycle that would keep streams alive, which must be
        # freed while the GPU is current.
        try:
            if not isinstance(error, Exception) or isinstance(error, OutOfDeviceMemory):
                return
            if not is_context_usable():
                raise self._lost(error) from error
            if isinstance(error, loaded().Error):
                raise DeviceError(f"running {self._name} failed on the GPU: {error}") from error
            if not isinstance(error, HeadraceError):
                self.convert(error)
        finally:
            loaded().Context.pop()

    def _lost(self, error: Exception) -> ExecutionLost:
        """Record that the GPU is lost, and return the error of what runs there."""
        mark_lost(self._device)
        message = f"GPU {self._device} has failed, {self._name} runs there no more"
        logger.error("%s: %s", message, error)
        return ExecutionLost(message)

    def convert(self, error: Exception) -> None:
        """Raise another error in the place of one of the model's runtime, on a GPU that works; by default none."""
