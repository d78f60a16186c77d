"""Fields of the schema whose feature does not exist yet. `headrace.config.completion.screen` refuses them by name.

One block a feature. To turn a feature on, delete its block here, and its rows in
`headrace.core.model_config.OTHER_BACKENDS` if it has any.
"""

from __future__ import annotations

PENDING_CURES: dict[str, str] = {}
"""Pattern of a field -> cure."""
PENDING_FEATURES: dict[str, str] = {}
"""Pattern of a field -> the feature, for the message."""


def _refuse(pattern: str, feature: str, cure: str) -> None:
    PENDING_CURES[pattern] = cure
    PENDING_FEATURES[pattern] = feature
