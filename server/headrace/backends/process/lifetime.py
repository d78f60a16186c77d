"""Start, death and restart of processes that run models: pauses, limits, and the reasons of an end."""

from __future__ import annotations

import signal
import subprocess

from headrace.core.errors import ConfigError, Finding

# Pause before the next process, by the number of deaths in a row; and the life time after which a death does not
# count.
PAUSES_S = (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 0.8, 2.0, 4.0, 8.0, 16.0, 30.0)
SETTLED_S = 10.0
# Batches wait for the next process if its pause is at most this long, else they are refused.
MAX_QUEUE_PAUSE_S = 1.0
LOAD_LIMIT_S = 900.0
CLOSE_GRACE_S = 15.0
TAIL_LINES = 100  # enough for a dump of all threads, of which the failing one comes first


def exit_cause(process: subprocess.Popen[bytes], blame: str) -> str:
    """Kill and wait for a process that is of no use any more; return the reason for its end.

    Args:
        process: the process.
        blame: reason why the server killed it, "" if it did not.
    """
    process.kill()
    status = process.wait()
    if blame:
        return blame
    if status >= 0:
        return f"it ended with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"killed by {name}" + (": is there enough memory?" if name == "SIGKILL" else "")


def load_error(name: str, message: str) -> ConfigError:
    """Return the error of a model that cannot be loaded.

    Args:
        name: of the model.
        message: the reason.
    """
    return ConfigError([Finding(name, None, message, "the server's log has more")])
