"""Responses of one request of a decoupled model, on their way from the model to the protocol; docs/decisions/0040.

The request's completion is settled once, at its end: with a response without outputs if it ended well, else with the error. All
responses were sent before that.

    model's thread   send(response), send(response), ...     completion.settle(end)
    event loop       take() -> response, consumed(1), ...    completion is woken, take() -> None
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.core.completion import Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse

MAX_RESPONSES = 64
"""Responses of one request that are in the server and that its reader has not consumed; the model's `send` blocks above that."""
MAX_RESPONSE_BYTES = 4 << 20
"""Bytes of these responses; a response that is larger by itself passes alone."""


class ResponseStream:
    """Responses of one request in the order in which the model sent them.

    Ownership: `send` from any thread, one at a time; all other methods on the event loop.

    Args:
        mailbox: of the event loop of the reader.

    Attributes:
        on_consumed: called with a number of consumed responses and their bytes, so that the model may send more; set by the
            sender before the first `send`. None: the sender has no bound.
        sent: number of responses that were sent.
    """

    __slots__ = ("_arrived", "_callback", "_is_posted", "_mailbox", "_sizes", "on_consumed", "sent")

    def __init__(self, mailbox: Mailbox) -> None:
        self.on_consumed: Callable[[int, int], object] | None = None
        self.sent = 0
        self._mailbox = mailbox
        self._arrived: deque[InferResponse | HeadraceError] = deque()
        self._sizes: deque[int] = deque()  # of the responses that are not consumed, in order
        self._callback: Callable[[], object] | None = None
        self._is_posted = False

    def send(self, response: InferResponse | HeadraceError, size_bytes: int = 0) -> None:
        """Append a response and wake the reader; any thread. After the end of the request it has no effect for the caller.

        Args:
            response: the response; or an error in place of one, after which others may follow.
            size_bytes: its memory, which `on_consumed` returns.
        """
        self._sizes.append(size_bytes)
        self._arrived.append(response)
        self.sent += 1
        if not self._is_posted:  # raised before the post and lowered before the callback, as `Mailbox.is_armed`
            self._is_posted = True
            self._mailbox.post((self,))

    def then(self, callback: Callable[[], object]) -> None:
        """Set a callback for new responses, in place of an earlier one. It must not raise, and takes all that `take` returns.

        The callback never runs within `then`: responses that are there already are taken before it returns.
        """
        self._callback = callback

    def wake(self) -> None:
        """Run the callback; called by the mailbox."""
        self._is_posted = False
        if self._callback is not None:
            self._callback()

    def close(self) -> None:
        """Drop the responses that wait, and the callback, which refers to the reader: without it they are a reference cycle."""
        self._callback = None
        self._arrived.clear()

    def take(self) -> InferResponse | HeadraceError | None:
        """Return the next response; None if there is none now. The request has ended if its completion is woken, too."""
        return self._arrived.popleft() if self._arrived else None

    @property
    def is_empty(self) -> bool:
        """True if `take` has no response now."""
        return not self._arrived

    def consumed(self, count: int = 1) -> None:
        """Let the model send more, in place of the `count` oldest responses from `take` that are written or dropped."""
        size_bytes = sum([self._sizes.popleft() for _ in range(count)])
        on_consumed = self.on_consumed  # another thread removes it at the end of the request
        if on_consumed is not None:
            on_consumed(count, size_bytes)
