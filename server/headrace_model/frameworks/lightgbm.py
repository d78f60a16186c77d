"""Models of LightGBM: `model.txt`, as `save_model` writes it."""

from __future__ import annotations

from typing import Any

from headrace_model.frameworks import Batch, Tensors, completed
from headrace_model.predict_form import ModelContext

# Names of outputs that are not the prediction.
_OPTIONS: dict[str, Any] = {
    "margin": {"raw_score": True},
    "leaf": {"pred_leaf": True},
    "contributions": {"pred_contrib": True},
}


class LightGbmModel:
    """A booster. Outputs named `margin`, `leaf` and `contributions` are those; every other name is the prediction."""

    def load(self, context: ModelContext) -> None:
        """Read the model's file."""
        import lightgbm

        self._tensors = Tensors(context.config)
        self._booster = lightgbm.Booster(model_file=context.file)
        self._threads: dict[str, Any] = {"num_threads": self._tensors.threads} if self._tensors.threads else {}

    def complete(self, config: dict[str, Any], file: str) -> dict[str, Any]:
        """Return a configuration with the tensors of the model."""
        import lightgbm

        booster = lightgbm.Booster(model_file=file)
        return completed(config, booster.num_feature(), lambda table: {"prediction": booster.predict(table)})

    def predict(self, batch: Batch) -> Batch:
        """Predict each output."""
        table = self._tensors.table(batch)
        return {
            name: self._tensors.result(name, self._booster.predict(table, **self._threads, **_OPTIONS.get(name, {})))
            for name in self._tensors.outputs
        }
