"""Models of XGBoost: `model.json` or `model.ubj`, as `save_model` writes them."""

from __future__ import annotations

from typing import Any

from headrace_model.frameworks import Batch, Tensors, completed
from headrace_model.predict_form import ModelContext

# Names of outputs that are not the prediction.
_OPTIONS = {
    "margin": {"output_margin": True},
    "leaf": {"pred_leaf": True},
    "contributions": {"pred_contribs": True},
}


class XGBoostModel:
    """A booster. Outputs named `margin`, `leaf` and `contributions` are those; every other name is the prediction."""

    def load(self, context: ModelContext) -> None:
        """Read the model's file."""
        import xgboost

        self._tensors = Tensors(context.config)
        self._matrix = xgboost.DMatrix
        self._booster = xgboost.Booster(model_file=context.file)
        if self._tensors.threads:
            self._booster.set_param({"nthread": self._tensors.threads})

    def complete(self, config: dict[str, Any], file: str) -> dict[str, Any]:
        """Return a configuration with the tensors of the model."""
        import xgboost

        booster = xgboost.Booster(model_file=file)
        return completed(config, booster.num_features(), lambda table: {"prediction": booster.inplace_predict(table)})

    def predict(self, batch: Batch) -> Batch:
        """Predict each output; plain predictions need no matrix of XGBoost's."""
        table, result, matrix = self._tensors.table(batch), {}, None
        for name in self._tensors.outputs:
            if name not in _OPTIONS:
                value = self._booster.inplace_predict(table, validate_features=False)
            else:
                matrix = self._matrix(table) if matrix is None else matrix
                value = self._booster.predict(matrix, validate_features=False, **_OPTIONS[name])
            result[name] = self._tensors.result(name, value)
        return result
