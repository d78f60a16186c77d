"""Finds the model in a `model.py`: Triton's class TritonPythonModel, or Headrace's own form."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from headrace_model import predict_form, python_backend
from headrace_model.auto_complete import AutoCompleteConfig

_TRITON_CLASS = "TritonPythonModel"


class Refused(Exception):
    """The file has no model that can be served.

    Args:
        message: description for the finding.
        cure: the correction to make.
        line: line in the file, if there is one.
    """

    def __init__(self, message: str, cure: str = "", line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure
        self.line = line


class TritonForm:
    """A model with Triton's class TritonPythonModel.

    Args:
        model_class: the class.

    Attributes:
        name: name of the form.
        by_request: True: `execute` gets request objects; False: `predict` gets the arrays of the batch.
    """

    name = "triton"
    by_request = True

    def __init__(self, model_class: type) -> None:
        self._class = model_class
        self._model: Any = None
        self._execute: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Call `auto_complete_config` of the class, if it has one.

        Args:
            config: configuration of the file in Triton's JSON form.

        Returns:
            The completed configuration.

        Raises:
            Exception: the method raised it.
            Refused: it returned something else than its argument.
        """
        complete = getattr(self._class, "auto_complete_config", None)
        if complete is None:
            return config
        result = complete(AutoCompleteConfig(config))
        if not isinstance(result, AutoCompleteConfig):
            raise Refused(f"auto_complete_config returned {type(result).__name__}", "return its argument")
        return result.as_dict()

    def initialize(self, args: dict[str, str]) -> None:
        """Create the model and call its `initialize`, if it has one."""
        self._model = self._class()
        initialize = getattr(self._model, "initialize", None)
        if initialize is not None:
            initialize(args)
        self._execute = self._model.execute
        if inspect.iscoroutinefunction(self._execute):
            self._loop = asyncio.new_event_loop()
            self._execute = self._execute_async

    def execute(self, requests: list[Any]) -> Any:
        """Run a batch; returns the list of responses of the model's `execute`."""
        return self._execute(requests)

    def _execute_async(self, requests: list[Any]) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(self._model.execute(requests))

    @property
    def has_probe(self) -> bool:
        """True if the model has `is_ready` or `is_model_ready`."""
        return self._probe is not None

    @property
    def _probe(self) -> Any:
        return getattr(self._model, "is_ready", None) or getattr(self._model, "is_model_ready", None)

    def is_ready(self) -> bool:
        """Return the result of the model's `is_ready` or `is_model_ready`, which may be coroutines; True without either."""
        return predict_form.probe_result(self._probe)

    def finalize(self) -> None:
        """Call `finalize` of the model, if it has one."""
        finalize = getattr(self._model, "finalize", None)
        try:
            if finalize is not None:
                finalize()
        finally:
            python_backend.runtime.metrics.flush()
            if self._loop is not None:
                self._loop.close()


def find_form(module: Any, file: Any) -> Any:
    """Return the model of a module: a `TritonForm` or a `predict_form.PredictForm`.

    Args:
        module: the imported file.
        file: its path.

    Raises:
        Refused: it has no model, or several.
    """
    triton = getattr(module, _TRITON_CLASS, None)
    if triton is not None:  # the documented name: helper classes of any form may stand beside it
        if not callable(getattr(triton, "execute", None)):
            raise Refused(f"{_TRITON_CLASS} has no method execute", "add def execute(self, requests)")
        return TritonForm(triton)
    own = predict_form.own_models(module)
    if len(own) == 1:
        target = own[0][1]
        return predict_form.PredictForm(target() if isinstance(target, type) else target, str(file))
    if not own:
        raise Refused(
            "has no model",
            f"write a class {_TRITON_CLASS} with execute, a class with predict, or a function with the decorator "
            "headrace_model.model",
        )
    names = [name for name, _target, _line in own]
    line = next((line for _name, _target, line in own if line is not None), None)
    raise Refused(f"has {len(names)} models: {', '.join(names)}", "keep one of them", line)
