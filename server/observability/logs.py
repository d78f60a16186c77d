"""Log lines as JSON, one object a line."""

from __future__ import annotations

import json
import logging


class JsonFormatter(logging.Formatter):
    """time (seconds since 1970), level, logger, message, and the traceback where there is one.

    JSON's own escaping keeps control characters of a client's text from forging lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
