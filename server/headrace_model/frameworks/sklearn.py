"""Models of scikit-learn, as `model.skops`, or as a file of joblib or pickle.

Reading a file of joblib or pickle runs code in it, in this process, as a `model.py` does. Files of skops run none: a type that is
not part of scikit-learn is refused unless the parameter `trusted_types` names it.
"""

from __future__ import annotations

import sys
from typing import Any

from headrace_model.frameworks import Batch, Tensors
from headrace_model.own_form import ModelContext

# Names of outputs that are results of another method than `predict`.
_METHODS = {"probabilities": "predict_proba"}


class ScikitLearnModel:
    """An estimator, a pipeline or a transformer.

    An output named after a method of it, such as `predict_proba` or `transform`, is the result of that method; `probabilities` is
    that of `predict_proba`, and every other name that of `predict`.
    """

    def load(self, context: ModelContext) -> None:
        """Read the model's file."""
        self._tensors = Tensors(context.config)
        self._model = _read(context.file, self._tensors.parameter("trusted_types"))
        self._methods = {}
        for name in self._tensors.outputs:
            method = _METHODS.get(name, name if callable(getattr(self._model, name, None)) else "predict")
            if not callable(getattr(self._model, method, None)):
                raise ValueError(f"the output {name} needs {method}, which {type(self._model).__name__} lacks")
            self._methods[name] = method

    def predict(self, batch: Batch) -> Batch:
        """Call each method once."""
        table = self._tensors.table(batch)
        results = {method: getattr(self._model, method)(table) for method in set(self._methods.values())}
        return {name: self._tensors.result(name, _dense(results[method])) for name, method in self._methods.items()}


def _dense(value: Any) -> Any:
    return value.toarray() if hasattr(value, "toarray") else value


def _read(file: str, trusted_types: str) -> Any:
    if not file.endswith(".skops"):
        import joblib

        sys.stderr.write(f"reading {file} runs code in it; skops.io.dump writes files without code\n")
        return joblib.load(file)
    import skops.io

    trusted = trusted_types.replace(",", " ").split()
    unknown = sorted(set(skops.io.get_untrusted_types(file=file)) - set(trusted))
    if unknown:
        raise ValueError(f"the file has types that are not trusted: {' '.join(unknown)}; add them to trusted_types")
    return skops.io.load(file, trusted=trusted)
