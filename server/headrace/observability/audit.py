"""Audit log: one line for every control call, with its own logger name and, in JSON, its own fields."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

from headrace.observability.logs import AUDIT_LOGGER, FIELDS

# Clients choose targets. Names of models and regions are not longer.
_MAX_TARGET_CHARS = 255


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One control call.

    Attributes:
        operation: such as "load model".
        target: model, region or file; "" for none. The line has its first 255 characters.
        client: name of the key; "" for an anonymous caller.
        peer: address of the caller; "" for the server itself.
        protocol: "http", "grpc", or "file" for a reload of the keys file.
        result: "ok", or the reason of the error in one word.
    """

    operation: str
    target: str = ""
    client: str = ""
    peer: str = ""
    protocol: str = ""
    result: str = "ok"


class AuditLog:
    """Writes audit records to the log. Log settings of clients do not silence it (`LogSettings`)."""

    def __init__(self) -> None:
        self._logger = logging.getLogger(AUDIT_LOGGER)

    def write(self, record: AuditRecord) -> None:
        """Write one line: INFO for a success, WARNING for a failure."""
        record = replace(record, target=record.target[:_MAX_TARGET_CHARS])
        level = logging.INFO if record.result == "ok" else logging.WARNING
        if record.protocol == "file":
            caller = "the server"
        else:
            source = f" from {record.peer}" if record.peer else ""
            caller = f"{record.client or 'an anonymous client'}{source} over {record.protocol}"
        target = f" {record.target}" if record.target else ""
        fields = {name: value for name, value in asdict(record).items() if value}
        self._logger.log(
            level,
            "audit: %s%s by %s: %s",
            *(record.operation, target, caller, record.result),
            extra={FIELDS: fields},
        )


AUDIT = AuditLog()
