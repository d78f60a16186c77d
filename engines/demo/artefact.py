"""What a recipe hands to the builder, and how it tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.core.errors import HeadraceError

if TYPE_CHECKING:
    import onnx

# Called with the share of the work that is done, 0..1, and a few words on what is being done.
Report = Callable[[float, str], None]


class BuildError(HeadraceError):
    """A demo model cannot be built; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """One built model.

    Attributes:
        model: the graph with its weights.
        weights: where the weights come from: "seeded", "trained", "none" or "sha256:<hex>" of the file they were read from.
        accuracy: share of held-out samples answered right, 0..1, or None where nothing was measured.
        extra_files: files to lay beside the model, by name.
    """

    model: onnx.ModelProto
    weights: str
    accuracy: float | None = None
    extra_files: dict[str, bytes] = field(default_factory=dict)
