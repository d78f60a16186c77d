"""What a recipe hands to the builder, and how it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


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
