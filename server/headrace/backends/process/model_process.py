"""The child process of an isolated model, which runs all its instances."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from headrace_model.channel import Frames
from headrace_model.protocol import SHARE
from headrace_model.slots import Slot

from headrace.backends.process.admission import BatchAdmission
from headrace.core.errors import ConfigError
from headrace.core.ledger import Holding, NoRoom
from headrace.processes.child_process import ChildProcess, Message
from headrace.processes.supervisor import ProcessSupervisor, load_error

logger = logging.getLogger("headrace.isolated")

COMMAND = (sys.executable, "-P", "-m", "headrace.backends.process.child")


class IsolatedProcess:
    """One process, and the sockets of its batches; see `headrace.processes.supervisor.SupervisedConnection`.

    Attributes:
        child: the process.
        instances: socket of the batches of each instance.
    """

    def __init__(self, child: ChildProcess, ends: Sequence[socket.socket]) -> None:
        self.child = child
        self.instances = [Frames(end) for end in ends]

    def shut(self) -> None:
        """End the sending side of the sockets, so that the process ends itself after its last answers."""
        self._shut(socket.SHUT_WR)

    def release(self) -> None:
        """End both directions: a process that the dead one has started may hold its sockets open."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, directions: int) -> None:
        for end in (*(frames.end for frames in self.instances), self.child.control.end):
            with suppress(OSError):  # the other end has closed already
                end.shutdown(directions)


class ModelProcess(ProcessSupervisor[IsolatedProcess]):
    """Runs one version of a model in a child process, and replaces the process when it dies.

    Args:
        name: of the model, for logs and messages.
        order: load request for the child.
        instances: number of executions that run at the same time.
        limit_s: seconds that a batch may take before the process counts as hanging.
        slot_bytes: initial shared memory for a batch.
        spare_slots: further slots of each execution, for outputs that are lent to callers.

    Attributes:
        limit_s, spare_slots: see above.
        admission: decides which batches enter the process.
        tensors: by "inputs" and "outputs", name, dtype and shape of the file's tensors; empty if the backend does not
            read them.
        ranges: smallest and largest shape by input, for each range of shapes that the file supports; empty without bounds.
        slots: by instance, the shared memory slots for its batches.
        held: GPU memory that the process has booked.
    """

    def __init__(
        self, name: str, order: Message, instances: int, limit_s: float, slot_bytes: int, spare_slots: int = 0
    ) -> None:
        self.admission: BatchAdmission[IsolatedProcess] = BatchAdmission()
        super().__init__(name, name, name, COMMAND, order, order["memory_bytes"], self.admission, logger)
        self.tensors: dict[str, list[tuple[str, str, list[int]]]] = {}
        self.ranges: list[dict[str, list[list[int]]]] = []
        self.slots: list[list[Slot]] = []
        self.held: list[Holding] = []
        self.limit_s = limit_s
        self.spare_slots = spare_slots
        self._instances = instances
        self._slot_bytes = slot_bytes

    def load(self) -> None:
        """Start the process and wait until it has loaded the model; raises ConfigError if it cannot."""
        self.start()
        try:
            self.wait_loaded()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and wait until it is gone. All batches have left before."""
        super().close()
        self.slots = []

    # On the supervisor's thread

    def _kinds(self) -> Sequence[socket.SocketKind]:
        return [socket.SOCK_SEQPACKET] * self._instances

    def _connect(self, child: ChildProcess, ends: list[socket.socket]) -> IsolatedProcess:
        return IsolatedProcess(child, ends)

    def _accept(self, connection: IsolatedProcess, answer: Message) -> ConfigError | None:
        if "no_room" in answer:
            return NoRoom(*answer["no_room"])
        if "loaded" not in answer:
            return load_error(self.name, f"could not be loaded ({answer.get('broken')})")
        depths = [depth + self.spare_slots for depth in answer["loaded"]]
        if not self.slots:
            self.tensors, self.ranges = answer["tensors"], answer["ranges"]
            self.held = [Holding(*holding) for holding in answer["held"]]
            label = f"headrace {self.name}"
            self.slots = [[Slot.create(label, self._slot_bytes) for _ in range(depth)] for depth in depths]
        if depths != [len(slots) for slots in self.slots]:
            return load_error(self.name, "its file runs otherwise than before")
        try:
            for frames, slots in zip(connection.instances, self.slots, strict=True):
                frames.share(SHARE, 0, [slot.fd for slot in slots])
        except OSError:
            self._reap(connection.child)
            return load_error(self.name, f"its process died at its start: {connection.child.cause}")
        return None

    def _handle(self, connection: IsolatedProcess, message: Message) -> None:
        name, level, text = message["log"]
        logging.getLogger(name).log(level, "%s", text)

    def _log_line(self, connection: IsolatedProcess, text: str) -> None:
        logger.debug("%d: %s", connection.child.process.pid, text)
