"""What `headrace inspect --publish` leaves beside a model: how long each layer of what serves it takes.

<model>/<version>/layers.json          what `headrace_engines.inspection.EngineInspection.to_json` gives

Who serves the version shows it; nothing is decided by it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from headrace.config.digests import shown_file
from headrace.config.document import refuse
from headrace.config.machine import Machine

LAYERS_FILE = "layers.json"
FORMAT = 1
# A layer takes some 300 bytes; a file larger than this is something else.
MAX_BYTES = 4 << 20

_CURE = "write it anew with `headrace inspect MODEL --publish`, or remove the file"
_Time = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One step of an engine; see `headrace_engines.targets.base.Layer`."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    precision: str
    tactic: str
    time_us: _Time
    share: _Time


@dataclass(frozen=True, slots=True)
class LayerReport:
    """An engine and what it consists of; see `headrace_engines.inspection.EngineInspection`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    model: str
    version: int
    artefact: str
    precision: str
    machine: Machine
    reason: str
    shapes: dict[str, tuple[int, ...]]
    rows: Annotated[int, Field(ge=0)]
    median_us: _Time
    p99_us: _Time
    rows_per_s: _Time
    total_us: _Time
    layers: tuple[LayerTime, ...]

    def to_json(self) -> dict[str, Any]:
        """What a client is shown; the machine in words."""
        return asdict(self) | {"machine": str(self.machine)}


def read_layers(folder: Path) -> LayerReport | None:
    """The report in a version's folder, None if there is none.

    Raises:
        ConfigError: the file cannot be read, or is no such report.
    """
    path = folder / LAYERS_FILE
    shown = shown_file(path)
    try:
        # A link is not followed, and a pipe not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise refuse(shown, None, "is no file", _CURE)
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refuse(shown, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    if len(content) > MAX_BYTES:
        raise refuse(shown, None, f"is larger than {MAX_BYTES} bytes", _CURE)
    try:
        return _adapter().validate_json(content)
    except ValidationError as error:
        place = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))[:80]
        raise refuse(shown, None, f"is no report of layers ({place or 'JSON'})", _CURE) from None


@cache
def _adapter() -> TypeAdapter[LayerReport]:
    return TypeAdapter(LayerReport)
