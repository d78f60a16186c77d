"""Headrace, an inference server. `Server` embeds it in a Python program, without sockets.

Everything here is imported on first use: `import headrace` alone costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.errors import (
        BadRequest,
        ConfigError,
        DeadlineExceeded,
        HeadraceError,
        NotFound,
        Overloaded,
        Unavailable,
    )
    from headrace.server.embedding import Model, Server

__all__ = [
    "BadRequest",
    "ConfigError",
    "DeadlineExceeded",
    "HeadraceError",
    "Model",
    "NotFound",
    "Overloaded",
    "Server",
    "Unavailable",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    if name in ("Model", "Server"):
        from headrace.server import embedding as module
    else:
        from headrace.core import errors as module  # type: ignore[no-redef]
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
