"""Models of scikit-learn, as `model.skops`, or as a file of joblib or pickle.

Reading a file of joblib or pickle runs code in it, in this process, as a `model.py` does. Files of skops run none: a type that is
not part of scikit-learn is refused unless the parameter `trusted_types` names it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from headrace_model.frameworks import Batch, Tensors, completed
from headrace_model.predict_form import ModelContext

# Names of outputs that are results of another method than `predict`.
_METHODS = {"probabilities": "predict_proba"}
_NO_ESTIMATORS = (
    "sklearn.datasets",
    "sklearn.externals",
    "sklearn.utils._testing",
    "sklearn.conftest",
    "sklearn.tests",
)


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

    def complete(self, config: dict[str, Any], file: str) -> dict[str, Any]:
        """Return a configuration with the tensors of the model, if it has a number of features."""
        model = _read(file, config.get("parameters", {}).get("trusted_types", {}).get("string_value", ""))
        if not hasattr(model, "n_features_in_"):
            return config

        def predict(table: Any) -> Batch:
            if not hasattr(model, "predict"):
                return {"transform": _dense(model.transform(table))}
            results = {"label" if hasattr(model, "classes_") else "prediction": model.predict(table)}
            if hasattr(model, "predict_proba") and not isinstance(model.classes_, list):
                results["probabilities"] = model.predict_proba(table)
            return results

        return completed(config, model.n_features_in_, predict)

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

    named = trusted_types.replace(",", " ").split()
    types = set(skops.io.get_untrusted_types(file=file))
    trusted = {name for name in types if name in named or _is_of_scikit_learn(name)}
    if types - trusted:
        text = " ".join([*named, *sorted(types - trusted)])
        raise ValueError(
            f"the file has types that are not trusted: {' '.join(sorted(types - trusted))}; if your model has them, write "
            f'parameters {{ key: "trusted_types" value {{ string_value: "{text}" }} }} in config.pbtxt'
        )
    return skops.io.load(file, trusted=sorted(trusted))


def _is_of_scikit_learn(name: str) -> bool:
    """Return True for a class that scikit-learn itself defines: modules of it have names of others too, such as `os`.

    Functions are no part of it: a transformer would call them with a client's data. Neither are downloads and test helpers.
    """
    module, _, attribute = name.rpartition(".")
    if not module.startswith("sklearn.") or module.startswith(_NO_ESTIMATORS):
        return False
    try:
        value = getattr(importlib.import_module(module), attribute, None)
    except ImportError:  # of another version of scikit-learn
        return False
    return isinstance(value, type) and value.__module__.startswith("sklearn.")
