"""Model files that have run on this machine, as records in the state folder: any other file runs in a helper process first.

<state>/tried/<key>.json        {"format": 1, "model": ..., "machine": ..., "failure": "", "limit_s": 0}

A server, `headrace validate` and the builder write records. The key of a record is the digest of the file, the library with its
version, the device, and the parameters of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.documents import open_regular_file
from headrace.config.files import remove_oldest, write_durably
from headrace.config.machine import Machine, onnxruntime_version

logger = logging.getLogger("headrace.trials")

_FORMAT = 1
_MAX_BYTES = 1 << 16
# More records than this are removed, the oldest first.
_MAX_RECORDS = 50_000


class TrialOutcome(NamedTuple):
    """Outcome of the first run of a file.

    Attributes:
        failure: how the file ended its process; "" if it runs.
        limit_s: time limit that it exceeded, in seconds; 0 if it did not.
    """

    failure: str = ""
    limit_s: float = 0.0


_RUNS = TrialOutcome()


class TriedFiles:
    """Records in a state folder. Thread-safe: a record is replaced as a whole.

    Args:
        state: the state folder.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state.expanduser() / "tried"
        self._warned = False

    def key(self, digest: str, machine: Machine, parameters: Mapping[str, str]) -> str:
        """Return the key of a record.

        Args:
            digest: SHA-256 of the file, with its external tensors, in hex.
            machine: the library that runs the file, and its device.
            parameters: of the model's configuration.
        """
        library = machine.version if machine.target == "tensorrt" else onnxruntime_version()
        parts = [_FORMAT, digest, machine.target, library, machine.device, machine.driver, sorted(parameters.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, key: str) -> TrialOutcome | None:
        """Return the outcome; None if the file has not run here, or its record is invalid."""
        try:
            with open_regular_file(self._folder / f"{key}.json") as stream:
                record: Any = json.loads(stream.read(_MAX_BYTES))
            return (
                TrialOutcome(str(record["failure"]), float(record["limit_s"])) if record["format"] == _FORMAT else None
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, key: str, model: str, trial: TrialOutcome = _RUNS) -> None:
        """Record an outcome; a write error is logged once.

        Args:
            key: see `key`.
            model: name of the model, for readers of the folder only.
            trial: the outcome; by default the file runs.
        """
        record = {"format": _FORMAT, "model": model, **trial._asdict()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._folder / f"{key}.json", json.dumps(record).encode())
            if key.startswith("00"):  # one write in 256
                remove_oldest(self._folder, _MAX_RECORDS)
        except OSError as error:
            if not self._warned:
                cure = "name a writable folder with --state-dir"
                logger.warning("%s cannot be written: %s (%s)", self._folder, error.strerror, cure)
            self._warned = True
