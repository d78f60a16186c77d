"""The contract between the data plane and whatever runs a model, on one screen.

    Backend.load(file, ...) -> LoadedModel        once a version; raises ConfigError if the file cannot be served
    LoadedModel.execution(i) -> Execution         once an instance
    Execution.run(inputs) -> outputs              from the instance's own thread only, one call at a time

Ownership: the arrays given to `run` belong to the caller again when it returns; those that come back belong to the caller and
share no memory with the inputs. `run` may block; it must not keep the interpreter's lock while it computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from server.core.errors import BadRequest
from server.core.tensor import Array


class InputRefused(BadRequest):
    """The model itself found the values wrong (an index out of range, text that is not UTF-8): the caller's fault."""


class Execution(Protocol):
    """One instance's way to run the model."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs of the model by name for checked inputs.

        Raises:
            InputRefused: the values cannot be processed.
            Exception: anything else is the model's failure.
        """

    def close(self) -> None:
        """Give back what the execution holds; called once, from the instance's thread."""


class LoadedModel(Protocol):
    """One version of a model in memory."""

    def execution(self, index: int) -> Execution:
        """The execution of instance `index`."""

    def close(self) -> None:
        """Give back everything; called once, after all executions are closed."""


class Backend(Protocol):
    """A library that runs models."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> LoadedModel:
        """Read a model file.

        Args:
            file: the model.
            instances: how many executions will be asked for.
            parameters: of the model's configuration.

        Raises:
            ConfigError: the file or the parameters cannot be used; says why.
        """
