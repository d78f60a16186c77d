"""Settings of a part: model, machine, duration and number of clients; passed as JSON to the part's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Images in a request over the wire.
REQUEST_ROWS = 8
CLASSES = 5


@dataclass(frozen=True, slots=True)
class Setup:
    """One part of one run.

    Attributes:
        backend: "tensorrt", or "onnxruntime" to try the bench itself without a GPU.
        model: "resnet50", "small": a model of a few hundred weights, to try the bench itself; "mlp" for `table`.
        work: a folder for models, logs and the store of engines.
        precision: of the engine.
        seconds: of one sample.
        rounds: how often each contender is measured.
        instances: of the model on each GPU, where the part does not vary it.
        in_flight: images that callers keep under way at saturation.
        clients: client processes.
        gpus: the numbers of those that the part may use.
        precisions: of the engines to prepare.
        front_ends: modes of `table` and `two_gpus`: "default", or values of --front-ends.
        cells: texts, one of which a cell's name contains; empty for all.
        more_clients: processes beyond those of a cell with many callers.
        limit_s: time of the part.
    """

    backend: str
    model: str
    work: str
    precision: str
    seconds: float
    rounds: int
    instances: int
    in_flight: int
    clients: int
    gpus: tuple[int, ...] = (0,)
    precisions: tuple[str, ...] = ()
    front_ends: tuple[str, ...] = ("auto", "0")
    cells: tuple[str, ...] = ()
    more_clients: int = 0
    limit_s: float = 600.0

    @property
    def on_gpu(self) -> bool:
        """False where the bench itself is tried on a CPU."""
        return self.backend == "tensorrt"

    @property
    def small(self) -> bool:
        """True where the bench itself is tried."""
        return self.model == "small"

    @property
    def judged(self) -> bool:
        """True if figures are compared with targets."""
        return self.on_gpu and not self.small

    @property
    def repository(self) -> Path:
        """The bench's own model repository."""
        return Path(self.work) / "models"

    @property
    def scratch(self) -> Path:
        """For logs of servers and clients; made here."""
        folder = Path(self.work) / "scratch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def side(self) -> int:
        """Pixels of a picture's side."""
        return 32 if self.small else 224

    @property
    def dims(self) -> tuple[int, ...]:
        """Sizes of a row of the input."""
        return (784,) if self.model == "mlp" else (3, self.side, self.side)

    @property
    def max_rows(self) -> int:
        """Images in the largest batch."""
        return 16 if self.small else 256

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes at which the raw engine is timed."""
        return tuple(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= self.max_rows)

    def to_json(self) -> str:
        """For the command line of a part."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """Read the result of `to_json`."""
        document = json.loads(text)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
        }
        return cls(**fields)
